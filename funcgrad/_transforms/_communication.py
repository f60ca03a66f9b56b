"""Collectives in a program, and derivatives that they would mix."""

from collections.abc import Callable, Sequence
from typing import Any

from funcgrad import _jaxpr
from funcgrad._compat import manual_axes, varying_axes


def axes_of(eqn: Any) -> list[Any]:
    """The named axes over which ``eqn`` communicates; none for most."""
    given = [eqn.params.get(name, ()) for name in ("axes", "axis_name", "axis_names")]
    is_many = lambda names: isinstance(names, tuple | list | set | frozenset)
    return [axis for names in given for axis in (names if is_many(names) else (names,))]


def refuse_mixing(
    call: str, fun: Callable[[list[Any]], Any], leaves: list[Any], seeded: Sequence[Any], mode: str
) -> None:
    """Refuse a function that communicates over the mesh axes over which ``seeded`` varies.

    In ``shard_map`` every device seeds a unit vector at the same time, so that what comes from
    another device would be added to what is sought.  A value that becomes varying sums its
    cotangents over devices, which is communication on the way back.
    """
    manual, is_typed = manual_axes()
    axes = varying_axes(seeded) if is_typed else frozenset(manual)
    if not axes:
        return
    jaxpr = _jaxpr.trace(fun, leaves).jaxpr.jaxpr

    def visit(place: _jaxpr.Visit, inputs: list[bool]) -> None:
        name = place.eqn.primitive.name
        if name == "pvary" and mode == "forward":
            return
        if any(inputs) and (mixed := axes.intersection(axes_of(place.eqn))):
            raise ValueError(
                f"{call}: inside shard_map, each device differentiates a function of its own; "
                f"got {name} over {', '.join(map(repr, sorted(mixed)))} at {place.line}, which "
                "would add up derivatives of several devices. With check_vma=True, reduce the "
                "outputs and keep the arguments the same on all devices, or make the arguments "
                "varying outside of fun (jax.lax.pcast); or differentiate around shard_map."
            )

    _jaxpr.follow(jaxpr, [True] * len(jaxpr.invars), visit)
