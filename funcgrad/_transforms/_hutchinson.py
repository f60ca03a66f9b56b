"""Diagonal and trace of a Hessian estimated from random signs: ``hutchinson``."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad import _jaxpr
from funcgrad._compat import make_varying, varying_axes
from funcgrad._transforms._chunks import check_chunk_size, cut
from funcgrad._transforms._point import Point, scalar, wide


class HessianEstimate(NamedTuple):
    """What ``fg.hutchinson`` found, each with its standard error; float32 or wider."""

    trace: Any
    """One number, over all arguments differentiated."""
    trace_error: Any
    """Its standard error."""
    diagonal: Any
    """A tree like the argument."""
    diagonal_error: Any
    """The standard error of each entry."""


def hutchinson(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    n_samples: int,
    chunk_size: int = 1,
) -> Callable[..., HessianEstimate]:
    """Estimate trace and diagonal of the Hessian from products with random signs.

    With entries ±1 in ``v``, ``v * (H v)`` is the diagonal on average, and its sum the trace.
    The standard errors come from the samples' own spread, in one pass; they are zero where
    the Hessian is diagonal, for which one sample is exact.
    PyTorch: none; its ``autograd.functional.hvp`` in a loop.

    Args:
      fun: Function that returns one number.
      argnums: Which argument to differentiate, or which several.
      n_samples: Products with the Hessian; 2 or more.
      chunk_size: The largest number of them computed at once.

    Returns:
      A function of a random key and then the arguments of ``fun``, to a ``HessianEstimate``.
      Sample ``i`` is drawn from ``jax.random.fold_in(key, i)``, whatever the chunks; inside
      ``shard_map``, arguments that differ between devices get signs of their own on each.

    Raises:
      TypeError: A leaf to differentiate is not real and floating, names it; or ``fun`` does not
        return one number.
      ValueError: ``n_samples``, ``chunk_size`` or ``argnums`` is not possible.

    Example:
      >>> estimate = fg.hutchinson(lambda a: (a**3).sum(), n_samples=2)
      >>> found = estimate(jax.random.key(0), jnp.array([1.0, 2.0]))
      >>> found.diagonal, found.trace, found.trace_error
      (Array([ 6., 12.], dtype=float32), Array(18., dtype=float32), Array(0., dtype=float32))

    References:
      Hutchinson, "A stochastic estimator of the trace of the influence matrix", 1989.
      Bekas, Kokiopoulou, Saad, "An estimator for the diagonal of a matrix", 2007.
    """
    check_chunk_size("hutchinson", chunk_size)
    if not isinstance(n_samples, int | np.integer) or n_samples < 2:
        raise ValueError(
            f"hutchinson: n_samples is 2 or more, since the error comes from their spread; got "
            f"{n_samples!r}."
        )

    def estimate(key: Any, *args: Any, **kwargs: Any) -> HessianEstimate:
        point = Point.of("hutchinson", args, argnums)
        for name, leaf in zip(point.names, point.leaves, strict=True):
            if jnp.iscomplexobj(leaf):
                raise TypeError(
                    f"hutchinson: arguments are real; got {jnp.result_type(leaf)} in {name}. "
                    "Take real and imaginary parts as arguments."
                )
        grad = _jaxpr.fold_transposes(jax.grad(scalar("hutchinson", point.bind(fun, kwargs))))

        def sample(i: Any) -> list[Any]:
            signs = _signs(jax.random.fold_in(key, i), point.leaves)
            image = jax.jvp(grad, (point.leaves,), (signs,))[1]
            diagonal = [_wide(v) * _wide(hv) for v, hv in zip(signs, image, strict=True)]
            trace = sum(d.sum() for d in diagonal) if diagonal else jnp.zeros(())
            return [jnp.asarray(trace), *diagonal]

        (mean, error) = _mean_and_error(sample, n_samples, chunk_size)
        return HessianEstimate(
            trace=mean[0],
            trace_error=error[0],
            diagonal=point.like(mean[1:]),
            diagonal_error=point.like(error[1:]),
        )

    return estimate


def _signs(key: Any, leaves: list[Any]) -> list[Any]:
    keys = jax.random.split(key, len(leaves)) if leaves else []
    signs = []
    for k, x in zip(keys, leaves, strict=True):
        axes = varying_axes(x)
        for axis in sorted(axes):  # equal signs on two devices would leave their cross terms
            k = jax.random.fold_in(k, lax.axis_index(axis))
        drawn = jax.random.rademacher(k, jnp.shape(x), jnp.result_type(x))
        signs.append(make_varying(drawn, axes))
    return signs


def _wide(x: Any) -> Any:
    return x.astype(wide(x.dtype))


def _mean_and_error(
    sample: Callable[[Any], list[Any]], n: int, chunk_size: int
) -> tuple[list[Any], list[Any]]:
    """Mean and its standard error over ``sample(0..n-1)``, holding no sample after its chunk."""
    size, count, rest = cut(n, chunk_size)

    def merge(state: Any, start: Any, size: int) -> Any:
        # Sums of squares of differences, not of the samples themselves, which would cancel.
        out_mean, out_spread = [], []
        for m, s, x in zip(*state, jax.vmap(sample)(start + jnp.arange(size)), strict=True):
            before = jnp.asarray(start, m.dtype)
            centre = x.mean(0)
            apart = centre - m
            out_mean.append(m + apart * (size / (before + size)))
            within = jnp.square(x - centre[None]).sum(0)
            out_spread.append(s + within + jnp.square(apart) * (before * size / (before + size)))
        return out_mean, out_spread

    zeros = [jnp.zeros_like(like) for like in jax.eval_shape(sample, 0)]
    state = (zeros, zeros)
    step = lambda state, start: (merge(state, start, size), None)
    state, _ = lax.scan(step, state, size * jnp.arange(count))
    if rest:
        state = merge(state, size * count, rest)
    mean, spread = state
    return mean, [jnp.sqrt(s / (n * (n - 1))) for s in spread]
