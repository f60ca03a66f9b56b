"""What depends on what: follow marks from a jaxpr's inputs through nested bodies."""

from collections.abc import Callable, Sequence
from typing import Any

from funcgrad._compat import Jaxpr, JaxprEqn, Literal, primitives
from funcgrad._jaxpr._bodies import bodies, loop_sizes
from funcgrad._jaxpr._walk import Visit


def follow(
    jaxpr: Jaxpr,
    marked: Sequence[bool],
    visit: Callable[[Visit, list[bool]], None] = lambda visit, inputs: None,
    parents: tuple[JaxprEqn, ...] = (),
) -> list[bool]:
    """Which outputs of ``jaxpr`` depend on the ``marked`` inputs.

    ``visit(place, inputs)`` is called for every equation, at every depth, with the marks
    of its inputs; inside loops once more for each round until the carried marks settle, the
    last time with the final ones.
    """
    env: dict[Any, bool] = dict(zip(jaxpr.invars, marked, strict=True))

    def read(atom: Any) -> bool:
        return False if isinstance(atom, Literal) else env.get(atom, False)

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        visit(Visit(eqn, parents=parents), inputs)
        env.update(zip(eqn.outvars, _outputs(eqn, inputs, visit, parents), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _outputs(eqn: JaxprEqn, inputs: list[bool], visit: Any, parents: Any) -> list[bool]:
    nested = bodies(eqn)
    if not nested or any(body.role == "opaque" for body in nested):
        return [any(inputs)] * len(eqn.outvars)

    def run(body: Any, inputs: list[bool]) -> list[bool]:
        marks = [inputs[i] for i in body.operands]
        return follow(body.jaxpr, marks, visit, (*parents, eqn))

    if eqn.primitive is primitives.while_p:
        test, step = nested
        n_consts = len(inputs) - len(eqn.outvars)
        while True:
            (stops,) = run(test, inputs)
            before = inputs[n_consts:]
            carry = [a or b or stops for a, b in zip(run(step, inputs), before, strict=True)]
            if carry == before:
                return carry
            inputs = inputs[:n_consts] + carry
    if eqn.primitive is primitives.scan_p:
        n_consts, n_carry = loop_sizes(eqn)
        while True:
            out = run(nested[0], inputs)
            before = inputs[n_consts : n_consts + n_carry]
            carry = [a or b for a, b in zip(out[:n_carry], before, strict=True)]
            if carry == before:
                return carry + out[n_carry:]
            inputs = inputs[:n_consts] + carry + inputs[n_consts + n_carry :]
    if eqn.primitive is primitives.cond_p:
        outs = [run(body, inputs) for body in nested]
        return [inputs[0] or any(marks) for marks in zip(*outs, strict=True)]
    return run(nested[0], inputs)
