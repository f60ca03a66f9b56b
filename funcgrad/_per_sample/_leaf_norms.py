"""The norms of one leaf's gradients, along its road."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._per_sample._factors import (
    Factors,
    Squares,
    factors,
    join,
    product,
    product_norms,
    rows_times_dense,
    squared_norms,
    squares_of,
)
from funcgrad._per_sample._forms import by_form
from funcgrad._per_sample._map_samples import map_samples
from funcgrad._per_sample._plan import Site
from funcgrad._per_sample._roads import LeafRoad, Part, site_shapes
from funcgrad._per_sample._sums import flat, wide

# A Gram norm has lost too many digits when it is below this many roundings of its terms.
_LOST = 1e5


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["gram"])
@dataclasses.dataclass(frozen=True)
class NormSlot:
    """A site's slot whose cotangent is its ``Squares``, (*loops, 3)."""

    value: Any
    gram: bool


def norm_slots(roads: Sequence[LeafRoad], sites: Sequence[Site]) -> dict[int, NormSlot]:
    """The sites whose norms can be taken on the way back, before their records are kept.

    One site alone makes the norm of its part, and no loop adds to one weight.
    """
    found = {}
    for road in roads:
        for part in road.parts or ():
            if part.is_value or part.rows or len(part.dense) != 1:
                continue
            site = sites[part.dense[0]]
            if all(site.stacked):
                zeros = jnp.zeros((*site.lengths, 3), wide(site.output.dtype))
                found[part.dense[0]] = NormSlot(zeros, part.gram)
    return found


@by_form
def site_norm(site: Site, operand: Any, cotangent: Any, *, gram: bool) -> Any:
    """The ``Squares`` at a site of one sample, in one iteration of its loops."""
    here = dataclasses.replace(site, lengths=(), stacked=())
    f = factors(here, operand[None], cotangent[None])
    assert f is not None
    return jnp.concatenate(squared_norms(f, gram)) * _scale(site) ** 2


def leaf_squares(
    road: LeafRoad, sites: Sequence[Site], records: Sequence[Any], n_samples: int
) -> Squares:
    """Each sample's squared norm of a leaf.

    The sample axis of a site's record is behind those of its loops.
    """
    mine, parts = _placed(road)
    return _squares(
        tuple(sites[k] for k in mine),
        [records[k] for k in mine],
        parts=parts,
        n_samples=n_samples,
    )


def leaf_entries(road: LeafRoad, sites: Sequence[Site], records: Sequence[Any]) -> list[Any]:
    """Arrays that hold the entries of a leaf's gradient, (samples, ...), in no certain order.

    For a leaf without lookups; laid out as it is, the gradient would take one more copy.
    """
    mine, parts = _placed(road)
    return _entries(tuple(sites[k] for k in mine), [records[k] for k in mine], parts=parts)


def lies_in_memory(road: LeafRoad) -> bool:
    """Whether a leaf's gradient is made of values and single products, or of nothing."""
    return road.road in ("value", "product", "unused")


def leaf_arrays(road: LeafRoad, sites: Sequence[Site], records: Sequence[Any]) -> list[Any]:
    """Arrays (samples, ...) whose norms together are that of a leaf that ``lies_in_memory``."""
    mine, parts = _placed(road)
    return _arrays(tuple(sites[k] for k in mine), [records[k] for k in mine], parts=parts)


@by_form
def _arrays(sites: tuple[Site, ...], records: Any, *, parts: tuple[Part, ...]) -> list[Any]:
    found = []
    for part in parts:
        (k,) = part.dense
        if part.is_value:
            found.append(flat(_value(sites[k], records[k])))
        else:
            f = _joined(part.dense, sites, records)
            assert f is not None
            found.append(product_norms(f)[:, None])
    return found


def _value(site: Site, record: Any) -> Any:
    """What the backward pass gave, as it is in the leaf but for its sign."""
    g, scale = record[1], abs(_scale(site))
    g = g.astype(wide(g.dtype))
    return g if scale == 1 else g * scale  # a product by 1 for each leaf takes its time to compile


def _placed(road: LeafRoad) -> tuple[list[int], tuple[Part, ...]]:
    """The sites of a leaf, and its parts with the places of their sites in that list."""
    mine = [k for part in road.parts or () for k in (*part.rows, *part.dense)]
    place = {k: i for i, k in enumerate(mine)}
    return mine, tuple(
        dataclasses.replace(
            part,
            rows=tuple(place[k] for k in part.rows),
            dense=tuple(place[k] for k in part.dense),
        )
        for part in road.parts or ()
    )


@by_form
def _entries(sites: tuple[Site, ...], records: Any, *, parts: tuple[Part, ...]) -> list[Any]:
    found = []
    for part in parts:
        if part.is_value:
            found.append(_value(sites[part.dense[0]], records[part.dense[0]]))
        else:
            joined = _joined(part.dense, sites, records)
            assert joined is not None
            found.append(product(joined.widened()))
    return found


@by_form
def _squares(
    sites: tuple[Site, ...], records: Any, *, parts: tuple[Part, ...], n_samples: int
) -> Squares:
    dtype = functools.reduce(
        np.promote_types, [wide(site.output.dtype) for site in sites], np.dtype(np.float32)
    )
    dtype = jnp.finfo(dtype).dtype
    total = Squares(*[jnp.zeros(n_samples, dtype)] * 3)
    for part in parts:
        if part.is_value:
            (k,) = part.dense
            found = squares_of(_value(sites[k], records[k]))
        elif not n_samples:
            continue
        elif len(part.dense) == 1 and isinstance(records[part.dense[0]][1], NormSlot):
            stacked = records[part.dense[0]][1].value
            found = Squares(*stacked.sum(tuple(range(stacked.ndim - 2))).T)
        else:
            mine = {k: records[k] for k in (*part.rows, *part.dense)}
            axes = {k: jax.tree.map(lambda _, k=k: len(sites[k].lengths), mine[k]) for k in mine}
            some = functools.partial(_squares_of_part, part, sites)
            found = map_samples(some, mine, axes, n_samples, _part_bytes(part, sites))
        total = Squares(*(a + b for a, b in zip(total, found, strict=True)))
    return total


def _squares_of_part(part: Part, sites: tuple[Site, ...], records: Any) -> Squares:
    rows, dense = _joined(part.rows, sites, records), _joined(part.dense, sites, records)
    squares = [squared_norms(x, part.gram) for x in (rows, dense) if x is not None]
    total = Squares(*(sum(column) for column in zip(*squares, strict=True)))
    if rows is not None and dense is not None:
        total = total._replace(value=total.value + 2 * jax.vmap(rows_times_dense)(rows, dense))
    return total


@functools.partial(jax.jit, inline=True)  # to be traced once for all leaves
def has_lost_digits(squares: Squares) -> Any:
    """Where a squared norm is so far below what cancelled to make it that few digits hold."""
    return squares.value < _LOST * float(jnp.finfo(squares.value.dtype).eps) * squares.mass


def _joined(group: Sequence[int], sites: Sequence[Site], records: Any) -> Factors | None:
    """The factors of samples at several sites of one weight, their terms together."""
    joined: Factors | None = None
    for k in group:
        z, g = (jnp.moveaxis(x, len(sites[k].lengths), 0) for x in records[k])
        f = factors(sites[k], z, g)
        assert f is not None
        scale = _scale(sites[k])
        if scale != 1:
            f = dataclasses.replace(f, right=f.right * scale)
        joined = f if joined is None else join(joined, f)
    return joined


def _part_bytes(part: Part, sites: Sequence[Site]) -> int:
    """What the norm of one sample holds at a time, beside the records."""
    total, terms, blocks = 0, 0, 1
    for k in (*part.rows, *part.dense):
        blocks, t, n, m = site_shapes(sites[k]).sizes
        terms += t
        # The product of single terms is never formed.
        total += 0 if part.gram or t == 1 else blocks * n * m
        # Patches are put together, and what loops stacked is laid out anew.
        copies = 2 if sites[k].kind == "conv" else 1 if sites[k].lengths else 0
        total += copies * blocks * t * n + (blocks * t * m if sites[k].lengths else 0)
    return 4 * (total + (2 * blocks * terms**2 if part.gram else 0))


def patch_bytes(site: Site) -> int:
    """What the patches of one sample take, at a convolution."""
    blocks, terms, rows, _ = site_shapes(site).sizes
    return 4 * blocks * terms * rows


def _scale(site: Site) -> float:
    assert site.layout is not None
    return site.layout.scale
