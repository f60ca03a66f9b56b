"""What every task gives: tables of numbers.

A task is a ``Benchmark``, one line in ``TASKS`` of ``_report.py``: the names of its models,
``measure(model, options, progress)``, which gives plain JSON, and ``tables(models)``, which makes
``Table``s of the JSON of all models.  Terminal, markdown, page, pictures and the list of where
funcgrad loses are all made from these tables, and from nothing else.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Value = float | int | str | None
MARGIN = 1.05
"""Differences below this factor are the machine's, not a contender's."""
LITTLE = {"MiB": 1.0}
"""By unit, what is too little for its factor to matter."""


@dataclasses.dataclass(frozen=True)
class Column:
    """Numbers of one meaning and unit."""

    name: str
    unit: str = ""
    better: Literal["", "lower", "higher"] = ""
    form: str = ".1f"
    """As in ``format``."""
    detail: bool = False
    """Left out in the terminal, which is narrow."""
    ours: bool = False
    """Whether it holds the numbers of a contender of ours."""

    def text(self, value: Value) -> str:
        """A cell."""
        if value is None:
            return "–"
        return value if isinstance(value, str) else format(value, self.form)


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender, model or size, and its numbers in the order of the columns."""

    name: str
    values: tuple[Value, ...] = ()
    group: str = ""
    """What it computes; only rows of one group are compared."""
    ours: bool = False
    reason: str = ""
    """Why there are no numbers."""
    wrong: bool = False
    """Whether its numbers are wrong; a task with such a row fails."""


@dataclasses.dataclass(frozen=True)
class Plot:
    """What of a table is drawn: lines over a column, or a dot for each row, on log axes."""

    y: tuple[str, ...]
    x: str | None = None
    spread: tuple[str, str] | None = None
    """The columns between which half of the calls are."""
    line: float | None = None
    """A value to be seen at a glance, such as 1 for ratios."""
    log: bool = True


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under columns, and what is to be known about them."""

    title: str
    head: str
    """What a row is."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    plot: Plot | None = None
    compared: tuple[str, ...] = ()
    """The columns in which ours are compared with the others."""
    why: str = ""
    """Why ours are behind here, where they are."""
    summary: bool = False
    """Whether it spans the models of a task: shown first, and drawn for the README."""

    def column(self, name: str) -> Column:
        """A column by its name, the one of the rows' names included."""
        named = {column.name: column for column in self.columns}
        return Column(self.head, form="g") if name == self.head else named[name]

    def number(self, row: Row, name: str) -> float | None:
        """A row's number in a column, if it has one; of the first column, the row's name."""
        if name == self.head:
            return float(row.name)
        i = self.columns.index(self.column(name))
        value = row.values[i] if i < len(row.values) else None
        return None if value is None or isinstance(value, str) else float(value)


@dataclasses.dataclass(frozen=True)
class Loss:
    """The best of ours is behind the best of the others."""

    table: Table
    group: str
    column: Column
    ours: Row
    theirs: Row
    factor: float


def losses(tables: Sequence[Table]) -> list[Loss]:
    """Where funcgrad loses: by more than ``MARGIN``, in a column that is compared."""
    found = []
    for table in tables:
        for name in table.compared:
            column = table.column(name)
            sign = -1 if column.better == "higher" else 1
            for group in dict.fromkeys(row.group for row in table.rows):
                best = {}
                for ours in (True, False):
                    rows = [
                        (sign * value, row)
                        for row in table.rows
                        if (row.group, row.ours) == (group, ours) and not row.wrong
                        if (value := table.number(row, name)) is not None
                    ]
                    best[ours] = min(rows, key=lambda pair: pair[0], default=None)
                if best[True] is None or best[False] is None:
                    continue
                (mine, ours), (least, theirs) = best[True], best[False]
                a, b = (mine, least) if sign > 0 else (-least, -mine)
                # What the shown digits do not show is no difference.
                is_little = abs(mine) < LITTLE.get(column.unit, 0)
                if a > b * MARGIN and column.text(a) != column.text(b) and not is_little:
                    factor = a / b if b else float("inf")
                    found.append(Loss(table, group, column, ours, theirs, factor))
    return found


def of_losses(found: Sequence[Loss]) -> Table:
    """The losses as a table."""
    columns = (
        Column("of"),
        Column("what"),
        Column("funcgrad"),
        Column("behind", form=".2f"),
        Column("best", detail=True),
        Column("why", detail=True),
    )
    rows = []
    for loss in sorted(found, key=lambda loss: -loss.factor):
        cells = []
        for row in (loss.ours, loss.theirs):
            value = loss.table.number(row, loss.column.name)
            cells.append(f"{loss.column.text(value)} {loss.column.unit}".strip() + f", {row.name}")
        rows.append(
            Row(
                loss.table.title,
                (
                    loss.group,
                    loss.column.name,
                    cells[0],
                    loss.factor,
                    cells[1],
                    loss.table.why or None,
                ),
            )
        )
    note = (
        f"The best of funcgrad against the best of the others that give the same numbers, "
        f"where it is behind by more than {MARGIN - 1:.0%}. Of memory, whichever way is smallest. "
        "The plain gradient computes less; the tables say what is added to it."
    )
    return Table("Where funcgrad loses", "in", columns, tuple(rows), (note,))
