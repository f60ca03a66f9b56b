"""The values that may be kept for backward and the operations that may make them again.

One graph for the whole program: a value in a loop's body is one node, whose bytes count once
for every iteration, and so does the cost of the operation that makes it.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from funcgrad._remat._cost import VIEWS, cost, flops, matmul_flops, nbytes
from funcgrad._remat._level import HeldLoop, Level, held_p, pull_p
from funcgrad._remat._program import Atom, Op, is_random


@dataclasses.dataclass(eq=False)
class Candidate:
    """A value that may be kept: in all iterations together ``nbytes``.

    ``places`` are the levels that know it, with its number there, from the outermost in: the
    stacked output of a loop is the same memory as the value in its body.
    """

    nbytes: int
    trips: int
    aval: Any
    op: Op | None
    places: list[tuple[Level, int]]
    carried: bool = False


@dataclasses.dataclass(eq=False)
class Step:
    """An operation that may run again, in all iterations together at this cost.

    A ``view`` takes no memory of its own, and its output no less than its source.  ``op`` is the
    ``Op`` of a program; graphs from elsewhere have none.
    """

    op: Any
    trips: int
    cost: float
    reads: tuple[int, ...]
    allowed: bool
    view: bool

    @property
    def flops(self) -> int:
        """Floating-point operations of all iterations."""
        return self.trips * flops(self.op.eqn)

    @property
    def matmul_flops(self) -> int:
        """Of matrix products and convolutions."""
        return self.trips * matmul_flops(self.op.eqn)


@dataclasses.dataclass(frozen=True)
class Node:
    """Where a value can come from: memory, or a step; a carried value has none."""

    candidate: int
    step: int | None


@dataclasses.dataclass(eq=False)
class Graph:
    """Nodes, the candidates and steps that they name, and the nodes that backward needs."""

    nodes: list[Node] = dataclasses.field(default_factory=list)
    candidates: list[Candidate] = dataclasses.field(default_factory=list)
    steps: list[Step] = dataclasses.field(default_factory=list)
    needs: list[int] = dataclasses.field(default_factory=list)

    def closure(self, kept: Iterable[int]) -> "Closure | None":
        """What backward reads of ``kept`` and runs again; ``None`` if that is not possible."""
        kept = set(kept)
        used: set[int] = set()
        again: set[int] = set()
        stack = list(self.needs)
        while stack:
            node = self.nodes[stack.pop()]
            if node.candidate in kept:
                used.add(node.candidate)
            elif node.step is None or not self.steps[node.step].allowed:
                return None
            elif node.step not in again:
                again.add(node.step)
                stack.extend(self.steps[node.step].reads)
        return Closure(
            frozenset(used),
            frozenset(again),
            sum(self.candidates[i].nbytes for i in used),
            float(sum(self.steps[i].cost for i in again)),
        )

    def keeping(self) -> "Closure":
        """What backward reads when nothing runs again: the plain function."""
        closure = self.closure(self.nodes[need].candidate for need in self.needs)
        assert closure is not None
        return closure


class ProgramGraph(Graph):
    """The graph of a linearised program and of all loops within."""

    def __init__(self, level: Level) -> None:
        """Read a level and all levels within."""
        super().__init__()
        self.level = level
        self._add(level, dict.fromkeys(level.forward.inputs), 1, {})
        self.needs = list(dict.fromkeys(self.needs))

    @property
    def forward_cost(self) -> float:
        """Of all operations, once; a loop's are its body's."""
        return float(sum(step.cost for step in self.steps if step.op.loop is None))

    def _add(
        self, level: Level, env: dict[int, int | None], trips: int, shared: dict[int, int]
    ) -> None:
        program = level.forward
        for op in program.ops:
            held = level.loops.get(op.eqn.params["key"]) if op.eqn.primitive is held_p else None
            shown = held.op if held else op
            step = len(self.steps)
            reads = self._nodes(env, op.inputs)
            allowed = not has_effects(shown.eqn) and not is_random(shown.eqn)
            price = trips * cost(shown.eqn)
            self.steps.append(Step(shown, trips, price, reads, allowed, _is_view(shown)))
            for out in op.outputs:
                if out in shared:
                    candidate = shared[out]
                    self.candidates[candidate].places.append((level, out))
                else:
                    candidate = self._candidate(level, out, trips, shown)
                env[out] = self._node(candidate, step)
            if held:
                self._add_loop(level, op, held, env, trips)
        self.needs += self._needed(level, env)

    def _add_loop(self, level: Level, op: Op, held: HeldLoop, env: Any, trips: int) -> None:
        loop, inner = held.loop, held.level.forward
        trips *= loop.length
        inside: dict[int, int | None] = {}
        for i, (number, atom) in enumerate(zip(inner.inputs, op.inputs, strict=True)):
            if loop.n_consts <= i < loop.n_consts + loop.n_carry:
                candidate = self._candidate(held.level, number, trips, held.op, carried=True)
                inside[number] = self._node(candidate, None)
            else:
                inside[number] = env[atom] if isinstance(atom, int) else None
        # A stacked output and the value in the body that it stacks are kept once.
        shared: dict[int, int] = {}
        stacked = zip(held.level.outputs[loop.n_carry :], op.outputs[loop.n_carry :], strict=True)
        for atom, out in stacked:
            if isinstance(atom, int) and atom in inner.producer and atom not in shared:
                shared[atom] = self.nodes[env[out]].candidate
        self._add(held.level, inside, trips, shared)

    def _needed(self, level: Level, env: dict[int, int | None]) -> list[int]:
        backward = level.backward
        found: list[int] = []
        for place in sorted(backward.needed(backward.outputs)):
            op = backward.ops[place]
            if op.eqn.primitive is not pull_p:
                found += self._nodes(env, [level.received(a) for a in op.inputs])
        return found + list(self._nodes(env, [level.received(a) for a in backward.outputs]))

    def _nodes(self, env: Any, atoms: Iterable[Atom | None]) -> tuple[int, ...]:
        found = [env[atom] for atom in atoms if isinstance(atom, int)]
        return tuple(dict.fromkeys(node for node in found if node is not None))

    def _node(self, candidate: int, step: int | None) -> int:
        self.nodes.append(Node(candidate, step))
        return len(self.nodes) - 1

    def _candidate(
        self, level: Level, number: int, trips: int, op: Op, carried: bool = False
    ) -> int:
        aval = level.forward.avals[number]
        self.candidates.append(
            Candidate(trips * nbytes(aval), trips, aval, op, [(level, number)], carried)
        )
        return len(self.candidates) - 1


@dataclasses.dataclass(frozen=True)
class Closure:
    """Candidates kept and read, steps run again, and their totals."""

    kept: frozenset[int]
    again: frozenset[int]
    nbytes: int
    cost: float


def has_effects(eqn: Any) -> bool:
    """Whether a second run would be seen; the name of a mapped axis is no such effect."""
    return any("NamedAxis" not in type(effect).__name__ for effect in eqn.effects)


def _is_view(op: Op) -> bool:
    if op.eqn.primitive.name not in VIEWS or len(op.outputs) != 1:
        return False
    return sum(nbytes(a.aval) for a in op.eqn.invars) <= nbytes(op.eqn.outvars[0].aval)
