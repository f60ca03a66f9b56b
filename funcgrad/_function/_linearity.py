"""Each mode from the other: is ``backward``, or ``jvp``, linear, and its transpose.

Values are followed as zero, constant, or linear in the cotangent (or the tangent).  An operation
that is neither linear nor can be transposed is remembered, and refused when a result needs it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from funcgrad._compat import Jaxpr, JaxprEqn, Literal, Tracer, open_jaxpr, primitives
from funcgrad._jaxpr import FUNCTION, bodies, loop_sizes, source_line
from funcgrad._trees import is_key

ZERO, CONSTANT, LINEAR = "zero", "constant", "linear"
LINEAR_MAP = f"{FUNCTION}_derivative"


@dataclasses.dataclass(frozen=True)
class Refused:
    """A value that is not linear in the cotangent, and the equation that made it so."""

    why: str
    eqn: JaxprEqn
    parents: tuple[JaxprEqn, ...]


Label: TypeAlias = str | Refused

# By name, for JAX does not make all of them public.
# Linear in their floating operands together: a constant beside them makes them affine.
_SUMS = {
    "add",
    "sub",
    "add_any",
    "concatenate",
    "stack",
    "pad",
    "select_n",
    "dynamic_update_slice",
    "scatter",
    "scatter-add",
    "scatter-sub",
    "complex",
    "custom_linear_solve",
    LINEAR_MAP,
}
# Linear in each operand.
_PRODUCTS = {
    "mul",
    "dot_general",
    "ragged_dot_general",
    "conv_general_dilated",
    "scatter-mul",
}
# Linear in the operand at this position, the others constant.
_IN_ONE = {
    "div": 0,
    "triangular_solve": 1,
    "tridiagonal_solve": 3,
    "select_and_scatter_add": 0,
    "select_and_gather_add": 0,
}
# One output for each operand.
_SEPARATE = {"optimization_barrier", "psum", "psum_invariant", "all_gather", "ppermute"}
# JAX keeps the transposes of these elsewhere than where it registers the others.
_TRANSPOSED = {
    "slice",
    "dynamic_slice",
    "gather",
    "optimization_barrier",
    "reshard",
    "jit",
    "copy_p",
}
# Registered with a transpose that only raises.
_OPAQUE = {"pallas_call", "pure_callback", "io_callback", "ffi_call", "while"}


# What is transposed, in what it must be linear, and what else there is to do.
BACKWARD = (
    "forward mode transposes backward, which must be linear in the cotangent",
    "Use reverse mode, or give the class a static jvp.",
)
JVP = (
    "reverse mode transposes jvp, which must be linear in the tangent",
    "Use forward mode, or give the class a static backward.",
)


def transposed(
    name: str,
    words: tuple[str, str],
    fun: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
    types: Sequence[Any],
    residuals: Sequence[Any],
    values: Sequence[Any],
) -> list[Any]:
    """The transpose at ``values`` of ``fun(residuals, inputs)``, linear in inputs of ``types``."""
    given: list[int] = []

    def linear(inputs: list[Any], residuals: list[Any]) -> list[Any]:
        results = fun(residuals, inputs)
        given[:] = [i for i, result in enumerate(results) if result is not None]
        return [results[i] for i in given]

    inputs = list(types)
    program = jax.make_jaxpr(linear)(inputs, [jax.typeof(x) for x in residuals])
    labels = [LINEAR] * len(inputs) + [CONSTANT] * len(residuals)
    for label in _follow(*open_jaxpr(program), labels):
        if isinstance(label, Refused) or label == CONSTANT:
            raise TypeError(_refusal(name, words, label))
    try:
        back = jax.linear_transpose(lambda x: linear(x, list(residuals)), inputs)
        (out,) = back([values[i] for i in given])
    except (NotImplementedError, AssertionError, AttributeError, ValueError) as error:
        raise TypeError(f"{_refusal(name, words, None)} JAX says: {error}") from error
    return out


def _refusal(name: str, words: tuple[str, str], label: Any) -> str:
    got = "an operation that JAX cannot transpose"
    if label == CONSTANT:
        got = "a result that does not depend on it"
    if isinstance(label, Refused):
        line = source_line(label.eqn, label.parents)
        got = f"{label.eqn.primitive.name}, {label.why}" + (f", at {line}" if line else "")
    rule, advice = words
    return f"{name}: {rule}; got {got}. {advice}"


def _follow(
    jaxpr: Jaxpr, consts: Sequence[Any], labels: Sequence[Label], parents: tuple[JaxprEqn, ...] = ()
) -> list[Label]:
    """The labels of the outputs of ``jaxpr`` from those of its inputs."""
    env: dict[Any, Label] = dict(zip(jaxpr.invars, labels, strict=True))
    env.update(zip(jaxpr.constvars, map(_of_constant, consts), strict=True))

    def read(atom: Any) -> Label:
        return _of_constant(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        labels = _outputs(eqn, [read(atom) for atom in eqn.invars], parents)
        env.update(zip(eqn.outvars, labels, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _of_constant(value: Any) -> Label:
    unknown = isinstance(value, Tracer) or not hasattr(value, "dtype") or is_key(value)
    return CONSTANT if unknown or np.any(np.asarray(value)) else ZERO


def _outputs(eqn: JaxprEqn, inputs: list[Label], parents: tuple[JaxprEqn, ...]) -> list[Label]:
    nested = bodies(eqn)
    if nested and all(body.role in ("call", "rule", "branch", "scan") for body in nested):
        return _NESTED.get(eqn.primitive, _call)(eqn, nested, inputs, parents)
    if eqn.primitive.name in _SEPARATE and len(inputs) == len(eqn.outvars):
        return inputs
    label = next((x for x in inputs if isinstance(x, Refused)), None) or _combine(eqn, inputs)
    if label not in (ZERO, CONSTANT, LINEAR) and not isinstance(label, Refused):
        label = Refused(label, eqn, parents)
    return [
        Refused("not floating", eqn, parents) if label == LINEAR and not _is_floating(v) else label
        for v in eqn.outvars
    ]


def _is_floating(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def _combine(eqn: JaxprEqn, inputs: list[Label]) -> str:
    """The label of what ``eqn`` gives, or why it is not linear."""
    name, n_linear = eqn.primitive.name, inputs.count(LINEAR)
    pairs = zip(inputs, eqn.invars, strict=True)
    floating = [label for label, atom in pairs if _is_floating(atom)]
    if name in _SUMS:
        first = _n_constant(eqn)
        if LINEAR in inputs[:first]:
            return "which is another function of it"
        floating = inputs[first:] if first else floating
        if n_linear and CONSTANT in floating:
            return "which joins it with a constant"
        return LINEAR if n_linear else CONSTANT if CONSTANT in floating else ZERO
    if name in _PRODUCTS:
        if ZERO in floating:
            return ZERO
        return "a product of it with itself" if n_linear > 1 else LINEAR if n_linear else CONSTANT
    if name in _IN_ONE:
        label = inputs[_IN_ONE[name]]
        assert isinstance(label, str)
        why = "which divides by it" if name == "div" else "which is another function of it"
        return why if n_linear > (label == LINEAR) else label
    transposes = (
        eqn.primitive in ad.primitive_transposes or name in _TRANSPOSED
    ) and name not in _OPAQUE
    if n_linear:
        # Of one operand it is linear; in which of many, and whether together, nobody says.
        linear = transposes and len(floating) == 1
        return LINEAR if linear else "which is not linear, or has no transpose"
    return ZERO if transposes and set(floating or inputs) == {ZERO} else CONSTANT


def _n_constant(eqn: JaxprEqn) -> int:
    """How many operands come before those in which a solve or a derivative is linear."""
    if eqn.primitive.name == "custom_linear_solve":
        return len(eqn.invars) - len(eqn.outvars)
    return eqn.params["n_residuals"] if eqn.primitive.name == LINEAR_MAP else 0


def _join(a: Label, b: Label, eqn: JaxprEqn, parents: tuple[JaxprEqn, ...]) -> Label:
    """The label of a value that is one or the other."""
    for label in (a, b):
        if isinstance(label, Refused):
            return label
    if ZERO in (a, b) or a == b:
        return b if a == ZERO else a
    return Refused("which joins it with a constant", eqn, parents)


def _call(eqn: JaxprEqn, nested: Any, inputs: list[Label], parents: Any) -> list[Label]:
    (body,) = nested
    return _follow(body.jaxpr, body.consts, [inputs[i] for i in body.operands], (*parents, eqn))


def _cond(eqn: JaxprEqn, nested: Any, inputs: list[Label], parents: Any) -> list[Label]:
    if inputs[0] not in (CONSTANT, ZERO):
        return [Refused("which chooses by it", eqn, parents)] * len(eqn.outvars)
    joined, *others = (
        _follow(body.jaxpr, body.consts, [inputs[i] for i in body.operands], (*parents, eqn))
        for body in nested
    )
    for other in others:
        joined = [_join(a, b, eqn, parents) for a, b in zip(joined, other, strict=True)]
    return joined


def _scan(eqn: JaxprEqn, nested: Any, inputs: list[Label], parents: Any) -> list[Label]:
    n_consts, n_carry = loop_sizes(eqn)
    while True:
        out = _follow(nested[0].jaxpr, nested[0].consts, inputs, (*parents, eqn))
        before = inputs[n_consts : n_consts + n_carry]
        carry = [_join(a, b, eqn, parents) for a, b in zip(before, out[:n_carry], strict=True)]
        if carry == before:
            return carry + out[n_carry:]
        inputs = inputs[:n_consts] + carry + inputs[n_consts + n_carry :]


_NESTED = {primitives.cond_p: _cond, primitives.scan_p: _scan}
