"""Numerical against analytical derivatives, pair of leaves by pair of leaves."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from funcgrad._gradcheck._space import Leaf, Probes, Space

SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Found:
    """One derivative: which rows of the matrices it is made of, and its two values."""

    mode: str
    output: str
    input: str
    directions: tuple[int, ...]
    functionals: tuple[int, ...]
    numerical: float | complex
    analytical: float | complex
    error: float
    allowed: float
    hint: str

    @property
    def excess(self) -> float:
        """The error in units of what is allowed."""
        return float(_excess(self.error, self.allowed))


@dataclasses.dataclass(frozen=True)
class Compared:
    """The worst derivatives of all pairs, and how many there are and are off."""

    worst: tuple[Found, ...] = ()
    count: int = 0
    off: int = 0

    def __add__(self, other: "Compared") -> "Compared":
        worst = sorted((*self.worst, *other.worst), key=lambda f: -f.excess)[:SHOWN]
        return Compared(tuple(worst), self.count + other.count, self.off + other.off)


@dataclasses.dataclass(frozen=True)
class _Side:
    """The probes of one leaf, taken one by one or as complex numbers."""

    leaf: Leaf
    rows: np.ndarray
    """Of one or two columns: where the real and the imaginary part of each number stands."""
    weights: np.ndarray
    along_entries: bool
    part: str = ""

    def name(self, index: int) -> str:
        return (self.leaf.at(index) if self.along_entries else self.leaf.name) + self.part


def compare(
    mode: str,
    numerical: np.ndarray,
    analytical: np.ndarray,
    spaces: tuple[Space, Space],
    probes: tuple[Probes, Probes],
    tolerances: tuple[float, float],
) -> Compared:
    """Compare two matrices of (directions, functionals), as torch does.

    In reverse mode the derivative by a complex input is one complex number, and of a complex
    output the real and the imaginary part are looked at by themselves.  In forward mode it is
    the other way round.
    """
    total = Compared()
    for column in _sides(spaces[0], probes[0], joined=mode == "reverse"):
        for row in _sides(spaces[1], probes[1], joined=mode == "forward"):
            values = lambda matrix, c=column, r=row: _numbers(matrix, c, r, mode)
            total += _compare_pair(
                mode, values(numerical), values(analytical), column, row, tolerances
            )
    return total


def _sides(space: Space, probes: Probes, *, joined: bool) -> Iterator[_Side]:
    for leaf, part in zip(space.leaves, probes.slices, strict=True):
        rows, weights = np.arange(part.start, part.stop), probes.weights[part]
        if not leaf.is_complex:
            yield _Side(leaf, rows[:, None], weights, probes.along_entries)
            continue
        both, weight = rows.reshape(2, -1).T, weights.reshape(2, -1)
        if joined:
            weight = weight[0] if probes.along_entries else weight.sum(0)
            yield _Side(leaf, both, weight, probes.along_entries)
        else:
            for i, name in enumerate((".real", ".imag")):
                yield _Side(leaf, both[:, i : i + 1], weight[i], probes.along_entries, name)


def _numbers(matrix: np.ndarray, column: _Side, row: _Side, mode: str) -> np.ndarray:
    pick = lambda i, j: matrix[np.ix_(column.rows[:, i], row.rows[:, j])]
    if mode == "reverse" and column.rows.shape[1] == 2:
        return pick(0, 0) - 1j * pick(1, 0)  # as jax.grad has it; torch's is the conjugate
    if mode == "forward" and row.rows.shape[1] == 2:
        return pick(0, 0) + 1j * pick(0, 1)
    return pick(0, 0)


def _compare_pair(
    mode: str,
    numerical: np.ndarray,
    analytical: np.ndarray,
    column: _Side,
    row: _Side,
    tolerances: tuple[float, float],
) -> Compared:
    if not numerical.size:
        return Compared()
    atol, rtol = tolerances
    # The difference of two infinities is a NaN, and is off.
    error = np.where(analytical == numerical, 0.0, np.abs(analytical - numerical))
    allowed = atol * np.outer(column.weights, row.weights) + rtol * np.abs(numerical)
    off = ~(error <= allowed)
    excess = _excess(error, allowed)
    hint = _hint(numerical, analytical) if off.any() else ""
    order = np.argsort(-excess, axis=None, kind="stable")[:SHOWN]
    worst = []
    for i, j in zip(*np.unravel_index(order, error.shape), strict=True):
        worst.append(
            Found(
                mode,
                row.name(int(j)),
                column.name(int(i)),
                tuple(map(int, column.rows[i])),
                tuple(map(int, row.rows[j])),
                numerical[i, j].item(),
                analytical[i, j].item(),
                float(error[i, j]),
                float(allowed[i, j]),
                hint if off[i, j] else "",
            )
        )
    return Compared(tuple(worst), error.size, int(off.sum()))


def _excess(error: np.ndarray | float, allowed: np.ndarray | float) -> np.ndarray:
    known = np.isfinite(error)
    ratio = np.where(known, error, 0.0) / np.maximum(allowed, np.finfo(float).tiny)
    return np.where(known, ratio, np.inf)


def _hint(numerical: np.ndarray, analytical: np.ndarray) -> str:
    """What all derivatives of a pair of leaves have in common."""
    if not (np.isfinite(numerical).all() and np.isfinite(analytical).all()):
        return ""
    size = np.linalg.norm(numerical)
    if not analytical.any():
        return "no gradient at all: see fg.unused_grads"
    near = lambda other: np.linalg.norm(analytical - other) <= 1e-3 * np.linalg.norm(analytical)
    if np.iscomplexobj(numerical) and near(numerical.conj()):
        return "conjugate"
    factor = np.vdot(numerical, analytical) / size**2 if size else 0.0
    is_one = abs(factor - 1) < 1e-3  # which says nothing
    if not (is_one or np.iscomplex(factor)) and near(factor.real * numerical):
        return f"{factor.real:.4g} times the numerical"
    return ""
