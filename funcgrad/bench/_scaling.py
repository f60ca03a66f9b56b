"""How time and memory of clipped sums grow with batch, width, length and depth."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from funcgrad.bench import _models
from funcgrad.bench._models import Task
from funcgrad.bench._options import Options, Progress
from funcgrad.bench._per_sample_race import PerSample
from funcgrad.bench._race import race
from funcgrad.bench._race_tables import curve
from funcgrad.bench._tables import Column, Table

CONTENDERS = (
    "plain",
    "plain, microbatches",
    "fg.per_sample clipped_sum",
    "fg.clipped_grad",
    "fg.clipped_grad, microbatches",
    "vmap(grad), Optax",
    "vmap(grad), Optax, microbatches",
    "torch: plain",
    "torch: vmap(grad)",
    "torch: Opacus ghost clipping",
)
MEMORY_LIMIT = 2 * 2**30


def _mlp(size: int, axis: str, quick: bool) -> Task:
    batch, width = (size, 1024) if axis == "batch" else (64, size)
    toy = {"n_inputs": 8, "width": 8} if quick else {"width": width}
    return _models.mlp(batch, chunk=min(16, batch), **toy)


def _transformer(size: int, axis: str, quick: bool) -> Task:
    sizes: dict[str, Any] = {"batch": 8, "length": 64, "depth": 2, axis: size}
    toy: dict[str, Any] = (
        {"width": 16, "vocabulary": 64} if quick else {"width": 128, "vocabulary": 1024}
    )
    batch = sizes.pop("batch")
    return _models.transformer(batch, **sizes, **toy, chunk=min(4, batch))


@dataclasses.dataclass(frozen=True)
class _Curve:
    title: str
    make: Callable[[int, str, bool], Task]
    axis: str
    sizes: tuple[int, ...]


_POWERS = tuple(4**i for i in range(7))
CURVES: Mapping[str, _Curve] = {
    "curve-batch": _Curve("MLP 784-1024-1024-10", _mlp, "batch", _POWERS),
    "curve-width": _Curve("MLP of three layers, batch 64", _mlp, "width", (128, 512, 2048)),
    "curve-batch-transformer": _Curve(
        "transformer d128 L2 T64", _transformer, "batch", _POWERS[:-1]
    ),
    "curve-length": _Curve(
        "transformer d128 L2, batch 8", _transformer, "length", (64, 128, 256, 512, 1024)
    ),
    "curve-depth": _Curve(
        "transformer d128 T64, batch 8", _transformer, "depth", (2, 4, 8, 16, 32, 48)
    ),
}


def problem(name: str, size: int, quick: bool) -> PerSample:
    """A place of a curve."""
    of = CURVES[name]
    make = functools.partial(of.make, size, of.axis, quick)
    return PerSample(make, f"{of.title}, {of.axis} {size}", memory_limit=MEMORY_LIMIT)


def measure(name: str, options: Options, progress: Progress) -> dict[str, Any]:
    """Race the main contenders at each place of a curve."""
    of = CURVES[name]
    sizes = of.sizes[:2] if options.quick else of.sizes
    points = {}
    for i, size in enumerate(sizes):
        step = lambda text, share, i=i, size=size: progress(
            f"{of.axis} {size}: {text}", (i + share) / len(sizes)
        )
        make = functools.partial(problem, name, size, options.quick)
        points[str(size)] = race(make, turns=options.turns, contenders=CONTENDERS, progress=step)
    return {"title": of.title, "axis": of.axis, "points": points}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Time, temporaries, tracing and compilation over the size."""
    points = {float(size): of for size, of in figures["points"].items()}
    columns = {
        "median_seconds": Column("time", "ms", "lower"),
        "temp_bytes": Column("temporaries", "MiB", "lower"),
    }
    if figures["axis"] == "depth":
        columns["trace_seconds"] = Column("tracing", "s", "lower", ".2f")
        columns["compile_seconds"] = Column("compilation", "s", "lower", ".2f")
    return [
        curve(points, figures["axis"], figures["title"], what, column)
        for what, column in columns.items()
    ]
