"""The bytes that the gradient under a plan has live at once, told without compiling it.

The operations are taken in the order in which they are written.  What compilers compute inside
of its readers takes no memory: operations on single elements, unless a matrix product reads them
or they are dear and read more than once.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from funcgrad._remat._apply import Schedule, keeping_nothing, outer_reads, schedule
from funcgrad._remat._cost import VIEWS, nbytes
from funcgrad._remat._graph import Closure, ProgramGraph
from funcgrad._remat._level import held_p, pull_p
from funcgrad._remat._program import Atom, Op

_REDUCE = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())
_DEAR = frozenset(
    "exp exp2 expm1 log log1p tanh logistic erf erfc erf_inv sqrt rsqrt cbrt div rem pow sin cos "
    "tan atan2".split()
)
_CHEAP = frozenset(
    "add sub mul neg max min and or not xor select_n convert_element_type sign abs floor ceil "
    "round is_finite eq ne lt le gt ge integer_pow square clamp add_any slice dynamic_slice pad "
    "rev transpose split real imag conj complex shift_left shift_right_logical nextafter "
    "reduce_precision".split()
)


@dataclasses.dataclass(eq=False)
class _Work:
    """An operation: the values that it reads and makes, and what a loop's body has live."""

    name: str
    reads: Sequence[Hashable]
    makes: dict[Hashable, int]
    inside: int = 0


def predicted_peak(graph: ProgramGraph, closure: Closure) -> int:
    """The most bytes live at once, of values that are neither arguments nor results."""
    plan = schedule(graph, closure.kept)
    level = plan.level
    results: set[Hashable] = {("made", a) for a in level.outputs if isinstance(a, int)}
    results |= {("back", a) for a in level.backward.outputs if isinstance(a, int)}
    return _peak([*_forward(plan), *_backward(plan)], results)


def _forward(plan: Schedule) -> list[_Work]:
    level = plan.level
    return [
        _work(plan, op, _keys("made", op.inputs), "made", plan.loops)
        for op in (level.forward.ops[place] for place in plan.forward_places)
    ]


def _backward(plan: Schedule) -> list[_Work]:
    level, found = plan.level, []
    where: dict[int, str] = {}

    def read(atoms: Sequence[Atom | None]) -> list[Hashable]:
        return [(where.get(a, "made"), a) for a in atoms if isinstance(a, int)]

    def again(places: Sequence[int]) -> None:
        for op in (level.forward.ops[place] for place in places):
            found.append(_work(plan, op, read(op.inputs), "again", None))
            where.update(dict.fromkeys(op.outputs, "again"))

    for place, before in plan.steps:
        again(before)
        op = level.backward.ops[place]
        reads = read([level.received(a) for a in op.inputs])
        reads += _keys("back", [a for a in op.inputs if level.received(a) is None])
        inside = 0
        if op.eqn.primitive is pull_p:
            key = op.eqn.params["key"]
            body = plan.loops[key]
            reads += [*read(outer_reads(level.loops[key], body)), ("kept", key)]
            inside = _peak(_backward(body), set())
        makes: dict[Hashable, int] = {
            ("back", out): nbytes(level.backward.avals[out]) for out in op.outputs
        }
        found.append(_Work(op.eqn.primitive.name, reads, makes, inside))
    again(plan.last)
    return found


def _work(plan: Schedule, op: Op, reads: list[Hashable], when: str, loops: Any) -> _Work:
    level = plan.level
    makes: dict[Hashable, int] = {(when, i): nbytes(level.forward.avals[i]) for i in op.outputs}
    inside = 0
    if op.eqn.primitive is held_p:
        key = op.eqn.params["key"]
        held = level.loops[key]
        body = loops[key] if loops else keeping_nothing(held.level)
        inside = _peak(_forward(body), {("made", i) for i in body.kept})
        if loops:
            makes["kept", key] = held.loop.length * _kept_bytes(body)
    return _Work(op.eqn.primitive.name, reads, makes, inside)


def _kept_bytes(plan: Schedule) -> int:
    own = sum(nbytes(plan.level.forward.avals[i]) for i in plan.kept)
    return own + sum(
        plan.level.loops[key].loop.length * _kept_bytes(body) for key, body in plan.loops.items()
    )


def _keys(when: str, atoms: Sequence[Any]) -> list[Hashable]:
    return [(when, a) for a in atoms if isinstance(a, int)]


def _peak(works: list[_Work], results: set[Hashable]) -> int:
    readers: dict[Hashable, list[int]] = {}
    for i, work in enumerate(works):
        for key in dict.fromkeys(work.reads):
            readers.setdefault(key, []).append(i)
    fused, last = [False] * len(works), [-1] * len(works)
    solid = [False] * len(works)  # whether it is read, perhaps through views, as an array
    for i in reversed(range(len(works))):
        work = works[i]
        theirs = [r for key in work.makes for r in readers.get(key, ())]
        needs_array = any(_takes_arrays(works[r].name) or solid[r] for r in theirs)
        name = work.name
        if name in VIEWS:
            fused[i], solid[i] = True, needs_array
        elif results.isdisjoint(work.makes) and not needs_array:
            fused[i] = name in _CHEAP or (name in _DEAR and len(theirs) <= 1)
        last[i] = max((last[r] if fused[r] else r for r in theirs), default=i)
    live = peak = 0
    frees: dict[int, list[int]] = {}
    for i, work in enumerate(works):
        ending = frees.pop(i, [])
        if not fused[i]:
            made = [n for key, n in work.makes.items() if key not in results]
            sizes = list(ending)
            fresh = 0
            for n in made:
                # Written over what ends here.
                if n in sizes and not _takes_arrays(work.name):
                    sizes.remove(n)
                else:
                    fresh += n
            peak = max(peak, live + fresh + work.inside)
            live += sum(made)
            if made:
                frees.setdefault(last[i], []).extend(made) if last[i] > i else ending.extend(made)
        live -= sum(ending)
    return peak


def _takes_arrays(name: str) -> bool:
    return not (name in _CHEAP or name in _DEAR or name in VIEWS or name in _REDUCE)
