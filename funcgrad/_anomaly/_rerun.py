"""Run a program again, equation by equation, and follow what is not finite to its origins."""

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from funcgrad import _jaxpr
from funcgrad._anomaly import _loops, _mesh
from funcgrad._anomaly._phase import derivative_of, is_backward
from funcgrad._anomaly._report import summarise
from funcgrad._anomaly._values import Mask, Origin, Refused, Value, attribute, nonfinite
from funcgrad._anomaly._where_trap import mark_of, met_by
from funcgrad._compat import Literal, checkpoint_of, primitives

# One equation in many iterations: so many are told apart.
_INSTANCES = 8


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an equation stands: those around it, in words, and the devices."""

    parents: tuple[Any, ...] = ()
    path: tuple[str, ...] = ()
    devices: "_mesh.Devices | None" = None

    def enter(self, eqn: Any, *words: str) -> "Place":
        """Inside ``eqn``."""
        return dataclasses.replace(self, parents=(*self.parents, eqn), path=(*self.path, *words))

    def around(self, eqn: Any | None) -> str:
        """`` at file:line`` of ``eqn``, empty where no line is known."""
        line = _jaxpr.source_line(eqn, self.parents) if eqn else None
        return f" at {line}" if line else ""


class Rerun:
    """One run; holds the origins found so far."""

    def __init__(self) -> None:
        self._order = 0
        # What a `where` discards in each iteration of a loop is gone when the next one comes.
        self._instances: dict[Any, weakref.WeakSet[Origin]] = {}

    def given(self, x: Any, kind: Any, name: str) -> Value:
        """A value that nothing computes: its NaN and its infinities are of different origin."""
        bad = nonfinite(x)
        if bad is None:
            return Value(x)
        nan = np.isnan(np.asarray(x))
        value = Value(x)
        for mask in (bad & nan, bad & ~nan):
            if mask.any():
                self._order += 1
                value.origins[Origin(self._order, kind, output=summarise(name, x))] = mask
        return value

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value], at: Place
    ) -> list[Value]:
        """The outputs of ``jaxpr``."""
        here = lambda atom, x: x if at.devices is None else at.devices.spread(atom, x)
        env: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        for var, x in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.given(here(var, x), "constant", "a constant closed over")

        def read(atom: Any, eqn: Any = None) -> Value:
            if isinstance(atom, Literal):
                aval: Any = atom.aval
                value = here(atom, np.asarray(atom.val, aval.dtype))
                return self.given(value, "constant", f"a number{at.around(eqn)}")
            return env[atom]

        last_use = {
            atom: i
            for i, eqn in enumerate(jaxpr.eqns)
            for atom in (*eqn.invars, *eqn.outvars)
            if not isinstance(atom, Literal)
        }
        for atom in jaxpr.outvars:
            if not isinstance(atom, Literal):
                last_use.pop(atom, None)
        for i, eqn in enumerate(jaxpr.eqns):
            inputs = [read(atom, eqn) for atom in eqn.invars]
            outputs = self._equation(eqn, inputs, at, jaxpr.eqns[:i])
            env.update(zip(eqn.outvars, outputs, strict=True))
            for atom in (*eqn.invars, *eqn.outvars):
                if not isinstance(atom, Literal) and last_use.get(atom) == i:
                    env.pop(atom, None)
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(
        self, eqn: Any, inputs: list[Value], at: Place, before: Sequence[Any]
    ) -> list[Value]:
        if eqn.primitive is primitives.cond_p:
            return self._cond(eqn, inputs, at, before)
        if eqn.primitive is primitives.scan_p or eqn.primitive is primitives.while_p:
            return _loops.loop(self, eqn, inputs, at, before)
        if eqn.primitive.name == "shard_map":
            if at.devices is None:
                return _mesh.mapped(self, eqn, inputs, at)
        elif checkpoint := checkpoint_of(eqn):
            return self.run(checkpoint.jaxpr, checkpoint.consts, inputs, at.enter(eqn))
        elif (nested := _jaxpr.bodies(eqn)) and nested[0].role in ("call", "rule"):
            return self.run(nested[0].jaxpr, nested[0].consts, inputs, at.enter(eqn))
        return self.whole(eqn, inputs, at, before)

    def whole(
        self,
        eqn: Any,
        inputs: list[Value],
        at: Place,
        before: Sequence[Any] = (),
    ) -> list[Value]:
        """The outputs of ``eqn`` as it stands; what nothing explains begins here."""
        if not eqn.outvars:  # prints, and callbacks that give nothing
            return []
        if eqn.primitive.name == "io_callback":
            raise Refused(f"it calls io_callback{at.around(eqn)}, which may do something twice")
        outputs = self.execute(eqn, [value.array for value in inputs], at)
        # Where no experiment may be made, all that goes in is taken for a cause.
        again = (
            (lambda _: outputs)
            if _loops.may_not_end(eqn)
            else functools.partial(self.execute, eqn, at=at)
        )
        found = attribute(again, inputs, outputs)
        backward = is_backward(eqn, at.parents)
        line = _jaxpr.source_line(eqn, at.parents) if eqn.primitive.name == "select_n" else None
        mark = mark_of(eqn, inputs, line, outputs) if backward else None
        values = []
        for var, out, (masks, unexplained) in zip(eqn.outvars, outputs, found, strict=True):
            if unexplained is not None:
                origin = self.born(eqn, var, inputs, out, unexplained, at, before)
                masks[origin] = masks.get(origin, False) | unexplained
            for origin, mask in masks.items():
                if backward and origin.trap is None:
                    origin.trap = met_by(inputs, mask)
            values.append(Value(out, masks, mark))
        return values

    def born(
        self,
        eqn: Any,
        var: Any,
        inputs: Sequence[Value],
        out: Any,
        bad: Mask,
        at: Place,
        before: Sequence[Any] = (),
        note: str = "",
    ) -> Origin:
        """The origin of the elements ``bad`` of ``out``, which ``eqn`` gives for ``var``."""
        known = self._instances.setdefault((id(eqn), *map(id, at.parents)), weakref.WeakSet())
        last = max(known, key=lambda o: o.order, default=None)
        if last is not None and last.within == at.path:
            return last
        if last is not None and len(known) >= _INSTANCES:
            last.note = f"Or of a later iteration: {_INSTANCES} of them are told apart."
            return last
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        arrays, path = [value.array for value in inputs], at.path
        if at.devices is not None:
            arrays, out, index, device = at.devices.seen_at(eqn, var, arrays, out, index)
            path = (*path, *device)
        operands = tuple(
            summarise(f"operand {i}", x, index if np.shape(x) == np.shape(out) else None)
            for i, x in enumerate(arrays)
        )
        self._order += 1
        origin = Origin(
            self._order,
            "equation",
            eqn=eqn,
            parents=at.parents,
            path=path,
            within=at.path,
            output=summarise("result", out, index),
            bad=bad,
            operands=operands,
            makes="nan" if np.isnan(np.asarray(out)[index]) else "inf",
            backward=is_backward(eqn, at.parents),
            derivative_of=derivative_of(eqn, at.parents, before),
            infinities=tuple(o for value in inputs for o in value.origins if o.on_purpose),
            note=note,
        )
        known.add(origin)
        return origin

    def execute(self, eqn: Any, arrays: Sequence[Any], at: Place) -> Sequence[Any]:
        """The outputs of ``eqn``, on every device where it stands in ``shard_map``."""
        if at.devices is not None:
            return at.devices.execute(eqn, arrays)
        with eqn.ctx.manager:
            return _jaxpr.bind(eqn, *arrays)

    def _cond(self, eqn: Any, inputs: list[Value], at: Place, before: Sequence[Any]) -> list[Value]:
        chosen = np.unique(np.asarray(inputs[0].array))
        if eqn.params.get("branches_platforms") is not None or len(chosen) != 1:
            return self.whole(eqn, inputs, at, before)
        branches = _jaxpr.bodies(eqn)
        branch = min(max(int(chosen[0]), 0), len(branches) - 1)
        inside = at.enter(eqn, f"cond{at.around(eqn)}, branch {branch}")
        body = branches[branch]
        return self.run(body.jaxpr, body.consts, inputs[1:], inside)
