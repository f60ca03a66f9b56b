"""Inside ``shard_map``: one equation at a time on all devices.

A value that differs over mesh axes is held with one leading axis for each of them, so that
what each device has can be looked at from outside.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from funcgrad import _jaxpr
from funcgrad._anomaly._values import Value


@dataclasses.dataclass(frozen=True)
class Devices:
    """The mesh, which of its axes are mapped, and whether types say what varies over them."""

    mesh: Any
    names: tuple[str, ...]
    typed: bool
    _programs: dict[int, Any] = dataclasses.field(default_factory=dict)

    def axes(self, atom: Any) -> tuple[str, ...]:
        """The mesh axes over which a value may differ."""
        return tuple(sorted(atom.aval.manual_axis_type.varying)) if self.typed else self.names

    def spread(self, atom: Any, x: Any) -> Any:
        """A value that is the same everywhere, as a value of each device."""
        lead = tuple(self.mesh.shape[name] for name in self.axes(atom))
        return np.broadcast_to(x, (*lead, *np.shape(x))) if lead else x

    def map(self, fun: Any, in_specs: Any, out_specs: Any) -> Any:
        """``fun`` on each device."""
        return jax.jit(
            jax.shard_map(
                fun,
                mesh=self.mesh,
                in_specs=tuple(in_specs),
                out_specs=list(out_specs),
                axis_names=set(self.names),
                check_vma=self.typed,
            )
        )

    def _compile(self, fun: Any, ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        """``fun`` of what each device has; the atoms say what varies."""
        ins, outs = ([self.axes(atom) for atom in side] for side in (ins, outs))

        def local(*xs: Any) -> list[Any]:
            made = fun(*(x[(0,) * len(axes)] for x, axes in zip(xs, ins, strict=True)))
            return [y[(None,) * len(axes)] for y, axes in zip(made, outs, strict=True)]

        return self.map(local, *([PartitionSpec(*axes) for axes in side] for side in (ins, outs)))

    def execute(self, eqn: Any, arrays: Sequence[Any]) -> Sequence[Any]:
        """The outputs of ``eqn`` for what each device has."""

        def run(*xs: Any) -> Any:
            with eqn.ctx.manager:
                return _jaxpr.bind(eqn, *xs)

        if id(eqn) not in self._programs:
            compiled = self._compile(run, eqn.invars, eqn.outvars)
            self._programs[id(eqn)] = eqn, compiled  # who holds it keeps its id
        return self._programs[id(eqn)][1](*arrays)

    def seen_at(
        self, eqn: Any, var: Any, arrays: Sequence[Any], out: Any, index: tuple[int, ...]
    ) -> tuple[list[Any], Any, tuple[int, ...], tuple[str, ...]]:
        """What the device has where ``index`` points to, the index there, and the device."""
        axes = self.axes(var)
        device = dict(zip(axes, index, strict=False))
        local = lambda x, names: np.asarray(x)[tuple(device.get(name, 0) for name in names)]
        operands = [local(x, self.axes(atom)) for x, atom in zip(arrays, eqn.invars, strict=True)]
        words = ", ".join(f"{name}={i}" for name, i in device.items())
        return operands, local(out, axes), index[len(axes) :], (f"device {words}",) * bool(words)


def mapped(rerun: Any, eqn: Any, inputs: list[Value], at: Any) -> list[Value]:
    """The outputs of a ``shard_map``, seen from inside."""
    params = eqn.params
    (body,) = _jaxpr.bodies(eqn)
    names = tuple(name for name in params["mesh"].axis_names if name in params["newly_manual_axes"])
    devices = Devices(params["mesh"], names, params["check_vma"])
    atoms = [*body.jaxpr.invars, *body.jaxpr.outvars]
    if any(_partial_sums(atom) for atom in atoms):
        return rerun.whole(eqn, inputs, at)

    def enter(atom: Any, spec: Any) -> Any:
        axes = devices.axes(atom)
        put = devices.map(lambda x: [x[(None,) * len(axes)]], [spec], [PartitionSpec(*axes)])
        return lambda x: put(x)[0]

    def leave(atom: Any, spec: Any) -> Any:
        axes = devices.axes(atom)
        take = devices.map(lambda x: [x[(0,) * len(axes)]], [PartitionSpec(*axes)], [spec])
        return lambda x: take(x)[0]

    args = [
        value.map(enter(atom, spec))
        for value, atom, spec in zip(inputs, body.jaxpr.invars, params["in_specs"], strict=True)
    ]
    inside = dataclasses.replace(at.enter(eqn), devices=devices)
    outputs = rerun.run(body.jaxpr, body.consts, args, inside)
    return [
        value.map(leave(atom, spec))
        for value, atom, spec in zip(outputs, body.jaxpr.outvars, params["out_specs"], strict=True)
    ]


def _partial_sums(atom: Any) -> bool:
    kind = atom.aval.manual_axis_type
    return bool(kind.unreduced or kind.reduced)
