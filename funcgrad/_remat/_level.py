"""A program linearised for planning: its forward and backward operations, its loops held apart.

JAX differentiates; what is read here is the pair of programs that ``jax.vjp`` makes.  A scan
that carries a gradient is put in as one opaque operation on either side, and its body is a
level of its own, so that each body value is one decision however often the body runs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from funcgrad._compat import Literal, open_jaxpr
from funcgrad._jaxpr import bodies
from funcgrad._remat._cost import nbytes
from funcgrad._remat._linear import LinearMap, linear_call
from funcgrad._remat._program import Atom, Loop, Op, Program, flatten, reader, run

# Their derivative is nothing.
_FLAT = frozenset("stop_gradient floor ceil round sign".split())

held_p: Any = jex.Primitive("held_loop")
held_p.multiple_results = True
held_p.def_abstract_eval(lambda *args, key, out_avals: list(out_avals))

pull_p: Any = jex.Primitive("held_loop_backward")
pull_p.multiple_results = True
pull_p.def_abstract_eval(lambda *args, key, out_avals: list(out_avals))


@dataclasses.dataclass(eq=False)
class Level:
    """The forward and backward programs of one body, and of the loops in it.

    ``residuals[i]`` is the forward value that input ``i`` of ``backward`` receives; its other
    inputs are the cotangents of the outputs ``diff_out``, and it returns those of the inputs
    ``diff_in``.
    """

    forward: Program
    backward: Program
    residuals: list[Atom]
    n_outs: int
    diff_in: list[int]
    diff_out: list[int]
    loops: dict[int, "HeldLoop"]
    kept_by_jax: int

    @property
    def outputs(self) -> list[Atom]:
        """The outputs of the program that was linearised."""
        return self.forward.outputs[: self.n_outs]

    def received(self, atom: Atom) -> Atom | None:
        """The forward value that an input of ``backward`` receives, if it is a residual."""
        if not isinstance(atom, int) or atom >= len(self.residuals):
            return None
        return self.residuals[atom]


@dataclasses.dataclass(eq=False)
class HeldLoop:
    """A scan with the level of its body.

    ``op`` is the scan as the user wrote it, ``stands`` what stands for it in the forward
    program; ``carries`` are the carried values with a gradient.
    """

    loop: Loop
    op: Op
    stands: Op
    level: Level
    carries: list[int]


def linearise(
    program: Program,
    args: Sequence[Any],
    marks: Sequence[bool],
    pool: list[Any],
    still: frozenset[Op] = frozenset(),
) -> Level:
    """Differentiate ``program`` in its marked inputs; ``args`` are values or their types.

    Loops in ``still`` have no gradient.
    """
    found: dict[int, tuple[Op, list[bool]]] = {}
    seen: dict[str, Any] = {}
    diff_in = [i for i, mark in enumerate(marks) if mark]

    def forward(*args: Any) -> Any:
        def of_diff(*diff: Any) -> Any:
            full = list(args)
            for i, x in zip(diff_in, diff, strict=True):
                full[i] = x
            outs, out_marks = _run_marked(program, full, marks, pool, found, still)
            seen["diff_out"] = [i for i, mark in enumerate(out_marks) if mark]
            return [outs[i] for i in seen["diff_out"]], outs

        _, pull, outs = jax.vjp(of_diff, *(args[i] for i in diff_in), has_aux=True)
        leaves, seen["pull"] = jax.tree.flatten(pull)
        seen["leaves"] = len(leaves)
        return [*outs, *leaves]

    forward_jaxpr: Any = jax.make_jaxpr(forward)(*args)
    if unmoved := [found[key][0] for key in _unmoved(forward_jaxpr)]:
        # Marked for what turns out to have no derivative, such as a custom rule's zero.
        return linearise(program, args, marks, pool, still.union(unmoved))
    n_outs = len(program.outputs)
    out_avals = forward_jaxpr.out_avals

    def backward(leaves: Any, cotangents: Any) -> Any:
        return jax.tree.unflatten(seen["pull"], leaves)(cotangents)

    backward_jaxpr = jax.make_jaxpr(backward)(
        out_avals[n_outs:], [out_avals[i] for i in seen["diff_out"]]
    )
    first = flatten(forward_jaxpr, pool)
    loops = {}
    for op in first.ops:
        if op.eqn.primitive is held_p:
            key = op.eqn.params["key"]
            loops[key] = _body_level(*found[key], op, pool)
    return Level(
        forward=first,
        backward=flatten(backward_jaxpr, pool),
        residuals=first.outputs[n_outs:],
        n_outs=n_outs,
        diff_in=diff_in,
        diff_out=seen["diff_out"],
        loops=loops,
        kept_by_jax=made_bytes(forward_jaxpr, n_outs),
    )


def _unmoved(closed: Any) -> list[int]:
    """Loops whose derivative JAX has not asked for: they stand in their rule still."""
    inside = (body.jaxpr.eqns for eqn in open_jaxpr(closed)[0].eqns for body in bodies(eqn))
    return [eqn.params["key"] for eqns in inside for eqn in eqns if eqn.primitive is held_p]


def made_bytes(closed: Any, first: int = 0) -> int:
    """Bytes of the outputs from ``first`` on that are neither inputs nor constants."""
    jaxpr, _ = open_jaxpr(closed)
    free = {*jaxpr.invars, *jaxpr.constvars}
    kept = {v for v in jaxpr.outvars[first:] if not isinstance(v, Literal)} - free
    return sum(nbytes(v.aval) for v in kept)


def _body_level(op: Op, marks: list[bool], stands: Op, pool: list[Any]) -> HeldLoop:
    assert op.loop is not None
    loop, body = op.loop, op.loop.body
    level = linearise(body, [body.avals[i] for i in body.inputs], marks, pool)
    carries = [i for i in range(loop.n_carry) if marks[loop.n_consts + i]]
    return HeldLoop(loop, op, stands, level, carries)


def is_inexact(aval: Any) -> bool:
    """Whether values of this type have a gradient."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _run_marked(
    program: Program,
    args: Sequence[Any],
    marks: Sequence[bool],
    pool: list[Any],
    found: dict[int, tuple[Op, list[bool]]],
    still: frozenset[Op],
) -> tuple[list[Any], list[bool]]:
    """Run ``program`` with the loops that carry a gradient held; which outputs have one."""
    marked = {i for i, mark in zip(program.inputs, marks, strict=True) if mark}

    def special(place: int, op: Op, read: Any) -> Any:
        if op.eqn.primitive.name in _FLAT:
            return None
        if not any(isinstance(a, int) and a in marked for a in op.reads):
            return None
        outs = [out for out in op.outputs if is_inexact(program.avals[out])]
        if op.loop is None:
            marked.update(outs)
            return None
        # What was lifted out of the body may have no gradient while its source has one.
        inside = [isinstance(a, int) and a in marked for a in op.loop.inputs]
        inside, after = loop_marks(op.loop, inside)
        if not any(after):
            return None
        marked.update(out for out, mark in zip(op.outputs, after, strict=True) if mark)
        if op in still:
            return None
        key = len(found)
        found[key] = op, inside
        avals = tuple(program.avals[out] for out in op.outputs)
        return _held(key, avals, inside, after, [read(a) for a in op.loop.inputs])

    env = run(program, args, pool, special=special)
    read = reader(env, pool)
    outputs = [read(a) for a in program.outputs]
    return outputs, [isinstance(a, int) and a in marked for a in program.outputs]


def loop_marks(loop: Loop, marks: list[bool]) -> tuple[list[bool], list[bool]]:
    """Which inputs of a loop's body have a gradient, first carry settled, and which outputs."""
    body, first = loop.body, loop.n_consts
    last = first + loop.n_carry
    while True:
        out = _follow(body, marks)
        carry = [a or b for a, b in zip(out[: loop.n_carry], marks[first:last], strict=True)]
        if carry == marks[first:last]:
            return marks, carry + out[loop.n_carry :]
        marks = [*marks[:first], *carry, *marks[last:]]


def _follow(program: Program, marks: list[bool]) -> list[bool]:
    marked = {i for i, mark in zip(program.inputs, marks, strict=True) if mark}
    for op in program.ops:
        if op.eqn.primitive.name in _FLAT:
            continue
        if op.loop:
            inside = [isinstance(a, int) and a in marked for a in op.loop.inputs]
            after = loop_marks(op.loop, inside)[1] if any(inside) else [False] * len(op.outputs)
            marked.update(out for out, mark in zip(op.outputs, after, strict=True) if mark)
        elif any(isinstance(a, int) and a in marked for a in op.inputs):
            marked.update(out for out in op.outputs if is_inexact(program.avals[out]))
    return [isinstance(a, int) and a in marked for a in program.outputs]


def _held(key: int, avals: Any, inside: Any, after: Any, values: list[Any]) -> list[Any]:
    """The loop as one operation, whose backward is one operation on its cotangents."""
    diff_in = [i for i, mark in enumerate(inside) if mark]

    @jax.custom_jvp
    def held(*values: Any) -> Any:
        return held_p.bind(*values, key=key, out_avals=avals)

    @held.defjvp
    def _(values: Any, tangents: Any) -> Any:
        outs = held_p.bind(*values, key=key, out_avals=avals)
        wanted = tuple(jax.typeof(tangents[i]) for i in diff_in)

        def transpose(residuals: Any, cotangents: Any) -> Any:
            return pull_p.bind(*cotangents, key=key, out_avals=wanted)

        diff_out = [i for i, mark in enumerate(after) if mark]
        moved = linear_call(
            LinearMap(_not_run, transpose),
            [],
            [tangents[i] for i in diff_in],
            [avals[i] for i in diff_out],
        )
        out_tangents = [no_tangent(out) for out in outs]
        for i, tangent in zip(diff_out, moved, strict=True):
            out_tangents[i] = tangent
        return outs, out_tangents

    return held(*values)


def no_tangent(x: Any) -> Any:
    """The tangent zero of a value, of JAX's own kind for integers and keys."""
    aval = jax.typeof(x)
    if is_inexact(aval):
        return jnp.zeros_like(x)
    return np.zeros(aval.shape, jax.dtypes.float0)


def _not_run(residuals: Any, tangents: Any) -> Any:
    raise AssertionError("a held loop is only read, never run")
