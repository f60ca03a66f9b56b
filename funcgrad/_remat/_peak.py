"""``budget_kind="peak"``: a budget for the compiled gradient's temporaries."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from funcgrad._compat import unoptimised, varying_axes
from funcgrad._remat._graph import Closure
from funcgrad._remat._integer import Problem
from funcgrad._remat._live import predicted_peak
from funcgrad._remat._planner import Choice, Planner
from funcgrad._remat._portfolio import by_hand
from funcgrad._remat._solve import Infeasible, Solution, solve_stages
from funcgrad._remat._stages import crossing

# Shares of what a stage makes again that are taken to be live at once.
_SHARES = (0.5, 0.0)
# Solutions in search of one expected at the budget, for each share and at each turn.
_ROUNDS = 2
# So many plans by stages are compiled at the most.
_COMPILED = 3
# A budget used up to this is used well: nothing more is compiled for the rest of it.
_USED = 0.9
# Before a plan is compiled, its temporaries are taken to be so many times the prediction.
_TIMES = 1.15
# A policy is not compiled if its temporaries are expected to be so many times the budget.
_HOPELESS = 1.15
# Of the temporaries without a plan: where none has fewer than so many, no plan helps.
_HELPS = 0.95


def choose_peak(planner: Planner, budget: int | float) -> Choice:
    """The least work again among plans whose compiled gradient stays within ``budget``.

    Plans by stages and the policies of people are told apart by a prediction, which each
    compilation corrects; few are compiled.  No policy that does no more work than the plan has
    fewer temporaries: those expected near the budget are compiled.
    """
    plain, plain_bytes = planner.graph.keeping(), plain_temp_bytes(planner)
    limit = int(budget * plain_bytes) if isinstance(budget, float | np.floating) else int(budget)
    if plain_bytes <= limit:
        return Choice(plain, "as it is", 0.0, "", plain_bytes, plain_bytes, 1)
    search = _Search(planner, limit, plain, plain_bytes)
    hand = policies(planner)
    for _ in range(_COMPILED):
        solution = None if search.used_well() else search.likely([*hand, *search.by_stages()])
        if solution is None:
            break
        search.measure(solution)
    while (solution := search.likely(hand, _HOPELESS)) is not None:
        search.measure(solution)
    if search.best is None:
        # Before a budget is refused: a prediction would not do to say what is the least.
        for solution in hand:
            search.measure(solution)
    if (best := search.best) is not None:
        temporaries = search.temporaries[best.closure.kept]
        count = len(search.temporaries)
        return Choice(best.closure, best.method, best.gap, "", temporaries, plain_bytes, count)
    count = len(search.temporaries)
    least = min(search.temporaries.values())
    if least < _HELPS * plain_bytes:
        # Of the policies, which the budget that is named finds again.
        kept = {solution.closure.kept for solution in hand}
        found = [n for closure, n in search.temporaries.items() if closure in kept]
        raise Infeasible(min([*found, plain_bytes]))
    note = (
        f"no plan lowers the temporaries of this gradient by {1 - _HELPS:.0%}: {plain_bytes} "
        f"bytes as it is, {least} at the least of {count} ways. It is left as it is."
    )
    return Choice(plain, "as it is", 0.0, note, plain_bytes, plain_bytes, count)


class _Search:
    """What was solved and compiled so far, and the best of it within the limit."""

    def __init__(self, planner: Planner, limit: int, plain: Closure, plain_bytes: int) -> None:
        self.planner, self.limit = planner, limit
        self.temporaries = {plain.kept: plain_bytes}
        self.predictions: dict[frozenset[int], int] = {}
        self.times = min(_TIMES, plain_bytes / max(self.predicted(plain), 1))
        # Predicted and found, by the share of the plan; policies have none.
        self.compiled: dict[float | None, list[tuple[int, int]]] = {}
        self.shares: dict[frozenset[int], float] = {}
        self.problem = Problem(planner.graph)
        self.aims: dict[float, list[tuple[int, Solution]]] = {share: [] for share in _SHARES}
        self.best: Solution | None = None

    def measure(self, solution: Solution) -> None:
        """Compile a plan, unless it was."""
        closure, best = solution.closure, self.best and self.best.closure
        if closure.kept in self.temporaries:
            return
        found = self.temporaries[closure.kept] = temp_bytes(self.planner, closure)
        told = self.predicted(closure)
        self.compiled.setdefault(self.shares.get(closure.kept), []).append((told, found))
        if found > self.limit:
            return
        if not best or (closure.cost, found) < (best.cost, self.temporaries[best.kept]):
            self.best = solution

    def used_well(self) -> bool:
        best = self.best
        return best is not None and self.temporaries[best.closure.kept] >= _USED * self.limit

    def predicted(self, closure: Closure) -> int:
        if closure.kept not in self.predictions:
            self.predictions[closure.kept] = predicted_peak(self.planner.graph, closure)
        return self.predictions[closure.kept]

    def expected(self, closure: Closure) -> float:
        """The temporaries of a plan, given those of the compiled one that is most like it."""
        own, share = self.predicted(closure), self.shares.get(closure.kept)
        # What is told of one share is wrong in its own way.
        alike = self.compiled.get(share) or (share is None and sum(self.compiled.values(), []))
        if not alike:
            return self.times * own
        told, found = min(alike, key=lambda pair: abs(pair[0] - own))
        return own + found - told if found > told else own * found / max(told, 1)

    def likely(self, solutions: Iterable[Solution], times: float = 1.0) -> Solution | None:
        """The least work that is expected within so many times the limit and was not compiled."""
        best = self.best and self.best.closure.cost
        open_ = [
            solution
            for solution in solutions
            if solution.closure.kept not in self.temporaries
            and (best is None or solution.closure.cost <= best)
            and self.expected(solution.closure) <= times * self.limit
        ]
        return min(open_, key=lambda s: (s.closure.cost, self.expected(s.closure)), default=None)

    def by_stages(self) -> list[Solution]:
        """Plans by stages, of which some should be expected at the limit."""
        for share, solved in self.aims.items():
            for _ in range(_ROUNDS):
                aim = self._aim(solved)
                if any(aim == before for before, _ in solved):
                    break
                solution = solve_stages(self.problem, aim, share)
                if solution is None:
                    break
                self.shares.setdefault(solution.closure.kept, share)
                solved.append((aim, solution))
        return [solution for solved in self.aims.values() for _, solution in solved]

    def _aim(self, solved: list[tuple[int, Solution]]) -> int:
        """What to ask for, so that what comes is expected at the limit, or a little below."""
        if not solved:
            return int(self.limit / self.times)
        off = lambda pair: abs(self.expected(pair[1].closure) - 0.96 * self.limit)
        aim, solution = min(solved, key=off)
        expected = self.expected(solution.closure)
        if _USED * self.limit <= expected <= self.limit:
            return aim
        return int(aim * min(2.0, max(0.5, 0.96 * self.limit / max(expected, 1.0))))


def policies(planner: Planner) -> list[Solution]:
    """Those of people, for the whole function and for each of its stages; the least work first."""
    whole = planner.by_hand.items()
    blocks = by_hand(planner.graph, crossing(planner.graph)).items()
    found: dict[frozenset[int], Solution] = {}
    for words, closures in (("the policy", whole), ("the policy, in blocks", blocks)):
        for name, closure in closures:
            found.setdefault(closure.kept, Solution(closure, f"{words}: {name}", 0.0))
    return sorted(found.values(), key=lambda solution: solution.closure.cost)


def plain_temp_bytes(planner: Planner) -> int:
    """Temporaries of the gradient without a plan."""

    def gradient(values: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        diff = [values[i] for i in planner.level.diff_in]
        outs, pull = jax.vjp(planner.of_diff(values), *diff)
        return outs, pull(cotangents)

    return _compiled(planner, gradient)


def temp_bytes(planner: Planner, closure: Closure) -> int:
    """Temporaries of the gradient under a plan."""

    def gradient(values: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        outs, back = planner.split(closure, values)
        return [outs[i] for i in planner.level.diff_out], back(cotangents)

    return _compiled(planner, gradient)


def _compiled(planner: Planner, gradient: Callable[..., Any]) -> int:
    if varying_axes(planner.values):
        raise NotImplementedError(
            "checkpoint: a budget of the kind 'peak' is planned by compiling the gradient by "
            "itself; got a function inside shard_map. Plan around shard_map, or use 'residuals'."
        )
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(_typed, planner.values)]
    level = planner.level
    # An output with a gradient is computed, so it has a number.
    outs: list[Any] = [level.forward.avals[level.outputs[i]] for i in level.diff_out]  # pyright: ignore[reportArgumentType, reportCallIssue]
    cotangents = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in outs]
    lowered: Any = jax.jit(gradient).lower(types, cotangents)
    # Nothing runs: machine code need not be good, and temporaries are settled before it.
    analysis = lowered.compile(compiler_options=unoptimised()).memory_analysis()
    return int(analysis.temp_size_in_bytes)


def _typed(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jax.typeof(x)
