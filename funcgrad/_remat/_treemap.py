"""A treemap: rectangles whose areas are bytes, drawn as SVG."""

import html
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from funcgrad._remat._values import SavedTensor

Box: TypeAlias = tuple[float, float, float, float]  # left, top, width, height

_PALETTE = (
    "#4e79a7", "#f28e2b", "#76b7b2", "#e15759", "#59a14f", "#b07aa1", "#edc948", "#9c755f",
)  # fmt: skip
_ARGUMENT, _CONSTANT, _OTHER = "#dfe3e8", "#f3ecd9", "#a8adb3"
_HEAD, _FOOT, _FRAME = 34, 30, 17
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MOST = 400  # rectangles; the smallest values beyond are drawn as one


def treemap(tensors: Sequence[SavedTensor], width: int, height: int, title: str) -> str:
    """The text of an SVG file in which each value is a rectangle within its module's frame."""
    total = sum(tensor.bytes for tensor in tensors)
    computed = sum(tensor.bytes for tensor in tensors if tensor.kind == "computed")
    head = (
        f"{title}{': ' if title else ''}{size_text(total)} saved for backward, "
        f"{size_text(computed)} of it computed"
    )
    colours = _colours(tensors)
    drawn = [_text(10.0, 22, head, 15, "#20262e")]
    groups: dict[str, list[SavedTensor]] = {}
    for tensor in tensors:
        if tensor.bytes:
            groups.setdefault(_group(tensor), []).append(tensor)
    ordered = sorted(groups.items(), key=lambda item: (-_sum(item[1]), item[0]))
    room = max(1, _MOST // max(1, len(ordered)))
    area = (6.0, float(_HEAD), width - 12.0, float(height - _HEAD - _FOOT))
    boxes = _squarify([_sum(group) for _, group in ordered], area)
    for (name, group), box in zip(ordered, boxes, strict=True):
        drawn += _draw_group(name, group, box, colours, room)
    drawn += _legend(colours, tensors, width, height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def _sum(group: Sequence[SavedTensor]) -> int:
    return sum(tensor.bytes for tensor in group)


def _group(tensor: SavedTensor) -> str:
    """The frame that a value stands in: its module, else the function whose line made it."""
    if tensor.kind != "computed":
        return f"{tensor.kind}s"
    if tensor.path:
        return tensor.path
    return tensor.line.function.rpartition(".")[2] if tensor.line else "computed"


def _colours(tensors: Sequence[SavedTensor]) -> dict[str, str]:
    """A colour for each of the operations that keep the most."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.kind == "computed":
            sizes[tensor.operation] = sizes.get(tensor.operation, 0) + tensor.bytes
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))
    return dict(zip(largest, _PALETTE, strict=False))


def _fill(tensor: SavedTensor, colours: dict[str, str]) -> str:
    if tensor.kind == "computed":
        return colours.get(tensor.operation, _OTHER)
    return _ARGUMENT if tensor.kind == "argument" else _CONSTANT


def _draw_group(
    name: str, group: list[SavedTensor], box: Box, colours: dict[str, str], room: int
) -> list[str]:
    left, top, width, height = box
    drawn = [_rect(box, "#f7f8fa", "#8a929c")]
    inner = (left + 2, top + 2, width - 4, height - 4)
    if height > 3 * _FRAME and width > 40:
        label = f"{name}  {size_text(_sum(group))}"
        fits = _width(label, 11) <= width - 8
        shown = label if fits else _clip(name, width - 8, 11, keep_end=True)
        drawn.append(_text(left + 5, top + 13, shown, 11, "#3b434d"))
        inner = (left + 2, top + _FRAME, width - 4, height - _FRAME - 2)
    if inner[2] <= 0 or inner[3] <= 0:
        return drawn
    ordered = sorted(group, key=lambda tensor: (-tensor.bytes, tensor.what))
    shown, rest = ordered[:room], ordered[room:]
    sizes = [tensor.bytes for tensor in shown] + ([_sum(rest)] if rest else [])
    places = _squarify(sizes, inner)
    for tensor, place in zip(shown, places, strict=False):
        drawn += _draw_tensor(tensor, place, _fill(tensor, colours))
    if rest:
        drawn.append(_rect(places[-1], _OTHER, "white"))
    return drawn


def _draw_tensor(tensor: SavedTensor, box: Box, fill: str) -> list[str]:
    left, top, width, height = box
    shape = f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
    trips = f"{tensor.trips} trips" if tensor.trips != 1 else ""
    lines = [_label(tensor), size_text(tensor.bytes), shape, trips]
    said = [tensor.what, *lines[1:], tensor.operation, tensor.path, str(tensor.line or "")]
    note = _escape(" | ".join(word for word in said if word))
    drawn = [_rect(box, fill, "white", note)]
    ink = "white" if fill in _PALETTE and fill != "#edc948" else "#20262e"
    for i, line in enumerate(filter(None, lines)):
        baseline = 13 + 13 * i
        clipped = _clip(line, width - 7, 11)
        if baseline + 3 > height or not clipped:
            break
        drawn.append(_text(left + 4, top + baseline, clipped, 11, ink))
    return drawn


def _legend(
    colours: dict[str, str], tensors: Sequence[SavedTensor], width: int, height: int
) -> list[str]:
    kinds = {tensor.kind for tensor in tensors}
    keys = list(colours.items())
    if any(t.kind == "computed" and t.operation not in colours for t in tensors):
        keys.append(("other operations", _OTHER))
    keys += [("argument", _ARGUMENT)] if "argument" in kinds else []
    keys += [("constant", _CONSTANT)] if "constant" in kinds else []
    drawn, left = [], 10.0
    for name, colour in keys:
        if left + 20 + _width(name, 11) > width:
            break
        drawn.append(_rect((left, height - 20.0, 11.0, 11.0), colour, "#8a929c"))
        drawn.append(_text(left + 16, height - 10, name, 11, "#3b434d"))
        left += 34 + _width(name, 11)
    return drawn


def _squarify(sizes: Sequence[int], box: Box) -> list[Box]:
    """Boxes within ``box`` of areas in proportion to ``sizes``, kept close to squares.

    Largest first, row by row along the shorter side, a row as long as its worst aspect
    ratio improves: Bruls, Huizing and van Wijk, "Squarified treemaps", 2000.
    """
    left, top, width, height = box
    total = sum(sizes)
    if not total:
        return [(left, top, 0.0, 0.0) for _ in sizes]
    areas = [size * width * height / total for size in sizes]
    boxes: list[Box] = []
    while areas:
        side = min(width, height)
        count = 1
        while count < len(areas) and _worst(areas[: count + 1], side) <= _worst(
            areas[:count], side
        ):
            count += 1
        row, areas = areas[:count], areas[count:]
        thick = sum(row) / side if side else 0.0
        offset = 0.0
        for area in row:
            long = area / thick if thick else 0.0
            if width >= height:
                boxes.append((left, top + offset, thick, long))
            else:
                boxes.append((left + offset, top, long, thick))
            offset += long
        if width >= height:
            left, width = left + thick, max(width - thick, 0.0)
        else:
            top, height = top + thick, max(height - thick, 0.0)
    return boxes


def _worst(row: list[float], side: float) -> float:
    total = sum(row)
    if not total or not side or not min(row):
        return float("inf")
    return max(side**2 * max(row) / total**2, total**2 / (side**2 * min(row)))


def size_text(size: int) -> str:
    """Bytes for people, ``1.5 MiB``."""
    if size < 1024:
        return f"{size} B"
    power = 1 if size < 1024**2 else 2 if size < 1024**3 else 3
    return f"{size / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def _width(text: str, size: int) -> float:
    return 0.58 * size * len(text)


def _clip(text: str, width: float, size: int, keep_end: bool = False) -> str:
    """As much of ``text`` as fits, with dots where it is cut; nothing below three letters."""
    if _width(text, size) <= width:
        return text
    count = int(width / _width("x", size)) - 1
    if count < 3:
        return ""
    return "…" + text[-count:] if keep_end else text[:count] + "…"


def _label(tensor: SavedTensor) -> str:
    """What it is, in few letters: of an argument's path the last two keys."""
    if tensor.name or not tensor.argument:
        return tensor.what
    keys = re.findall(r"\w+", tensor.argument)
    return "/".join(keys[-2:])


def _rect(box: Box, fill: str, stroke: str, note: str = "") -> str:
    left, top, width, height = (f"{value:.1f}" for value in box)
    shape = (
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" '
        f'fill="{fill}" stroke="{stroke}"'
    )
    return f"{shape}><title>{note}</title></rect>" if note else f"{shape}/>"


def _text(left: float, baseline: float | int, text: Any, size: int, fill: str) -> str:
    place = f'x="{left:.1f}" y="{baseline:.1f}"'
    return f'<text {place} font-size="{size}" fill="{fill}">{_escape(str(text))}</text>'


def _escape(text: str) -> str:
    """Text as XML holds it; a character that XML has no way to write becomes U+FFFD."""
    return html.escape(_NOT_XML.sub("\ufffd", text))
