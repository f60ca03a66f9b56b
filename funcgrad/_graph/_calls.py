"""Which modules, scopes and functions an equation was made in."""

import pathlib
import re
from collections.abc import Sequence

from funcgrad._compat import JaxprEqn, scopes
from funcgrad._graph._data import Call
from funcgrad._jaxpr import SourceLine, call_stack, source_line

_PACKAGE = pathlib.Path(__file__).parents[1]
_READING = (str(_PACKAGE / "_graph"), str(_PACKAGE / "_jaxpr"))


def calls_of(eqn: JaxprEqn, around: Sequence[JaxprEqn]) -> tuple[tuple[Call, ...], tuple[str, ...]]:
    """The calls around ``eqn`` within the program that it stands in, and its named scopes.

    Where each module has its scope, as in Flax Linen, the scopes are all.  An NNX or Equinox
    module, and a plain function, leaves none: there the calls are read from the stack.
    """
    named = tuple(part for scope in scopes(eqn) for part in scope.split("/") if part)
    by_name = tuple(Call(name) for name in named if "->" not in name)  # jnp.einsum names itself
    stack = _stack(eqn, around)
    modules = sum(frame.function.endswith("__call__") for frame in stack)
    if by_name and modules <= len(by_name):
        return by_name, named
    found = []
    for caller, frame in zip((None, *stack), stack, strict=False):
        if (name := _label(frame)) and caller is not None:
            found.append(Call(name, caller.line))
    return (*by_name, *found), named


def line_of(eqn: JaxprEqn, around: Sequence[JaxprEqn]) -> SourceLine | None:
    """The user's line; none of what JAX adds by itself, such as the sum of two gradients."""
    line = source_line(eqn, around)
    if line is None or line.file.startswith(_READING):
        return None
    return line if around or not line.is_library or _stack(eqn, around) else None


def _stack(eqn: JaxprEqn, around: Sequence[JaxprEqn]) -> list[SourceLine]:
    """The frames inside the traced function, or inside the equation around."""
    frames = call_stack(eqn)
    if around:
        outer = call_stack(around[-1])
        shared = next(
            (i for i, (a, b) in enumerate(zip(frames, outer, strict=False)) if a != b),
            min(len(frames), len(outer)),
        )
        return list(frames[max(shared - 1, 0) :]) if shared else []
    start = next((i for i, frame in enumerate(frames) if frame.file.startswith(_READING)), 0)
    while start < len(frames) and frames[start].file.startswith(_READING):
        start += 1
    return list(frames[start:])


def _label(frame: SourceLine) -> str:
    """``Block`` of ``Block.__call__``, ``attend`` of ``model.<locals>.attend``, no lambda."""
    parts = re.sub(r"\.(__call__|forward)$", "", frame.function).split(".")
    if parts[-1].startswith("<") or parts[-1] == "_":
        return ""
    if frame.is_library and any(part.startswith("_") for part in parts):
        return ""  # how a library's layer is divided says little
    return parts[-1]
