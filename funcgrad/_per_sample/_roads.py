"""Which road each leaf's norms take, decided from shapes."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax

from funcgrad._per_sample._factors import (
    Factors,
    factors,
    is_tied,
    join,
)
from funcgrad._per_sample._forms import Form
from funcgrad._per_sample._plan import Site
from funcgrad._per_sample._sums import wide

Road = Literal["auto", "gram", "direct", "materialize"]

# By how much a kept gradient may be larger than its factors, whose memory is free again when it
# is formed; and in a model that recomputes, because memory is what it lacks.
_KEPT, _KEPT_IN_REMAT = 2, 1


@dataclasses.dataclass(frozen=True)
class Part:
    """A share of a leaf's squared norm.

    ``rows`` are the gathers and ``dense`` the other sites whose terms add before the norm;
    a value is a ``dense`` part with ``is_value``.
    """

    rows: tuple[int, ...]
    dense: tuple[int, ...]
    gram: bool
    is_value: bool = False


@dataclasses.dataclass(frozen=True)
class LeafRoad:
    """How one leaf's norms are taken: a line of ``Samples.explain``.

    ``road`` is "value" where the backward pass gives the leaf's gradient directly, "product"
    where each gradient is one outer product, "gram" for products between terms, "direct"
    for the gradient of a few samples at a time from its factors, "materialize" for the same
    by a pull-back, "unused" for a leaf without gradient.  ``cost`` is in multiplications
    for one sample.  ``kept`` is the bytes of one sample's gradient where a clipped sum forms it
    once, for the norms and for the sum, as it is hardly larger than its factors; 0 elsewhere.
    """

    name: str
    shape: tuple[int, ...]
    road: str
    sites: tuple[str, ...]
    cost: int
    why: str
    parts: tuple[Part, ...] | None
    kept: int = 0

    @property
    def is_fragile(self) -> bool:
        """Whether rounding can hurt its norms where a sample's terms cancel."""
        return any(part.gram for part in self.parts or ())

    def __str__(self) -> str:
        where = "; ".join(self.sites) or "nowhere"
        kept = ", kept for clipped sums" if self.kept else ""
        return f"{self.name}{list(self.shape)}: {self.road} ({self.why}){kept}; used at {where}"


def leaf_roads(
    sites: Sequence[Site], shapes: Sequence[Any], names: Sequence[str], road: Road
) -> tuple[LeafRoad, ...]:
    """The road of each leaf, from the shapes of its sites."""
    return tuple(
        _leaf_road(i, [k for k, s in enumerate(sites) if i in s.leaves], sites, shape, name, road)
        for i, (shape, name) in enumerate(zip(shapes, names, strict=True))
    )


def _leaf_road(
    leaf: int, mine: list[int], sites: Sequence[Site], aval: Any, name: str, road: Road
) -> LeafRoad:
    size = math.prod(aval.shape)
    places = tuple(f"{sites[k].kind} at {sites[k].line}" for k in mine)
    cost = sum(_sum_cost(sites[k]) for k in mine)

    asked = road

    def answer(road: str, cost: int, why: str, parts: tuple[Part, ...] | None) -> LeafRoad:
        may = asked == "auto" and road in ("gram", "direct", "materialize")
        kept = _kept_bytes(mine, sites, aval) if may else 0
        return LeafRoad(name, tuple(aval.shape), road, places, cost, why, parts, kept)

    if not mine:
        return answer("unused", 0, "no path from it to the loss", ())
    if road == "materialize":
        return answer("materialize", cost + size, "asked for", None)
    odd = [k for k in mine if sites[k].layout is None]
    if odd:
        why = "it is not used as it is: another value is computed from it first"
        return answer("materialize", cost + size, why, None)
    parts: list[Part] = []
    for group in _overlapping(mine, sites):
        part = _part(group, sites, road)
        if isinstance(part, str):
            return answer("materialize", cost + size, part, None)
        parts.append(part)
    if all(part.is_value for part in parts):
        reasons = {sites[k].why for k in mine}
        return answer("value", size, "; ".join(sorted(r for r in reasons if r)), tuple(parts))
    gram = any(part.gram for part in parts)
    if not gram and all(_is_product(part, sites) for part in parts):
        return answer(
            "product", _parts_cost(parts, sites), "one term: norms multiply", tuple(parts)
        )
    why = "terms are fewer than rows and columns" if gram else "terms outnumber rows and columns"
    if road != "auto":
        why = "asked for"
    return answer("gram" if gram else "direct", _parts_cost(parts, sites), why, tuple(parts))


def _kept_bytes(mine: list[int], sites: Sequence[Site], aval: Any) -> int:
    """What a sample's gradient takes, if about as much memory as its factors, or less; else 0."""
    used = [sites[k] for k in mine]
    if any(site.kind == "conv" for site in used):
        return 0  # its patches take more than both
    kept = aval.size * wide(aval.dtype).itemsize
    factors, formed, is_whole = 0, 0, True
    for site in used:
        held = [a for a in (site.operand, site.output) if a is not None]
        factors += math.prod(site.lengths) * sum(a.size * a.dtype.itemsize for a in held)
        # Each use forms a gradient of what is used there, which may be another size.
        stacked = [n for n, s in zip(site.lengths, site.stacked, strict=True) if s]
        size = math.prod(stacked) * site.var.aval.size
        formed += size * wide(site.var.aval.dtype).itemsize
        is_whole &= size == aval.size
    most = _KEPT_IN_REMAT if any(site.in_remat for site in used) else _KEPT
    # Those of the whole leaf add in place.
    return kept if formed + (0 if is_whole else kept) <= most * factors else 0


def _is_product(part: Part, sites: Sequence[Site]) -> bool:
    f = None if part.is_value or len(part.dense) != 1 else site_shapes(sites[part.dense[0]])
    return part.is_value or (f is not None and f.sizes[1] == 1)


def _sum_cost(site: Site) -> int:
    if site.kind == "value":
        return site.output.size
    f = site_shapes(site)
    return (
        site.output.size if f is None else math.prod(f.sizes[:2]) * max(1, f.sizes[2]) * f.sizes[3]
    )


def _parts_cost(parts: Sequence[Part], sites: Sequence[Site]) -> int:
    total = 0
    for part in parts:
        for k in (*part.rows, *part.dense):
            f = site_shapes(sites[k])
            if part.is_value or f is None:
                total += sites[k].output.size
                continue
            blocks, terms, rows, columns = f.sizes
            gram = blocks * terms**2 * (rows + columns)
            total += gram if part.gram else blocks * terms * rows * columns
    return total


def site_shapes(site: Site) -> Any:
    return factor_shapes(site.form)


@functools.lru_cache(maxsize=256)
def factor_shapes(form: Form) -> Factors | None:
    """The factors of one sample, as shapes."""
    lead = (1, *form.site.lengths)
    operand, output = (
        jax.ShapeDtypeStruct((*lead, *aval.shape), aval.dtype)
        for aval in (form.site.operand, form.site.output)
    )
    return jax.eval_shape(functools.partial(factors, form.site), operand, output)


def _overlapping(mine: list[int], sites: Sequence[Site]) -> list[list[int]]:
    """The sites in groups whose windows of the leaf may touch."""
    groups: list[list[int]] = []
    for k in mine:
        touching = [
            g
            for g in groups
            if any(not _layout(sites[k]).is_disjoint(_layout(sites[j])) for j in g)
        ]
        merged = [j for g in touching for j in g] + [k]
        groups = [g for g in groups if g not in touching] + [merged]
    return groups


def _layout(site: Site) -> Any:
    return site.layout


def _part(group: list[int], sites: Sequence[Site], road: Road) -> Part | str:
    """How a group of sites adds up; a reason where no rule does it."""
    if len(group) == 1 and sites[group[0]].kind == "value":
        return Part((), tuple(group), gram=False, is_value=True)
    if any(sites[k].kind == "value" for k in group):
        return "used both in a product and in another way"
    if len({_layout(sites[k]).window for k in group}) > 1:
        return "its uses overlap in part"
    shapes = {k: site_shapes(sites[k]) for k in group}
    if any(f is None for f in shapes.values()):
        return "a gather of another kind than rows"
    rows = [k for k in group if shapes[k].is_rows]
    dense = [k for k in group if not shapes[k].is_rows]
    if len(group) > 1 and any(shapes[k].key is None for k in group):
        return "used several times, in arrangements that are not followed"
    joined = None
    for k in dense:
        joined = shapes[k] if joined is None else jax.eval_shape(join, joined, shapes[k])
        if joined is None:
            return "used several times, in arrangements that do not match"
    if rows and joined is not None:
        if not all(is_tied(shapes[k], joined) for k in rows):
            return "looked up and multiplied, in arrangements that do not match"
        if not joined.gram_is_cheaper and road == "auto":
            return "looked up and multiplied, and its gradient is cheaper than products of terms"
        return Part(tuple(rows), tuple(dense), gram=True)
    if rows:
        if len({shapes[k].key for k in rows}) > 1:
            return "looked up several times, in arrangements that do not match"
        return Part(tuple(rows), (), gram=True)
    assert joined is not None
    gram = joined.gram_is_cheaper if road == "auto" else road == "gram"
    return Part((), tuple(dense), gram and joined.sizes[1] > 1)
