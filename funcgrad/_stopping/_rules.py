"""What a derivative rule lets pass: asked of JAX itself, by pulling back through one equation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad import _jaxpr
from funcgrad._compat import Jaxpr, JaxprEqn, Literal, open_jaxpr, primitives

# Primitives of JAX with an ordinary derivative; anything else is asked.
_KNOWN = {value for name, value in vars(primitives).items() if name.endswith("_p")} - {
    primitives.custom_jvp_call_p,
    primitives.custom_vjp_call_p,
}


def passing(eqn: JaxprEqn) -> list[set[int]] | None:
    """For each output, the inputs that get a gradient from it; ``None`` for all of them.

    Asked only of custom rules and of primitives that are not JAX's own, or not known.
    """
    if eqn.primitive in _KNOWN:
        return None
    floating = [i for i, atom in enumerate(eqn.invars) if _is_inexact(atom)]
    outputs = [k for k, var in enumerate(eqn.outvars) if _is_inexact(var)]
    found = {k: _pulled(eqn, [k], floating) for k in outputs}
    if len(outputs) > 1:
        # A rule that is not linear may need several cotangents at once.
        together = _pulled(eqn, outputs, floating).difference(*found.values())
        found = {k: alone | together for k, alone in found.items()}
    return [found.get(k, set()) for k in range(len(eqn.outvars))]


def _pulled(eqn: JaxprEqn, chosen: list[int], floating: list[int]) -> set[int]:
    """The inputs with a gradient that is not zero by construction, from the ``chosen`` outputs."""
    shapes = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]

    def pull(inputs: list[Any], cotangents: list[Any]) -> Any:
        def outputs(*values: Any) -> list[Any]:
            changed = dict(zip(floating, values, strict=True))
            out = _jaxpr.bind(eqn, *(changed.get(i, x) for i, x in enumerate(inputs)))
            return [out[k] for k in chosen]

        return jax.vjp(outputs, *(inputs[i] for i in floating))[1](cotangents)

    avals = [eqn.outvars[k].aval for k in chosen]
    cotangents = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    try:
        traced = jax.make_jaxpr(pull)(shapes, cotangents)
    except Exception:  # no derivative, or one that needs its surroundings: it is taken to pass
        return set(floating)
    jaxpr, consts = open_jaxpr(traced)
    zero = zeros(jaxpr, [_all_zero(const) for const in consts], [False] * len(jaxpr.invars))
    return {i for i, is_zero in zip(floating, zero, strict=True) if not is_zero}


_KEEP_ZERO = {
    primitives.broadcast_in_dim_p,
    primitives.convert_element_type_p,
    primitives.reshape_p,
    primitives.transpose_p,
    primitives.squeeze_p,
    primitives.neg_p,
    primitives.copy_p,
    primitives.add_p,
    primitives.sub_p,
    primitives.add_jaxvals_p,
    primitives.concatenate_p,
    primitives.reduce_sum_p,
}
_ANY_ZERO = {primitives.mul_p, primitives.dot_general_p}


def zeros(jaxpr: Jaxpr, consts: list[bool], inputs: list[bool]) -> list[bool]:
    """Which outputs of ``jaxpr`` are zero by construction, given which inputs are."""
    env: dict[Any, bool] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> bool:
        return _all_zero(atom.val) if isinstance(atom, Literal) else env.get(atom, False)

    for eqn in jaxpr.eqns:
        known = [read(atom) for atom in eqn.invars]
        nested = _jaxpr.bodies(eqn)
        if eqn.primitive in _KEEP_ZERO:
            found = [all(known)]
        elif eqn.primitive in _ANY_ZERO:
            found = [any(known)]
        elif len(nested) == 1 and nested[0].role == "call":
            body = nested[0]
            given = [known[i] for i in body.operands if i is not None]
            found = zeros(body.jaxpr, [_all_zero(const) for const in body.consts], given)
        else:
            found = [False] * len(eqn.outvars)
        env.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _all_zero(value: Any) -> bool:
    if not isinstance(value, np.ndarray | np.generic | int | float | complex):
        return False  # a tracer, or an array on a device, which is not fetched for this
    return not np.any(value)


def _is_inexact(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
