"""Plots on the page: dots in HTML, which fit any width, and lines in SVG."""

import math
from collections.abc import Callable, Sequence
from html import escape

from funcgrad.bench._tables import Column, Plot, Row, Table

_WIDTH, _HEIGHT = 400, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 40


class Axis:
    """From numbers to shares of a length, and the numbers to write beside it."""

    def __init__(self, values: Sequence[float], log: bool = True) -> None:
        self.log = log and all(value > 0 for value in values)
        low, high = (min(values), max(values)) if values else (1.0, 1.0)
        if self.log:
            # Some room at both ends, so that no dot is cut.
            pad = max((high / low) ** 0.04, 1.1)
            self.low, self.high = math.log(low / pad), math.log(high * pad)
        else:
            pad = 0.05 * (high - low) or 1.0
            self.low, self.high = min(low, 0.0), high + pad

    def share(self, value: float) -> float:
        """Where a number stands, from 0 to 1."""
        at = math.log(value) if self.log else value
        return (at - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers, a few."""
        if not self.log:
            return _multiples(self.low, self.high, most)
        low, high = math.exp(self.low), math.exp(self.high)
        if high < 5 * low:
            return _multiples(low, high, most)
        low, high = self.low / math.log(10), self.high / math.log(10)
        decades = range(math.floor(low), math.ceil(high) + 1)
        for steps in ((1, 2, 5), (1, 3), (1,)):
            ticks = [n * 10.0**d for d in decades for n in steps]
            ticks = [t for t in ticks if self.low <= math.log(t) <= self.high]
            if len(ticks) <= most:
                return ticks
        return ticks[:: math.ceil(len(ticks) / most)]


def dots(table: Table) -> str:
    """A line for each row, with a dot for each of the columns that are plotted."""
    plot = table.plot
    assert plot is not None
    rows = [row for row in table.rows if not row.reason]
    values = [v for row in rows for name in plot.y if (v := table.number(row, name)) is not None]
    if plot.spread:
        ends = [table.number(row, name) for row in rows for name in plot.spread]
        values += [end for end in ends if end is not None]
    if not values:
        return ""
    axis = Axis([*values, plot.line] if plot.line else values, plot.log)
    body = "".join(_dots_of(table, row, plot, axis) for row in rows)
    marks = "".join(
        f'<span style="left:{100 * axis.share(tick):.2f}%">{tick:g}</span>'
        for tick in axis.ticks(most=5)
    )
    unit = table.column(plot.y[0]).unit
    label = plot.y[0] if len(plot.y) == 1 else ""
    words = escape(", ".join(filter(None, (label, unit, "log scale" if axis.log else ""))))
    kinds = [(name, _kind(i, table.column(name))) for i, name in enumerate(plot.y)]
    legend = _legend(kinds) if len(kinds) > 1 else ""
    return (
        f'<div class="dots" role="img" aria-label="plot of the table below">{legend}{body}'
        f'<div class="row axis"><span></span><span class="track">{marks}</span></div>'
        f'<p class="note">{words}</p></div>'
    )


def _dots_of(table: Table, row: Row, plot: Plot, axis: Axis) -> str:
    marks = []
    if plot.line is not None:
        marks.append(f'<i class="line" style="left:{100 * axis.share(plot.line):.2f}%"></i>')
    if plot.spread:
        low, high = (table.number(row, name) for name in plot.spread)
        if low is not None and high is not None:
            a, b = 100 * axis.share(low), 100 * axis.share(high)
            marks.append(f'<i class="spread" style="left:{a:.2f}%;width:{b - a:.2f}%"></i>')
    for i, name in enumerate(plot.y):
        if (value := table.number(row, name)) is None:
            continue
        column = table.column(name)
        kind = _kind(i, column) if len(plot.y) > 1 else "mine" if row.ours else "other"
        tip = f"{row.name}: {_words(column, value)}"
        marks.append(
            f'<b class="{kind}" style="left:{100 * axis.share(value):.2f}%"'
            f' data-tip="{escape(tip)}"></b>'
        )
    name = escape(row.name)
    return (
        f'<div class="row{" ours" if row.ours else ""}"><span class="name" title="{name}">{name}'
        f'</span><span class="track">{"".join(marks)}</span></div>'
    )


def lines(table: Table) -> str:
    """Columns over another column; of several groups, only ours are joined by a line."""
    plot = table.plot
    assert plot is not None and plot.x is not None
    rows = [row for row in table.rows if not row.reason and table.number(row, plot.x) is not None]
    groups = list(dict.fromkeys(row.group for row in rows))
    series: list[tuple[str, str, list[tuple[float, float, str]]]] = []
    for name in plot.y:
        column = table.column(name)
        for group in groups:
            points = []
            for row in rows:
                x, y = table.number(row, plot.x), table.number(row, name)
                if row.group == group and x is not None and y is not None:
                    at = _words(table.column(plot.x), x)
                    label = group and f"{row.name}: "
                    points.append((x, y, f"{label}{_words(column, y)} at {at}"))
            ours = column.ours or any(row.ours for row in rows if row.group == group)
            kind = "ours" if ours else "others" if len(groups) == 1 else "alone"
            series.append((group or name, f"s{len(series)} {kind}", sorted(points)))
    series = [of for of in series if of[2]]
    if not series:
        return ""
    across = Axis([x for _, _, points in series for x, _, _ in points], plot.log)
    up = Axis([y for _, _, points in series for _, y, _ in points], plot.log)
    px = lambda x: _LEFT + across.share(x) * (_WIDTH - _LEFT - _RIGHT)
    py = lambda y: _HEIGHT - _BOTTOM - up.share(y) * (_HEIGHT - _TOP - _BOTTOM)
    drawn = "".join(_series(*of, px, py) for of in series)
    xs = table.column(plot.x)
    y_column = table.column(plot.y[0])
    at = sorted({x for _, _, points in series for x, _, _ in points})
    ticks = at if across.log and len(at) <= 7 else across.ticks()
    grid = "".join(
        f'<line x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
        f'<text x="{px(x):.1f}" y="{_HEIGHT - _BOTTOM + 14}" text-anchor="middle">{x:g}</text>'
        for x in ticks
    ) + "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{py(y) + 4:.1f}" text-anchor="end">{_tick(y_column, y)}</text>'
        for y in up.ticks()
    )
    name = escape(f"{xs.name} {xs.unit}".strip())
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(table.title)}">'
        f'<g class="grid">{grid}</g>'
        f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{name}</text>'
        f'<text x="4" y="{_TOP + 4}" class="unit">{escape(y_column.unit)}</text>'
        f"{drawn}</svg>{_legend([of[:2] for of in series])}"
    )


def _series(
    name: str,
    kind: str,
    points: list[tuple[float, float, str]],
    px: Callable[[float], float],
    py: Callable[[float], float],
) -> str:
    places = [(px(x), py(y), tip) for x, y, tip in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    circles = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" data-tip="{escape(f"{name}: {tip}")}"/>'
        for x, y, tip in places
    )
    return f'<g class="{kind}"><polyline points="{path}"/>{circles}</g>'


def _kind(i: int, column: Column) -> str:
    return f"s{i} {'ours' if column.ours else 'others'}"


def _legend(series: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f'<span><i class="{kind}"></i>{escape(name)}</span>' for name, kind in series)
    return f'<p class="legend">{keys}</p>'


def _words(column: Column, value: float) -> str:
    return f"{column.name} {column.text(value)} {column.unit}".strip()


def _tick(column: Column, value: float) -> str:
    return f"{value:.0%}" if column.form.endswith("%") else f"{value:g}"


def _multiples(low: float, high: float, most: int) -> list[float]:
    step = _round_up((high - low) / most)
    return [i * step for i in range(math.ceil(low / step), int(high / step) + 1)]


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= value)
