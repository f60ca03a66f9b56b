"""The nested programs of an equation, and how their inputs and outputs are wired to it."""

import dataclasses
from typing import Any, Literal

from funcgrad._compat import Jaxpr, JaxprEqn, is_body, open_jaxpr, primitives, scan_arity

Role = Literal["call", "scan", "while_cond", "while_body", "branch", "rule", "opaque"]

_CALLS = {
    primitives.jit_p,
    primitives.remat_p,
    primitives.closed_call_p,
    primitives.call_p,
}
_RULES = {primitives.custom_jvp_call_p, primitives.custom_vjp_call_p}
FUNCTION = "fg_function"  # the primitive of `Function`, which holds its forward as they do theirs
PASS_THROUGH = "pass_through"  # the primitive of hooks; `back` is what changes on the way back


@dataclasses.dataclass(frozen=True)
class Body:
    """One nested program of an equation.

    ``operands[i]`` is the position in ``eqn.invars`` of the value that the body's input
    ``i`` receives, ``results[i]`` the position in ``eqn.outvars`` that its output ``i``
    gives; ``None`` where there is no such one-to-one wire (a predicate's output; the
    bodies of an equation of role "opaque", whose wiring is not known).
    """

    name: str
    role: Role
    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]


def bodies(eqn: JaxprEqn) -> tuple[Body, ...]:
    """The nested programs of ``eqn``, in the order of its parameters; none for most."""
    prim, n_in, n_out = eqn.primitive, len(eqn.invars), len(eqn.outvars)
    params = eqn.params

    if not _holds_bodies(params):
        return ()
    if prim is primitives.while_p:
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        carry = range(n_cond + n_body, n_in)
        return (
            _body("cond", params["cond_jaxpr"], "while_cond", [*range(n_cond), *carry], [None]),
            _body(
                "body",
                params["body_jaxpr"],
                "while_body",
                [*range(n_cond, n_cond + n_body), *carry],
                range(n_out),
            ),
        )
    if prim is primitives.cond_p:
        return tuple(
            _body(f"branches[{i}]", branch, "branch", range(1, n_in), range(n_out))
            for i, branch in enumerate(params["branches"])
        )
    if prim is primitives.scan_p:
        return (_body("body", params["jaxpr"], "scan", range(n_in), range(n_out)),)
    if prim in _RULES or prim.name == FUNCTION:
        return (_body("primal", params["call_jaxpr"], "rule", range(n_in), range(n_out)),)

    found: list[Body] = []
    for key, param in params.items():
        for i, nested in enumerate(param if isinstance(param, tuple | list) else (param,)):
            if not is_body(nested):
                continue
            jaxpr, _ = open_jaxpr(nested)
            wired = (prim in _CALLS or prim.name == "shard_map") and len(jaxpr.invars) == n_in
            name = f"{key}[{i}]" if isinstance(param, tuple | list) else key
            role: Role = "call" if wired else "opaque"
            operands = range(n_in) if wired else [None] * len(jaxpr.invars)
            results = range(n_out) if wired else [None] * len(jaxpr.outvars)
            found.append(_body(name, nested, role, operands, results))
    return tuple(found)


def _body(name: str, nested: Any, role: Role, operands: Any, results: Any) -> Body:
    jaxpr, consts = open_jaxpr(nested)
    return Body(name, role, jaxpr, tuple(consts), tuple(operands), tuple(results))


def _holds_bodies(params: dict[str, Any]) -> bool:
    return any(
        is_body(param) or (isinstance(param, tuple | list) and any(map(is_body, param)))
        for param in params.values()
    )


def has_own_backward(eqn: JaxprEqn) -> bool:
    """Whether the way back through ``eqn``, or through what it holds, is the user's own.

    It need not be linear: what it makes of a sum is not the sum of what it makes of each.
    """
    if eqn.primitive.name == PASS_THROUGH:
        return eqn.params["back"] is not None
    if eqn.primitive is primitives.custom_vjp_call_p or eqn.primitive.name == FUNCTION:
        return True
    return any(has_own_backward(inner) for body in bodies(eqn) for inner in body.jaxpr.eqns)


def loop_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """Numbers of constants and carried values of a ``scan`` equation."""
    return scan_arity(eqn.params)
