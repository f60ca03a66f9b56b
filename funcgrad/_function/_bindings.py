"""What a rule reads besides its arguments: what names and attributes are bound to."""

import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import jax

from funcgrad._compat import Tracer

_CONSTANTS = (int, float, complex, bool, str, bytes, type(None))


class Same:
    """Equals itself for the same object, or a constant of the same type and value.

    It keeps nothing alive that can be let go: a name may be bound to a tracer, to large arrays,
    or to the class whose rule this is.
    """

    __slots__ = ("kind", "text", "value")

    def __init__(self, value: Any):
        self.kind, self.text = type(value), None
        if self.kind in _CONSTANTS:
            # As text, since 0.0 and -0.0 are equal and NaN is not.
            self.text, self.value = repr(value), lambda: value
            return
        try:
            self.value = weakref.ref(value)
        except TypeError:
            self.value = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or self.kind is not other.kind:
            return False
        if self.text is not None:
            return self.text == other.text
        value = self.value()
        return value is not None and value is other.value()

    def __hash__(self) -> int:
        return hash(self.kind)


def bindings(cls: Any) -> tuple[Same, ...]:
    """The attributes of a ``Function`` and what its methods refer to, by identity.

    The namespaces end at ``Function`` itself, which defines ``apply``.
    """
    found: list[Any] = []
    for base in cls.__mro__:
        names = vars(base)
        if "apply" in names:
            break
        for name, value in names.items():
            if not name.startswith("__"):
                value = getattr(value, "__func__", value)  # of a static or class method
                found += [value, *captured(value)]
    return tuple(map(Same, found))


def captured(fun: Any) -> list[Any]:
    """What the free and global names, defaults and bound arguments of a function are bound to."""
    if isinstance(fun, functools.partial):
        return [*fun.args, *fun.keywords.values(), fun.func, *captured(fun.func)]
    if isinstance(fun, types.MethodType):
        return [fun.__self__, *captured(fun.__func__)]
    if not isinstance(fun, types.FunctionType):
        return []
    names = fun.__globals__
    return [*_enclosed(fun), *(names[name] for name in _names(fun.__code__) if name in names)]


def _enclosed(fun: types.FunctionType) -> list[Any]:
    found = [*(fun.__defaults__ or ()), *(fun.__kwdefaults__ or {}).values()]
    for cell in fun.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not bound yet
            found.append(None)
    return found


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The global names in code and in the functions defined in it, among others."""
    inner = [_names(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def holds_tracer(values: Any) -> bool:
    """Whether some value is a tracer, or a function or container that leads to one."""
    return any(isinstance(x, Tracer) for x in _reached(values, set()))


def _reached(value: Any, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    inner: list[Any] = []
    if isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        inner = [value.__func__, value.__self__, *getattr(value.__self__, "__dict__", {}).values()]
    elif isinstance(value, types.FunctionType):
        inner = _enclosed(value)
    elif not isinstance(value, jax.Array):
        inner = [leaf for leaf in jax.tree.leaves(value) if leaf is not value]
    for x in inner:
        yield from _reached(x, seen)
