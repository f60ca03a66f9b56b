"""All contenders on one model, in turns, each in its own process on the same cores."""

import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from funcgrad.bench._measure import quartiles
from funcgrad.bench._models import MODELS, Task
from funcgrad.bench._torch_peers import TORCH_CONTENDERS
from funcgrad.bench._worker import CONTENDERS, RACERS, Worker, WorkerError

MEMORY_LIMIT = 8 * 2**30
"""Bytes of gradients that a contender may write in one go."""
TRAFFIC_LIMIT = 64 * 2**30
"""Bytes of gradients that it may write in one call."""
PATIENCE = 30
"""Seconds after which a contender sits out the turns that are left, but for the first two."""
BASELINES = {
    "jax": ("plain", "plain, microbatches"),
    "torch": (next(iter(TORCH_CONTENDERS)),),
}


def not_run(contender: str, model: str, task: Task) -> str | None:
    """Why a contender stays away from a model, if it does."""
    way = CONTENDERS[contender]
    if absent := way.absent():
        return absent
    if way.models is not None and model not in way.models:
        return "no adapter for this model"
    gradient = 4 * task.n_params
    if way.held(task) * gradient > MEMORY_LIMIT:
        return f"not run: {_gib(way.held(task) * gradient)} of gradients"
    if way.held(task) and task.size * gradient > TRAFFIC_LIMIT:
        return f"not run: writes {_gib(task.size * gradient)} of gradients, in microbatches"
    return None


def race(
    model: str,
    *,
    quick: bool = False,
    turns: int = 5,
    contenders: Sequence[str] | None = None,
    progress: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Compile and check each contender, then run all of them in turns.

    A worker compiles while the others wait; the call that is checked against the float64 loop
    warms up.  Then A B C, A B C, ...: a machine that others use meanwhile is slow for all.

    Args:
      model: A key of ``MODELS``.
      quick: Whether to take the model at toy size.
      turns: Calls of each that count.
      contenders: Keys of ``CONTENDERS``; those for the model, if ``None``.
      progress: Called with what is being done.

    Returns:
      The figures, as in the JSON.  A contender that did not run has a ``reason`` only.
    """
    names = list(RACERS[MODELS[model].asks] if contenders is None else contenders)
    task = MODELS[model].quick() if quick else MODELS[model].make()
    reasons = {name: reason for name in names if (reason := not_run(name, model, task))}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
    figures: dict[str, dict[str, Any]] = {name: {} for name in names if name not in reasons}
    seconds: dict[str, list[float]] = {name: [] for name in figures}

    with contextlib.ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "reference.npz"
        workers = {}
        for name in figures:
            workers[name] = Worker(model, quick, cores)
            stack.callback(workers[name].close)

        def ask(name: str, command: str, *args: Any, **options: Any) -> Any:
            try:
                return workers[name].ask(command, *args, **options)
            except WorkerError as error:
                reasons[name] = str(error)
                return None

        progress(f"{model}: the float64 loop")
        referee = Worker(model, quick, cores)
        stack.callback(referee.close)
        about = referee.ask("reference", file)
        referee.close()
        for name in figures:
            progress(f"{model}: compiling {name}")
            figures[name] |= ask(name, "prepare", name, about["max_norm"]) or {}
            if name not in reasons:
                progress(f"{model}: checking {name}")
                figures[name] |= ask(name, "check", file) or {}
        for turn in range(turns):
            progress(f"{model}: turn {turn + 1} of {turns}")
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
        for library, candidates in BASELINES.items()
        if (run := [name for name in candidates if name in ran])
    }
    for name, calls in ran.items():
        low, median, high = quartiles(calls)
        baseline = baselines.get(CONTENDERS[name].library)
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
        "title": MODELS[model].title if not quick else f"{model} at toy size",
        **about,
        "asks": MODELS[model].asks,
        "time_goal": MODELS[model].time_goal,
        "memory_goal": MODELS[model].memory_goal,
        "baselines": baselines,
        "contenders": {
            name: {
                "kind": CONTENDERS[name].kind,
                "library": CONTENDERS[name].library,
                **({"reason": reasons[name]} if name in reasons else figures[name]),
            }
            for name in names
        },
    }


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.0f} GiB"
