"""The norm of a tree of gradients, the same on every sharding, and its derivative."""

import functools
import math
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from funcgrad._clipping._leaves import Leaves, choose
from funcgrad._clipping._powers import (
    at_scales,
    exact_sums,
    finest,
    largest,
    least,
    modulus,
    modulus_bits,
    norm_dtype,
    power_sum,
    scaled,
    scales,
    trusted,
    whole,
)
from funcgrad._compat import make_varying, manual_axes, varying_axes
from funcgrad._trees import LeafSpec

_SMALL = 4096
"""Entries of a leaf below which it is joined with others, where speed does not matter."""


def global_norm(grads: Any, *, order: Any = 2, frozen: LeafSpec = None, specs: Any = None) -> Any:
    """Compute the norm of all gradients, as if they were one vector.

    No finite entry overflows or underflows on the way, in any floating dtype.  The same call is
    right for arrays on one device, for sharded arrays (eager or under ``jit``, of explicit
    kind or not), and inside ``shard_map``, where it is the norm of the whole: parts are added
    up, copies are counted once, by one reduction for all leaves.  Under ``jit`` the compiler
    joins the leaves' reductions to one for each set of mesh axes.  Under ``vmap`` it gives a
    norm per sample.

    PyTorch: ``torch.nn.utils.get_total_norm``, whose order 0 counts tensors, not entries.

    Args:
      grads: A tree of gradients, any floating or complex dtypes and shapes.  ``None``,
        integers and keys do not count.
      order: 2, any number from ½ to 16, 0 (how many entries are not zero), ``inf`` (the largest
        modulus) or ``-inf`` (the smallest).
      frozen: Leaves that do not count: patterns such as ``"embed/*"``, a predicate of
        (path, leaf), or a tree of booleans.
      specs: Inside ``shard_map(check_vma=False)``, the ``PartitionSpec`` of each gradient, or a
        prefix of that tree.  Elsewhere the types say it: where given inside a checked
        ``shard_map`` they are compared, and outside they are not needed.

    Returns:
      A scalar, float32 or wider; 0 for a tree without entries.  A NaN gives NaN (an order of 0
      counts it), infinities an infinite norm.  The norm is infinite too if it is larger than
      the dtype holds though each entry is finite: ``clip_grad_norm`` is right even then.
      Its derivative is 0 at zero; under ``check_vma=False`` it has none, since there the
      transpose of a reduction is wrong by the number of devices.

    Raises:
      TypeError: ``specs`` has leaves that are no ``PartitionSpec``.
      ValueError: Another order; a pattern that names no leaf; ``specs`` missing, not those of
        the types or not of the mesh; or it is differentiated under ``check_vma=False``.

    Example:
      >>> fg.global_norm({"w": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])})
      Array(13., dtype=float32)
      >>> fg.global_norm([jnp.full(4, 1e20), jnp.full(5, 1e20)])
      Array(3.e+20, dtype=float32)
      >>> jax.vmap(fg.global_norm)(jnp.array([[3.0, 4.0], [5.0, 12.0]]))
      Array([ 5., 13.], dtype=float32)

    References:
      Blue, "A portable Fortran program to find the Euclidean norm of a vector", 1978.
    """
    order = check_order(order, "global_norm")
    return whole(*scaled_norm(choose(grads, frozen, specs, "global_norm"), order))


def check_order(order: Any, call: str) -> float:
    """The order as a float; raises unless the norm of that order is computed here."""
    if isinstance(order, jax.core.Tracer):
        raise ValueError(
            f"{call}: order is a number known while tracing; got {order}. "
            'Make it static (optax.inject_hyperparams has static_args="order").'
        )
    try:
        exponent = float(order)
    except (TypeError, ValueError):
        exponent = math.nan  # a name or an array, refused below
    if not (0.5 <= exponent <= 16 or exponent in (0, math.inf, -math.inf)):
        raise ValueError(
            f"{call}: order is from 0.5 to 16, or 0, inf or -inf; got {order}. Beyond 16 the "
            "norm is nearly that of order inf, and below 0.5 it is as good as never finite."
        )
    return exponent


def scaled_norm(leaves: Leaves, order: float) -> tuple[Any, Any]:
    """The norm as ``ratio * unit`` with ``unit`` a power of two.

    The product may overflow, or be below the smallest normal number, where the factors do not.
    ``ratio`` is NaN or infinite just where the norm of exact arithmetic is.
    """
    if not any(leaf.size for leaf in leaves.counted):
        return jnp.zeros(()), jnp.ones(())
    dtype = norm_dtype(leaves.counted)
    parts = [_real(x, dtype, order) for x in leaves.counted]
    return _pair(order, leaves.axes, parts)


def _real(x: Any, dtype: Any, order: float) -> Any:
    """The leaf as real numbers of the norm's dtype: both parts, or the modulus."""
    if not jnp.iscomplexobj(x):
        return x.astype(dtype)
    parts = jnp.stack([x.real, x.imag]).astype(dtype)
    if order == 2:
        return parts
    if order == 0:  # as integers: backends take subnormal numbers for zero
        return (modulus_bits(parts).max(0) != 0).astype(dtype)
    return modulus(parts)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@functools.partial(jax.jit, static_argnums=(0, 1))
def _pair(order: float, axes: tuple[frozenset[str], ...], leaves: list[Any]) -> tuple[Any, Any]:
    together = frozenset().union(*axes)
    # The extremes are found as integers: backends take subnormal numbers for zero.
    number = lambda bits: lax.bitcast_convert_type(bits, leaves[0].dtype)
    if order == math.inf:
        return scaled(number(_reduce(lax.pmax, largest(leaves), together)))
    if order == -math.inf:
        bits, no_nan = _reduce(lax.pmin, least(leaves), together)
        return scaled(jnp.where(no_nan == 1, number(bits), jnp.nan))

    def add(of_leaf: Any, leaves: list[Any], axes: Any = axes) -> Any:
        once = [_once(of_leaf(x), together - own) for x, own in zip(leaves, axes, strict=True)]
        return jnp.stack(once).sum(0)

    plain = add(lambda x: power_sum(x, order), leaves)
    if order == 0:
        return scaled(_reduce(lax.psum, plain, together))

    safe = trusted(plain, sum(leaf.size for leaf in leaves), order)
    # Under vmap, JAX 0.10 cannot run branches that hold, or get, what varies less than the choice.
    operands = leaves, scales(plain.dtype, order), at_scales(plain, order)
    operands = make_varying(operands, varying_axes(plain))

    def exact(leaves: list[Any], at_each: Any, _: Any) -> Any:
        joined, of = _joined(leaves, axes)
        return exact_sums(joined, order, at_each, functools.partial(add, axes=of))

    sums = lax.cond(safe, lambda *operands: operands[-1], exact, *operands)
    sums = _reduce(lax.psum, sums, together)
    return finest(sums, order)


@_pair.defjvp
def _pair_jvp(order: float, axes: Any, primals: Any, tangents: Any) -> Any:
    (leaves,), (dots,) = primals, tangents
    manual, typed = manual_axes()
    if manual and not typed:
        raise ValueError(
            "global_norm: under shard_map with check_vma=False it has no derivative; got one "
            "asked for, inside or around it. Use check_vma=True."
        )
    ratio, unit = _pair(order, axes, leaves)
    together = frozenset().union(*axes)
    usable = ratio != 0
    safe = jnp.where(usable, ratio, 1)

    def slope(x: Any) -> Any:
        """The derivative of the norm with respect to an entry."""
        y = x / unit / safe
        size = jnp.abs(y)
        if math.isinf(order):
            return jnp.where(size == 1, jnp.sign(y), 0) / ties
        if order == 2:
            return y
        if order == 1:  # of the entry itself, since y may be too small for its dtype
            return jnp.sign(x)
        moves = (size > 0) & (order > 0)
        return jnp.where(moves, jnp.sign(y) * jnp.where(moves, size, 1) ** (order - 1), 0)

    if math.isinf(order):
        equal = [jnp.sum(jnp.abs(x / unit / safe) == 1).astype(x.dtype) for x in leaves]
        counts = [_once(n, together - own) for n, own in zip(equal, axes, strict=True)]
        ties = jnp.maximum(_reduce(lax.psum, jnp.stack(counts).sum(0), together), 1)
    local = [
        _once(jnp.sum(slope(x) * dot / unit), together - own)
        for x, dot, own in zip(leaves, dots, axes, strict=True)
    ]
    moved = _reduce(lax.psum, jnp.stack(local).sum(0), together)
    return (ratio, unit), (jnp.where(usable, moved, 0), jnp.zeros_like(unit))


def _joined(leaves: list[Any], axes: Any) -> tuple[list[Any], list[frozenset[str]]]:
    """The small leaves of the same axes in one, which takes less to compile; the axes of each."""
    found, small = [], {}
    for x, own in zip(leaves, axes, strict=True):
        # Where shardings are part of the types, parts do not join.
        in_parts = any(part is not None for part in jax.typeof(x).sharding.spec)
        if in_parts or x.size > _SMALL:
            found.append((x, own))
        else:
            small.setdefault(own, []).append(x.reshape(-1))
    found += [(jnp.concatenate(of), own) for own, of in small.items()]
    return [x for x, _ in found], [own for _, own in found]


def _once(x: Any, copied: frozenset[str]) -> Any:
    """``x`` on one of the devices that hold copies of it, 0 on the others."""
    if not copied:
        return x
    first = functools.reduce(
        jnp.logical_and, [lax.axis_index(axis) == 0 for axis in sorted(copied)]
    )
    return jnp.where(first, x, 0)


def _reduce(reduce: Any, x: Any, axes: frozenset[str]) -> Any:
    if not axes:
        return x
    _, typed = manual_axes()
    return reduce(make_varying(x, axes) if typed else x, tuple(sorted(axes)))
