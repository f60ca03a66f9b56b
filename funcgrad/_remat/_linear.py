"""A linear map given by its transpose, with every rule that JAX asks of a primitive.

The gradient of a planned function is one such map: reverse mode calls ``transpose``, which may
compute again what was not kept; forward mode calls ``forward``, which is the plain derivative.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir


@dataclasses.dataclass(frozen=True, eq=False)
class LinearMap:
    """``forward(residuals, tangents)``, linear in the second, and its transpose.

    ``transpose(residuals, cotangents)`` gives one cotangent for each tangent.
    """

    forward: Callable[[list[Any], list[Any]], Sequence[Any]]
    transpose: Callable[[list[Any], list[Any]], Sequence[Any]]


linear_p: Any = jex.Primitive("planned_linear")
linear_p.multiple_results = True


def linear_call(
    linear: LinearMap, residuals: Sequence[Any], tangents: Sequence[Any], out_avals: Sequence[Any]
) -> list[Any]:
    """Apply ``linear``; its outputs have the types ``out_avals``."""
    return linear_p.bind(
        *residuals,
        *tangents,
        linear=linear,
        n_residuals=len(residuals),
        out_avals=tuple(out_avals),
    )


def _forward(*args: Any, linear: LinearMap, n_residuals: int, out_avals: Any) -> list[Any]:
    return list(linear.forward(list(args[:n_residuals]), list(args[n_residuals:])))


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    n = params["n_residuals"]
    moving = [ad.instantiate_zeros(t) for t in tangents[n:]]
    if all(isinstance(t, ad.Zero) for t in tangents[:n]):
        out = linear_p.bind(*primals, **params)
        return out, linear_p.bind(*primals[:n], *moving, **params)
    # The second derivative of forward mode is the plain one: it keeps nothing for backward.
    fixed = [ad.instantiate_zeros(t) for t in tangents[:n]]
    return jax.jvp(lambda *args: _forward(*args, **params), primals, (*fixed, *moving))


def _transpose(cotangents: Any, *args: Any, linear: Any, n_residuals: int, out_avals: Any) -> Any:
    cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
    grads = linear.transpose(list(args[:n_residuals]), cotangents)
    unknown = [ad.is_undefined_primal(t) for t in args[n_residuals:]]
    return [None] * n_residuals + [
        grad if wanted else None for grad, wanted in zip(grads, unknown, strict=True)
    ]


def _batch(axis: Any, args: Any, dims: Any, *, linear: Any, n_residuals: int, out_avals: Any):
    residuals, axes = list(args[:n_residuals]), [*dims[:n_residuals]]
    tangents = [
        batching.bdim_at_front(t, d, axis.size)
        for t, d in zip(args[n_residuals:], dims[n_residuals:], strict=True)
    ]

    def each(fun: Any) -> Any:
        return jax.vmap(
            fun,
            in_axes=(axes, 0),
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )

    mapped = LinearMap(each(linear.forward), each(linear.transpose))
    widen = jax.make_jaxpr(lambda xs: [lax.broadcast(x, (axis.size,)) for x in xs])
    wide = [var.aval for var in widen(list(out_avals)).jaxpr.outvars]
    out = linear_call(mapped, residuals, tangents, wide)
    return out, [0] * len(out)


linear_p.def_impl(_forward)
linear_p.def_abstract_eval(lambda *args, out_avals, **params: list(out_avals))
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.fancy_primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(_forward, multiple_results=True))
