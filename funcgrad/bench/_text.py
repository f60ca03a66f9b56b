"""Tables in the terminal and as markdown."""

import textwrap
from collections.abc import Sequence

from rich import table
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from funcgrad.bench._tables import Row, Table


def show(console: Console, of: Table) -> None:
    """Print a table without its columns of detail; a summary that is too wide is in the files."""
    shown = [i for i, column in enumerate(of.columns) if not column.detail]
    out = table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    out.title = Text(of.title, "bold")
    out.add_column(of.head, min_width=16)
    for i in shown:
        header = textwrap.wrap(of.columns[i].name, 9, break_long_words=False)
        header += filter(None, [of.columns[i].unit])
        out.add_column("\n".join(header), justify="right", no_wrap=True)
    reasons: dict[str, list[str]] = {}
    for row in of.rows:
        if row.reason:
            reasons.setdefault(row.reason, []).append(row.name)
            continue
        style = "bold red" if row.wrong else "bold" if row.ours else ""
        cells = _cells(of, row)
        out.add_row(Text(row.name, style), *(Text(cells[i], style) for i in shown))
    wide = console.options.update(max_width=10_000)
    if of.summary and Measurement.get(console, wide, out).minimum > console.width:
        return
    console.print(out)
    for reason, names in reasons.items():
        console.print(Text(f"{reason}: {', '.join(names)}", "dim"))
    console.print()


def markdown(of: Table) -> str:
    """A table under a heading, its notes below; a wrong row says so."""
    head = [of.head, *(f"{column.name} {column.unit}".strip() for column in of.columns)]
    lines = [f"### {of.title}", "", _line(head), _line(["---", *["---:"] * len(of.columns)])]
    for row in of.rows:
        name = f"{row.name}: WRONG" if row.wrong else row.name
        cells = [row.reason, *[""] * (len(of.columns) - 1)] if row.reason else _cells(of, row)
        lines.append(_line([name, *cells]))
    notes = [*of.notes, f"Why behind: {of.why}" if of.why else ""]
    return "\n".join([*lines, *(f"\n{note}" for note in notes if note)]) + "\n"


def _cells(of: Table, row: Row) -> list[str]:
    values = [*row.values, *[None] * (len(of.columns) - len(row.values))]
    return [column.text(value) for column, value in zip(of.columns, values, strict=True)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
