"""What a checkpoint policy sees of a rule: the operations that made what it gives.

The program inside stays whole.  A policy is asked about the equation that made each output
and each saved value, and their checkpoint names are stated again outside.
"""

from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex

from funcgrad._compat import ClosedJaxpr, JaxprEqn, Literal, is_saved, open_jaxpr, value_name
from funcgrad._jaxpr import bodies


def named(program: ClosedJaxpr, values: list[Any]) -> list[Any]:
    """The results of ``program`` under the names that they have inside."""
    names = [None if eqn is None else value_name(eqn) for eqn in _makers(program)]
    return [
        x if name is None else checkpoint_name(x, name)
        for x, name in zip(values, names, strict=True)
    ]


def _makers(program: Any) -> list[JaxprEqn | None]:
    """The innermost equation that made each output; ``None`` for an input."""
    jaxpr, _ = open_jaxpr(program)
    made = {v: (eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.outvars)}
    found = []
    for v in jaxpr.outvars:
        eqn, i = (None, 0) if isinstance(v, Literal) else made.get(v, (None, 0))
        nested = bodies(eqn) if eqn is not None else ()
        if len(nested) == 1 and nested[0].role in ("call", "rule"):
            eqn = _makers(nested[0].jaxpr)[i]
        found.append(eqn)
    return found


def partial_eval(saveable: Any, unknown: Any, instantiated: Any, eqn: JaxprEqn) -> Any:
    """JAX's protocol: the equation to run now, the one to run again, and what joins them."""
    n_out = len(eqn.outvars)
    again = [
        atom
        for atom, there in zip(eqn.invars, instantiated, strict=True)
        if not there and not isinstance(atom, Literal)
    ]
    if any(unknown):
        return None, eqn, [True] * n_out, [True] * n_out, again
    saved = [
        maker is not None
        and is_saved(saveable(maker.primitive, *(a.aval for a in maker.invars), **maker.params))
        for maker in _makers(eqn.params["call_jaxpr"])
    ]
    if all(saved) or eqn.effects:
        return eqn, None, [False] * n_out, [False] * n_out, []
    fresh = [jex.Var(v.aval) if keep else v for v, keep in zip(eqn.outvars, saved, strict=True)]
    staged = eqn.replace(outvars=fresh)
    return eqn, staged, [False] * n_out, [not keep for keep in saved], again
