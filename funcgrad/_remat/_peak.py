"""``budget_kind="peak"``: a budget for the compiled gradient's temporaries."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from funcgrad._compat import varying_axes
from funcgrad._remat._graph import Closure
from funcgrad._remat._planner import Choice, Planner
from funcgrad._remat._solve import Infeasible, solve_stages

# Shares of what a stage makes again that are taken to be live at once.
_SHARES = (0.5, 1.0, 0.0)
_ROUNDS = 3
# So many plans are compiled at the most, before the policies.
_COMPILED = 5
# A policy that keeps so much more than the budget is not compiled.
_HOPELESS = 1.25


def choose_peak(planner: Planner, budget: int | float) -> Choice:
    """The least work again among plans whose compiled gradient stays within ``budget``.

    A few plans are compiled, those of the stage-wise program, whose prediction is corrected by
    what each compilation shows, then policies of people as long as they could be better.
    """
    graph = planner.graph
    measured: dict[frozenset[int], int] = {}
    plain = graph.keeping()

    def temporaries(closure: Closure) -> int:
        if closure.kept not in measured:
            measured[closure.kept] = temp_bytes(planner, closure)
        return measured[closure.kept]

    plain_bytes = plain_temp_bytes(planner)
    limit = int(budget * plain_bytes) if isinstance(budget, float | np.floating) else int(budget)
    if plain_bytes <= limit:
        return Choice(plain, "as it is", 0.0, "", plain_bytes, plain_bytes)

    closures: dict[frozenset[int], Closure] = {plain.kept: plain}

    def best() -> Closure | None:
        fitting = [c for c in closures.values() if measured.get(c.kept, limit + 1) <= limit]
        return min(fitting, key=lambda c: (c.cost, measured[c.kept]), default=None)

    method, gap = "integer program by stages", 0.0
    for share in _SHARES:
        aim = limit
        for _ in range(_ROUNDS):
            try:
                solution = solve_stages(graph, aim, share)
            except Infeasible:
                break
            closure = solution.closure
            found = best()
            if closure.kept in closures or (found and closure.cost >= found.cost):
                break
            if len(measured) == _COMPILED:
                break
            closures[closure.kept] = closure
            over = temporaries(closure) - limit
            gap = solution.gap
            if -0.05 * limit <= over <= 0:
                break
            aim = max(aim - over, 0)
    hand = sorted(planner.by_hand.items(), key=lambda item: item[1].cost)
    smallest = min(planner.by_hand.values(), key=lambda closure: closure.nbytes, default=plain)
    for name, closure in hand:
        found = best()
        if found is not None and closure.cost >= found.cost:
            break
        if closure.nbytes > _HOPELESS * limit and closure is not smallest:
            continue
        closures[closure.kept] = closure
        if temporaries(closure) <= limit:
            method, gap = f"the policy: {name}", 0.0
    found = best()
    if found is not None:
        return Choice(found, method, gap, "", measured[found.kept], plain_bytes)
    least = min(measured.values(), default=plain_bytes)
    if least < plain_bytes:
        # Those of the policies alone will be found again under a budget as low as they are.
        by_hand = {closure.kept for _, closure in hand}
        least = min((n for kept, n in measured.items() if kept in by_hand), default=least)
    if least >= plain_bytes:
        note = (
            f"no plan lowers the temporaries of this gradient: {plain_bytes} bytes as it is, "
            f"{least} at the least otherwise. It is left as it is."
        )
        return Choice(plain, "as it is", 0.0, note, plain_bytes, plain_bytes)
    raise Infeasible(least)


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
    compiled = jax.jit(gradient).lower(types, cotangents).compile()
    analysis: Any = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes)


def _typed(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jax.typeof(x)
