"""What an equation costs to run again, and the bytes of a value."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._compat import JaxprEqn, Literal, primitives
from funcgrad._jaxpr import bodies

# Compilers fuse these into what reads them: they move no bytes of their own.
VIEWS = frozenset(
    "reshape squeeze expand_dims broadcast_in_dim iota name copy copy_p pvary pcast "
    "stop_gradient optimization_barrier sharding_constraint".split()
)
# A while loop's number of steps is not known.
_WHILE_STEPS = 64


def nbytes(aval: Any) -> int:
    """The bytes of a value of this type; a typed key counts its words."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


def flops(eqn: JaxprEqn) -> int:
    """Floating-point operations of one run, nested bodies included; one for each element."""
    name, params = eqn.primitive.name, eqn.params
    if name in VIEWS:
        return 0
    if nested := bodies(eqn):
        counts = [sum(flops(inner) for inner in body.jaxpr.eqns) for body in nested]
        if eqn.primitive is primitives.scan_p:
            return counts[0] * params["length"]
        if eqn.primitive is primitives.while_p:
            return sum(counts) * _WHILE_STEPS
        return max(counts)  # of a cond's branches
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * _size(eqn.outvars[0]) * math.prod(lhs[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * _size(eqn.outvars[0]) * math.prod(kernel) // max(out_features, 1)
    return max((_size(atom) for atom in (*eqn.invars, *eqn.outvars)), default=0)


def matmul_flops(eqn: JaxprEqn) -> int:
    """The part of ``flops`` that matrix products and convolutions take."""
    if nested := bodies(eqn):
        counts = [sum(matmul_flops(inner) for inner in body.jaxpr.eqns) for body in nested]
        steps = {"scan": eqn.params.get("length", 1), "while": _WHILE_STEPS}
        return max(counts) * steps.get(eqn.primitive.name, 1)
    return flops(eqn) if eqn.primitive.name in ("dot_general", "conv_general_dilated") else 0


def cost(eqn: JaxprEqn) -> float:
    """Operations plus half of the bytes moved; never zero, so that no work is idle."""
    if eqn.primitive.name in VIEWS:
        return 1.0
    return 1.0 + flops(eqn) + 0.5 * _moved(eqn)


def _moved(eqn: JaxprEqn) -> int:
    if nested := bodies(eqn):
        inside = [sum(_moved(inner) for inner in body.jaxpr.eqns) for body in nested]
        steps = {"scan": eqn.params.get("length", 1), "while": _WHILE_STEPS}
        return max(inside) * steps.get(eqn.primitive.name, 1)
    if eqn.primitive.name in VIEWS:
        return 0
    atoms = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
    return sum(nbytes(atom.aval) for atom in (*atoms, *eqn.outvars) if hasattr(atom.aval, "dtype"))


def _size(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))
