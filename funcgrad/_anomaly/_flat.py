"""A program as one list of equations, calls opened, in groups that are compiled together."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from funcgrad import _jaxpr
from funcgrad._compat import Literal, checkpoint_of, primitives

# All that a group computes is held at once.
_LONGEST = 64
# On CPU most of the time of a first run goes into compiling, and the program runs once.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_LOOKED_INTO = {primitives.cond_p, primitives.scan_p, primitives.while_p}


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A value of the flat program; ``var`` is one of the variables that stand for it."""

    var: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation, those around it, those before it in its body, and its operands."""

    eqn: Any
    parents: tuple[Any, ...]
    before: Sequence[Any]
    operands: list[Any]
    results: list[Slot]

    @property
    def is_plain(self) -> bool:
        """Whether it may run among others, in one program."""
        eqn = self.eqn
        inside = eqn.primitive in _LOOKED_INTO or eqn.primitive.name == "shard_map"
        return not inside and not eqn.effects and bool(eqn.outvars)


@dataclasses.dataclass(eq=False)
class Group:
    """Steps that run together, or one that is looked into."""

    steps: list[Step]
    dead: list[Slot] = dataclasses.field(default_factory=list)  # of no use afterwards
    _program: Callable[..., Any] | None = None

    def run(self, read: Callable[[Slot], Any], devices: Any) -> list[list[Any]]:
        """The results of each step."""
        made = {slot for step in self.steps for slot in step.results}
        inputs = list(
            dict.fromkeys(
                slot
                for step in self.steps
                for slot in step.operands
                if isinstance(slot, Slot) and slot not in made
            )
        )
        results = [slot for step in self.steps for slot in step.results]

        def program(*arrays: Any) -> list[Any]:
            env = dict(zip(inputs, arrays, strict=True))
            for step in self.steps:
                operands = [o.val if isinstance(o, Literal) else env[o] for o in step.operands]
                with step.eqn.ctx.manager:
                    outputs = _jaxpr.bind(step.eqn, *operands)
                env.update(zip(step.results, outputs, strict=True))
            return [env[slot] for slot in results]

        run = self._program
        if run is None:
            if devices is not None:
                atoms = ([slot.var for slot in side] for side in (inputs, results))
                run = devices.compile(program, *atoms)
            else:
                quick = _QUICK if jax.default_backend() == "cpu" else {}
                run = jax.jit(program, compiler_options=quick)
            self._program = run
        found = iter(run(*(read(slot) for slot in inputs)))
        return [[next(found) for _ in step.results] for step in self.steps]


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """A flat program; ``given`` are its constants."""

    inputs: list[Slot]
    given: list[tuple[Slot, Any]]
    groups: list[Group]
    outputs: list[Any]


def flatten(jaxpr: Any, consts: Sequence[Any], compiled: bool) -> Flat:
    """``jaxpr`` with the bodies of its calls, checkpoints and custom rules in their places."""
    steps: list[Step] = []
    given: list[tuple[Slot, Any]] = []

    def inside(jaxpr: Any, consts: Sequence[Any], args: list[Any], parents: Any) -> list[Any]:
        env = dict(zip(jaxpr.invars, args, strict=True))
        for var, x in zip(jaxpr.constvars, consts, strict=True):
            env[var] = Slot(var)
            given.append((env[var], x))
        for i, eqn in enumerate(jaxpr.eqns):
            operands = [a if isinstance(a, Literal) else env[a] for a in eqn.invars]
            body = _inlined(eqn)
            if body is not None:
                results = inside(*body, operands, (*parents, eqn))
            else:
                results = [Slot(var) for var in eqn.outvars]
                steps.append(Step(eqn, parents, jaxpr.eqns[:i], operands, results))
            env.update(zip(eqn.outvars, results, strict=True))
        return [a if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]

    inputs = [Slot(var) for var in jaxpr.invars]
    outputs = inside(jaxpr, consts, list(inputs), ())
    groups: list[Group] = []
    for step in steps:
        joins = compiled and groups and step.is_plain and groups[-1].steps[-1].is_plain
        if joins and len(groups[-1].steps) < _LONGEST:
            groups[-1].steps.append(step)
        else:
            groups.append(Group([step]))
    _bury(groups, {out for out in outputs if isinstance(out, Slot)})
    return Flat(inputs, given, groups, outputs)


def _inlined(eqn: Any) -> tuple[Any, Any] | None:
    if checkpoint := checkpoint_of(eqn):
        return checkpoint.jaxpr, checkpoint.consts
    if eqn.primitive in _LOOKED_INTO or eqn.primitive.name == "shard_map":
        return None
    nested = _jaxpr.bodies(eqn)
    if nested and nested[0].role in ("call", "rule"):
        return nested[0].jaxpr, nested[0].consts
    return None


def _bury(groups: list[Group], kept: set[Any]) -> None:
    last = {
        slot: group
        for group in groups
        for step in group.steps
        for slot in (*step.operands, *step.results)
        if isinstance(slot, Slot)
    }
    for slot, group in last.items():
        if slot not in kept:
            group.dead.append(slot)
