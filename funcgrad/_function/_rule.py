"""A traced rule, as the primitives carry it: programs over flat lists of arrays."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.interpreters import ad

from funcgrad._compat import ClosedJaxpr, eval_jaxpr, open_jaxpr
from funcgrad._function._linearity import BACKWARD, JVP, transposed

Arrays = list[Any]


def run(program: ClosedJaxpr, *args: Any) -> Arrays:
    """Run a closed jaxpr."""
    jaxpr, consts = open_jaxpr(program)
    return eval_jaxpr(jaxpr, consts, *args)


def trace_open(fun: Callable[..., Any], *avals: Any) -> tuple[ClosedJaxpr, Arrays, Any]:
    """``fun`` as a program whose first inputs are what it closes over, those values, its output.

    The program holds no value, so that it may outlive the transformation it was made in.
    """
    program, shapes = jax.make_jaxpr(fun, return_shape=True)(*avals)
    jaxpr, consts = open_jaxpr(program)
    if consts:
        types = [[jax.typeof(x) for x in consts], jax.tree.leaves(avals)]
        program = jax.make_jaxpr(lambda closed, args: eval_jaxpr(jaxpr, closed, *args))(*types)
    return program, list(consts), shapes


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Linear:
    """The derivative of a rule at some residuals: a linear map given by its transpose.

    ``pull(residuals, cotangents)`` is the user's ``backward``; a cotangent that is ``None`` is
    zero, and so is a result that is ``None``.  ``push(residuals, tangents)`` is the user's
    ``jvp``, or ``None``: then ``pull`` is transposed.  ``tangents`` and ``outputs`` are the types
    of what ``push`` takes and gives.
    """

    name: str
    tangents: tuple[Any, ...]
    outputs: tuple[Any, ...]
    pull: Callable[[Sequence[Any], Sequence[Any]], Arrays]
    given_push: Callable[[Sequence[Any], Sequence[Any]], Arrays] | None
    effects: Any = frozenset()
    is_high: bool = False

    def __repr__(self) -> str:
        return self.name

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Arrays:
        """The tangents of the outputs."""
        if self.given_push is not None:
            return self.given_push(residuals, tangents)
        types = [aval.to_ct_aval() for aval in self.outputs]
        return transposed(self.name, BACKWARD, self.pull, types, residuals, tangents)

    def turned(self) -> "Linear":
        """The map of a rule that gives ``jvp`` alone: its transpose is had from that."""
        push = self.given_push
        assert push is not None

        def pull(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Arrays:
            full = [
                ad.instantiate_zeros(ad.Zero(aval.to_ct_aval())) if c is None else c
                for c, aval in zip(cotangents, self.outputs, strict=True)
            ]
            return transposed(self.name, JVP, push, self.tangents, residuals, full)

        return dataclasses.replace(self, pull=pull)

    def batched(self, axis: Any, residual_axes: Sequence[Any], axes: Sequence[Any]) -> "Linear":
        """The map of all samples at once; a tangent that they share gets the sum of theirs."""

        def pull(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Arrays:
            each = _mapped(self.pull, axis, (list(residual_axes), 0))(
                list(residuals), list(cotangents)
            )
            return [
                x.sum(0) if shared is None and x is not None else x
                for x, shared in zip(each, axes, strict=True)
            ]

        def push(residuals: Sequence[Any], tangents: Sequence[Any]) -> Arrays:
            assert self.given_push is not None
            given = _mapped(self.given_push, axis, (list(residual_axes), list(axes)))
            return given(list(residuals), list(tangents))

        outer = functools.partial(_with_axis, axis)
        return dataclasses.replace(
            self,
            tangents=tuple(
                aval if shared is None else outer(aval)
                for aval, shared in zip(self.tangents, axes, strict=True)
            ),
            outputs=tuple(map(outer, self.outputs)),
            pull=pull,
            given_push=None if self.given_push is None else push,
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rule:
    """A forward program with its derivative.

    The operands are values closed over (the first ``n_closed`` by ``forward``, then those of
    the rest of the rule) and the last ``n_args`` the array leaves of the arguments.  ``primal``
    gives the outputs, ``kept`` those and the saved values that are neither operand nor output
    (the extras).  ``sources`` says where each residual comes from.  ``extras(operands, outputs)``
    are the extras as a function of both, which is how they are differentiated.
    """

    name: str
    primal: ClosedJaxpr
    kept: ClosedJaxpr
    n_closed: int
    n_args: int
    n_outputs: int
    differentiable: tuple[bool, ...]
    sources: tuple[tuple[str, int], ...]
    extras: Callable[[Sequence[Any], Sequence[Any]], Arrays]
    linear: Callable[[tuple[bool, ...]], tuple[Linear, tuple[bool, ...]]]
    specialise: Callable[[tuple[bool, ...]], "tuple[Rule, tuple[Any, ...]] | None"]
    vmap: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return self.name

    def program(self, kept: bool) -> ClosedJaxpr:
        """The forward program, with or without the extras."""
        return self.kept if kept else self.primal

    def residuals(self, operands: Sequence[Any], kept: Sequence[Any]) -> Arrays:
        """The saved values from the operands and what ``kept`` gave."""
        places = {"operand": operands, "output": kept, "extra": kept[self.n_outputs :]}
        return [places[kind][index] for kind, index in self.sources]

    def batched(self, axis: Any, axes: Sequence[Any], avals: Sequence[Any]) -> "Rule":
        """The rule of all samples at once: operands mapped over axis 0 or shared, ``axes``."""
        axes = list(axes)

        def program(one: ClosedJaxpr) -> ClosedJaxpr:
            mapped = _mapped(lambda operands: run(one, *operands), axis, (axes,))
            return jax.make_jaxpr(lambda *operands: mapped(list(operands)))(*avals)

        def extras(operands: Sequence[Any], outputs: Sequence[Any]) -> Arrays:
            return _mapped(self.extras, axis, (axes, 0))(list(operands), list(outputs))

        def linear(active: tuple[bool, ...]) -> tuple[Linear, tuple[bool, ...]]:
            one, used = self.linear(active)
            residual_axes = [axes[i] if kind == "operand" else 0 for kind, i in self.sources]
            args = axes[len(axes) - self.n_args :]
            return one.batched(
                axis, residual_axes, [a for a, use in zip(args, used, strict=True) if use]
            ), used

        def specialise(active: tuple[bool, ...]) -> Any:
            other = self.specialise(active)
            if other is None:
                return None
            one, closed = other
            n_first = len(axes) - self.n_args
            shared = [None] * len(closed)
            types = [*map(jax.typeof, closed), *avals[n_first:]]
            return one.batched(axis, [*shared, *axes[n_first:]], types), closed

        primal = program(self.primal)
        return dataclasses.replace(
            self,
            primal=primal,
            kept=primal if self.kept is self.primal else program(self.kept),
            extras=extras,
            linear=linear,
            specialise=specialise,
        )


def _mapped(fun: Callable[..., Any], axis: Any, in_axes: Any) -> Callable[..., Any]:
    return jax.vmap(
        fun,
        in_axes=in_axes,
        axis_size=axis.size,
        axis_name=axis.name,
        spmd_axis_name=axis.spmd_name,
    )


def _with_axis(axis: Any, aval: Any) -> Any:
    return jex.unmapped_aval(axis.size, 0, aval, axis.explicit_mesh_axis)
