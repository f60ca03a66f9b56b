"""The concept table shown: in the terminal, as JSON, and in the README."""

import collections
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from funcgrad import _markers
from funcgrad.parity._table import SECTIONS, Outcome, Row, evaluate, select
from funcgrad.parity.rows import ROWS


def run(
    *only: str,
    json_path: Path | str | None = None,
    rows: Sequence[Row] = ROWS,
    console: Any = None,
) -> int:
    """Run every concept in PyTorch and here, print the table, and return the exit status.

    Every check runs both sides in float64, whatever JAX is configured to, and leaves both as
    they were.  A row that is not built yet is listed as missing; without torch the others are
    skipped; neither counts as passed.

    Args:
      *only: Words; a row is run when its id (``"hooks.capture"``) or section title holds one.
        All rows without.
      json_path: A file to write the outcomes to.
      rows: The table.
      console: A ``rich.console.Console`` to print on; by default the terminal.

    Returns:
      0, or 1 when a row failed.

    Raises:
      ValueError: No row holds any of the words.

    Example:
      >>> from rich.console import Console
      >>> run("stopping.inference", console=Console(quiet=True))
      0
    """
    from rich.console import Console
    from rich.progress import track

    console = console or Console()
    chosen = select(rows, only)
    outcomes = [
        evaluate(row)
        for row in track(chosen, "Running both sides", console=console, transient=True)
    ]
    _print(outcomes, console)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(_as_json(outcomes), indent=2) + "\n")
    return int(any(outcome.verdict == "fail" for outcome in outcomes))


def markdown(rows: Iterable[Row] = ROWS) -> str:
    """The concept table for the README, the same on every run.

    Args:
      rows: The table.

    Returns:
      One Markdown table per section: concept, torch, here, and who supplies it.

    Example:
      >>> print(markdown(ROWS[:1]).splitlines()[0])
      **1 Engine**
    """
    lines = []
    for section, members in itertools.groupby(rows, key=lambda row: row.section):
        lines += [f"**{SECTIONS[section]}**", "", "| concept | torch | here | by |"]
        lines += ["| --- | --- | --- | --- |"]
        lines += [
            f"| {_cell(row.concept)} | `{_cell(row.torch)}` | `{_cell(row.here)}` | {row.status} |"
            for row in members
        ]
        lines += [""]
    return "\n".join(lines)


def update_readme(text: str, *, rows: Iterable[Row] = ROWS) -> str:
    """Replace what stands between the concept table's markers in a README.

    Args:
      text: The README, with a line ``<!-- concept-table:begin -->`` and, after it, a line
        ``<!-- concept-table:end -->``.
      rows: The table.

    Returns:
      The text with the current table; equal to ``text`` when it was current.

    Raises:
      ValueError: A marker is absent.

    Example:
      >>> text = "<!-- concept-table:begin --> old <!-- concept-table:end -->"
      >>> "1 Engine" in update_readme(text)
      True
    """
    return _markers.replace(text, "concept-table", markdown(rows))


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _print(outcomes: Sequence[Outcome], console: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    style = {"pass": "green", "fail": "bold red", "missing": "yellow", "skip": "dim"}
    difference, verdict, gap = 10, 8, 2
    rest = max(24, console.width - difference - verdict - 4 * gap)
    code = rest * 3 // 8
    for section, members in itertools.groupby(outcomes, key=lambda outcome: outcome.row.section):
        console.print(Text(f"\n{SECTIONS[section]}", "bold"))
        first = outcomes[0].row.section == section
        table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=first)
        table.add_column("concept", overflow="fold", width=rest - 2 * code)
        table.add_column("torch", overflow="fold", width=code, style="cyan")
        table.add_column("here", overflow="fold", width=code, style="cyan")
        table.add_column("largest\ndifference", width=difference, justify="right")
        table.add_column("verdict", width=verdict)
        for outcome in members:
            row = outcome.row
            table.add_row(
                Text(_wrap(row.concept, rest - 2 * code)),
                Text(_wrap(row.torch, code)),
                Text(_wrap(row.here, code)),
                _difference(outcome),
                Text(_verdict(outcome), style[outcome.verdict]),
            )
        console.print(table)
    console.print()
    for outcome in outcomes:
        if outcome.verdict == "fail":
            console.print(Text(f"{outcome.row.id}: {outcome.reason}", style["fail"]))
            for name, value in (outcome.check.details if outcome.check else {}).items():
                console.print(Text(f"    {name}: {value}"))
    console.print(Text(closing(outcomes)))


def _verdict(outcome: Outcome) -> str:
    # "pass" alone would read as "they agree".
    return "differs*" if outcome.verdict == "pass" and outcome.row.differs else outcome.verdict


def _wrap(text: str, width: int) -> str:
    """Break lines at spaces, and a word too long for a line after its punctuation."""
    lines = [""]
    for word in re.findall(r"\S+\s*", text):
        fits = len(word.rstrip()) <= width - 2
        for piece in [word] if fits else re.findall(r"[^\W_]+[\W_]*|[\W_]+", word):
            if len(lines[-1]) + len(piece.rstrip()) > width:
                lines.append("  ")
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _difference(outcome: Outcome) -> str:
    if outcome.check is None:
        return ""
    if outcome.check.difference is None:
        return "refused"
    return f"{outcome.check.difference:.1e}" if outcome.check.difference else "0"


def closing(outcomes: Sequence[Outcome]) -> str:
    """The closing lines: how many rows passed, failed, were skipped, and are missing."""
    counts = collections.Counter(outcome.verdict for outcome in outcomes)
    parts = [f"{len(outcomes)} concepts: {counts['pass']} proved"]
    parts += [f"{counts['fail']} failed", f"{counts['missing']} missing (not built yet)"]
    if counts["skip"]:
        parts += [f"{counts['skip']} skipped (torch not installed)"]
    lines = [", ".join(parts) + "."]
    if any(outcome.row.differs and outcome.verdict == "pass" for outcome in outcomes):
        lines += ["* torch and JAX differ here; both give what the row says they give."]
    return "\n".join(lines)


def _as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    counts = collections.Counter(outcome.verdict for outcome in outcomes)
    return {
        "counts": {verdict: counts[verdict] for verdict in ("pass", "fail", "missing", "skip")},
        "rows": [_row_as_json(outcome) for outcome in outcomes],
    }


def _row_as_json(outcome: Outcome) -> dict[str, Any]:
    row, check = outcome.row, outcome.check
    fields = ("id", "section", "concept", "torch", "here", "needs", "note", "status", "differs")
    evidence = {}
    if check is not None:
        measured = check.difference is not None and math.isfinite(check.difference)
        evidence = {
            "difference": check.difference if measured else None,
            "tolerance": check.tolerance,
            # As text, since JSON has neither NaN nor complex numbers.
            "details": {name: str(value) for name, value in check.details.items()},
        }
    return {
        **{field: getattr(row, field) for field in fields},
        "verdict": outcome.verdict,
        "reason": outcome.reason,
        **evidence,
        "seconds": round(outcome.seconds, 3),
    }
