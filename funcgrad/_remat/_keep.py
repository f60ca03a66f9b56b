"""Run a program again with the values that a policy chooses under a name of their own."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from funcgrad._compat import Jaxpr, JaxprEqn, Literal, primitives, value_name
from funcgrad._jaxpr import bind, bodies
from funcgrad._remat._policies import Candidate, Decision, Policy
from funcgrad._remat._tie import reads_its_output, tie
from funcgrad._remat._values import OWN, Origin, Scope, describe

NAMES = {Decision.SAVE: f"{OWN}saved", Decision.OFFLOAD: f"{OWN}offloaded"}
_ENTERED = ("call", "scan", "branch")

Key = tuple[int, ...]  # the equations entered and the equation, by identity


@dataclasses.dataclass(frozen=True)
class Kept:
    """What becomes of one output, and the user's name for it."""

    decision: Decision = Decision.RECOMPUTE
    name: str = ""

    def mark(self, out: Any) -> Any:
        """``out`` under the name by which JAX keeps it."""
        if self.decision is Decision.RECOMPUTE:
            return out
        if jax.numpy.iscomplexobj(out):  # JAX keeps no complex value (it rounds what it keeps)
            return lax.complex(self.mark(lax.real(out)), self.mark(lax.imag(out)))
        out = checkpoint_name(out, self.name) if self.name else out
        return checkpoint_name(out, NAMES[self.decision])


Choice = Mapping[Key, tuple[Kept, ...]]


@dataclasses.dataclass(frozen=True)
class Output:
    """An output of an equation, in its scope."""

    scope: Scope
    eqn: JaxprEqn
    index: int

    @property
    def key(self) -> Key:
        """Where the equation stands, also where several share one body."""
        return (*map(id, self.scope.parents()), id(self.eqn))


def outputs(scope: Scope) -> Iterator[Output]:
    """Every output that a checkpoint of this program can keep.

    Custom derivative rules are one operation each.  An inner checkpoint has decided for
    itself, and a ``while`` loop cannot be differentiated backwards: nothing in them.
    """
    for eqn in scope.jaxpr.eqns:
        if is_checkpoint(eqn) or eqn.primitive is primitives.while_p:
            continue
        nested = [body for body in bodies(eqn) if body.role in _ENTERED]
        for body in nested:
            yield from outputs(scope.inside(eqn, body))
        if not nested:
            yield from (Output(scope, eqn, index) for index in range(len(eqn.outvars)))


def is_checkpoint(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` is a ``jax.checkpoint`` inside the program, old or new."""
    if eqn.primitive is primitives.remat_p:
        return True
    return type(eqn.params.get("_prim")).__name__ == "RematTraced"


def maker(scope: Scope, atom: Any) -> Output | None:
    """The output that ``atom`` is, seen through names and calls; ``None`` beyond a loop."""
    if isinstance(atom, Literal):
        return None
    eqn = scope.maker(atom)
    if eqn is None:
        place = next((i for i, v in enumerate(scope.jaxpr.invars) if v is atom), None)
        if place is None or not scope.outer or not scope.eqn or not scope.body:
            return None
        operand = scope.body.operands[place]
        if scope.body.role != "call" or operand is None:
            return None
        return maker(scope.outer, scope.eqn.invars[operand])
    if value_name(eqn) is not None:
        return maker(scope, eqn.invars[0])
    index = eqn.outvars.index(atom)
    if is_checkpoint(eqn) or eqn.primitive is primitives.while_p:
        return None
    for body in bodies(eqn):
        if body.role == "call":
            return maker(scope.inside(eqn, body), body.jaxpr.outvars[body.results.index(index)])
        if body.role in _ENTERED:
            return None
    return Output(scope, eqn, index)


def choose(jaxpr: Jaxpr, policy: Policy, call: str) -> dict[Key, tuple[Kept, ...]]:
    """What becomes of each equation's outputs; the equations that keep none are left out.

    A name stands for the value that it marks, not for a copy of it: it is kept where it is
    made, so that also what else reads it, its own derivative above all, reads what is kept.
    """
    found, names = [], {}
    for output in outputs(Scope(jaxpr)):
        name = value_name(output.eqn)
        if name is None:
            found.append(output)
            continue
        made = maker(output.scope, output.eqn.invars[0])
        if made is None:  # what a loop or an argument gives: the named copy is kept
            found.append(output)
            made = output
        names.setdefault((made.key, made.index), []).append(name)

    candidates = []
    for output in found:
        marks = tuple(names.get((output.key, output.index), ()))
        made = Origin("computed", scope=output.scope, eqn=output.eqn, name=" ".join(marks))
        value = describe(output.eqn.outvars[output.index].aval, made)
        candidates.append(Candidate(output.eqn.primitive, output.eqn.params, marks, value))
    policy.check(candidates, call)

    choice: dict[Key, list[Kept]] = {}
    for output, candidate in zip(found, candidates, strict=True):
        decision = policy.decide(candidate)
        if decision is not Decision.RECOMPUTE:
            row = choice.setdefault(output.key, [Kept()] * len(output.eqn.outvars))
            row[output.index] = Kept(decision, *candidate.names[:1])
    return {key: tuple(row) for key, row in choice.items()}


class Keeper:
    """The rule of ``evaluate`` that names what was chosen."""

    def __init__(self, choice: Choice, parents: Key = ()):
        self.choice, self.parents = choice, parents

    def enter(self, eqn: JaxprEqn) -> "Keeper":
        """The rule for the bodies of ``eqn``."""
        return Keeper(self.choice, (*self.parents, id(eqn)))

    def __call__(self, eqn: JaxprEqn) -> Any:
        """Keep ``eqn`` as it is (``None``), or run it with its chosen outputs named."""
        row = self.choice.get((*self.parents, id(eqn)))
        if row is not None:
            return lambda *inputs: _keep(eqn, row, inputs)
        return (lambda *inputs: bind(eqn, *inputs)) if is_checkpoint(eqn) else None


def _keep(eqn: JaxprEqn, row: Sequence[Kept], inputs: Sequence[Any]) -> Sequence[Any]:
    def named(outputs: Sequence[Any]) -> list[Any]:
        return [kept.mark(out) for out, kept in zip(outputs, row, strict=True)]

    if not reads_its_output(eqn):
        return named(bind(eqn, *inputs))
    apart = [lax.stop_gradient(x) if _is_float(x) else x for x in inputs]
    return tie(eqn, inputs, named(bind(eqn, *apart)))


def _is_float(x: Any) -> bool:
    return jax.numpy.issubdtype(jax.typeof(x).dtype, jax.numpy.inexact)
