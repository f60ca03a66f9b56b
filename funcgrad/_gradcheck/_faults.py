"""What no comparison with differences shows: calls that differ, rules that are no derivatives."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad import _jaxpr
from funcgrad._gradcheck._jacobians import Derivatives, same_trace
from funcgrad._gradcheck._problem import Problem, narrowed
from funcgrad._gradcheck._space import Space

# torch.allclose's own, by which it compares batches with single calls.
_BATCH_RTOL, _BATCH_ATOL = 1e-5, 1e-8
_CUSTOM_VJP = {"custom_vjp_call", "custom_vjp_call_jaxpr"}


def second_trace(derivatives: Derivatives, modes: tuple[str, ...]) -> Derivatives | None:
    """The function traced anew, where that gives another program: its Python is not the same."""
    problem = derivatives.problem
    if problem.jaxpr is None:
        return None  # each call runs the Python
    for mode in modes:
        try:
            same = same_trace(lambda at, mode=mode: _derived(problem, mode, at), derivatives.at)
        except Exception:  # the mode does not exist, as will be said
            same = same_trace(problem.flat, derivatives.at)
        if not same:
            return Derivatives(problem, derivatives.eps)
    return None


def _derived(problem: Problem, mode: str, at: Any) -> tuple[Any, Any]:
    """The value of the function differentiated, and a derivative."""
    if mode == "forward":
        return jax.jvp(problem.flat, (at,), (jnp.zeros(problem.inputs.size, problem.dtype),))
    value, pull = jax.vjp(problem.flat, at)
    return value, pull(jnp.zeros(problem.outputs.size, problem.dtype))[0]


def value_faults(
    derivatives: Derivatives, anew: Derivatives | None, nondet_tol: float
) -> Iterator[str]:
    """Whether two calls at the same point give the same."""
    problem = derivatives.problem
    # In one run and in two, since what a callback gave may be taken for constant within a run.
    zeros = np.zeros((2, problem.inputs.size))
    runs = [*derivatives.values(zeros), derivatives.values(zeros[:1])[0]]
    runs += [anew.values(zeros[:1])[0]] if anew else []
    what = "two calls of the function at the same point"
    yield from _differ(what, runs, nondet_tol, problem.outputs)


def rule_faults(
    derivatives: Derivatives,
    mode: str,
    anew: Derivatives | None,
    nondet_tol: float,
    tolerances: tuple[float, float],
) -> Iterator[str]:
    """Whether the vjp or jvp is one: the same twice, linear, on the function's values."""
    problem, (atol, rtol) = derivatives.problem, tolerances
    name, vector, given, returned = (
        ("vjp", "cotangent", problem.outputs, problem.inputs)
        if mode == "reverse"
        else ("jvp", "tangent", problem.inputs, problem.outputs)
    )
    row = np.random.default_rng(1).random(given.size)
    rows = np.stack([row, row, -3 * row, 0 * row])
    found, sums = derivatives.run(mode, 4, lambda start, stop: rows[start:stop])
    again = [derivatives, anew] if anew else [derivatives]
    runs = [*found[:2], *(d.run(mode, 1, lambda *_: rows[:1])[0][0] for d in again)]
    yield from _differ(
        f"two calls of the {name} with the same {vector}", runs, nondet_tol, returned
    )
    if not np.isfinite(found).all():
        return  # the table says so
    if found[3].any():
        yield (
            f"the {name} of a zero {vector} is zero; got other numbers. It is not multiplied by it."
        )
    scale = rtol * np.abs(3 * found[0]) + atol * (1 + 3 * row.sum()) + _rounding(problem, found)
    if (np.abs(found[2] + 3 * found[0]) > scale).any():
        yield (
            f"the {name} is linear in the {vector}; got something else for -3 times a {vector} "
            "than -3 times what it gives for that. A derivative has no clipping, sign or norm "
            f"of the {vector} in it."
        )
    yield from _value_fault(derivatives, mode, sums[0], tolerances)


def _value_fault(
    derivatives: Derivatives, mode: str, sums: np.ndarray, tolerances: tuple[float, float]
) -> Iterator[str]:
    problem, (atol, rtol) = derivatives.problem, tolerances
    base = derivatives.values(np.zeros((1, problem.inputs.size)))[0]
    rounding = 1e3 * float(np.finfo(problem.dtype).eps) * (np.abs(derivatives.sums) @ np.abs(base))
    if (np.abs(sums - derivatives.sums @ base) <= rounding).all():
        return
    value = np.asarray(_derived(problem, mode, jnp.asarray(derivatives.at))[0])
    apart = np.abs(value - base)
    if (apart > atol + rtol * np.abs(base) + _rounding(problem, base)).any():
        worst = int(np.nan_to_num(apart).argmax())
        yield (
            "the function differentiated gives the values of the function; got "
            f"{value[worst]:.6g} for {base[worst]:.6g} at {entry_name(problem.outputs, worst)}. "
            "Look at the values that its rule returns."
        )


def _rounding(problem: Problem, numbers: np.ndarray) -> float:
    """What a few roundings, where the function rounds, change in numbers as large as these."""
    rounded = narrowed(problem)
    return 8 * rounded.unit * float(np.abs(numbers).max(initial=0.0)) if rounded else 0.0


def batch_faults(derivatives: Derivatives, mode: str) -> Iterator[str]:
    """Whether a batch by ``jax.vmap`` equals single calls, of the vjp or of the jvp."""
    problem = derivatives.problem
    at = jnp.asarray(derivatives.at)
    if mode == "reverse":
        space, run = problem.outputs, lambda v: jax.vjp(problem.flat, at)[1](v)[0]
        names = problem.inputs
    else:
        space, run = problem.inputs, lambda v: jax.jvp(problem.flat, (at,), (v,))[1]
        names = problem.outputs
    rows = np.random.default_rng(2).normal(size=(2, space.size)).astype(at.dtype)
    try:
        got = np.asarray(jax.jit(jax.vmap(run))(rows))
    except Exception as error:  # whatever a batching rule raises is its failure
        yield f"{mode} mode runs under jax.vmap; got {type(error).__name__}: {_first_line(error)}."
        return
    expected = derivatives.run(mode, 2, lambda *_: rows)[0]
    off = ~np.isclose(got, expected, _loosened(at.dtype), _BATCH_ATOL, equal_nan=True)
    if off.any():
        i, j = np.argwhere(off)[0]
        yield (
            f"{mode} mode under jax.vmap gives what single calls give; got {got[i, j]:.6g} for "
            f"{expected[i, j]:.6g} at {entry_name(names, int(j))}. Look at its batching rule."
        )


def no_mode(problem: Problem, mode: str, error: Exception) -> str:
    """Words for a function that cannot be differentiated in this mode."""
    said = f"{mode} mode exists; got {type(error).__name__}: {_first_line(error)}."
    visits = () if problem.jaxpr is None else _jaxpr.walk(problem.jaxpr)
    met = {visit.eqn.primitive.name for visit in visits}
    if mode == "forward" and met & _CUSTOM_VJP:
        return f"{said} A jax.custom_vjp has none; fg.Function and jax.custom_jvp have both modes."
    if mode == "reverse" and "pallas_call" in met:
        return f"{said} A Pallas kernel has none of its own: write it a backward, in fg.Function."
    return said


def notes_on(
    derivatives: Derivatives, tolerances: tuple[float, float], *, rounding_hides: bool
) -> Iterator[str]:
    """What makes differences inexact here."""
    problem, eps, (atol, rtol) = derivatives.problem, derivatives.eps, tolerances
    rounded = narrowed(problem)
    if rounded and rounding_hides:
        yield (
            f"numbers are rounded to {rounded.where}. Differences over {2 * eps:g} see that "
            "rounding and not the slope: let the dtype there follow the inputs, or check with a "
            "step and tolerances to match (dtype=jnp.float32, or eps=, rtol=, atol=)."
        )
    unit = float(np.finfo(problem.dtype).eps)
    largest = lambda x: float(np.abs(x).max(initial=0.0))
    step = unit * largest(derivatives.at) / eps
    if np.isfinite(step) and step > rtol:
        yield f"the largest input, {largest(derivatives.at):.3g}, loses the step eps={eps:g}."
    values = derivatives.values(np.zeros((1, problem.inputs.size)))
    noise = unit * largest(values) / eps
    if np.isfinite(noise) and noise > atol:
        yield (
            f"values as large as {largest(values):.3g} leave noise of about {noise:.1g} in "
            f"differences over {2 * eps:g}: take a larger eps, or atol."
        )


def entry_name(space: Space, place: int) -> str:
    """The path of the entry that stands at this place of a vector."""
    i = int(np.searchsorted(space.starts, place, side="right")) - 1
    return space.leaves[i].at((place - int(space.starts[i])) % space.leaves[i].size)


def _differ(what: str, runs: list[np.ndarray], tolerance: float, space: Space) -> Iterator[str]:
    first = runs[0]
    for other in runs[1:]:
        apart = np.abs(first - other)  # a NaN of two infinities: as far apart as can be
        apart = np.where((first == other) | np.isnan(first) & np.isnan(other), 0.0, apart)
        if not (apart <= tolerance).all():
            worst = int(np.nan_to_num(apart, nan=np.inf).argmax())
            yield (
                f"{what} give the same (nondet_tol={tolerance:g}); got {first[worst]:.6g} and "
                f"{other[worst]:.6g} at {entry_name(space, worst)}. Let what is random come from a "
                "key among the inputs."
            )
            return


def _loosened(dtype: Any) -> float:
    return max(_BATCH_RTOL, 100 * float(np.finfo(dtype).eps))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
