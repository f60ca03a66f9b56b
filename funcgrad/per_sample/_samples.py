"""The gradients of a batch's samples, kept as factors, and what is made of them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from funcgrad._compat import make_varying, varying_axes
from funcgrad._trees import LeafSpec, broadcast_prefix, choose_leaves
from funcgrad.per_sample import _linear
from funcgrad.per_sample._plan import Level, Site
from funcgrad.per_sample._roads import LeafRoad, leaf_squares, map_samples
from funcgrad.per_sample._sums import norm_dtype, wide


@dataclasses.dataclass(frozen=True, eq=False)
class Scheme:
    """What does not depend on numbers: the sites, and the road of each leaf."""

    level: Level
    sites: tuple[Site, ...]
    roads: tuple[LeafRoad, ...]
    n_samples: int
    like_params: Callable[[list[Any]], Any]
    is_frozen: tuple[bool, ...]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "aux", "_params", "_consts", "_operands", "_cotangents"],
    meta_fields=["_scheme"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """The per-sample gradients of a batch in factored form; made by ``per_sample``.

    Nothing is computed until a method asks for it, so that under ``jit`` only what is used
    is there.  It is a pytree, and goes in and out of ``jit``.
    """

    values: Any
    """The losses, (batch,)."""
    aux: Any
    """The loss's second output, stacked; ``None`` without ``has_aux``."""
    _params: list[Any]
    _consts: list[Any]
    _operands: list[Any]
    _cotangents: list[Any]
    _scheme: Scheme

    def __len__(self) -> int:
        return self._scheme.n_samples

    # Sums over samples: one pull-back for the whole batch.

    def weighted_sum(self, weights: Any) -> Any:
        """The sum of ``weights[i] * gradient[i]``, a tree like ``params``.

        A sample of weight 0 contributes nothing, whatever its gradient holds.

        Args:
          weights: (batch,), real.

        Returns:
          A tree like ``params`` in float32 or wider; ``None`` for frozen leaves.

        Example:
          >>> samples = fg.per_sample(lambda w, x: w @ x)(jnp.ones(2), jnp.eye(2))
          >>> samples.weighted_sum(jnp.array([3.0, 4.0]))
          Array([3., 4.], dtype=float32)
        """
        weights = jnp.asarray(weights)

        def total(operands: Any, cotangents: Any) -> Any:
            scaled = [
                g.astype(wide(g.dtype)) * _like(weights, g).astype(wide(g.dtype))
                for g in cotangents
            ]
            return self._pull_back(operands, scaled)

        def without_zeros() -> Any:
            kept = weights != 0
            blank = lambda x: jnp.where(_like(kept, x), x, jnp.zeros_like(x))
            return total(*jax.tree.map(blank, (self._operands, self._cotangents)))

        grads = lax.cond(
            jnp.all(weights != 0),
            lambda: total(self._operands, self._cotangents),
            without_zeros,
        )
        return self._scheme.like_params(grads)

    def sum(self) -> Any:
        """The sum of the gradients, a tree like ``params``."""
        return self._scheme.like_params(self._pull_back(self._operands, self._cotangents))

    def mean(self) -> Any:
        """The mean of the gradients, a tree like ``params``; zeros for no samples."""
        return jax.tree.map(lambda g: g / max(1, len(self)), self.sum())

    # Norms.

    def norms(self, groups: Any = None) -> Any:
        """Each sample's gradient norm.

        Args:
          groups: ``None`` for the norm over all leaves; or a prefix of the tree of
            ``params``, whose leaves stand for the groups (their values do not matter).

        Returns:
          (batch,) in float32 or wider, or a tree like ``groups`` of such arrays.

        Example:
          >>> samples = fg.per_sample(lambda w, x: w @ x)(jnp.ones(2), jnp.array([[3.0, 4.0]]))
          >>> samples.norms()
          Array([5.], dtype=float32)
        """
        squares = self._squares()
        if groups is None:
            return jnp.sqrt(sum(squares, jnp.zeros(len(self))))
        labels, structure = jax.tree.flatten(groups)
        numbered = jax.tree.unflatten(structure, range(len(labels)))
        members = broadcast_prefix(numbered, self._skeleton(), "norms: groups")
        members = [member for member in members if member is not None]
        totals = [jnp.zeros(len(self)) for _ in labels]
        for square, member in zip(squares, members, strict=True):
            totals[member] = totals[member] + square
        return jax.tree.unflatten(structure, [jnp.sqrt(t) for t in totals])

    def leaf_norms(self) -> Any:
        """Each sample's norm of each leaf, a tree like ``params`` of (batch,)."""
        return self._scheme.like_params([jnp.sqrt(s) for s in self._squares()])

    def clipped_sum(self, max_norm: float) -> Any:
        """The sum of the gradients, each clipped to norm ``max_norm``.

        A sample whose norm is not finite contributes nothing.  For the guarantee in floating
        point that differential privacy needs, use ``clipped_grad``.

        Args:
          max_norm: The bound, above 0.

        Returns:
          A tree like ``params`` in float32 or wider.

        Example:
          >>> xs = jnp.array([[3.0, 4.0], [0.3, 0.4]])
          >>> samples = fg.per_sample(lambda w, x: w @ x)(jnp.ones(2), xs)
          >>> samples.clipped_sum(1.0).round(3)
          Array([0.9, 1.2], dtype=float32)
        """
        return self.weighted_sum(clip_weights(self.norms(), max_norm))

    def top(self, k: int) -> tuple[Any, Any]:
        """The ``k`` largest norms and the indices of their samples, largest first."""
        return lax.top_k(self.norms(), k)

    # Products.

    def dots(self, direction: Any) -> Any:
        """The inner product of each sample's gradient with ``direction``.

        One forward pass over the records, no gradient is formed.

        Args:
          direction: A tree like ``params``; frozen leaves are not read and may be ``None``.

        Returns:
          (batch,) in float32 or wider.

        Example:
          >>> samples = fg.per_sample(lambda w, x: w @ x)(jnp.ones(2), jnp.eye(2))
          >>> samples.dots(jnp.array([3.0, 4.0]))
          Array([3., 4.], dtype=float32)
        """
        tangents = self._trainable(direction, "dots: direction")
        tangents = [t.astype(p.dtype) for t, p in zip(tangents, self._params, strict=True)]
        _, moved = jax.jvp(lambda p: self._outputs(p, self._operands), (self._params,), (tangents,))
        parts = [
            jnp.sum((m * g.astype(m.dtype)).reshape(len(self), -1), 1)
            for m, g in zip(moved, self._cotangents, strict=True)
        ]
        return sum(parts, jnp.zeros(len(self)))

    def gram(self, other: "Samples | None" = None) -> Any:
        """The inner products between the gradients: the empirical neural tangent kernel.

        Args:
          other: Samples of the same loss and parameters; ``None`` for these themselves.

        Returns:
          (batch, other's batch).

        Example:
          >>> samples = fg.per_sample(lambda w, x: w @ x)(jnp.ones(2), jnp.eye(2))
          >>> samples.gram()
          Array([[1., 0.],
                 [0., 1.]], dtype=float32)
        """
        other = self if other is None else other

        def column(records: Any) -> Any:
            grads = other._one(*records)
            return self.dots(self._scheme.like_params(grads))

        if not len(other):
            return jnp.zeros((len(self), 0))
        return lax.map(column, (other._operands, other._cotangents)).T

    def project(self, key: Any, dim: int) -> Any:
        """Random projections of the gradients that keep inner products on average.

        Products with ``dim`` directions of independent normal numbers of variance
        ``1 / dim``, drawn one at a time.

        Args:
          key: A random key; the same key projects another batch alike.
          dim: How many directions.

        Returns:
          (batch, dim).

        References:
          Park et al., "TRAK: Attributing Model Behavior at Scale", 2023.
        """

        def one(key: Any) -> Any:
            keys = jax.random.split(key, len(self._params))
            direction = [
                jax.random.normal(k, p.shape, wide(p.dtype)) / math.sqrt(dim)
                for k, p in zip(keys, self._params, strict=True)
            ]
            return self.dots(self._scheme.like_params(direction))

        return lax.map(one, jax.random.split(key, dim)).T

    # The gradients themselves.

    def materialize(self, leaves: LeafSpec = lambda path, leaf: True) -> Any:
        """The gradients of chosen leaves, each of them in memory.

        Args:
          leaves: Which: glob patterns of their paths, a predicate of (path, leaf), or a tree
            of booleans; all by default.

        Returns:
          A tree like ``params`` of (batch, *shape) in float32 or wider, ``None`` for leaves
          not chosen.

        Example:
          >>> samples = fg.per_sample(lambda w, x: w @ x)(jnp.ones(2), jnp.eye(2))
          >>> samples.materialize()
          Array([[1., 0.],
                 [0., 1.]], dtype=float32)
        """
        chosen = choose_leaves(leaves, self._skeleton(), "materialize: leaves")
        index = [i for i, keep in enumerate(chosen) if keep]
        rows = jax.vmap(lambda records: self._one(*records, index))(
            (self._operands, self._cotangents)
        )
        full: list[Any] = [None] * len(chosen)
        for i, row in zip(index, rows, strict=True):
            full[i] = row
        return self._scheme.like_params(full)

    def second_moment(self) -> Any:
        """The mean of the squares of the gradients, entry by entry, a tree like ``params``."""
        zeros = [jnp.zeros(p.shape, wide(p.dtype)) for p in self._params]
        if not len(self):
            return self._scheme.like_params(zeros)

        def add(total: Any, records: Any) -> Any:
            rows = self._one(*records)
            return [t + jnp.square(jnp.abs(r)) for t, r in zip(total, rows, strict=True)], None

        records = (self._operands, self._cotangents)
        zeros = make_varying(zeros, varying_axes(records))
        total, _ = lax.scan(add, zeros, records)
        return self._scheme.like_params([t / len(self) for t in total])

    def variance(self) -> Any:
        """The unbiased variance of the gradients over the batch, a tree like ``params``."""
        n = len(self)
        mean = self._pull_back(self._operands, self._cotangents)
        mean = [m / max(1, n) for m in mean]

        def add(total: Any, records: Any) -> Any:
            rows = self._one(*records)
            moved = [jnp.square(jnp.abs(r - m)) for r, m in zip(rows, mean, strict=True)]
            return [t + d for t, d in zip(total, moved, strict=True)], None

        zeros = [jnp.zeros_like(m) for m in mean]
        if not n:
            return self._scheme.like_params(zeros)
        records = (self._operands, self._cotangents)
        total, _ = lax.scan(add, make_varying(zeros, varying_axes((records, mean))), records)
        return self._scheme.like_params([t / max(1, n - 1) for t in total])

    def noise_scale(self) -> "NoiseScale":
        """The simple gradient noise scale: the batch size at which noise equals signal.

        Unbiased estimates of the squared norm of the true gradient and of the trace of the
        per-sample covariance, and their quotient (which is biased, as quotients are; average
        the two over steps before dividing).

        Returns:
          A ``NoiseScale``.

        References:
          McCandlish et al., "An Empirical Model of Large-Batch Training", 2018.
        """
        n = len(self)
        mean = self._pull_back(self._operands, self._cotangents)
        big = sum((jnp.sum(jnp.square(jnp.abs(m / max(1, n)))) for m in mean), jnp.zeros(()))
        small = jnp.mean(jnp.square(self.norms()))
        signal = (n * big - small) / (n - 1) if n > 1 else jnp.full((), jnp.nan)
        noise = (small - big) * n / (n - 1) if n > 1 else jnp.full((), jnp.nan)
        return NoiseScale(noise / signal, signal, noise)

    def explain(self) -> tuple[LeafRoad, ...]:
        """For each leaf: its road, where it is used, and why."""
        return self._scheme.roads

    # Below: the machinery.

    def _skeleton(self) -> Any:
        return self._scheme.like_params(list(self._params))

    def _trainable(self, tree: Any, call: str) -> list[Any]:
        leaves = broadcast_none(tree, self._scheme, call)
        return [jnp.asarray(leaf) for leaf in leaves]

    def _outputs(self, params: list[Any], operands: list[Any], only: Any = None) -> list[Any]:
        level = dataclasses.replace(self._scheme.level, consts=tuple(self._consts))
        args = [*params, *[None] * (len(level.jaxpr.invars) - len(params))]
        found = _linear.weights(level, args)
        pairs = list(zip(self._scheme.sites, operands, strict=True))
        outs = []
        for i, (site, z) in enumerate(pairs):
            if only is not None and i not in only:
                continue
            if site.kind == "value":
                u = found[site].astype(wide(found[site].dtype))
                outs.append(jnp.broadcast_to(u, (len(self), *u.shape)))
            else:
                one = functools.partial(_linear.outputs, site)
                outs.append(jax.vmap(one, in_axes=(0, None))(z, found[site]))
        return outs

    def _pull_back(self, operands: list[Any], cotangents: list[Any]) -> list[Any]:
        wide_params = [p.astype(wide(p.dtype)) for p in self._params]
        outs, back = jax.vjp(lambda p: self._outputs(p, operands), wide_params)[:2]
        (grads,) = back([g.astype(o.dtype) for g, o in zip(cotangents, outs, strict=True)])
        return grads

    def _one(self, operands: Any, cotangents: Any, index: Sequence[int] | None = None) -> list[Any]:
        """The gradient of one sample, from its records, for the leaves in ``index``."""
        chosen = range(len(self._params)) if index is None else index
        only = {i for i, s in enumerate(self._scheme.sites) if s.leaves & set(chosen)}
        one = dataclasses.replace(self, _scheme=dataclasses.replace(self._scheme, n_samples=1))
        batched = jax.tree.map(lambda x: x[None], (operands, cotangents))
        wide_params = [p.astype(wide(p.dtype)) for p in self._params]

        def outputs(leaves: list[Any]) -> list[Any]:
            params = list(wide_params)
            for i, leaf in zip(chosen, leaves, strict=True):
                params[i] = leaf
            return one._outputs(params, batched[0], only)

        outs, back = jax.vjp(outputs, [wide_params[i] for i in chosen])[:2]
        kept = [g for i, g in enumerate(batched[1]) if i in only]
        (grads,) = back([g.astype(o.dtype) for g, o in zip(kept, outs, strict=True)])
        return grads

    def _squares(self) -> list[Any]:
        """Each sample's squared norm of each trainable leaf."""
        records = list(zip(self._operands, self._cotangents, strict=True))
        exact = [i for i, road in enumerate(self._scheme.roads) if road.parts is None]
        fast = [i for i, road in enumerate(self._scheme.roads) if road.parts is not None]
        squares: dict[int, Any] = dict(zip(exact, self._exact_squares(exact), strict=True))
        suspect = jnp.zeros((), bool)
        for i in fast:
            squares[i], lost = leaf_squares(
                self._scheme.roads[i], self._scheme.sites, records, len(self)
            )
            suspect |= lost
        if any(part.gram for i in fast for part in self._scheme.roads[i].parts or ()):
            again = lax.cond(
                suspect,
                lambda: self._exact_squares(fast),
                lambda: [squares[i] for i in fast],
            )
            squares |= dict(zip(fast, again, strict=True))
        return [squares[i] for i in range(len(squares))]

    def _exact_squares(self, index: Sequence[int]) -> list[Any]:
        """From the gradients themselves, some samples at a time."""
        dtype = norm_dtype(self._params)

        def one(records: Any) -> list[Any]:
            rows = self._one(*records, index)
            return [jnp.sum(jnp.square(jnp.abs(r))).astype(dtype) for r in rows]

        if not index or not len(self):
            return [jnp.zeros(0, dtype) for _ in index]
        per_sample = 8 * sum(self._params[i].size for i in index)
        return map_samples(one, (self._operands, self._cotangents), len(self), per_sample)


class NoiseScale(NamedTuple):
    """What ``Samples.noise_scale`` returns, all scalars."""

    scale: Any
    """``noise / signal``, in samples."""
    signal: Any
    """The squared norm of the true gradient, estimated; may come out negative."""
    noise: Any
    """The trace of the covariance of the per-sample gradients."""


def _like(weights: Any, x: Any) -> Any:
    return weights.reshape(-1, *[1] * (x.ndim - 1))


def clip_weights(norms: Any, max_norm: Any) -> Any:
    """The factor that clips each sample to ``max_norm``; 0 where the norm is not finite."""
    finite = jnp.isfinite(norms)
    factor = jnp.minimum(1, max_norm / jnp.where(norms > 0, norms, max_norm))
    return jnp.where(finite, factor, 0)


def broadcast_none(tree: Any, scheme: Scheme, call: str) -> list[Any]:
    """The trainable leaves of ``tree``, which may hold ``None`` for frozen ones."""
    full = jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)
    if len(full) != len(scheme.is_frozen):
        raise ValueError(
            f"{call}: it has the structure of params; got {len(full)} leaves for "
            f"{len(scheme.is_frozen)}. Pass a tree like params."
        )
    return [leaf for leaf, frozen in zip(full, scheme.is_frozen, strict=True) if not frozen]
