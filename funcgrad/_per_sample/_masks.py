"""Compact arrays: an axis along which nothing varies has size one.

A dependence mask of an activation of shape (8, 512, 768) is then (8, 1, 1), whatever the
model's width, so that following masks through a big model costs almost nothing.  The same
functions move known integer values about.  ``shape`` is always the whole shape.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Sizes: TypeAlias = Sequence[Any]  # JAX states sizes and axes as int and as np.int64

_LIMIT = 1 << 27  # elements; larger tables of masks are given up for "depends on all of it"


def same(a: Any, b: Any) -> bool:
    """Whether all elements are equal, a NaN to a NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def compact(array: Any) -> np.ndarray:
    """Shrink every axis along which all slices are equal."""
    array = np.asarray(array)  # NumPy makes scalars of arrays without axes
    for axis, size in enumerate(array.shape):
        if size > 1:
            first = array.take([0], axis)
            if same(array, first):
                array = first
    return array


def union(array: np.ndarray, axes: Sizes) -> np.ndarray:
    """OR over ``axes``, which stay as axes of size one."""
    axes = tuple(axis for axis in axes if array.shape[axis] != 1)
    return np.bitwise_or.reduce(array, axis=axes, keepdims=True) if axes else array


def union_all(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """A scalar mask: everything that any element depends on."""
    total = np.uint8(0)
    for array in arrays:
        total |= np.bitwise_or.reduce(array, axis=None)
    return np.array(total)


def ranked(array: Any, rank: int) -> np.ndarray:
    """A scalar where an array is meant (a literal operand) gets its axes."""
    array = np.asarray(array)
    return array if array.ndim == rank else array.reshape((1,) * (rank - array.ndim) + array.shape)


def expand(array: np.ndarray, axes: Sizes, shape: Sizes) -> np.ndarray:
    """Give ``axes`` their whole size."""
    return np.broadcast_to(array, [shape[d] if d in axes else n for d, n in enumerate(array.shape)])


def reshape(array: np.ndarray, old: Sizes, new: Sizes) -> np.ndarray | None:
    """Reshape from ``old`` to ``new``, expanding only axes that merge or split and vary."""
    before: list[int] = []
    after: list[int] = []
    i = j = 0
    while i < len(old) or j < len(new):
        i0, j0 = i, j
        have = want = 1
        if i < len(old):
            have, i = old[i], i + 1
        if j < len(new):
            want, j = new[j], j + 1
        while have != want:
            if have < want:
                have, i = have * old[i], i + 1
            else:
                want, j = want * new[j], j + 1
        varies = any(n > 1 for n in array.shape[i0:i])
        before += old[i0:i] if varies else [1] * (i - i0)
        after += new[j0:j] if varies else [1] * (j - j0)
    if math.prod(before) > _LIMIT:
        return None
    return compact(np.broadcast_to(array, before).reshape(after))


def broadcast_in_dim(array: Any, rank: int, dims: Sizes) -> np.ndarray:
    """Put the axes of ``array`` at ``dims`` of an array of ``rank``."""
    array = np.asarray(array)
    target = [1] * rank
    for size, dim in zip(array.shape, dims, strict=True):
        target[dim] = size
    return array.reshape(target)


def take_slice(array: np.ndarray, start: Sizes, stop: Sizes, step: Sizes | None) -> np.ndarray:
    """Slice the axes that vary."""
    step = step or [1] * array.ndim
    index = tuple(
        slice(None) if n == 1 else slice(a, b, c)
        for n, a, b, c in zip(array.shape, start, stop, step, strict=True)
    )
    return compact(array[index])


def concatenate(arrays: Sequence[np.ndarray], shapes: Sequence[Any], axis: int) -> np.ndarray:
    """Concatenate along ``axis``."""
    if all(a.shape == arrays[0].shape and same(a, arrays[0]) for a in arrays) and (
        arrays[0].shape[axis] == 1
    ):
        return arrays[0]
    others = np.broadcast_shapes(*(a.shape[:axis] + (1,) + a.shape[axis + 1 :] for a in arrays))
    parts = [
        np.broadcast_to(a, (*others[:axis], shape[axis], *others[axis + 1 :]))
        for a, shape in zip(arrays, shapes, strict=True)
    ]
    return compact(np.concatenate(parts, axis))


def pad(array: np.ndarray, fill: np.ndarray, config: Sequence[Sizes], shape: Any) -> np.ndarray:
    """Pad, crop and dilate as ``lax.pad`` does; ``shape`` is that of ``array``."""
    for axis, (low, high, inner) in enumerate(config):
        if low == high == inner == 0:
            continue
        array = expand(array, (axis,), [*array.shape[:axis], shape[axis], *array.shape[axis + 1 :]])
        size = (shape[axis] - 1) * (inner + 1) + 1 if shape[axis] else 0
        full = np.full(
            [*array.shape[:axis], max(low, 0) + size + max(high, 0), *array.shape[axis + 1 :]],
            fill.reshape(()),
            array.dtype,
        )
        index: list[Any] = [slice(None)] * array.ndim
        index[axis] = slice(max(low, 0), max(low, 0) + size, inner + 1)
        full[tuple(index)] = array
        index[axis] = slice(max(-low, 0), full.shape[axis] - max(-high, 0))
        array = full[tuple(index)]
    return compact(array)


def product(lhs: np.ndarray, rhs: np.ndarray, dims: Any) -> tuple[list[np.ndarray], int] | None:
    """The factors of a ``dot_general`` laid out to broadcast as (batch, left, right, contracted).

    Also the number of contracted axes, which come last.
    """
    (lc, rc), (lb, rb) = dims
    lf = [d for d in range(lhs.ndim) if d not in (*lc, *lb)]
    rf = [d for d in range(rhs.ndim) if d not in (*rc, *rb)]
    left = lhs.transpose([*lb, *lf, *lc])
    right = rhs.transpose([*rb, *rf, *rc])
    nb, nl, nr = len(lb), len(lf), len(rf)
    left = left.reshape((*left.shape[: nb + nl], *[1] * nr, *left.shape[nb + nl :]))
    right = right.reshape((*right.shape[:nb], *[1] * nl, *right.shape[nb:]))
    if math.prod(np.broadcast_shapes(left.shape, right.shape)) > _LIMIT:
        return None
    return [left, right], len(lc)


def axis_range(size: Any, axis: Any, rank: int) -> np.ndarray:
    """0, 1, 2, ... along ``axis``."""
    shape = [1] * rank
    shape[axis] = size
    return np.arange(size).reshape(shape)
