"""For each primitive: which inputs' elements an output element depends on.

``MOVES`` only carry elements about (and serve known numbers as well as masks), ``RULES``
combine them.  What is in neither, nor in ``ELEMENTWISE``, has no rule.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from funcgrad._compat import JaxprEqn
from funcgrad._per_sample import _masks
from funcgrad._per_sample._taint import Known, Taint

ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type cos cosh digamma div eq eq_to erf erf_inv erfc
    exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to
    lgamma log log1p log2 logistic lt lt_to max min mul ne neg nextafter not one_minus_square or
    polygamma polynomial population_count pow random_clone random_fold_in random_gamma
    random_seed real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    sub tan tanh threefry2x32 xor zeta random_gamma_grad""".split()
)
DRAWS = frozenset(
    """random_bits random_split random_fold_in random_gamma threefry2x32 rng_bit_generator
    rng_uniform""".split()
)
_SAME = frozenset(
    """copy copy_p name optimization_barrier device_put sharding_constraint layout_constraint
    pvary pcast reshard mesh_cast stop_gradient""".split()
)
_BATCHED_MATRICES = frozenset(
    """cholesky cholesky_update eig eigh hessenberg householder_product geqrf geqp3 lu qr schur
    svd triangular_solve tridiagonal tridiagonal_solve symmetric_product""".split()
)
SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
Move = Callable[..., list[np.ndarray] | None]


def shape_of(var: Any) -> tuple[int, ...]:
    """The shape of a jaxpr's variable or literal."""
    return tuple(var.aval.shape)


def _in(eqn: JaxprEqn, i: int = 0) -> tuple[int, ...]:
    return shape_of(eqn.invars[i])


def _out(eqn: JaxprEqn) -> tuple[int, ...]:
    return shape_of(eqn.outvars[0])


def _reshape(eqn: JaxprEqn, a: np.ndarray, *_: Any) -> list[np.ndarray] | None:
    order = eqn.params.get("dimensions") or range(a.ndim)  # reads the axes in this order
    shape = _in(eqn)
    moved = _masks.reshape(a.transpose(order), [shape[d] for d in order], _out(eqn))
    return None if moved is None else [moved]


def _broadcast(eqn: JaxprEqn, a: np.ndarray, *_: Any) -> list[np.ndarray]:
    return [_masks.broadcast_in_dim(a, len(_out(eqn)), eqn.params["broadcast_dimensions"])]


def _slice(eqn: JaxprEqn, a: np.ndarray) -> list[np.ndarray]:
    p = eqn.params
    return [_masks.take_slice(a, p["start_indices"], p["limit_indices"], p["strides"])]


def _concatenate(eqn: JaxprEqn, *arrays: np.ndarray) -> list[np.ndarray]:
    axis = int(eqn.params["dimension"])
    shapes = [_in(eqn, i) for i in range(len(arrays))]
    parts = [(a, s) for a, s in zip(arrays, shapes, strict=True) if math.prod(s)]
    return [_masks.concatenate([a for a, _ in parts], [s for _, s in parts], axis)]


def _stack(eqn: JaxprEqn, *arrays: np.ndarray) -> list[np.ndarray]:
    axis = int(eqn.params["axis"])
    parts = [np.expand_dims(a, axis) for a in arrays]
    return [_masks.concatenate(parts, [p.shape[:axis] + (1,) for p in parts], axis)]


def _split(eqn: JaxprEqn, a: np.ndarray) -> list[np.ndarray]:
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    if a.shape[axis] == 1:
        return [a] * len(sizes)
    return [_masks.compact(part) for part in np.split(a, np.cumsum(sizes)[:-1], axis)]


MOVES: dict[str, Move] = {
    "reshape": _reshape,
    "squeeze": lambda eqn, a: [a.squeeze(tuple(eqn.params["dimensions"]))],
    "expand_dims": lambda eqn, a: [np.expand_dims(a, tuple(eqn.params["dimensions"]))],
    "transpose": lambda eqn, a: [a.transpose(eqn.params["permutation"])],
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "rev": lambda eqn, a: [np.flip(a, tuple(eqn.params["dimensions"]))],
    "concatenate": _concatenate,
    "stack": _stack,
    "split": _split,
    "pad": lambda eqn, a, v: [_masks.pad(a, v, eqn.params["padding_config"], _in(eqn))],
    **dict.fromkeys(_SAME, lambda eqn, *arrays: list(arrays)),
}


# Rules for masks: rule(eqn, taints) -> the masks of the outputs, None for "no rule".


def _all_masks(taints: Sequence[Taint]) -> list[np.ndarray]:
    return [taint.mask for taint in taints]


def elementwise(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray]:
    rank = len(_out(eqn))
    masks = [_masks.ranked(taint.mask, rank) for taint in taints]
    mask = functools.reduce(np.bitwise_or, masks)
    if eqn.primitive.name == "select_n":
        pred = taints[0].known
        if pred is not None and pred.whole:  # a choice that follows from the program alone
            which = _masks.ranked(pred.value, rank).astype(int)
            shape = np.broadcast_shapes(which.shape, *(m.shape for m in masks))
            mask = np.choose(
                np.broadcast_to(which, shape), [np.broadcast_to(m, shape) for m in masks[1:]]
            )
    return [_masks.compact(mask)] * len(eqn.outvars)


def _reduce(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray]:
    axes = tuple(eqn.params.get("axes", eqn.params.get("dimensions", ())))
    n = len(eqn.outvars)
    mask = functools.reduce(np.bitwise_or, [_masks.union(taint.mask, axes) for taint in taints[:n]])
    extra = _masks.union_all(_all_masks(taints[n:]))
    return [_masks.compact(mask.squeeze(axes) | extra)] * n


def _cumulative(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray]:
    axis, mask = eqn.params["axis"], taints[0].mask
    if mask.shape[axis] > 1:
        step = -1 if eqn.params.get("reverse") else 1
        mask = np.flip(mask, axis) if step < 0 else mask
        mask = np.bitwise_or.accumulate(mask, axis)
        mask = np.flip(mask, axis) if step < 0 else mask
    return [_masks.compact(mask)]


def _along(axes: Callable[[JaxprEqn], _masks.Sizes]) -> Callable[..., list[np.ndarray]]:
    """Everything along some axes meets: sorting, Fourier transforms, windows."""

    def rule(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray]:
        rank = len(_in(eqn))
        full = [_masks.union(t.mask, axes(eqn)) for t in taints if t.mask.ndim == rank]
        extra = _masks.union_all([t.mask for t in taints if t.mask.ndim != rank])
        mask = _masks.compact(functools.reduce(np.bitwise_or, full) | extra)
        return [mask] * len(eqn.outvars)

    return rule


def _window_axes(eqn: JaxprEqn) -> list[int]:
    p, rank = eqn.params, len(_in(eqn))
    plain = [1] * rank
    sizes = p.get("window_dimensions", plain)
    strides = p.get("window_strides", plain)
    pads = p.get("padding", [(0, 0)] * rank)
    spread = p.get("base_dilation") or plain
    return [
        d
        for d in range(rank)
        if (sizes[d], strides[d], tuple(pads[d]), spread[d]) != (1, 1, (0, 0), 1)
    ]


def _matrices(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray] | None:
    batch = len(_in(eqn)) - 2
    if eqn.primitive.name == "tridiagonal_solve":
        batch += 1
    if any(t.mask.ndim < batch for t in taints) or batch < 0:
        return None
    lead = functools.reduce(
        np.bitwise_or,
        [
            _masks.union(t.mask, range(batch, t.mask.ndim)).reshape(t.mask.shape[:batch])
            for t in taints
        ],
    )
    lead = _masks.compact(lead)
    return [lead.reshape(lead.shape + (1,) * (len(shape_of(v)) - batch)) for v in eqn.outvars]


def _lead_only(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray]:
    mask = _masks.union(taints[0].mask, [taints[0].mask.ndim - 1])
    return [mask] * len(eqn.outvars)


def _dot_general(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray]:
    lhs, rhs = taints[0].mask, taints[1].mask
    dims = eqn.params["dimension_numbers"]
    laid = _masks.product(lhs, rhs, dims)
    if laid is None:
        laid = _masks.product(_masks.union(lhs, dims[0][0]), _masks.union(rhs, dims[0][1]), dims)
    if laid is None:
        return [_masks.ranked(_masks.union_all([lhs, rhs]), len(_out(eqn)))]
    (left, right), n = laid
    last = tuple(range(left.ndim - n, left.ndim))
    mask = _masks.union(left | right, last) if last else left | right
    return [_masks.compact(mask.squeeze(last))]


def _conv(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray] | None:
    p = eqn.params
    if p["batch_group_count"] != 1:
        return None
    dn, groups = p["dimension_numbers"], p["feature_group_count"]
    lhs, rhs = taints[0].mask, taints[1].mask
    batch, channel, *space = dn.lhs_spec
    lhs = (
        _masks.union(lhs, space)
        .transpose(dn.lhs_spec)
        .reshape(lhs.shape[batch], lhs.shape[channel])
    )
    outs, *others = dn.rhs_spec
    rhs = _masks.union(rhs, others).transpose(dn.rhs_spec).reshape(1, rhs.shape[outs])
    if lhs.shape[1] > 1:
        lhs = np.bitwise_or.reduce(lhs.reshape(len(lhs), groups, -1), axis=2)
        if groups > 1:
            lhs = np.repeat(lhs, _out(eqn)[dn.out_spec[1]] // groups, axis=1)
    mask = lhs | rhs
    return [
        _masks.compact(
            mask.reshape(mask.shape + (1,) * len(space)).transpose(np.argsort(dn.out_spec))
        )
    ]


def _components(known: Known | None, count: int) -> list[np.ndarray | None]:
    """Start indices by operand axis: numbers over the index array's batch axes, or unknown."""
    found: list[np.ndarray | None] = []
    for k in range(count):
        if known is None:
            found.append(None)
            continue
        sure = known.sure[..., min(k, known.sure.shape[-1] - 1)]
        value = known.value[..., min(k, known.value.shape[-1] - 1)]
        found.append(value.astype(np.int64) if sure.all() else None)
    return found


def _gather(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray]:
    dn, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, index = taints[0], taints[1]
    shape, rank = _in(eqn), len(_out(eqn))
    lanes = [d for d in range(rank) if d not in dn.offset_dims]
    hidden = (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
    window = dict(
        zip([d for d in range(len(shape)) if d not in hidden], dn.offset_dims, strict=True)
    )
    starts = dict(
        zip(
            dn.start_index_map,
            _components(index.known, len(dn.start_index_map)),
            strict=True,
        )
    )
    mask = _masks.union(operand.mask, [d for d, start in starts.items() if start is None])
    where = []
    for d in range(len(shape)):
        place = np.zeros((1,) * rank, np.int64)
        if mask.shape[d] > 1:
            if d in dn.operand_batching_dims:
                lane = dn.start_indices_batching_dims[dn.operand_batching_dims.index(d)]
                place = place + _masks.axis_range(shape[d], lanes[lane], rank)
            start = starts.get(d)
            if start is not None:
                start = np.clip(start, 0, shape[d] - sizes[d])
                place = place + _masks.broadcast_in_dim(start, rank, lanes)
            if d in window:
                place = place + _masks.axis_range(sizes[d], window[d], rank)
        where.append(place)
    taken = mask[tuple(where)] if where else mask.reshape((1,) * rank)
    chosen = _masks.union(index.mask, [index.mask.ndim - 1]).squeeze(-1)
    return [_masks.compact(taken | _masks.broadcast_in_dim(chosen, rank, lanes))]


def _scatter(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray] | None:
    dn = eqn.params["dimension_numbers"]
    operand, index, updates = taints[:3]
    shape, written = _in(eqn), _in(eqn, 2)
    rank = len(written)
    lanes = [d for d in range(rank) if d not in dn.update_window_dims]
    hidden = (*dn.inserted_window_dims, *dn.operand_batching_dims)
    window = dict(
        zip(
            [d for d in range(len(shape)) if d not in hidden],
            dn.update_window_dims,
            strict=True,
        )
    )
    targets = dn.scatter_dims_to_operand_dims
    starts = dict(zip(targets, _components(index.known, len(targets)), strict=True))
    chosen = _masks.union(index.mask, [index.mask.ndim - 1]).squeeze(-1)
    mask = updates.mask | _masks.broadcast_in_dim(chosen, rank, lanes)
    where: list[np.ndarray] = []
    reach: list[int] = []
    for d in range(len(shape)):
        place = np.zeros((1,) * rank, np.int64)
        whole = d in window and written[window[d]] == shape[d] and mask.shape[window[d]] == 1
        if (d in starts and starts[d] is None) or (whole and d not in starts):
            reach.append(1)
        else:
            reach.append(shape[d])
            if d in dn.operand_batching_dims:
                lane = dn.scatter_indices_batching_dims[dn.operand_batching_dims.index(d)]
                place = place + _masks.axis_range(shape[d], lanes[lane], rank)
            start = starts.get(d)
            if start is not None:
                high = shape[d] - (written[window[d]] if d in window else 1)
                place = place + _masks.broadcast_in_dim(np.clip(start, 0, high), rank, lanes)
            if d in window:
                place = place + _masks.axis_range(written[window[d]], window[d], rank)
        where.append(place)
    full = np.broadcast_shapes(mask.shape, *(w.shape for w in where))
    if math.prod(full) > 1 << 24 or math.prod(reach) > 1 << 26:
        return None
    added = np.zeros(reach, np.uint8)
    if where:
        index = tuple(np.broadcast_to(place, full) for place in where)
        np.bitwise_or.at(added, index, np.broadcast_to(mask, full))
    else:
        added = _masks.union_all([mask])
    return [_masks.compact(operand.mask | added)]


def _starts(taints: Sequence[Taint]) -> list[int | None]:
    return [
        int(t.known.value.item()) if t.known is not None and t.known.whole else None for t in taints
    ]


def _dynamic_slice(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray]:
    shape, sizes, mask = _in(eqn), eqn.params["slice_sizes"], taints[0].mask
    for d, start in enumerate(_starts(taints[1 : 1 + len(shape)])):
        if sizes[d] == shape[d] or mask.shape[d] == 1:
            continue
        if start is None:
            mask = _masks.union(mask, [d])
        else:
            start = min(max(start, 0), shape[d] - sizes[d])
            mask = mask.take(range(start, start + sizes[d]), d)
    return [_masks.compact(mask | _masks.union_all(_all_masks(taints[1:])))]


def _dynamic_update_slice(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray]:
    shape, sizes = _in(eqn), _in(eqn, 1)
    mask, update = taints[0].mask, taints[1].mask
    index: list[slice] = []
    for d, start in enumerate(_starts(taints[2:])):
        if sizes[d] == shape[d] and start is not None:
            start = 0
        if sizes[d] == shape[d]:
            index.append(slice(None))
        elif start is None:
            update = _masks.union(update, [d])
            index.append(slice(None))
        else:
            start = min(max(start, 0), shape[d] - sizes[d])
            index.append(slice(start, start + sizes[d]))
    extra = _masks.union_all(_all_masks(taints[2:]))
    axes = [d for d, s in enumerate(index) if s != slice(None) or update.shape[d] > 1]
    new = np.array(_masks.expand(mask, axes, shape))
    new = np.array(np.broadcast_to(new, np.broadcast_shapes(new.shape, (1,) * new.ndim)))
    new[tuple(index)] |= update
    return [_masks.compact(new | extra)]


def _bitcast(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray]:
    mask, rank = taints[0].mask, len(_out(eqn))
    if rank < mask.ndim:  # a wider type: the last axis becomes one number
        return [_masks.union(mask, [rank]).squeeze(rank)]
    return [mask.reshape(mask.shape + (1,) * (rank - mask.ndim))]


def _draw(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray]:
    mask = taints[0].mask
    return [mask.reshape(mask.shape + (1,) * (len(_out(eqn)) - mask.ndim))]


RULES: dict[str, Callable[[JaxprEqn, Sequence[Taint]], list[np.ndarray] | None]] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(
        """reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor
        argmax argmin""".split(),
        _reduce,
    ),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), _cumulative),
    "sort": _along(lambda eqn: [eqn.params["dimension"]]),
    "top_k": _along(lambda eqn: [eqn.params.get("axis", -1) % len(_in(eqn))]),
    "approx_top_k": _along(lambda eqn: [eqn.params["reduction_dimension"]]),
    "fft": _along(lambda eqn: range(len(_in(eqn)) - len(eqn.params["fft_lengths"]), len(_in(eqn)))),
    **dict.fromkeys(
        """reduce_window reduce_window_sum reduce_window_max reduce_window_min
        select_and_gather_add select_and_scatter_add select_and_scatter""".split(),
        _along(_window_axes),
    ),
    **dict.fromkeys(_BATCHED_MATRICES, _matrices),
    "lu_pivots_to_permutation": _lead_only,
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "iota": lambda eqn, taints: [np.zeros((1,) * len(_out(eqn)), np.uint8)],
    "bitcast_convert_type": _bitcast,
    "random_bits": _draw,
    "random_split": _draw,
    "random_unwrap": _draw,
    "random_wrap": lambda eqn, taints: [
        _masks.union(taints[0].mask, range(len(_out(eqn)), taints[0].mask.ndim)).reshape(
            taints[0].mask.shape[: len(_out(eqn))]
        )
    ],
}


def masks_of(eqn: JaxprEqn, taints: Sequence[Taint]) -> list[np.ndarray] | None:
    """The masks of the outputs, ``None`` where there is no rule."""
    if all(taint.free for taint in taints) or not all(math.prod(shape_of(v)) for v in eqn.outvars):
        return [np.zeros((1,) * len(shape_of(v)), np.uint8) for v in eqn.outvars]
    name = eqn.primitive.name
    if name in MOVES:
        return MOVES[name](eqn, *_all_masks(taints))
    return RULES[name](eqn, taints) if name in RULES else None
