"""``python -m funcgrad bench``: the tasks, their tables and the JSON of their figures."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from funcgrad.bench import _per_sample

# Each prints its tables and returns its figures, and whether its numbers were right.
TASKS: Mapping[str, Callable[[Console, bool], tuple[dict[str, Any], bool]]] = {
    "per-sample": _per_sample.per_sample,
}


def run(out: Path, quick: bool = False, *, console: Console | None = None) -> int:
    """Run every task, print its tables and save the figures.

    Args:
      out: A folder for ``bench.json``; made if absent.
      quick: Whether to use small sizes, whose times mean little.
      console: Where to print; the terminal if ``None``.

    Returns:
      0, or 1 when some road's numbers were wrong.

    Example:
      >>> from pathlib import Path
      >>> run(Path("funcgrad-bench"))  # doctest: +SKIP
      0
    """
    console = console or Console()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    figures, right = {}, True
    for name, task in TASKS.items():
        console.rule(f"bench: {name}", align="left")
        figures[name], fine = task(console, quick)
        if not fine:
            console.print(Text(f"{name}: some numbers are wrong, see the errors", "bold red"))
        right = right and fine
    file = out / "bench.json"
    file.write_text(json.dumps({"quick": quick, "tasks": figures}, indent=2) + "\n")
    console.print(f"\nFigures: {file}")
    return 0 if right else 1
