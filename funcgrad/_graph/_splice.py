"""What is drawn, and what becomes part of a wire or a line in a box."""

import dataclasses
import re
from collections.abc import Sequence

from funcgrad._graph._data import Edge, Node, Value

# The same numbers in another shape, type or place: no box of their own.
TRIVIAL = frozenset(
    "reshape squeeze expand_dims broadcast_in_dim convert_element_type transpose copy copy_p name "
    "stop_gradient optimization_barrier pvary pcast reshard sharding_constraint "
    "reduce_precision".split()
)
_FEW = 4  # arguments that are arrays themselves and are always drawn


@dataclasses.dataclass(frozen=True)
class Wire:
    """An edge between two drawn nodes, and the trivial operations that it passes."""

    source: int
    target: int
    value: Value
    via: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Chip:
    """A value named in a box instead of being wired to it: ``source`` is its node."""

    kind: str  # "reads", "kept" or "gradient"
    source: int
    text: str


@dataclasses.dataclass(frozen=True)
class Spliced:
    """The drawn nodes, their wires, and the chips of each."""

    nodes: tuple[Node, ...]
    wires: tuple[Wire, ...]
    chips: dict[int, tuple[Chip, ...]]


def splice(nodes: Sequence[Node], edges: Sequence[Edge]) -> Spliced:
    """Leave out trivial operations, and name arguments from trees where they are read."""
    into: dict[int, list[Edge]] = {}
    for edge in edges:
        if not edge.carried:
            into.setdefault(edge.target, []).append(edge)
    hidden = {n.id for n in nodes if n.operation in TRIVIAL and not n.saved and not n.holds}
    named = _named_where_read(nodes, edges)
    ends: dict[int, list[tuple[int, tuple[str, ...]]]] = {}

    def origins(edge: Edge) -> list[tuple[int, tuple[str, ...]]]:
        """The drawn nodes that a value comes from, and what it passes on the way."""
        source = edge.source
        if source not in hidden or nodes[source].part != nodes[edge.target].part:
            return [(source, ())]
        if source not in ends:
            node = nodes[source]
            via = " ".join(word for word in (node.operation, node.name) if word)
            ends[source] = [
                (origin, (*passed, via))
                for before in into.get(source, ())
                for origin, passed in origins(before)
            ]
        return ends[source]

    for node in nodes:  # in the order they run, so that no long chain is followed at once
        if node.id in hidden:
            for edge in into.get(node.id, ())[:1]:
                origins(edge._replace(source=node.id, target=node.id))

    wires: list[Wire] = []
    chips: dict[int, list[Chip]] = {}
    for node in nodes:
        if node.id in hidden:
            continue
        for edge in into.get(node.id, ()):
            for source, via in origins(edge):
                made = nodes[source]
                if made.part != node.part:
                    chips.setdefault(node.id, []).append(_chip("kept", made, edge.value))
                elif source in named:
                    chips.setdefault(node.id, []).append(_chip("reads", made, edge.value))
                elif node.id in named:
                    chips.setdefault(source, []).append(_chip("gradient", node, edge.value))
                else:
                    wires.append(Wire(source, node.id, edge.value, via))
    drawn = tuple(n for n in nodes if n.id not in hidden and n.id not in named)
    return Spliced(
        drawn, tuple(wires), {i: tuple(dict.fromkeys(found)) for i, found in chips.items()}
    )


def _named_where_read(nodes: Sequence[Node], edges: Sequence[Edge]) -> set[int]:
    """Arguments and gradients that are one leaf of many, and constants: named where used."""
    plain = [n for n in nodes if n.operation == "argument" and len(keys(n.name)) < 2]
    read = {i: sum(edge.source == i for edge in edges) for i in (n.id for n in plain)}
    drawn = {n.name for n in plain if len(plain) <= _FEW or read[n.id] > 1}
    has_source = {edge.target for edge in edges}
    found = set()
    for node in nodes:
        if node.operation == "constant":
            found.add(node.id)
        elif node.operation == "argument" and node.name not in drawn:
            found.add(node.id)
        elif node.operation == "gradient" and node.name not in drawn and node.id in has_source:
            found.add(node.id)
    return found


def _chip(kind: str, node: Node, value: Value) -> Chip:
    if node.operation == "constant":
        what = f"constant {node.detail}".strip()
    elif node.operation in ("argument", "gradient"):
        what = short(node.name)
    else:
        what = node.name or plain(node)
    return Chip(kind, node.id, f"{what} {value}")


def keys(name: str) -> list[str]:
    """The steps of a leaf's path: ``params['Dense_0']['kernel']`` has three."""
    found = re.findall(r"[\w-]+", name)
    return found[:-1] if len(found) > 1 and found[-1] == "value" else found


def short(name: str) -> str:
    """A leaf in a word: the last key of its path, two where that is a number."""
    found = keys(name)
    return ".".join(found[-2:] if found and found[-1].isdigit() else found[-1:]) or name


def plain(node: Node) -> str:
    """An operation as people call it."""
    return _PLAIN.get(node.operation, node.operation)


_PLAIN = {
    "dot_general": "matmul",
    "conv_general_dilated": "conv",
    "convert_element_type": "convert",
    "broadcast_in_dim": "broadcast",
    "integer_pow": "power",
    "reduce_sum": "sum",
    "reduce_max": "max over",
    "reduce_min": "min over",
    "reduce_prod": "product",
    "add_any": "add",
    "select_n": "select",
    "logistic": "sigmoid",
    "custom_jvp_call": "custom_jvp",
    "custom_vjp_call": "custom_vjp",
    "remat": "checkpoint",
    "remat2": "checkpoint",
}
