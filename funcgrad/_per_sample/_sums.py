"""Sums and norms whose rounding error is known."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad._compat import is_split

# How many numbers the compiler adds one after another, at the most.
_FOLD = 32

# What ``in_few`` puts side by side: rows of so many numbers at the most, so many arrays at a time.
_SHORT, SIDE_BY_SIDE = 2**12, 16


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
    inverse, square = _scaled_square([jnp.zeros(0), *[leaf.ravel() for leaf in leaves]])
    return 1 / inverse, jnp.sqrt(square)


@functools.partial(jax.jit, inline=True)  # to be traced once for each shape
def norm_over(parts: Sequence[Any]) -> Any:
    """The 2-norm over the last axis of some arrays together, whatever the size of their numbers.

    Not finite where an entry is not, or where the norm overflows.
    """
    inverse, square = _scaled_square(parts)
    return jnp.sqrt(square) / inverse


def _scaled_square(parts: Sequence[Any]) -> tuple[Any, Any]:
    """A scale for arrays, and the squared 2-norm over their last axis of what they are then.

    The scale is one over the sum of their largest numbers, so that no square overflows, nor
    that of what is large underflows.  The square is not finite where an entry is not: that is
    not read off the peak, since on CPU the compiler's maximum of many numbers loses a NaN.
    """
    dtype = norm_dtype(parts)
    real = [x.astype(dtype) for part in parts for x in real_parts(part) if x.shape[-1]]
    if not real:
        none = jnp.zeros(parts[0].shape[:-1], dtype)
        return jnp.ones_like(none), none
    # What the compiler knows as a constant it squares apart from its scale, and both overflow.
    real = [lax.optimization_barrier(x) for x in real]
    # No smaller than the largest number; where it overflows, ``widest`` below does as well.
    peak = sum_by_pairs([jnp.max(jnp.abs(x), -1) for x in real])
    # Kept away from both ends of the range, where the reciprocal is flushed to zero.
    widest = 2.0 ** (jnp.finfo(dtype).maxexp - 8)
    inverse = 1 / jnp.minimum(jnp.maximum(peak, 1 / widest), widest)
    # The compiler adds a long row by parts, so that its rounding grows with the logarithm.
    return inverse, sum_by_pairs([jnp.square(x * inverse[..., None]).sum(-1) for x in real])


def sum_by_pairs(terms: Sequence[Any]) -> Any:
    """The sum of some arrays, whose error grows with the logarithm of their number."""
    if len(terms) == 1:
        return terms[0]
    if len(terms) > _FOLD and all(x.ndim == 1 and not is_split(x, 0) for x in terms):
        # The compiler makes one loop of all additions, and takes a second for three hundred.
        # Past a product it does not see.
        some = _FOLD // 2
        groups = [terms[k : k + some] for k in range(0, len(terms), some)]
        return sum_by_pairs([sum_of_rows(jnp.ones(len(g)), _rows(g)) for g in groups])
    half = len(terms) // 2
    return sum_by_pairs(terms[:half]) + sum_by_pairs(terms[half:])


@functools.partial(jax.jit, inline=True)
def _rows(vectors: Sequence[Any]) -> Any:
    return jnp.concatenate(vectors).reshape(len(vectors), -1)


@functools.partial(jax.jit, inline=True)
def sum_of_rows(weights: Any, rows: Any) -> Any:
    """The weighted sum over the first axis.

    A product, since on CPU a reduction over the first axis takes fifty times as long.  Of two
    equal rows: one by itself the compiler turns into a loop of its own for each such product.
    """
    both = jnp.stack([weights, weights]).astype(rows.dtype)
    return jnp.einsum("mn,n...->m...", both, rows, precision=lax.Precision.HIGHEST)[0]


def in_few(arrays: Sequence[Any]) -> list[Any]:
    """The same numbers in fewer arrays, those with short rows (..., n) put side by side.

    One after another, many small arrays take long to compile.
    """
    found, short = [], {}
    for x in arrays:
        spec = jax.typeof(x).sharding.spec
        is_short = x.shape[-1] <= _SHORT and all(axis is None for axis in spec)
        if is_short and len(arrays) > SIDE_BY_SIDE:
            short.setdefault(x.dtype, []).append(x)
        else:
            found.append(x)
    for xs in short.values():
        for k in range(0, len(xs), SIDE_BY_SIDE):
            some = xs[k : k + SIDE_BY_SIDE]
            found.append(lax.concatenate(some, some[0].ndim - 1) if len(some) > 1 else some[0])
    return found


def norm_slack(n_entries: int) -> int:
    """Units of roundoff by which ``scaled_norm``, and a scaling by it, may be off."""
    levels = math.ceil(math.log(max(2, n_entries), _FOLD)) + 3
    return 8 + _FOLD // 2 * levels


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
