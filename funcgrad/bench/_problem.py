"""What is raced: a problem, the numbers that are right, and the contenders that compute them."""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

Right = dict[str, list[np.ndarray]]
"""Leaves in float64, by the kind of what a contender computes; and what else contenders need."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to some numbers, and what it needs."""

    make: Callable[..., Callable[..., Any]]
    """Gives a function of the problem's ``args``; a worker compiles it, unless it is torch's."""
    kind: Any
    """Which of the right numbers it computes; contenders of one kind are compared."""
    library: Literal["jax", "torch"] = "jax"
    needs: str | None = None
    """The package that brings it."""
    compiles: bool = False
    """Whether a worker leaves it to compile by itself, at its first call."""

    def absent(self) -> str | None:
        """Why it cannot run at all, if so."""
        packages = [p for p in (self.needs, self.library) if p]
        missing = [p for p in packages if importlib.util.find_spec(p) is None]
        return f"absent: {missing[0]} is not installed" if missing else None


class Problem:
    """Inputs, right numbers and contenders; each task that races has a subclass.

    A worker makes its own, from an importable function.
    """

    title: str
    args: tuple[Any, ...]
    """Of every contender, as NumPy arrays."""
    contenders: Mapping[str, Contender]
    baselines: Mapping[str, Sequence[str]]
    """The contenders that may be what the others of a library are compared with."""
    tolerance: float = 1e-4
    """The largest error of float32 arithmetic; what is above is wrong."""

    def reference(self) -> Right:
        """What is right, computed slowly in float64."""
        raise NotImplementedError

    def about(self, right: Right) -> dict[str, Any]:
        """Sizes, for the JSON."""
        return {}

    def make(self, contender: Contender, right: Right) -> Callable[..., Any]:
        """The contender's function of ``args``."""
        return contender.make(self)

    def trial(self, right: Right) -> tuple[Any, ...]:
        """The arguments for which ``right`` holds."""
        return self.args

    def not_run(self, name: str) -> str | None:
        """Why a contender stays away, if it does."""
        return self.contenders[name].absent()


def error(output: Any, right: Sequence[np.ndarray]) -> float:
    """The largest difference over the largest entry, of the leaf where it is worst; NaN stays."""
    worst = [
        np.abs(np.asarray(leaf, np.float64) - r).max() / (np.abs(r).max() or 1.0)
        for leaf, r in zip(jax.tree.leaves(output), right, strict=True)
    ]
    return float(np.max(worst))


def save(file: Path, right: Right) -> None:
    """Write the right numbers for the other processes."""
    arrays: dict[str, Any] = {f"{k} {i}": x for k, xs in right.items() for i, x in enumerate(xs)}
    np.savez(file, **arrays)


def load(file: Path) -> Right:
    """Read what ``save`` wrote."""
    right: Right = {}
    with np.load(file) as held:
        for key in held:
            right.setdefault(key.rpartition(" ")[0], []).append(held[key])
    return right


def float64(tree: Any) -> Any:
    """The same tree, its floating leaves in float64; under ``enable_x64`` it stays so."""

    def wide(leaf: Any) -> Any:
        leaf = np.asarray(leaf)
        return leaf.astype(np.float64) if np.issubdtype(leaf.dtype, np.floating) else leaf

    return jax.tree.map(wide, tree)
