"""Each sample's norms of groups of leaves: fast from the records, or exact from the gradients."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from funcgrad._compat import gathered
from funcgrad._per_sample._factors import Squares, squares_of
from funcgrad._per_sample._leaf_norms import (
    has_lost_digits,
    leaf_arrays,
    leaf_squares,
    lies_in_memory,
)
from funcgrad._per_sample._records import NONE_FORMED, Formed, Records
from funcgrad._per_sample._sums import alike, flat, norm_over, sum_by_pairs

# So many arrays that the backward pass gave are left as they are: a bias has the cotangent of the
# product beside it, and the two share its norm.
_FEW = 16


def squares(
    records: Records, groups: Sequence[Sequence[int]], formed: Formed = NONE_FORMED
) -> list[Any]:
    """Each sample's squared norm of each group of leaves; exact where digits were lost."""
    of_leaf, shared = _squares(records, groups, formed)
    values = {i: square.value for i, square in of_leaf.items()}
    fragile = [i for i in of_leaf if records.scheme.roads[i].is_fragile and i not in formed]
    if fragile and records.scheme.n_samples:
        # One reduction for all leaves: each takes as long to compile as a product.
        lost = functools.reduce(jnp.logical_or, [has_lost_digits(of_leaf[i]) for i in fragile])
        again = lax.cond(
            jnp.any(lost),
            lambda: [
                square.value.astype(records.dtype) for square in _exact_squares(records, fragile)
            ],
            lambda: gathered([values[i].astype(records.dtype) for i in fragile]),
        )
        values.update(zip(fragile, again, strict=True))
    none = jnp.zeros(records.scheme.n_samples, records.dtype)
    return [
        sum_by_pairs([none, *(x.value for x in more), *(values[i] for i in mine if i in values)])
        for mine, more in zip(groups, shared, strict=True)
    ]


def fast_squares(
    records: Records, groups: Sequence[Sequence[int]], formed: Formed = NONE_FORMED
) -> list[list[Squares]]:
    """The squared norms whose sum is that of each group, by each leaf's road.

    Of leaves that are ``formed`` from these.
    """
    of_leaf, shared = _squares(records, groups, formed)
    return [
        [*more, *(of_leaf[i] for i in mine if i in of_leaf)]
        for mine, more in zip(groups, shared, strict=True)
    ]


def _squares(
    records: Records, groups: Sequence[Sequence[int]], formed: Formed
) -> tuple[dict[int, Squares], list[list[Squares]]]:
    """Those of leaves by themselves, and for each group those of what is added together."""
    roads, n = records.scheme.roads, records.scheme.n_samples
    pairs = list(zip(records.operands, records.cotangents, strict=True))
    alone: list[int] = []
    shared: list[list[Squares]] = []
    for index in groups:
        kept = alike((roads[i].name, formed[i]) for i in index if i in formed)
        given = [i for i in index if roads[i].road == "value"]
        alone += [i for i in index if i not in formed and i not in given]
        shared.append([squares_of(*xs) for xs in (*kept, *_arrays(records, given))])
    exact = [i for i in alone if roads[i].parts is None]
    found = dict(zip(exact, _exact_squares(records, exact), strict=True))
    for i in alone:
        if i not in found:
            found[i] = leaf_squares(roads[i], records.scheme.sites, pairs, n)
    return found, shared


def _arrays(records: Records, index: Sequence[int]) -> list[list[Any]]:
    """Arrays (batch, n) whose norms together are those of leaves that lie in memory.

    Those ``alike`` in one list, if there are many.
    """
    pairs = list(zip(records.operands, records.cotangents, strict=True))
    roads, sites = records.scheme.roads, records.scheme.sites
    named = [(roads[i].name, x) for i in index for x in leaf_arrays(roads[i], sites, pairs)]
    return alike(named) if len(named) > _FEW else [[x] for _, x in named]


def exact_norms(
    records: Records, groups: Sequence[Sequence[int]], formed: Formed = NONE_FORMED
) -> list[Any]:
    """Each sample's norm of each group of leaves, whatever the size of the numbers.

    From gradients that are ``formed``, what the backward pass gave, or a loop that forms
    some at a time.  A branch that hardly ever runs takes this, so that what counts is how
    long it compiles: on CPU a reduction of what lies in memory takes the least.
    """
    roads, n = records.scheme.roads, records.scheme.n_samples
    arrays: list[list[list[Any]]] = []
    again: list[list[int]] = []
    for group in groups:
        rest = [i for i in group if i not in formed]
        given = _arrays(records, [i for i in rest if lies_in_memory(roads[i])])
        kept = alike((roads[i].name, flat(formed[i])) for i in group if i in formed)
        arrays.append([[jnp.zeros((n, 1), records.dtype)], *given, *kept])
        again.append([i for i in rest if not lies_in_memory(roads[i])])

    def one(sample: Any, _: Any) -> list[Any]:
        found = []
        for index in again:
            entries = zip(index, records.entries(sample, index), strict=True)
            named = [(roads[i].name, x.ravel()) for i, xs in entries for x in xs]
            found += [norm_over(alike(named))] if index else []
        return found

    looped = [i for index in again for i in index]
    found = iter(records.for_each(one, looped, records.row_bytes(looped)) if looped else [])
    for mine, index in zip(arrays, again, strict=True):
        if index:
            mine.append([next(found)[:, None]])
    return [norm_over(mine).astype(records.dtype) for mine in arrays]


def _exact_squares(records: Records, index: Sequence[int]) -> list[Squares]:
    """From the gradients themselves, some samples at a time."""
    if not index or not records.scheme.n_samples:
        return [Squares(*[jnp.zeros(0, records.dtype)] * 3) for _ in index]

    def one(sample: Any, _: Any) -> list[Squares]:
        found = []
        for arrays in records.entries(sample, index):
            squares = [squares_of(x.reshape(1, -1)) for x in arrays]
            columns = zip(*squares, strict=True)
            found.append(Squares(*(functools.reduce(jnp.add, xs)[0] for xs in columns)))
        return found

    return records.for_each(one, index, records.row_bytes(index))
