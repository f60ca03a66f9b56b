"""Where a program draws random numbers, and from which keys."""

from typing import Any

from funcgrad import _jaxpr
from funcgrad._compat import Literal, checkpoint_of

# All but the first two take no typed key: `jax.random` comes down to these two.
_DRAWS = {"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"}
_BY_FIRST_OPERAND = {"random_bits", "random_gamma", "rng_bit_generator"}


def shared_draws(jaxpr: Any, mapped: list[bool], own: set[Any]) -> list[_jaxpr.Visit]:
    """The draws whose key does not depend on the ``mapped`` inputs, nor on the variables ``own``.

    In a body whose wiring is not known (a linear solver's) any draw counts as shared, unless
    all its inputs are mapped.
    """
    found: dict[Any, tuple[_jaxpr.Visit, bool]] = {}

    def visit(place: _jaxpr.Visit, inputs: list[bool]) -> None:
        if not place.parents:  # variables belong to the body that they stand in
            for i, atom in enumerate(place.eqn.invars):
                inputs[i] = inputs[i] or (not isinstance(atom, Literal) and atom in own)
        bodies, held = _jaxpr.bodies(place.eqn), checkpoint_of(place.eqn)
        unknown = [body.jaxpr for body in bodies if body.role == "opaque"]
        if held is not None and not bodies:  # under jax_remat3 the core does not enter it
            unknown = [held.jaxpr]
        for inner in unknown:
            n = len(inner.invars)
            marks = inputs if len(inputs) == n else [all(inputs)] * n
            for draw in shared_draws(inner, marks, set()):
                found[id(draw.eqn)] = draw, False
        name = place.eqn.primitive.name
        if name in _DRAWS:
            operands = inputs[:1] if name in _BY_FIRST_OPERAND else inputs
            # In a loop the last visit has the marks that all rounds together give.
            found[tuple(map(id, (*place.parents, place.eqn)))] = place, any(operands)

    _jaxpr.follow(jaxpr, mapped, visit)
    return [place for place, is_own in found.values() if not is_own]


def raw_keys(jaxpr: Any) -> set[Any]:
    """The inputs and constants that are made into typed keys just as they come."""
    wrapped: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "random_wrap":
            wrapped.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
        for body in _jaxpr.bodies(eqn):
            inside = raw_keys(body.jaxpr)
            for operand, var in zip(body.operands, body.jaxpr.invars, strict=True):
                if operand is not None and var in inside:
                    atom = eqn.invars[operand]
                    wrapped.update(() if isinstance(atom, Literal) else (atom,))
    return wrapped
