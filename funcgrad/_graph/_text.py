"""The graph as a table, indented by modules and loops."""

from funcgrad._graph._scene import Scene, times
from funcgrad._graph._tree import Item
from funcgrad._graph._words import clipped, one_line, size_text

_MOST = 400  # lines with all groups open; beyond, large ones are closed


def text(scene: Scene) -> str:
    """One line for each operation, group, argument and result, in the order they run."""
    everything = len(scene.items) <= _MOST
    lines: list[str] = [f"{scene.title}: {scene.totals}"]
    if scene.no_backward:
        lines.append(f"no backward pass: {scene.no_backward}")
    for part in scene.parts:
        sources: dict[int, list[int]] = {}
        _collect(part, sources)
        rows: list[tuple[str, ...]] = []
        for child in part.children:
            _rows(child, 1, everything, sources, rows)
        drawn = part.total(lambda node: node.saved)
        hidden = sum(n.saved for n in scene.nodes if n.part == part.label) - drawn
        if hidden:
            rows.append(("  arguments and constants", "", "", f"saves {size_text(hidden)}", ""))
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(5)]
        lines += ["", part.label]
        lines += [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
    return "\n".join(lines)


def _collect(item: Item, sources: dict[int, list[int]]) -> None:
    """The drawn nodes that each node reads, from the wires of all groups."""
    for wires in item.wires.values():
        for wire in wires:
            found = sources.setdefault(wire.target, [])
            if wire.source not in found:
                found.append(wire.source)
    for child in item.children:
        _collect(child, sources)


def _rows(
    item: Item,
    depth: int,
    everything: bool,
    sources: dict[int, list[int]],
    rows: list[tuple[str, ...]],
) -> None:
    indent = "  " * depth
    saved = item.total(lambda node: node.saved)
    kept = f"saves {size_text(saved)}" if saved else ""
    if item.children:
        own = f"{item.node.id} " if item.kind == "kernel" and item.node else ""
        label = f"{indent}{own}{clipped(item.label, 50)}{times(item)}"
        if everything or item.open:
            rows.append((label, "", "", kept, ""))
            for child in item.children:
                _rows(child, depth + 1, everything, sources, rows)
        else:
            count = len([leaf for leaf in item.leaves() if leaf.kind == "op"])
            rows.append((f"{label} ({count} operations)", "", "", kept, ""))
        return
    node = item.node
    assert node is not None
    told = f"{item.label} {node.name if node.name != item.label else ''} {node.detail}"
    label = f"{indent}{node.id} {clipped(' '.join(told.split()), 48)}"
    reads = [str(source) for source in sources.get(node.id, ())]
    reads += [one_line(f"{_MARK[chip.kind]}{chip.text}") for chip in item.chips]
    type_text = ", ".join(map(str, node.outputs[:3])) + (", …" if len(node.outputs) > 3 else "")
    line = f"{node.line.file.rpartition('/')[2]}:{node.line.line}" if node.line else ""
    rows.append((label, type_text, ", ".join(reads), kept, line))


_MARK = {"reads": "", "kept": "kept ", "gradient": "→ gradient "}
