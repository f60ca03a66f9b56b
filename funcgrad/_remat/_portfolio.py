"""Choices that people make by hand, which no plan may be worse than."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from funcgrad._remat._cost import VIEWS
from funcgrad._remat._graph import Candidate, Closure, Graph

_DOTS = ("dot_general", "conv_general_dilated")
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "cumsum")
_DEAR = ("exp", "log", "tanh", "logistic", "erf", "erf_inv", "rsqrt", "sin", "cos", "pow")


def _name(candidate: Candidate) -> str:
    return candidate.op.eqn.primitive.name if candidate.op else ""


def _batched(candidate: Candidate) -> bool:
    numbers: Any = candidate.op.eqn.params["dimension_numbers"] if candidate.op else None
    return _name(candidate) == "dot_general" and bool(numbers[1][0])


def _dot(candidate: Candidate) -> bool:
    return _name(candidate) in _DOTS


# The first four are JAX's own.
POLICIES: Mapping[str, Callable[[Candidate], bool]] = {
    "nothing": lambda c: False,
    "dots": _dot,
    "dots without batch dimensions": lambda c: _dot(c) and not _batched(c),
    "everything": lambda c: True,
    "dots with batch dimensions": lambda c: _dot(c) and _batched(c),
    "dots and reductions": lambda c: _dot(c) or _name(c) in _REDUCTIONS,
    "reductions": lambda c: _name(c) in _REDUCTIONS,
    "dots and transcendental": lambda c: _dot(c) or _name(c) in _DEAR,
    "unbatched dots and reductions": lambda c: (
        (_dot(c) and not _batched(c)) or _name(c) in _REDUCTIONS
    ),
    "unbatched dots and transcendental": lambda c: (
        (_dot(c) and not _batched(c)) or _name(c) in _DEAR
    ),
    "transcendental": lambda c: _name(c) in _DEAR,
    "no views": lambda c: _name(c) not in VIEWS,
}


def by_hand(graph: Graph, also: Collection[int] = ()) -> dict[str, Closure]:
    """What each policy keeps of ``graph``, and makes again; the candidates ``also`` are kept too.

    As with ``jax.checkpoint`` around a loop's body, what the loop carries and its outputs are
    kept by all.
    """
    found = {}
    for name, keeps in POLICIES.items():
        kept = [
            i
            for i, c in enumerate(graph.candidates)
            if c.carried or (c.op is not None and c.op.loop is not None) or keeps(c)
        ]
        closure = graph.closure([*kept, *also])
        if closure is not None:
            found[name] = closure
    return found
