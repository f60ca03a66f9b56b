"""What a check found, as data and as a table."""

import dataclasses
from collections.abc import Sequence

_HEADER = ("derivative of", "by", "numerical", "analytical", "error", "allowed", "because")


@dataclasses.dataclass(frozen=True)
class GradcheckEntry:
    """One derivative, of an output's entry by an input's entry, by differences and by JAX."""

    mode: str
    """"reverse" (the vjp) or "forward" (the jvp)."""
    output: str
    """Path of the output's entry, ``output['loss'][2]``.  In fast mode path of the leaf, along
    a random direction, and so is the input."""
    input: str
    """Path of the input's entry, ``inputs[0]['w'][1, 2]``."""
    numerical: float | complex
    """Central difference; by a complex input as ``jax.grad`` would have it."""
    analytical: float | complex
    error: float
    """Absolute difference of the two."""
    allowed: float
    """``atol + rtol * abs(numerical)``; in fast mode ``atol`` is scaled."""
    because: str = ""
    """Why they differ, where that could be established: a kink, a jump, a factor, a value that
    is not finite."""

    @property
    def ok(self) -> bool:
        """Whether the two are close; a NaN is not, equal infinities are."""
        return self.error <= self.allowed

    def _row(self) -> tuple[str, ...]:
        numbers = number(self.numerical), number(self.analytical)
        return (
            self.output,
            self.input,
            *numbers,
            f"{self.error:.2g}",
            f"{self.allowed:.2g}",
            self.because,
        )


@dataclasses.dataclass(frozen=True)
class GradcheckReport:
    """What a check found; true where all is well, and prints as a table.

    Attributes:
      call: The function that was called.
      entries: The worst of the derivatives compared, worst first: those that are off, or else
        the nearest to it.
      n_compared: How many derivatives were compared.
      n_off: How many of them are off.
      faults: Whatever else is wrong, a sentence each: two calls differ, the vjp is not linear,
        forward mode is missing, batches differ from single calls.
      notes: What may explain a failure: rounding inside of the function, a step too small.
    """

    call: str
    entries: tuple[GradcheckEntry, ...]
    n_compared: int
    n_off: int
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no derivative is off and nothing else is wrong."""
        return not self.n_off and not self.faults

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        number = len(self.entries)
        if self.n_off:
            head = f"{self.n_off} of {self.n_compared} derivatives are off"
            shown = f"the {number} worst" if number < self.n_off else ""
        elif self.n_compared:
            many = f"{self.n_compared} derivatives agree"
            head = f"{'1 derivative agrees' if self.n_compared == 1 else many} with differences"
            shown = f"the {number} nearest to the tolerance" if number < self.n_compared else ""
        else:
            head, shown = "no derivative was compared", ""
        lines = [f"{self.call}: {'; '.join(filter(None, (head, shown)))}."]
        lines += [f"Fault: {fault}" for fault in self.faults]
        lines += _table(self.entries)
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])


class GradcheckError(RuntimeError):
    """A check failed: the message is the report, which is also its ``report``."""

    def __init__(self, report: GradcheckReport) -> None:
        super().__init__(report)
        self.report = report


def number(x: float | complex) -> str:
    """As it stands in a table: a complex number only where it is one."""
    return f"{x:.6g}" if isinstance(x, complex) and x.imag else f"{x.real:.6g}"


def _table(entries: Sequence[GradcheckEntry]) -> list[str]:
    if not entries:
        return []
    rows = [("mode", *_HEADER), *((entry.mode, *entry._row()) for entry in entries)]
    first = 0 if len({entry.mode for entry in entries}) > 1 else 1
    last = None if any(entry.because for entry in entries) else -1
    rows = [row[first:last] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    return [f"  {line}" for line in lines]
