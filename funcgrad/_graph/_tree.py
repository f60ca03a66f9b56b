"""The drawn nodes as a tree of modules, loops, branches and calls."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

from funcgrad._graph._data import Call, Node, Part
from funcgrad._graph._schedule import schedule
from funcgrad._graph._splice import Chip, Spliced, Wire, keys, plain

Ends: TypeAlias = tuple[int, int]  # positions of two children of one group
IN, OUT = -1, -2  # in place of a child's: what is outside
_MOST = 40  # children of one group; what has more is drawn in pieces
_FOR_BACKWARD = Call("for backward", -1)
_KINDS = {"scan": "loop", "while": "loop", "cond": "branch", "pallas_call": "kernel"}


@dataclasses.dataclass(eq=False)
class Item:
    """A node, or a group of items; ``wires`` lead between its children, in and out.

    ``kind`` is ``op`` or ``end`` of a node alone; ``module``, ``loop``, ``branch``, ``call``,
    ``kernel``, ``extra`` (what is computed for the backward pass only), ``piece`` or ``part``
    of a group, whose ``node`` is the one that holds it.
    """

    kind: str
    label: str
    node: Node | None = None
    children: list["Item"] = dataclasses.field(default_factory=list)
    chips: tuple[Chip, ...] = ()
    wires: dict[Ends, list[Wire]] = dataclasses.field(default_factory=dict)
    open: bool = False

    def leaves(self) -> list["Item"]:
        """The nodes in it, in order."""
        if not self.children:
            return [self]
        return [leaf for child in self.children for leaf in child.leaves()]

    @property
    def rounds(self) -> int | None:
        """How often a loop runs for one run of what is around it."""
        return 1 if self.node is None else self.node.rounds

    def total(self, value: Callable[[Node], int]) -> int:
        """The sum over its nodes."""
        return sum(value(leaf.node) for leaf in self.leaves() if leaf.node)

    @property
    def flops(self) -> int:
        """Of all runs; of a ``cond`` its dearest branch."""
        if self.node is not None:
            return self.node.flops * (1 if self.node.trips is None else self.node.trips)
        return sum(child.flops for child in self.children)


def tree(spliced: Spliced, nodes: Sequence[Node], part: Part) -> Item:
    """The part as one group."""
    return _Tree(spliced, nodes, part).root


class _Tree:
    def __init__(self, spliced: Spliced, nodes: Sequence[Node], part: Part):
        self.nodes, self.spliced = nodes, spliced
        self.wires = [w for w in spliced.wires if nodes[w.target].part == part]
        self.levels: dict[tuple[int | None, str], dict[int, None]] = {}
        for node in spliced.nodes:
            if node.part == part:
                for above in self._above(node.id):
                    self.levels.setdefault((above.parent, above.body), {})[above.id] = None
        self.wired = {end for wire in self.wires for end in (wire.source, wire.target)}
        self.before = self._needs()
        self._fed = self._what_is_fed()
        self.root = Item("part", part, children=self._level(None, ""))
        _name_by_arguments(self.root, nodes)
        _number(self.root)
        self._connect()

    def _above(self, node: int) -> list[Node]:
        """The nodes that hold a node, from the outside in, and itself."""
        found, at = [], self.nodes[node]
        while True:
            found.append(at)
            if at.parent is None:
                return found[::-1]
            at = self.nodes[at.parent]

    def _needs(self) -> dict[int, set[int]]:
        """What each node of a program needs of the others of the same program."""
        before: dict[int, set[int]] = {}
        for wire in self.wires:
            for a, b in zip(self._above(wire.source), self._above(wire.target), strict=False):
                if a.id != b.id:
                    if (a.parent, a.body) == (b.parent, b.body):
                        before.setdefault(b.id, set()).add(a.id)
                    break
        return before

    def _what_is_fed(self) -> set[int]:
        """The nodes that depend on an argument or seed that is drawn, and what holds them."""
        starts = {n.id for n in self.spliced.nodes if n.operation in ("argument", "seed")}
        found = set(starts)
        after: dict[int, list[int]] = {}
        for wire in self.wires:
            after.setdefault(wire.source, []).append(wire.target)
        waiting = list(starts)
        while waiting:
            for target in after.get(waiting.pop(), ()):
                for node in self._above(target):
                    if node.id not in found:
                        found.add(node.id)
                        waiting.append(node.id)
        return found

    def _level(self, parent: int | None, body: str) -> list[Item]:
        ids = sorted(self.levels.get((parent, body), ()))
        calls = {}
        for i in ids:
            node = self.nodes[i]
            calls[i] = (*node.calls, _FOR_BACKWARD) if node.for_backward else node.calls
        needs = {i: self.before[i] for i in ids if i in self.before}
        order = schedule(ids, needs, calls, self._fed & set(ids))
        return self._nest([(i, calls[i]) for i in order], 0)

    def _nest(self, run: list[tuple[int, tuple[Call, ...]]], depth: int) -> list[Item]:
        """Runs of operations of one call become groups."""
        items: list[Item] = []
        start = 0
        while start < len(run):
            node, calls = run[start]
            stop = start + 1
            if len(calls) <= depth:
                items.append(self._item(self.nodes[node]))
            else:
                while stop < len(run) and run[stop][1][depth : depth + 1] == (calls[depth],):
                    stop += 1
                items.append(_module(calls[depth], self._nest(run[start:stop], depth + 1)))
            start = stop
        return _in_pieces([x for item in items for x in _unwrapped(item)])

    def _item(self, node: Node) -> Item:
        chips = self.spliced.chips.get(node.id, ())
        if node.is_end:
            return Item("end", node.operation, node, chips=chips)
        bodies = [body for parent, body in self.levels if parent == node.id] if node.holds else []
        if not bodies:
            return Item("op", plain(node), node, chips=chips)
        label = node.name or plain(node)
        is_kernel = node.id in self.wired  # by itself, not by what is inside
        kind = _KINDS.get(node.operation, "kernel" if is_kernel else "call")
        if len(bodies) == 1 and kind != "branch":
            children = self._level(node.id, bodies[0])
        else:
            children = [
                Item("call", _BODIES.get(body, body), children=self._level(node.id, body))
                for body in bodies
            ]
        return Item(kind, label, node, children, chips)

    def _connect(self) -> None:
        """Wire the children of each group, and each group to what is outside."""
        places: dict[int, list[tuple[Item, int]]] = {}

        def visit(item: Item, way: list[tuple[Item, int]]) -> None:
            if item.node is not None:
                places[item.node.id] = way
            for i, child in enumerate(item.children):
                visit(child, [*way, (item, i)])

        visit(self.root, [])
        for wire in self.wires:
            a, b = places[wire.source], places[wire.target]
            shared = 0
            while shared < min(len(a), len(b)) and a[shared] == b[shared]:
                shared += 1
            if shared == min(len(a), len(b)):
                continue  # a group and what it holds
            (group, i), (_, j) = a[shared], b[shared]
            group.wires.setdefault((i, j), []).append(wire)
            for inner, k in a[shared + 1 :]:
                inner.wires.setdefault((k, OUT), []).append(wire)
            for inner, k in b[shared + 1 :]:
                inner.wires.setdefault((IN, k), []).append(wire)


_BODIES = {"cond": "goes on while", "body": "each round", "cond_jaxpr": "goes on while"}


def _module(call: Call, children: list[Item]) -> Item:
    kind = "extra" if call == _FOR_BACKWARD else "module" if call.line == 0 else "function"
    return Item(kind, call.name, children=children)


def _unwrapped(item: Item) -> list[Item]:
    """Without frames around a single thing that say nothing more."""
    if item.kind in ("call", "function") and len(item.children) == 1 and not item.chips:
        (child,) = item.children
        if child.children and child.kind in ("call", "function", "module", "loop", "branch"):
            child.label = item.label if child.label == item.label else f"{item.label}/{child.label}"
            return [child]
        return [child]
    if item.kind == "module" and len(item.children) == 1 and item.children[0].kind == "module":
        (child,) = item.children
        child.label = f"{item.label}/{child.label}"
        return [child]
    return [item]


def _number(group: Item) -> None:
    """The second group of a name among the children of one group bears a number."""
    seen: dict[str, int] = {}
    for item in group.children:
        if item.children and item.kind not in ("extra", "piece"):
            seen[item.label] = seen.get(item.label, 0) + 1
            if seen[item.label] > 1:
                item.label = f"{item.label} ({seen[item.label]})"
        _number(item)


def _in_pieces(items: list[Item]) -> list[Item]:
    """Long programs without modules are cut into pieces of like size."""
    while len(items) > _MOST:
        count = min(_MOST, -(-len(items) // (_MOST // 2)))
        size = -(-len(items) // count)
        cuts = range(0, len(items), size)
        items = [
            Item("piece", f"{i + 1} of {len(cuts)}", children=items[cut : cut + size])
            for i, cut in enumerate(cuts)
        ]
    return items


def _name_by_arguments(root: Item, nodes: Sequence[Node]) -> None:
    """Say which module a function's frame is of, where all parameters read in it are of one."""

    def visit(item: Item, around: list[str]) -> None:
        common = around
        if item.kind in ("function", "part"):
            common = _common([keys(name)[1:-1] for name in _parameters(item, nodes)]) or around
        if any(len(_parameters(i, nodes)) == len(_parameters(item, nodes)) for i in inner(item)):
            common = around  # it only calls the module that they are of
        if item.kind == "function" and _is_within(common, around):
            item.label = f"{'.'.join(common[len(around) :])}: {item.label}"
        for child in item.children:
            visit(child, common)

    def inner(item: Item) -> list[Item]:
        return [child for child in item.children if child.kind == "function"]

    visit(root, [])


def _parameters(item: Item, nodes: Sequence[Node]) -> list[str]:
    sources = [nodes[chip.source] for leaf in item.leaves() for chip in leaf.chips]
    return [node.name for node in sources if node.operation in ("argument", "gradient")]


def _common(paths: Sequence[list[str]]) -> list[str]:
    """The steps with which all paths begin."""
    steps = []
    for together in zip(*paths, strict=False):
        if len(set(together)) > 1:
            break
        steps.append(together[0])
    return steps


def _is_within(path: list[str], around: list[str]) -> bool:
    return len(path) > len(around) and path[: len(around)] == around
