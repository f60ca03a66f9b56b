"""Forward or backward: what an equation's name stack tells."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from funcgrad import _jaxpr
from funcgrad._compat import scopes

_RECOMPUTED = "rematted_computation"  # JAX's scope for what `checkpoint` runs a second time
_JAX_SCOPES = (_RECOMPUTED, "checkpoint", "remat", "while", "body", "cond", "shard_map")
# What batching adds.
_MOVES = {"broadcast_in_dim", "reshape", "transpose", "convert_element_type", "pvary", "copy"}


def is_backward(eqn: Any, parents: Sequence[Any]) -> bool:
    """Whether transposition made ``eqn``, or one of the equations around it."""
    for place in (eqn, *reversed(parents)):
        if _RECOMPUTED in scopes(place):
            return False
        if "transpose" in _transforms(place):
            return True
    return False


def derivative_of(eqn: Any, parents: Sequence[Any], before: Sequence[Any]) -> str | None:
    """The primitive whose derivative rule made ``eqn``, where it is known.

    A rule's equations bear the traceback of the operation, which stands before them, and so do
    others; its derivative must hold such equations.  ``before`` are the equations before
    ``eqn`` in its body.
    """
    if not any({"jvp", "transpose"} & {*_transforms(place)} for place in (eqn, *parents)):
        return None
    same = [
        other
        for other in before
        if other.source_info.traceback is eqn.source_info.traceback
        and not is_backward(other, parents)
    ]
    for i, other in enumerate(same):
        made = {e.primitive for e in (*same[i + 1 :], eqn) if e.primitive.name not in _MOVES}
        if made <= _of_derivative(other):
            return other.primitive.name
    return None


def _of_derivative(eqn: Any) -> set[Any]:
    """The primitives of the derivative of one equation."""
    shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
    try:
        primal, derivative = (
            _jaxpr.trace(fun, *shapes).jaxpr.jaxpr.eqns
            for fun in (
                lambda *xs: _jaxpr.bind(eqn, *xs),
                lambda *xs: jax.jvp(lambda *xs: _jaxpr.bind(eqn, *xs), xs, xs),
            )
        )
    except Exception:  # without floating inputs, or within a mesh, there is none to look at
        return set()
    # What the derivative has more of.
    more = Counter(e.primitive for e in derivative) - Counter(e.primitive for e in primal)
    return set(more)


def module_scopes(eqns: Sequence[Any]) -> list[str]:
    """The user's named scopes of nested equations, outermost first."""
    return [name for eqn in eqns for name in scopes(eqn) if name not in _JAX_SCOPES]


def _transforms(eqn: Any) -> list[str]:
    stack = eqn.source_info.name_stack.stack
    return [entry.name for entry in stack if type(entry).__name__ == "Transform"]
