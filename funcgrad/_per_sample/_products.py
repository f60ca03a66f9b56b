"""Inner products between the gradients of two batches, from their factors where that is less."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from funcgrad._compat import gathered
from funcgrad._per_sample._factors import factors
from funcgrad._per_sample._records import Records
from funcgrad._per_sample._roads import Part
from funcgrad._per_sample._sums import wide


def gram(mine: Records, theirs: Records) -> Any:
    """Every inner product (my samples, their samples).

    A leaf whose gradients are single outer products, or are there as they are, costs two
    small products of matrices; the others are formed for one of their samples at a time.
    """
    n, m = mine.scheme.n_samples, theirs.scheme.n_samples
    total = jnp.zeros((n, m), mine.dtype)
    if not n or not m:
        return total
    pairs = zip(mine.scheme.roads, theirs.scheme.roads, strict=True)
    easy = [a.road in ("value", "product") and a.parts == b.parts for a, b in pairs]
    for i, road in enumerate(mine.scheme.roads):
        for part in (road.parts or ()) if easy[i] else ():
            total = total + _of_part(part, mine, theirs).astype(total.dtype)
    rest = [i for i, skip in enumerate(easy) if not skip and mine.scheme.roads[i].sites]
    if not rest:
        return total

    def column(sample: Any) -> Any:
        rows = dict(zip(rest, theirs.row(sample, rest), strict=True))
        return mine.dots(
            [rows[i].conj() if i in rows else jnp.zeros_like(p) for i, p in enumerate(mine.params)]
        )

    return total + lax.map(column, gathered(theirs.by_sample())).T


def _of_part(part: Part, mine: Records, theirs: Records) -> Any:
    (k,) = part.dense
    site = mine.scheme.sites[k]
    scale = site.layout.scale**2 if site.layout else 1
    if part.is_value:
        a, b = (
            r.cotangents[k].reshape(r.scheme.n_samples, -1).astype(wide(r.cotangents[k].dtype))
            for r in (mine, theirs)
        )
        return scale * jnp.real(a @ b.conj().T)
    sides = []
    for records in (mine, theirs):
        operands, cotangents, *_ = records.by_sample()
        f = factors(records.scheme.sites[k], operands[k], cotangents[k])
        assert f is not None
        sides.append(f.widened())
    a, b = sides
    left = jnp.einsum("nbti,mbti->bnm", a.left, b.left, precision=lax.Precision.HIGHEST)
    right = jnp.einsum("nbtj,mbtj->bnm", a.right, b.right, precision=lax.Precision.HIGHEST)
    return scale * jnp.sum(left * right, 0)
