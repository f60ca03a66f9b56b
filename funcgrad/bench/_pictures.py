"""Pictures of a task's summaries, for the README."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funcgrad.bench._page_plots import Axis
from funcgrad.bench._tables import Table

_COLUMNS = 3


def draw(tables: Sequence[Table], file: Path) -> None:
    """Draw the summaries that have a plot; if none has, the plots of all tables.

    Args:
      tables: A task's.
      file: The picture, which is not written if there is nothing to draw.
    """
    from matplotlib.figure import Figure

    drawn = [t for t in tables if t.plot and t.summary] or [t for t in tables if t.plot]
    dots = [table for table in drawn if table.plot and table.plot.x is None]
    lines = [table for table in drawn if table.plot and table.plot.x is not None]
    if not drawn:
        return
    rows = math.ceil(len(lines) / _COLUMNS)
    heights = [1.0 + 0.24 * max(len(table.rows), len(table.columns)) for table in dots]
    heights += [2.6] * rows
    figure = Figure(figsize=(10.5, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for table, part in zip(dots, parts, strict=False):
        _dots(table, part.subplots())
    for i, part in enumerate(parts[len(dots) :]):
        panels = part.subplots(1, _COLUMNS, squeeze=False)[0]
        for table, axes in zip(lines[i * _COLUMNS :], panels, strict=False):
            _lines(table, axes)
        for axes in panels[len(lines) - i * _COLUMNS :]:
            axes.set_axis_off()
    figure.savefig(file, dpi=110)


def _dots(table: Table, axes: Any) -> None:
    plot = table.plot
    assert plot is not None
    seen = [plot.line] if plot.line else []
    for name in plot.y:
        numbers = [(table.number(row, name), i) for i, row in enumerate(table.rows)]
        at = [(v, i) for v, i in numbers if v is not None]
        if at:
            marker = "o" if table.column(name).ours else "s"
            axes.plot(*zip(*at, strict=True), marker, label=name, alpha=0.8, markersize=6)
            seen += [v for v, _ in at]
    axes.set_yticks(range(len(table.rows)), [row.name for row in table.rows])
    axes.invert_yaxis()
    _scale(axes.xaxis, seen, plot.log)
    axes.set_xlabel(table.column(plot.y[0]).unit, fontsize=8)
    if axes.lines:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if plot.line is not None:
        axes.axvline(plot.line, color="0.5", linestyle="--", linewidth=1)
    _finish(table, axes)


def _lines(table: Table, axes: Any) -> None:
    plot = table.plot
    assert plot is not None and plot.x is not None
    groups = dict.fromkeys(row.group for row in table.rows)
    seen: list[tuple[float, float]] = []
    for name in plot.y:
        for group in groups:
            rows = [row for row in table.rows if row.group == group and not row.reason]
            pairs = [(table.number(row, plot.x), table.number(row, name)) for row in rows]
            at = sorted((x, y) for x, y in pairs if x is not None and y is not None)
            if not at:
                continue
            ours = table.column(name).ours or any(row.ours for row in rows)
            style = "o-" if ours else "s--" if len(groups) == 1 else "s"
            axes.plot(*zip(*at, strict=True), style, label=group or name, markersize=4)
            seen += at
    _scale(axes.xaxis, [x for x, _ in seen], plot.log)
    _scale(axes.yaxis, [y for _, y in seen], plot.log)
    xs, ys = table.column(plot.x), table.column(plot.y[0])
    axes.set_xlabel(f"{xs.name} {xs.unit}".strip(), fontsize=8)
    axes.set_ylabel(ys.unit or ys.name, fontsize=8)
    if axes.lines:
        axes.legend(fontsize=6 if len(axes.lines) <= 5 else 4.5, framealpha=0.5)
    _finish(table, axes)


def _scale(axis: Any, values: Sequence[float], log: bool) -> None:
    """The same ticks as on the page."""
    if not log or not values or min(values) <= 0:
        return
    from matplotlib.ticker import NullLocator

    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
    ticks = Axis(values).ticks()
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


def _finish(table: Table, axes: Any) -> None:
    axes.set_title(table.title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
