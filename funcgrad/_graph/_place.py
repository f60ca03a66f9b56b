"""Where boxes and wires go, given which groups are open; ``page.js`` computes the same."""

import dataclasses
from collections.abc import Sequence

from funcgrad._graph._layers import Rows
from funcgrad._graph._scene import LINE, PAD, Scene

GAP_X, GAP_Y, PASSAGE, HEAD = 14.0, 22.0, 8.0, LINE + PAD
SWEEPS = 8
STRAIGHT = 4.0  # how much more a wire that passes a row wants to be straight


@dataclasses.dataclass
class Placed:
    """A box: its size, where wires enter and leave it, and what is inside an open group."""

    width: float
    height: float
    entry: float
    exit: float
    slots: dict[int, tuple[float, float, "Placed | None"]]  # left, top
    row_bottom: dict[int, float]  # by slot


def place(scene: Scene, number: int) -> Placed:
    """The box of an item, with all that is open in it."""
    item, words = scene.items[number], scene.words[number]
    if not item.children or not item.open:
        w, h = words.width, words.height
        return Placed(w, h, w / 2, w / 2, {}, {})
    rows = scene.rows[number]
    inside = [place(scene, scene.number[child]) for child in item.children]
    size = lambda slot: inside[slot].width if slot < len(inside) else PASSAGE
    left = _across(rows, [size(s) for s in range(_count(rows))], inside)
    shift = PAD - min(left.values())
    extent = max(left[s] + size(s) for s in left) + shift + PAD
    width = max(extent, words.head_width)
    shift += (width - extent) / 2

    top = HEAD if rows.inlet is not None else HEAD + PAD
    slots: dict[int, tuple[float, float, Placed | None]] = {}
    bottom: dict[int, float] = {}
    for row in rows.rows:
        high = max(inside[s].height if s < len(inside) else 0.0 for s in row)
        for slot in row:
            slots[slot] = left[slot] + shift, top, inside[slot] if slot < len(inside) else None
            bottom[slot] = top + high
        top += high + GAP_Y
    height = top - GAP_Y + (0.0 if rows.outlet is not None else PAD)
    middle = lambda slot: width / 2 if slot is None else slots[slot][0] + PASSAGE / 2
    return Placed(width, height, middle(rows.inlet), middle(rows.outlet), slots, bottom)


def _count(rows: Rows) -> int:
    return sum(map(len, rows.rows))


def _across(rows: Rows, width: Sequence[float], inside: Sequence[Placed]) -> dict[int, float]:
    """The left edge of each slot: near the slots that it is linked to, in the order of its row."""
    above: dict[int, list[int]] = {}
    below: dict[int, list[int]] = {}
    for a, b, _ in rows.links:
        below.setdefault(a, []).append(b)
        above.setdefault(b, []).append(a)
    left: dict[int, float] = {}
    for row in rows.rows:
        x = -(sum(width[s] for s in row) + GAP_X * (len(row) - 1)) / 2
        for slot in row:
            left[slot] = x
            x += width[slot] + GAP_X

    def entry(slot: int) -> float:
        return inside[slot].entry if slot < len(inside) else PASSAGE / 2

    def leaving(slot: int) -> float:
        return inside[slot].exit if slot < len(inside) else PASSAGE / 2

    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in rows.rows if down else rows.rows[::-1]:
            wanted, weights = [], []
            for slot in row:
                others = (above if down else below).get(slot, [])
                weight = total = 0.0
                for other in others:
                    passing = slot >= len(inside) and other >= len(inside)
                    heavy = STRAIGHT if passing else 1.0
                    at = left[other] + (leaving(other) if down else entry(other))
                    total += heavy * (at - (entry(slot) if down else leaving(slot)))
                    weight += heavy
                wanted.append(total / weight if weight else left[slot])
                weights.append(weight if weight else 0.1)
            for slot, x in zip(row, _apart(wanted, weights, [width[s] for s in row]), strict=True):
                left[slot] = x
    return left


def _apart(
    wanted: Sequence[float], weights: Sequence[float], width: Sequence[float]
) -> list[float]:
    """The positions nearest to ``wanted`` in which nothing overlaps, in the given order.

    Less the room that each needs to its left this is a regression that does not decrease:
    neighbours out of order share their mean.
    """
    room, offset = 0.0, []
    for w in width:
        offset.append(room)
        room += w + GAP_X
    blocks: list[list[float]] = []  # mean, weight, count
    for want, weight, less in zip(wanted, weights, offset, strict=True):
        blocks.append([want - less, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, w, n = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + mean * w) / (last[1] + w)
            last[1] += w
            last[2] += n
    means = [mean for mean, _, n in blocks for _ in range(int(n))]
    return [mean + less for mean, less in zip(means, offset, strict=True)]
