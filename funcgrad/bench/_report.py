"""``python -m funcgrad bench``: the tasks, their tables and the files of their figures."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from funcgrad.bench import _checkpointing, _cost
from funcgrad.bench._options import Options


@dataclasses.dataclass(frozen=True)
class BenchTask:
    """Something to measure."""

    run: Callable[[Console, Options, Callable[[dict[str, Any]], object]], tuple[Any, bool]]
    """Print tables; return the figures, and whether the numbers were right.  The last argument
    saves figures meanwhile."""
    markdown: Callable[[dict[str, Any]], str]
    """The figures as text."""


TASKS: Mapping[str, BenchTask] = {
    "per-sample": BenchTask(_cost.per_sample, _cost.markdown),
    "checkpointing": BenchTask(_checkpointing.checkpointing, _checkpointing.markdown),
}


def run(
    out: Path,
    tasks: Sequence[str] = (),
    *,
    quick: bool = False,
    models: Sequence[str] = (),
    turns: int = 5,
    scaling: bool = False,
    resume: bool = False,
    console: Console | None = None,
) -> int:
    """Run tasks, print their tables and save their figures.

    Args:
      out: A folder for a JSON and a markdown file of each task; made if absent.
      tasks: Keys of ``TASKS``; all, if none.
      quick: Whether to use toy sizes, whose times mean little.
      models: The models of the tasks; all, if none.
      turns: Calls of each contender.
      scaling: Whether to draw time and memory against the sizes.
      resume: Whether to keep the models that an interrupted run left in ``out``, if it was of
        the same day, machine, versions and turns.
      console: Where to print; the terminal if ``None``.

    Returns:
      0, or 1 when some contender's numbers were wrong.

    Raises:
      ValueError: There is no such task or model, or ``turns`` is below 1.

    Example:
      >>> from pathlib import Path
      >>> run(Path("funcgrad-bench"))  # doctest: +SKIP
      0
    """
    console = console or Console()
    if unknown := [name for name in tasks if name not in TASKS]:
        raise ValueError(f"bench: a task is one of {', '.join(TASKS)}; got {unknown[0]!r}.")
    if turns < 1:
        raise ValueError(f"bench: turns is 1 or more; got {turns}. Leave it out for 5.")
    options = Options(Path(out), quick, tuple(models), 1 if quick else turns, scaling)
    options.out.mkdir(parents=True, exist_ok=True)
    right = True
    for name in tasks or TASKS:
        console.rule(f"bench: {name}", align="left")
        stem = f"{name.replace('-', '_')}_{jax.default_backend()}"
        files = [options.out / f"{stem}.json", options.out / f"{stem}.md"]

        def save(figures: dict[str, Any], file: Path = files[0]) -> None:
            file.write_text(json.dumps(figures, indent=1) + "\n")

        if resume and files[0].exists():
            options = dataclasses.replace(options, resume=json.loads(files[0].read_text()))
        figures, fine = TASKS[name].run(console, options, save)
        save(figures)
        files[1].write_text(TASKS[name].markdown(figures))
        if not fine:
            console.print(Text(f"{name}: some numbers are wrong, see the errors", "bold red"))
        right = right and fine
        console.print(f"\nFigures: {files[0]}, {files[1]}")
    return 0 if right else 1
