"""Runs of equations that recur in a program, as in its layers: each is differentiated once.

JAX derives the way back through an equation anew wherever it stands, but through a function
under ``jit`` once for all its calls; so what recurs is made one such function.  The compiler
puts calls in line: what it compiles is the same.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
from jax.extend import source_info_util

from funcgrad import _jaxpr
from funcgrad._compat import JaxprEqn, Literal, primitives
from funcgrad._jaxpr import bodies


@dataclasses.dataclass(frozen=True)
class Run:
    """``length`` consecutive equations: ``fun`` makes ``outputs`` of ``inputs``."""

    length: int
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    fun: Callable[..., list[Any]]


def recurring(jaxpr: Any, among: Set[int]) -> dict[int, Run]:
    """The runs that there are more than one of, by where they begin; of equations ``among``."""
    spans = _spans(jaxpr, among)
    keys = {start: _key(jaxpr.eqns[start:stop]) for start, stop in spans}
    counts = Counter(keys.values())
    if not any(n > 1 for n in counts.values()):
        return {}
    last = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in _variables(eqn.invars)}
    last |= dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))
    found: dict[int, Run] = {}
    funs: dict[Any, Any] = {}
    for start, stop in spans:
        if counts[keys[start]] == 1:
            continue
        eqns = jaxpr.eqns[start:stop]
        made = [var for eqn in eqns for var in eqn.outvars]
        inputs = tuple(dict.fromkeys(v for e in eqns for v in _variables(e.invars)))
        inputs = tuple(v for v in inputs if v not in set(made))
        is_output = tuple(last.get(var, -1) >= stop for var in made)
        outputs = tuple(var for var, out in zip(made, is_output, strict=True) if out)
        key = keys[start], is_output
        if key not in funs:
            funs[key] = jax.jit(_function(eqns, inputs, outputs))
        found[start] = Run(stop - start, inputs, outputs, funs[key])
    return found


def _spans(jaxpr: Any, among: Set[int]) -> list[tuple[int, int]]:
    """Where runs of two or more equations begin and end, each under the same names."""
    spans: list[tuple[int, int]] = []
    before = None
    for i, eqn in enumerate(jaxpr.eqns):
        names = eqn.source_info.name_stack if i in among and _may_recur(eqn) else None
        if names is not None and names == before:
            spans[-1] = spans[-1][0], i + 1
        elif names is not None:
            spans.append((i, i + 1))
        before = names
    return [(start, stop) for start, stop in spans if stop - start > 1]


def _may_recur(eqn: JaxprEqn) -> bool:
    is_plain = not bodies(eqn) or eqn.primitive is primitives.jit_p
    return is_plain and not eqn.effects and not _jaxpr.has_own_backward(eqn)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _key(eqns: Sequence[JaxprEqn]) -> Any:
    """What equations compute together, and where; variables are numbered as they are met."""
    numbers: dict[Any, int] = {}
    key: list[Any] = []
    for eqn in eqns:
        inputs = [
            _jaxpr.literal(a) if isinstance(a, Literal) else numbers.setdefault(a, len(numbers))
            for a in eqn.invars
        ]
        key.append((_jaxpr.operation(eqn), tuple(inputs), _jaxpr.calling_lines(eqn)))
        for var in eqn.outvars:
            numbers[var] = len(numbers)
    return tuple(key)


def _function(eqns: Sequence[JaxprEqn], inputs: Any, outputs: Any) -> Callable[..., list[Any]]:
    def again(*values: Any) -> list[Any]:
        env = dict(zip(inputs, values, strict=True))
        for eqn in eqns:
            read = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
            with source_info_util.user_context(eqn.source_info.traceback), eqn.ctx.manager:
                env.update(zip(eqn.outvars, _jaxpr.bind(eqn, *read), strict=True))
        return [env[var] for var in outputs]

    return again
