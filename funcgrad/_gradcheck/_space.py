"""Leaves as one real vector, and the directions in which a derivative is looked at.

A complex leaf counts twice, its real parts before its imaginary ones, so that all derivatives
are those of a function from real vectors to real vectors.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from funcgrad._trees import is_key


def moves(leaf: Any) -> bool:
    """Whether a leaf is a floating or complex number or array: all others are held constant."""
    if isinstance(leaf, float | complex):
        return True
    is_array = isinstance(leaf, np.ndarray | np.generic | jax.Array) and not is_key(leaf)
    return is_array and jnp.issubdtype(leaf.dtype, jnp.inexact)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A floating leaf: its path, and what it is made of."""

    name: str
    shape: tuple[int, ...]
    is_complex: bool

    @property
    def size(self) -> int:
        """The number of entries."""
        return int(np.prod(self.shape, dtype=np.int64))

    def at(self, index: int) -> str:
        """The path of one entry, ``inputs[0]['w'][1, 2]``."""
        place = np.unravel_index(index, self.shape)
        return f"{self.name}[{', '.join(map(str, place))}]" if self.shape else self.name


@dataclasses.dataclass(frozen=True)
class Probes:
    """Directions in a space, a row each; those of each leaf together, by ``slices``.

    A complex leaf has as many in its imaginary parts, after those in its real ones.
    """

    matrix: Any
    slices: tuple[slice, ...]
    weights: np.ndarray
    """The sum of each row's entries: by this an absolute tolerance per entry grows."""
    along_entries: bool

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Some of the directions, as a dense matrix."""
        return self.matrix[start:stop].toarray()

    def __len__(self) -> int:
        return self.matrix.shape[0]


@dataclasses.dataclass(frozen=True)
class Space:
    """The real vectors that stand for the values of some leaves."""

    leaves: tuple[Leaf, ...]

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Where each leaf begins in a vector, and the end of the last."""
        widths = [leaf.size * (1 + leaf.is_complex) for leaf in self.leaves]
        return np.cumsum([0, *widths])

    @property
    def size(self) -> int:
        """The length of a vector."""
        return int(self.starts[-1])

    def pack(self, values: Sequence[Any], dtype: Any) -> Any:
        """The vector of these values."""
        parts = [jnp.zeros(0, dtype)]
        for leaf, value in zip(self.leaves, values, strict=True):
            value = jnp.ravel(jnp.asarray(value))
            parts += [value.real, value.imag] if leaf.is_complex else [value]
        return jnp.concatenate([part.astype(dtype) for part in parts])

    def unpack(self, vector: Any) -> list[Any]:
        """The values of a vector."""
        values = []
        for leaf, start, stop in zip(self.leaves, self.starts[:-1], self.starts[1:], strict=True):
            part = vector[start:stop]
            if leaf.is_complex:
                part = jax.lax.complex(part[: leaf.size], part[leaf.size :])
            values.append(part.reshape(leaf.shape))
        return values

    def entries(self) -> Probes:
        """One direction along each entry."""
        slices = tuple(slice(*ends) for ends in zip(self.starts, self.starts[1:], strict=False))
        matrix = scipy.sparse.csr_array(scipy.sparse.eye_array(self.size))
        return Probes(matrix, slices, np.ones(self.size), True)

    def random(self, rng: np.random.Generator) -> Probes:
        """One unit vector for each leaf (two where complex), without negative entries.

        Those would let errors of one sign cancel, and the tolerance not be scaled.
        """
        rows, slices = [], []
        for leaf in self.leaves:
            number = (1 + leaf.is_complex) if leaf.size else 0
            slices.append(slice(len(rows), len(rows) + number))
            parts = [rng.random(leaf.size) for _ in range(number)]
            rows += [part / np.linalg.norm(part) for part in parts]
        # Each row stands where the one before it ends.
        numbers = np.concatenate([np.zeros(0), *rows])
        ends = np.cumsum([0, *map(len, rows)])
        shape = (len(rows), self.size)
        matrix = scipy.sparse.csr_array((numbers, np.arange(self.size), ends), shape=shape)
        return Probes(matrix, tuple(slices), np.asarray(matrix.sum(1)).ravel(), False)
