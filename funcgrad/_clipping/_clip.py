"""Clip gradients by their norm or by value."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad._clipping._leaves import Leaves, choose
from funcgrad._clipping._norm import check_order, scaled_norm
from funcgrad._clipping._powers import whole
from funcgrad._trees import LeafSpec, keystr

Nonfinite = Literal["keep", "zero", "raise"]


class ClippedByNorm(NamedTuple):
    """What ``clip_grad_norm`` returns."""

    grads: Any
    """The gradients, scaled where their norm was above the bound."""
    norm: Any
    """Their norm before that: a scalar, float32 or wider."""


def clip_grad_norm(
    grads: Any,
    max_norm: Any,
    *,
    order: Any = 2,
    eps: Any = 0.0,
    nonfinite: Nonfinite = "keep",
    frozen: LeafSpec = None,
    specs: Any = None,
) -> ClippedByNorm:
    """Scale all gradients by one factor so that their norm is at most ``max_norm``.

    The factor is ``min(1, max_norm / (norm + eps))``; gradients within the bound stay bit for
    bit.  Norm and factor do not overflow or underflow, even where the norm itself is larger
    than its dtype holds.  For sharded gradients and ``shard_map`` see ``global_norm``.

    PyTorch: ``torch.nn.utils.clip_grad_norm_`` is this with ``eps=1e-6``.

    ==================  ==========================================================
    ``nonfinite``       what a norm that is NaN or infinite does
    ==================  ==========================================================
    ``"keep"``          it goes into the factor, as in torch: a NaN makes every
                        gradient NaN, an infinity makes zeros, and NaN of itself
    ``"zero"``          every gradient becomes zero; ``norm`` tells
    ``"raise"``         an error that names the leaves; outside of ``jit`` only
    ==================  ==========================================================

    Args:
      grads: A tree of gradients, any floating or complex dtypes, which are kept.  ``None``,
        integers and keys pass.
      max_norm: The bound, a scalar of at least 0; a traced one that is not makes NaN.
      order: Of the norm; see ``global_norm``.
      eps: Added to the norm in the factor, a scalar of at least 0.
      nonfinite: What is done where the norm is NaN or infinite.
      frozen: Leaves without a gradient: outside of the norm, and zeros in the result.
        Patterns, a predicate of (path, leaf), or a tree of booleans.
      specs: ``PartitionSpec`` of each gradient, under ``shard_map(check_vma=False)`` only.

    Returns:
      ``ClippedByNorm(grads, norm)``.

    Raises:
      TypeError: ``max_norm`` or ``eps`` is no real number.
      ValueError: ``max_norm`` or ``eps`` is negative, NaN or no scalar; ``nonfinite="raise"``
        under ``jit``, where the norm is not known; or as ``global_norm``.
      FloatingPointError: The norm is not finite, with ``nonfinite="raise"``.

    Example:
      >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])}
      >>> clipped, norm = fg.clip_grad_norm(grads, 1.0, eps=1e-6)
      >>> norm, clipped["b"] * 13.000001
      (Array(13., dtype=float32), Array([12.], dtype=float32))
      >>> fg.clip_grad_norm(jnp.full(4, 1e20), 1.0).grads
      Array([0.5, 0.5, 0.5, 0.5], dtype=float32)

    References:
      Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
    """
    call = "clip_grad_norm"
    order = check_order(order, call)
    if nonfinite not in ("keep", "zero", "raise"):
        raise ValueError(
            f"{call}: nonfinite is 'keep', 'zero' or 'raise'; got {nonfinite!r}. "
            "Say what a norm that is NaN or infinite does."
        )
    leaves = choose(grads, frozen, specs, call)
    ratio, unit = scaled_norm(leaves, order)
    norm = whole(ratio, unit)
    bound = _bound(max_norm, "max_norm", ratio.dtype, call)
    if nonfinite == "raise":
        _check_finite(ratio, grads, leaves, call)

    offset = _bound(eps, "eps", ratio.dtype, call)
    clipped = _scaled(leaves.counted, ratio, unit, bound, offset, nonfinite == "zero")
    return ClippedByNorm(leaves.rebuild(clipped), norm)


@functools.partial(jax.jit, static_argnames="zero")
def _scaled(leaves: list[Any], ratio: Any, unit: Any, bound: Any, eps: Any, zero: bool) -> Any:
    # All in units of unit, a power of two: exact, and nothing leaves the range.
    total = ratio + eps / unit
    over = ~(total <= bound / unit)
    factor = (1 / jnp.where(over, total, 1)) * bound  # rounded as torch does

    def scale(g: Any) -> Any:
        if jnp.iscomplexobj(g):
            return lax.complex(scale(g.real), scale(g.imag))
        wide = g.astype(np.promote_types(g.dtype, ratio.dtype))
        clipped = jnp.where(over, (wide / unit * factor).astype(g.dtype), g)
        return jnp.where(jnp.isfinite(ratio), clipped, jnp.zeros_like(g)) if zero else clipped

    return [scale(g) for g in leaves]


def _bound(value: Any, name: str, dtype: Any, call: str) -> Any:
    """The scalar ``value`` in ``dtype``: refused if it is negative or NaN, NaN if it is traced."""
    if isinstance(value, jax.core.Tracer):
        kind, shape = value.dtype, value.shape
    else:
        kind, shape = np.asarray(value).dtype, np.shape(value)
    if not (jnp.issubdtype(kind, np.number) or kind == np.bool_) or kind.kind == "c":
        raise TypeError(f"{call}: {name} is a number; got {value!r}. Pass one.")
    if shape != ():
        raise ValueError(f"{call}: {name} is one number; got shape {shape}. Pass one.")
    if isinstance(value, jax.core.Tracer):
        value = value.astype(dtype)
        return jnp.where(value >= 0, value, jnp.nan)  # a negative one would turn gradients around
    if not value >= 0:
        raise ValueError(f"{call}: {name} is at least 0; got {value}. Pass a bound.")
    with np.errstate(over="ignore"):
        return jnp.asarray(np.asarray(value).astype(dtype))


def _check_finite(ratio: Any, grads: Any, leaves: Leaves, call: str) -> None:
    if isinstance(ratio, jax.core.Tracer):
        raise ValueError(
            f'{call}: nonfinite="raise" needs a norm that is known; got one that is traced '
            '(jit, vmap, grad). Pass "zero" or "keep", return the norm, and look at it outside.'
        )
    if jnp.isfinite(ratio):
        return
    named = jax.tree_util.tree_leaves_with_path(grads)
    bad = [
        f"grads{keystr(path)}"
        for (path, leaf), counted in zip(named, leaves.is_counted, strict=True)
        if counted and not jnp.isfinite(leaf).all()
    ]
    raise FloatingPointError(
        f"{call}: the norm of the gradients is finite; got {ratio} from {', '.join(bad)}. "
        'Find the operation that made it, or pass nonfinite="zero" to skip such steps.'
    )


def clip_grad_value(grads: Any, max_value: Any, *, frozen: LeafSpec = None) -> Any:
    """Limit each entry of each gradient to the range from ``-max_value`` to ``max_value``.

    A NaN stays a NaN.  PyTorch: ``torch.nn.utils.clip_grad_value_``.

    Args:
      grads: A tree of real floating gradients, whose dtypes are kept.  ``None``, integers and
        keys pass.
      max_value: The bound, a scalar of at least 0; a traced one that is not makes NaN.
      frozen: Leaves without a gradient, zeros in the result: patterns, a predicate of
        (path, leaf), or a tree of booleans.

    Returns:
      A tree like ``grads``.

    Raises:
      TypeError: A gradient is complex, which has no order; names the leaf.  Or the bound is
        no real number.
      ValueError: ``max_value`` is negative, NaN or no scalar; a pattern names no leaf.

    Example:
      >>> fg.clip_grad_value(jnp.array([3.0, -4.0, 0.5, jnp.nan]), 1.0)
      Array([ 1. , -1. ,  0.5,  nan], dtype=float32)
    """
    leaves = choose(grads, frozen, None, "clip_grad_value")
    for (path, leaf), counted in zip(
        jax.tree_util.tree_leaves_with_path(grads), leaves.is_counted, strict=True
    ):
        if counted and jnp.iscomplexobj(leaf):
            raise TypeError(
                f"clip_grad_value: gradients are real; got {leaf.dtype} in grads{keystr(path)}. "
                "Clip the real and the imaginary part, or use clip_grad_norm."
            )

    def clip(g: Any) -> Any:
        # In float32 at least: a bound beyond the range of a float8 dtype is NaN there.
        wide = g.astype(np.promote_types(g.dtype, np.float32))
        bound = _bound(max_value, "max_value", wide.dtype, "clip_grad_value")
        return jnp.clip(wide, -bound, bound).astype(g.dtype)

    return leaves.rebuild([clip(g) for g in leaves.counted])
