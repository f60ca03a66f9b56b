"""One primitive: values pass unchanged, what comes back goes through a program of our own.

``pass_through(values, backward)`` is the identity in every mode but one: transposing it runs
``backward`` on the cotangents.  *Slots* are further operands, of zeros, whose values are never
read: they only receive what ``backward`` gives for them, which is how a cotangent leaves the
backward pass under its own name.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from funcgrad import _jaxpr
from funcgrad._compat import make_varying, open_jaxpr, varying_axes

Backward = Callable[[Sequence[Any]], Sequence[Any]]

_pass_through_p = Primitive(_jaxpr.PASS_THROUGH)
_pass_through_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """A traced function from constants and cotangents to the operands' cotangents.

    Held inside an object, so that nothing takes it for a body that the equation runs.
    ``begin`` says where its constants stand among those of the equation.
    """

    begin: int
    jaxpr: Any = dataclasses.field(repr=False)

    def __call__(self, consts: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        mine = consts[self.begin : self.begin + len(self.jaxpr.constvars)]
        return _jaxpr.evaluate(self.jaxpr, mine, cotangents, lambda eqn: None)


@dataclasses.dataclass(frozen=True, eq=False)
class _Batched:
    """The same for rows; all the constants are inputs."""

    jaxpr: Any = dataclasses.field(repr=False)

    def __call__(self, consts: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        return _jaxpr.evaluate(self.jaxpr, (), [*consts, *cotangents], lambda eqn: None)


@dataclasses.dataclass(frozen=True, eq=False)
class _Raises:
    """In place of a program that cannot be traced, and perhaps is never run."""

    error: Exception

    def __call__(self, consts: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        raise self.error


def pass_through(
    values: Sequence[Any],
    backward: Backward | None,
    slots: Sequence[Any] = (),
    without_slots: Backward | None = None,
) -> list[Any]:
    """``values``, whose cotangents go through ``backward``: to values', then to slots'.

    Values and slots are floating arrays.  ``backward`` is traced here, once, and may close over
    tracers; ``None`` changes nothing.  ``without_slots`` takes its place where no slot is
    differentiated, and gives the values' cotangents alone; if it raises, then only there.
    """
    values = [jnp.asarray(value) for value in values]
    consts: list[Any] = []

    def program(fun: Backward) -> _Program:
        closed = jax.make_jaxpr(lambda *cts: list(fun(cts)))(*map(cotangent_type, values))
        jaxpr, mine = open_jaxpr(closed)
        begin = len(consts)
        # Constants become operands: they may be tracers of a transformation around this one.
        consts.extend(mine)
        return _Program(begin, jaxpr)

    back = None if backward is None else program(backward)
    cut = None
    if without_slots is not None:
        try:
            cut = program(without_slots)
        except Exception as error:  # of the user's own, which need not handle this case
            cut = _Raises(error.with_traceback(None))
    return _pass_through_p.bind(
        *consts, *values, *slots, n_consts=len(consts), n_values=len(values), back=back, cut=cut
    )


def batch_first(tree: Any) -> Any:
    """``tree``, whose floating leaves have the batch of a ``vmap`` around as their first axis.

    Elsewhere JAX leaves it where the operations before have put it.
    """
    moves = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
    return jax.tree.map(lambda x: pass_through([x], None)[0] if moves(x) else x, tree)


def cotangent_type(value: Any) -> Any:
    """The type of the cotangent of ``value``: its own, never weak."""
    if not jax.typeof(value).weak_type:
        return value
    # As a program of JAX's own, which keeps what a type says of meshes.
    return jax.eval_shape(lambda x: lax.convert_element_type(x, x.dtype), value)


def zeros_like(value: Any) -> Any:
    """A slot for cotangents of the type of ``value``, sharding and varying axes included."""
    return make_varying(jnp.zeros_like(value), varying_axes(value))


def _values(operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    begin = params["n_consts"]
    return list(operands[begin : begin + params["n_values"]])


_pass_through_p.def_impl(lambda *operands, **params: _values(operands, params))
_pass_through_p.def_abstract_eval(lambda *avals, **params: _values(avals, params))
mlir.register_lowering(_pass_through_p, lambda ctx, *operands, **params: _values(operands, params))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    # The constants' tangents do not matter: the map is the identity whatever they are.
    n_consts = params["n_consts"]
    out = _pass_through_p.bind(*primals, **params)
    moving = tangents[n_consts:]
    if all(type(tangent) is ad.Zero for tangent in moving):
        return out, _values(tangents, params)
    moving = map(ad.instantiate_zeros, moving)
    return out, _pass_through_p.bind(*primals[:n_consts], *moving, **params)


def _transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    n_consts, back = params["n_consts"], params["back"]
    if all(type(ct) is ad.Zero for ct in cotangents):
        return [None] * len(operands)
    linear = [ad.is_undefined_primal(operand) for operand in operands]
    if any(linear[:n_consts]):
        raise TypeError(
            "grad_hook: a hook closes over constants of the function that is transposed; got the "
            "value that it is linear in. Use jax.vjp in place of jax.linear_transpose."
        )
    n_before_slots = n_consts + params["n_values"]
    if params["cut"] is not None and not any(linear[n_before_slots:]):
        back = params["cut"]
    given = [ad.instantiate_zeros(ct) for ct in cotangents]
    if back is not None:
        given = back(operands[:n_consts], given)
    given = [None] * n_consts + given + [None] * (len(operands) - n_consts - len(given))
    return [ct if is_linear else None for ct, is_linear in zip(given, linear, strict=True)]


def _batch(axis: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    n_consts, n_values = params["n_consts"], params["n_values"]
    if all(dim is None for dim in dims):
        return _pass_through_p.bind(*operands, **params), [None] * n_values
    # What comes back differs from row to row, so that every value and slot is a row's own.
    const_dims = list(dims[:n_consts])
    rows = [
        batching.bdim_at_front(x, dim, axis.size)
        for x, dim in zip(operands[n_consts:], dims[n_consts:], strict=True)
    ]
    consts = list(operands[:n_consts])
    name = axis.name if isinstance(axis.name, str | tuple | int) else None

    def batched(program: Any) -> Any:
        if program is None or isinstance(program, _Raises):
            return program
        mapped = jax.vmap(
            lambda consts, cts: program(consts, cts),
            in_axes=(const_dims, 0),
            axis_name=name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )
        closed = jax.make_jaxpr(mapped)(consts, list(map(cotangent_type, rows[:n_values])))
        return _Batched(open_jaxpr(closed)[0])

    params = dict(params, back=batched(params["back"]), cut=batched(params["cut"]))
    return _pass_through_p.bind(*consts, *rows, **params), [0] * n_values


ad.primitive_jvps[_pass_through_p] = _jvp
ad.primitive_transposes[_pass_through_p] = _transpose
batching.fancy_primitive_batchers[_pass_through_p] = _batch
