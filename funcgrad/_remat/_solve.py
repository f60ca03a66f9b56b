"""Choose what to keep: an integer program, and prices on bytes where it ends without a choice."""

import dataclasses
import hashlib
import pickle
from collections.abc import Iterable

import numpy as np

from funcgrad._remat._graph import Closure, Graph
from funcgrad._remat._integer import TOLERANCE, Problem

# Between the cost of a choice and the least possible.
_GAP = 1e-2
# The same where the bytes themselves are a guess.
_ROUGH = 2e-2
# The same where the program was solved near its relaxation, which is a weaker bound: the whole
# program takes ten times as long, and on eight layers of a transformer found 1% less at the best.
_ENOUGH = 1e-1
# Variables of a program that is solved whole at once.
_SMALL = 500
# Solutions by the numbers of their problem; who calls eagerly plans at every call.
_SOLVED: dict[bytes, "Solution"] = {}
_REMEMBERED = 256


@dataclasses.dataclass(frozen=True)
class Solution:
    """A choice, how it was found, and how far at the most it is from the least cost.

    ``gap`` is that distance over the cost of the choice; ``math.inf`` where nothing is known.
    """

    closure: Closure
    method: str
    gap: float


class Infeasible(ValueError):
    """No choice stays within the budget; ``least`` is the least possible, in bytes."""

    def __init__(self, least: int) -> None:
        super().__init__(f"the least possible is {least} bytes")
        self.least = least


def solve(
    graph: Graph, budget: int, *, gap: float = _GAP, known: Iterable[Closure] = ()
) -> Solution:
    """The least cost of running again with at most ``budget`` bytes kept.

    ``known`` are choices made otherwise, which are taken where they are better.  The solver
    stops after so much work, not after so much time: equal problems have equal solutions.
    """
    known = list(known)
    key = _numbers(graph, budget, gap, [sorted(closure.kept) for closure in known])
    if key not in _SOLVED:
        solution = _solve(graph, budget, gap, known)
        if len(_SOLVED) >= _REMEMBERED:
            _SOLVED.pop(next(iter(_SOLVED)))
        _SOLVED[key] = solution
    return _SOLVED[key]


def _numbers(graph: Graph, *more: object) -> bytes:
    nodes = [(node.candidate, node.step) for node in graph.nodes]
    candidates = [(c.nbytes, len(c.places)) for c in graph.candidates]
    steps = [(s.cost, s.reads, s.allowed, s.view) for s in graph.steps]
    return hashlib.sha256(pickle.dumps((nodes, candidates, steps, graph.needs, more))).digest()


def _solve(graph: Graph, budget: int, gap: float, known: list[Closure]) -> Solution:
    plain = graph.keeping()
    if plain.nbytes <= budget:
        return Solution(plain, "everything fits", 0.0)
    problem, method = Problem(graph), "integer program"
    # Of a large problem, that made small by its relaxation first: most often it is as good.
    large = gap and problem.size > _SMALL
    near, bound = problem.near(budget, gap) if large else (None, 0.0)
    found = near
    if near is None or near.cost - bound > _ENOUGH * near.cost:
        found, method, bound = _whole(problem, budget, gap)
        if near is not None and (found is None or near.cost < found.cost):
            found, method = near, "integer program"
    best = min(
        (closure for closure in known if closure.nbytes <= budget),
        key=lambda closure: closure.cost,
        default=None,
    )
    if found is None and best is None:
        found = problem.least()
        if found.nbytes > budget:
            raise Infeasible(found.nbytes)
    if found is not None:
        found = _fill(graph, found, budget)
    if best is not None and (found is None or best.cost < found.cost):
        found, method = best, f"{method}, bettered by a policy"
    assert found is not None and found.nbytes <= budget
    distance = max(0.0, found.cost - bound) / found.cost if found.cost else 0.0
    return Solution(found, method, float(distance))


def _whole(problem: Problem, budget: int, gap: float) -> tuple[Closure | None, str, float]:
    """The choice of the whole integer program, if there is one; the method; a bound on any."""
    result = problem.within(budget, gap)
    if result.x is not None and problem.closure(result.x).nbytes > budget:
        # Above the budget by less than the solver's tolerance.
        result = problem.within(budget, gap, slack=TOLERANCE)
    bound = getattr(result, "mip_dual_bound", None)
    bound = 0.0 if bound is None or not np.isfinite(bound) else bound * problem.unit
    if result.x is None:
        if result.status == 2:
            return None, "integer program", bound
        found, bound = problem.priced(budget)
        return found, "prices", bound
    found = problem.closure(result.x)
    if found.nbytes > budget:
        return None, "integer program", bound
    return found if gap else problem.polished(budget, found), "integer program", bound


def solve_stages(problem: Problem, peak: int, share: float) -> Solution | None:
    """The least cost of running again with a predicted peak of at most ``peak`` bytes, if any.

    At each backward stage the peak is what is kept of it and of the stages before, and
    ``share`` of what it makes again.  A stage makes again its own values only.
    """
    result = problem.within_peak(peak, share, _ROUGH)
    if result.x is None:
        return None
    found = problem.closure(result.x)
    bound = (result.mip_dual_bound or 0.0) * problem.unit
    distance = max(0.0, found.cost - bound) / found.cost if found.cost else 0.0
    return Solution(found, "integer program by stages", float(distance))


def least_bytes(graph: Graph) -> int:
    """The fewest bytes that any choice keeps."""
    return Problem(graph).least().nbytes


def _fill(graph: Graph, closure: Closure, budget: int) -> Closure:
    """Keep more while there is room: what a step makes, the dearest first."""
    if not closure.again:
        return closure
    made: dict[int, list[int]] = {}
    for node in graph.nodes:
        if node.step in closure.again and node.candidate not in closure.kept:
            made.setdefault(node.step, []).append(node.candidate)
    for step in sorted(closure.again, key=lambda i: -graph.steps[i].cost)[:20]:
        extra = made.get(step, [])
        more = closure.nbytes + sum(graph.candidates[i].nbytes for i in extra)
        if more <= budget:
            better = graph.closure({*closure.kept, *extra})
            if better is not None and better.nbytes <= budget and better.cost < closure.cost:
                closure = better
    return closure
