"""From jaxprs to nodes and edges, through every nested program."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from funcgrad._compat import Jaxpr, JaxprEqn, Literal, primitives, value_name
from funcgrad._graph._calls import calls_of, line_of
from funcgrad._graph._data import ENDS, Edge, Node, Part, Saved, Value
from funcgrad._graph._flops import flops
from funcgrad._jaxpr import Body, bodies, loop_sizes

_FILL = ("broadcast_in_dim", "constant")


@dataclasses.dataclass(eq=False)
class Wire:
    """A value on its way: where it comes from, which may be one of several places.

    ``made`` are outputs of nodes, ``joined`` other wires: what each branch of a ``cond``
    gives, what a loop starts from; ``carried`` those of the round before.
    """

    made: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    joined: list["Wire"] = dataclasses.field(default_factory=list)
    carried: list["Wire"] = dataclasses.field(default_factory=list)

    def ends(self) -> list[tuple[int, int, bool]]:
        """Each (node, output, whether it comes from the round before) that it may lead from."""
        found: dict[tuple[int, int], bool] = {}
        for carried in (False, True):  # what comes straight is not called carried
            seen: set[int] = set()
            waiting = [self]
            while waiting:
                wire = waiting.pop()
                if id(wire) in seen:
                    continue
                seen.add(id(wire))
                for end in wire.made:
                    found.setdefault(end, carried)
                waiting += wire.joined + (wire.carried if carried else [])
        return [(node, output, carried) for (node, output), carried in found.items()]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where equations stand: the node and body around them, how often they run."""

    parent: int | None = None
    body: str = ""
    trips: int | None = 1
    around: tuple[JaxprEqn, ...] = ()
    path: tuple[str, ...] = ()
    in_kernel: bool = False  # where reading and writing of references are effects of their own


@dataclasses.dataclass(eq=False)
class Builder:
    """The nodes and edges made so far."""

    part: Part = "forward"
    nodes: list[Node] = dataclasses.field(default_factory=list)
    reads: list[tuple[int, int, Wire, Value]] = dataclasses.field(default_factory=list)
    kept: list[tuple[Wire, Value]] = dataclasses.field(default_factory=list)
    effects: set[int] = dataclasses.field(default_factory=set)
    kernels: set[int] = dataclasses.field(default_factory=set)

    def end(
        self, operation: str, value: Any, name: str = "", place: Place = Place(), detail: str = ""
    ) -> Wire:
        """A node that is no equation and has one output."""
        node = self._add(operation, (type_of(value),), place, name=name, detail=detail)
        return Wire([(node, 0)])

    def finish(self, operation: str, wire: Wire | None, value: Any, name: str) -> None:
        """A node that is no equation and reads one value."""
        node = self._add(operation, (type_of(value),), Place(), name=name)
        self._read(node, 0, wire, value)

    def keep(self, wire: Wire | None, atom: Any) -> Wire:
        """Mark a value as kept for the backward pass."""
        if wire is None or not wire.ends():
            wire = self.end("constant", atom.aval, detail=_short(getattr(atom, "val", None)))
        # What the branches of a cond do not keep they fill with zeros.
        ends = [(node, output) for node, output, _ in wire.ends()]
        computed = [end for end in ends if self.nodes[end[0]].operation not in _FILL]
        wire = Wire(computed or ends)
        self.kept.append((wire, type_of(atom.aval)))
        return wire

    def _add(self, operation: str, outputs: Any, place: Place, **fields: Any) -> int:
        node = Node(
            len(self.nodes),
            self.part,
            operation,
            outputs,
            parent=place.parent,
            body=place.body,
            trips=place.trips,
            **fields,
        )
        self.nodes.append(node)
        return node.id

    def _read(self, node: int, operand: int, wire: Wire | None, aval: Any) -> None:
        if wire is not None:
            self.reads.append((node, operand, wire, type_of(aval)))

    def run(
        self, jaxpr: Jaxpr, inputs: Sequence[Wire | None], place: Place = Place()
    ) -> list[Wire | None]:
        """Add the equations of ``jaxpr``; the wires of its outputs, ``None`` for a literal."""
        env: dict[Any, Wire | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            env[var] = self.end("constant", var.aval, place=place)

        def read(atom: Any) -> Wire | None:
            return None if isinstance(atom, Literal) else env.get(atom)

        for eqn in jaxpr.eqns:
            made = self._equation(eqn, [read(atom) for atom in eqn.invars], place)
            env.update(zip(eqn.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(
        self, eqn: JaxprEqn, inputs: list[Wire | None], place: Place
    ) -> list[Wire | None]:
        nested = _programs(eqn)
        calls, scopes = calls_of(eqn, place.around)
        path = (*place.path, *scopes)
        node = self._add(
            eqn.primitive.name,
            tuple(type_of(out.aval) for out in eqn.outvars),
            place,
            name=_name(eqn),
            detail=_detail(eqn),
            path="/".join(path),
            calls=calls,
            rounds=_rounds(eqn),
            flops=0 if nested else flops(eqn),
            line=line_of(eqn, place.around),
            holds=bool(nested),
        )
        is_kernel = any(body.role == "opaque" for body in nested)
        if eqn.effects and not place.in_kernel and (is_kernel or not nested):
            self.effects.add(node)
        if not nested:
            for i, (wire, atom) in enumerate(zip(inputs, eqn.invars, strict=True)):
                self._read(node, i, wire, atom.aval)
            return [Wire([(node, i)]) for i in range(len(eqn.outvars))]

        around = (*place.around, eqn)
        inside = Place(node, "", place.trips, around, path, place.in_kernel)
        if is_kernel:
            self.kernels.add(node)
            self._kernel(eqn, nested, inside)
            for i, (wire, atom) in enumerate(zip(inputs, eqn.invars, strict=True)):
                self._read(node, i, wire, atom.aval)
            return [Wire([(node, i)]) for i in range(len(eqn.outvars))]

        passed = {operand for body in nested for operand in body.operands}
        for i, (wire, atom) in enumerate(zip(inputs, eqn.invars, strict=True)):
            if i not in passed:
                self._read(node, i, wire, atom.aval)
        if eqn.primitive is primitives.scan_p:
            return self._scan(eqn, nested[0], inputs, inside)
        if eqn.primitive is primitives.while_p:
            return self._while(eqn, nested, inputs, inside)
        made = [self._body(body, inputs, inside) for body in nested]
        if len(made) == 1:
            return made[0]
        return [Wire(joined=[wire for wire in wires if wire]) for wires in zip(*made, strict=True)]

    def _body(self, body: Body, inputs: Sequence[Wire | None], place: Place) -> list[Wire | None]:
        here = dataclasses.replace(place, body=body.name)
        return self.run(body.jaxpr, [_at(inputs, i) for i in body.operands], here)

    def _scan(
        self, eqn: JaxprEqn, body: Body, inputs: list[Wire | None], place: Place
    ) -> list[Wire | None]:
        n_consts, n_carry = loop_sizes(eqn)
        trips = _times(place.trips, _rounds(eqn))
        carry = [Wire(joined=[w] if w else []) for w in inputs[n_consts : n_consts + n_carry]]
        given = [*inputs[:n_consts], *carry, *inputs[n_consts + n_carry :]]
        made = self._body(body, given, dataclasses.replace(place, trips=trips))
        return _close(carry, made[:n_carry], eqn.params["length"]) + made[n_carry:]

    def _while(
        self, eqn: JaxprEqn, nested: Sequence[Body], inputs: list[Wire | None], place: Place
    ) -> list[Wire | None]:
        test, step = nested
        n_consts = len(inputs) - len(eqn.outvars)
        carry = [Wire(joined=[wire] if wire else []) for wire in inputs[n_consts:]]
        given = [*inputs[:n_consts], *carry]
        inside = dataclasses.replace(place, trips=None)
        (stops,) = self._body(test, given, inside)
        assert place.parent is not None
        self._read(place.parent, len(inputs), stops, test.jaxpr.outvars[0].aval)
        made = self._body(step, given, inside)
        return _close(carry, made, None)

    def _kernel(self, eqn: JaxprEqn, nested: Sequence[Body], place: Place) -> None:
        """Programs whose inputs and outputs are not those of the equation, as in Pallas."""
        trips = _times(place.trips, _rounds(eqn))
        inside = dataclasses.replace(place, trips=trips, in_kernel=True)
        for body in nested:
            nothing = (None,) * len(body.jaxpr.invars)
            whole = dataclasses.replace(body, operands=nothing)
            self._body(whole, [], inside)

    def graph(self) -> tuple[tuple[Node, ...], tuple[Edge, ...], tuple[Saved, ...]]:
        """What contributes to an output, to what is kept, or has an effect; numbered again."""
        edges = [
            Edge(source, output, target, operand, value, carried)
            for target, operand, wire, value in self.reads
            for source, output, carried in wire.ends()
        ]
        saved = [Saved(*wire.made[0], value) for wire, value in self.kept]
        ends = {name: {n.id for n in self.nodes if n.operation == name} for name in ENDS}
        arguments = ends["argument"] | ends["seed"]
        for_output = self._reaching(edges, ends["output"] | self.effects) | arguments
        roots = ends["output"] | ends["gradient"] | self.effects | {s.node for s in saved}
        live = self._reaching(edges, roots) | arguments
        number = {old: new for new, old in enumerate(sorted(live))}
        sizes = dict.fromkeys(live, 0)
        for kept in saved:
            sizes[kept.node] += kept.bytes
        nodes: list[Node] = []
        for old in number:
            node = self.nodes[old]
            nodes.append(
                dataclasses.replace(
                    node,
                    id=len(nodes),
                    parent=None if node.parent is None else number[node.parent],
                    saved=sizes[old],
                    for_backward=node.part == "forward" and old not in for_output,
                )
            )
        return (
            _with_totals(nodes),
            tuple(
                edge._replace(source=number[edge.source], target=number[edge.target])
                for edge in edges
                if edge.source in live and edge.target in live
            ),
            tuple(kept._replace(node=number[kept.node]) for kept in saved),
        )

    def _reaching(self, edges: Sequence[Edge], roots: set[int]) -> set[int]:
        """The nodes from which a root is reached, and the holders around them."""
        before: dict[int, list[int]] = {}
        for edge in edges:
            before.setdefault(edge.target, []).append(edge.source)
        for node in self.nodes:  # what a kernel holds belongs to it
            if node.parent in self.kernels:
                before.setdefault(node.parent, []).append(node.id)
        found: set[int] = set()
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            found.add(node)
            waiting += before.get(node, ())
            parent = self.nodes[node].parent
            waiting += [] if parent is None else [parent]
        return found


def _with_totals(nodes: list[Node]) -> tuple[Node, ...]:
    """Give each node that holds others their operations; it stands before them."""
    inside: dict[int, dict[str, int]] = {}
    for i, node in reversed(list(enumerate(nodes))):
        if node.holds:
            sums = inside.get(i, {}).values()
            once = max(sums, default=0) if node.operation == "cond" else sum(sums)
            rounds = 1 if node.rounds is None else node.rounds
            nodes[i] = node = dataclasses.replace(node, flops=once * rounds)
        if node.parent is not None:
            own = inside.setdefault(node.parent, {})
            own[node.body] = own.get(node.body, 0) + node.flops
    return tuple(nodes)


def type_of(value: Any) -> Value:
    """The type of an array or of an abstract value; of a reference that of what it refers to."""
    value = getattr(value, "inner_aval", value)
    return Value(tuple(getattr(value, "shape", ())), getattr(value, "dtype", type(value).__name__))


_COMBINING = ("scatter", "reduce", "select_and_")  # what they hold makes one number of two
# Of what these hold the other programs are for their derivative, or for a check.
_RUN = {"custom_linear_solve": "jaxprs[2]", "linear_call": "callee"}


def _programs(eqn: JaxprEqn) -> tuple[Body, ...]:
    """The nested programs that ``eqn`` runs."""
    name = eqn.primitive.name
    if name.startswith(_COMBINING):
        return ()
    return tuple(body for body in bodies(eqn) if _RUN.get(name, body.name) == body.name)


def _at(inputs: Sequence[Wire | None], place: int | None) -> Wire | None:
    return None if place is None else inputs[place]


def _rounds(eqn: JaxprEqn) -> int | None:
    """How often what ``eqn`` holds runs, ``None`` where that is not known before."""
    if eqn.primitive is primitives.scan_p:
        return eqn.params["length"]
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())  # of a Pallas kernel
    if eqn.primitive is primitives.while_p or not all(isinstance(n, int) for n in grid):
        return None
    return math.prod(grid)


def _times(trips: int | None, rounds: int | None) -> int | None:
    return None if trips is None or rounds is None else trips * rounds


def _close(carry: list[Wire], made: Sequence[Wire | None], rounds: int | None) -> list[Wire | None]:
    """Lead what a round gives back to its start; what the loop gives in the end."""
    for start, last in zip(carry, made, strict=True):
        if last is not None and (rounds is None or rounds > 1):
            start.carried.append(last)
    if rounds:
        return list(made)
    return [
        Wire(joined=[wire for wire in (*start.joined, last) if wire])
        for start, last in zip(carry, made, strict=True)
    ]


def _name(eqn: JaxprEqn) -> str:
    name = value_name(eqn) or eqn.params.get("name")
    if name is None and (found := eqn.params.get("name_and_src_info")) is not None:
        name = getattr(found, "name", None)  # of a Pallas kernel
    return name if isinstance(name, str) else ""


_ORDERED = ("sub", "div", "pow", "rem", "atan2", "lt", "le", "gt", "ge")
_PLAIN = ("y", "new_dtype", "permutation")  # the operation says what they are
_TOLD = ("y", "axes", "axis", "dimension", "new_dtype", "permutation")


def _detail(eqn: JaxprEqn) -> str:
    words = [_short(atom.val) for atom in eqn.invars if isinstance(atom, Literal)]
    if eqn.primitive.name in _ORDERED and isinstance(eqn.invars[0], Literal) and words[0]:
        words[0] += ",·"  # 1 - x, and not x - 1
    for key in _TOLD:
        value = eqn.params.get(key)
        named = "" if key in _PLAIN else f"{key}="
        if isinstance(value, tuple) and value:
            words.append(f"{named}{','.join(map(str, value))}")
        elif isinstance(value, int | float) or hasattr(value, "itemsize"):
            words.append(f"{named}{value}")
    return " ".join(word for word in words if word)


def _short(value: Any) -> str:
    try:
        return f"{value.item():.6g}" if getattr(value, "shape", None) == () else f"{value:.6g}"
    except (TypeError, ValueError, AttributeError):
        return ""
