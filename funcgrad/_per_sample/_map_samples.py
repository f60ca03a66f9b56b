"""A function of samples, run on as many at a time as fit a core's cache."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad._compat import gathered

# What the per-sample work of a chunk may hold: about what a core's cache does.
_CHUNK_BYTES = 2 * 2**20


class Packed(NamedTuple):
    """An array without its axes of size 1, where its sample axis is then, and those axes."""

    array: Any
    axis: int
    units: tuple[int, ...]


def pack(x: Any, axis: int) -> Packed:
    """Squeeze an array that enters a loop, which would copy it for the order of such axes."""
    units = tuple(d for d, n in enumerate(x.shape) if n == 1 and d != axis)
    return Packed(lax.squeeze(x, units), axis - sum(d < axis for d in units), units)


# Under jit, to be traced once for each shape; and in line again.
@functools.partial(jax.jit, inline=True, static_argnums=(2, 3, 4))
def _cut(x: Any, start: Any, size: int, axis: int, units: tuple[int, ...]) -> Any:
    return lax.expand_dims(lax.dynamic_slice_in_dim(x, start, size, axis), units)


def map_samples(
    fun: Callable[[Any], Any], samples: Any, axes: Any, n_samples: int, bytes_each: int
) -> Any:
    """``fun`` of some samples at a time, as many as fit a chunk's memory.

    Samples lie along ``axes``, a tree like ``samples``, and in front in what ``fun`` returns.
    Chunks are cut out where they lie: to scan over them would copy all samples first.
    """
    n_chunks = -(-n_samples // max(1, _CHUNK_BYTES // max(1, bytes_each)))
    size = -(-n_samples // n_chunks)
    n_chunks = -(-n_samples // size)
    if n_chunks == 1:
        return fun(samples)
    last = n_samples - size
    leaves, tree = jax.tree.flatten(gathered(samples, axes))
    packed = [pack(x, axis) for x, axis in zip(leaves, tree.flatten_up_to(axes), strict=True)]

    def chunk(start: Any) -> Any:
        cut = [_cut(p.array, start, size, p.axis, p.units) for p in packed]
        return fun(jax.tree.unflatten(tree, cut))

    # The last chunk begins early where samples do not divide, and only its end is new.
    out = lax.map(chunk, np.minimum(size * np.arange(n_chunks, dtype=np.int32), last))
    rest = n_samples - size * (n_chunks - 1)

    def join(y: Any) -> Any:
        if rest == size:
            return y.reshape(-1, *y.shape[2:])
        head = y[:-1].reshape(-1, *y.shape[2:])
        return jnp.concatenate([head, y[-1, size - rest :]])

    return jax.tree.map(join, out)
