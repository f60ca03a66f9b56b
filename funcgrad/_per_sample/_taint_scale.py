"""How a value changes with the size of the batch, and whether it is a sum over samples."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from funcgrad._compat import JaxprEqn
from funcgrad._per_sample import _masks
from funcgrad._per_sample._taint import (
    ALL,
    SAMPLES,
    Blame,
    Taint,
    Total,
    free,
    gravest,
    merge_totals,
    mixes,
)
from funcgrad._per_sample._taint_rules import DRAWS, MOVES, SCATTERS, shape_of

# Whose output grows by a factor when all inputs do.
_HOMOGENEOUS = frozenset(MOVES) | frozenset(
    """add sub add_any max min neg convert_element_type real imag reduce_precision select_n
    reduce_max reduce_min cumsum abs reduce_window_max reduce_window_sum sort""".split()
)
_BILINEAR = frozenset(["mul", "dot_general", "conv_general_dilated"])
_LINEAR = frozenset(MOVES) | {"add", "sub", "add_any", "neg", "real", "imag", "reduce_precision"}
# Whose output at one place depends on how long a uniform axis is.
_LENGTHS = frozenset(
    """reduce_prod reduce_xor reduce cumsum cumprod cumlogsumexp fft reduce_window
    reduce_window_sum reduce_window_max reduce_window_min""".split()
)
# Where the operands that are indices stand.
_INDICES = {
    "gather": slice(1, 2),
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    **dict.fromkeys(SCATTERS, slice(1, 2)),
}


def growth_of(
    eqn: JaxprEqn,
    twin: JaxprEqn,
    taints: list[Taint],
    blame: Callable[[str], Blame],
    in_sample_loop: bool,
) -> tuple[float | None, Blame | None]:
    """The growth of the outputs; where it is ``None``, whose fault that is."""
    name = eqn.primitive.name
    if name in DRAWS and taints[0].free:
        shapes = [[shape_of(v) for v in e.outvars] for e in (eqn, twin)]
        if shapes[0] != shapes[1] or any(t.growth is None for t in taints):
            earlier = gravest(t.odd for t in taints if t.odd and t.odd.kind == "random")
            return None, earlier or blame("random")
    live = [t for t in taints if not t.zero] or [free(0)]
    if name in _INDICES and _rows_are_picked(eqn, taints, in_sample_loop):
        indices = list(map(id, taints[_INDICES[name]]))
        live = [t for t in live if id(t) not in indices] or [free(0)]
    known = [t.growth for t in live if t.growth is not None]
    if len(known) < len(live):
        return None, gravest(t.odd for t in live) or blame("size")
    if not in_sample_loop and _parts_of_the_batch_differ(eqn, twin, taints):
        return None, blame("position")
    if name in _LENGTHS and _uniform_lengths_differ(eqn, twin, taints[0]):
        return None, blame("position")

    integers = not jnp.issubdtype(_dtype(eqn.outvars[0]), jnp.inexact)
    common = set(known)
    if name in _BILINEAR and len(taints) == 2:
        if len(live) < 2:
            return 1.0, None
        if name == "conv_general_dilated" and _kernels_differ(eqn, twin):
            return None, blame("size")
        growth = known[0] * known[1]
        if name == "dot_general":
            growth *= _stretch(eqn, twin, taints, _contracted(eqn))
        return growth, None
    if name == "reduce_sum":
        return known[0] * _stretch(eqn, twin, taints, [eqn.params["axes"]]), None
    if name == "div" and len(known) == 2 and not integers:
        return known[0] / known[1], None
    if name == "integer_pow" and eqn.params["y"] != twin.params["y"]:
        return None, blame("size")
    if name == "iota":
        same = eqn.params["shape"] == twin.params["shape"]
        return (1.0, None) if same else (None, blame("position"))
    rounded = name == "convert_element_type" and integers
    if common == {1.0} or (len(common) == 1 and name in _HOMOGENEOUS and not rounded):
        return known[0], None
    return None, blame("size")


def _dtype(var: Any) -> Any:
    return var.aval.dtype


def _contracted(eqn: JaxprEqn) -> Any:
    return eqn.params["dimension_numbers"][0]


def _stretch(eqn: JaxprEqn, twin: JaxprEqn, taints: Sequence[Taint], axes: Sequence[Any]) -> float:
    """How much longer the sum over ``axes`` becomes, not counting the samples themselves."""
    factor = 1.0
    for d in zip(*axes, strict=True):
        n, m = (shape_of(e.invars[0])[d[0]] for e in (eqn, twin))
        if n != m and n and all(t.mask.shape[x] == 1 for t, x in zip(taints, d, strict=True)):
            factor *= m / n
    return factor


def _uniform_lengths_differ(eqn: JaxprEqn, twin: JaxprEqn, taint: Taint) -> bool:
    shape, larger = shape_of(eqn.invars[0]), shape_of(twin.invars[0])
    axes = eqn.params.get("axes", eqn.params.get("dimensions"))
    if axes is None:
        axes = [eqn.params["axis"]] if "axis" in eqn.params else range(len(shape))
    return any(shape[d] != larger[d] and taint.mask.shape[d] == 1 for d in axes)


def _kernels_differ(eqn: JaxprEqn, twin: JaxprEqn) -> bool:
    """Whether more is summed over in a larger batch."""
    _, *rest = eqn.params["dimension_numbers"].rhs_spec
    space = eqn.params["dimension_numbers"].lhs_spec[2:]
    return any(
        shape_of(eqn.invars[i])[d] != shape_of(twin.invars[i])[d]
        for i, axes in ((0, space), (1, rest))
        for d in axes
    )


def _parts_of_the_batch_differ(eqn: JaxprEqn, twin: JaxprEqn, taints: Sequence[Taint]) -> bool:
    """Whether an axis that holds the batch is put together from parts made in other ways."""
    name, params = eqn.primitive.name, eqn.params
    shape, larger = shape_of(eqn.outvars[0]), shape_of(twin.outvars[0])
    batch = {d for d, (n, m) in enumerate(zip(shape, larger, strict=True)) if n != m}
    if not batch:
        return False
    if name == "concatenate":
        # An empty remainder of a loop in chunks is no part.
        parts = [t for t, v in zip(taints, eqn.invars, strict=True) if math.prod(shape_of(v))]
        alike = len({t.recipe for t in parts}) == 1
        return (
            params["dimension"] in batch
            and len(parts) > 1
            and not (alike or all(t.known is not None for t in taints))
        )
    if name == "pad":
        return any(any(params["padding_config"][d]) for d in batch)
    if name == "dynamic_update_slice":
        return any(shape_of(eqn.invars[1])[d] != shape[d] for d in batch)
    if name in SCATTERS:
        dn = params["dimension_numbers"]
        constant = taints[1].known is not None and taints[1].growth == 1
        return constant and any(d in batch for d in dn.scatter_dims_to_operand_dims)
    return False


def _rows_are_picked(eqn: JaxprEqn, taints: Sequence[Taint], in_sample_loop: bool) -> bool:
    """Whether an index depends on the place in the batch only to find a sample's own row."""
    name = eqn.primitive.name
    odds = [t.odd for t in taints[_INDICES[name]] if t.growth is None]
    if not odds or any(odd is None or odd.kind != "position" for odd in odds):
        return False
    if name == "gather":
        dn = eqn.params["dimension_numbers"]
        return any(taints[0].mask.shape[d] > 1 for d in dn.start_index_map)
    if name == "dynamic_slice":
        return taints[0].mask.size > 1
    if in_sample_loop or name == "dynamic_update_slice":
        return in_sample_loop
    mask = taints[2].mask  # of what is scattered
    window = eqn.params["dimension_numbers"].update_window_dims
    return any(n > 1 for d, n in enumerate(mask.shape) if d not in window)


def total_of(
    eqn: JaxprEqn,
    twin: JaxprEqn,
    taints: list[Taint],
    output: int,
    place: Any,
    in_sample_loop: bool,
) -> Total | None:
    """An output as a sum over samples, where it is one."""
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return taints[output].total
    if name == "convert_element_type":
        kept = jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact)
        return taints[0].total if kept else None
    if in_sample_loop and name not in MOVES and name != "add":
        return None  # done in each step, it would treat the samples differently
    if name in _LINEAR:
        return merge_totals(taints, place, in_sample_loop=in_sample_loop)
    if name == "select_n" and taints[0].free and taints[0].growth == 1:
        return merge_totals(taints[1:], place, in_sample_loop=in_sample_loop)
    if name == "reduce_sum":
        (taint,), axes = taints, eqn.params["axes"]
        stretch = _stretch(eqn, twin, taints, [axes])
        if taint.total is not None:
            return taint.total if stretch == 1 else None
        return _new_total(taint.mask, axes, taint.growth, stretch, place)
    if name == "div" and jnp.issubdtype(_dtype(eqn.outvars[0]), jnp.inexact):
        total, factor = taints[0].total, taints[1]
        if total is not None and factor.free and factor.growth is not None:
            return total.scaled(1 / factor.growth)
    if name in ("mul", "dot_general"):
        stretch = _stretch(eqn, twin, taints, _contracted(eqn)) if name == "dot_general" else 1
        for value, factor in (taints, taints[::-1]):
            if value.total is not None:
                if factor.free and factor.growth is not None and stretch == 1:
                    return value.total.scaled(factor.growth)
                return None
        if name == "dot_general":
            return _total_of_products(eqn, taints, stretch, place)
    return None


def _total_of_products(
    eqn: JaxprEqn, taints: list[Taint], stretch: float, place: Any
) -> Total | None:
    lhs, rhs = taints
    laid = _masks.product(lhs.mask, rhs.mask, eqn.params["dimension_numbers"])
    if laid is None or lhs.growth is None or rhs.growth is None:
        return None
    (left, right), n = laid
    mask = left | right
    axes = range(mask.ndim - n, mask.ndim)
    return _new_total(mask, axes, lhs.growth * rhs.growth, stretch, place)


def _new_total(
    mask: np.ndarray, axes: _masks.Sizes, growth: float | None, stretch: float, place: Any
) -> Total | None:
    """A sum of values of one sample each, if every sample gives as many."""
    axes = tuple(axes)
    if growth is None or mixes(mask):
        return None
    counts = np.stack([(mask >> s & 1).sum(axes) for s in range(SAMPLES)])
    if not (counts[:1] == counts).all() or not counts.all():
        return None
    sizes = math.prod(mask.shape[d] for d in axes)
    alone = bool((counts.sum(0) < sizes).any())
    growth *= stretch
    return Total({place: (growth, int(ALL))}, frozenset([growth] if alone else []))
