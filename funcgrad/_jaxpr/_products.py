"""Products written so that their derivatives need no transposes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from funcgrad._compat import (
    Jaxpr,
    JaxprEqn,
    is_body,
    is_transforming,
    open_jaxpr,
    primitives,
)
from funcgrad._jaxpr._rewrite import evaluate

_ENTERED = {primitives.jit_p, primitives.remat_p, primitives.scan_p, primitives.cond_p}


def fold_transposes(fun: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """``fun`` of leaves with each transposed product, ``(A B)^T``, written as ``B^T A^T``.

    The transpose of a matrix product makes the gradient of a weight as ``(g^T x)^T``, which
    compilers see through; but not through its derivative, ``(dg^T x + g^T dx)^T``, where a sum
    stands between.  Run step by step, or where Python reads numbers, it is ``fun`` itself.
    """

    def folded(leaves: list[Any]) -> list[Any]:
        if not is_transforming():
            return fun(leaves)
        try:
            jaxpr, consts = open_jaxpr(jax.make_jaxpr(fun)(leaves))
        except jax.errors.ConcretizationTypeError:
            return fun(leaves)
        return evaluate(_folded_jaxpr(jaxpr), consts, leaves, lambda eqn: None)

    return folded


def _folded_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    # What nobody reads any more stays, for the compiler to drop.
    made: dict[Any, JaxprEqn] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive in _ENTERED:
            params = {name: _folded(param) for name, param in eqn.params.items()}
            if any(params[name] is not param for name, param in eqn.params.items()):
                eqn = eqn.replace(params=params)
        elif eqn.primitive is primitives.dot_general_p:
            made[eqn.outvars[0]] = eqn
        elif eqn.primitive is primitives.transpose_p:
            product = made.get(eqn.invars[0])
            if product is not None and _swaps_sides(product, eqn.params["permutation"]):
                eqn = _swapped(product, eqn)
        eqns.append(eqn)
    changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr.replace(eqns=eqns) if changed else jaxpr


def _folded(param: Any) -> Any:
    """A parameter with its bodies folded, or itself where nothing is."""
    if type(param) is tuple:
        found = tuple(map(_folded, param))
        return found if any(a is not b for a, b in zip(found, param, strict=True)) else param
    if not is_body(param):
        return param
    jaxpr = open_jaxpr(param)[0]
    folded = _folded_jaxpr(jaxpr)
    if folded is jaxpr:
        return param
    return folded if jaxpr is param else param.replace(jaxpr=folded)


def _swaps_sides(product: JaxprEqn, permutation: Sequence[int]) -> bool:
    """Whether what is left of the right factor comes to stand before that of the left one."""
    (left, right), (batch, _) = product.params["dimension_numbers"]
    n_batch, n_left = len(batch), product.invars[0].aval.ndim - len(left) - len(batch)
    n_right = product.invars[1].aval.ndim - len(right) - len(batch)
    n = n_batch + n_left
    swapped = (*range(n_batch), *range(n, n + n_right), *range(n_batch, n))
    return tuple(permutation) == swapped and product.params.get("out_sharding") is None


def _swapped(product: JaxprEqn, transpose: JaxprEqn) -> JaxprEqn:
    params = dict(product.params)
    contracted, batch = params["dimension_numbers"]
    params["dimension_numbers"] = (contracted[::-1], batch[::-1])
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    return product.replace(invars=product.invars[::-1], outvars=transpose.outvars, params=params)
