"""Norms where squares overflow or underflow, or where products of terms have cancelled.

A branch of every program and hardly ever run, so that what counts is how long it compiles. On
CPU a reduction of what lies in memory takes the least, a slice in a loop several times as long,
and putting computed numbers side by side the longest.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from funcgrad._compat import gathered
from funcgrad._per_sample._factors import factors
from funcgrad._per_sample._records import Formed, Records
from funcgrad._per_sample._roads import LeafRoad
from funcgrad._per_sample._sums import norm_dtype, real_parts, scaled_square, sum_by_pairs, wide

# Vectors of at most so many entries are put together: a copy that is measured at once.
_SHORT = 512


class _Scaled(NamedTuple):
    """Norms of each sample's vectors, ``unit * sqrt(square)``, both (samples, vectors)."""

    unit: Any
    square: Any


def exact_norms(
    records: Records, groups: Sequence[Sequence[int]], formed: Formed
) -> tuple[list[Any], Any]:
    """Each sample's norm of each group of leaves, and which samples are finite.

    ``formed`` are gradients in memory, by leaf.
    """
    roads, n = records.scheme.roads, records.scheme.n_samples
    single = {
        i: _single_terms(road, records)
        for i, road in enumerate(roads)
        if i not in formed and road.road in ("value", "product")
    }
    again = [i for i, r in enumerate(roads) if r.road != "unused" and i not in {**single, **formed}]
    looped = [[i for i in group if i in again] for group in groups]

    def of_one(sample: Any, _: Any) -> list[_Scaled]:
        entries = dict(zip(again, records.entries(sample, again), strict=True))
        mine = [[x[None] for i in index for x in entries[i]] for index in looped if index]
        return [_measured(_rows(arrays)) for arrays in mine]

    found = records.for_each(of_one, again, records.row_bytes(again)) if again else []
    measured = iter([_Scaled(*(x[:, 0] for x in scaled)) for scaled in found])
    norms, finite = [], jnp.ones(n, bool)
    for group, index in zip(groups, looped, strict=True):
        parts = [next(measured)] if index else []
        for i in group:
            for left, right, scale in single[i][1] if i in single else []:
                a, b = _measured([left]), _measured([right])
                parts.append(_Scaled(a.unit * b.unit, a.square * b.square * scale**2))
        values = [formed[i] for i in group if i in formed]
        values += [x for i in group if i in single for x in single[i][0]]
        parts += [_measured(_rows(values))] if values else []
        norm = _norm(parts) if parts else jnp.zeros(n)
        norms.append(gathered(norm.astype(records.dtype)))
        finite &= ~jnp.isnan(norms[-1])
    return norms, finite


def _single_terms(road: LeafRoad, records: Records) -> tuple[list[Any], list[Any]]:
    """What the gradients of a "value" or "product" leaf are made of.

    Their entries, (samples, ...); and the vectors whose outer products they are, ``left`` and
    ``right`` (samples, blocks, entries), with what scales them.
    """
    values, products = [], []
    for part in road.parts or ():
        (k,) = part.dense
        site = records.scheme.sites[k]
        assert site.layout is not None
        scale, g = abs(site.layout.scale), records.cotangents[k]
        if part.is_value:
            values.append(g if scale == 1 else g.astype(wide(g.dtype)) * scale)
            continue
        z, g = (jnp.moveaxis(x, len(site.lengths), 0) for x in (records.operands[k], g))
        f = factors(site, z, g)
        assert f is not None
        f = f.widened()
        products.append((f.left[:, :, 0], f.right[:, :, 0], scale))
    return values, products


def _rows(leaves: list[Any]) -> list[Any]:
    """Arrays (samples, ...) as (samples, 1, entries), the short ones as one."""
    flat = [part.reshape(len(part), 1, -1) for leaf in leaves for part in real_parts(leaf)]
    dtype = norm_dtype(flat)
    flat = [x.astype(dtype) for x in flat]
    short = [x for x in flat if x.shape[-1] <= _SHORT]
    long = [x for x in flat if x.shape[-1] > _SHORT]
    return [*long, jnp.concatenate(short, -1)] if len(short) > 1 else flat


def _measured(arrays: list[Any]) -> _Scaled:
    """The norms of vectors that lie in several arrays, (samples, vectors, entries).

    Not finite where an entry is not.
    """
    dtype = norm_dtype(arrays)
    parts = [part.astype(dtype) for x in arrays for part in real_parts(x) if x.shape[-1]]
    if not parts:
        none = jnp.zeros(arrays[0].shape[:-1], dtype)
        return _Scaled(jnp.ones_like(none), none)
    return _Scaled(*scaled_square(parts))


def _norm(parts: list[_Scaled]) -> Any:
    """Of all vectors of a sample: NaN where it is not finite; no square overflows."""
    units = [jnp.where(part.square > 0, part.unit, 0) for part in parts]
    top = functools.reduce(jnp.maximum, [unit.max(1) for unit in units])
    top = jnp.maximum(top, jnp.finfo(top.dtype).tiny)
    # One division for all, of what is near 1, since the reciprocal of the largest is flushed.
    nearer = jnp.where(top > 1, 2.0**-24, 2.0**24).astype(top.dtype)
    inverse = 1 / (top * nearer)
    squares = [
        (part.square * jnp.square((unit * nearer[:, None]) * inverse[:, None])).sum(1)
        for part, unit in zip(parts, units, strict=True)
    ]
    total = sum_by_pairs(squares)
    # Infinite where the largest entry is, a product that overflows.
    return jnp.where(jnp.isfinite(total) & jnp.isfinite(top), top * jnp.sqrt(total), jnp.nan)
