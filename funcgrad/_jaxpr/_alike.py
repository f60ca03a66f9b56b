"""Whether equations compute alike: what they are compared by."""

from collections.abc import Hashable
from typing import Any

import numpy as np

from funcgrad._compat import JaxprEqn, Literal


class _Itself:
    """A thing that is like itself alone."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def operation(eqn: JaxprEqn) -> Hashable:
    """What ``eqn`` does to its inputs, in which context; equal where it is the same."""
    return eqn.primitive, alike(eqn.params), eqn.ctx, len(eqn.outvars)


def literal(atom: Literal) -> Hashable:
    """A literal's type and bits: 0 and -0 are not the same, nor are 1 and True."""
    return atom.aval, np.asarray(atom.val).tobytes()


def alike(param: Any) -> Hashable:
    """A parameter to be compared by; what cannot be compared is like itself alone."""
    if isinstance(param, dict):
        return tuple((name, alike(param[name])) for name in sorted(param))
    if isinstance(param, tuple | list):
        return type(param), tuple(map(alike, param))
    if isinstance(param, int | float | complex | np.generic):
        return type(param), repr(param)
    try:
        hash(param)
    except TypeError:
        return _Itself(param)
    return param
