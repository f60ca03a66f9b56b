"""Choose what to keep: an integer program, and prices on bytes where its time runs out."""

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse

from funcgrad._remat._cost import VIEWS, nbytes
from funcgrad._remat._graph import Closure, Graph
from funcgrad._remat._stages import Stages

_PRICING_SECONDS = 4.0
# The part of the budget by which the solver may miss it, with room to spare.
_TOLERANCE = 1e-5
# Their declared types lack arrays.
_constraint: Any = scipy.optimize.LinearConstraint
_bounds: Any = scipy.optimize.Bounds


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
    graph: Graph,
    budget: int,
    *,
    time_limit: float | None = None,
    gap: float = 1e-2,
    known: Iterable[Closure] = (),
) -> Solution:
    """The least cost of running again with at most ``budget`` bytes kept.

    ``known`` are choices made otherwise, which are taken where they are better.  The time
    limit in seconds grows with the program unless given.
    """
    plain = graph.keeping()
    if plain.nbytes <= budget:
        return Solution(plain, "everything fits", 0.0)
    problem = _Problem(graph)
    best = min(
        (closure for closure in known if closure.nbytes <= budget),
        key=lambda closure: closure.cost,
        default=None,
    )
    if time_limit is None:
        time_limit = min(max(1.0, len(problem.steps) / 900), 8.0)
    result = problem.milp(budget, time_limit, gap)
    if result.x is not None and problem.closure(result.x).nbytes > budget:
        # Above the budget by less than the solver's tolerance.
        result = problem.milp(budget, time_limit, gap, slack=_TOLERANCE)
    bound = getattr(result, "mip_dual_bound", None)
    bound = 0.0 if bound is None or not np.isfinite(bound) else bound * problem.unit
    found, method = None, "integer program"
    if result.x is not None:
        found = problem.closure(result.x)
        found = found if found.nbytes <= budget else None
    elif result.status != 2:
        method = "prices"
        found, bound = problem.priced(budget)
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


def solve_stages(graph: Graph, peak: int, share: float, *, gap: float = 1e-2) -> Solution:
    """The least cost of running again with a predicted peak of at most ``peak`` bytes.

    At each backward stage the peak is what is kept of it and of the stages before, and
    ``share`` of what it makes again.  A stage makes again its own values only.
    """
    problem = _Problem(graph)
    time_limit = min(max(1.0, len(problem.steps) / 900), 8.0)
    result = problem.milp_stages(peak, share, time_limit, gap)
    if result.x is None:
        raise Infeasible(problem.least().nbytes)
    found = problem.closure(result.x)
    bound = (result.mip_dual_bound or 0.0) * problem.unit
    distance = max(0.0, found.cost - bound) / found.cost if found.cost else 0.0
    return Solution(found, "integer program by stages", float(distance))


def least_bytes(graph: Graph) -> int:
    """The fewest bytes that any choice keeps."""
    return _Problem(graph).least().nbytes


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


class _Problem:
    """The variables are the candidates within reach (kept or not), then the steps (run or not).

    Each node that backward needs is kept or its step runs; so is each that a running step
    reads.  Given the candidates, the steps are determined: they may be continuous.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        nodes, steps = self._reach()
        candidates = sorted({graph.nodes[node].candidate for node in nodes})
        self.candidates, self.steps = candidates, sorted(steps)
        self.column = {c: i for i, c in enumerate(candidates)}
        first = len(candidates)
        self.step_column = {s: first + i for i, s in enumerate(self.steps)}
        self.bytes = np.array([graph.candidates[c].nbytes for c in candidates], float)
        self.costs = np.array([graph.steps[s].cost for s in self.steps], float)
        self.unit, self.total = max(self.costs.sum(), 1.0), max(self.bytes.sum(), 1.0)
        self.size = first + len(self.steps)
        self.rows = self._rows()
        self.extra: list[np.ndarray] = []
        self.upper = np.ones(self.size)
        self.upper[[self.column[c] for c in self._views()]] = 0

    def _reach(self) -> tuple[set[int], set[int]]:
        graph = self.graph
        nodes: set[int] = set()
        steps: set[int] = set()
        stack = list(graph.needs)
        while stack:
            place = stack.pop()
            if place in nodes:
                continue
            nodes.add(place)
            step = graph.nodes[place].step
            if step is not None and graph.steps[step].allowed and step not in steps:
                steps.add(step)
                stack.extend(graph.steps[step].reads)
        return nodes, steps

    def _views(self) -> set[int]:
        """Candidates that never pay: views, whose source takes no more and makes them for free."""
        graph, views = self.graph, set()
        for node in graph.nodes:
            if node.candidate in self.column and node.step in self.step_column:
                step = graph.steps[node.step]
                if step.op.eqn.primitive.name in VIEWS and len(step.op.outputs) == 1:
                    sources = sum(nbytes(a.aval) for a in step.op.eqn.invars)
                    if sources * step.trips <= graph.candidates[node.candidate].nbytes:
                        views.add(node.candidate)
        return views - {c for c in views if len(graph.candidates[c].places) > 1}

    def _rows(self) -> Any:
        data, rows, columns, lower = [], [], [], []

        def supply(node: int, demand: int | None) -> None:
            kept, step = self.graph.nodes[node].candidate, self.graph.nodes[node].step
            terms = [(self.column[kept], 1.0)]
            if step in self.step_column:
                terms.append((self.step_column[step], 1.0))
            if demand is not None:
                terms.append((self.step_column[demand], -1.0))
            for column, value in terms:
                rows.append(len(lower))
                columns.append(column)
                data.append(value)
            lower.append(1.0 if demand is None else 0.0)

        for need in self.graph.needs:
            supply(need, None)
        for step in self.steps:
            for node in self.graph.steps[step].reads:
                supply(node, step)
        matrix = scipy.sparse.csr_matrix((data, (rows, columns)), (len(lower), self.size))
        return _constraint(matrix, np.array(lower), np.inf)

    def _objective(self) -> np.ndarray:
        return np.concatenate([np.zeros(len(self.candidates)), self.costs / self.unit])

    def milp(self, budget: int, time_limit: float, gap: float, slack: float = 0.0) -> Any:
        """Minimise the cost within the budget less a part of it."""
        scale = max(float(budget), 1.0)
        weights = np.concatenate([self.bytes / scale, np.zeros(len(self.steps))])
        room = _constraint(weights[None], -np.inf, budget / scale * (1 - slack))
        integral = np.zeros(self.size)
        integral[: len(self.candidates)] = 1
        return scipy.optimize.milp(
            self._objective(),
            integrality=integral,
            bounds=_bounds(0, self.upper),
            constraints=[self.rows, room],
            options={"time_limit": time_limit, "mip_rel_gap": gap, "disp": False},
        )

    def milp_stages(self, peak: int, share: float, time_limit: float, gap: float) -> Any:
        """Minimise the cost with the predicted peak of every stage within bounds."""
        stages, graph = Stages.of(self.graph), self.graph
        scale = max(float(peak), 1.0)
        kept = np.zeros((stages.count, self.size))
        again = np.zeros((stages.count, self.size))
        for node in graph.nodes:
            if node.candidate in self.column and node.step in self.step_column:
                candidate, step = graph.candidates[node.candidate], graph.steps[node.step]
                if step.op.eqn.primitive.name not in VIEWS:
                    stage = stages.of_step[node.step]
                    again[stage or 0, self.step_column[node.step]] += (
                        candidate.nbytes / candidate.trips / scale
                    )
        first: dict[int, int] = {}
        for number, node in enumerate(graph.nodes):
            if node.candidate in self.column:
                stage = stages.of_node[number] or 0
                first.setdefault(node.candidate, stage)
        for candidate, stage in first.items():
            kept[stage:, self.column[candidate]] = 0
            kept[stage, self.column[candidate]] = graph.candidates[candidate].nbytes / scale
        # Kept values of a stage are let go when backward has passed it.
        rows = np.cumsum(kept, axis=0) + share * again
        for step in self.steps:
            stage = stages.of_step[step]
            for number in graph.steps[step].reads:
                theirs = stages.of_node[number]
                if stage is not None and theirs is not None and theirs != stage:
                    self_made = graph.nodes[number].candidate
                    crossing = self.step_column[step]
                    # Runs only if the value from the other stage is kept.
                    extra = np.zeros(self.size)
                    extra[self.column[self_made]], extra[crossing] = 1.0, -1.0
                    self.extra.append(extra)
        constraints = [self.rows, _constraint(rows, -np.inf, peak / scale)]
        if self.extra:
            constraints.append(
                _constraint(scipy.sparse.csr_matrix(np.array(self.extra)), 0.0, np.inf)
            )
        integral = np.zeros(self.size)
        integral[: len(self.candidates)] = 1
        return scipy.optimize.milp(
            self._objective(),
            integrality=integral,
            bounds=_bounds(0, self.upper),
            constraints=constraints,
            options={"time_limit": time_limit, "mip_rel_gap": gap, "disp": False},
        )

    def _priced(self, price: float) -> Any:
        """Minimise cost plus ``price`` for each byte: a cut, whose vertices are whole."""
        weights = np.concatenate([self.bytes / self.total * price, np.zeros(len(self.steps))])
        return scipy.optimize.linprog(
            self._objective() + weights,
            A_ub=-self.rows.A,
            b_ub=-self.rows.lb,
            bounds=(0, 1),
            method="highs-ds",
        )

    def least(self) -> Closure:
        """What keeps the fewest bytes."""
        weights = np.concatenate([self.bytes, np.full(len(self.steps), 1e-9)])
        integral = np.zeros(self.size)
        integral[: len(self.candidates)] = 1
        result = scipy.optimize.milp(
            weights / max(self.bytes.max(initial=1.0), 1.0),
            integrality=integral,
            bounds=_bounds(0, 1),
            constraints=[self.rows],
            options={"mip_rel_gap": 0.0, "disp": False, "time_limit": _PRICING_SECONDS},
        )
        found = self.closure(np.ones(self.size) if result.x is None else result.x)
        # Scalars beside gigabytes are below the solver's tolerance.
        for i in sorted(found.kept, key=lambda i: self.graph.candidates[i].nbytes):
            without = self.graph.closure(found.kept - {i})
            if without is not None and without.nbytes < found.nbytes:
                found = without
        return found

    def priced(self, budget: int) -> tuple[Closure | None, float]:
        """The best choice that some price per byte makes, and a bound on the cost of any."""
        low, high = 0.0, 1.0
        found, bound = None, 0.0
        deadline = time.monotonic() + _PRICING_SECONDS
        for _ in range(24):
            price = (low + high) / 2 if found is not None else high
            result = self._priced(price)
            bound = max(bound, self.unit * (result.fun - price * budget / self.total))
            closure = self.closure(result.x)
            if closure.nbytes <= budget:
                if found is None or closure.cost < found.cost:
                    found = closure
                high = price
            elif found is None:
                low, high = high, high * 16
            else:
                low = price
            late = time.monotonic() > deadline
            if found is not None and (late or high - low < 1e-3 * high):
                break
        return found, float(bound)

    def closure(self, x: np.ndarray) -> Closure:
        """What a vector of the variables keeps."""
        of_least = lambda least: [
            c for c, value in zip(self.candidates, x, strict=False) if value > least
        ]
        # A value that two loops share may be split in a relaxation.
        closure = self.graph.closure(of_least(0.5)) or self.graph.closure(of_least(1e-6))
        assert closure is not None
        return closure
