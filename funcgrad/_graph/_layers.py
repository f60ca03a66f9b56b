"""Rows for the children of a group, in an order with few crossings.

The method of Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical
system structures", 1981: longest paths give the rows, places are held for wires that pass a row,
and each row is sorted by where its neighbours stand, down and up in turn.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from funcgrad._graph._tree import IN, OUT, Ends

_SWEEPS = 6


@dataclasses.dataclass(frozen=True)
class Rows:
    """``rows`` of slots from the top; the slot ``s`` shows child ``s``, or passes a wire.

    Slots from ``len(children)`` on are passages of a wire, or the ends of those from and to
    the outside.  ``links`` join slots of neighbouring rows: upper, lower, and which of the
    group's pairs of children it belongs to.
    """

    rows: tuple[tuple[int, ...], ...]
    links: tuple[tuple[int, int, tuple[Ends, ...]], ...]
    inlet: int | None
    outlet: int | None


def layers(count: int, wires: Mapping[Ends, object]) -> Rows:
    """The rows of ``count`` children, which the keys of ``wires`` join."""
    inner = sorted((a, b) for a, b in wires if a >= 0 and b >= 0 and a != b)
    row = _rows(count, inner, {b for a, b in wires if a == IN})
    depth = max(row, default=0) + 1
    has_in, has_out = any(a == IN for a, _ in wires), any(b == OUT for _, b in wires)
    rows: list[list[int]] = [[] for _ in range(depth)]
    for child, at in enumerate(row):
        rows[at].append(child)
    slots = count
    inlet = outlet = None
    if has_in:
        rows, row = [[slots], *rows], [at + 1 for at in row]
        inlet, slots = slots, slots + 1
    if has_out:
        rows = [*rows, [slots]]
        outlet, slots = slots, slots + 1

    links: dict[tuple[int, int], list[Ends]] = {}
    passages: dict[tuple[int, int], int] = {}  # one for all wires from a child through a row
    for a, b in sorted(wires, key=lambda ends: (ends[0] < 0, ends)):
        if a == b:
            continue
        upper = inlet if a == IN else a
        lower = outlet if b == OUT else b
        assert upper is not None and lower is not None
        first = 0 if a == IN else row[a]
        last = len(rows) - 1 if b == OUT else row[b]
        at = upper
        for level in range(first + 1, last):
            if (upper, level) not in passages:
                passages[upper, level] = slots
                rows[level].append(slots)
                slots += 1
            links.setdefault((at, passages[upper, level]), []).append((a, b))
            at = passages[upper, level]
        links.setdefault((at, lower), []).append((a, b))
    ordered = _sorted(rows, list(links))
    return Rows(
        tuple(map(tuple, ordered)),
        tuple((a, b, tuple(ends)) for (a, b), ends in links.items()),
        inlet,
        outlet,
    )


def _rows(count: int, wires: Sequence[Ends], fed: set[int]) -> list[int]:
    """The row of each child: below all that it reads; what reads nothing just above its reader."""
    row = [0] * count
    readers: dict[int, list[int]] = {}
    sources = set(fed)
    for a, b in wires:  # children stand in an order in which they can run
        readers.setdefault(a, []).append(b)
        sources.add(b)
    for child in range(count):
        for reader in readers.get(child, ()):
            row[reader] = max(row[reader], row[child] + 1)
    for child in range(count):
        if child not in sources and child in readers:
            row[child] = max(0, min(row[r] for r in readers[child]) - 1)
    return row


def _sorted(rows: list[list[int]], links: Sequence[tuple[int, int]]) -> list[list[int]]:
    above: dict[int, list[int]] = {}
    below: dict[int, list[int]] = {}
    for a, b in links:
        below.setdefault(a, []).append(b)
        above.setdefault(b, []).append(a)
    best, fewest = [list(r) for r in rows], _crossings(rows, below)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        levels = range(1, len(rows)) if down else range(len(rows) - 2, -1, -1)
        for level in levels:
            fixed = rows[level - 1 if down else level + 1]
            rows[level] = _by_neighbours(rows[level], fixed, above if down else below)
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = [list(r) for r in rows], crossings
    return best


def _by_neighbours(
    row: Sequence[int], fixed: Sequence[int], neighbours: Mapping[int, Sequence[int]]
) -> list[int]:
    """A row sorted by the mean place of each slot's neighbours in the row that stays."""
    place = {slot: i for i, slot in enumerate(fixed)}
    wanted = {}
    for i, slot in enumerate(row):
        found = [place[other] for other in neighbours.get(slot, ()) if other in place]
        wanted[slot] = sum(found) / len(found) if found else i * len(fixed) / len(row)
    return sorted(row, key=wanted.__getitem__)


def _crossings(rows: Sequence[Sequence[int]], below: Mapping[int, Sequence[int]]) -> int:
    total = 0
    for upper, lower in zip(rows, rows[1:], strict=False):
        place = {slot: i for i, slot in enumerate(lower)}
        ends: list[int] = []
        for slot in upper:
            new = sorted(place[other] for other in below.get(slot, ()) if other in place)
            total += sum(end > other for other in new for end in ends)
            ends += new
    return total
