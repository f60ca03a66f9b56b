"""The choice as an integer program, and as a cut at a price per byte."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse

from funcgrad._remat._graph import Closure, Graph, ProgramGraph
from funcgrad._remat._stages import Stages

# Branches times variables: about a second on one core.  Work, and not time, so that all hosts
# of one computation come to the same choice.
_WORK = 100_000
# Of the cost of the relaxed choice: what a change may cost to be tried in the first search.
_NEAR = 0.01
# The part of a bound by which the solver may miss it, with room to spare.
TOLERANCE = 1e-5
# Of the cost of all steps: below it the solver sees no difference.
_CHEAP = 1e-6
# Never reached in what we have seen; a solver that hangs should not hang its caller.
EMERGENCY_SECONDS = 120.0
# Their declared types lack arrays.
_constraint: Any = scipy.optimize.LinearConstraint
_bounds: Any = scipy.optimize.Bounds


class Problem:
    """The variables are the candidates within reach (kept or not), then the steps (run or not).

    Each node that backward needs is kept or its step runs; so is each that a running step
    reads.  Given the candidates, the steps are determined: they may be continuous.
    """

    def __init__(self, graph: Graph) -> None:
        """Write the rows that every choice obeys."""
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
        self.objective = np.concatenate([np.zeros(first), self.costs / self.unit])
        self.rows = self._rows()
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
        graph = self.graph
        return {
            node.candidate
            for node in graph.nodes
            if node.candidate in self.column
            and node.step in self.step_column
            and graph.steps[node.step].view
            and len(graph.candidates[node.candidate].places) <= 1
        }

    def _rows(self) -> Any:
        def supply(node: int) -> Iterator[tuple[int, float]]:
            kept, step = self.graph.nodes[node].candidate, self.graph.nodes[node].step
            yield self.column[kept], 1.0
            if step in self.step_column:
                yield self.step_column[step], 1.0

        rows: list[tuple[Iterable[tuple[int, float]], float]]
        rows = [(supply(need), 1.0) for need in self.graph.needs]
        for step in self.steps:
            for node in self.graph.steps[step].reads:
                rows.append(([*supply(node), (self.step_column[step], -1.0)], 0.0))
        return _constraint(self.matrix([row for row, _ in rows]), [low for _, low in rows], np.inf)

    def matrix(self, rows: Sequence[Iterable[tuple[int, float]]], more: int = 0) -> Any:
        """Rows given by their entries, over the variables and ``more`` that follow them."""
        entries = [(i, j, value) for i, row in enumerate(rows) for j, value in row]
        i, j, values = zip(*entries, strict=True) if entries else ((), (), ())
        return scipy.sparse.csr_matrix((values, (i, j)), (len(rows), self.size + more))

    def within(self, budget: int, gap: float, slack: float = 0.0) -> Any:
        """Minimise the cost within the budget less a part of it."""
        rows = [self.rows, self._room(budget, slack)]
        return self._minimise(self.objective, rows, gap, self.upper)

    def near(self, budget: int, gap: float) -> tuple[Closure | None, float]:
        """The least cost among the choices near the relaxed one; a bound on the cost of any.

        A variable stays where it is whose change alone costs a hundredth of the whole.
        """
        room = self._room(budget)
        relaxed = scipy.optimize.linprog(
            self.objective,
            A_ub=scipy.sparse.vstack([-self.rows.A, room.A]),
            b_ub=np.concatenate([-np.asarray(self.rows.lb), np.ravel(room.ub)]),
            bounds=np.stack([np.zeros(self.size), self.upper], 1),
            method="highs",
        )
        if relaxed.x is None:
            return None, 0.0
        dear = _NEAR * relaxed.fun
        upper = np.where(relaxed.lower.marginals > dear, 0.0, self.upper)
        lower = np.where(-relaxed.upper.marginals > dear, upper, 0.0)
        result = self._minimise(self.objective, [self.rows, room], gap, upper, lower)
        found = None if result.x is None else self.closure(result.x)
        if found is not None and found.nbytes > budget:
            found = None
        return found, relaxed.fun * self.unit

    def polished(self, budget: int, closure: Closure) -> Closure:
        """The fewest of the steps too cheap for the solver to see, with no more of the others."""
        none, cheap = np.zeros(len(self.candidates)), self.costs <= _CHEAP * self.unit
        weights = np.concatenate([none, self.costs * cheap / max((self.costs * cheap).sum(), 1.0)])
        dear = np.concatenate([none, self.costs * ~cheap / self.unit])
        running = [self.step_column[s] for s in closure.again if s in self.step_column]
        rows = [
            self.rows,
            self._room(budget, TOLERANCE),
            _constraint(dear[None], -np.inf, dear[running].sum()),
        ]
        result = self._minimise(weights, rows, 0.0, self.upper)
        found = closure if result.x is None else self.closure(result.x)
        return found if found.nbytes <= budget and found.cost < closure.cost else closure

    def _room(self, budget: int, slack: float = 0.0) -> Any:
        scale = max(float(budget), 1.0)
        room = np.concatenate([self.bytes / scale, np.zeros(len(self.steps))])
        return _constraint(room[None], -np.inf, budget / scale * (1 - slack))

    def within_peak(self, peak: int, share: float, gap: float) -> Any:
        """Minimise the cost with the predicted peak of every stage within bounds.

        Each stage has a variable more: what is kept of it and of the stages before.
        """
        graph = self.graph
        assert isinstance(graph, ProgramGraph)
        stages, scale = Stages.of(graph), max(float(peak), 1.0)
        kept: list[dict[int, float]] = [{} for _ in range(stages.count)]
        again: list[dict[int, float]] = [{} for _ in range(stages.count)]
        seen: set[int] = set()
        for number, node in enumerate(graph.nodes):
            if node.candidate not in self.column:
                continue
            candidate, stage = graph.candidates[node.candidate], stages.of_node[number] or 0
            if node.candidate not in seen:
                seen.add(node.candidate)
                kept[stage][self.column[node.candidate]] = candidate.nbytes / scale
            if node.step in self.step_column and not graph.steps[node.step].view:
                row = again[stages.of_step[node.step] or 0]
                column = self.step_column[node.step]
                row[column] = row.get(column, 0.0) + candidate.nbytes / candidate.trips / scale
        sums, peaks = [], []
        for stage in range(stages.count):
            total = self.size + stage
            before = [(total - 1, 1.0)] if stage else []
            # Kept values of a stage are let go when backward has passed it.
            sums.append([*kept[stage].items(), *before, (total, -1.0)])
            peaks.append([(total, 1.0), *((c, share * n) for c, n in again[stage].items())])
        apart = []
        for step in self.steps:
            stage = stages.of_step[step]
            for number in graph.steps[step].reads:
                theirs = stages.of_node[number]
                if stage is not None and theirs is not None and theirs != stage:
                    # Runs only if the value from the other stage is kept.
                    kept_there = self.column[graph.nodes[number].candidate]
                    apart.append([(kept_there, 1.0), (self.step_column[step], -1.0)])
        more = stages.count
        wide = scipy.sparse.csr_matrix((self.rows.A.shape[0], more))
        rows = [
            _constraint(scipy.sparse.hstack([self.rows.A, wide]), self.rows.lb, np.inf),
            _constraint(self.matrix(sums, more), 0.0, 0.0),
            _constraint(self.matrix(peaks, more), -np.inf, peak / scale),
        ]
        if apart:
            rows.append(_constraint(self.matrix(apart, more), 0.0, np.inf))
        objective = np.concatenate([self.objective, np.zeros(more)])
        return self._minimise(objective, rows, gap, self.upper, work=_WORK // 4)

    def least(self) -> Closure:
        """What keeps the fewest bytes."""
        if (nothing := self.graph.closure(())) is not None:
            return nothing
        weights = np.concatenate([self.bytes, np.full(len(self.steps), 1e-9)])
        weights /= max(self.bytes.max(initial=1.0), 1.0)
        result = self._minimise(weights, [self.rows], 0.0, np.ones(self.size))
        found = self.closure(np.ones(self.size) if result.x is None else result.x)
        # Scalars beside gigabytes are below the solver's tolerance.
        for i in sorted(found.kept, key=lambda i: self.graph.candidates[i].nbytes):
            without = self.graph.closure(found.kept - {i})
            if without is not None and without.nbytes < found.nbytes:
                found = without
        return found

    def _minimise(
        self,
        objective: np.ndarray,
        rows: list[Any],
        gap: float,
        upper: np.ndarray,
        lower: np.ndarray | float = 0.0,
        work: int = _WORK,
    ) -> Any:
        integral = np.zeros(len(objective))
        integral[: len(self.candidates)] = 1
        more = np.full(len(objective) - self.size, np.inf)
        result = scipy.optimize.milp(
            objective,
            integrality=integral,
            bounds=_bounds(lower, np.concatenate([upper, more])),
            constraints=rows,
            options={
                "mip_rel_gap": gap,
                "node_limit": max(1, work // max(len(objective), 1)),
                "time_limit": EMERGENCY_SECONDS,
                "disp": False,
            },
        )
        if result.message.startswith("Time limit"):
            warnings.warn(
                f"checkpoint: the solver was stopped by the clock, after {EMERGENCY_SECONDS:g} s; "
                "hosts that work together may have found different plans. Plan a scanned form of "
                "the function, whose program is smaller.",
                stacklevel=2,
            )
            result.x = None
        return result

    def priced(self, budget: int) -> tuple[Closure | None, float]:
        """The best choice that some price per byte makes, and a bound on the cost of any.

        Between two choices, one above the budget and one within, the price at which they are
        equal either makes a third below their line, which takes the place of one of them, or
        shows that there is none.
        """
        above, under = self.graph.keeping(), self.least()
        if under.nbytes > budget:
            return None, 0.0
        while True:
            price = (under.cost - above.cost) / (above.nbytes - under.nbytes)
            between = self._at(price)
            reached, line = (c.cost + price * c.nbytes for c in (between, under))
            if between.nbytes in (above.nbytes, under.nbytes) or reached >= line * (1 - 1e-9):
                bound = max(0.0, min(reached, line) - price * budget)
                return self._mixed(above, under, budget), bound
            above, under = (between, under) if between.nbytes > budget else (above, between)

    def _at(self, price: float) -> Closure:
        """Minimise cost plus ``price`` for each byte: a cut, whose vertices are whole."""
        priced = np.concatenate([self.bytes * price / self.unit, np.zeros(len(self.steps))])
        result = scipy.optimize.linprog(
            self.objective + priced,
            A_ub=-self.rows.A,
            b_ub=-np.asarray(self.rows.lb),
            bounds=(0, 1),
            method="highs-ds",
        )
        return self.closure(result.x)

    def _mixed(self, above: Closure, under: Closure, budget: int) -> Closure:
        """The best of one choice before some place of the program and the other after it."""
        differing = sorted(above.kept ^ under.kept)
        places = differing[:: max(1, len(differing) // 64)]
        mixed = [
            self.graph.closure(
                {i for i in first.kept if i < at} | {i for i in rest.kept if i >= at}
            )
            for at in places
            for first, rest in ((above, under), (under, above))
        ]
        fitting = [c for c in mixed if c is not None and c.nbytes <= budget]
        return min([under, *fitting], key=lambda closure: closure.cost)

    def closure(self, x: np.ndarray) -> Closure:
        """What a vector of the variables keeps."""
        of_least = lambda least: [
            c for c, value in zip(self.candidates, x, strict=False) if value > least
        ]
        # A value that two loops share may be split in a relaxation.
        closure = self.graph.closure(of_least(0.5)) or self.graph.closure(of_least(1e-6))
        assert closure is not None
        return closure
