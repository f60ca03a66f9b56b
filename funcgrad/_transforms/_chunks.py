"""Rows computed a few at a time, and written where they belong."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Cut(NamedTuple):
    """``chunks`` of ``size`` rows, then one of ``rest``."""

    size: int
    chunks: int
    rest: int


def cut(n: int, chunk_size: int | None) -> Cut:
    """Cut ``n`` rows into chunks of at most ``chunk_size``, equal ones where that is possible.

    A remainder is computed by a second, smaller copy of the program.  It is never filled up:
    a row of padding may be NaN, and so may the derivative of a row whose result is thrown away
    (zero times infinity).  Most often no remainder is needed, for some size not much below the
    one asked for divides ``n``: 1000 rows in chunks of 64 are 20 chunks of 50.
    """
    if chunk_size is None or chunk_size >= n:
        return Cut(n, 1, 0)
    for size in range(chunk_size, chunk_size // 2, -1):
        if n % size == 0:
            return Cut(size, n // size, 0)
    return Cut(chunk_size, *divmod(n, chunk_size))


def check_chunk_size(call: str, chunk_size: Any) -> None:
    """Refuse all but ``None`` and positive integers."""
    is_integer = isinstance(chunk_size, int | np.integer) and not isinstance(chunk_size, bool)
    if chunk_size is None or (is_integer and chunk_size > 0):
        return
    raise ValueError(
        f"{call}: chunk_size is a positive number of rows; got {chunk_size!r}. "
        "Pass None to compute all of them at once."
    )


def fill(
    rows: Callable[[Any, int], list[Any]], n: int, chunk_size: int | None, *, axis: int
) -> list[Any]:
    """Arrays with ``n`` rows along ``axis``; ``rows(start, size)`` makes some of each.

    They are written into one buffer each as they come, so that beside the result only the
    temporaries of one chunk are held, whatever the remainder.
    """
    size, count, rest = cut(n, chunk_size)
    if count == 1 and not rest:
        return rows(0, n)

    def blank(like: Any) -> Any:
        shape = list(like.shape)
        shape[axis] = n
        return jnp.zeros_like(like.update(shape=tuple(shape)))  # sharded and varying as `like`

    def write(buffers: list[Any], start: Any, size: int) -> list[Any]:
        put = lambda buffer, new: lax.dynamic_update_slice_in_dim(buffer, new, start, axis)
        return [put(b, new) for b, new in zip(buffers, rows(start, size), strict=True)]

    buffers = [blank(like) for like in jax.eval_shape(lambda: rows(0, size))]
    step = lambda buffers, start: (write(buffers, start, size), None)
    buffers, _ = lax.scan(step, buffers, size * jnp.arange(count))
    return write(buffers, size * count, rest) if rest else buffers
