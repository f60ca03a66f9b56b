"""What the command line asks of a task."""

import dataclasses
from collections.abc import Callable

Progress = Callable[[str, float], object]
"""Called with what is being done, and the share of the model that is done."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How much to measure."""

    quick: bool = False
    """Toy sizes, one turn."""
    full: bool = False
    """Also time and memory over a range of sizes."""
    turns: int = 5
