"""Where a program names its values: each place, and the bodies on the way to it."""

import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad import _jaxpr
from funcgrad._compat import Jaxpr, JaxprEqn, checkpoint_of, open_jaxpr, primitives, value_name

_INLINE = {primitives.jit_p, primitives.closed_call_p}
_RULES = {primitives.custom_jvp_call_p, primitives.custom_vjp_call_p}


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """One named value of a program.

    ``type`` is that of one value after the reduction (a tree), ``lengths`` the lengths of the
    scans around it, from the outside in; ``moves`` says whether it has a cotangent.
    """

    name: str
    type: Any
    lengths: tuple[int, ...]
    moves: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Level:
    """A program with the sites among its equations and the bodies that hold more, by index.

    ``depth`` is the number of scans around it.
    """

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    depth: int
    sites: dict[int, Site]
    entered: dict[int, tuple["Level", ...]]

    def all_sites(self) -> Iterator[Site]:
        """The sites in program order, those of bodies included."""
        for index in range(len(self.jaxpr.eqns)):
            if index in self.sites:
                yield self.sites[index]
            for level in self.entered.get(index, ()):
                yield from level.all_sites()


def find_sites(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    wanted: Callable[[str], bool],
    reduce: Callable[[Any], Any],
    call: str,
) -> Level:
    """The places where ``jaxpr`` names a value by a wanted name.

    Refuses those that stand where no value can be taken out: in loops of unknown length, in
    custom derivative rules, inside ``shard_map``.
    """

    def level(jaxpr: Jaxpr, consts: Sequence[Any], lengths: tuple[int, ...], above: Any) -> Level:
        sites, entered = {}, {}
        for index, eqn in enumerate(jaxpr.eqns):
            name = value_name(eqn)
            if name is not None and wanted(name):
                aval = eqn.outvars[0].aval
                sites[index] = Site(
                    name,
                    jax.eval_shape(reduce, aval),
                    lengths,
                    jnp.issubdtype(aval.dtype, jnp.inexact),
                )
                continue
            inside = _enterable(eqn)
            if inside is None:
                _refuse_sites_in(eqn, wanted, (*above, eqn), call)
                continue
            more = (eqn.params["length"],) if eqn.primitive is primitives.scan_p else ()
            levels = tuple(level(j, c, (*lengths, *more), (*above, eqn)) for j, c in inside)
            if any(next(below.all_sites(), None) is not None for below in levels):
                entered[index] = levels
        return Level(jaxpr, tuple(consts), len(lengths), sites, entered)

    return level(jaxpr, consts, (), ())


def _enterable(eqn: JaxprEqn) -> list[tuple[Jaxpr, Sequence[Any]]] | None:
    """The bodies of an equation that can be run again with more inputs and outputs."""
    if held := checkpoint_of(eqn):
        return [(held.jaxpr, held.consts)]
    if eqn.primitive in _INLINE or eqn.primitive in (primitives.scan_p, primitives.cond_p):
        return [(body.jaxpr, body.consts) for body in _jaxpr.bodies(eqn)]
    return None


def _refuse_sites_in(eqn: JaxprEqn, wanted: Callable[[str], bool], above: Any, call: str) -> None:
    for visit in _visits(eqn, above):
        name = value_name(visit.eqn)
        if name is None or not wanted(name):
            continue
        outer = eqn.primitive
        if outer is primitives.while_p:
            where, advice = "a while_loop", "How often it runs is not known; use lax.scan."
        elif outer in _RULES or outer.name == _jaxpr.FUNCTION:
            where, advice = (
                "a function with a custom derivative",
                "Its values have no cotangents; name what goes in or comes out.",
            )
        elif outer.name == "shard_map":
            where, advice = "shard_map", f"Call {call} in the function that is mapped."
        else:
            where, advice = outer.name, "Its inside cannot be run again; name it outside."
        raise NotImplementedError(
            f"{call}: a named value stands where it can be taken out; got {name!r} inside "
            f"{where}, at {visit.line}. {advice}"
        )


def _visits(eqn: JaxprEqn, parents: Any) -> Iterator[_jaxpr.Visit]:
    for program in _programs(eqn):
        for inner in program.eqns:
            yield _jaxpr.Visit(inner, parents=parents)
            yield from _visits(inner, (*parents, inner))


def _programs(eqn: JaxprEqn) -> list[Jaxpr]:
    held = checkpoint_of(eqn)
    return [held.jaxpr] if held else [body.jaxpr for body in _jaxpr.bodies(eqn)]


def all_names(jaxpr: Any) -> list[str]:
    """Every name in the program, at any depth, each once."""
    names: dict[str, None] = {}

    def visit(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if (name := value_name(eqn)) is not None:
                names[name] = None
            for program in _programs(eqn):
                visit(program)

    visit(open_jaxpr(jaxpr)[0])
    return list(names)


def matches(name: str, pattern: str) -> bool:
    """Whether a name is the pattern, or what the pattern's wildcards allow."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def near(pattern: str, names: Sequence[str]) -> str:
    """The names most like ``pattern``, for an error."""
    found = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or list(names)[:5]
    return ", ".join(map(repr, found)) or "none"
