"""Gradients of tables that are only looked up: the rows that samples touch, and no others."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad._per_sample._factors import factors
from funcgrad._per_sample._records import Records
from funcgrad._per_sample._sums import two_sum, wide

# By how much a table is larger than the rows that a chunk reads of it.
_WORTH = 8


@dataclasses.dataclass(frozen=True)
class Rows:
    """A sum of gradients that is zero but at some rows of its leaf.

    ``values`` (terms, columns) add to the rows ``ids`` (terms,); -1 is no row.
    """

    ids: Any
    values: Any


def weighted_rows(records: Records, weights: Any, leaf: int) -> Rows | None:
    """The weighted sum of a leaf's gradients by rows; ``None`` where that is no less work."""
    sites = [k for k, site in enumerate(records.scheme.sites) if leaf in site.leaves]
    param = records.params[leaf]
    numbers = sum(records.cotangents[k].size for k in sites)
    if not sites or _WORTH * numbers > param.size:
        return None
    found = []
    for k in sites:
        site = records.scheme.sites[k]
        if site.kind != "gather" or site.var.aval.shape != param.shape:
            return None
        depth = len(site.lengths)
        operand, cotangent = (
            jnp.moveaxis(x, depth, 0) for x in (records.operands[k], records.cotangents[k])
        )
        f = factors(site, operand, cotangent)
        # The rows are looked up along the first axes, so that the leaf is a table of them.
        if f is None or f.key is None or f.key[1] != tuple(range(len(f.key[1]))):
            return None
        assert site.layout is not None
        f = f.widened()
        scale = weights[:, None, None].astype(f.right.dtype)
        # Zero times NaN is NaN: what does not count is blanked.
        values = jnp.where(scale != 0, f.right * scale, 0) * site.layout.scale
        found.append((f.left.ravel(), values.reshape(-1, values.shape[-1])))
    ids, values = zip(*found, strict=True)
    return Rows(jnp.concatenate(ids), jnp.concatenate(values).astype(wide(param.dtype)))


def add_rows(sums: tuple[Any, Any], rows: Rows) -> tuple[Any, Any]:
    """Add rows to a pair of (sum, error), as ``add_compensated`` does the whole."""
    n_terms, n_columns = rows.values.shape
    total, error = (x.reshape(-1, n_columns) for x in sums)
    n_rows = len(total)
    # What meets at one row is added first: each row is then touched once.
    order = jnp.argsort(jnp.where(rows.ids < 0, n_rows, rows.ids))
    ids = jnp.where(rows.ids < 0, n_rows, rows.ids)[order]
    place = jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), ids[1:] != ids[:-1]]))
    more = jnp.zeros_like(rows.values).at[place].add(rows.values[order])
    touched = jnp.full((n_terms,), n_rows, ids.dtype).at[place].set(ids)
    new, lost = two_sum(total.at[touched].get(mode="fill", fill_value=0), more)
    total = total.at[touched].set(new, mode="drop")
    error = error.at[touched].add(lost, mode="drop")
    return total.reshape(sums[0].shape), error.reshape(sums[1].shape)


jax.tree_util.register_dataclass(Rows, ["ids", "values"], [])
