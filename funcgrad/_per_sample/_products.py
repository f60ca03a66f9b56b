"""Inner products between the gradients of two batches, from their factors where that is less."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from funcgrad._compat import gathered
from funcgrad._per_sample._batch import scan_chunks
from funcgrad._per_sample._factors import Factors, factors, join
from funcgrad._per_sample._plan import Site
from funcgrad._per_sample._records import Records
from funcgrad._per_sample._roads import LeafRoad, Part
from funcgrad._per_sample._sums import wide

# What the gradients of a leaf that are formed at a time may take.
_BYTES = 2**26
_EXACT = lax.Precision.HIGHEST


def gram(mine: Records, theirs: Records) -> Any:
    """Every inner product (my samples, their samples).

    Where gradients are single outer products, or are there as they are, two small products of
    matrices; for lookups, products of the terms that meet at a row; other gradients are
    formed, one leaf and some samples at a time.
    """
    n, m = mine.scheme.n_samples, theirs.scheme.n_samples
    total = jnp.zeros((n, m), mine.dtype)
    if not n or not m:
        return total
    for i, (a, b) in enumerate(zip(mine.scheme.roads, theirs.scheme.roads, strict=True)):
        if not a.sites:
            continue
        parts = a.parts if a.parts == b.parts and _lie_alike(a, mine, theirs) else None
        if parts is None or any(part.rows and part.dense for part in parts):
            size = mine.params[i].size

            def row(records: Records, sample: Any, i: int = i) -> Any:
                return records.row(sample, [i])[0].ravel()

            total = total + _formed(row, mine, theirs, size).astype(total.dtype)
            continue
        for part in parts:
            total = total + _of_part(part, mine, theirs).astype(total.dtype)
    return total


def _lie_alike(road: LeafRoad, mine: Records, theirs: Records) -> bool:
    """Whether factors of both are laid out alike: the losses may be two, or lengths differ."""
    sites = [k for part in road.parts or () for k in (*part.rows, *part.dense)]

    def place(site: Site) -> Any:
        numbers = site.eqn.params["dimension_numbers"] if site.eqn is not None else None
        groups = site.eqn.params.get("feature_group_count") if site.eqn is not None else None
        stacked = [n for n, s in zip(site.lengths, site.stacked, strict=True) if s]
        return site.kind, site.layout, site.position, stacked, site.var.aval.shape, numbers, groups

    return all(place(mine.scheme.sites[k]) == place(theirs.scheme.sites[k]) for k in sites)


def _of_part(part: Part, mine: Records, theirs: Records) -> Any:
    if part.is_value:
        (k,) = part.dense
        layout = mine.scheme.sites[k].layout
        scale = layout.scale**2 if layout else 1
        a, b = (
            r.cotangents[k].reshape(r.scheme.n_samples, -1).astype(wide(r.cotangents[k].dtype))
            for r in (mine, theirs)
        )
        return scale * jnp.real(jnp.matmul(a, b.conj().T, precision=_EXACT))
    one = lambda records, sample: _joined(part.rows or part.dense, records.scheme.sites, sample)
    sizes = []
    for records in (mine, theirs):
        samples = records.by_sample()
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), samples)
        sizes.append(jax.eval_shape(lambda s, r=records: one(r, s), first).sizes)
    blocks, _, rows, columns = sizes[0]
    if part.rows or all(terms == 1 for _, terms, *_ in sizes):
        a, b = (jax.vmap(lambda s, r=r: one(r, s))(r.by_sample()) for r in (mine, theirs))
        return _of_lookups(a, b) if part.rows else _of_products(a, b)

    def row(records: Records, sample: Any) -> Any:
        f = one(records, sample)
        return jnp.einsum("bti,btj->bij", f.left, f.right, precision=_EXACT).ravel()

    return _formed(row, mine, theirs, blocks * rows * columns)


def _of_products(a: Factors, b: Factors) -> Any:
    """Of single outer products: the products of either side multiply."""
    left = jnp.einsum("nbti,mbti->bnm", a.left, b.left, precision=_EXACT)
    right = jnp.einsum("nbtj,mbtj->bnm", a.right, b.right, precision=_EXACT)
    return jnp.sum(left * right, 0)


def _of_lookups(a: Factors, b: Factors) -> Any:
    """Of rows that are looked up: terms multiply where they are of the same row."""

    def column(sample: Any) -> Any:
        ids, right = sample
        same = (a.left[..., None] == ids) & (ids >= 0)
        products = jnp.einsum("ntj,sj->nts", a.right, right, precision=_EXACT)
        return jnp.sum(jnp.where(same, products, 0), (1, 2))

    return lax.map(column, gathered((b.left, b.right))).T


def _joined(group: tuple[int, ...], sites: tuple[Site, ...], sample: Any) -> Factors:
    """The factors of one sample at several sites of one weight, their terms together."""
    operands, cotangents, _ = sample
    joined: Factors | None = None
    for k in group:
        f = factors(sites[k], operands[k][None], cotangents[k][None])
        layout = sites[k].layout
        assert f is not None
        assert layout is not None
        f = f.widened()
        f = Factors(f.left[0], f.right[0] * layout.scale, f.key, f.is_rows)
        joined = f if joined is None else join(joined, f)
    assert joined is not None
    return joined


def _formed(row: Callable[[Records, Any], Any], mine: Records, theirs: Records, size: int) -> Any:
    """Of vectors of ``size`` numbers, ``row(records, sample)``: as many at a time as fit."""
    n, m = mine.scheme.n_samples, theirs.scheme.n_samples
    many = max(1, _BYTES // (4 * max(1, size)))
    form = lambda records, samples: jax.vmap(lambda sample: row(records, sample))(samples)
    product = lambda a, b: jnp.real(jnp.matmul(a, b.conj().T, precision=_EXACT))
    if max(n, m) <= many:
        rows = form(mine, mine.by_sample())
        return product(rows, rows if theirs is mine else form(theirs, theirs.by_sample()))
    samples = gathered(mine.by_sample())

    def columns(_: None, chunk: Any) -> tuple[None, Any]:
        b = form(theirs, chunk)
        step = lambda _, chunk: (None, product(form(mine, chunk), b))
        return None, scan_chunks(step, None, samples, many)[1].T

    return scan_chunks(columns, None, gathered(theirs.by_sample()), many)[1].T
