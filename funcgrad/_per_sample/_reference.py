"""The reference road: every sample's gradient, materialised."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from funcgrad import _jaxpr
from funcgrad._compat import gathered, make_varying, open_jaxpr, primitives, varying_axes
from funcgrad._per_sample._batch import (
    Batch,
    Randomness,
    check_chunk_size,
    refuse_shared_draws,
    scan_chunks,
    split_batch,
)
from funcgrad._trees import LeafSpec, choose_leaves, is_float, keystr


class PerSampleGrads(NamedTuple):
    """What ``per_sample_grads`` returns; every array has the sample axis first."""

    grads: Any
    """Tree like ``params``, leaves (batch, *shape) in the leaf's dtype; ``None`` if frozen."""
    values: Any
    """The losses, (batch,)."""
    aux: Any
    """The loss's second output, stacked; ``None`` without ``has_aux``."""


def per_sample_grads(
    loss: Callable[..., Any],
    *,
    has_aux: bool = False,
    in_axes: Any = 0,
    chunk_size: int | None = None,
    randomness: Randomness = "different",
    frozen: LeafSpec = None,
) -> Callable[..., PerSampleGrads]:
    """One gradient per sample, each of them in memory.

    Row ``i`` is ``jax.grad(loss)(params, *sample_i)``.  This takes batch × parameters of
    memory: it is the reference for what is computed without materialising, and the tool
    where every gradient is wanted.  PyTorch: ``torch.func.vmap(torch.func.grad(loss),
    in_dims=(None, 0, ...), chunk_size=...)``.

    ==================================  ==================================================
    a batch of no samples               arrays with a sample axis of length 0
    an integer leaf in ``params``       refused by name, unless it is ``frozen``
    one random key among the arguments  split, so that each sample has its own
    a key with ``in_axes`` ``None``     refused where it is drawn from, with the line
    inside ``shard_map``                each device's rows are its own samples', unreduced
    one sample's NaN or infinity        in that sample's row alone
    ==================================  ==================================================

    Args:
      loss: ``loss(params, *sample)``, a real floating scalar for one sample; with
        ``has_aux`` a pair of it and a pytree.  ``per_sample_loss`` makes one of a loss
        that takes a whole batch.
      has_aux: Whether ``loss`` returns a pair.
      in_axes: The sample axis of the arguments after ``params``, as in ``jax.vmap``: an
        integer, ``None`` for what all samples share, or a tuple with a prefix of each
        argument's tree.
      chunk_size: Samples to differentiate at a time; any remainder is its own chunk.
      randomness: ``"different"`` gives each sample its own key and refuses a shared one,
        ``"same"`` lets all samples draw alike.
      frozen: Leaves without a gradient: glob patterns of their paths (``"embed/*"``), a
        predicate of (path, leaf), or a tree of booleans.

    Returns:
      A function ``(params, *batch) -> PerSampleGrads``.

    Raises:
      TypeError: A leaf to differentiate is not floating, or the loss is not a real scalar.
      ValueError: Batch arguments disagree in size, a key would be shared by accident,
        ``chunk_size`` is below 1, or a pattern in ``frozen`` names no leaf.

    Example:
      >>> loss = lambda w, x, y: (w @ x - y) ** 2
      >>> xs, ys = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([0.0, 1.0])
      >>> out = fg.per_sample_grads(loss)(jnp.array([1.0, 1.0]), xs, ys)
      >>> out.grads
      Array([[ 6., 12.],
             [36., 48.]], dtype=float32)
      >>> out.values
      Array([ 9., 36.], dtype=float32)

    References:
      Horace He and Richard Zou, "functorch: JAX-like composable function transforms for
      PyTorch", 2021.
    """
    call = "per_sample_grads"
    check_chunk_size(chunk_size, call)

    def run(params: Any, *args: Any) -> PerSampleGrads:
        problem = prepare(
            loss, params, args, has_aux=has_aux, in_axes=in_axes, randomness=randomness,
            frozen=frozen, call=call,
        )  # fmt: skip
        if problem.batch.size == 0:
            grads, values, aux = problem.empty()
        else:
            _, (grads, values, aux) = scan_chunks(
                lambda carry, chunk: (carry, problem.differentiate(chunk)),
                (),
                problem.batch.mapped,
                chunk_size,
            )
        return PerSampleGrads(problem.like_params(grads), values, aux)

    return run


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loss at its arguments: what is differentiated, and one sample's shapes."""

    loss: Callable[..., Any]  # of (list of trainable leaves, mapped leaves) -> value, aux
    trainable: list[Any]
    is_frozen: list[bool]
    params_tree: Any
    batch: Batch
    traced: _jaxpr.Traced

    @property
    def out_shapes(self) -> Any:
        """The value and aux of one sample, as shapes."""
        return _out_shapes(self.traced)

    @functools.cached_property
    def convolves(self) -> bool:
        """Whether the loss has a convolution, at any depth."""
        program = open_jaxpr(self.traced.jaxpr)[0]
        return any(
            visit.eqn.primitive is primitives.conv_general_dilated_p
            for visit in _jaxpr.walk(program)
        )

    def differentiate(self, chunk: Any) -> tuple[list[Any], Any, Any]:
        """The stacked gradients, values and aux of a chunk of samples."""
        made = self._mapped(chunk)
        return self._kept_apart(made, chunk) if self.convolves else made

    def _kept_apart(self, made: Any, chunk: Any) -> tuple[list[Any], Any, Any]:
        """The same, made again sample by sample where an entry is not finite.

        JAX maps the gradient of a filter over samples as one convolution in groups, which the
        compiler may widen by zeros: zero times the NaN of one sample would be in the others.
        """
        axes = varying_axes((made, chunk))
        made = make_varying(gathered(made), axes)

        def one(sample: Any) -> Any:
            alone = self._mapped(jax.tree.map(lambda x: x[None], sample))
            return jax.tree.map(lambda x: x[0], alone)

        floats = [x for x in jax.tree.leaves(made) if jnp.issubdtype(x.dtype, jnp.inexact)]
        fine = jnp.stack([jnp.isfinite(x).all() for x in floats]).all()
        again = lambda: make_varying(lax.map(one, gathered(chunk)), axes)
        return lax.cond(fine, lambda: made, again)

    def _mapped(self, chunk: Any) -> tuple[list[Any], Any, Any]:
        # Inside shard_map the gradient of a value that all devices share carries a sum over
        # the devices: row i would be the sum of every device's row i.
        axes = varying_axes((chunk, self.batch.shared))
        local = make_varying(self.trainable, axes)
        one = jax.value_and_grad(self.loss, has_aux=True)
        (values, aux), grads = jax.vmap(one, in_axes=(None, 0))(local, chunk)
        return grads, values, aux

    def empty(self) -> tuple[list[Any], Any, Any]:
        """The gradients, values and aux of no samples."""
        value, aux = jax.tree.map(
            lambda shape: jnp.zeros((0, *shape.shape), shape.dtype), self.out_shapes
        )
        return [jnp.zeros((0, *jnp.shape(p)), p.dtype) for p in self.trainable], value, aux

    def like_params(self, leaves: list[Any]) -> Any:
        """A tree like ``params`` with ``leaves`` in the trainable places, ``None`` elsewhere."""
        rest = iter(leaves)
        return jax.tree.unflatten(
            self.params_tree, [None if frozen else next(rest) for frozen in self.is_frozen]
        )


def prepare(
    loss: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    *,
    has_aux: bool,
    in_axes: Any,
    randomness: Randomness,
    frozen: LeafSpec,
    call: str,
) -> Problem:
    """Check the arguments and the loss, at the shapes of one sample."""
    batch = split_batch(args, in_axes, randomness, call)
    paths, params_tree = jax.tree_util.tree_flatten_with_path(params)
    is_frozen = choose_leaves(frozen, params, f"{call}: frozen")
    for (path, leaf), skip in zip(paths, is_frozen, strict=True):
        if not skip and not is_float(leaf):
            raise TypeError(
                f"{call}: params are differentiated, so they are floating; got "
                f"params{keystr(path)} of {jnp.result_type(leaf)}. Name it in frozen=, or pass "
                "it as a batch argument."
            )
    leaves = [leaf for _, leaf in paths]
    kept = [leaf for leaf, skip in zip(leaves, is_frozen, strict=True) if skip]
    trainable = [
        jnp.asarray(leaf) for leaf, skip in zip(leaves, is_frozen, strict=True) if not skip
    ]

    def flat_loss(trainable: list[Any], mapped: Any) -> tuple[Any, Any]:
        train, keep = iter(trainable), iter(kept)
        merged = [next(keep) if skip else next(train) for skip in is_frozen]
        out = loss(jax.tree.unflatten(params_tree, merged), *batch.join(mapped))
        if not has_aux:
            return out, None
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(
                f"{call}: with has_aux the loss returns a pair (value, aux); got "
                f"{type(out).__name__}. Return both, or leave has_aux out."
            )
        return out

    one = batch.one_sample()
    # With the types that the backward pass runs at, inside shard_map.
    local = make_varying(trainable, varying_axes((batch.mapped, batch.shared)))
    traced = _jaxpr.trace(flat_loss, local, one)
    _check_value(_out_shapes(traced)[0], call)
    if randomness == "different":
        varies = [False] * len(trainable) + [True] * len(one)
        refuse_shared_draws(traced, varies, call)
    return Problem(flat_loss, trainable, is_frozen, params_tree, batch, traced)


def _out_shapes(traced: _jaxpr.Traced) -> Any:
    avals = traced.jaxpr.out_avals
    return traced.unflatten([jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals])


def _check_value(value: Any, call: str) -> None:
    shape = getattr(value, "shape", None)
    if shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        got = f"a tree {jax.tree.structure(value)}" if shape is None else f"{value.dtype}{shape}"
        raise TypeError(
            f"{call}: the loss of one sample is a real floating scalar; got {got}. "
            "Sum it, pass has_aux=True for a pair, or wrap a loss of a whole batch in "
            "per_sample_loss."
        )
