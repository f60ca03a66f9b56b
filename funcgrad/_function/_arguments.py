"""The arguments of one call: which leaves are arrays, and all the rest, which is static."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._function._bindings import Same, captured

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_POSITIONS = inspect.Parameter.VAR_POSITIONAL
_KEYWORDS = inspect.Parameter.VAR_KEYWORD


@dataclasses.dataclass(frozen=True)
class Static:
    """A leaf that is no array; equal to another of the same type, value and closure."""

    key: Any
    value: Any = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call of ``forward``.

    ``parameters`` are (name, kind, how many inputs); ``static`` has ``None`` for the leaves
    that are arrays.  The first ``given`` inputs need a gradient or ``None`` from ``backward``;
    what follows was given by name or default, and has none.
    """

    name: str
    parameters: tuple[tuple[str, Any, int], ...]
    tree: Any
    static: tuple[Static | None, ...]
    given: int

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the inputs, one for each gradient of ``backward``."""
        found = []
        for name, kind, count in self.parameters:
            found += [f"{name}[{i}]" for i in range(count)] if kind == _POSITIONS else [name]
        return tuple(found)

    def inputs(self, arrays: Any) -> tuple[Any, ...]:
        """The inputs with these arrays as their leaves."""
        values = iter(arrays)
        leaves = [next(values) if leaf is None else leaf.value for leaf in self.static]
        return jax.tree.unflatten(self.tree, leaves)

    def gradients(self, leaves: Any) -> tuple[Any, ...]:
        """The trees of the inputs with these in place of the arrays, ``None`` elsewhere."""
        values = iter(leaves)
        full = [next(values) if leaf is None else None for leaf in self.static]
        return jax.tree.unflatten(self.tree, full)

    def run(self, fun: Any, inputs: tuple[Any, ...], *first: Any) -> Any:
        """Call ``fun`` as the user called ``apply``."""
        values, args, kwargs = iter(inputs), list(first), {}
        for name, kind, count in self.parameters:
            if kind == _KEYWORD:
                kwargs[name] = next(values)
            elif kind == _KEYWORDS:
                kwargs |= next(values)
            else:
                args += [next(values) for _ in range(count)]
        return fun(*args, **kwargs)


def split(name: str, forward: Any, classic: bool, args: Any, kwargs: Any) -> tuple[Call, list[Any]]:
    """The static part of a call, and its arrays."""
    parameters = list(inspect.signature(forward).parameters.values())[1 if classic else 0 :]
    try:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{name}.apply: the arguments are those of forward{'' if not classic else ' after ctx'}"
            f"; got a call with {error}."
        ) from None
    bound.apply_defaults()
    inputs: list[Any] = []
    shape, n_given = [], 0
    for i, parameter in enumerate(parameters):
        value = bound.arguments[parameter.name]
        many = parameter.kind == _POSITIONS
        shape.append((parameter.name, parameter.kind, len(value) if many else 1))
        inputs += value if many else [value]
        by_place = i < len(args) and parameter.kind not in (_KEYWORD, _KEYWORDS)
        if by_place or any(map(_is_floating, jax.tree.leaves(value))):
            n_given = len(inputs)
    leaves, tree = jax.tree.flatten(tuple(inputs))
    leaves = [jnp.asarray(x) if _stands_for_array(x) else x for x in leaves]
    is_array = [isinstance(x, jax.Array | np.ndarray | np.generic) for x in leaves]
    static = tuple(None if array else _static(x) for x, array in zip(leaves, is_array, strict=True))
    # A tracer as it is: asarray of it costs an equation.
    given = [x for x, array in zip(leaves, is_array, strict=True) if array]
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in given]
    return Call(name, tuple(shape), tree, static, n_given), arrays


def _stands_for_array(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) and hasattr(leaf, "__jax_array__")


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _static(value: Any) -> Static:
    if isinstance(value, jax.Ref):
        raise TypeError(
            "Function.apply: arguments are arrays and static values; got a mutable reference. "
            "Pass ref[...], and write to the reference outside."
        )
    # As text, since 0.0 and -0.0 are equal and NaN is not.
    known = repr(value) if isinstance(value, float | complex) else value
    return Static((type(value), known, tuple(map(Same, captured(value)))), value)
