"""How the clipped sum's time and memory grow with the batch, the depth and the length."""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from funcgrad.bench import _models
from funcgrad.bench._contenders import JAX_CONTENDERS
from funcgrad.bench._measure import measure
from funcgrad.bench._models import Task
from funcgrad.bench._options import Options

_WAYS = {"plain": "plain", "clipped": "fg.per_sample clipped_sum"}


def curves(
    options: Options, progress: Callable[[str], object] = lambda text: None
) -> dict[str, Any]:
    """Measure and draw; the plot is ``per_sample_scaling_<device>.png`` in the folder."""
    small = {"width": 16 if options.quick else 128, "vocabulary": 64 if options.quick else 1024}
    deep = functools.partial(_models.transformer, 8, length=64, **small)
    long = functools.partial(_models.transformer, 8, depth=2, **small)
    toy = {"n_inputs": 8, "width": 8} if options.quick else {}
    wide = functools.partial(_models.mlp, **toy)
    axes = [
        ("batch", "MLP 784-1024-1024-10", [2**i for i in range(11)], lambda n: wide(n)),
        ("depth", "transformer d128 T64, batch 8", [2, 4, 8, 16], lambda n: deep(depth=n)),
        ("length", "transformer d128 L2, batch 8", [64, 128, 256, 512], lambda n: long(length=n)),
    ]
    figures: dict[str, Any] = {"curves": []}
    for axis, title, places, make in axes:
        places = places[:2] if options.quick else places
        points = []
        for at in places:
            progress(f"scaling: {axis} {at}")
            points.append({"at": at, **_point(make(at), options.turns)})
        figures["curves"].append({"axis": axis, "title": title, "points": points})
    depth = 4 if options.quick else 48
    figures["deep"] = {"depth": depth, "seconds": _trace(deep(depth=depth))}
    draw(figures["curves"], options)
    return figures


def draw(lines: Iterable[dict[str, Any]], options: Options) -> None:
    """Plot the curves: time above, temporaries below, one column for each axis."""
    from matplotlib.figure import Figure

    lines = list(lines)
    figure = Figure(figsize=(3.4 * len(lines), 5.2), layout="constrained")
    panels = figure.subplots(2, len(lines), squeeze=False)
    for column, curve in enumerate(lines):
        at = [point["at"] for point in curve["points"]]
        rows = (("seconds", 1e-3, "ms"), ("temp_bytes", 2**20, "temporaries, MiB"))
        for row, (what, unit, label) in enumerate(rows):
            axes = panels[row][column]
            for way, style in (("plain", "o--"), ("clipped", "o-")):
                values = [point[f"{way}_{what}"] / unit for point in curve["points"]]
                axes.loglog(at, values, style, label=_WAYS[way], base=2)
            axes.set_xticks(at, [str(n) for n in at], rotation=45 if len(at) > 6 else 0)
            axes.grid(alpha=0.3)
            axes.set_ylabel(label)
        panels[0][column].set_title(curve["title"], fontsize=9)
        panels[1][column].set_xlabel(curve["axis"])
    panels[0][0].legend(fontsize=8)
    figure.savefig(options.out / f"per_sample_scaling_{jax.default_backend()}.png", dpi=110)


def _point(task: Task, turns: int) -> dict[str, float]:
    ways = {key: JAX_CONTENDERS[name].make(task, 1.0) for key, name in _WAYS.items()}
    args = jax.tree.map(jax.numpy.asarray, (task.params, *task.batch))
    trace = _trace(task)
    measured = measure(ways, args, rounds=turns)
    out: dict[str, float] = {"trace_seconds": trace, "ratio": measured["clipped"].ratio}
    for key in ways:
        out[f"{key}_seconds"] = measured[key].median_seconds
        out[f"{key}_temp_bytes"] = measured[key].temp_bytes
        out[f"{key}_compile_seconds"] = measured[key].compile_seconds
    return out


def _trace(task: Task) -> float:
    """Seconds to trace the clipped sum and choose its roads."""
    start = time.perf_counter()
    jax.jit(JAX_CONTENDERS[_WAYS["clipped"]].make(task, 1.0)).lower(task.params, *task.batch)
    return time.perf_counter() - start
