"""Which leaves reach a value, and whether a derivative comes along: marks along a jaxpr."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from funcgrad import _jaxpr
from funcgrad._compat import Jaxpr, JaxprEqn, Literal, checkpoint_of, primitives, scopes
from funcgrad._jaxpr import SourceLine
from funcgrad._stopping._inference_mode import inference_p
from funcgrad._stopping._no_grad import NO_GRAD
from funcgrad._stopping._rules import passing


@dataclasses.dataclass(frozen=True)
class Cut:
    """A place where a leaf's path to the result loses its derivative."""

    reason: str
    line: SourceLine | None

    def __str__(self) -> str:
        return self.reason if self.line is None else f"{self.reason} at {self.line}"


class Rank(enum.IntEnum):
    """How a leaf reaches a value: as numbers only, with a derivative of zero, with a derivative."""

    NONE = 0
    ZERO = 1
    LIVE = 2


@dataclasses.dataclass(frozen=True)
class Mark:
    """How one leaf reaches a value, and the cuts on the way where no better way exists."""

    rank: Rank
    cuts: frozenset[Cut] = frozenset()

    def __or__(self, other: "Mark") -> "Mark":
        if self.rank is not other.rank:
            return max(self, other, key=lambda mark: mark.rank)
        return Mark(self.rank, self.cuts | other.cuts)


Marks: TypeAlias = dict[int, Mark]

_FLAT = {
    primitives.round_p,
    primitives.floor_p,
    primitives.ceil_p,
    primitives.sign_p,
    primitives.bitcast_convert_type_p,
}
# Each output is its own input, moved about.
_SIDE_BY_SIDE = {
    primitives.sort_p.name,
    primitives.device_put_p.name,
    primitives.psum_p.name,
    "psum_invariant",
    "optimization_barrier",
}


def join(marks: Iterable[Marks]) -> Marks:
    """How the leaves reach a value that is made of several."""
    joined: Marks = {}
    for each in marks:
        for leaf, mark in each.items():
            joined[leaf] = mark | joined[leaf] if leaf in joined else mark
    return joined


def lowered(marks: Marks, rank: Rank, cut: Callable[[], Cut]) -> Marks:
    """The marks behind a place that lets no more than ``rank`` pass."""
    if all(mark.rank <= rank for mark in marks.values()):
        return marks
    new = Mark(rank, frozenset([cut()]))
    return {leaf: new if mark.rank > rank else mark for leaf, mark in marks.items()}


class Follower:
    """Carries marks from a jaxpr's inputs to its outputs, through nested bodies."""

    def __init__(self) -> None:
        self._order: dict[Cut, int] = {}

    def in_order(self, cuts: Iterable[Cut]) -> tuple[Cut, ...]:
        """Cuts in the order in which the program meets them."""
        return tuple(sorted(cuts, key=lambda cut: self._order.get(cut, -1)))

    def run(
        self, jaxpr: Jaxpr, marks: Sequence[Marks], parents: tuple[JaxprEqn, ...]
    ) -> list[Marks]:
        """The marks of the outputs of ``jaxpr`` from those of its inputs."""
        env: dict[Any, Marks] = dict(zip(jaxpr.invars, marks, strict=True))

        def read(atom: Any) -> Marks:
            return {} if isinstance(atom, Literal) else env.get(atom, {})

        for eqn in jaxpr.eqns:
            _refuse_references(eqn, parents)
            inputs = [read(atom) for atom in eqn.invars]
            if any(inputs):
                env.update(zip(eqn.outvars, self._outputs(eqn, inputs, parents), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _outputs(self, eqn: JaxprEqn, inputs: list[Marks], parents: Any) -> list[Marks]:
        nested = _jaxpr.bodies(eqn)
        held = None if nested else checkpoint_of(eqn)
        if held is not None and len(held.jaxpr.invars) == len(inputs):  # under jax_remat3
            return self.run(held.jaxpr, inputs, (*parents, eqn))
        if not nested or any(body.role in ("rule", "opaque") for body in nested):
            return self._plain(eqn, inputs, parents)

        def enter(body: Any, inputs: Sequence[Marks]) -> list[Marks]:
            return self.run(body.jaxpr, [inputs[i] for i in body.operands], (*parents, eqn))

        if eqn.primitive is primitives.while_p:
            test, step = nested
            n_consts = len(inputs) - len(eqn.outvars)
            while True:
                (stops,) = enter(test, inputs)
                before = inputs[n_consts:]
                after = enter(step, inputs)
                carry = [join([a, b, stops]) for a, b in zip(after, before, strict=True)]
                if carry == before:
                    return carry
                inputs = inputs[:n_consts] + carry
        if eqn.primitive is primitives.cond_p:
            outs = [enter(body, inputs) for body in nested]
            return [join([inputs[0], *marks]) for marks in zip(*outs, strict=True)]
        if eqn.primitive is primitives.scan_p:
            return self._scan(eqn, inputs, lambda inputs: enter(nested[0], inputs))
        return enter(nested[0], inputs)

    def _scan(self, eqn: JaxprEqn, inputs: list[Marks], step: Any) -> list[Marks]:
        """Iteration by iteration, until the carried marks are ones that were there before."""
        n_consts, n_carry = _jaxpr.loop_sizes(eqn)
        consts, xs = inputs[:n_consts], inputs[n_consts + n_carry :]
        length = eqn.params["length"]
        carries = [inputs[n_consts : n_consts + n_carry]]
        stacked: list[Marks] = [{} for _ in eqn.outvars[n_carry:]]
        while len(carries) <= length:
            out = step([*consts, *carries[-1], *xs])
            stacked = [join(pair) for pair in zip(stacked, out[n_carry:], strict=True)]
            if out[:n_carry] in carries:
                first = carries.index(out[:n_carry])
                last = first + (length - first) % (len(carries) - first)
                return [*carries[last], *stacked]
            carries.append(out[:n_carry])
        return [*carries[length], *stacked]

    def _plain(self, eqn: JaxprEqn, inputs: list[Marks], parents: Any) -> list[Marks]:
        prim, name = eqn.primitive, eqn.primitive.name

        def lower(marks: Marks, rank: Rank, reason: str) -> Marks:
            return lowered(marks, rank, lambda: self._cut(reason, eqn, parents))

        if all(mark.rank is Rank.NONE for marks in inputs for mark in marks.values()):
            return [join(inputs)] * len(eqn.outvars)
        live = None if name in _SIDE_BY_SIDE or prim is inference_p else passing(eqn)
        outputs = []
        for k, var in enumerate(eqn.outvars):
            dtype = getattr(var.aval, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
                is_cast = prim is primitives.convert_element_type_p
                reason = f"cast to {dtype}" if is_cast else f"{name}, which gives {dtype}"
                out = lower(join(inputs), Rank.NONE, reason)
            elif prim is primitives.stop_gradient_p or prim is inference_p:
                is_region = NO_GRAD in scopes(eqn)
                out = lower(join(inputs), Rank.NONE, "no_grad" if is_region else name)
            elif prim in _FLAT:
                out = lower(join(inputs), Rank.ZERO, name)
            elif prim is primitives.mul_p and any(map(_is_zero, eqn.invars)):
                out = lower(join(inputs), Rank.ZERO, "multiplied by 0")
            elif name in _SIDE_BY_SIDE and len(eqn.invars) == len(eqn.outvars):
                others = join(marks for j, marks in enumerate(inputs) if j != k and name == "sort")
                out = join([inputs[k], lower(others, Rank.NONE, "sort, which only orders")])
            elif live is not None:
                rank = Rank.ZERO if prim is primitives.custom_jvp_call_p else Rank.NONE
                out = join(
                    marks if j in live[k] else lower(marks, rank, "custom derivative rule")
                    for j, marks in enumerate(inputs)
                )
            else:
                out = join(inputs)
            outputs.append(out)
        return outputs

    def _cut(self, reason: str, eqn: JaxprEqn, parents: Any) -> Cut:
        cut = Cut(reason, _jaxpr.source_line(eqn, parents))
        self._order.setdefault(cut, len(self._order))
        return cut


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and bool(np.all(atom.val == 0))


def _refuse_references(eqn: JaxprEqn, parents: Any) -> None:
    if any(hasattr(atom.aval, "inner_aval") for atom in eqn.invars):
        raise TypeError(
            "unused_grads: what reaches the result is a value; got a mutable reference at "
            f"{_jaxpr.source_line(eqn, parents)}, which is not followed. Carry the value instead."
        )
