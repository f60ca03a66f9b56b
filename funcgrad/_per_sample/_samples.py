"""The gradients of a batch's samples, kept as factors, and what is made of them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from funcgrad._compat import gathered, make_varying, varying_axes
from funcgrad._per_sample._group_norms import squares
from funcgrad._per_sample._products import gram
from funcgrad._per_sample._projections import project
from funcgrad._per_sample._records import NONE_FORMED, Formed, Records
from funcgrad._per_sample._roads import LeafRoad
from funcgrad._trees import LeafSpec, broadcast_prefix, choose_leaves


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "aux", "_records"],
    meta_fields=[],
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
    _records: Records

    def __len__(self) -> int:
        return self._records.scheme.n_samples

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept of the samples, beside losses and aux: the factors.

        Under ``jit`` what no method asks for is not kept.
        """
        held = jax.tree.leaves((self._records.operands, self._records.cotangents))
        # Sites may share an array.
        return sum({id(leaf): leaf.size * leaf.dtype.itemsize for leaf in held}.values())

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
        records = self._held
        weights = jnp.asarray(weights)
        if weights.shape != (len(self),):
            raise ValueError(
                f"weighted_sum: one weight per sample; got shape {weights.shape} for "
                f"{len(self)} samples. Pass an array of shape ({len(self)},)."
            )
        return self._tree(records.weighted(weights))

    def sum(self) -> Any:
        """The sum of the gradients, a tree like ``params``."""
        return self._tree(self._sum())

    def mean(self) -> Any:
        """The mean of the gradients, a tree like ``params``; zeros for no samples."""
        return jax.tree.map(lambda g: g / max(1, len(self)), self.sum())

    # Norms.

    def norms(self, groups: Any = None) -> Any:
        """Each sample's gradient norm.

        Squares are of float32 or wider: in float32 those of entries below 1e-19 are zero.

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
        if groups is None:
            return self._total_norms()
        labels, structure = jax.tree.flatten(groups)
        numbered = jax.tree.unflatten(structure, range(len(labels)))
        members = broadcast_prefix(numbered, self._skeleton(), "norms: groups")
        members = [member for member in members if member is not None]
        index = [[i for i, m in enumerate(members) if m == k] for k in range(len(labels))]
        found = squares(self._held, index)
        return jax.tree.unflatten(structure, [jnp.sqrt(square) for square in found])

    def leaf_norms(self) -> Any:
        """Each sample's norm of each leaf, a tree like ``params`` of (batch,)."""
        found = squares(self._held, [[i] for i in range(len(self._records.params))])
        return self._tree([jnp.sqrt(square) for square in found])

    def clipped_sum(self, max_norm: Any) -> Any:
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
          >>> [round(float(g), 3) for g in samples.clipped_sum(1.0)]
          [0.9, 1.2]
        """
        if not isinstance(max_norm, jax.core.Tracer) and not max_norm > 0:
            raise ValueError(
                f"clipped_sum: max_norm is above 0; got {max_norm}. "
                "Pass weighted_sum weights of your own for anything else."
            )
        formed = self._held.formed()
        norms = self._total_norms(formed)
        return self._tree(self._records.weighted(clip_weights(norms, max_norm), formed=formed))

    def top(self, k: int) -> tuple[Any, Any]:
        """The ``k`` largest norms and the indices of their samples, largest first."""
        norms, samples = lax.top_k(self.norms(), k)
        return norms, samples

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
        return self._held.dots(self._leaves(direction, "dots: direction"))

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
        return gram(self._held, (self if other is None else other)._held)

    def project(self, key: Any, dim: int) -> Any:
        """Random projections of the gradients that keep inner products on average.

        Each is ``P @ gradient`` for one random matrix ``P`` of ``dim`` rows that is never
        there: a tensor sketch, made from the factors of a layer where that costs less than
        its gradient.  Whatever ``dim`` is, it costs about what the gradients do.  For
        gradients x and y the expectation of ``Px @ Py`` is ``x @ y``, and its variance at
        most ``(2 + 3**n) / dim * |x|**2 * |y|**2``, n being the most axes that a leaf has;
        near ``2 / dim`` where many terms add up, as with normal directions.

        Args:
          key: A random key.  The same key, ``dim`` and shapes of ``params`` give the same
            ``P``, whatever the batch, the road, the loss and the frozen leaves are.
          dim: How many numbers to keep of each gradient.

        Returns:
          (batch, dim) in float32 or wider.

        Raises:
          ValueError: ``dim`` is below 1.

        Example:
          >>> samples = fg.per_sample(lambda w, x: w @ x)(jnp.ones(3), jnp.eye(3))
          >>> samples.project(jax.random.key(0), 64).shape
          (3, 64)

        References:
          Pham and Pagh, "Fast and Scalable Polynomial Kernels via Explicit Feature Maps",
          2013; Avron, Nguyen and Woodruff, "Subspace Embeddings for the Polynomial Kernel",
          2014, for the variance; Park et al., "TRAK: Attributing Model Behavior at Scale",
          2023, and Choe et al., "What is Your Data Worth to GPT?", 2024, for the use.
        """
        if dim < 1:
            raise ValueError(
                f"project: dim is a positive number; got {dim}. Pass how many numbers to keep of "
                "each gradient."
            )
        return project(self._held, key, dim)

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
        rows = jax.vmap(lambda sample: self._held.row(sample, index))(self._held.by_sample())
        full: list[Any] = [None] * len(chosen)
        for i, row in zip(index, rows, strict=True):
            full[i] = row
        return self._tree(full)

    def second_moment(self) -> Any:
        """The mean of the squares of the gradients, entry by entry, a tree like ``params``."""
        zeros = [jnp.zeros_like(total) for total in self._sum()]
        return self._tree([s / max(1, len(self)) for s in self._squared_distances(zeros)])

    def variance(self) -> Any:
        """The unbiased variance of the gradients over the batch, a tree like ``params``."""
        mean = [total / max(1, len(self)) for total in self._sum()]
        return self._tree([s / max(1, len(self) - 1) for s in self._squared_distances(mean)])

    def _squared_distances(self, centre: list[Any]) -> list[Any]:
        """The sum over samples of the squares of gradient minus centre, entry by entry."""

        def add(total: list[Any], sample: Any) -> Any:
            rows = self._held.row(sample)
            moved = [jnp.square(jnp.abs(r - c)) for r, c in zip(rows, centre, strict=True)]
            return [t + m for t, m in zip(total, moved, strict=True)], None

        zeros = [jnp.zeros(c.shape, jnp.abs(c).dtype) for c in centre]
        if not len(self):
            return zeros
        samples = gathered(self._held.by_sample())
        total, _ = lax.scan(add, make_varying(zeros, varying_axes((samples, centre))), samples)
        return total

    def noise_scale(self) -> "NoiseScale":
        """The simple gradient noise scale: the batch size at which noise equals signal.

        Unbiased estimates of the squared norm of the true gradient and of the trace of the
        per-sample covariance.  Their quotient is biased, as quotients are: average the two
        over steps, ``jax.tree.map(jnp.mean, stacked)``, before taking ``scale``.

        Returns:
          A ``NoiseScale``.

        References:
          McCandlish et al., "An Empirical Model of Large-Batch Training", 2018.
        """
        n = len(self)
        squares = [jnp.sum(jnp.square(jnp.abs(total / max(1, n)))) for total in self._sum()]
        big = sum(squares, jnp.zeros((), self._records.dtype))
        small = jnp.mean(jnp.square(self.norms()))
        signal = (n * big - small) / (n - 1) if n > 1 else jnp.full((), jnp.nan)
        noise = (small - big) * n / (n - 1) if n > 1 else jnp.full((), jnp.nan)
        return NoiseScale(signal, noise)

    def explain(self) -> tuple[LeafRoad, ...]:
        """For each leaf: its road, where it is used, and why."""
        return self._records.scheme.roads

    @property
    def _held(self) -> Records:
        if jnp.shape(self.values) != (len(self),):
            raise ValueError(
                f"Samples: their arrays are those of one batch of {len(self)} samples; got "
                f"values of shape {jnp.shape(self.values)}, stacked by vmap or scan. Call the "
                "methods inside, or under another vmap."
            )
        return self._records

    def _total_norms(self, formed: Formed = NONE_FORMED) -> Any:
        (square,) = squares(self._held, [range(len(self._records.params))], formed)
        return jnp.sqrt(square)

    def _sum(self) -> list[Any]:
        return self._held.pull_back(self._records.operands, self._records.cotangents)

    def _tree(self, leaves: list[Any]) -> Any:
        return self._records.scheme.like_params(leaves)

    def _skeleton(self) -> Any:
        return self._tree(list(self._records.params))

    def _leaves(self, tree: Any, call: str) -> list[Any]:
        """The trainable leaves of a tree like ``params``, which may lack the frozen ones."""
        frozen = self._records.scheme.is_frozen
        leaves = jax.tree.leaves(tree)
        if len(leaves) == len(frozen):
            leaves = [leaf for leaf, skip in zip(leaves, frozen, strict=True) if not skip]
        if len(leaves) != len(self._records.params):
            raise ValueError(
                f"{call} has the structure of params; got {len(leaves)} leaves for "
                f"{len(frozen)}. Pass a tree like params."
            )
        kept = [jnp.asarray(leaf) for leaf in leaves]
        for leaf, param in zip(kept, self._records.params, strict=True):
            if leaf.shape != param.shape:
                raise ValueError(
                    f"{call} has the shapes of params; got {leaf.shape} for {param.shape}. "
                    "Pass a tree like params."
                )
        return kept


class NoiseScale(NamedTuple):
    """What ``Samples.noise_scale`` returns; average it over steps, then take ``scale``."""

    signal: Any
    """The squared norm of the true gradient, estimated; may come out negative."""
    noise: Any
    """The trace of the covariance of the per-sample gradients."""

    @property
    def scale(self) -> Any:
        """``noise / signal``, in samples: the batch size at which noise equals signal."""
        return self.noise / self.signal


def clip_weights(norms: Any, max_norm: Any) -> Any:
    """The factor that clips each sample to ``max_norm``; 0 where the norm is not finite."""
    finite = jnp.isfinite(norms)
    factor = jnp.minimum(1, max_norm / jnp.where(norms > 0, norms, max_norm))
    return jnp.where(finite, factor, 0)
