"""Clipping as steps of an Optax chain."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from funcgrad._clipping._clip import Nonfinite, clip_grad_norm, clip_grad_value
from funcgrad._clipping._powers import norm_dtype
from funcgrad._trees import LeafSpec, is_float


class ClipState(NamedTuple):
    """The state of ``clip_by_total_norm``."""

    norm: Any
    """The norm of the last gradients before clipping, 0 at the start."""


def clip_by_total_norm(
    max_norm: Any,
    *,
    order: Any = None,
    eps: Any = 0.0,
    nonfinite: Nonfinite = "keep",
    frozen: LeafSpec = None,
    specs: Any = None,
) -> optax.GradientTransformation:
    """Make ``clip_grad_norm`` a step of an Optax chain.

    Where ``optax.clip_by_global_norm`` stands; the state holds the norm, for the log.

    ============================  =======================================================
    ``optax.clip_by_global_norm``   this
    ============================  =======================================================
    large gradients become zeros    stay right: no square overflows
    inside ``shard_map`` the norm   of the whole
    of a shard
    frozen leaves count             do not, with ``frozen``
    NaN if norm and bound are 0     zeros
    ============================  =======================================================

    Args:
      max_norm: The bound; with ``optax.inject_hyperparams`` also a schedule.
      order: Of the norm, 2 if ``None``.
      eps: As in ``clip_grad_norm``, and so are ``nonfinite``, ``frozen`` and ``specs``.
      nonfinite: ``"zero"`` gives zero updates; what follows in the chain still steps. To keep
        its state too, wrap the chain in ``optax.apply_if_finite``.
      frozen: Leaves that are outside of the norm and come out as zeros.
      specs: Under ``shard_map(check_vma=False)`` only.

    Returns:
      An ``optax.GradientTransformation`` with a ``ClipState``.

    Raises:
      ValueError: As ``clip_grad_norm``, when the updates come.

    Example:
      >>> opt = optax.chain(fg.clip_by_total_norm(2.5), optax.sgd(0.5))
      >>> params = jnp.zeros(2)
      >>> updates, state = opt.update(jnp.array([3.0, 4.0]), opt.init(params), params)
      >>> updates, state[0].norm
      (Array([-0.75, -1.  ], dtype=float32), Array(5., dtype=float32))
    """
    # None, since inject_hyperparams would make an array of a number.
    options = {"order": 2 if order is None else order, "eps": eps, "nonfinite": nonfinite}

    def init(params: Any) -> ClipState:
        floats = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params) if is_float(leaf)]
        return ClipState(jnp.zeros((), norm_dtype(floats)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ClipState]:
        del params
        out = clip_grad_norm(updates, max_norm, frozen=frozen, specs=specs, **options)
        return out.grads, ClipState(out.norm.astype(state.norm.dtype))

    return optax.GradientTransformation(init, update)


def clip_by_value(max_value: Any, *, frozen: LeafSpec = None) -> optax.GradientTransformation:
    """Make ``clip_grad_value`` a step of an Optax chain.

    ``optax.clip`` with ``frozen``, and integers left alone.

    Args:
      max_value: The bound; with ``optax.inject_hyperparams`` also a schedule.
      frozen: Leaves that come out as zeros.

    Returns:
      An ``optax.GradientTransformation`` without state.

    Example:
      >>> opt = fg.clip_by_value(1.0)
      >>> opt.update(jnp.array([3.0, -0.5]), opt.init(jnp.zeros(2)))[0]
      Array([ 1. , -0.5], dtype=float32)
    """
    return optax.stateless(lambda updates, _: clip_grad_value(updates, max_value, frozen=frozen))
