"""What is known about one value of a batched program: whose samples it depends on.

``Taint`` is the abstract value that the checker moves along a jaxpr:

- ``mask``: for each element, bit ``s`` says that it may depend on sample ``s`` of eight.
- ``growth``: the factor by which each element grows when the batch doubles, 1 for nearly
  everything, 1/2 after a division by the batch size; ``None`` when it changes otherwise
  with the size of the batch or the place in it, and then ``odd`` says where.
- ``total``: the value is a sum over samples of terms that depend on one sample each, as a
  mean loss is; lost by anything that is not linear.
- ``recipe``: a hash of how it was computed, leaving out which samples and how many; parts of
  a batch with other recipes are other functions of their samples.
- ``known``, ``twin``: its numbers, at this batch size and at the double, where they follow
  from the program alone.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from funcgrad._compat import JaxprEqn
from funcgrad._per_sample import _masks

SAMPLES = 8
ALL = np.uint8(2**SAMPLES - 1)
_MIXED = np.array([bin(bits).count("1") > 1 for bits in range(2**SAMPLES)])


@dataclasses.dataclass(frozen=True)
class Blame:
    """The equation that made something inadmissible, and the one that made it final.

    Each after the equations whose bodies it stands in: JAX's own compiled functions keep
    no line of the user's, the call does.
    """

    order: int
    eqns: tuple[JaxprEqn, ...]
    kind: str  # "mix", "unknown", "random", "size" or "position"
    use: tuple[JaxprEqn, ...] = ()


@dataclasses.dataclass(frozen=True)
class Known:
    """Numbers that follow from the program; ``sure`` says of which elements."""

    value: np.ndarray
    sure: np.ndarray

    @property
    def whole(self) -> bool:
        """Whether every element is known."""
        return bool(self.sure.all())

    @property
    def zero(self) -> bool:
        """Whether every element is known to be zero."""
        return self.whole and not self.value.any()


@dataclasses.dataclass(frozen=True)
class Total:
    """A sum over samples.

    ``families`` maps where a sum was made to its growth and the samples already in it,
    ``rest`` holds the growths of what was added and depends on no sample.
    """

    families: dict[Any, tuple[float, int]]
    rest: frozenset[float] = frozenset()

    def scaled(self, factor: float) -> "Total":
        """The sum times a number that grows by ``factor``."""
        return Total(
            {key: (growth * factor, bits) for key, (growth, bits) in self.families.items()},
            frozenset(growth * factor for growth in self.rest),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Taint:
    """One abstract value; see the module."""

    mask: np.ndarray
    growth: float | None = 1.0
    odd: Blame | None = None
    origin: Blame | None = None
    total: Total | None = None
    known: Known | None = None
    twin: Known | None = None
    recipe: int = 0

    @property
    def free(self) -> bool:
        """Whether it depends on no sample."""
        return not self.mask.any()

    @property
    def mixed(self) -> bool:
        """Whether an element depends on more than one sample."""
        return mixes(self.mask)

    @property
    def zero(self) -> bool:
        """Whether it is zero at every batch size."""
        return (
            self.known is not None
            and self.known.zero
            and (self.twin is not None and self.twin.zero)
        )

    def same(self, other: "Taint") -> bool:
        """Whether a loop has reached its fixed point here."""
        return (
            np.array_equal(self.mask, other.mask)
            and (self.growth, self.total) == (other.growth, other.total)
            and (self.known is None) == (other.known is None)
        )


def mixes(mask: np.ndarray) -> bool:
    """Whether an element of ``mask`` holds more than one sample."""
    return bool(_MIXED[mask].any())


def free(rank: int, **fields: Any) -> Taint:
    """A value that depends on no sample."""
    return Taint(np.zeros((1,) * rank, np.uint8), **fields)


def earliest(blames: Iterable[Blame | None]) -> Blame | None:
    """The first in the program's order."""
    return min((b for b in blames if b), key=lambda b: b.order, default=None)


def gravest(blames: Iterable[Blame | None]) -> Blame | None:
    """A shared random draw before the size, the size before the place in the batch."""
    weight = ["random", "unknown", "size", "position"].index
    return min((b for b in blames if b), key=lambda b: (weight(b.kind), b.order), default=None)


def growth_of_known(
    known: Known, twin: Known, shape: _masks.Sizes, larger: _masks.Sizes
) -> float | None:
    """How known numbers change from the batch to the double one, if in a way that is allowed."""
    a, b = known.value, twin.value
    for axis, (n, m) in enumerate(zip(shape, larger, strict=True)):
        if n == m or (a.shape[axis] == b.shape[axis] == 1):
            continue
        # An axis that holds the batch: each sample must see the same numbers.
        if m != 2 * n or n % SAMPLES:
            return None
        a = _one_block(_masks.expand(a, (axis,), [*a.shape[:axis], n]), axis, SAMPLES)
        b = _one_block(_masks.expand(b, (axis,), [*b.shape[:axis], m]), axis, 2 * SAMPLES)
        if a is None or b is None:
            return None
    a, b = np.broadcast_arrays(a, b)
    if _masks.same(a, b):
        return 1.0
    if a.dtype == bool or not np.issubdtype(np.result_type(a, np.float32), np.floating):
        return None
    a, b = a.astype(float), b.astype(float)
    pivot = np.flatnonzero(a)
    if not pivot.size or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    ratio = float(b.flat[pivot[0]] / a.flat[pivot[0]])
    return ratio if ratio > 0 and np.allclose(b, a * ratio, rtol=1e-6) else None


def _one_block(array: np.ndarray, axis: int, count: int) -> Any:
    blocks = np.stack(np.split(array, count, axis))
    return blocks[0] if _masks.same(blocks, blocks[:1]) else None


def merge_totals(
    taints: Sequence[Taint], place: Any, *, in_sample_loop: bool = False
) -> Total | None:
    """The sum of several values as one sum over samples, if each of them is one.

    ``place`` names the equation.  In a loop over samples a value of one sample is a term
    too: iterations meet again at the same place and complete the sum.
    """
    families: dict[Any, tuple[float, int]] = {}
    rest: set[float] = set()
    for position, taint in enumerate(taints):
        if taint.zero:
            continue
        if taint.total is not None:
            part = taint.total
        elif taint.growth is None:
            return None
        elif taint.free:
            if in_sample_loop:
                return None
            part = Total({}, frozenset([taint.growth]))
        elif in_sample_loop and taint.mask.size == 1 and not taint.mixed:
            part = Total({(place, position): (taint.growth, int(taint.mask.item()))})
        else:
            return None
        rest |= part.rest
        for key, (growth, bits) in part.families.items():
            before = families.get(key, (growth, 0))
            again = bool(before[1] & bits)
            if before[0] != growth or (again and (in_sample_loop or before[1] != bits)):
                return None
            families[key] = growth, before[1] | bits
    return Total(families, frozenset(rest)) if families else None


def join(a: Taint, b: Taint, place: Any) -> Taint:
    """Either of two values: of two branches, or of a carry before and after."""
    mask = _masks.compact(a.mask | b.mask)
    keep = (
        a.known is not None
        and b.known is not None
        and (
            a.known.value.shape == b.known.value.shape
            and _masks.same(a.known.value, b.known.value)
            and a.known.whole
            and b.known.whole
        )
    )
    total = merge_totals([a, b], place) if mixes(mask) else None
    growths = {t.growth for t in (a, b) if not t.zero} or {1.0}
    growth = growths.pop() if len(growths) == 1 else None
    return Taint(
        mask,
        growth,
        gravest([a.odd, b.odd]) if growth is None else None,
        earliest([a.origin, b.origin]),
        total,
        a.known if keep else None,
        a.twin if keep else None,
        hash((a.recipe, b.recipe)),
    )


def is_half(growth: float) -> bool:
    """Whether something shrinks as one over the batch size."""
    return math.isclose(growth, 0.5, rel_tol=1e-6)
