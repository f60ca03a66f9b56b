"""A drawing as the text of an SVG file."""

import importlib.resources
from collections.abc import Iterator

from funcgrad._graph._place import PASSAGE, Placed, place
from funcgrad._graph._scene import LINE, PAD, Scene
from funcgrad._graph._tree import Item
from funcgrad._graph._words import clipped, escape

TOP, BETWEEN = 64.0, 36.0
STYLE = importlib.resources.files("funcgrad._graph").joinpath("graph.css").read_text("utf-8")


def svg(scene: Scene) -> str:
    """The text of an SVG file: the parts side by side, large groups closed."""
    roots = [scene.number[part] for part in scene.parts]
    placed = [place(scene, root) for root in roots]
    drawn: list[str] = []
    x = PAD
    for root, box in zip(roots, placed, strict=True):
        drawn += _item(scene, root, box, x, TOP, 0)
        x += box.width + BETWEEN
    words = [scene.totals]
    if scene.no_backward:
        words.append(f"no backward pass: {scene.no_backward}")
    width = max(x - BETWEEN + PAD, 420.0, max(map(len, words)) * 6.4 + 24)
    height = TOP + max(box.height for box in placed) + PAD
    head = [_text(12.0, 24.0, "big", clipped(scene.title, 100))]
    head += [_text(12.0, 42.0 + 15 * i, "sub", clipped(line, 160)) for i, line in enumerate(words)]
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    dark = STYLE.partition(".g.dark{")[2].partition("}")[0]
    style = f"{STYLE}@media(prefers-color-scheme:dark){{.g{{{dark}}}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} class="g" role="img">\n'
        f"<title>{escape(scene.title)}: {escape(scene.totals)}</title>\n<style>{style}</style>\n"
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="6" '
        'markerHeight="6" orient="auto"><path class="tip" d="M0 0L6 3L0 6z"/></marker></defs>\n'
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>\n'
        + "\n".join([*head, *drawn])
        + "\n</svg>\n"
    )


def classes(item: Item, depth: int) -> str:
    """What an item looks like, in the names of the style sheet."""
    node = item.node
    if node is None or item.children:  # a part may be empty
        found = ["group", item.kind, "open" if item.open else "closed"]
        found += ["odd"] if depth % 2 == 0 else []
        return " ".join(found)
    found = [item.kind]
    if node.operation in ("dot_general", "conv_general_dilated"):
        found.append("heavy")
    elif node.operation.startswith(("reduce_", "cum", "arg")):
        found.append("sum")
    elif not node.flops and not node.is_end:
        found.append("move")
    found += ["keeps"] if node.saved else []
    found += ["aside"] if node.for_backward else []
    return " ".join(found)


def _item(scene: Scene, number: int, box: Placed, x: float, y: float, depth: int) -> Iterator[str]:
    item, words = scene.items[number], scene.words[number]
    told = "\n".join(f"{key}: {value}" if key else value for key, value in words.details)
    yield f'<g class="{classes(item, depth)}" transform="translate({x:.1f} {y:.1f})">'
    yield (
        f'<title>{escape(told)}</title><rect class="box" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="{5 if item.kind != "end" else 11}"/>'
    )
    if not box.slots:
        for i, (style, text) in enumerate(words.lines):
            yield _text(PAD, PAD / 2 + LINE * (i + 0.75), style, text)
    else:
        yield _text(PAD, PAD / 2 + LINE * 0.75, "title", words.head)
        yield from _wires(scene, number, box)
        for slot, (left, top, inner) in box.slots.items():
            if inner is not None:
                child = scene.number[item.children[slot]]
                yield from _item(scene, child, inner, left, top, depth + 1)
    yield "</g>"


def _wires(scene: Scene, number: int, box: Placed) -> Iterator[str]:
    item = scene.items[number]
    for a, b, ends in scene.rows[number].links:
        (ax, ay, upper), (bx, by, lower) = box.slots[a], box.slots[b]
        ax += PASSAGE / 2 if upper is None else upper.exit
        bx += PASSAGE / 2 if lower is None else lower.entry
        ay += 0.0 if upper is None else upper.height
        low = box.row_bottom[a]
        bend = (low + by) / 2
        tip = ' marker-end="url(#tip)"' if lower is not None and not lower.slots else ""
        curve = f"C{ax:.1f} {bend:.1f} {bx:.1f} {bend:.1f} {bx:.1f} {by:.1f}"
        way = f"M{ax:.1f} {ay:.1f}V{low:.1f}{curve}"
        told = escape(carried(item, ends))
        yield f'<path class="wire" d="{way}"{tip}><title>{told}</title></path>'


def carried(item: Item, ends: tuple[tuple[int, int], ...]) -> str:
    """What a wire between children of a group carries, and what it passes."""
    said: dict[str, None] = {}
    for pair in ends:
        for wire in item.wires[pair]:
            via = f" through {', '.join(wire.via)}" if wire.via else ""
            said[f"{wire.value}{via}"] = None
    return "\n".join(list(said)[:6])


def _text(x: float, y: float, style: str, text: str) -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:.1f}">{escape(text)}</text>'
