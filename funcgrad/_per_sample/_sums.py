"""Sums and norms whose rounding error is known."""

import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad._compat import is_split

# How many numbers the compiler adds one after another, at the most.
_FOLD = 32

# How many arrays one loop adds entry by entry, at the most: more take long to compile.
_TOGETHER = 16


def wide(dtype: Any) -> Any:
    """The dtype to accumulate in: float32 (complex64), or the given one where wider."""
    return np.promote_types(dtype, np.float32)


def norm_dtype(leaves: Sequence[Any]) -> Any:
    """The real dtype of the norm of ``leaves``: float32 or wider."""
    real = {jnp.finfo(leaf.dtype).dtype for leaf in leaves}
    return functools.reduce(np.promote_types, real, np.dtype(np.float32))


def scaled_norm(leaves: Sequence[Any]) -> tuple[Any, Any]:
    """The 2-norm as ``unit * ratio``.

    ``ratio`` is between one over the number of leaves and the root of that of entries, so
    neither factor overflows when the entries are finite, and it is not finite where one is
    not; an entry below the smallest normal number counts as 0.
    """
    inverse, square = _scaled_square([[jnp.zeros(0)], *[[leaf.ravel()] for leaf in leaves]])
    return 1 / inverse, jnp.sqrt(square)


@functools.partial(jax.jit, inline=True)  # to be traced once for each shape
def norm_over(parts: Sequence[Sequence[Any]]) -> Any:
    """The 2-norm over the last axis of some arrays together, whatever the size of their numbers.

    The arrays of a part are ``alike``.  Not finite where an entry is not, or where the norm
    overflows.
    """
    inverse, square = _scaled_square(parts)
    return jnp.sqrt(square) / inverse


def _scaled_square(parts: Sequence[Sequence[Any]]) -> tuple[Any, Any]:
    """A scale for arrays, and the squared 2-norm over their last axis of what they are then.

    The scale is one over a sum of their largest numbers, so that no square overflows, nor
    that of what is large underflows.  The square is not finite where an entry is not: that is
    not read off the peak, since on CPU the compiler's maximum of many numbers loses a NaN.
    """
    dtype = norm_dtype([x for part in parts for x in part])
    real = [
        # What the compiler knows as a constant it squares apart from its scale, and both overflow.
        [lax.optimization_barrier(y.astype(dtype)) for x in part for y in real_parts(x)]
        for part in parts
        if part[0].shape[-1]
    ]
    if not real:
        none = jnp.zeros(parts[0][0].shape[:-1], dtype)
        return jnp.ones_like(none), none
    # No smaller than the largest number; where it overflows, ``widest`` below does as well.
    peak = sum_by_pairs([_apart([jnp.abs(x) for x in xs], jnp.max) for xs in real])
    # Kept away from both ends of the range, where the reciprocal is flushed to zero.
    widest = 2.0 ** (jnp.finfo(dtype).maxexp - 8)
    inverse = 1 / jnp.minimum(jnp.maximum(peak, 1 / widest), widest)
    # The compiler adds a long row by parts, so that its rounding grows with the logarithm.
    scales = [jnp.broadcast_to(inverse[..., None], xs[0].shape) for xs in real]
    scaled = [[x * scale for x in xs] for xs, scale in zip(real, scales, strict=True)]
    return inverse, sum_by_pairs([total_of_squares(xs, 1) for xs in scaled])


def total_of_squares(arrays: Sequence[Any], n_axes: int) -> Any:
    """The sum of the squares of some arrays of one shape, over their last axes."""
    return _apart([jnp.square(x) for x in arrays], jnp.sum, n_axes)


def _apart(arrays: Sequence[Any], reduce: Any, n_axes: int = 1) -> Any:
    """What ``reduce`` makes of the last axes of the sum of some arrays.

    The compiler puts reductions of a few numbers into the loop that adds them to others, and
    with many arrays that loop takes long to compile.  So a product adds them, past which it does
    not see; they are not negative, and where a maximum is asked for a sum serves.
    """
    total = sum_by_pairs(arrays)
    axes = tuple(range(total.ndim - n_axes, total.ndim))
    shape = [total.shape[d] for d in axes]
    if len(arrays) == 1 or math.prod(shape) > _FOLD or any(is_split(total, d) for d in axes):
        return reduce(total, axes)
    ones = jnp.ones((*shape, 2), total.dtype)
    return jnp.tensordot(total, ones, n_axes, precision=lax.Precision.HIGHEST)[..., 0]


def sum_by_pairs(terms: Sequence[Any]) -> Any:
    """The sum of some arrays, whose error grows with the logarithm of their number."""
    if len(terms) == 1:
        return terms[0]
    if len(terms) > _FOLD and all(x.ndim == 1 and not is_split(x, 0) for x in terms):
        # The compiler makes one loop of all additions, and takes a second for three hundred.
        # Past a product it does not see.
        groups = [terms[k : k + _TOGETHER] for k in range(0, len(terms), _TOGETHER)]
        return sum_by_pairs([sums_of_rows(jnp.ones(len(g)), [_rows(g)])[0] for g in groups])
    half = len(terms) // 2
    return sum_by_pairs(terms[:half]) + sum_by_pairs(terms[half:])


@functools.partial(jax.jit, inline=True)
def _rows(vectors: Sequence[Any]) -> Any:
    return jnp.concatenate(vectors).reshape(len(vectors), -1)


def sums_of_rows(weights: Any, arrays: Sequence[Any]) -> list[Any]:
    """The weighted sum over the first axis of each array.

    A product, since on CPU a reduction over the first axis takes fifty times as long.  Of two
    equal rows: one by itself the compiler turns into a loop of its own for each such product.
    """
    both = jnp.stack([weights, weights])
    return [_product_of_rows(both, x)[0] for x in arrays]


@functools.partial(jax.jit, inline=True)
def _product_of_rows(weights: Any, rows: Any) -> Any:
    weights = weights.astype(rows.dtype)
    return jnp.einsum("mn,n...->m...", weights, rows, precision=lax.Precision.HIGHEST)


def alike(named: Iterable[tuple[str, Any]]) -> list[list[Any]]:
    """Arrays in groups of one shape, a few in each, to be added entry by entry.

    One loop does that and is compiled once for all groups of a kind; many arrays one by one
    take long to compile.  Those of one name but for its numbers are a leaf of several layers,
    which lie alike on the devices too.
    """
    found: dict[Any, list[Any]] = {}
    for name, x in named:
        kind = re.sub(r"\d+", "", name), x.shape, x.dtype, jax.typeof(x).sharding
        found.setdefault(kind, []).append(x)
    return [xs[k : k + _TOGETHER] for xs in found.values() for k in range(0, len(xs), _TOGETHER)]


def norm_slack(n_entries: int) -> int:
    """Units of roundoff by which ``scaled_norm``, and a scaling by it, may be off."""
    levels = math.ceil(math.log(max(2, n_entries), _FOLD)) + 3
    return 8 + _FOLD // 2 * levels


def flat(x: Any) -> Any:
    """As (batch, n); the batch may be empty, where a reshape to -1 does not know n."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def real_parts(leaf: Any) -> list[Any]:
    """The real and the imaginary part of a complex array, or a real one itself."""
    return [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]


def compensated_sum(x: Any) -> tuple[Any, Any]:
    """The sum over the first axis and its rounding error, as if in twice the precision."""
    if is_split(x, 0):  # an explicit sharding can be summed over, not cut
        total = x.sum(0)
        return total, jnp.zeros_like(total)
    zero = jnp.zeros_like(x[0])
    sums, _ = lax.scan(lambda sums, row: (_add_row(sums, row), None), (zero, zero), x)
    return sums


def _add_row(sums: Any, row: Any) -> Any:
    total, error = two_sum(sums[0], row)
    return total, sums[1] + error


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """``a + b`` rounded, and what the rounding left out (Knuth)."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def add_compensated(sums: Any, more: Any) -> Any:
    """Add two trees of (sum, error) pairs; pairs are tuples."""

    def add(a: Any, b: Any) -> Any:
        total, error = two_sum(a[0], b[0])
        return total, a[1] + b[1] + error

    return jax.tree.map(add, sums, more, is_leaf=lambda leaf: isinstance(leaf, tuple))
