"""What is live together, stage by stage: the rows that a budget for the peak adds."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from funcgrad._remat._cost import VIEWS, nbytes
from funcgrad._remat._graph import ProgramGraph
from funcgrad._remat._level import held_p

# Of arguments alone, these may run anywhere at no harm.
_CHEAP = {*VIEWS, "slice", "transpose", "convert_element_type", "dynamic_slice"}
# So many amounts that may cross are tried.
_LEVELS = 64


@dataclasses.dataclass(frozen=True)
class Stages:
    """The forward program cut where little crosses; backward visits the stages from the last.

    ``of_step[i]`` is the stage of a step of the graph, ``None`` where it only takes arguments
    apart and may run anywhere; ``of_node`` likewise.
    """

    count: int
    of_step: list[int | None]
    of_node: list[int | None]

    @staticmethod
    def of(graph: ProgramGraph) -> "Stages":
        """Cut at the places where the fewest bytes cross, loops whole."""
        level = graph.level
        ops = level.forward.ops
        cuts = _cuts(level)
        stage_of_place = np.searchsorted(cuts, np.arange(len(ops)), side="right")
        of_op: dict[int, int] = {}
        for place, op in enumerate(ops):
            stage = int(stage_of_place[place])
            if op.eqn.primitive is held_p:
                held = level.loops[op.eqn.params["key"]]
                _mark(held, stage, of_op)
                of_op[id(held.op)] = stage
            of_op[id(op)] = stage
        of_step: list[int | None] = []
        light: list[bool] = []
        for step in graph.steps:
            reads_light = all(
                graph.nodes[n].step is not None and light[graph.nodes[n].step or 0]
                for n in step.reads
            )
            light.append(reads_light and step.op.eqn.primitive.name in _CHEAP)
            of_step.append(None if light[-1] else of_op.get(id(step.op), 0))
        of_node = [None if n.step is None else of_step[n.step] for n in graph.nodes]
        for number, node in enumerate(graph.nodes):
            if node.step is None:  # carried through a loop: the stage of the loop
                level_of = graph.candidates[node.candidate].op
                of_node[number] = of_op.get(id(level_of), 0)
        return Stages(len(cuts) + 1, of_step, of_node)


def crossing(graph: ProgramGraph) -> set[int]:
    """The candidates that a step of another stage reads: what blocks hand to each other."""
    stages, found = Stages.of(graph), set()
    for step, stage in zip(graph.steps, stages.of_step, strict=True):
        for number in step.reads:
            theirs = stages.of_node[number]
            if stage is not None and theirs is not None and theirs != stage:
                found.add(graph.nodes[number].candidate)
    return found


def _mark(held: Any, stage: int, of_op: dict[int, int]) -> None:
    for op in held.level.forward.ops:
        of_op[id(op)] = stage
    for inner in held.level.loops.values():
        of_op[id(inner.op)] = stage
        _mark(inner, stage, of_op)


def _cuts(level: Any) -> Sequence[int]:
    """Places that begin a stage, so that what crosses and the largest stage take least together."""
    program = level.forward
    last: dict[int, int] = {}
    for place, op in enumerate(program.ops):
        for atom in op.inputs:
            if isinstance(atom, int):
                last[atom] = place
    # What follows from arguments only crosses anywhere at no harm.
    outside = set(program.inputs)
    for op in program.ops:
        reads_outside = all(a in outside for a in op.inputs if isinstance(a, int))
        if reads_outside and op.eqn.primitive.name in _CHEAP:
            outside.update(op.outputs)
    crossing, made = np.zeros((2, len(program.ops) + 1))
    for place, op in enumerate(program.ops):
        for out in op.outputs:
            if out in last and out not in outside:
                size = nbytes(program.avals[out])
                crossing[place + 1 : last[out] + 1] += size
                made[place + 1] += 0 if op.eqn.primitive.name in VIEWS else size
    before = np.cumsum(made)
    best, least = np.zeros(0, int), before[-1]
    # A tensor or two, where a residual stream passes alone, but not what a norm has of it.
    for low in np.unique(crossing[crossing > 0])[:_LEVELS]:
        inside = crossing[1:-1] <= low
        cuts = 1 + np.flatnonzero(inside & ~np.append(False, inside[:-1]))
        ends = np.append(cuts, len(program.ops))
        together = crossing[cuts].sum() + np.diff(before[ends], prepend=0).max()
        if together < least:
            best, least = cuts, together
    return best.tolist()
