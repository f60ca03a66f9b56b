"""What a row of the concept table is, and how its evidence is gathered and judged."""

import contextlib
import dataclasses
import functools
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

import funcgrad
from funcgrad._compat import enable_x64

SECTIONS: Mapping[str, str] = {
    "engine": "1 Engine",
    "backward_and_grad": "2 backward and grad",
    "function": "3 Function",
    "stopping": "4 Stopping gradients",
    "hooks": "5 Hooks",
    "checkpointing": "6 Checkpointing",
    "clipping": "7 Clipping and training operations",
    "transforms": "8 Function transforms",
    "debugging": "9 Debugging and comparing",
    "conventions": "10 Where torch and JAX differ",
}

Verdict: TypeAlias = Literal["pass", "fail", "missing", "skip"]


@dataclasses.dataclass(frozen=True)
class Check:
    """Evidence: what both sides gave, and how far apart it lies.

    ``difference`` is ``None`` where nothing is measured: both sides refuse, or one cannot
    be written.  ``details`` holds the named values and the words of the errors.
    """

    difference: float | None
    tolerance: float
    details: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance; a NaN is not."""
        return self.difference is None or self.difference <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Row:
    """One concept: how torch spells it, how it is spelled here, and the proof.

    ``needs`` names the ``funcgrad`` functions that the row uses; empty when JAX, Flax or Optax
    already has the concept.  ``differs`` marks a row that proves a documented difference.
    """

    id: str
    concept: str
    torch: str
    here: str
    needs: tuple[str, ...] = ()
    note: str = ""
    differs: bool = False
    check: Callable[[], Check] | None = None

    def __post_init__(self) -> None:
        """Refuse a section that the table does not have."""
        if self.section not in SECTIONS:
            raise ValueError(
                f"Row: the id {self.id!r} starts with a section; got {self.section!r}. "
                f"Use one of {', '.join(SECTIONS)}."
            )

    @property
    def section(self) -> str:
        """The part of the id before the first dot, a key of ``SECTIONS``."""
        return self.id.partition(".")[0]

    @property
    def lacks(self) -> tuple[str, ...]:
        """The names in ``needs`` that funcgrad does not have yet."""
        return tuple(name for name in self.needs if not _exists(name))

    @property
    def built(self) -> bool:
        """Whether the row can be run: all it needs exists, and so does its check."""
        return self.check is not None and not self.lacks

    @property
    def status(self) -> str:
        """In words: who supplies the concept, or that nobody does yet."""
        if not self.built:
            return "not built yet"
        if self.differs:
            return "they differ"
        return "funcgrad" if self.needs else "JAX"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one row; ``reason`` says why there is no passed check."""

    row: Row
    verdict: Verdict
    check: Check | None = None
    reason: str = ""
    seconds: float = 0.0


def row(id: str, **fields: Any) -> Callable[[Callable[[], Check]], Row]:
    """Turn the check below it into its ``Row``; the rest of the fields are the keywords."""
    return lambda check: Row(id, check=check, **fields)


def agree(
    tolerance: float = 1e-10, *, said: Mapping[str, Any] | None = None, **values: Any
) -> Check:
    """Evidence that the members of each named tuple are equal: torch's, ours, the known one.

    Absolute differences; NaN equals NaN, and an infinity equals itself.  ``said`` is added to
    the details.
    """
    arrays = {name: [_array(member) for member in members] for name, members in values.items()}
    differences = [_distance(name, members) for name, members in arrays.items()]
    details = {
        name: [member.tolist() for member in members]
        for name, members in arrays.items()
        if members[0].size <= 12
    }
    return Check(max(differences, default=None), tolerance, {**details, **(said or {})})


def error_of(fun: Callable[[], object], kind: type[Exception], words: str) -> str:
    """Call ``fun``, which must raise ``kind`` with ``words`` in it, and return the message."""
    try:
        fun()
    except kind as error:
        if words not in str(error):
            raise AssertionError(f"the error does not say {words!r}: {error}") from error
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise AssertionError(f"{kind.__name__} with {words!r} was not raised")


def evaluate(row: Row) -> Outcome:
    """Run one row in float64; a check that raises has failed."""
    if not row.built:
        return Outcome(row, "missing", reason=_why_missing(row))
    if importlib.util.find_spec("torch") is None:
        return Outcome(row, "skip", reason="torch not installed")
    assert row.check is not None
    start = time.perf_counter()
    try:
        with _float64():
            check = row.check()
    # Whatever a check raises is its row's failure, and the other rows still run.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return Outcome(row, "fail", None, reason, time.perf_counter() - start)
    seconds = time.perf_counter() - start
    if check.passed:
        return Outcome(row, "pass", check, "", seconds)
    reason = f"differs by {check.difference:.3g}, allowed {check.tolerance:.3g}"
    return Outcome(row, "fail", check, reason, seconds)


def select(rows: Iterable[Row], words: Iterable[str]) -> tuple[Row, ...]:
    """The rows whose id or section title holds one of ``words``; all without words."""
    words = [word.lower() for word in words]
    rows = tuple(rows)
    if not words:
        return rows
    found = tuple(
        row
        for row in rows
        if any(word in row.id or word in SECTIONS[row.section].lower() for word in words)
    )
    if not found:
        raise ValueError(
            f"parity: a row's id or section must hold {' or '.join(map(repr, words))}; got none. "
            f"The sections are {', '.join(SECTIONS)}."
        )
    return found


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    """Compute in float64 on both sides with torch's generator seeded; leave no trace."""
    import torch

    dtype = torch.get_default_dtype()
    with enable_x64(True), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # torch 2.13's own forward mode and linearize warn about their implementation.
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node", UserWarning)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _exists(name: str) -> bool:
    """Whether funcgrad has this function; a submodule of the name is not one."""
    try:
        return callable(functools.reduce(getattr, name.split("."), funcgrad))
    except AttributeError:
        return False


def _why_missing(row: Row) -> str:
    if row.lacks:
        return "needs " + ", ".join(f"fg.{name}" for name in row.lacks)
    return "the check is not written yet"


def _array(value: Any) -> np.ndarray:
    if isinstance(value, list | tuple):
        return np.array([_array(item) for item in value])
    return np.asarray(value.detach().numpy() if hasattr(value, "detach") else value)


def _distance(name: str, members: list[np.ndarray]) -> float:
    """The largest absolute difference of any member from the first."""
    first, *others = (
        np.asarray(member, complex if np.iscomplexobj(member) else float) for member in members
    )
    worst = 0.0
    for other in others:
        if other.shape != first.shape:
            raise AssertionError(f"{name}: the shapes are {first.shape} and {other.shape}")
        same = (first == other) | (np.isnan(first) & np.isnan(other))
        apart = np.abs(np.subtract(first, other, where=~same, out=np.zeros_like(first + other)))
        # A NaN or an infinity on one side only is as far apart as can be.
        worst = max(worst, float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0)))
    return worst
