"""Run a level under a plan: forward keeps what was chosen, backward makes the rest again."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from funcgrad._compat import varying_axes
from funcgrad._jaxpr import bind
from funcgrad._remat._graph import ProgramGraph
from funcgrad._remat._level import HeldLoop, Level, held_p, is_inexact, pull_p
from funcgrad._remat._program import Atom, Op, context, reader, run


@dataclasses.dataclass(eq=False)
class Schedule:
    """What a level keeps, and which operations run when.

    ``kept`` are numbers of forward values; ``lent`` says which of a body's values are slices of
    a value of the level around it, and ``reads`` which inputs backward reads again.  ``steps``
    are the places in the backward program in order, each with those in the forward program
    that run again just before it.
    """

    level: Level
    kept: list[int]
    lent: dict[int, int]
    reads: set[int]
    forward_places: list[int]
    steps: list[tuple[int, list[int]]]
    last: list[int]
    loops: dict[int, "Schedule"]


def schedule(graph: ProgramGraph, kept: Collection[int]) -> Schedule:
    """Order the work of a feasible choice of candidates."""
    homes: dict[Level, set[int]] = {}
    lent: dict[Level, dict[int, int]] = {}
    for i in kept:
        places = graph.candidates[i].places
        homes.setdefault(places[0][0], set()).add(places[0][1])
        for (_, outer), (level, inner) in zip(places, places[1:], strict=False):
            lent.setdefault(level, {})[inner] = outer
    return _schedule(graph.level, homes, lent)


def _schedule(level: Level, homes: Any, lent: Any) -> Schedule:
    forward, backward = level.forward, level.backward
    loops = {key: _schedule(held.level, homes, lent) for key, held in level.loops.items()}
    kept = sorted(homes.get(level, ()))
    here = lent.get(level, {})
    ready = {*kept, *here}
    inputs = set(forward.inputs)
    reads: set[int] = set()

    def prepare(wanted: Sequence[Atom | None]) -> list[int]:
        again: set[int] = set()
        stack = [a for a in wanted if isinstance(a, int)]
        while stack:
            number = stack.pop()
            if number in ready:
                continue
            if number in inputs:
                reads.add(number)
                continue
            place = forward.producer[number]
            op = forward.ops[place]
            again.add(place)
            ready.update(op.outputs)
            stack.extend(a for a in op.inputs if isinstance(a, int))
        return sorted(again)

    steps = []
    for place in sorted(backward.needed(backward.outputs)):
        op = backward.ops[place]
        if op.eqn.primitive is pull_p:
            key = op.eqn.params["key"]
            wanted = outer_reads(level.loops[key], loops[key])
        else:
            wanted = [level.received(a) for a in op.inputs]
        steps.append((place, prepare(wanted)))
    last = prepare([level.received(a) for a in backward.outputs])
    places = sorted(forward.needed([*level.outputs, *kept]))
    return Schedule(level, kept, here, reads, places, steps, last, loops)


def outer_reads(held: HeldLoop, inside: Schedule) -> list[Atom]:
    """What the backward of a loop reads of the values around it."""
    op = held.stands
    wanted = [
        atom
        for number, atom in zip(held.level.forward.inputs, op.inputs, strict=True)
        if number in inside.reads
    ]
    return [*wanted, *inside.lent.values()]


def forward(plan: Schedule, args: Sequence[Any], pool: Sequence[Any]) -> tuple[list[Any], Any]:
    """The outputs of the level, and what is kept of it and of its loops."""
    level = plan.level
    loops: dict[int, Any] = {}

    def special(place: int, op: Op, read: Any) -> Any:
        if op.eqn.primitive is not held_p:
            return None
        key = op.eqn.params["key"]
        values = [read(a) for a in op.inputs]
        outs, loops[key] = _scan_forward(level.loops[key], plan.loops[key], values, pool)
        return outs

    env = run(level.forward, args, pool, places=plan.forward_places, special=special)
    read = reader(env, pool)
    return [read(a) for a in level.outputs], ([env[i] for i in plan.kept], loops)


def _scan_forward(held: HeldLoop, plan: Schedule, values: list[Any], pool: Any) -> Any:
    loop, params = held.loop, held.op.eqn.params
    consts, carry, xs = _split(loop, values)

    def step(carry: Any, x: Any) -> Any:
        outs, kept = forward(plan, [*consts, *carry, *x], pool)
        return outs[: loop.n_carry], (outs[loop.n_carry :], kept)

    carry, (ys, kept) = lax.scan(
        step, carry, xs, params["length"], params["reverse"], params["unroll"]
    )
    return [*carry, *ys], kept


def keeping_nothing(level: Level) -> Schedule:
    # The forward program, not the user's: the second derivative of a custom rule's forward
    # differs from that of the rule.
    loops = {key: keeping_nothing(held.level) for key, held in level.loops.items()}
    places = sorted(level.forward.needed(level.outputs))
    return Schedule(level, [], {}, set(), places, [], [], loops)


def _split(loop: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    first, last = loop.n_consts, loop.n_consts + loop.n_carry
    return list(values[:first]), list(values[first:last]), list(values[last:])


def backward(
    plan: Schedule,
    inputs: dict[int, Any],
    kept: Any,
    cotangents: Sequence[Any],
    pool: Sequence[Any],
    *,
    tied: bool,
) -> list[Any]:
    """The cotangents of the differentiated inputs.

    ``inputs`` holds the inputs that are read and the values that are lent, by number.  ``tied``
    makes what runs again wait for the cotangent at hand.
    """
    level = plan.level
    values, loops = kept
    env = dict(inputs)
    env.update(zip(plan.kept, values, strict=True))
    again = _Again(level, env, pool, tied)
    program = level.backward
    back: dict[int, Any] = {}
    n_residuals = len(level.residuals)
    back.update(zip(program.inputs[n_residuals:], cotangents, strict=True))
    moving = {i for i, _ in zip(program.inputs[n_residuals:], cotangents, strict=True)}
    for ct in cotangents:
        again.token = ct
    read_back, read_forward = reader(back, pool), reader(env, pool)

    def read(atom: Atom) -> Any:
        source = level.received(atom)
        return read_back(atom) if source is None else read_forward(source)

    for place, before in plan.steps:
        op = program.ops[place]
        again.run(before)
        outs = _step(level, plan, op, read, env, loops, pool)
        back.update(zip(op.outputs, outs, strict=True))
        if any(isinstance(a, int) and a in moving for a in op.inputs):
            moving.update(op.outputs)
            again.token = next((out for out in outs if _can_tie(out)), again.token)
    again.run(plan.last)
    return [read(a) for a in program.outputs]


def _step(level: Level, plan: Schedule, op: Op, read: Any, env: Any, loops: Any, pool: Any) -> Any:
    if op.eqn.primitive is not pull_p:
        return _bind(op, [read(a) for a in op.inputs])
    key = op.eqn.params["key"]
    held, inside = level.loops[key], plan.loops[key]
    values = {
        number: reader(env, pool)(atom)
        for number, atom in zip(held.level.forward.inputs, held.stands.inputs, strict=True)
        if number in inside.reads
    }
    lent = {number: env[outer] for number, outer in inside.lent.items()}
    cotangents = [read(a) for a in op.inputs]
    return _scan_backward(held, inside, values, lent, loops[key], cotangents, pool)


def _bind(op: Op, values: list[Any]) -> Any:
    with context(op):
        return bind(op.eqn, *values)


def _scan_backward(
    held: HeldLoop,
    plan: Schedule,
    values: dict[int, Any],
    lent: dict[int, Any],
    kept: Any,
    cotangents: list[Any],
    pool: Any,
) -> list[Any]:
    loop, level, params = held.loop, held.level, held.op.eqn.params
    inputs = level.forward.inputs
    n_carry = len(held.carries)
    still = {i: values[i] for i in inputs[: loop.n_consts] if i in values}
    scanned = {i: x for i, x in values.items() if i not in still}
    consts = [i for i in level.diff_in if i < loop.n_consts]
    zeros = [ad.instantiate_zeros(ad.Zero(level.forward.avals[inputs[i]])) for i in consts]

    def step(carry: Any, x: Any) -> Any:
        ct_carry, total = carry
        ct_ys, known, kept = x
        grads = backward(plan, {**still, **known}, kept, [*ct_carry, *ct_ys], pool, tied=False)
        of_consts = grads[: len(consts)]
        of_carry = grads[len(consts) : len(consts) + n_carry]
        total = [a + b for a, b in zip(total, of_consts, strict=True)]
        return (of_carry, total), grads[len(consts) + n_carry :]

    (of_carry, of_consts), of_xs = lax.scan(
        step,
        (cotangents[:n_carry], zeros),
        (cotangents[n_carry:], {**scanned, **lent}, kept),
        params["length"],
        not params["reverse"],
        params["unroll"],
    )
    return [*of_consts, *of_carry, *of_xs]


class _Again:
    """Runs forward operations again, each batch after the newest cotangent.

    Compilers share equal work, so what runs again would be the forward's own work, kept
    until then.  Where a batch reads only what forward had, one of its inputs (the smallest) is
    passed through a choice that always falls on it, but on a condition of the cotangent that
    no compiler can foresee; an optimisation barrier does not survive on every one.
    """

    def __init__(self, level: Level, env: Any, pool: Any, tied: bool) -> None:
        self.level, self.env, self.pool, self.tied = level, env, pool, tied
        self.later: set[int] = set()
        self.token: Any = None

    def run(self, places: list[int]) -> None:
        if not places:
            return
        never = _never(self.token) if self.tied else None
        local: dict[Any, Any] = {}
        read_env = reader(self.env, self.pool)
        for place in places:
            op = self.level.forward.ops[place]
            numbers = [a for a in op.inputs if isinstance(a, int)]
            tied = {*self.later, *local}
            if never is not None and tied.isdisjoint(numbers):
                avals = self.level.forward.avals
                free = [a for a in numbers if _may_wait(avals[a], read_env(a), never)]
                if free:
                    smallest = min(free, key=lambda a: math.prod(avals[a].shape))
                    local[smallest] = _tie(read_env(smallest), never)
            values = [
                local[a] if isinstance(a, int) and a in local else read_env(a) for a in op.inputs
            ]
            if op.eqn.primitive is held_p:
                held = self.level.loops[op.eqn.params["key"]]
                outs = _scan_forward(held, keeping_nothing(held.level), values, self.pool)[0]
            else:
                outs = _bind(op, values)
            self.env.update(zip(op.outputs, outs, strict=True))
            if never is not None and numbers:
                self.later.update(op.outputs)


def _can_tie(x: Any) -> bool:
    return hasattr(x, "dtype") and is_inexact(x) and x.size > 0


def _may_wait(aval: Any, x: Any, never: Any) -> bool:
    # A value that all devices share must not come to depend on one device's cotangent.
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and (
        varying_axes(never) <= varying_axes(x)
    )


def _never(token: Any) -> Any:
    """False, as nobody can tell without the number."""
    if not _can_tie(token):
        return None
    first = token.reshape(-1)[0] if token.ndim else token
    return (first != first) & (first == first)


def _tie(x: Any, never: Any) -> Any:
    return jnp.where(never, jnp.zeros_like(x), x)
