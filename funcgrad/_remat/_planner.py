"""A traced function, read once, and the choices for it under any budget."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from funcgrad._compat import JaxprEqn
from funcgrad._jaxpr import evaluate, trace
from funcgrad._remat._apply import backward, forward, schedule
from funcgrad._remat._graph import Closure, ProgramGraph
from funcgrad._remat._inputs import split_arrays, unchanged
from funcgrad._remat._level import linearise, made_bytes, no_tangent
from funcgrad._remat._linear import LinearMap, linear_call
from funcgrad._remat._portfolio import by_hand
from funcgrad._remat._program import Program, flatten, is_random, reader, run
from funcgrad._remat._solve import Infeasible, solve


@dataclasses.dataclass(frozen=True)
class Choice:
    """What to keep, and how it was found; ``note`` says so where no plan helps.

    Temporaries, of the plain gradient and of the planned one, are known where they were
    compiled; ``compiled`` counts the gradients compiled on the way.
    """

    closure: Closure
    method: str
    gap: float = 0.0
    note: str = ""
    temp_bytes: int | None = None
    plain_temp_bytes: int | None = None
    compiled: int = 0


class Flat:
    """A function traced: a program of flat values, of which the first are its closure's."""

    def __init__(self, closed: Any, out_tree: Any) -> None:
        self.n_closed = len(closed.consts)
        self.out_tree = out_tree
        self.pool: list[Any] = []
        self.program: Program = flatten(closed, self.pool, open_loops=True, consts_first=True)
        self.jaxpr = closed.jaxpr

    @staticmethod
    def of(fun: Callable[..., Any], args: Any, kwargs: Any, call: str) -> tuple["Flat", list[Any]]:
        """Trace at these arguments; the program, and its values here.

        A derivative rule holds the program, and must not hold values: they may be of a trace
        that is over.
        """
        arrays, rebuild = split_arrays(args, kwargs)
        traced = trace(lambda arrays: unchanged(fun, *rebuild(arrays), call), arrays)
        return Flat(traced.jaxpr, traced.out_tree), [*traced.jaxpr.consts, *arrays]

    def plain(self, *values: Any, again: bool = False) -> list[Any]:
        """The outputs of the function as it was written; ``again`` shows nothing twice."""
        if again:
            return evaluate(self.jaxpr, values[: self.n_closed], values[self.n_closed :], _silent)
        read = reader(run(self.program, values, self.pool), self.pool)
        return [read(a) for a in self.program.outputs]

    def along(
        self, values: Sequence[Any], places: Sequence[int], *, again: bool
    ) -> Callable[..., list[Any]]:
        """The plain function of the inputs at ``places`` alone."""

        def fun(*some: Any) -> list[Any]:
            full = list(values)
            for i, x in zip(places, some, strict=True):
                full[i] = x
            return self.plain(*full, again=again)

        return fun

    def refuse_unrepeatable(self) -> None:
        """Refuse a second run that would give other numbers than the first."""
        program = self.program
        refs = {i for i in program.inputs if hasattr(program.avals[i], "inner_aval")}
        for op in program.ops:
            shared = any(isinstance(a, int) and a in refs for a in op.inputs)
            if shared or is_random(op.eqn):
                raise ValueError(
                    "checkpoint: forward mode under a budget computes the function again, so that "
                    "it must come out the same; got lax.rng_uniform, io_callback or a ref from "
                    f"outside at {op.line}. Use jax.random, or reverse mode."
                )


def _silent(eqn: JaxprEqn) -> Any:
    """Run no operation that only shows something, as ``jax.debug.print`` does."""
    return (lambda *_: []) if eqn.effects and not eqn.outvars else None


class Planner:
    """One function at one set of arguments, differentiated in the marked ones."""

    def __init__(self, flat: Flat, values: Sequence[Any], marks: Sequence[bool]) -> None:
        """Linearise; ``values`` may be types."""
        self.flat, self.values = flat, list(values)
        self.pool = list(flat.pool)
        self.level = linearise(flat.program, self.values, marks, self.pool)
        self.graph = ProgramGraph(self.level)

    def of_diff(self, values: Sequence[Any]) -> Callable[..., list[Any]]:
        """The plain function of the marked inputs alone, giving the outputs with a gradient."""
        diff_out = self.level.diff_out
        fun = self.flat.along(values, self.level.diff_in, again=False)

        def of_diff(*diff: Any) -> list[Any]:
            outs = fun(*diff)
            return [outs[i] for i in diff_out]

        return of_diff

    @functools.cached_property
    def plain_bytes(self) -> int:
        """What JAX keeps for backward; arguments and constants are not counted."""
        if not self.level.loops:
            return self.level.kept_by_jax
        residuals = lambda *diff: jax.tree.leaves(jax.vjp(self.of_diff(self.values), *diff)[1])
        return made_bytes(jax.make_jaxpr(residuals)(*(self.values[i] for i in self.level.diff_in)))

    @functools.cached_property
    def by_hand(self) -> dict[str, Closure]:
        """The policies of people."""
        return by_hand(self.graph)

    def in_bytes(self, budget: int | float) -> int:
        """A budget as bytes, a fraction being of what JAX keeps."""
        if isinstance(budget, float | np.floating):
            return int(budget * self.plain_bytes)
        return int(budget)

    def choose(self, budget: int | float) -> Choice:
        """The least work again with at most ``budget`` kept; raises ``Infeasible``."""
        solution = solve(self.graph, self.in_bytes(budget), known=self.by_hand.values())
        return Choice(solution.closure, solution.method, solution.gap)

    def split(
        self, closure: Closure, values: Sequence[Any]
    ) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """The outputs under a plan, and what gives the cotangents of the marked inputs."""
        plan = schedule(self.graph, closure.kept)
        outs, stored = forward(plan, values, self.pool)
        inputs = dict(zip(self.level.forward.inputs, values, strict=True))
        return outs, lambda cts: backward(plan, inputs, stored, cts, self.pool, tied=True)

    def differentiate(
        self, closure: Closure, tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The outputs, and their tangents by a linear map that keeps what was chosen."""
        level, flat = self.level, self.flat
        n_values, n_pool = len(self.values), len(self.pool)
        plan = schedule(self.graph, closure.kept)
        outs, stored = forward(plan, self.values, self.pool)
        leaves, tree = jax.tree.flatten(stored)

        def along(residuals: list[Any], moving: list[Any]) -> list[Any]:
            flat.refuse_unrepeatable()
            values = residuals[:n_values]
            diff = [values[i] for i in level.diff_in]
            changes = jax.jvp(flat.along(values, level.diff_in, again=True), diff, moving)[1]
            return [changes[i] for i in level.diff_out]

        def back(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
            inputs = dict(zip(level.forward.inputs, residuals[:n_values], strict=True))
            pool = residuals[n_values : n_values + n_pool]
            stored = jax.tree.unflatten(tree, residuals[n_values + n_pool :])
            return backward(plan, inputs, stored, cotangents, pool, tied=True)

        if not level.diff_out:
            return outs, self._tangents(outs, [])
        moved = linear_call(
            LinearMap(along, back),
            [*self.values, *self.pool, *leaves],
            [tangents[i] for i in level.diff_in],
            [jax.typeof(outs[i]) for i in level.diff_out],
        )
        return outs, self._tangents(outs, moved)

    def _tangents(self, outs: list[Any], moved: Sequence[Any]) -> list[Any]:
        tangents = [no_tangent(out) for out in outs]
        for i, tangent in zip(self.level.diff_out, moved, strict=True):
            tangents[i] = tangent
        return tangents


def infeasible(error: Infeasible, budget: int | float, kind: str, call: str) -> ValueError:
    """The error of a budget below the least possible."""
    asked = f"{budget} bytes" if not isinstance(budget, float) else f"the fraction {budget}"
    rule = (
        "a budget for the peak is within reach of some plan"
        if kind == "peak"
        else "a budget leaves room for what cannot be run again"
    )
    return ValueError(
        f"{call}: {rule}; got {asked}, the least possible is {error.least} bytes. "
        f"Give budget={error.least} or more."
    )
