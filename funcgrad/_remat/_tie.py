"""An operation's kept output in the place of the operation, derivatives included.

``exp`` and ``tanh`` use their own output in their derivative.  Naming that output keeps it,
but the derivative reads the unnamed one, and a checkpoint computes it again.  Here the
output is computed once apart from the derivative, kept, and tied back to the inputs by a
primitive that gives the kept output and whose derivative reads the kept output.  It holds
on to the inputs, so that it can be differentiated any number of times; in compiled code it
is nothing.  (A ``custom_jvp`` would do, but JAX drops its rule when it splits a scan inside
a checkpoint, and the second derivative is silently wrong.)
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from funcgrad._compat import JaxprEqn, Literal, eval_jaxpr, primitives, zero_tangent
from funcgrad._jaxpr import bind

tie_p: Any = jex.Primitive("tie")
tie_p.multiple_results = True


def tie(eqn: JaxprEqn, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
    """``outputs``, which were computed by ``eqn`` at ``inputs``, as if computed here."""
    run = jax.make_jaxpr(lambda *args: list(bind(eqn, *args)))(*inputs)
    return tie_p.bind(*inputs, *outputs, run=run)


def reads_its_output(eqn: JaxprEqn) -> bool:
    """Whether the derivative of ``eqn`` uses an output of ``eqn``, as it is computed by it.

    False where the rule gives another output than the operation (Cholesky's clears the upper
    triangle), and for custom rules: to put a kept output there could change the derivative.
    False too where there is no derivative: the operation may stand where none is asked for.
    """
    inputs = [atom.aval for atom in eqn.invars]
    variables = enumerate(zip(eqn.invars, inputs, strict=True))
    floats = [i for i, (v, aval) in variables if _is_float(aval) and not isinstance(v, Literal)]
    if eqn.primitive in (primitives.custom_jvp_call_p, primitives.custom_vjp_call_p):
        return False
    if not floats or not any(_is_float(out.aval) for out in eqn.outvars):
        return False
    try:
        jaxpr, count = _pushforward(lambda *args: list(bind(eqn, *args)), inputs, floats)
    except Exception:
        return False  # no derivative, as a callback: whoever differentiates it is told so by JAX
    outs, eqns = jaxpr.jaxpr.outvars[:count], jaxpr.jaxpr.eqns
    same = [made for made in eqns if made.primitive is eqn.primitive and made.outvars == outs]
    if not same or not _same_inputs(same[0].invars, eqn.invars, jaxpr.jaxpr.invars):
        return False
    return any(atom in set(outs) for made in eqns for atom in _variables(made.invars))


def _same_inputs(found: Sequence[Any], original: Sequence[Any], inputs: Sequence[Any]) -> bool:
    return len(found) == len(original) and all(
        atom is inputs[i] or (isinstance(atom, Literal) and isinstance(original[i], Literal))
        for i, atom in enumerate(found)
    )


def _is_float(aval: Any) -> bool:
    return jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _pushforward(run: Any, inputs: Sequence[Any], places: Sequence[int]) -> tuple[Any, int]:
    """The jaxpr of (inputs, tangents of those at ``places``) to (outputs, their tangents)."""
    count = 0

    def pushforward(inputs: Any, tangents: Any) -> Any:
        nonlocal count

        def of_some(*some: Any) -> Any:
            full = list(inputs)
            for place, value in zip(places, some, strict=True):
                full[place] = value
            outs = run(*full)
            return [out for out in outs if _is_float(jax.typeof(out))], outs

        floats, moved, outs = jax.jvp(
            of_some, tuple(inputs[i] for i in places), tuple(tangents), has_aux=True
        )
        count = len(outs)
        return list(outs), list(moved)

    example = [jax.typeof(x) if not hasattr(x, "update") else x for x in inputs]
    return jax.make_jaxpr(pushforward)(example, [example[i] for i in places]), count


@tie_p.def_impl
def _impl(*args: Any, run: Any) -> Sequence[Any]:
    return list(args[len(run.in_avals) :])


@tie_p.def_abstract_eval
def _abstract_eval(*avals: Any, run: Any) -> Sequence[Any]:
    return list(avals[len(run.in_avals) :])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, run: Any) -> Any:
    count = len(run.in_avals)
    inputs, outputs = primals[:count], tie_p.bind(*primals, run=run)
    places = [i for i in range(count) if type(tangents[i]) is not ad.Zero]
    zeros = [zero_tangent(out) for out in outputs]
    if not places:
        return outputs, zeros
    jaxpr, _ = _pushforward(
        lambda *args: eval_jaxpr(run.jaxpr, run.consts, *args), list(inputs), places
    )
    moved = _read(jaxpr, [*inputs, *(tangents[i] for i in places)], outputs)
    moved = iter(moved)
    return outputs, [
        next(moved) if _is_float(jax.typeof(out)) else zero
        for out, zero in zip(outputs, zeros, strict=True)
    ]


def _read(jaxpr: Any, args: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The tangents that ``jaxpr`` computes, where its primal outputs are known already."""
    known = dict(zip(jaxpr.jaxpr.outvars, outputs, strict=False))  # the first are the primals
    wanted = jaxpr.jaxpr.outvars[len(outputs) :]
    needed = set(_variables(wanted)) - set(known)
    eqns = []
    for eqn in reversed(jaxpr.jaxpr.eqns):
        if needed & set(eqn.outvars):
            eqns.append(eqn)
            needed |= set(_variables(eqn.invars)) - set(known)
    env = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.jaxpr.invars, args, strict=True))
    env.update(known)
    read = lambda atom: atom.val if isinstance(atom, Literal) else env[atom]
    for eqn in reversed(eqns):
        outs = bind(eqn, *map(read, eqn.invars))
        env.update((v, out) for v, out in zip(eqn.outvars, outs, strict=True) if v not in known)
    return [read(atom) for atom in wanted]


def _batch(args: Sequence[Any], axes: Sequence[Any], *, run: Any) -> Any:
    count = len(run.in_avals)
    size = next(arg.shape[axis] for arg, axis in zip(args, axes, strict=True) if axis is not None)
    in_axes = list(axes[:count])
    each = lambda *inputs: eval_jaxpr(run.jaxpr, run.consts, *inputs)
    if any(axis is not None for axis in in_axes):
        each = jax.vmap(each, in_axes, axis_size=size)
    else:
        each = lambda *inputs: [
            lax.broadcast(out, (size,)) for out in eval_jaxpr(run.jaxpr, run.consts, *inputs)
        ]
    batched = jax.make_jaxpr(each)(*args[:count])
    outputs = [
        lax.broadcast(out, (size,)) if axis is None else jax.numpy.moveaxis(out, axis, 0)
        for out, axis in zip(args[count:], axes[count:], strict=True)
    ]
    return tie_p.bind(*args[:count], *outputs, run=batched), [0] * len(outputs)


ad.primitive_jvps[tie_p] = _jvp
batching.primitive_batchers[tie_p] = _batch
mlir.register_lowering(tie_p, lambda ctx, *args, run: args[len(run.in_avals) :])
