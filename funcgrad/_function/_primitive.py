"""Two primitives: a forward program with a rule, and the rule's derivative at a point.

``function`` runs forward.  Its derivative is ``linear``, which runs ``backward`` when it is
transposed.  Both stay whole under every transformation until they are compiled, so that the
derivative given is the derivative used, at any order and under remat.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from funcgrad._compat import ClosedJaxpr, open_jaxpr, zero_tangent
from funcgrad._function._linearity import LINEAR_MAP
from funcgrad._function._remat import named, partial_eval
from funcgrad._function._rule import Linear, Rule, run
from funcgrad._jaxpr import FUNCTION

function_p: Any = jex.Primitive(FUNCTION)
linear_p: Any = jex.Primitive(LINEAR_MAP)
once_p: Any = jex.Primitive(f"{FUNCTION}_once")
function_p.multiple_results = linear_p.multiple_results = True


def bind(rule: Rule, operands: Sequence[Any], kept: bool = False) -> list[Any]:
    """Run forward; with ``kept`` also the saved values that are not operands or outputs."""
    return function_p.bind(*operands, call_jaxpr=rule.program(kept), rule=rule, kept=kept)


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _forward(*operands: Any, call_jaxpr: ClosedJaxpr, rule: Rule, kept: bool) -> list[Any]:
    return run(call_jaxpr, *operands)


def _forward_types(*_: Any, call_jaxpr: ClosedJaxpr, rule: Rule, kept: bool) -> Any:
    return call_jaxpr.out_avals, open_jaxpr(call_jaxpr)[0].effects


def _forward_jvp(
    operands: Any, tangents: Any, *, call_jaxpr: ClosedJaxpr, rule: Rule, kept: bool
) -> Any:
    for operand, tangent in zip(operands[: rule.n_closed], tangents[: rule.n_closed], strict=True):
        if not _is_zero(tangent):
            raise TypeError(
                f"{rule.name}: backward gives the gradients of the arguments of forward only; got "
                f"a derivative with respect to {jax.typeof(operand).str_short()}, which forward "
                "closes over. Pass it to apply as an argument, or through jax.lax.stop_gradient "
                "where its gradient is meant to be zero."
            )
    n_first = len(operands) - rule.n_args
    active = tuple(not _is_zero(t) for t in tangents[n_first:])
    if not any(active):
        outputs = bind(rule, operands, kept)
        zeros = [zero_tangent(x) for x in outputs[: rule.n_outputs]]
        return outputs, zeros + _extra_tangents(rule, operands, tangents, outputs, zeros)

    other = rule.specialise(active)
    own, at = (rule, operands) if other is None else (other[0], [*other[1], *operands[n_first:]])
    made = named(own.kept, bind(own, at, kept=True))
    linear, used = own.linear(active)
    moving = [t for t, use in zip(tangents[n_first:], used, strict=True) if use]
    changes = iter(
        linear_p.bind(
            *own.residuals(at, made), *moving, linear=linear, n_residuals=len(own.sources)
        )
        if moving
        else map(zero_tangent, itertools.compress(made, own.differentiable))
    )
    changed = [
        next(changes) if differentiable else zero_tangent(x)
        for x, differentiable in zip(made[: own.n_outputs], own.differentiable, strict=True)
    ]
    if not kept:
        return made[: own.n_outputs], changed
    # What an earlier derivative has saved stays as it was, whatever is active at this order.
    outputs = made if own is rule else bind(rule, operands, kept=True)
    return outputs, changed + _extra_tangents(rule, operands, tangents, outputs, changed)


def _extra_tangents(rule: Rule, operands: Any, tangents: Any, kept: Any, changed: Any) -> list[Any]:
    outputs, extras = kept[: rule.n_outputs], kept[rule.n_outputs :]
    if not extras:
        return []
    values, changes = [*operands, *outputs], [*tangents, *changed]
    moving = [i for i, t in enumerate(changes) if not _is_zero(t)]
    if not moving:
        return [zero_tangent(x) for x in extras]

    def fun(*moved: Any) -> list[Any]:
        inputs = list(values)
        for i, x in zip(moving, moved, strict=True):
            inputs[i] = x
        return rule.extras(inputs[: len(operands)], inputs[len(operands) :])

    _, out = jax.jvp(fun, [values[i] for i in moving], [changes[i] for i in moving])
    return [
        zero_tangent(x) if t.dtype == jax.dtypes.float0 else t
        for x, t in zip(extras, out, strict=True)
    ]


def _forward_transpose(
    cotangents: Any, *operands: Any, call_jaxpr: ClosedJaxpr, rule: Rule, kept: bool
) -> Any:
    """A function that is linear is its own derivative, whose transpose is ``backward``."""
    n_first = len(operands) - rule.n_args
    unknown = [ad.is_undefined_primal(x) for x in operands]
    linear, used = rule.linear(tuple(unknown[n_first:]))
    saved = all(kind == "operand" and not unknown[i] for kind, i in rule.sources)
    if not saved or any(unknown[:n_first]):
        raise TypeError(
            f"{rule.name}: a function is transposed where it is linear; got a rule that saves what "
            "depends on the input. Save nothing that does, or use jax.vjp."
        )
    given = [c for c, d in zip(cotangents, rule.differentiable, strict=True) if d]
    residuals = [operands[i] for _, i in rule.sources]
    grads = iter(linear.pull(residuals, [None if _is_zero(c) else c for c in given]))
    back = [next(grads) if use else None for use in used]
    return [None] * n_first + [
        _or_zero(grad, x) if hidden else None
        for grad, x, hidden in zip(back, operands[n_first:], unknown[n_first:], strict=True)
    ]


def _or_zero(grad: Any, operand: Any) -> Any:
    return ad.Zero(operand.aval.to_ct_aval()) if grad is None else grad


def _to_front(operands: Any, axes: Any) -> tuple[list[Any], list[Any]]:
    front = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    return front, [None if axis is None else 0 for axis in axes]


def _is_shared(axis: Any, axes: Any, effects: Any) -> bool:
    """Whether all samples run the same: nothing is mapped, nor is the axis asked by its name."""
    named = any(getattr(effect, "name", None) == axis.name for effect in effects)
    return not named and all(a is None for a in axes)


def _forward_batch(
    axis: Any, operands: Any, axes: Any, *, call_jaxpr: ClosedJaxpr, rule: Rule, kept: bool
) -> Any:
    if _is_shared(axis, axes, open_jaxpr(call_jaxpr)[0].effects):
        return bind(rule, operands, kept), [None] * len(call_jaxpr.out_avals)
    operands, axes = _to_front(operands, axes)
    if rule.vmap is not None:
        outputs = rule.vmap(axis, operands, axes)
        if kept:
            rows = jax.vmap(rule.extras, in_axes=(axes, 0), axis_size=axis.size)
            outputs = [*outputs, *rows(operands, outputs)]
    else:
        avals = [jax.typeof(x) for x in operands]
        outputs = bind(rule.batched(axis, axes, avals), operands, kept)
    return outputs, [0] * len(outputs)


def _linear(*operands: Any, linear: Linear, n_residuals: int) -> list[Any]:
    return linear.push(operands[:n_residuals], operands[n_residuals:])


def _linear_types(*_: Any, linear: Linear, n_residuals: int) -> Any:
    return linear.outputs, linear.effects


def _linear_jvp(operands: Any, tangents: Any, *, linear: Linear, n_residuals: int) -> Any:
    residuals, point = operands[:n_residuals], operands[n_residuals:]
    out = linear_p.bind(*operands, linear=linear, n_residuals=n_residuals)
    total = [zero_tangent(x) for x in out]
    if not all(map(_is_zero, tangents[n_residuals:])):
        along = [ad.instantiate_zeros(t) for t in tangents[n_residuals:]]
        total = linear_p.bind(*residuals, *along, linear=linear, n_residuals=n_residuals)
    moving = [i for i, t in enumerate(tangents[:n_residuals]) if not _is_zero(t)]
    if moving:

        def fun(*moved: Any) -> list[Any]:
            at = list(residuals)
            for i, x in zip(moving, moved, strict=True):
                at[i] = x
            return linear.push(at, point)

        changes = [tangents[i] for i in moving]
        _, bent = jax.jvp(fun, [residuals[i] for i in moving], changes)
        total = [ad.add_tangents(a, b) for a, b in zip(total, bent, strict=True)]
    return out, total


def _linear_transpose(cotangents: Any, *operands: Any, linear: Linear, n_residuals: int) -> Any:
    residuals, moving = operands[:n_residuals], operands[n_residuals:]
    grads = linear.pull(residuals, [None if _is_zero(c) else c for c in cotangents])
    return [None] * n_residuals + [
        _or_zero(grad, x) if ad.is_undefined_primal(x) else None
        for grad, x in zip(grads, moving, strict=True)
    ]


def _linear_batch(axis: Any, operands: Any, axes: Any, *, linear: Linear, n_residuals: int) -> Any:
    if _is_shared(axis, axes, linear.effects):
        out = linear_p.bind(*operands, linear=linear, n_residuals=n_residuals)
        return out, [None] * len(out)
    operands, axes = _to_front(operands, axes)
    each = linear.batched(axis, axes[:n_residuals], axes[n_residuals:])
    out = linear_p.bind(*operands, linear=each, n_residuals=n_residuals)
    return out, [0] * len(out)


def _once_jvp(primals: Any, tangents: Any, *, name: str) -> Any:
    raise TypeError(
        f"{name}: backward is marked once_differentiable; got a second derivative through it. "
        "Write backward in differentiable operations and drop the mark."
    )


for _primitive, _run, _types, _jvp, _transpose, _batch in (
    (function_p, _forward, _forward_types, _forward_jvp, _forward_transpose, _forward_batch),
    (linear_p, _linear, _linear_types, _linear_jvp, _linear_transpose, _linear_batch),
):
    _primitive.def_impl(_run)
    _primitive.def_effectful_abstract_eval(_types)
    ad.primitive_jvps[_primitive] = _jvp
    ad.primitive_transposes[_primitive] = _transpose
    batching.fancy_primitive_batchers[_primitive] = _batch
    mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=True))

    # JAX's newer primitives (its flags jax_remat3 and jax_custom_vjp3) inside are lowered here.
    _primitive.to_lojax = _run

linear_p.is_high = lambda *_, linear, **__: linear.is_high
pe.partial_eval_jaxpr_custom_rules[function_p] = partial_eval

once_p.def_impl(lambda x, *, name: x)
once_p.def_abstract_eval(lambda x, *, name: x)
ad.primitive_jvps[once_p] = _once_jvp
ad.primitive_transposes[once_p] = lambda cotangent, x, *, name: [cotangent]
batching.defvectorized(once_p)
mlir.register_lowering(once_p, mlir.lower_fun(lambda x, *, name: x, multiple_results=False))
