"""The unit vectors of a list of arrays, some at a time."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._compat import make_varying, placed_rows, replicated, varying_axes


@dataclasses.dataclass(frozen=True)
class Basis:
    """Unit vectors, numbered through all entries of ``leaves`` in their order."""

    leaves: Sequence[Any]

    @property
    def sizes(self) -> list[int]:
        """The number of entries of each leaf."""
        return [math.prod(jnp.shape(leaf)) for leaf in self.leaves]

    @property
    def offsets(self) -> list[int]:
        """The number of each leaf's first entry."""
        return [int(offset) for offset in np.cumsum([0, *self.sizes])[:-1]]

    def __len__(self) -> int:
        return sum(self.sizes)

    def vectors(self, start: Any, size: int) -> list[Any]:
        """``size`` unit vectors from number ``start`` on: each leaf with a leading axis more."""
        out = []
        for leaf, offset, n in zip(self.leaves, self.offsets, self.sizes, strict=True):
            place = start + jnp.arange(size) - offset
            hot = (place[:, None] == jnp.arange(n)[None]).astype(jnp.result_type(leaf))
            hot = placed_rows(hot.reshape(size, *jnp.shape(leaf)), leaf)
            out.append(make_varying(hot, varying_axes(leaf)))
        return out

    def vector(self, start: Any) -> list[Any]:
        """One unit vector."""
        return [leaf[0] for leaf in self.vectors(start, 1)]

    def entries(self, images: Sequence[Any], start: Any) -> Any:
        """Entry ``start + i`` of row ``i`` of ``images``, trees of rows like the leaves.

        They are looked up: a product with a unit vector would spread a NaN of another entry.
        """
        found = []
        for rows, offset, n in zip(images, self.offsets, self.sizes, strict=True):
            if not n:
                continue
            size = rows.shape[0]
            place = start + jnp.arange(size) - offset
            inside = (place >= 0) & (place < n)
            flat = replicated(rows).reshape(size, n)
            entry = jnp.take_along_axis(flat, jnp.clip(place, 0, n - 1)[:, None], 1)[:, 0]
            found.append(jnp.where(inside, entry, jnp.zeros_like(entry)))
        return sum(found[1:], found[0])

    def split(self, array: Any, axis: int) -> list[Any]:
        """Cut ``axis``, which runs over all entries, into each leaf's own axes."""
        axis %= array.ndim
        before, after, out = array.shape[:axis], array.shape[axis + 1 :], []
        for leaf, offset, n in zip(self.leaves, self.offsets, self.sizes, strict=True):
            part = jax.lax.slice_in_dim(array, offset, offset + n, axis=axis)
            out.append(part.reshape(*before, *jnp.shape(leaf), *after))
        return out
