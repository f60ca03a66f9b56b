"""Clipped per-sample gradients, summed: the step of differentially private training."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from funcgrad._compat import make_varying, varying_axes
from funcgrad._per_sample._batch import Randomness, check_chunk_size, scan_chunks
from funcgrad._per_sample._clipping import (
    Bounds,
    Step,
    factored,
    materialized,
    no_samples,
    two_passes,
)
from funcgrad._per_sample._per_sample import make_scheme
from funcgrad._per_sample._reference import Problem, prepare
from funcgrad._per_sample._sums import wide
from funcgrad._trees import LeafSpec

# By how many contributions neighbouring batches differ; the last three are dp_accounting's.
_MOVED = {
    "add_remove": 1,
    "replace": 2,
    "ADD_OR_REMOVE_ONE": 1,
    "REPLACE_SPECIAL": 1,
    "REPLACE_ONE": 2,
}

ClipRoad = Literal["auto", "gram", "direct", "materialize", "two_pass"]


class ClippedGrads(NamedTuple):
    """What a ``clipped_grad`` returns."""

    grads: Any
    """The sum (or mean) of the clipped gradients, a tree like ``params`` in float32 or
    wider; ``None`` for frozen leaves."""
    norms: Any
    """Each sample's norm before clipping, (batch,), not finite where it was left out; with
    several bounds a tree like ``max_norm``."""
    clip_fraction: Any
    """The share of the counted samples whose norm was above the bound, shaped like
    ``max_norm``."""
    nonfinite: Any
    """How many samples were left out because their gradient or its norm was NaN or infinite."""
    values: Any
    """The losses, (batch,)."""
    aux: Any
    """The loss's second output, stacked; ``None`` without ``has_aux``."""


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad:
    """A function ``(params, *batch, mask=None) -> ClippedGrads`` with a known sensitivity."""

    loss: Callable[..., Any]
    max_norm: Any
    mean_over: float | int | None
    options: dict[str, Any]
    chunk_size: int | None | Literal["auto"]
    memory_budget: int
    road: ClipRoad

    def sensitivity(self, neighbours: Any = "add_remove") -> float:
        """The largest distance, in 2-norm, between the gradients of neighbouring batches.

        Args:
          neighbours: ``"add_remove"`` when one batch has a sample more than the other (its
            place may be masked), ``"replace"`` when one sample differs; or a
            ``NeighboringRelation`` of ``dp_accounting``, as ``jax_privacy`` passes it.

        Returns:
          The bound: the root of the sum of the squares of ``max_norm``, over ``mean_over``;
          twice that for ``"replace"``.

        Raises:
          ValueError: Another relation.

        Example:
          >>> fg.clipped_grad(lambda w, x: w @ x, max_norm=3.0, mean_over=6).sensitivity()
          0.5
        """
        bounds = [float(bound) for bound in jax.tree.leaves(self.max_norm)]
        one = math.sqrt(math.fsum(bound**2 for bound in bounds)) / (self.mean_over or 1)
        name = getattr(neighbours, "name", neighbours)
        if name not in _MOVED:
            raise ValueError(
                f"sensitivity: neighbours is one of {', '.join(_MOVED)}; got {name}. "
                "Say how neighbouring batches differ."
            )
        return _MOVED[name] * one

    def __call__(self, params: Any, *args: Any, mask: Any = None) -> ClippedGrads:
        """Differentiate, clip and sum; ``mask`` (batch,) is false for samples of padding."""
        problem = prepare(self.loss, params, args, call="clipped_grad", **self.options)
        size = problem.batch.size
        mask = jnp.ones(size, bool) if mask is None else jnp.asarray(mask)
        if mask.shape != (size,) or mask.dtype != bool:
            raise ValueError(
                f"clipped_grad: mask is one boolean per sample; got {mask.dtype}{mask.shape} for "
                f"{size} samples. Pass True for each sample that counts."
            )
        slack = (5 if self.mean_over else 3) * size
        bounds = Bounds.over(self.max_norm, params, problem, slack)
        if size:
            samples = (problem.batch.mapped, mask)
            step, chunk_size = self._road(problem, bounds, params)
            sums = None
            if chunk_size < size or self.road == "materialize":
                axes = varying_axes((samples, problem.batch.shared, params))
                sums = make_varying(_zeros(problem), axes)
            sums, outs = scan_chunks(step, sums, samples, chunk_size)
        else:
            sums, outs = _zeros(problem), no_samples(problem, bounds)
        norms, clipped, finite, values, aux = outs
        grads = [high + low for high, low in sums]
        if self.mean_over is not None:
            grads = [grad / self.mean_over for grad in grads]
        counted = jnp.maximum(1, jnp.sum(finite & mask))
        return ClippedGrads(
            grads=problem.like_params(grads),
            norms=bounds.tree(norms),
            clip_fraction=bounds.tree([jnp.sum(c & mask) / counted for c in clipped]),
            nonfinite=jnp.sum(~finite & mask),
            values=values,
            aux=aux,
        )

    def _road(self, problem: Problem, bounds: Bounds, params: Any) -> tuple[Step, int]:
        """The step over chunks, and how many samples a chunk has."""
        if self.road == "materialize":
            step = materialized(problem, bounds)
            bytes_each = 3 * sum(p.size * wide(p.dtype).itemsize for p in problem.trainable)
        else:
            road = "auto" if self.road == "two_pass" else self.road
            scheme = make_scheme(problem, params, road, keeps=self.road != "two_pass")
            make = two_passes if self.road == "two_pass" else factored
            step, bytes_each = make(problem, bounds, scheme), scheme.bytes_each
        if self.chunk_size == "auto":
            return step, max(1, self.memory_budget // max(1, bytes_each))
        return step, self.chunk_size or problem.batch.size


def _zeros(problem: Problem) -> Any:
    zeros = [jnp.zeros(jnp.shape(p), wide(p.dtype)) for p in problem.trainable]
    return [(zero, zero) for zero in zeros]


def clipped_grad(
    loss: Callable[..., Any],
    *,
    max_norm: Any,
    mean_over: float | int | None = None,
    has_aux: bool = False,
    in_axes: Any = 0,
    chunk_size: int | None | Literal["auto"] = None,
    memory_budget: int = 2**30,
    randomness: Randomness = "different",
    frozen: LeafSpec = None,
    road: ClipRoad = "auto",
) -> ClippedGrad:
    """Clip each sample's gradient to a norm, and sum.

    The sum over samples of ``g_i * min(1, max_norm / norm(g_i))``.  PyTorch: Opacus'
    ``DPOptimizer``, before it adds noise.

    The bound is kept in floating point, not only on paper: when one sample is added,
    removed or masked, ``grads`` moves by ``max_norm`` at the most.  Norms are taken without
    overflow or underflow and rounded up where terms cancel, and the bound that is aimed at is
    smaller than ``max_norm`` by the rounding of the sum, a few units in the last place per
    sample (for 256 samples in float32 about 0.005%).  With ``road="materialize"``, which adds
    in twice the working precision, this holds by construction.  The other roads leave the
    same margin, and generated hostile batches have not exceeded it but for one kind: where
    the terms of a sample's gradient (tokens, positions) cancel to less than about a hundredth
    of what they are, the rounding of their sum may, by about 1e-7 in float32 over what is
    left of them: 1% where they cancel to 1e-5.  A sample with a NaN or an infinity in its
    gradient, or as its norm, contributes nothing and is counted in ``nonfinite``.

    ==================================  ==================================================
    a batch of no samples               zeros
    a padded batch                      ``mask=`` in the call; padding counts nowhere
    bfloat16 or float16 parameters      norms and sums in float32, ``grads`` in float32:
                                        add noise before casting down
    inside ``shard_map``                the sum over the device's own samples: ``psum`` it
    ==================================  ==================================================

    Args:
      loss: ``loss(params, *sample)``, a real floating scalar for one sample; with
        ``has_aux`` a pair of it and a pytree.
      max_norm: The bound on each sample's 2-norm, above 0; or a prefix of the tree of
        ``params`` with a bound for each group of leaves.
      mean_over: Divide the sum by this fixed number, such as the expected batch size.
      has_aux: Whether ``loss`` returns a pair.
      in_axes: The sample axis of the arguments after ``params``, as in ``jax.vmap``.
      chunk_size: Samples to differentiate at a time; memory follows it.  ``"auto"`` takes as
        many as ``memory_budget`` holds.
      memory_budget: Bytes for what is kept of the samples of a chunk, with ``"auto"``.
      randomness: ``"different"`` gives each sample its own key, ``"same"`` shares one.
      frozen: Leaves without a gradient, outside the norm: patterns, a predicate of
        (path, leaf), or a tree of booleans.
      road: ``"auto"``, ``"gram"`` and ``"direct"`` keep gradients as factors (see
        ``per_sample``); ``"materialize"`` holds a chunk's gradients in memory;
        ``"two_pass"`` goes back twice and needs the least memory, also where the model
        recomputes (``jax.checkpoint``).  Its second pass scales each sample's loss, where the
        others scale what came back: it takes no way back of the user's own (a hook,
        ``custom_vjp``, ``Function``), which may clip or round and need not scale along.

    Returns:
      A ``ClippedGrad``: called with ``(params, *batch, mask=None)`` it returns
      ``ClippedGrads``; its method ``sensitivity`` states the bound.

    Raises:
      TypeError: A leaf to differentiate is not floating, or the loss is not a real scalar.
      ValueError: A bound is not positive and finite or its tree is no prefix of
        ``params``; ``mean_over`` or ``memory_budget`` is not positive; ``mask`` is not one
        boolean per sample; ``road="two_pass"`` meets values of less than float32, or a way
        back of the user's own; or as ``per_sample_grads``.

    Example:
      >>> loss = lambda w, x: w @ x
      >>> xs = jnp.array([[3.0, 4.0], [0.3, 0.4], [jnp.nan, 0.0]])
      >>> out = fg.clipped_grad(loss, max_norm=1.0)(jnp.zeros(2), xs)
      >>> [round(float(g), 3) for g in out.grads], out.norms
      ([0.9, 1.2], Array([5. , 0.5, nan], dtype=float32))
      >>> int(out.nonfinite)
      1

    References:
      Abadi et al., "Deep Learning with Differential Privacy", 2016.
    """
    if chunk_size != "auto":
        check_chunk_size(chunk_size, "clipped_grad")
    if memory_budget <= 0:
        raise ValueError(
            f"clipped_grad: memory_budget is a positive number of bytes; got {memory_budget}. "
            'It is read with chunk_size="auto".'
        )
    if mean_over is not None and not 0 < mean_over < math.inf:
        raise ValueError(
            f"clipped_grad: mean_over is a positive number; got {mean_over}. Pass None for the sum."
        )
    options = {
        "has_aux": has_aux,
        "in_axes": in_axes,
        "randomness": randomness,
        "frozen": frozen,
    }
    return ClippedGrad(loss, max_norm, mean_over, options, chunk_size, memory_budget, road)
