"""``fg.checkpoint(fun, budget=…)``: a function that keeps no more than a budget for backward."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from funcgrad._remat._level import is_inexact
from funcgrad._remat._peak import choose_peak
from funcgrad._remat._planner import Choice, Flat, Planner, infeasible
from funcgrad._remat._solve import Infeasible

KINDS = ("residuals", "peak")


def checkpoint_under_budget(
    fun: Callable[..., Any], budget: Any, budget_kind: str = "residuals"
) -> Callable[..., Any]:
    """A function like ``fun`` whose backward pass keeps at most ``budget``.

    It is planned where it is differentiated, for the arguments that have a gradient there; its
    values and its forward mode are those of ``fun``.
    """
    check_budget(budget, budget_kind, "checkpoint")

    @functools.wraps(fun)
    def planned(*args: Any, **kwargs: Any) -> Any:
        flat, values = Flat.of(fun, args, kwargs, "checkpoint")
        outs = _planned(flat, budget, budget_kind)(*values)
        return jax.tree.unflatten(flat.out_tree, outs)

    return planned


def check_budget(budget: Any, kind: str, call: str) -> None:
    """Refuse what is neither bytes nor a fraction, and unknown kinds."""
    if kind not in KINDS:
        raise ValueError(
            f"{call}: budget_kind is 'residuals' or 'peak'; got {kind!r}. Leave it out to count "
            f"what is kept from forward to backward."
        )
    if isinstance(budget, bool) or not isinstance(budget, int | float | np.integer | np.floating):
        raise TypeError(
            f"{call}: a budget is a number of bytes (int) or a fraction of what is kept "
            f"without one (float); got {budget!r}. Give one of the two."
        )
    if isinstance(budget, int | np.integer):
        if budget < 0:
            raise ValueError(
                f"{call}: a budget in bytes is 0 or more; got {budget}. Give 0 to keep nothing."
            )
    elif not 0 <= budget <= 1:
        raise ValueError(
            f"{call}: a budget that is a float is a fraction from 0.0 to 1.0; got {budget}. "
            f"Give bytes as an int."
        )


def choose(planner: Planner, budget: int | float, kind: str) -> Choice:
    """The choice for a budget of either kind."""
    return choose_peak(planner, budget) if kind == "peak" else planner.choose(budget)


def _planned(flat: Flat, budget: int | float, kind: str) -> Callable[..., list[Any]]:
    # JAX may ask for the derivative more than once: in a loop, until the tangents settle.
    chosen: dict[Any, Choice] = {}
    fun = jax.custom_jvp(lambda *values: flat.plain(*values))

    def rule(values: Sequence[Any], tangents: Sequence[Any]) -> Any:
        marks = tuple(
            not isinstance(t, SymbolicZero) and is_inexact(jax.typeof(x))
            for x, t in zip(values, tangents, strict=True)
        )
        try:
            planner = Planner(flat, values, marks)
        except ValueError as error:
            if "Reverse-mode differentiation" not in str(error):
                raise
            # A while loop, which has a forward mode alone: JAX says so to whoever goes back.
            diff = [i for i, mark in enumerate(marks) if mark]
            return jax.jvp(
                flat.along(values, diff, again=False),
                [values[i] for i in diff],
                [tangents[i] for i in diff],
            )
        if marks not in chosen:
            try:
                chosen[marks] = choose(planner, budget, kind)
            except Infeasible as error:
                raise infeasible(error, budget, kind, "checkpoint") from None
            if chosen[marks].note:
                warnings.warn(f"checkpoint: {chosen[marks].note}", stacklevel=2)
        return planner.differentiate(chosen[marks].closure, tangents)

    fun.defjvp(rule, symbolic_zeros=True)
    return fun
