"""A batch's records and the linear maps from them: sums, rows, products."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from funcgrad._compat import gathered, is_split, make_varying, primitives, varying_axes
from funcgrad._per_sample import _linear
from funcgrad._per_sample._leaf_norms import leaf_entries, patch_bytes
from funcgrad._per_sample._map_samples import map_samples, pack
from funcgrad._per_sample._plan import Level, Site
from funcgrad._per_sample._roads import LeafRoad
from funcgrad._per_sample._sums import norm_dtype, sums_of_rows, wide


@dataclasses.dataclass(frozen=True, eq=False)
class Scheme:
    """What does not depend on numbers: the sites, and the road of each leaf."""

    level: Level
    sites: tuple[Site, ...]
    roads: tuple[LeafRoad, ...]
    n_samples: int
    like_params: Callable[[list[Any]], Any]
    is_frozen: tuple[bool, ...]

    @property
    def bytes_each(self) -> int:
        """About what one sample keeps: records, a copy of the smaller factor, kept gradients."""
        total = 0
        for site in self.sites:
            sizes = [
                a.size * a.dtype.itemsize for a in (site.operand, site.output) if a is not None
            ]
            total += math.prod(site.lengths) * (sum(sizes) + min(sizes))
        return total + sum(road.kept for road in self.roads)


def _spread(values: Any, x: Any, axis: int) -> Any:
    """One value for each sample, to stand beside ``x`` whose sample axis is ``axis``."""
    return values.reshape(-1, *[1] * (x.ndim - axis - 1))


# What is done to many arrays is under jit, to be traced once for each shape, and in line again.
@functools.partial(jax.jit, inline=True, static_argnums=2)
def _blank(x: Any, kept: Any, axis: int) -> Any:
    return jnp.where(_spread(kept, x, axis), x, jnp.zeros_like(x))


@functools.partial(jax.jit, inline=True, static_argnums=3)
def _scaled(x: Any, weights: Any, kept: Any, axis: int) -> Any:
    dtype = wide(x.dtype)
    return _blank(x.astype(dtype) * _spread(weights, x, axis).astype(dtype), kept, axis)


def _blanked(arrays: dict[int, tuple[Any, int]], kept: Any, clean: Any) -> dict[int, Any]:
    """Arrays, each with its sample axis, with zeros for the samples that do not count.

    Or as they are, where they are ``clean``.  A loop, of one turn at the most, does so in place:
    a conditional would copy.
    """
    if not arrays:
        return {}
    packed = [pack(x, axis) for x, axis in arrays.values()]

    def each(xs: list[Any], kept: Any) -> list[Any]:
        return [_blank(x, kept, p.axis) for x, p in zip(xs, packed, strict=True)]

    # The rule is for reverse mode, which a loop of unknown length has none of.
    @jax.custom_jvp
    def blank(xs: list[Any], kept: Any, clean: Any) -> list[Any]:
        start = (clean, xs)
        start = make_varying(start, varying_axes((start, kept)))
        turn = lambda state: (state[0] | True, each(state[1], kept))
        return lax.while_loop(lambda state: ~state[0], turn, start)[1]

    @blank.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        moved = each(tangents[0], primals[1])
        return blank(*primals), make_varying(moved, varying_axes(primals))

    xs = blank([p.array for p in packed], kept, clean)
    xs = [lax.expand_dims(x, p.units) for x, p in zip(xs, packed, strict=True)]
    return dict(zip(arrays, xs, strict=True))


def _needs_layout(road: LeafRoad) -> bool:
    """Whether no list of products holds the entries of a leaf's gradient."""
    return road.parts is None or any(part.rows for part in road.parts)


Formed = Mapping[int, Any]
"""Gradients in memory, (batch, *shape), by the number of their leaf."""
NONE_FORMED: Formed = {}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "consts", "operands", "cotangents"],
    meta_fields=["scheme"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Records:
    """What the backward pass handed back, one entry a site.

    The sample axis stands behind the axes of the site's loops, where the pass leaves it: to
    have it first would copy what a loop stacked.  At a value the operand is ``None``.
    """

    params: list[Any]
    consts: list[Any]
    operands: list[Any]
    cotangents: list[Any]
    scheme: Scheme

    @functools.cached_property
    def dtype(self) -> Any:
        """The dtype of norms: float32 or wider."""
        return norm_dtype(self.params)

    def by_sample(self) -> Any:
        """The operands and the cotangents with the sample axis first, to be mapped over.

        The samples' numbers come last: something to map over where there is no site.
        """
        first = [len(site.lengths) for site in self.scheme.sites]
        operands, cotangents = (
            [
                jax.tree.map(lambda x, n=n: jnp.moveaxis(x, n, 0), x)
                for x, n in zip(xs, first, strict=True)
            ]
            for xs in (self.operands, self.cotangents)
        )
        return operands, cotangents, jnp.arange(self.scheme.n_samples)

    def formed(self) -> Formed:
        """The gradients that a sum after the norms keeps, (batch, *shape) by leaf.

        None where an explicit sharding cuts the batch: factors stay cut, and are less to gather.
        """
        index = [i for i, road in enumerate(self.scheme.roads) if road.kept]
        records = zip(self.scheme.sites, self.operands, self.cotangents, strict=True)
        held = [(x, len(site.lengths)) for site, *xs in records for x in xs if x is not None]
        if not index or any(is_split(x, axis) for x, axis in held):
            return {}
        rows = jax.vmap(lambda sample: self.row(sample, index))(self.by_sample())
        return dict(zip(index, rows, strict=True))

    def weighted(
        self,
        weights: Any,
        index: Sequence[int] | None = None,
        formed: Formed = NONE_FORMED,
        clean: Any = None,
    ) -> list[Any]:
        """The weighted sum of the gradients; a weight of 0 leaves a sample out, NaN or not.

        For the leaves in ``index`` alone, if given; those that are ``formed`` from these.
        ``clean`` says that all records are finite, if that is known.
        """
        clean = jnp.all(weights != 0) if clean is None else clean
        index = range(len(self.params)) if index is None else index
        factored = [i for i in index if i not in formed]
        found = dict(zip(factored, self._weighted(weights, factored, clean), strict=True))
        rows = {i: formed[i] for i in index if i in formed}
        blanked = _blanked({i: (x, 0) for i, x in rows.items()}, weights != 0, clean)
        found.update(zip(blanked, sums_of_rows(weights, list(blanked.values())), strict=True))
        return [found[i] for i in index]

    def _weighted(self, weights: Any, index: Sequence[int], clean: Any) -> list[Any]:
        """The same from the factors."""
        sites, kept = self.scheme.sites, weights != 0
        used = [i for i, s in enumerate(sites) if s.leaves & set(index)]

        def scaled(x: Any, site: Site) -> Any:
            return _scaled(x, weights, kept, len(site.lengths))

        # Operands are scaled where they are much smaller, cotangents elsewhere: those of a
        # product serve the bias beside it too.
        by_operand = self._scales_operands(used)
        left, right = list(self.operands), list(self.cotangents)
        # Zero times NaN is NaN, so what does not count is blanked in the other factor too.
        other: dict[int, tuple[Any, int]] = {}
        for i in used:
            x = self.cotangents[i] if i in by_operand else self.operands[i]
            if x is not None and jnp.issubdtype(x.dtype, jnp.inexact):
                other[id(x)] = (x, len(sites[i].lengths))
        blanked = _blanked(other, kept, clean)
        for i in used:
            # An array that was blanked is not read any more, so that this was in place.
            z, g = (blanked.get(id(x), x) for x in (left[i], right[i]))
            left[i], right[i] = (
                (scaled(z, sites[i]), g) if i in by_operand else (z, scaled(g, sites[i]))
            )
        return self.pull_back(left, right, index)

    def _scales_operands(self, used: Sequence[int]) -> set[int]:
        """The sites whose operands are much smaller than the cotangent that they share."""
        users: dict[int, list[int]] = {}
        for i in used:
            users.setdefault(id(self.cotangents[i]), []).append(i)
        found: set[int] = set()
        for users_of_one in users.values():
            group = [i for i in users_of_one if self.operands[i] is not None]
            operands = {id(self.operands[i]): self.operands[i] for i in group}.values()
            if (
                group
                and all(jnp.issubdtype(z.dtype, jnp.inexact) for z in operands)
                and 2 * sum(z.size for z in operands) <= self.cotangents[group[0]].size
            ):
                found.update(group)
        return found

    def _weights(self, params: list[Any], only: Any = None) -> list[Any]:
        """The weights at the sites, as a function of the parameters."""
        level = dataclasses.replace(self.scheme.level, consts=tuple(self.consts))
        args = [*params, *[None] * (len(level.jaxpr.invars) - len(params))]
        found = _linear.weights(level, args)
        return [
            found[site] for i, site in enumerate(self.scheme.sites) if only is None or i in only
        ]

    def pull_back(
        self, operands: list[Any], cotangents: list[Any], index: Sequence[int] | None = None
    ) -> list[Any]:
        """The sum over samples of the gradients that these records stand for."""
        return self._pull_back(operands, cotangents, index, self.scheme.n_samples)

    def row(self, sample: Any, index: Sequence[int] | None = None) -> list[Any]:
        """The gradient of one sample of ``by_sample``, for the leaves in ``index``."""
        operands, cotangents, _ = sample
        return self._pull_back(operands, cotangents, index, None)

    def entries(self, sample: Any, index: Sequence[int]) -> list[list[Any]]:
        """Arrays with the entries of ``row``, for each leaf, in no certain order."""
        roads = self.scheme.roads
        laid = [i for i in index if _needs_layout(roads[i])]
        rows = dict(zip(laid, self.row(sample, laid) if laid else [], strict=True))
        records = [
            [x if x is None else jnp.expand_dims(x, len(site.lengths)) for x in both]
            for site, *both in zip(self.scheme.sites, *sample[:2], strict=True)
        ]
        return [
            [rows[i]] if i in rows else leaf_entries(roads[i], self.scheme.sites, records)
            for i in index
        ]

    def _pull_back(
        self, operands: Any, cotangents: Any, index: Sequence[int] | None, n: int | None
    ) -> list[Any]:
        chosen = range(len(self.params)) if index is None else index
        only = [i for i, s in enumerate(self.scheme.sites) if s.leaves & set(chosen)]
        all_params = [p.astype(wide(p.dtype)) for p in self.params]

        def chosen_weights(leaves: list[Any]) -> list[Any]:
            params = list(all_params)
            for i, leaf in zip(chosen, leaves, strict=True):
                params[i] = leaf
            return self._weights(params, only)

        weights, back = jax.vjp(chosen_weights, [all_params[i] for i in chosen])[:2]
        pulled = [
            _linear.pull_back(self.scheme.sites[i], operands[i], cotangents[i], w, n=n)
            for i, w in zip(only, weights, strict=True)
        ]
        (grads,) = back([p.astype(w.dtype) for p, w in zip(pulled, weights, strict=True)])
        return grads

    def dots(self, tangents: list[Any]) -> Any:
        """Each sample's inner product with a direction: a forward pass over the records."""
        n = self.scheme.n_samples
        params = [p.astype(wide(p.dtype)) for p in self.params]
        tangents = [t.astype(p.dtype) for t, p in zip(tangents, params, strict=True)]
        moved = self._moved(params, tangents)
        total = jnp.zeros(n, self.dtype)
        entries = zip(self.scheme.sites, self.operands, self.cotangents, moved, strict=True)
        for site, z, g, weight in entries:
            m = _linear.outputs(site, z, weight, n)
            axes = tuple(d for d in range(g.ndim) if d != len(site.lengths))
            total = total + jnp.real(jnp.sum(m * g.astype(m.dtype), axes))
        return total

    def _moved(self, params: list[Any], tangents: list[Any]) -> list[Any]:
        """The tangents of the weights at the sites."""
        if not self.scheme.level.has_preamble_of(primitives.custom_vjp_call_p):
            return jax.jvp(self._weights, (params,), (tangents,))[1]
        # A custom_vjp has no tangents of its own; those that its gradient stands for.
        weights, back = jax.vjp(self._weights, params)[:2]
        (moved,) = jax.linear_transpose(lambda g: back(g)[0], weights)(tangents)
        return moved

    def row_bytes(self, index: Sequence[int]) -> int:
        """About what ``row`` of one sample holds at a time: the gradients, and patches."""
        convolved = [s for s in self.scheme.sites if s.kind == "conv" and s.leaves & set(index)]
        return 8 * sum(self.params[i].size for i in index) + sum(map(patch_bytes, convolved))

    def for_each(
        self,
        fun: Callable[..., Any],
        index: Sequence[int],
        bytes_each: int,
        formed: Formed = NONE_FORMED,
    ) -> Any:
        """``fun`` of each sample, as many at a time as ``bytes_each`` allows.

        It gets the sample as from ``by_sample``, but the records of the leaves in ``index``
        alone, and the sample's share of ``formed``.
        """
        n, sites = self.scheme.n_samples, self.scheme.sites
        depths = [len(site.lengths) for site in sites]
        used = [bool(site.leaves & set(index)) for site in sites]
        operands, cotangents = (
            [x if use else None for x, use in zip(xs, used, strict=True)]
            for xs in (self.operands, self.cotangents)
        )
        sides = [
            [jax.tree.map(lambda _, d=d: d, x) for x, d in zip(xs, depths, strict=True)]
            for xs in (operands, cotangents)
        ]
        samples = ((operands, cotangents, jnp.arange(n)), dict(formed))
        axes = ((*sides, 0), dict.fromkeys(formed, 0))
        mapped = jax.vmap(lambda both: fun(*both), in_axes=(axes,))
        return map_samples(mapped, gathered(samples, axes), axes, n, bytes_each)
