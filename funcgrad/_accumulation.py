"""Gradients of a large batch, added up over micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad import _jaxpr
from funcgrad._compat import make_varying, manual_axes, open_jaxpr, varying_axes
from funcgrad._microbatches import CALL, Arguments, Batch, is_integer
from funcgrad._trees import LeafSpec, is_float


class Accumulated(NamedTuple):
    """What an accumulated gradient returns."""

    value: Any
    """The sum of the losses over the sum of the weights: a scalar, float32 or wider."""
    grads: Any
    """The gradient of ``value``, like the arguments of ``argnums``; ``None`` if frozen."""
    weight: Any
    """The sum of the weights."""
    aux: Any
    """The third output of ``fun``, stacked over micro-batches; ``None`` without ``has_aux``.

    Rows for each sample are in the order of the ``n`` samples, without what a rest was filled up
    with, as ``jnp.swapaxes(aux, 0, 1).reshape(-1, *aux.shape[2:])[:n]``.
    """


def accumulate_grads(
    fun: Callable[..., Any],
    microbatch_size: int,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    in_axes: Any = 0,
    frozen: LeafSpec = None,
) -> Callable[..., Accumulated]:
    """Differentiate a weighted mean over a large batch, a micro-batch at a time.

    ``fun`` gives sums, not means: its losses and what they weigh, such as tokens or samples.
    The value is the sum of all losses over the sum of all weights, so that micro-batches of
    unequal weight count as they should; a mean of their means would not.  One ``scan`` runs
    them, and memory does not grow with their number.

    PyTorch: ``for micro in batch: (fun(micro) / weight).backward()``, with ``weight`` the sum
    over the whole batch.

    ==============================  ======================================================
    a size that does not divide     micro-batches are filled up with copies of a sample,
    the batch; ``mask=``            which is masked out: ``fun`` gives a loss per sample
    weights that add up to 0        value and gradients are 0
    bfloat16, float16               added up in float32, and rounded once, at the end; where
                                    a sum in ``fun`` leaves the range of float16, scale
                                    losses and weights by one constant, which cancels
    each sample's gradient clipped  ``clipped_grad(chunk_size=)`` adds up by itself, also with
                                    checkpoint and ``frozen``; inside ``shard_map`` ``psum``
                                    its sums, once
    inside ``shard_map``            all devices together: one reduction after the last
                                    micro-batch (one for each dtype, and for each set of
                                    axes where parameters are sharded too)
    a batch sharded under ``jit``   each device has its part of each micro-batch; XLA
                                    reduces as often as there are micro-batches; on an
                                    explicit mesh a rest that is filled up is not sharded
    ==============================  ======================================================

    Args:
      fun: ``fun(params, *microbatch)`` returns ``(losses, weights)``: two scalars, which are
        sums over the micro-batch, or two arrays of the same shape with the samples first.
        Weights do not depend on ``params``.  With ``has_aux``, ``(losses, weights, aux)``.
      microbatch_size: Samples in a micro-batch, at least 1.
      argnums: The arguments to differentiate, as in ``jax.grad``; the others are the batch.
      has_aux: Whether ``fun`` returns a third output.
      in_axes: The sample axis of the arguments of the batch, as in ``jax.vmap``; ``None`` for
        what all micro-batches share.  One typed key is split, a key for each micro-batch.
      frozen: Leaves without a gradient: patterns, a predicate of (path, leaf), or a tree of
        booleans.

    Returns:
      A function of the arguments of ``fun`` and ``mask``, a boolean for each sample that
      is false where the sample does not count; it returns ``Accumulated``.  Micro-batch
      ``i`` of ``n`` holds the samples ``i``, ``i + n``, ``i + 2 * n``...

    Raises:
      TypeError: A leaf to differentiate is not floating, or the losses are not; names it.
      ValueError: ``fun`` returns no pair of equal shapes, or scalars where samples are to be
        masked; weights depend on ``params``; inside ``shard_map``, losses or weights are
        reduced already, or ``check_vma=False`` hides what they are.

    Example:
      >>> def loss(w, x, y):  # the sum and the number of squares
      ...     return jnp.sum((x @ w - y) ** 2), y.size
      >>> x, y = jnp.arange(6.0).reshape(3, 2), jnp.zeros(3)
      >>> out = fg.accumulate_grads(loss, 1)(jnp.array([1.0, 2.0]), x, y)
      >>> out.grads, out.weight
      (Array([48., 64.], dtype=float32), Array(3., dtype=float32))

    References:
      Ott et al., "Scaling neural machine translation", 2018.
    """
    if not is_integer(microbatch_size) or microbatch_size < 1:
        raise ValueError(
            f"{CALL}: microbatch_size is a positive number of samples; got {microbatch_size!r}. "
            "Pass the size of the batch for a single micro-batch."
        )

    def run(*args: Any, mask: Any = None) -> Accumulated:
        split = Arguments.of(args, argnums, frozen)
        batch = Batch.of(split.batch, in_axes, microbatch_size, mask)
        axes = varying_axes((batch.mapped, batch.keys, batch.shared, batch.mask))
        _check_types_tell()

        dtypes: list[Any] = []

        def step(sums: Any, i: Any) -> tuple[Any, Any]:
            micro, counts = batch.micro(i)

            def total(leaves: list[Any]) -> Any:
                out = fun(*split.join(leaves, micro))
                losses, weights, aux = _parts(out, has_aux)
                _check_outputs(losses, weights, counts, batch, axes)
                return _sum(losses, counts), (_sum(weights, counts), aux)

            _check_weights(fun, split, train, micro, axes, has_aux)
            (loss, (weight, aux)), grads = jax.value_and_grad(total, has_aux=True)(train)
            dtypes[:] = [loss.dtype, weight.dtype]
            if counts is not None:
                # Where no sample counts, the gradient is that of a sample that may be bad.
                grads = [jnp.where(counts.any(), g, 0) for g in grads]
            new = [loss, make_varying(weight, axes), *grads]
            return [s + x.astype(s.dtype) for s, x in zip(sums, new, strict=True)], aux

        # As values of each device, so that nothing is reduced on the way back of a step.
        train = make_varying(split.train, axes)
        # The widest float there is, since the dtype of the losses is not known yet.
        zeros = [jnp.zeros((), float)] * 2 + [_zeros(leaf) for leaf in train]
        own = [axes, axes, *(varying_axes(leaf) | axes for leaf in train)]
        zeros = [make_varying(zero, varying) for zero, varying in zip(zeros, own, strict=True)]
        sums, aux = lax.scan(step, zeros, jnp.arange(batch.n_micro))

        over = [axes, axes, *(axes - varying_axes(leaf) for leaf in split.train)]
        sums = [sums[0].astype(dtypes[0]), sums[1].astype(dtypes[1]), *sums[2:]]
        loss, weight, *grads = _reduce(sums, over)
        some = weight != 0
        mean = lambda x: jnp.where(some, x / jnp.where(some, weight, 1).astype(x.dtype), 0)
        grads = [mean(g).astype(leaf.dtype) for g, leaf in zip(grads, train, strict=True)]
        return Accumulated(mean(loss), split.grads(grads), weight, aux)

    return run


def _wide(dtype: Any) -> Any:
    return np.promote_types(dtype, np.float32)


def _zeros(leaf: Any) -> Any:
    return jnp.zeros_like(leaf, dtype=_wide(leaf.dtype))


def _sum(x: Any, counts: Any) -> Any:
    x = jnp.asarray(x)
    if not is_float(x):
        x = x.astype(float)
    x = x.astype(_wide(x.dtype))
    if counts is not None:
        x = jnp.where(counts.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
    return jnp.sum(x)


def _parts(out: Any, has_aux: bool) -> tuple[Any, Any, Any]:
    n = 3 if has_aux else 2
    if not isinstance(out, tuple) or len(out) != n:
        got = f"{len(out)} outputs" if isinstance(out, tuple) else type(out).__name__
        raise ValueError(
            f"{CALL}: fun returns (losses, weights{', aux' if has_aux else ''}), sums and not "
            f"means; got {got}. Return what the losses weigh too, such as losses.size."
        )
    return out if has_aux else (*out, None)


def _check_outputs(
    losses: Any, weights: Any, counts: Any, batch: Batch, axes: frozenset[str]
) -> None:
    shape, size = jnp.shape(losses), batch.mapped[0].shape[0]
    if shape != jnp.shape(weights):
        raise ValueError(
            f"{CALL}: losses and weights have one shape; got {shape} and {jnp.shape(weights)}. "
            "Sum both over the micro-batch, or give both for each sample."
        )
    if not jnp.issubdtype(jnp.result_type(losses), jnp.floating):
        raise TypeError(
            f"{CALL}: losses are real and floating; got {jnp.result_type(losses)}. "
            "Return a loss that has a gradient."
        )
    if jnp.issubdtype(jnp.result_type(weights), jnp.complexfloating):
        raise TypeError(
            f"{CALL}: weights are real; got {jnp.result_type(weights)}. Return how many tokens or "
            "samples each loss stands for."
        )
    if counts is not None and (not shape or shape[0] != size):
        why = "a mask" if batch.n_last == size else f"a rest of {batch.n_last} samples"
        raise ValueError(
            f"{CALL}: where samples are masked, fun returns a loss and a weight for each; got "
            f"shape {shape} for {size} samples, with {why}. Return arrays with the samples "
            "first, or choose a size that divides the batch."
        )
    found = varying_axes(losses)
    own = "inside shard_map, losses are those of the device's own part of the batch"
    if axes - found:
        raise ValueError(
            f"{CALL}: {own}; got losses reduced over {', '.join(sorted(axes - found))}. "
            "Leave that reduction out: it is done once, at the end. Where the axis splits features "
            "and not samples, pass them whole and take the device's part inside fun."
        )
    if found - axes:
        raise ValueError(
            f"{CALL}: {own}; got losses that differ over {', '.join(sorted(found - axes))}, "
            "where the batch does not. Reduce them over these axes."
        )


def _check_weights(
    fun: Any, split: Arguments, train: list[Any], micro: Any, axes: frozenset[str], has_aux: bool
) -> None:
    """Raise where weights move with the parameters, or are reduced over devices."""
    types: list[Any] = []
    leaves, tree = jax.tree.flatten(micro)
    # What is no array, such as a flag that all share, stays what it is.
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]

    def weights(params: list[Any], arrays: list[Any]) -> Any:
        new = iter(arrays)
        fill = [next(new) if isinstance(x, jax.Array | np.ndarray) else x for x in leaves]
        out = _parts(fun(*split.join(params, jax.tree.unflatten(tree, fill))), has_aux)[1]
        total = _sum(out, None)
        types[:] = [varying_axes(out), total.dtype]
        return total

    jaxpr, _ = open_jaxpr(_jaxpr.trace(weights, train, arrays).jaxpr)
    varying, dtype = types
    marks = [i < len(train) for i in range(len(jaxpr.invars))]
    if any(_jaxpr.follow(jaxpr, marks)):
        # That may be through integers: it is the derivative that must not be there.
        back = lambda dot, params: jax.vjp(lambda x: weights(x, arrays), params)[1](dot)
        dot = make_varying(jnp.zeros((), dtype), varying)
        jaxpr_back, _ = open_jaxpr(_jaxpr.trace(back, dot, train).jaxpr)
        if any(_jaxpr.follow(jaxpr_back, [True] + [False] * len(train))):
            raise ValueError(
                f"{CALL}: weights do not depend on the parameters, since the mean is "
                "differentiated as if they were constant; got weights with a derivative. "
                "Multiply the losses by them, or use stop_gradient."
            )
    if axes - varying and any(_jaxpr.follow(jaxpr, [not mark for mark in marks])):
        raise ValueError(
            f"{CALL}: inside shard_map, weights are those of the device's own part of the "
            f"batch; got weights reduced over {', '.join(sorted(axes - varying))}. "
            "Leave that reduction out: it is done once, at the end."
        )


def _check_types_tell() -> None:
    manual, typed = manual_axes()
    if manual and not typed:
        raise ValueError(
            f"{CALL}: under shard_map with check_vma=False nothing says what differs between "
            "devices; got such a call. Use check_vma=True."
        )


def _reduce(leaves: list[Any], axes: list[frozenset[str]]) -> list[Any]:
    """Each leaf summed over its axes: one reduction of one vector for each set and dtype."""
    groups: dict[Any, list[int]] = {}
    for i, (leaf, over) in enumerate(zip(leaves, axes, strict=True)):
        if over:
            # Leaves that differ over other axes besides cannot share a vector with those
            # that do not.
            groups.setdefault((over, varying_axes(leaf), leaf.dtype), []).append(i)
    out = list(leaves)
    for (over, _, _), index in groups.items():
        flat = jnp.concatenate([leaves[i].ravel() for i in index])
        flat = lax.psum(flat, tuple(sorted(over)))
        ends = np.cumsum([leaves[i].size for i in index])[:-1]
        for i, part in zip(index, jnp.split(flat, ends), strict=True):
            out[i] = part.reshape(leaves[i].shape)
    return out
