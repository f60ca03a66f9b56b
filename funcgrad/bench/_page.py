"""One HTML page of all figures, which needs nothing beside itself."""

import dataclasses
import importlib.resources
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from funcgrad.bench import _page_plots
from funcgrad.bench._measure import Machine
from funcgrad.bench._tables import Column, Row, Table, Value, losses, of_losses


@dataclasses.dataclass(frozen=True)
class Section:
    """A task's part of the page."""

    name: str
    title: str
    notes: tuple[str, ...]
    figures: Mapping[str, Any]
    """As in its JSON."""
    tables: tuple[Table, ...]


def html(sections: Sequence[Section]) -> str:
    """The page: where funcgrad loses, then each task's plots and tables.

    Args:
      sections: The tasks, in their order.

    Returns:
      A whole document.  Text of the figures is escaped; style and script are within.
    """
    lost = of_losses([loss for section in sections for loss in losses(section.tables)])
    links = [("losses", "Where funcgrad loses"), *((s.name, s.title) for s in sections)]
    contents = "".join(f'<li><a href="#{escape(k)}">{escape(t)}</a></li>' for k, t in links)
    body = [
        "<header><h1>funcgrad beside other ways</h1>",
        "<p>Every figure is measured, none is chosen: each contender's numbers are checked "
        "against float64, and what is wrong says so. "
        "Round dots and whole lines are funcgrad's. Point at a dot to read it; click on a "
        "column's name to sort.</p>",
        f"<nav><ul>{contents}</ul></nav></header>",
        f'<section id="losses"><h2>{escape(lost.title)}</h2>',
        _table(lost) if lost.rows else "<p>Nowhere, in what was measured.</p>",
        "</section>",
        *map(_section, sections),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        "<title>funcgrad: benchmarks</title>\n"
        f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + f"\n</main>\n<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (importlib.resources.files("funcgrad.bench") / name).read_text()


def _section(of: Section) -> str:
    summaries = [table for table in of.tables if table.summary]
    details = [table for table in of.tables if not table.summary]
    lines = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts(of.figures))
    notes = "".join(f"<li>{escape(note)}</li>" for note in of.notes)
    return "\n".join(
        [
            f'<section id="{escape(of.name)}"><h2>{escape(of.title)}</h2>',
            f"<dl>{lines}</dl>",
            f"<details><summary>What the words mean</summary><ul>{notes}</ul></details>",
            *_blocks(summaries),
            *_blocks(details),
            "</section>",
        ]
    )


def facts(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where and how it was measured, in words.

    Args:
      figures: A task's, as in its JSON.
    """
    machine = Machine(**figures["machine"])
    days = sorted({of.get("date", figures["date"]) for of in figures["models"].values()})
    loads = [of["load"] for of in figures["models"].values() if "load" in of]
    facts = [
        ("date", " to ".join(dict.fromkeys([days[0], days[-1]])) if days else figures["date"]),
        ("machine", f"{machine.processor}, {machine.cores} cores, {machine.system}"),
        ("computed on", machine.device),
        ("load before each", f"{min(loads):.1f} to {max(loads):.1f}" if loads else "not noted"),
        ("turns", f"{figures['turns']}{', toy sizes' if figures['quick'] else ''}"),
        ("seed", str(figures["seed"])),
        ("versions", ", ".join([f"Python {machine.python}", *_versions(machine)])),
    ]
    return facts


def _versions(machine: Machine) -> list[str]:
    return [f"{name} {version}" for name, version in machine.versions.items()]


def _blocks(tables: Sequence[Table]) -> list[str]:
    """Each table under its plot; lines stand side by side, and their tables below them."""
    lines = [table for table in tables if table.plot and table.plot.x]
    out = [_block(table) for table in tables if table not in lines]
    if lines:
        plots = "".join(f"<figure>{_title(t)}{_page_plots.lines(t)}</figure>" for t in lines)
        below = "".join(
            f"<details><summary>{escape(t.title)}</summary>{_table(t)}</details>" for t in lines
        )
        out.append(f'<div class="curves">{plots}</div><article>{below}</article>')
    return out


def _block(table: Table) -> str:
    plot = _page_plots.dots(table) if table.plot else ""
    return f"<article>{_title(table)}{plot}{_table(table)}</article>"


def _title(table: Table) -> str:
    return f"<h3>{escape(table.title)}</h3>"


def _table(table: Table) -> str:
    head = "".join(
        [
            _header(Column(table.head), words=True),
            *(_header(c, _of_words(table, i)) for i, c in enumerate(table.columns)),
        ]
    )
    rows = "".join(_row(table, row) for row in table.rows)
    notes = [*table.notes, f"Why behind: {table.why}" if table.why else ""]
    foot = "".join(f'<p class="note">{escape(note)}</p>' for note in notes if note)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{foot}"
    )


def _of_words(table: Table, i: int) -> bool:
    return any(isinstance(row.values[i], str) for row in table.rows if i < len(row.values))


def _header(column: Column, words: bool = False) -> str:
    unit = f" <small>{escape(column.unit)}</small>" if column.unit else ""
    hint = f' title="{column.better} is better"' if column.better else ""
    kind = " ".join(k for k in ("ours" * column.ours, "words" * words) if k)
    return (
        f'<th scope="col" class="{kind}" aria-sort="none"{hint}>'
        f'<button type="button">{escape(column.name)}{unit}</button></th>'
    )


def _row(table: Table, row: Row) -> str:
    kind = " ".join(k for k in ("ours", "wrong") if getattr(row, k))
    name = f'<th scope="row">{escape(row.name)}{" <b>wrong</b>" if row.wrong else ""}</th>'
    if row.reason:
        cells = f'<td class="reason" colspan="{len(table.columns)}">{escape(row.reason)}</td>'
    else:
        values = [*row.values, *[None] * (len(table.columns) - len(row.values))]
        cells = "".join(_cell(c, v) for c, v in zip(table.columns, values, strict=True))
    return f'<tr class="{kind}">{name}{cells}</tr>'


def _cell(column: Column, value: Value) -> str:
    if isinstance(value, str):
        return f'<td class="words">{escape(value)}</td>'
    number = "" if value is None else f' data-value="{value!r}"'
    return f"<td{number}>{escape(column.text(value))}</td>"
