"""What the command line asks of a task."""

import dataclasses
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Options:
    """How much to measure, and where it goes."""

    out: Path
    quick: bool = False
    """Toy sizes, one turn."""
    models: tuple[str, ...] = ()
    """All of the task's, if empty."""
    turns: int = 5
    scaling: bool = False
    """Whether to draw time and memory against batch, depth and length."""
    resume: dict[str, Any] | None = None
    """The figures of an earlier run, whose models need no second one."""
