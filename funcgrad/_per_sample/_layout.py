"""The place of a weight in a parameter: structure that keeps norms up to a known factor."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from funcgrad._compat import JaxprEqn, Literal, primitives


@dataclasses.dataclass(frozen=True)
class Layout:
    """A weight that is ``scale`` times a window of one leaf, its axes put in some order.

    ``axes[d]`` is the leaf's axis that axis ``d`` of the weight is (``None`` for an axis of
    size 1 that is none); ``axes`` is ``None`` where the arrangement is not followed any
    more, though it is still one to one.  ``window`` has (start, stop, step) for each axis of
    the leaf, ``scanned`` the leaf's axes that loops run over.
    """

    leaf: int
    axes: tuple[int | None, ...] | None
    window: tuple[tuple[int, int, int], ...]
    scale: float = 1.0
    scanned: tuple[int | None, ...] = ()

    @staticmethod
    def of_leaf(index: int, aval: Any) -> "Layout":
        """The layout of a whole leaf."""
        return Layout(index, tuple(range(aval.ndim)), tuple((0, n, 1) for n in aval.shape))

    def enter_scan(self) -> "Layout":
        """The layout of one iteration's part of a weight that is scanned over."""
        first, rest = (None, None) if self.axes is None else (self.axes[0], self.axes[1:])
        return dataclasses.replace(self, axes=rest, scanned=(*self.scanned, first))

    def enter_constant(self) -> "Layout":
        """The layout in a loop whose iterations all use the weight."""
        return self

    def is_disjoint(self, other: "Layout") -> bool:
        """Whether no number of the leaf lies in both windows, as far as their ranges tell."""
        return any(
            a_stop <= b_start or b_stop <= a_start
            for (a_start, a_stop, _), (b_start, b_stop, _) in zip(
                self.window, other.window, strict=True
            )
        )


_KEEP = {
    primitives.copy_p,
    primitives.reduce_precision_p,
    primitives.name_p,
    primitives.sharding_constraint_p,
}


# One input, and nothing computed: these run in any precision.
PLAIN = _KEEP - {primitives.reduce_precision_p} | {
    primitives.neg_p,
    primitives.transpose_p,
    primitives.squeeze_p,
    primitives.broadcast_in_dim_p,
    primitives.reshape_p,
    primitives.slice_p,
    primitives.rev_p,
}


def is_enlarged(eqn: JaxprEqn) -> bool:
    """Whether an equation only makes a weight larger, so that its input is the better cut."""
    if eqn.primitive in (primitives.dot_general_p, primitives.conv_general_dilated_p):
        return False
    sizes = [a.aval.size for a in eqn.invars if jnp.issubdtype(a.aval.dtype, jnp.inexact)]
    return any(
        var.aval.size > sum(sizes)
        for var in eqn.outvars
        if jnp.issubdtype(var.aval.dtype, jnp.inexact)
    )


def follow_layout(eqn: JaxprEqn, layouts: Sequence[Layout | None], n_weights: int) -> Layout | None:
    """The layout of the output of ``eqn``, ``None`` where it is no plain image of one leaf.

    ``n_weights`` of its inputs are weights, with a layout or without.
    """
    given = [(i, layout) for i, layout in enumerate(layouts) if layout is not None]
    if len(given) != 1 or len(eqn.outvars) != 1:
        return None
    ((index, layout),) = given
    prim, params = eqn.primitive, eqn.params
    if prim in _KEEP:
        return layout
    if prim in (primitives.add_p, primitives.sub_p) and n_weights == 1:
        # A constant beside it, as in 1 + scale: the gradient is the same.
        sign = -1 if prim is primitives.sub_p and index == 1 else 1
        return dataclasses.replace(layout, scale=sign * layout.scale)
    if prim is primitives.neg_p:
        return dataclasses.replace(layout, scale=-layout.scale)
    if prim is primitives.convert_element_type_p:
        kept = jnp.issubdtype(params["new_dtype"], jnp.floating)
        return layout if kept and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating) else None
    if prim is primitives.mul_p or (prim is primitives.div_p and index == 0):
        return _scaled(eqn, layout, index)
    if prim is primitives.transpose_p:
        return _arrange(layout, [layout.axes and layout.axes[i] for i in params["permutation"]])
    if prim is primitives.squeeze_p:
        kept = [i for i in range(eqn.invars[0].aval.ndim) if i not in params["dimensions"]]
        return _arrange(layout, [layout.axes and layout.axes[i] for i in kept])
    if prim is primitives.broadcast_in_dim_p:
        return _broadcast(eqn, layout)
    if prim is primitives.reshape_p:
        return _reshaped(eqn, layout)
    if prim is primitives.slice_p:
        return _sliced(eqn, layout)
    if prim is primitives.rev_p:
        return dataclasses.replace(layout, axes=None)
    return None


def _arrange(layout: Layout, axes: list[Any]) -> Layout:
    known = layout.axes is not None
    return dataclasses.replace(layout, axes=tuple(axes) if known else None)


def _scaled(eqn: JaxprEqn, layout: Layout, index: int) -> Layout | None:
    other = eqn.invars[1 - index]
    if not isinstance(other, Literal) or np.ndim(other.val) != 0 or np.iscomplexobj(other.val):
        return None
    factor = float(other.val)
    factor = 1 / factor if eqn.primitive is primitives.div_p and factor else factor
    return dataclasses.replace(layout, scale=layout.scale * factor)


def _broadcast(eqn: JaxprEqn, layout: Layout) -> Layout | None:
    if eqn.outvars[0].aval.size != eqn.invars[0].aval.size:
        return None
    axes: list[int | None] = [None] * eqn.outvars[0].aval.ndim
    for i, d in enumerate(eqn.params["broadcast_dimensions"]):
        axes[d] = layout.axes and layout.axes[i]
    return _arrange(layout, axes)


def _reshaped(eqn: JaxprEqn, layout: Layout) -> Layout:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if layout.axes is None or [n for n in before if n != 1] != [n for n in after if n != 1]:
        return dataclasses.replace(layout, axes=None)
    kept = iter([a for n, a in zip(before, layout.axes, strict=True) if n != 1])
    return _arrange(layout, [next(kept) if n != 1 else None for n in after])


def _sliced(eqn: JaxprEqn, layout: Layout) -> Layout | None:
    if layout.axes is None:
        return None
    params, ndim = eqn.params, len(layout.axes)
    window = list(layout.window)
    for d, axis in enumerate(layout.axes):
        start, stop = params["start_indices"][d], params["limit_indices"][d]
        step = (params["strides"] or (1,) * ndim)[d]
        if axis is None:
            if (start, stop) != (0, 1):
                return None
            continue
        first, _, stride = window[axis]
        window[axis] = (first + start * stride, first + (stop - 1) * stride + 1, stride * step)
    return dataclasses.replace(layout, window=tuple(window))
