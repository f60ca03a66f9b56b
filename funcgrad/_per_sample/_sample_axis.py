"""A batched loss as a loss of one sample, and the proof that it is one."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._compat import JaxprEqn, open_jaxpr
from funcgrad._jaxpr import Traced, source_line, trace
from funcgrad._per_sample import _masks
from funcgrad._per_sample._taint import ALL, SAMPLES, Blame, Taint, free, is_half
from funcgrad._per_sample._taint_rules import shape_of
from funcgrad._per_sample._taint_walk import Walker, same_program


class SampleMixingError(ValueError):
    """A batched loss in which the value of one sample depends on other samples.

    Or on what a batch of one cannot give: the size of the batch, a sample's place in it,
    or a random draw that the samples share.  The message names the equation and its line.
    """


def per_sample_loss(
    batch_loss: Callable[..., Any], *, has_aux: bool = False, in_axes: Any = 0
) -> Callable[..., Any]:
    """Turn a loss of a batch into the loss of one sample, or refuse.

    The result runs ``batch_loss`` on a batch of one.  That is the sample's own loss only
    if the samples of a batch do not meet, so this is proved first: the loss is traced at
    batches of 8 and 16, from shapes alone, and each element of each value is marked with
    the samples that it may depend on, through every nested body.  Batch normalisation,
    ``h - h.mean(0)``, negatives taken from the batch, a shared dropout mask of the batch's
    shape are refused.  So are batch statistics behind ``stop_gradient``: the value depends
    on them all the same.  What cannot be proved is refused too (a primitive without a
    rule, a Python loop over the samples, ``while_loop`` under ``vmap``).

    A scalar loss must be the mean or the sum of the samples' losses: a term that depends
    on no sample, such as weight decay, belongs to every sample's loss, which is right for
    a mean and refused for a sum.

    PyTorch has no counterpart: Opacus' ``ModuleValidator`` knows layers by their class,
    and sees neither a function nor a mean over the batch in ``forward``.

    Args:
      batch_loss: ``batch_loss(params, *batch)``, a scalar that is a mean or a sum over
        samples, or the vector of shape (batch,) of the samples' losses.
      has_aux: ``batch_loss`` returns ``(loss, aux)``.  Each leaf of ``aux`` has the sample
        axis first, or is a mean or a sum over samples, or depends on no sample.
      in_axes: The sample axis of each argument after ``params``: an integer for all, or a
        tuple with an entry (a prefix tree) for each; ``None`` for what samples share.
        Random keys need an axis: each sample has its own.

    Returns:
      ``loss(params, *sample)``: a scalar, or ``(scalar, aux)`` with the sample axis taken
      out of ``aux``.  It works under ``jit``, ``vmap``, ``grad`` and ``scan``.  The proof
      is made while tracing, once for each structure, shapes and dtypes of the arguments.

    Raises:
      SampleMixingError: Samples mix.  Names the first equation at which those that reach
        the output do, and the line of the caller's code that made it.
      ValueError: The loss is neither scalar nor of shape (batch,); ``in_axes`` maps no
        argument.

    Example:
      >>> def batch_loss(w, x, y):
      ...     return jnp.mean((x @ w - y) ** 2)
      >>> loss = per_sample_loss(batch_loss)
      >>> w, x, y = jnp.ones(2), jnp.arange(6.0).reshape(3, 2), jnp.zeros(3)
      >>> jax.vmap(jax.grad(loss), (None, 0, 0))(w, x, y)
      Array([[ 0.,  2.],
             [20., 30.],
             [72., 90.]], dtype=float32)

      >>> per_sample_loss(lambda w, x: jnp.sum((x - x.mean(0)) @ w))(w, x[0])
      Traceback (most recent call last):
      ...
      funcgrad...SampleMixingError: per_sample_loss: the loss of a sample ...

    References:
      Yousefpour et al., "Opacus: User-Friendly Differential Privacy Library in PyTorch",
      2021, section on incompatible modules.
    """
    proved: dict[Any, list[bool]] = {}

    @functools.wraps(batch_loss)
    def loss(params: Any, *sample: Any) -> Any:
        axes = _leaf_axes(in_axes, sample)
        leaves, tree = jax.tree.flatten((params, sample))
        shared = [None] * (len(leaves) - len(axes))
        key = tree, tuple(_aval_key(leaf) for leaf in leaves)
        if key not in proved:
            proved[key] = _prove(batch_loss, has_aux, leaves, tree, [*shared, *axes])
        args, batch = jax.tree.unflatten(
            tree,
            [
                leaf if axis is None else jnp.expand_dims(leaf, axis)
                for leaf, axis in zip(leaves, [*shared, *axes], strict=True)
            ],
        )
        outs, out_tree = jax.tree.flatten(batch_loss(args, *batch))
        outs = [
            _only_sample(out) if batched else out
            for out, batched in zip(outs, proved[key], strict=True)
        ]
        return jax.tree.unflatten(out_tree, outs)

    return loss


_SHARED = object()  # in_axes' None as a leaf of its tree


def _leaf_axes(in_axes: Any, sample: tuple[Any, ...]) -> list[int | None]:
    """The sample axis of each leaf of the arguments after ``params``."""
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    if isinstance(in_axes, tuple) and len(in_axes) != len(sample):
        raise ValueError(
            f"per_sample_loss: in_axes has an entry for each argument after params; got "
            f"{len(in_axes)} entries for {len(sample)} arguments. params have none."
        )
    prefix = jax.tree.map(
        lambda axis: _SHARED if axis is None else axis, in_axes, is_leaf=lambda a: a is None
    )
    if not isinstance(in_axes, tuple):
        prefix = (prefix,) * len(sample)
    spread = jax.tree.map(lambda axis, part: jax.tree.map(lambda _: axis, part), prefix, sample)
    axes = [None if axis is _SHARED else axis for axis in jax.tree.leaves(spread)]
    if all(axis is None for axis in axes):
        raise ValueError(
            f"per_sample_loss: some argument after params has a sample axis; got in_axes="
            f"{in_axes} with {len(axes)} leaves. Map the data."
        )
    return axes


def _aval_key(leaf: Any) -> Any:
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False)


def _only_sample(out: Any) -> Any:
    if out.shape[:1] != (1,):
        raise ValueError(
            f"per_sample_loss: an output with the sample axis first keeps it on a batch of "
            f"one; got shape {out.shape} there. Name the axes in squeeze()."
        )
    return out[0]


def _trace_batch(
    batch_loss: Callable[..., Any], leaves: list[Any], tree: Any, axes: list[Any], size: int
) -> Traced:
    def spec(leaf: Any, axis: int | None) -> jax.ShapeDtypeStruct:
        aval = jax.typeof(leaf)
        shape = list(aval.shape)
        if axis is not None:
            shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, size)
        weak = bool(getattr(aval, "weak_type", False))
        return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak)

    specs = [spec(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]
    params, batch = jax.tree.unflatten(tree, specs)
    try:
        return trace(batch_loss, params, *batch)
    except Exception as error:
        error.add_note(f"(per_sample_loss was tracing the loss on a batch of {size} to check it)")
        raise


@dataclasses.dataclass(frozen=True)
class _Output:
    """What the check decides about: one leaf of the output."""

    name: str
    taint: Taint
    batched: bool  # has the sample axis first


def _prove(
    batch_loss: Callable[..., Any], has_aux: bool, leaves: list[Any], tree: Any, axes: list[Any]
) -> list[bool]:
    """Which outputs have the sample axis; raises where a sample's output is not its own."""
    traced = _trace_batch(batch_loss, leaves, tree, axes, SAMPLES)
    twin = _trace_batch(batch_loss, leaves, tree, axes, 2 * SAMPLES)
    jaxpr, consts = open_jaxpr(traced.jaxpr)
    other, other_consts = open_jaxpr(twin.jaxpr)
    aligned = same_program(jaxpr, other) and len(consts) == len(other_consts)
    if not aligned:
        other, other_consts = jaxpr, consts

    inputs = []
    bits = (1 << np.arange(SAMPLES)).astype(np.uint8)
    walker = Walker()
    for i, (var, axis) in enumerate(zip(jaxpr.invars, axes, strict=True)):
        shape = [1] * len(shape_of(var))
        taint = free(len(shape), recipe=hash(("input", i)))
        if axis is not None:
            shape[axis] = SAMPLES
            taint = dataclasses.replace(taint, mask=bits.reshape(shape))
        inputs.append(taint)
    held = walker.held(jaxpr, other, consts, other_consts)
    results = walker.run(jaxpr, other, held, inputs)

    children = traced.out_tree.children()
    if has_aux and not (len(children) == 2 and jax.tree_util.treedef_is_leaf(children[0])):
        raise ValueError(
            f"per_sample_loss: with has_aux the loss returns (loss, aux); got {traced.out_tree}."
        )
    if not has_aux and not jax.tree_util.treedef_is_leaf(traced.out_tree):
        raise ValueError(
            f"per_sample_loss: the loss returns one array; got {traced.out_tree}. Set "
            "has_aux=True for a loss that returns (loss, aux)."
        )
    batched = []
    for i, (name, taint, a, b) in enumerate(
        zip(traced.out_names, results, traced.jaxpr.out_avals, twin.jaxpr.out_avals, strict=True)
    ):
        small, large = tuple(a.shape), tuple(b.shape)
        has_axis = small != large
        if has_axis and (small[:1], large[:1], small[1:]) != (
            (SAMPLES,),
            (2 * SAMPLES,),
            large[1:],
        ):
            raise ValueError(
                f"per_sample_loss: {_named(name, i)} has the sample axis first, or none; "
                f"got shapes {small} and {large} for batches of 8 and 16. Move the axis."
            )
        if i == 0 and small not in ((), (SAMPLES,)):
            raise ValueError(
                f"per_sample_loss: the loss is a scalar or of shape (batch,); got shape {small} "
                "for a batch of 8. Sum or average over the axes of one sample."
            )
        if i == 0 and small == (SAMPLES,) and not has_axis:
            raise ValueError(
                "per_sample_loss: the loss is a scalar or of shape (batch,); got shape "
                f"{small} for batches of 8 and of 16."
            )
        _judge(_Output(_named(name, i), taint, has_axis))
        batched.append(has_axis)
    if not aligned:
        raise SampleMixingError(
            "per_sample_loss: the loss runs the same equations for every batch size; got others "
            "for 16 samples than for 8, so that a sample's own cannot be told. Use jax.vmap "
            "instead of a Python loop over samples, and no branch on the batch size."
        )
    return batched


def _named(name: str, i: int) -> str:
    return "the loss" if i == 0 else f"aux{name.removeprefix('[1]')}"


def _judge(output: _Output) -> None:
    """Raise unless the output of each sample is its own."""
    taint = output.taint
    if not (output.batched or taint.free):
        _judge_total(output)
        return
    own = (1 << np.arange(SAMPLES)).astype(np.uint8).reshape(-1, *[1] * max(0, taint.mask.ndim - 1))
    if output.batched and (taint.mask & ~own).any():
        _refuse_mixing(output)
    if taint.growth != 1:
        _refuse_size(output, taint.odd)


def _judge_total(output: _Output) -> None:
    taint = output.taint
    total = taint.total
    if total is None or (taint.mask != ALL).any():
        odd, origin = taint.odd, taint.origin
        if odd is not None and (origin is None or odd.order < origin.order):
            _refuse_size(output, odd)
        _refuse_mixing(output)
        return
    growths = {growth for growth, _ in total.families.values()}
    call = f"per_sample_loss: {output.name} is the mean or the sum of the samples' own"
    if not all(bits == ALL for _, bits in total.families.values()):
        raise SampleMixingError(
            f"{call}; got samples that are treated differently{_through(taint.origin)}. Treat "
            "all alike, through jax.vmap."
        )
    if growths == {1.0} and total.rest:
        raise SampleMixingError(
            f"{call}; got a sum over samples{_through(taint.origin)} plus a term that depends on "
            "no sample, which each sample's loss would count again. Average over the samples, "
            "or add the term (a regulariser) outside."
        )
    mean = all(map(is_half, growths)) and total.rest <= {1.0}
    if not mean and growths != {1.0}:
        rest = f", and other terms by {_numbers(total.rest)}" if total.rest else ""
        raise SampleMixingError(
            f"{call}; got a sum over samples{_through(taint.origin)} that is multiplied by "
            f"{_numbers(growths)} when the batch doubles{rest} (0.5 in a mean, 1 in a sum). "
            "Return the vector of per-sample losses, or divide by the batch size or a fixed one."
        )


def _numbers(growths: Any) -> str:
    return " and ".join(f"{g:.4g}" for g in sorted(growths))


def _line(eqns: tuple[JaxprEqn, ...]) -> str:
    """The innermost line that is known, with its text."""
    for eqn in reversed(eqns):
        if line := source_line(eqn):
            return f" at {line}" + (f": {line.code}" if line.code else "")
    return ""


def _through(blame: Blame | None) -> str:
    if blame is None:
        return ""
    name, line = blame.eqns[-1].primitive.name, _line(blame.eqns)
    if not blame.use:
        return f" in `{name}`{line}"
    use, used_at = blame.use[-1].primitive.name, _line(blame.use)
    where = line if used_at != line else ""
    return f" in `{name}`{where}, used by `{use}`{used_at}"


def _refuse_mixing(output: _Output) -> None:
    blame = output.taint.origin
    what = f"{output.name} of a sample"
    start = f"per_sample_loss: {what} depends on that sample alone"
    if blame is None:
        raise SampleMixingError(
            f"{start}; got it from sample {_samples(output.taint.mask)} of 8, another place in "
            "the batch. Keep the samples in their order, and use all."
        )
    if blame.kind == "unknown":
        raise SampleMixingError(
            f"{start}; got `{blame.eqns[-1].primitive.name}`{_line(blame.eqns)}, for which there "
            "is no rule, so that it counts as mixing all samples. Call it through jax.vmap "
            "if it has a batching rule, or write the loss of one sample."
        )
    fix = "Compute it for each sample by itself (over its own axes, or through jax.vmap)"
    if not output.batched and blame.use and blame.use[-1].primitive.name == "div":
        fix = "Return the vector of per-sample losses, or divide by a fixed size"
    raise SampleMixingError(f"{start}; got samples that meet{_through(blame)}. {fix}.")


def _samples(mask: np.ndarray) -> str:
    bits = int(_masks.union_all([mask]))
    return ", ".join(str(s) for s in range(SAMPLES) if bits >> s & 1)


def _refuse_size(output: _Output, blame: Blame | None) -> None:
    start = f"per_sample_loss: {output.name} of a sample is the same in every batch; got"
    if blame is not None and blame.kind == "random":
        raise SampleMixingError(
            f"{start} a random draw that the samples share{_through(blame)}: a batch of one would "
            "draw other numbers from that key. Give each sample its own key: an argument of "
            "keys with a sample axis, used through jax.vmap in the loss."
        )
    growth = output.taint.growth
    how = (
        f"its own multiplied by {growth:.4g} when the batch doubles"
        if growth is not None
        else f"a dependence on the size of the batch or the place in it{_through(blame)}"
    )
    raise SampleMixingError(f"{start} {how}. Scale by numbers that do not depend on the batch.")
