"""``python -m funcgrad bench``: the tasks, and the files of what they measured."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from json import dumps, loads
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from funcgrad.bench import _checkpointing, _cost, _page, _pictures, _text
from funcgrad.bench import _debugging as debugging
from funcgrad.bench import _derivatives as derivatives
from funcgrad.bench import _function as function
from funcgrad.bench import _training_step as training_step
from funcgrad.bench._measure import Machine
from funcgrad.bench._models import SEED
from funcgrad.bench._options import Options
from funcgrad.bench._options import Progress as Tell
from funcgrad.bench._tables import Table, losses, of_losses


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Something to measure, one model after another."""

    title: str
    names: Sequence[str]
    """The models."""
    measure: Callable[[str, Options, Tell], dict[str, Any]]
    """``measure(model, options, progress)`` gives figures as plain JSON."""
    tables: Callable[[Mapping[str, Mapping[str, Any]]], Sequence[Table]]
    """Of the figures of models that have been measured."""
    notes: Sequence[str] = ()
    """What the words in its tables mean."""
    quick: Sequence[str] = ()
    """The models at toy size, if not all."""
    full: Sequence[str] = ()
    """Further models, measured when they are named or all is asked for."""

    def chosen(self, options: Options, models: Sequence[str]) -> list[str]:
        """Those to measure."""
        if models:
            return [name for name in models if name in (*self.names, *self.full)]
        if options.quick and not options.full:
            return list(self.quick or self.names)
        return [*self.names, *(self.full if options.full else ())]


TASKS: Mapping[str, Benchmark] = {
    "per-sample": Benchmark(
        "Per-sample gradients",
        *(_cost.NAMES, _cost.measure, _cost.tables, _cost.NOTES, _cost.QUICK, _cost.FULL),
    ),
    "checkpointing": Benchmark(
        "Checkpointing within a budget",
        *(_checkpointing.NAMES, _checkpointing.measure, _checkpointing.tables),
        _checkpointing.NOTES,
    ),
    "function": Benchmark(
        "Functions with a rule of their own",
        *(function.NAMES, function.measure, function.tables, function.NOTES),
    ),
    "derivatives": Benchmark(
        "Jacobians, Hessians and products with them",
        *(derivatives.NAMES, derivatives.measure, derivatives.tables, derivatives.NOTES),
    ),
    "debugging": Benchmark(
        "Finding anomalies and checking gradients",
        *(debugging.NAMES, debugging.measure, debugging.tables, debugging.NOTES),
    ),
    "training-step": Benchmark(
        "Clipping and accumulation in a training step",
        *(training_step.NAMES, training_step.measure, training_step.tables, training_step.NOTES),
    ),
}


def run(
    out: Path,
    tasks: Sequence[str] = (),
    *,
    quick: bool = False,
    full: bool = False,
    models: Sequence[str] = (),
    turns: int = 5,
    resume: bool = False,
    source: Path | None = None,
    html: bool = False,
    json: bool = False,
    console: Console | None = None,
) -> int:
    """Run tasks, print their tables, and save figures, markdown and pictures.

    Args:
      out: A folder for a JSON, a markdown file and a picture of each task; made if absent.
      tasks: Keys of ``TASKS``; all, if none.
      quick: Whether to use toy sizes, whose times mean little.
      full: Whether to measure over a range of sizes too, which takes long.
      models: The models of the tasks; all, if none.
      turns: Calls of each contender.
      resume: Whether to keep the models that an earlier run left in ``out``, if it was of the
        same machine, versions and turns; each has its date.
      source: A folder of figures to report again; then nothing is measured.
      html: Whether to write one page of all figures in ``out``.
      json: Whether to print the figures as JSON, and the progress to the error stream.
      console: Where to print; the terminal if ``None``.

    Returns:
      0, or 1 when some contender's numbers were wrong.

    Raises:
      ValueError: There is no such task or model, or ``turns`` is below 1.
      FileNotFoundError: ``source`` holds no figures of a task that was named, or none at all.

    Example:
      >>> from pathlib import Path
      >>> run(Path("funcgrad-bench"))  # doctest: +SKIP
      0
    """
    out, printed = Path(out), console or Console()
    console = Console(stderr=True, quiet=not sys.stderr.isatty()) if json else printed
    options = Options(quick, full, 1 if quick else turns)
    _check(tasks, models, turns)
    out.mkdir(parents=True, exist_ok=True)
    right, everything = True, {}
    for name in tasks or TASKS:
        stem = _stem(name)
        if source is not None:
            file = Path(source) / f"{stem}.json"
            if not file.exists():
                if tasks:
                    raise FileNotFoundError(
                        f"bench: figures to report are in {stem}.json; got {source}, without it."
                    )
                continue
            figures = loads(file.read_text())
            _save(out / f"{stem}.json", figures)
            for table in TASKS[name].tables(figures["models"]):
                _text.show(console, table)
        else:
            chosen = TASKS[name].chosen(options, models)
            figures = _measure(name, chosen, options, out / f"{stem}.json", resume, console)
        everything[name] = figures
        tables = TASKS[name].tables(figures["models"])
        (out / f"{stem}.md").write_text(_markdown(name, figures, tables))
        _pictures.draw(tables, out / f"{stem}.png")
        if wrong := sorted({row.name for table in tables for row in table.rows if row.wrong}):
            words = f"{name}: some numbers are wrong, see the errors of {', '.join(wrong)}"
            console.print(Text(words, "bold red"))
            right = False
        console.print(f"\nFigures: {out / stem}.json, .md, .png", highlight=False)
    if html:
        page = out / f"report_{jax.default_backend()}.html"
        page.write_text(_page.html(sections(out)))
        console.print(f"Page: {page}", highlight=False)
    if json:
        printed.out(dumps(everything, indent=1), highlight=False)
    return 0 if right else 1


def sections(folder: Path) -> list[_page.Section]:
    """The parts of the page: all tasks whose figures are in a folder.

    Args:
      folder: What ``run`` wrote to.
    """
    found = []
    for name, task in TASKS.items():
        file = folder / f"{_stem(name)}.json"
        if file.exists():
            figures = loads(file.read_text())
            tables = tuple(task.tables(figures["models"]))
            found.append(_page.Section(name, task.title, tuple(task.notes), figures, tables))
    return found


def _check(tasks: Sequence[str], models: Sequence[str], turns: int) -> None:
    if unknown := [name for name in tasks if name not in TASKS]:
        raise ValueError(f"bench: a task is one of {', '.join(TASKS)}; got {unknown[0]!r}.")
    known = [m for name in tasks or TASKS for m in (*TASKS[name].names, *TASKS[name].full)]
    if unknown := [name for name in models if name not in known]:
        raise ValueError(f"bench: a model is one of {', '.join(known)}; got {unknown[0]!r}.")
    if turns < 1:
        raise ValueError(f"bench: turns is 1 or more; got {turns}. Leave it out for 5.")


def _stem(name: str) -> str:
    return f"{name.replace('-', '_')}_{jax.default_backend()}"


def _measure(
    name: str, chosen: Sequence[str], options: Options, file: Path, resume: bool, console: Console
) -> dict[str, Any]:
    """Measure each model, print its tables and save all figures after each."""
    task, machine = TASKS[name], Machine.here()
    kind = {
        "date": machine.date,
        "machine": dataclasses.asdict(machine),
        "seed": SEED,
        "turns": options.turns,
        "quick": options.quick,
    }
    earlier = loads(file.read_text()) if resume and file.exists() else None
    kept = _kept(kind, earlier)
    today = {"date": machine.date}
    models: dict[str, Any] = {}
    console.rule(f"bench: {name}", align="left")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(name, total=len(chosen))
        for i, model in enumerate(chosen):
            tell: Tell = lambda text, share, i=i, model=model: bars.update(
                bar, description=f"{model}: {text}", completed=i + share
            )
            models[model] = kept.get(model) or {**task.measure(model, options, tell), **today}
            later = {name: kept[name] for name in chosen[i + 1 :] if name in kept}
            _save(file, {**kind, "models": models | later})
            for table in task.tables({model: models[model]}):
                if not table.summary:
                    _text.show(console, table)
    for table in task.tables(models):
        if table.summary:
            _text.show(console, table)
    return {**kind, "models": models}


def _kept(kind: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The models that an earlier run of the same kind has measured, each with its date."""
    if earlier is None or _without_date(earlier) != _without_date(kind):
        return {}
    return {name: {"date": earlier["date"], **of} for name, of in earlier["models"].items()}


def _without_date(kind: Mapping[str, Any]) -> dict[str, Any]:
    machine = {key: value for key, value in kind["machine"].items() if key != "date"}
    return {**kind, "machine": machine, "models": None, "date": None}


def _save(file: Path, figures: Mapping[str, Any]) -> None:
    file.write_text(dumps(figures, indent=1) + "\n")


def _markdown(name: str, figures: Mapping[str, Any], tables: Sequence[Table]) -> str:
    """Where it was measured, where funcgrad loses, then all tables."""
    measured = "; ".join(f"{what}: {value}" for what, value in _page.facts(figures)) + "."
    intro = [f"# {TASKS[name].title}", measured, *TASKS[name].notes]
    lost = [of_losses(found)] if (found := losses(tables)) else []
    parts = [*intro, *(_text.markdown(table).rstrip() for table in [*lost, *tables])]
    return "\n\n".join(parts) + "\n"
