"""``fg.plan(fun, budgets)``: memory against work, and what is kept and why."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from funcgrad._remat._budget import check_budget, choose
from funcgrad._remat._graph import Candidate
from funcgrad._remat._inputs import is_array
from funcgrad._remat._level import is_inexact
from funcgrad._remat._planner import Choice, Flat, Planner
from funcgrad._remat._solve import Infeasible, least_bytes

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class KeptValue:
    """A value that a plan keeps for the backward pass.

    ``nbytes`` counts all ``trips``, the iterations of the loops around it; ``spared`` is the
    work that keeping it spares, as a fraction of the forward pass: what the plan would run more
    if this value alone were not kept, ``inf`` where it cannot be run again.
    """

    operation: str
    type: str
    nbytes: int
    trips: int
    line: str
    spared: float


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What is kept under one budget.

    Attributes:
      budget: As it was asked for.
      nbytes: Bytes kept for backward; arguments and constants are not counted.
      plain_nbytes: The same of the function without a budget.
      recompute: Work that runs again over the work of the forward pass; an operation's work is
        its floating-point operations and half of the bytes that it moves.
      recompute_flops: Floating-point operations that run again.
      recompute_matmul: Of matrix products and convolutions, the share that runs again.
      method: What found it: the integer program, or prices on bytes where it ended without a
        choice; a policy where none is better; for a peak, the program by stages.
      gap: How much less work another choice might do at the most, as a fraction of this one's.
      note: Why the function is left as it is, where no plan helps.
      temp_bytes: Compiled temporaries of the gradient, known for ``budget_kind="peak"``.
      plain_temp_bytes: The same without a plan.
    """

    budget: int | float
    nbytes: int
    plain_nbytes: int
    recompute: float
    recompute_flops: int
    recompute_matmul: float
    method: str
    gap: float
    note: str
    temp_bytes: int | None
    plain_temp_bytes: int | None
    _planner: Planner = dataclasses.field(repr=False)
    _choice: Choice = dataclasses.field(repr=False)

    @functools.cached_property
    def kept(self) -> tuple[KeptValue, ...]:
        """The values kept, those that spare most first."""
        graph, closure = self._planner.graph, self._choice.closure
        total = max(graph.forward_cost, 1.0)
        found = []
        for i in closure.kept:
            without = graph.closure(closure.kept - {i})
            spared = float("inf") if without is None else (without.cost - closure.cost) / total
            found.append(_kept(graph.candidates[i], spared))
        return tuple(sorted(found, key=lambda value: (-value.spared, value.line)))

    @property
    def again(self) -> dict[str, int]:
        """How often each operation runs again, all iterations counted."""
        counts: Counter[str] = Counter()
        for i in self._choice.closure.again:
            step = self._planner.graph.steps[i]
            counts[step.op.eqn.primitive.name] += step.trips
        return dict(counts.most_common())

    def explain(self) -> str:
        """What is kept and why, what runs again, and how the choice was found."""
        lines = [
            f"kept {_size(self.nbytes)} of {_size(self.plain_nbytes)}; "
            f"{self.recompute:.1%} of the forward pass runs again",
            f"found by: {self.method}"
            + (f", at most {self.gap:.2%} from the least work" if self.gap else ""),
        ]
        if self.temp_bytes is not None and self.plain_temp_bytes is not None:
            lines.append(
                f"temporaries {_size(self.temp_bytes)}, without a plan "
                f"{_size(self.plain_temp_bytes)}"
            )
        if self.note:
            lines.append(self.note)
        lines.append("kept, and the part of the forward pass that this spares:")
        alike: dict[Any, list[KeptValue]] = {}
        for value in self.kept:
            alike.setdefault((value.operation, value.type, value.line), []).append(value)
        for (operation, type_, line), values in alike.items():
            count = sum(value.trips for value in values)
            spared = max(value.spared for value in values)
            why = "cannot run again" if spared == float("inf") else f"{spared:.2%}"
            times = f" ×{count}" if count > 1 else ""
            nbytes = _size(sum(value.nbytes for value in values))
            lines.append(f"  {nbytes:>10}  {why:>7}  {operation} {type_}{times}  {line}")
        again = ", ".join(f"{name} ×{count}" for name, count in self.again.items())
        lines.append(f"run again: {again or 'nothing'}")
        return "\n".join(lines)

    def __str__(self) -> str:
        """The explanation."""
        return self.explain()


@dataclasses.dataclass(frozen=True, eq=False)
class TradeOff:
    """Plans of one function, one for each budget.

    Attributes:
      plans: The feasible budgets' plans, in the order of the budgets.
      infeasible: Budgets below ``least_nbytes``.
      least_nbytes: The fewest bytes that any plan keeps.
      plain_nbytes: Bytes kept without a budget.
      by_hand: Bytes and work of the usual checkpoint policies on the same function.
    """

    plans: tuple[Plan, ...]
    infeasible: tuple[int | float, ...]
    least_nbytes: int
    plain_nbytes: int
    by_hand: dict[str, tuple[int, float]]

    def __len__(self) -> int:
        """The number of plans."""
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        """The plans in turn."""
        return iter(self.plans)

    def __getitem__(self, place: int) -> Plan:
        """One of the plans."""
        return self.plans[place]

    def __str__(self) -> str:
        """A table of the plans."""
        lines = [f"{'budget':>12} {'kept':>12} {'runs again':>11}  found by"]
        for plan in self.plans:
            asked = f"{plan.budget:g}" if isinstance(plan.budget, float) else _size(plan.budget)
            lines.append(
                f"{asked:>12} {_size(plan.nbytes):>12} {plan.recompute:>11.2%}  {plan.method}"
            )
        if self.infeasible:
            lines.append(f"below the least possible, {_size(self.least_nbytes)}: {self.infeasible}")
        return "\n".join(lines)

    def _points(self) -> set[tuple[int, float]]:
        """Bytes and work of the plans, and of plans at the policies' bytes."""
        points = {(plan.nbytes, plan.recompute) for plan in self.plans}
        for planner in {plan._planner for plan in self.plans}:
            for nbytes, _ in self.by_hand.values():
                closure = planner.choose(nbytes).closure
                points.add((closure.nbytes, closure.cost / max(planner.graph.forward_cost, 1.0)))
        return points

    def plot(self, file: str | Path | None = None) -> Any:
        """Draw work against memory, with the usual policies beside; a matplotlib ``Figure``.

        Plans at the policies' bytes are drawn too.

        Args:
          file: Where to save it too.

        Returns:
          The figure.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        points = sorted((n / _MIB, 100 * work) for n, work in self._points())
        hand = {point: name for name, point in self.by_hand.items()}
        for (nbytes, work), name in hand.items():
            axes.plot(nbytes / _MIB, 100 * work, "o", color="tab:orange", ms=4)
            if name in ("nothing", "dots", "dots without batch dimensions"):
                axes.annotate(
                    name,
                    (nbytes / _MIB, 100 * work),
                    xytext=(5, 5),
                    textcoords="offset points",
                    fontsize=8,
                    color="tab:orange",
                )
        axes.plot([], [], "o", color="tab:orange", ms=4, label="policies by hand")
        axes.plot(*zip(*points, strict=True), ".-", color="tab:blue", label="planned")
        axes.axvline(self.plain_nbytes / _MIB, color="gray", lw=0.8, ls=":")
        axes.set(
            xlabel="kept for backward (MiB); dotted: without a budget",
            ylabel="forward work that runs again (%)",
            ylim=(-2, None),
            xlim=(0, None),
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper right")
        if file is not None:
            figure.savefig(file, dpi=120)
        return figure


def plan(
    fun: Callable[..., Any],
    budgets: Sequence[Any] = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0),
    *,
    budget_kind: str = "residuals",
    argnums: int | Sequence[int] | None = None,
) -> Callable[..., TradeOff]:
    """Plan ``fg.checkpoint(fun, budget=…)`` under several budgets, without running anything.

    Plans are the same on every host: the solver counts its work and not the time.

    PyTorch: ``torch._functorch.config.activation_memory_budget``, whose solver shows one budget
    at a time.

    Args:
      fun: Any function of pytrees.
      budgets: Bytes (int) or fractions (float) of what is kept without one.
      budget_kind: ``"residuals"`` counts what is kept from forward to backward; ``"peak"`` the
        temporaries of the compiled gradient: of plans and the usual policies, those expected
        near the budget are compiled, and the one that does the least work again within it is
        taken.  The function is left alone, and ``note`` says so, where none lowers them by a
        twentieth.  Before a budget is refused, all policies are compiled.
      argnums: The positional arguments with a gradient; all that are floating, if ``None``.

    Returns:
      A function of the arguments, arrays or ``jax.ShapeDtypeStruct``, that gives the
      ``TradeOff``: a plan for each budget, a table, ``plot()``, and ``explain()`` of each plan.

    Raises:
      ValueError: A budget is negative, or a fraction above 1; no argument has a gradient.

    Example:
      >>> def fun(w, x):
      ...     for _ in range(4):
      ...         x = jnp.sin(x @ w)
      ...     return x.sum()
      >>> curve = plan(fun, [0.5, 1.0])(jnp.ones((8, 8)), jnp.ones((4, 8)))
      >>> [(plan.nbytes, plan.recompute_matmul) for plan in curve]
      [(384, 0.25), (896, 0.0)]

    References:
      Chen et al., "Training deep nets with sublinear memory cost", 2016; Jain et al.,
      "Checkmate: breaking the memory wall with optimal tensor rematerialization", 2020.
    """
    for budget in budgets:
        check_budget(budget, budget_kind, "plan")

    def planned(*args: Any, **kwargs: Any) -> TradeOff:
        flat, values = Flat.of(fun, args, kwargs, "plan")
        marks = _marks(values[flat.n_closed :], args, argnums)
        planner = Planner(flat, values, [False] * flat.n_closed + marks)
        graph = planner.graph
        plans, too_low = [], []
        for budget in budgets:
            try:
                plans.append(_plan(planner, choose(planner, budget, budget_kind), budget))
            except Infeasible:
                too_low.append(budget)
        return TradeOff(
            tuple(plans),
            tuple(too_low),
            least_bytes(graph),
            planner.plain_bytes,
            {
                name: (closure.nbytes, closure.cost / max(graph.forward_cost, 1.0))
                for name, closure in planner.by_hand.items()
            },
        )

    return planned


def _marks(arrays: Sequence[Any], args: Any, argnums: Any) -> list[bool]:
    numbers = range(len(args)) if argnums is None else argnums
    numbers = [numbers] if isinstance(numbers, int) else list(numbers)
    if wrong := [i for i in numbers if not -len(args) <= i < len(args)]:
        raise ValueError(
            f"plan: argnums count positional arguments, of which there are {len(args)}; got "
            f"{wrong[0]}. Pass the argument by position."
        )
    wanted = {i % len(args) for i in numbers}
    owner = [i for i, arg in enumerate(args) for leaf in jax.tree.leaves(arg) if is_array(leaf)]
    marks = [is_inexact(_type(x)) and i in wanted for x, i in zip(arrays, owner, strict=False)]
    if not any(marks):
        raise ValueError(
            "plan: some argument has a gradient; got none that is floating among those chosen. "
            "Pass the parameters as an argument."
        )
    # Keyword arguments have none.
    return marks + [False] * (len(arrays) - len(owner))


def _type(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jax.typeof(x)


def _plan(planner: Planner, choice: Choice, budget: int | float) -> Plan:
    graph, closure = planner.graph, choice.closure
    again = [graph.steps[i] for i in closure.again]
    matmul = sum(step.matmul_flops for step in graph.steps if step.op.loop is None)
    return Plan(
        budget=budget,
        nbytes=closure.nbytes,
        plain_nbytes=planner.plain_bytes,
        recompute=closure.cost / max(graph.forward_cost, 1.0),
        recompute_flops=sum(step.flops for step in again),
        recompute_matmul=sum(step.matmul_flops for step in again) / max(matmul, 1.0),
        method=choice.method,
        gap=choice.gap,
        note=choice.note,
        temp_bytes=choice.temp_bytes,
        plain_temp_bytes=choice.plain_temp_bytes,
        _planner=planner,
        _choice=choice,
    )


def _kept(candidate: Candidate, spared: float) -> KeptValue:
    name, line = "carried", ""
    if candidate.op is not None:
        if place := candidate.op.line:
            line = f"{Path(place.file).name}:{place.line} ({place.function})"
        if not candidate.carried:
            name = candidate.op.eqn.primitive.name
    type_ = candidate.aval.str_short(short_dtypes=True)
    return KeptValue(name, type_, candidate.nbytes, candidate.trips, line, spared)


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
