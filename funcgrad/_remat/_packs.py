"""Ready pairs of functions for ``saved_tensor_hooks``: smaller, or elsewhere."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Pack(NamedTuple):
    """How a value is stored until the backward pass, and how it is read again."""

    pack: Any
    unpack: Any


def _to_bfloat16(x: Any) -> Any:
    smaller = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 2
    return x.astype(jnp.bfloat16) if smaller else x


def _to_int8(x: Any) -> Any:
    size = x.shape[-1] if x.ndim else 1
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    scale_bytes = jnp.dtype(wide).itemsize
    if not jnp.issubdtype(x.dtype, jnp.floating) or size + scale_bytes >= size * x.dtype.itemsize:
        return x
    x = x.astype(wide)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0) / 127
    # The maximum of many numbers loses a NaN on XLA's CPU.
    scale = jnp.where(jnp.isfinite(x).all(-1, keepdims=True), scale, jnp.nan)
    whole = jnp.round(x / jnp.where(scale > 0, scale, 1))
    return jnp.clip(whole, -127, 127).astype(jnp.int8), scale


def _from_int8(packed: Any) -> Any:
    if not isinstance(packed, tuple):
        return packed
    whole, scale = packed
    return whole.astype(scale.dtype) * scale


bfloat16 = Pack(_to_bfloat16, lambda packed: packed)
"""Half the bytes of float32.

Relative error at most ``2**-8``, for magnitudes from ``2**-126`` to ``3.38e38``; beyond that
infinity.  Complex values and types of two bytes are kept as they are.
"""

int8 = Pack(_to_int8, _from_int8)
"""A quarter of the bytes of float32, and one scale for each row, the last axis.

Error at most 1/254 of the largest magnitude in the row, where that is above 127 times the
smallest normal number (1.5e-36 in float32); below, the row may come back as zeros.  A row with
a value that is not finite comes back as NaN throughout.  Kept as they are: complex
values, and rows so short that the scale would outweigh the gain.
"""

host = Pack(
    lambda x: jax.device_put(x, jax.memory.Space.Host),
    lambda x: jax.device_put(x, jax.memory.Space.Device),
)
"""In the memory of the host; exact.  PyTorch: ``torch.autograd.graph.save_on_cpu``."""
