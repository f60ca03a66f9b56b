"""What text, drawing and page show: the parts as trees, with the words in each box."""

import dataclasses
from collections.abc import Sequence

from funcgrad._graph._data import Edge, Node, Part, Saved
from funcgrad._graph._layers import Rows, layers
from funcgrad._graph._splice import TRIVIAL, splice
from funcgrad._graph._tree import Item, tree
from funcgrad._graph._words import clipped, flops_text, one_line, size_text

BUDGET = 40  # boxes of one part that are drawn to begin with
CHARACTER, LINE, PAD = 6.65, 15.0, 8.0  # of the letters in a box, in pixels
_LONGEST = 38
_MOST_CHIPS = 3


@dataclasses.dataclass(frozen=True)
class Words:
    """The lines in a box, each with its style, and what is said about it in full."""

    lines: tuple[tuple[str, str], ...]
    head: str  # above an open group
    details: tuple[tuple[str, str], ...]

    @property
    def width(self) -> float:
        """Of the box of a node or a closed group."""
        longest = max((len(text) for _, text in self.lines), default=0)
        return max(longest * CHARACTER + 2 * PAD, 44.0)

    @property
    def height(self) -> float:
        """Of the box of a node or a closed group."""
        return len(self.lines) * LINE + PAD

    @property
    def head_width(self) -> float:
        """What an open group needs at the least."""
        return len(self.head) * CHARACTER + 2 * PAD


@dataclasses.dataclass(frozen=True, eq=False)
class Scene:
    """A graph ready to be shown; items are numbered in the order of the tree."""

    title: str
    parts: tuple[Item, ...]
    items: tuple[Item, ...]
    words: tuple[Words, ...]
    rows: dict[int, Rows]
    number: dict[Item, int]
    no_backward: str
    totals: str
    nodes: Sequence[Node]


def scene(
    nodes: Sequence[Node],
    edges: Sequence[Edge],
    saved: Sequence[Saved],
    title: str,
    no_backward: str,
) -> Scene:
    """Group, open and describe the nodes."""
    spliced = splice(nodes, edges)
    present = ("forward", "backward") if not no_backward else ("forward",)
    parts = tuple(tree(spliced, nodes, part) for part in present)
    items: list[Item] = []

    def visit(item: Item) -> None:
        items.append(item)
        for child in item.children:
            visit(child)

    for part in parts:
        _open(part)
        visit(part)
    number = {item: i for i, item in enumerate(items)}
    rows = {
        i: layers(len(item.children), item.wires) for i, item in enumerate(items) if item.children
    }
    words = tuple(_words(item, nodes) for item in items)
    totals = _totals(nodes, saved, no_backward)
    shown = one_line(title)
    return Scene(
        shown, parts, tuple(items), words, rows, number, one_line(no_backward), totals, nodes
    )


def _open(part: Item) -> None:
    """Open groups from the outside in, as long as what is seen stays readable."""
    part.open = True
    seen, row = len(part.children), [part]
    while row:
        inner = [child for item in row for child in item.children if child.children]
        row = []
        for item in sorted(inner, key=lambda item: -item.flops):
            more = len(item.children) - 1
            if item.kind not in ("extra", "kernel") and seen + more <= BUDGET:
                item.open = True
                seen += more
                row.append(item)


def _totals(nodes: Sequence[Node], saved: Sequence[Saved], no_backward: str) -> str:
    words = []
    for part in ("forward",) if no_backward else ("forward", "backward"):
        words.append(f"{part} {_count(nodes, part)}")
    if not no_backward:
        total = sum(kept.bytes for kept in saved)
        outside = ("argument", "constant")
        made = sum(k.bytes for k in saved if nodes[k.node].operation not in outside)
        words.append(f"{size_text(total)} saved for backward, {size_text(made)} of it computed")
    return "; ".join(words)


def _count(nodes: Sequence[Node], part: Part) -> str:
    own = [n for n in nodes if n.part == part]
    count = sum(not n.is_end and not n.holds for n in own)
    flops = sum(n.flops for n in own if n.parent is None)
    return f"{_plural(count, 'operation')}, {flops_text(flops)}"


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def times(item: Item) -> str:
    """How often a loop runs."""
    rounds = item.rounds if item.children else 1
    return "" if rounds == 1 else " ×?" if rounds is None else f" ×{rounds}"


def _words(item: Item, nodes: Sequence[Node]) -> Words:
    if item.node is None or item.children:
        return _group(item)
    node = item.node
    type_text = str(node.outputs[0]) if node.outputs else ""
    if len(node.outputs) > 1:
        type_text += f" +{len(node.outputs) - 1}"
    lines: list[tuple[str, str]] = []
    if node.is_end:
        said = {"seed": "cotangent", "gradient": "gradient of"}.get(node.operation, node.operation)
        lines.append(("title", clipped(f"{said} {node.name}".strip(), _LONGEST)))
    else:
        lines.append(("title", clipped(f"{item.label} {node.detail}".strip(), _LONGEST)))
        if node.name and node.name != item.label:
            lines.append(("name", clipped(node.name, _LONGEST)))
    lines.append(("type", clipped(type_text, _LONGEST)))
    for chip in item.chips[:_MOST_CHIPS]:
        mark = {"reads": "←", "kept": "◆", "gradient": "→ gradient"}[chip.kind]
        lines.append((chip.kind, clipped(f"{mark} {chip.text}", _LONGEST)))
    if more := len(item.chips) - _MOST_CHIPS:
        lines += [("reads", f"and {more} more")] if more > 0 else []
    if node.saved:
        lines.append(("saved", f"◆ saves {size_text(node.saved)}"))
    if node.operation in TRIVIAL and len(lines) > 2:
        lines = [line for line in lines if line[0] != "type"]
    return Words(tuple(lines), "", details(item, nodes))


def _group(item: Item) -> Words:
    leaves = [leaf for leaf in item.leaves() if leaf.node and not leaf.node.is_end]
    label = f"{one_line(item.label)}{times(item)}"
    lines = [("title", clipped(f"▸ {label}", _LONGEST))]
    lines.append(("type", _summary([leaf.label for leaf in leaves])))
    saved = item.total(lambda node: node.saved)
    if item.flops:
        lines.append(("type", flops_text(item.flops)))
    if saved:
        lines.append(("saved", f"◆ saves {size_text(saved)}"))
    head = f"▾ {clipped(label, 48)}" + (f"  ◆ {size_text(saved)}" if saved else "")
    full = [("", one_line(item.label)), ("kind", _KIND.get(item.kind, item.kind))]
    full += [("rounds", times(item)[2:] or "1")] if item.kind == "loop" else []
    full += [("operations", f"{len(leaves):,}"), ("all runs", flops_text(item.flops))]
    full += [("saved", size_text(saved))] if saved else []
    if item.node is not None and item.node.line is not None:
        full += [("line", str(item.node.line)), ("code", item.node.line.code)]
    return Words(tuple(lines), head, tuple(full))


_KIND = {
    "function": "calls of a function or module",
    "extra": "computed in the forward pass for the backward pass alone",
    "piece": "a stretch of a long program",
    "call": "nested program",
}


def _summary(labels: Sequence[str]) -> str:
    """Which operations a group holds: the two most frequent, matrix products first."""
    counts: dict[str, int] = {}
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
    heavy = ("matmul", "conv")
    ordered = sorted(counts, key=lambda label: (label not in heavy, -counts[label], label))
    if len(ordered) <= 2 and sum(counts.values()) <= 4:
        return clipped(", ".join(_often(counts[k], k) for k in ordered), 30)
    first = [f"{_often(counts[k], k)}, " for k in ordered[:1] if k in heavy]
    return clipped(f"{''.join(first)}{_plural(len(labels), 'operation')}", 30)


def _often(count: int, label: str) -> str:
    return label if count == 1 else f"{count} {label}"


def details(item: Item, nodes: Sequence[Node]) -> tuple[tuple[str, str], ...]:
    """Everything about one node."""
    node = item.node
    assert node is not None
    rows = [("", f"{node.operation} {node.name}".strip()), ("told", node.detail)]
    rows += [("type", str(value)) for value in node.outputs]
    if not node.is_end:
        rows.append(("bytes", f"{node.bytes:,}"))
        rows.append(("one run", flops_text(node.flops)))
        if node.trips != 1:
            rows.append(("runs", "not known" if node.trips is None else f"{node.trips:,}"))
    rows += [(_CHIPS[chip.kind], chip.text) for chip in item.chips]
    rows.append(("saved", f"{node.saved:,} bytes for backward" if node.saved else ""))
    rows.append(("", "computed for the backward pass alone" if node.for_backward else ""))
    rows.append(("scopes", node.path))
    if node.line is not None:
        rows += [("line", str(node.line)), ("code", node.line.code)]
    return tuple((key, one_line(value)) for key, value in rows if value)


_CHIPS = {"reads": "reads", "kept": "reads, kept", "gradient": "gives gradient"}
