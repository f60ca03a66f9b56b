"""Tables of what ``race`` measured."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from funcgrad.bench._tables import Column, Plot, Row, Table, Value

_MIB = 2.0**20
COLUMNS = (
    Column("time", "ms", "lower", ".2f"),
    Column("25 %", "ms", "lower", ".2f", detail=True),
    Column("75 %", "ms", "lower", ".2f", detail=True),
    Column("ratio", "", "lower", ".2f"),
    Column("temporaries", "MiB", "lower"),
    Column("peak", "MiB", "lower", ".0f"),
    Column("trace", "s", "lower", ".2f", detail=True),
    Column("compile", "s", "lower", ".2f"),
    Column("error", "", "lower", ".0e"),
)
LEGEND = (
    "Time: median of the turns A B C, A B C, and the quarter of them below and above; each "
    "contender in a process of its own, on the same cores; compilation apart.",
    "Ratio: to the fastest plain gradient of the same framework, turn by turn.",
    "Temporaries: what the compiled program takes beside its inputs and outputs; peak: the most "
    "its process held, libraries and compiler included.",
    "Error: largest difference from float64, relative to the largest entry.",
)


def contenders(
    figures: Mapping[str, Any],
    *,
    title: str = "",
    compared: tuple[str, ...] = ("time", "temporaries"),
    **options: Any,
) -> Table:
    """A model's contenders, one a line; ``options`` are fields of the table."""
    rows = []
    for name, of in figures["contenders"].items():
        ours = name.startswith("fg.")
        if "reason" in of:
            rows.append(Row(name, group=of["kind"], ours=ours, reason=of["reason"]))
            continue
        values = (
            1e3 * of["median_seconds"],
            1e3 * of["low_seconds"],
            1e3 * of["high_seconds"],
            of["ratio"],
            scaled(of["temp_bytes"], _MIB),
            scaled(of["peak_bytes"], _MIB),
            of["trace_seconds"],
            of["compile_seconds"],
            of["error"],
        )
        # Not "above", which a NaN would pass.
        wrong = not of["error"] <= figures["tolerance"]
        rows.append(Row(name, values, of["kind"], ours, wrong=wrong))
    plot = Plot(("time",), spread=("25 %", "75 %"))
    title = title or figures["title"]
    return Table(title, "contender", COLUMNS, tuple(rows), plot=plot, compared=compared, **options)


def across(
    models: Mapping[str, Mapping[str, Any]],
    ways: Mapping[str, str],
    what: str,
    column: Column,
    title: str,
    **options: Any,
) -> Table:
    """One number of several contenders, a line for each model.

    Args:
      models: Figures of races.
      ways: Column names, and whose numbers stand below.
      what: The key of the number.
      column: Its unit and form.
      title: The table's.
      **options: Further fields of the table.
    """
    columns = [named(column, name, way) for name, way in ways.items()]
    scale = {"MiB": _MIB, "ms": 1e-3}.get(column.unit, 1.0)
    rows = []
    for figures in models.values():
        of = figures["contenders"]
        cells: list[Value] = [
            scaled(of[name].get(what), scale) if name in of else None for name in ways.values()
        ]
        rows.append(Row(figures["title"], tuple(cells)))
    plot = Plot(tuple(ways), line=1.0 if what == "ratio" else None)
    return Table(title, "model", tuple(columns), tuple(rows), plot=plot, summary=True, **options)


def curve(
    points: Mapping[float, Mapping[str, Any]], axis: str, title: str, what: str, column: Column
) -> Table:
    """A number of each contender over a size, such as the batch."""
    names = list(dict.fromkeys(name for of in points.values() for name in of["contenders"]))
    columns = [named(column, name, name) for name in names]
    scale = {"MiB": _MIB, "ms": 1e-3}.get(column.unit, 1.0)
    rows = []
    for at, figures in points.items():
        of = figures["contenders"]
        cells = [scaled(of.get(name, {}).get(what), scale) for name in names]
        rows.append(Row(f"{at:g}", tuple(cells)))
    return Table(
        f"{title}: {column.name}",
        axis,
        tuple(columns),
        tuple(rows),
        plot=Plot(tuple(names), x=axis),
        summary=True,
    )


def named(column: Column, name: str, contender: str) -> Column:
    """The column of one contender's numbers."""
    return dataclasses.replace(column, name=name, ours=contender.startswith("fg."))


def scaled(value: Any, unit: float) -> float | None:
    """In this unit, if there is a number."""
    return None if value is None else value / unit
