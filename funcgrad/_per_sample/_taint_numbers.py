"""Numbers that follow from the program alone: iotas, sizes, constant weights.

They say which row a gather takes, which case a ``select`` does, and what a loss is divided by.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from funcgrad._compat import JaxprEqn
from funcgrad._per_sample import _masks
from funcgrad._per_sample._taint import Known
from funcgrad._per_sample._taint_rules import ELEMENTWISE, MOVES, shape_of

_LIMIT = 1 << 20  # elements; larger tables are not followed


def _dtype(eqn: Any) -> Any:
    return eqn.outvars[0].aval.dtype


def _convert(eqn: JaxprEqn, a: np.ndarray) -> np.ndarray:
    return a.astype(eqn.params["new_dtype"])


def _div(eqn: JaxprEqn, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if np.issubdtype(np.result_type(a, b), np.integer):
        return np.trunc(np.divide(a, b, dtype=float)).astype(a.dtype)
    return np.asarray(np.divide(a, b)).astype(a.dtype)


def _rem(eqn: JaxprEqn, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(np.fmod(a, b))


def _sum(eqn: JaxprEqn, a: np.ndarray) -> np.ndarray:
    axes = tuple(eqn.params["axes"])
    same = math.prod(shape_of(eqn.invars[0])[d] for d in axes if a.shape[d] == 1)
    return np.asarray(a.sum(axes, dtype=a.dtype) * same).astype(a.dtype)


def _cumsum(eqn: JaxprEqn, a: np.ndarray) -> np.ndarray:
    axis = eqn.params["axis"]
    whole = (
        np.flip(_masks.expand(a, (axis,), shape_of(eqn.invars[0])), axis)
        if eqn.params["reverse"]
        else (_masks.expand(a, (axis,), shape_of(eqn.invars[0])))
    )
    total = np.cumsum(whole, axis, dtype=a.dtype)
    return np.flip(total, axis) if eqn.params["reverse"] else total


def _select(eqn: JaxprEqn, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.asarray(np.choose(which.astype(int), cases))


def _lift(fun: Callable[..., Any]) -> Callable[..., np.ndarray]:
    return lambda eqn, *values: np.asarray(fun(*values))


_FOLDS: dict[str, Callable[..., np.ndarray]] = {
    **{
        name: _lift(getattr(np, numpy_name))
        for name, numpy_name in {
            "add": "add",
            "sub": "subtract",
            "mul": "multiply",
            "neg": "negative",
            "max": "maximum",
            "min": "minimum",
            "eq": "equal",
            "ne": "not_equal",
            "lt": "less",
            "le": "less_equal",
            "gt": "greater",
            "ge": "greater_equal",
            "sign": "sign",
            "abs": "abs",
            "floor": "floor",
            "ceil": "ceil",
            "sqrt": "sqrt",
            "exp": "exp",
            "log": "log",
            "square": "square",
            "and": "bitwise_and",
            "or": "bitwise_or",
            "xor": "bitwise_xor",
            "not": "invert",
            "pow": "power",
        }.items()
    },
    "rsqrt": _lift(lambda a: (1 / np.sqrt(a)).astype(a.dtype)),
    "integer_pow": lambda eqn, a: np.asarray(
        np.power(a.astype(float), eqn.params["y"]).astype(a.dtype)
    ),
    "div": _div,
    "rem": _rem,
    "clamp": _lift(lambda low, a, high: np.minimum(np.maximum(a, low), high)),
    "select_n": _select,
    "convert_element_type": _convert,
    "reduce_sum": _sum,
    "reduce_max": lambda eqn, a: a.max(tuple(eqn.params["axes"])),
    "reduce_min": lambda eqn, a: a.min(tuple(eqn.params["axes"])),
    "cumsum": _cumsum,
}


def known_of(eqn: JaxprEqn, knowns: Sequence[Known | None]) -> list[Known | None]:
    """The numbers of the outputs, where those of the inputs give them."""
    name = eqn.primitive.name
    nothing: list[Known | None] = [None] * len(eqn.outvars)
    if not all(math.prod(shape_of(v)) for v in [*eqn.invars, *eqn.outvars]):
        return nothing
    if name == "iota":
        axis, shape = int(eqn.params["dimension"]), eqn.params["shape"]
        if shape[axis] > _LIMIT:
            return nothing
        value = _masks.axis_range(shape[axis], axis, len(shape)).astype(eqn.params["dtype"])
        return [Known(value, np.ones((1,) * len(shape), bool))]
    if name == "concatenate" and any(knowns):
        # Indices put together from known and unknown components.
        dtype = _dtype(eqn)
        ranks = (1,) * len(shape_of(eqn.outvars[0]))
        knowns = [k or Known(np.zeros(ranks, dtype), np.zeros(ranks, bool)) for k in knowns]
    present = [k for k in knowns if k is not None]
    if not knowns or len(present) != len(knowns):
        return nothing
    if sum(k.value.size for k in present) > _LIMIT:
        return nothing
    values, sures = [k.value for k in present], [k.sure for k in present]
    with np.errstate(all="ignore"):
        if name in MOVES:
            moved = MOVES[name](eqn, *values)
            if name == "pad":
                sures = [sures[0], np.ones((), bool)]
            kept = MOVES[name](eqn, *sures)
            if moved is None or kept is None:
                return nothing
            return [Known(v, s) for v, s in zip(moved, kept, strict=True)]
        if name not in _FOLDS or not all(k.whole for k in present):
            return nothing
        rank = len(shape_of(eqn.outvars[0]))
        if name in ELEMENTWISE:
            values = [_masks.ranked(v, rank) for v in values]
        value = np.asarray(_FOLDS[name](eqn, *values), _dtype(eqn))
        value = _masks.compact(value)
    return [Known(value, np.ones((1,) * rank, bool))]
