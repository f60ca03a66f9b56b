"""What an NNX module is besides its arrays: classes, ties, and attributes such as functions."""

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from funcgrad._trees import is_key

_ARRAYS = np.ndarray | jax.Array


def attributes(model: Any) -> dict[str, Any]:
    """By path: the class of a module or variable, else the value; arrays are left out."""
    from flax import nnx

    found = {}
    for path, part in nnx.iter_graph(model):
        if any(str(key).startswith("_pytree__") for key in path) or isinstance(part, _ARRAYS):
            continue
        is_node = isinstance(part, nnx.Variable | nnx.Pytree) or path == ()
        found[".".join(map(str, path))] = type(part) if is_node else part
    for first, *others in nnx.find_duplicates(model):
        for path in others:
            found[".".join(map(str, path))] = "tied to " + ".".join(map(str, first))
    return found


def refuse_refs(call: str, model: Any) -> None:
    """Raise where a variable is an array that changes in place."""
    from flax import nnx

    for path, part in nnx.iter_graph(model):
        held = part.get_raw_value() if isinstance(part, nnx.Variable) else part
        if any(isinstance(leaf, jax.Ref) for leaf in jax.tree.leaves(held)):
            raise ValueError(
                f"{call}: a module's variables hold arrays, which no call changes in place; got a "
                f"jax.Ref for {'.'.join(map(str, path))!r}. Make the module without ref=True."
            )


def refuse_held(call: str, model: Any) -> None:
    """Raise where an attribute is a function that reaches a module or variable by itself.

    Such a function would go on with the values that the module was made with.
    """
    from flax import nnx

    nodes = [(path, part) for path, part in nnx.iter_graph(model)]
    own = {id(part): path for path, part in nodes if isinstance(part, nnx.Variable | nnx.Module)}
    for path, part in nodes:
        for held in _held(part, set()):
            if id(held) in own:
                name, what = (".".join(map(str, p)) for p in (path, own[id(held)]))
                raise ValueError(
                    f"{call}: a function among a module's attributes is given what it works on; "
                    f"got {name!r}, which holds {f'the own {what!r}' if what else 'the module'} "
                    "and would go on with the values there. Make it a method of the class."
                )


def _held(part: Any, seen: set[int]) -> Iterator[Any]:
    """What a function reaches: its closure, its defaults, the object that it is a method of."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, functools.partial):
        below = [part.func, *part.args, *part.keywords.values()]
    elif isinstance(part, types.MethodType):
        below = [part.__self__]
    elif isinstance(part, types.FunctionType):
        below = [*_cells(part), *(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values()]
    elif isinstance(part, list | tuple):
        below = list(part)
    elif isinstance(part, Mapping):
        below = list(part.values())
    elif isinstance(part, types.ModuleType) or not callable(part):
        return
    else:
        below = [getattr(part, "__wrapped__", None)]  # jax.jit and its like
    for held in below:
        yield held
        yield from _held(held, seen)


def same(a: Any, b: Any, seen: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two attributes are the same, functions made anew by the same code included."""
    if a is b or (id(a), id(b)) in seen:  # the latter: in a cycle, as of a recursive function
        return True
    if type(a) is not type(b):
        return False
    seen |= {(id(a), id(b))}
    if isinstance(a, functools.partial):
        return same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), seen)
    if isinstance(a, types.FunctionType):
        held = lambda f: (f.__code__, f.__defaults__, f.__kwdefaults__, _cells(f))
        return same(held(a), held(b), seen)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key], seen) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, _ARRAYS | np.generic):
        return _bytes(a) == _bytes(b)
    if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
        return same(vars(a), vars(b), seen)
    return bool(a == b) or (a != a and b != b)  # a NaN


def _bytes(array: Any) -> tuple[Any, ...]:
    x = np.asarray(jax.random.key_data(array) if is_key(array) else array)
    return x.shape, x.dtype, x.tobytes()


def _cells(fun: types.FunctionType) -> tuple[Any, ...]:
    empty = types.CellType()  # as of a function that is not there yet
    return tuple(cell.cell_contents for cell in fun.__closure__ or () if cell != empty)
