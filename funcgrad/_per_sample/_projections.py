"""Random projections of gradients: one sketch that factors and whole gradients both go into.

The entry of a leaf at ``(i, j, ...)`` is added, with sign ``s(i) t(j) ...``, to the bucket
``a(i) + b(j) + ...`` modulo the number of buckets; each axis has random signs and offsets of
its own.  For a gradient ``left^T right`` the buckets are the sum over terms of the circular
convolutions of what ``left`` and ``right`` alone put there: a product after Fourier
transforms, so that the gradient need not be formed.  One formed anyway goes in at the cost of
reading it.  All leaves share the buckets.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad._compat import gathered
from funcgrad._per_sample._batch import scan_chunks
from funcgrad._per_sample._factors import Factors, dense_axes, factors
from funcgrad._per_sample._plan import Site
from funcgrad._per_sample._records import Records
from funcgrad._per_sample._roads import factor_shapes

# What the samples of a chunk may hold: enough that adding to buckets runs over many of them.
_CHUNK_BYTES = 2**26
# Costs in multiplications of a product of matrices, as measured on a CPU: to put a number into
# its bucket, and to transform a row of n numbers, over n log n.
_ADD, _TRANSFORM = 100, 12

Axis = tuple[Any, Any]  # offsets and signs of its positions, arrays of equal shape


@dataclasses.dataclass(frozen=True)
class Side:
    """A site's factor and where it goes: ``at`` is (blocks or 1, entries) in both arrays."""

    values: Any  # (samples, blocks, terms, entries)
    at: Axis


def project(records: Records, key: Any, dim: int) -> Any:
    """The buckets of each sample's gradient, (samples, dim)."""
    n = records.scheme.n_samples
    if not n:
        return jnp.zeros((0, dim), records.dtype)
    leaves = [i for i, frozen in enumerate(records.scheme.is_frozen) if not frozen]
    axes = [
        _leaf_axes(jax.random.fold_in(key, i), p, dim)
        for i, p in zip(leaves, records.params, strict=True)
    ]
    factored, formed = _split(records)

    def chunk(_: None, samples: Any) -> tuple[None, Any]:
        operands, cotangents, numbers = samples
        m = len(numbers)
        total = jnp.zeros((m, dim), records.dtype)
        waves: Any = None
        if formed:
            rows = jax.vmap(lambda sample: records.row(sample, formed))(samples)
            for i, row in zip(formed, rows, strict=True):
                total += _of_rows(row, axes[i], dim).astype(total.dtype)
        for k in factored:
            site = records.scheme.sites[k]
            f = factors(site, operands[k], cotangents[k])
            assert f is not None
            f = f.widened()
            if f.is_rows:
                total += _of_lookup(f, site, axes, dim).astype(total.dtype)
                continue
            left, right = _sides(f, site, axes)
            if _is_formed(f, dim):
                total += _of_product(left, right, dim).astype(total.dtype)
            else:
                wave = _waves(left, dim) * _waves(right, dim)
                wave = wave.sum((1, 2))
                waves = wave if waves is None else waves + wave
        if waves is not None:
            total += jnp.fft.irfft(waves, dim).astype(total.dtype)
        return None, total

    size = max(1, _CHUNK_BYTES // max(1, _bytes_each(records, factored, formed, dim)))
    return scan_chunks(chunk, None, gathered(records.by_sample()), size)[1]


def _leaf_axes(key: Any, leaf: Any, dim: int) -> list[Axis]:
    """Offsets and signs for each axis of a leaf; a complex one has an axis for its two parts."""
    sizes = [*leaf.shape, 2] if jnp.iscomplexobj(leaf) else list(leaf.shape) or [1]
    # One draw for all: each takes long to compile. Of its 31 other bits the rest by ``dim`` is
    # as good as uniform.
    bits = jax.random.bits(key, (sum(sizes),), jnp.uint32)
    signs = 2 * (bits & 1).astype(jnp.int32) - 1
    offsets = ((bits >> 1) % jnp.uint32(dim)).astype(jnp.int32)
    ends = np.cumsum(sizes)[:-1]
    return list(zip(jnp.split(offsets, ends), jnp.split(signs, ends), strict=True))


def _split(records: Records) -> tuple[list[int], list[int]]:
    """The sites whose factors are followed, and the leaves whose gradients are formed."""
    sites = records.scheme.sites
    formed = [
        i
        for i, road in enumerate(records.scheme.roads)
        if road.sites and not all(_is_followed(s) for s in sites if i in s.leaves)
    ]
    gone = set(formed)
    return [k for k, site in enumerate(sites) if not site.leaves & gone], formed


def _is_followed(site: Site) -> bool:
    layout = site.layout
    if site.kind == "value" or layout is None or layout.axes is None:
        return False
    if None in layout.scanned or len(layout.scanned) != sum(site.stacked):
        return False
    return site.kind != "gather" or factor_shapes(site.form) is not None


def _is_formed(f: Factors, dim: int) -> bool:
    """Whether forming the gradient costs less than transforming its terms."""
    blocks, terms, rows, columns = f.sizes
    whole = blocks * rows * columns * (terms + _ADD)
    transform = _TRANSFORM * dim * math.log2(2 * dim)
    return whole < blocks * terms * (_ADD * (rows + columns) + 2 * transform)


def _bytes_each(records: Records, factored: Sequence[int], formed: Sequence[int], dim: int) -> int:
    total = 3 * sum(records.params[i].size for i in formed)
    for k in factored:
        f = factor_shapes(records.scheme.sites[k].form)
        assert f is not None
        blocks, terms, rows, columns = f.sizes
        if f.is_rows:
            total += 3 * terms * columns
        else:
            whole = 2 * blocks * rows * columns
            total += whole if _is_formed(f, dim) else 5 * blocks * terms * dim
            total += 2 * blocks * terms * (rows + columns)
    return 8 * total


# Where the entries of a site's factors lie in its leaf.


def _combine(axes: Sequence[Axis]) -> Axis:
    """Offsets and signs of the entries of several axes, flattened."""
    to, sign = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    for a, s in axes:
        to, sign = (to[:, None] + a[None]).ravel(), (sign[:, None] * s[None]).ravel()
    return to, sign


def _placed(site: Site, axes: Sequence[list[Axis]]) -> Any:
    """The axes of the weight at a site, those of its loops, and what is fixed beside them."""
    layout = site.layout
    assert layout is not None
    assert layout.axes is not None
    own = axes[layout.leaf]
    cut = [
        (to[slice(*window)], sign[slice(*window)])
        for (to, sign), window in zip(own, layout.window, strict=True)
    ]
    none = (jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
    mine = [none if axis is None else cut[axis] for axis in layout.axes]
    loops = [cut[axis] for axis in layout.scanned if axis is not None]
    used = {*layout.axes, *layout.scanned}
    fixed = _combine([cut[axis] for axis in range(len(cut)) if axis not in used])
    return mine, loops, fixed


def _sides(f: Factors, site: Site, axes: Sequence[list[Axis]]) -> tuple[Side, Side]:
    mine, loops, fixed = _placed(site, axes)
    assert site.eqn is not None
    assert site.layout is not None
    if site.kind == "conv":
        # In the order of the patches that the factors are made of.
        out, features, *window = site.eqn.params["dimension_numbers"].rhs_spec
        rows = _combine([mine[d] for d in (*window, features)])
        # The blocks are groups of output channels.
        columns = _combine([*loops, mine[out]])
    else:
        blocks, inner, outer = _dense_order(site)
        rows = _combine([mine[d] for d in inner])
        columns = _combine([*loops, *(mine[d] for d in blocks), *(mine[d] for d in outer)])
    to, sign = _combine([fixed, columns])
    n_columns = f.right.shape[-1]
    columns = to.reshape(-1, n_columns), sign.reshape(-1, n_columns)
    right = f.right * site.layout.scale
    return Side(f.left, (rows[0][None], rows[1][None])), Side(right, columns)


def _dense_order(site: Site) -> tuple[list[int], list[int], list[int]]:
    """The weight's axes in the order in which ``factors`` flattens them."""
    d = dense_axes(site)
    assert site.layout is not None
    axes = site.layout.axes
    assert axes is not None

    def rank(u: int) -> int:
        axis = axes[u]
        return -1 if axis is None else axis

    return sorted(d.u_b, key=rank), sorted(d.u_c, key=rank), sorted(d.u_f, key=rank)


# Into the buckets.


def _add(values: Any, to: Any, dim: int) -> Any:
    """Numbers (entries, samples or more) added to buckets (dim, ...)."""
    return jnp.zeros((dim, *values.shape[1:]), values.dtype).at[to % dim].add(values)


def _of_rows(rows: Any, axes: list[Axis], dim: int) -> Any:
    """Gradients (samples, *shape) in the buckets (samples, dim)."""
    if jnp.iscomplexobj(rows):
        rows = jnp.stack([rows.real, rows.imag], -1)
    to, sign = _combine(axes)
    rows = rows.reshape(len(rows), -1) * sign.astype(rows.dtype)[None]
    return _add(rows.T, to, dim).T


def _of_product(left: Side, right: Side, dim: int) -> Any:
    """The same of ``left^T right``, formed."""
    a = left.values * left.at[1][None, :, None].astype(left.values.dtype)
    b = right.values * right.at[1][None, :, None].astype(right.values.dtype)
    grads = jnp.einsum("nbti,nbtj->bijn", a, b, precision=lax.Precision.HIGHEST)
    to = left.at[0][:, :, None] + right.at[0][:, None, :]
    return _add(grads.reshape(to.size, -1), to.ravel(), dim).T


def _waves(side: Side, dim: int) -> Any:
    """The Fourier transform of what one factor puts into the buckets, for each term."""
    to, sign = side.at
    values = side.values * sign[None, :, None].astype(side.values.dtype)
    by_block = jnp.moveaxis(values, (1, 3), (0, 1))  # (blocks, entries, samples, terms)
    to = jnp.broadcast_to(to, by_block.shape[:2])
    buckets = jax.vmap(functools.partial(_add, dim=dim))(by_block, to)
    return jnp.fft.rfft(jnp.moveaxis(buckets, (0, 1), (1, 3)), axis=-1)


def _of_lookup(f: Factors, site: Site, axes: Sequence[list[Axis]], dim: int) -> Any:
    """The buckets of rows that are looked up, added term by term."""
    mine, _, fixed = _placed(site, axes)
    assert site.eqn is not None
    assert site.layout is not None
    picked = site.eqn.params["dimension_numbers"].start_index_map
    row_to, row_sign = _combine([mine[d] for d in picked])
    rest = [mine[d] for d in range(len(mine)) if d not in picked]
    to, sign = _combine([fixed, *rest])
    ids = jnp.maximum(f.left, 0)
    signs = jnp.where(f.left >= 0, row_sign[ids], 0).astype(f.right.dtype)
    scale = sign.astype(f.right.dtype) * site.layout.scale
    spread = lambda x: x.reshape(*[1] * f.left.ndim, -1)
    values = f.right * signs[..., None] * spread(scale)
    at = (row_to[ids][..., None] + spread(to)).reshape(len(ids), -1)
    return jax.vmap(functools.partial(_add, dim=dim))(values.reshape(len(ids), -1), at)
