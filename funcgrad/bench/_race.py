"""All contenders on one problem, in turns, each in its own process on the same cores."""

import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from funcgrad.bench._measure import quartiles
from funcgrad.bench._options import Progress
from funcgrad.bench._problem import Problem
from funcgrad.bench._worker import Worker, WorkerError

PATIENCE = 10
"""Seconds after which a contender sits out the turns that are left, but for the first two."""


def race(
    make: Callable[[], Problem],
    *,
    turns: int = 5,
    contenders: Sequence[str] | None = None,
    progress: Progress = lambda text, share: None,
) -> dict[str, Any]:
    """Compile and check each contender, then run all of them in turns.

    A worker compiles while the others wait; the call that is checked against the float64
    numbers warms up.  Then A B C, A B C, ...: a machine that others use meanwhile is slow for all.

    Args:
      make: An importable function that makes the problem; each process calls it.
      turns: Calls of each that count.
      contenders: Names of the problem's contenders; all, if ``None``.
      progress: Called with what is being done, and the share of the work before it.

    Returns:
      The figures, as in the JSON.  A contender that did not run has a ``reason`` only.
    """
    problem, load = make(), os.getloadavg()[0]
    names = list(problem.contenders if contenders is None else contenders)
    reasons = {name: reason for name in names if (reason := problem.not_run(name))}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
    figures: dict[str, dict[str, Any]] = {name: {} for name in names if name not in reasons}
    seconds: dict[str, list[float]] = {name: [] for name in figures}

    with contextlib.ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "right.npz"
        progress("the float64 numbers", 0.0)
        referee = Worker(make, cores)
        stack.callback(referee.close)
        about = referee.ask("reference", file)
        referee.close()
        workers = {}
        for name in figures:
            workers[name] = Worker(make, cores)
            stack.callback(workers[name].close)

        def ask(name: str, command: str, *args: Any, **options: Any) -> Any:
            try:
                return workers[name].ask(command, *args, **options)
            except WorkerError as error:
                reasons[name] = str(error)
                return None

        for i, name in enumerate(figures):
            progress(f"compiling {name}", 0.05 + 0.45 * i / len(figures))
            figures[name] |= ask(name, "prepare", name, file) or {}
            if name not in reasons:
                figures[name] |= ask(name, "check") or {}
        for turn in range(turns):
            progress(f"turn {turn + 1} of {turns}", 0.5 + 0.5 * turn / turns)
            for name, calls in seconds.items():
                if name in reasons or (turn >= 2 and sum(calls) > PATIENCE):
                    continue
                if (took := ask(name, "run", timeout=120.0)) is not None:
                    calls.append(took)
        for name in figures:
            if name not in reasons:
                figures[name]["peak_bytes"] = ask(name, "peak")

    ran = {name: s for name, s in seconds.items() if name not in reasons}
    baselines = {
        library: min(run, key=lambda name: statistics.median(ran[name]))
        for library, candidates in problem.baselines.items()
        if (run := [name for name in candidates if name in ran])
    }
    for name, calls in ran.items():
        low, median, high = quartiles(calls)
        baseline = baselines.get(problem.contenders[name].library)
        figures[name] |= {
            "seconds": calls,
            "low_seconds": low,
            "median_seconds": median,
            "high_seconds": high,
            # Turn by turn; who sat out some has fewer.
            "ratio": statistics.median(a / b for a, b in zip(calls, ran[baseline]))  # noqa: B905
            if baseline
            else None,
        }
    return {
        "title": problem.title,
        **about,
        "load": load,
        "tolerance": problem.tolerance,
        "baselines": baselines,
        "contenders": {
            name: {
                "kind": problem.contenders[name].kind,
                "library": problem.contenders[name].library,
                **({"reason": reasons[name]} if name in reasons else figures[name]),
            }
            for name in names
        },
    }
