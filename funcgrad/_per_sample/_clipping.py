"""Clip each sample and add, so that rounding keeps the bound: three roads to one sum."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from funcgrad import _jaxpr
from funcgrad._compat import gathered, make_varying, varying_axes
from funcgrad._per_sample._factors import Squares
from funcgrad._per_sample._group_norms import exact_norms, fast_squares
from funcgrad._per_sample._leaf_norms import has_lost_digits, norm_slots
from funcgrad._per_sample._lookups import Rows, add_rows, weighted_rows
from funcgrad._per_sample._per_sample import backward
from funcgrad._per_sample._records import Records, Scheme
from funcgrad._per_sample._reference import Problem
from funcgrad._per_sample._sums import (
    add_compensated,
    compensated_sum,
    norm_dtype,
    norm_slack,
    scaled_norm,
    sum_by_pairs,
    wide,
)
from funcgrad._trees import broadcast_prefix


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The groups of leaves that are clipped together, each with its bound."""

    values: list[float]
    groups: list[int]  # for each trainable leaf, the index of its bound
    structure: Any
    slack: int  # units of roundoff that the sum of all samples may be off by

    @staticmethod
    def over(max_norm: Any, params: Any, problem: Problem, slack: int) -> "Bounds":
        """The bounds of ``max_norm``, a prefix of ``params``."""
        values, structure = jax.tree.flatten(max_norm)
        values = [float(bound) for bound in values]
        for bound in values:
            if not (0 < bound < math.inf):
                raise ValueError(
                    f"clipped_grad: max_norm is positive and finite; got {bound}. "
                    "For no clipping, use per_sample_grads or jax.grad."
                )
        indices = jax.tree.unflatten(structure, range(len(values)))
        groups = broadcast_prefix(indices, params, "clipped_grad: max_norm")
        kept = [g for g, frozen in zip(groups, problem.is_frozen, strict=True) if not frozen]
        return Bounds(values, kept, structure, slack)

    def members(self, per_leaf: list[Any]) -> list[list[Any]]:
        """What belongs to each group, of one thing per leaf."""
        return [
            [x for x, group in zip(per_leaf, self.groups, strict=True) if group == k]
            for k in range(len(self.values))
        ]

    @functools.cached_property
    def leaves(self) -> list[list[int]]:
        """The leaves of each group, by number."""
        return [
            [i for i, group in enumerate(self.groups) if group == k]
            for k in range(len(self.values))
        ]

    def within(self, k: int, n_entries: int, dtype: Any) -> float:
        """The bound to aim at, so that rounding does not carry the sum over the bound."""
        units = self.slack + norm_slack(n_entries)
        return self.values[k] / (1 + units * float(jnp.finfo(dtype).eps) / 2)

    def tree(self, per_group: Any) -> Any:
        """A tree like ``max_norm``."""
        return jax.tree.unflatten(self.structure, per_group)


# A chunk's outputs: norms and what was clipped by group, which samples are finite, values, aux.
Chunk = tuple[list[Any], list[Any], Any, Any, Any]
Step = Callable[[Any, Any], tuple[Any, Chunk]]


def no_samples(problem: Problem, bounds: Bounds) -> Chunk:
    """The outputs of an empty batch."""
    _, values, aux = problem.empty()
    none = jnp.zeros(0, bool)
    norm = jnp.zeros(0, norm_dtype(problem.trainable))
    n = len(bounds.values)
    return [norm] * n, [none] * n, none, values, aux


def clip_one(grads: list[Any], bounds: Bounds) -> Any:
    """One sample's clipped gradient, its norms by group, which were clipped, if it is finite.

    No square overflows or underflows; a sample whose norm is not finite becomes zeros.
    """
    grads = [g.astype(wide(g.dtype)) for g in grads]
    norms, clipped, scalings, finites = [], [], [], []
    for k, leaves in enumerate(bounds.members(grads)):
        unit, ratio = scaled_norm(leaves)
        within = bounds.within(k, sum(leaf.size for leaf in leaves), ratio.dtype)
        norms.append(unit * ratio)
        clipped.append(ratio > within / unit)
        scalings.append((unit, within / ratio))
        finites.append(jnp.isfinite(norms[-1]))
    finite = jnp.stack(finites).all()

    def contribution(g: Any, k: int) -> Any:
        unit, factor = scalings[k]
        return jnp.where(finite, jnp.where(clipped[k], g / unit * factor, g), jnp.zeros_like(g))

    kept = [contribution(g, k) for g, k in zip(grads, bounds.groups, strict=True)]
    return kept, norms, [c & finite for c in clipped], finite


def materialized(problem: Problem, bounds: Bounds) -> Step:
    """Every gradient of the chunk in memory."""

    def step(sums: Any, chunk: Any) -> tuple[Any, Chunk]:
        mapped, mask = chunk
        grads, values, aux = problem.differentiate(mapped)
        kept, norms, clipped, finite = jax.vmap(lambda g: clip_one(g, bounds))(grads)
        kept = [
            jnp.where(mask.reshape(-1, *[1] * (g.ndim - 1)), g, jnp.zeros_like(g)) for g in kept
        ]
        sums = add_compensated(sums, [compensated_sum(g) for g in kept])
        return sums, (norms, clipped, finite, values, aux)

    return step


def factored(problem: Problem, bounds: Bounds, scheme: Scheme) -> Step:
    """The gradients of the chunk as factors.

    Where squares or products of terms cannot hold a norm (entries that are not finite or
    whose squares overflow or underflow, terms that cancel) a branch takes the norms from the
    gradients.
    """

    def step(sums: Any, chunk: Any) -> tuple[Any, Chunk]:
        mapped, mask = chunk
        samples = backward(problem, scheme, mapped)
        records = samples._records
        formed = records.formed()
        norms, most, fine = _norms(fast_squares(records, bounds.leaves, formed), records, bounds)
        fast, trouble = (norms, most), ~fine
        axes = varying_axes((fast, mask, trouble))
        is_troubled = jnp.any(trouble & mask)

        def exact(_: Any) -> Any:
            total = gathered(exact_norms(records, bounds.leaves, formed))
            return make_varying((total, total), axes)

        norms, most = lax.cond(
            is_troubled,
            exact,
            lambda fast: fast,
            make_varying(gathered(fast), axes),
        )
        finite = functools.reduce(jnp.logical_and, [jnp.isfinite(norm) for norm in norms])
        # Squares of what is not finite are not finite either.
        clean = ~is_troubled & jnp.all(mask)
        grads: list[Any] = [None] * len(records.params)
        clipped = []
        for k, index in enumerate(bounds.leaves):
            factor = _factor(most[k], k, records, bounds)
            clipped.append((factor < 1) & finite)
            weights = jnp.where(mask & finite, factor, 0)
            for i in index if sums is not None else []:
                grads[i] = weighted_rows(records, weights, i)
            index = [i for i in index if grads[i] is None]
            found = records.weighted(weights, index, formed, clean)
            for i, grad in zip(index, found, strict=True):
                grads[i] = grad
        return _add(sums, grads), (norms, clipped, finite, samples.values, samples.aux)

    return step


def two_passes(problem: Problem, bounds: Bounds, scheme: Scheme) -> Step:
    """Norms on one way back, the weighted gradient on a second: the memory of plain JAX.

    No record outlives its layer, so what ``jax.checkpoint`` saves inside the model stays
    saved.  Norms from cancelling terms are rounded up instead of taken again.
    """
    for site in scheme.sites:
        low = [t.dtype for t in (site.output, site.var.aval) if wide(t.dtype) != t.dtype]
        if low:
            raise ValueError(
                f'clipped_grad: road="two_pass" adds gradients as the model does, so they must '
                f"be float32 or wider; got {low[0]} at {site.line}. Use another road."
            )
    own = [v for v in _jaxpr.walk(problem.traced.jaxpr) if _jaxpr.has_own_backward(v.eqn)]
    if own:
        raise ValueError(
            'clipped_grad: road="two_pass" scales each sample\'s loss, and what a hook or a rule '
            "of one's own gives back need not scale with it; got "
            f"{own[-1].eqn.primitive.name} at {own[-1].line}. Use another road."
        )
    slots: dict[int, Any] = dict(norm_slots(scheme.roads, scheme.sites))

    def step(sums: Any, chunk: Any) -> tuple[Any, Chunk]:
        mapped, mask = chunk
        samples = backward(problem, scheme, mapped, slots)
        records = samples._records
        norms, most, _ = _norms(fast_squares(records, bounds.leaves), records, bounds)
        finite = functools.reduce(jnp.logical_and, [jnp.isfinite(norm) for norm in norms])
        # A sample that does not count is replaced: zero times its NaN would be NaN.
        counts = mask & finite
        stand_in = jnp.argmax(counts)
        safe = [jnp.where(counts.reshape(-1, *[1] * (x.ndim - 1)), x, x[stand_in]) for x in mapped]
        axes = varying_axes((mapped, problem.batch.shared))
        params = make_varying(problem.trainable, axes)
        grads: list[Any] = [None] * len(params)
        clipped = []
        for k, index in enumerate(bounds.leaves):
            factor = _factor(most[k], k, records, bounds)
            clipped.append((factor < 1) & finite)
            weights = jnp.where(counts, factor, 0)

            def weighted(leaves: list[Any], index: Any = index, weights: Any = weights) -> Any:
                full = list(params)
                for i, leaf in zip(index, leaves, strict=True):
                    full[i] = leaf
                values, _ = jax.vmap(problem.loss, (None, 0))(full, safe)
                return jnp.sum(values.astype(wide(values.dtype)) * weights)

            for i, grad in zip(index, jax.grad(weighted)([params[i] for i in index]), strict=True):
                # Where no sample counts, the stand-in is a bad one too.
                grads[i] = jnp.where(counts.any(), grad, jnp.zeros_like(grad))
        return _add(sums, grads), (norms, clipped, finite, samples.values, samples.aux)

    return step


def _norms(
    squares: list[list[Squares]], records: Records, bounds: Bounds
) -> tuple[list[Any], list[Any], Any]:
    """For each group, of squares that add up, the norms, and the most that they may be.

    And of which samples all digits hold: nothing overflows, underflows or cancels.
    """
    norms, most = [], []
    fine = jnp.ones(records.scheme.n_samples, bool)
    for mine, bound in zip(squares, bounds.values, strict=True):
        total = _sum([square.value for square in mine], records)
        mass = _sum([square.mass for square in mine], records)
        flushed = _sum([square.flushed for square in mine], records)
        eps, least = float(jnp.finfo(total.dtype).eps), jnp.maximum(total, 0)
        # Activations may be wider than the parameters, whose precision norms have.
        norms.append(jnp.sqrt(least).astype(records.dtype))
        # What products of terms and underflow may have lost is counted as if it were there.
        most.append(jnp.sqrt(least + 8 * eps * mass + flushed).astype(records.dtype))
        fine &= jnp.isfinite(norms[-1]) & ~has_lost_digits(Squares(total, mass, flushed))
        # Where what underflow may have left out is something beside the bound.
        fine &= ~(jnp.sqrt(flushed) > eps**0.5 * bound)
    return norms, most, fine


def _sum(terms: list[Any], records: Records) -> Any:
    return sum_by_pairs([jnp.zeros(records.scheme.n_samples, records.dtype), *terms])


def _factor(most: Any, k: int, records: Records, bounds: Bounds) -> Any:
    n_entries = sum(records.params[i].size for i in bounds.leaves[k])
    within = bounds.within(k, n_entries, most.dtype)
    return jnp.minimum(1, within / jnp.where(most > 0, most, within))


def _add(sums: Any, grads: list[Any]) -> Any:
    # Without chunks there is nothing to add to.
    if sums is None:
        return [(g, jnp.zeros((), g.dtype)) for g in grads]
    return [
        add_rows(pair, g) if isinstance(g, Rows) else add_compensated(pair, (g, jnp.zeros_like(g)))
        for pair, g in zip(sums, grads, strict=True)
    ]
