"""``budget_kind="peak"``: a budget for the compiled gradient's temporaries."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from funcgrad._compat import varying_axes
from funcgrad._remat._graph import Closure
from funcgrad._remat._planner import Choice, Planner
from funcgrad._remat._portfolio import by_hand
from funcgrad._remat._solve import Infeasible, Solution, solve_stages
from funcgrad._remat._stages import crossing

# Shares of what a stage makes again that are taken to be live at once.
_SHARES = (0.5, 1.0, 0.0)
_ROUNDS = 3
# So many plans are compiled at the most, before the policies.
_COMPILED = 5
# A policy is not compiled whose temporaries would be so many times the budget, if they were to
# what it keeps as those of the plain function are.
_HOPELESS = 1.5


def choose_peak(planner: Planner, budget: int | float) -> Choice:
    """The least work again among plans whose compiled gradient stays within ``budget``.

    A few plans are compiled: those of the stage-wise program, whose prediction is corrected by
    what each compilation shows, then the policies of people that do no more work.  So none of
    these does less work within the budget, nor as much with fewer temporaries.
    """
    plain, plain_bytes = planner.graph.keeping(), plain_temp_bytes(planner)
    limit = int(budget * plain_bytes) if isinstance(budget, float | np.floating) else int(budget)
    if plain_bytes <= limit:
        return Choice(plain, "as it is", 0.0, "", plain_bytes, plain_bytes)
    tried = _Tried(planner, limit, {plain.kept: plain_bytes})
    scale = max(plain.nbytes, 1) / max(plain_bytes, 1)
    for share in _SHARES:
        _try_stages(tried, share, scale)
    hand = policies(planner)
    for solution in hand:
        if solution.closure.nbytes / max(scale, 1.0) <= _HOPELESS * limit:
            tried.measure(solution)
    if tried.best is None:
        # A budget as low as the least of the policies finds it again.
        for solution in sorted(hand, key=lambda solution: solution.closure.nbytes)[:2]:
            tried.measure(solution)
    best = tried.best
    if best is not None:
        temporaries = tried.temporaries[best.closure.kept]
        return Choice(best.closure, best.method, best.gap, "", temporaries, plain_bytes)
    kept = {solution.closure.kept for solution in hand}
    least = min(n for closure, n in tried.temporaries.items() if closure in kept)
    if least < plain_bytes:
        raise Infeasible(least)
    note = (
        f"no plan lowers the temporaries of this gradient: {plain_bytes} bytes as it is, "
        f"{least} at the least otherwise. It is left as it is."
    )
    return Choice(plain, "as it is", 0.0, note, plain_bytes, plain_bytes)


@dataclasses.dataclass
class _Tried:
    """Temporaries of the plans that were compiled, by what they keep, and the best within."""

    planner: Planner
    limit: int
    temporaries: dict[frozenset[int], int]
    best: Solution | None = None

    def measure(self, solution: Solution) -> None:
        """Compile a plan, unless there is one within the limit that does less work."""
        closure, best = solution.closure, self.best and self.best.closure
        if closure.kept in self.temporaries or (best and closure.cost > best.cost):
            return
        found = self.temporaries[closure.kept] = temp_bytes(self.planner, closure)
        if found > self.limit:
            return
        if not best or (closure.cost, found) < (best.cost, self.temporaries[best.kept]):
            self.best = solution


def _try_stages(tried: _Tried, share: float, scale: float) -> None:
    aim = scale * tried.limit
    for _ in range(_ROUNDS):
        solution = solve_stages(tried.planner.graph, int(aim), share)
        if solution is None or len(tried.temporaries) > _COMPILED:
            return
        tried.measure(solution)
        found = tried.temporaries.get(solution.closure.kept)
        if found is None or found <= tried.limit:
            return
        aim *= 0.9 * tried.limit / found


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
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    analysis = lowered.compile(compiler_options=options).memory_analysis()
    return int(analysis.temp_size_in_bytes)


def _typed(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jax.typeof(x)
