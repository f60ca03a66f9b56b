"""Norms and clipped sums of per-sample gradients, by every road there is."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from rich.console import Console
from rich.table import Table
from rich.text import Text

import funcgrad as fg
from funcgrad._compat import enable_x64
from funcgrad.bench._measure import Measurement, measure

# A wrong road is off by far more than float32 rounding, and than the few units in the last place
# per sample that fg.clipped_grad stays below the bound.
TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model's loss and the batch it is differentiated on."""

    name: str
    loss: Callable[..., Any]
    """``loss(params, xs, ys)``: the sum over the batch."""
    params: Any
    xs: Any
    ys: Any

    def sample_loss(self, params: Any, x: Any, y: Any) -> Any:
        """The loss of one sample, without a batch axis."""
        return self.loss(params, x[None], y[None])

    def describe(self) -> str:
        """The sizes that time and memory depend on."""
        n_params = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return f"{self.name}: {n_params:,} parameters, a batch of {len(self.xs)} samples"


@dataclasses.dataclass(frozen=True)
class Road:
    """A way from ``(params, xs, ys)`` to the sum of the gradients, and to the norms if it clips."""

    name: str
    explanation: str
    fun: Callable[..., tuple[Any, Any]]
    clips: bool = True


def all_roads(problem: Problem, max_norm: float, chunk_size: int | None) -> list[Road]:
    """The roads that exist, the first being the baseline; without a chunk size, the main ones."""
    loss, n = problem.sample_loss, chunk_size

    def plain(params: Any, xs: Any, ys: Any) -> tuple[Any, Any]:
        return jax.grad(problem.loss)(params, xs, ys), None

    def microbatches(params: Any, xs: Any, ys: Any) -> tuple[Any, Any]:
        def add(total: Any, chunk: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.grad(problem.loss)(params, *chunk)), None

        chunks = [leaf.reshape(-1, n, *leaf.shape[1:]) for leaf in (xs, ys)]
        return lax.scan(add, jax.tree.map(jnp.zeros_like, params), chunks)

    def vmap_optax(params: Any, xs: Any, ys: Any) -> tuple[Any, Any]:
        grads = jax.vmap(jax.grad(loss), (None, 0, 0))(params, xs, ys)
        total, _ = optax.per_example_global_norm_clip(grads, max_norm)
        return total, jax.vmap(optax.tree.norm)(grads)

    def factored(params: Any, xs: Any, ys: Any) -> tuple[Any, Any]:
        samples = fg.per_sample(loss)(params, xs, ys)
        return samples.clipped_sum(max_norm), samples.norms()

    def clipped(**options: Any) -> Callable[..., tuple[Any, Any]]:
        fun = fg.clipped_grad(loss, max_norm=max_norm, **options)
        return lambda params, xs, ys: fun(params, xs, ys)[:2]

    roads = [
        Road("plain gradient", "of the batch as a whole: no norms, no clipping", plain, False),
        Road("vmap(grad) and Optax", "jax.vmap, optax.per_example_global_norm_clip", vmap_optax),
        Road("fg.per_sample", "gradients kept as factors, formed only if cheaper", factored),
        Road("fg.clipped_grad", "clipped to a bound that holds in floating point", clipped()),
    ]
    if n is None:
        return roads
    slow = "by lax.scan, in which convolutions are slow on CPU"
    return [
        *roads,
        Road(f"plain, {n} at a time", slow, microbatches, False),
        Road(f"fg.clipped_grad, {n} a time", "with chunk_size, a scan too", clipped(chunk_size=n)),
        Road("fg.clipped_grad, two_pass", 'with road="two_pass"', clipped(road="two_pass")),
        Road("fg.clipped_grad, formed", 'with road="materialize"', clipped(road="materialize")),
    ]


@dataclasses.dataclass(frozen=True)
class Reference:
    """The same numbers in float64, from a loop over the samples."""

    norms: np.ndarray
    grads: list[list[np.ndarray]]

    @staticmethod
    def of(problem: Problem) -> "Reference":
        """Differentiate one sample after another."""
        with enable_x64(True):
            params, xs = jax.tree.map(_float64, (problem.params, problem.xs))
            grad = jax.jit(jax.grad(problem.sample_loss))
            grads = [
                [np.asarray(leaf) for leaf in jax.tree.leaves(grad(params, x, y))]
                for x, y in zip(xs, problem.ys, strict=True)
            ]
        norms = [np.sqrt(sum(np.sum(leaf**2) for leaf in sample)) for sample in grads]
        return Reference(np.array(norms), grads)

    def total(self, max_norm: float | None) -> list[np.ndarray]:
        """The sum over samples, clipped to ``max_norm`` if one is given."""
        scales = np.ones_like(self.norms)
        if max_norm is not None:
            scales = np.minimum(1, max_norm / np.maximum(self.norms, np.finfo(float).tiny))
        return [np.tensordot(scales, np.stack(leaf), axes=1) for leaf in zip(*self.grads)]  # noqa: B905


@dataclasses.dataclass(frozen=True)
class Report:
    """Time, memory and error of each road on one problem."""

    problem: Problem
    max_norm: float
    roads: tuple[Road, ...]
    measurement: Measurement
    norm_errors: dict[str, float | None]
    sum_errors: dict[str, float]

    @property
    def right(self) -> bool:
        """Whether every road's numbers are those of the float64 loop, to rounding."""
        errors = [*self.sum_errors.values(), *self.norm_errors.values()]
        return all(error is None or error <= TOLERANCE for error in errors)

    def to_json(self) -> dict[str, Any]:
        """The figures as plain numbers, strings, lists and dicts."""
        figures = self.measurement.to_json()
        for timing in figures["timings"]:
            timing["norm_error"] = self.norm_errors[timing["name"]]
            timing["sum_error"] = self.sum_errors[timing["name"]]
        return {
            "problem": self.problem.name,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(self.problem.params)),
            "batch": len(self.problem.xs),
            "max_norm": self.max_norm,
            **figures,
        }

    def show(self, console: Console) -> None:
        """Print the table."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
        table.title = Text(self.problem.describe(), "bold")
        table.add_column("road", no_wrap=True)
        for header in ("time\nms", "time\nratio", "memory\nMiB", "compile\ns"):
            table.add_column(header, justify="right")
        table.add_column("error of\nnorms", justify="right")
        table.add_column("error of\nsum", justify="right")
        for road in self.roads:
            timing = self.measurement[road.name]
            norm_error = self.norm_errors[road.name]
            table.add_row(
                road.name,
                f"{1e3 * timing.median_seconds:.1f}",
                f"{timing.ratio:.2f}",
                f"{timing.temp_bytes / 2**20:.1f}",
                f"{timing.compile_seconds:.1f}",
                "no norms" if norm_error is None else f"{norm_error:.0e}",
                f"{self.sum_errors[road.name]:.0e}",
            )
        console.print(table)

    def explain(self, console: Console) -> None:
        """Print what the words of the table mean, and where it was measured."""
        words = {
            **{road.name: road.explanation for road in self.roads},
            "": "",
            "time": f"median of {self.measurement.rounds} calls, the roads in turns, once compiled",
            "ratio": "to the plain gradient's time in the same round",
            "memory": "what the compiled program takes beside its inputs and outputs",
            "error": "largest difference from a float64 loop over the samples, relative to the "
            "largest entry (plain: from the loop's sum without clipping); fg.clipped_grad stays "
            "about 1e-7 per sample below the bound on purpose",
            "measured": self.measurement.machine.describe(),
        }
        legend = Table.grid(padding=(0, 2, 0, 0))
        for word, meaning in words.items():
            legend.add_row(Text(word, "bold dim"), Text(meaning, "dim"))
        console.print(legend)


def compare_roads(
    problem: Problem,
    *,
    max_norm: float | None = None,
    chunk_size: int | None,
    rounds: int,
    progress: Callable[[str], object] | None = None,
) -> Report:
    """Measure every road, and compare its numbers with the float64 loop's.

    Without ``max_norm`` it is the median of the norms, so that half of the samples are clipped.
    """
    reference = Reference.of(problem)
    max_norm = float(statistics.median(reference.norms)) if max_norm is None else max_norm
    roads = all_roads(problem, max_norm, chunk_size)
    args = (problem.params, problem.xs, problem.ys)
    figures = measure(
        {road.name: road.fun for road in roads}, args, rounds=rounds, progress=progress
    )
    totals = {clips: reference.total(max_norm if clips else None) for clips in (False, True)}
    norm_errors: dict[str, float | None] = {}
    sum_errors = {}
    for road in roads:
        total, norms = figures[road.name].output
        sum_errors[road.name] = _error(jax.tree.leaves(total), totals[road.clips])
        norm_errors[road.name] = _error([norms], [reference.norms]) if road.clips else None
    return Report(problem, max_norm, tuple(roads), figures, norm_errors, sum_errors)


def _float64(leaf: Any) -> Any:
    return np.asarray(leaf, np.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _error(leaves: Sequence[Any], expected: Sequence[np.ndarray]) -> float:
    """The largest difference over the largest entry, of the leaf where it is worst."""
    return max(
        float(np.abs(np.asarray(leaf, np.float64) - right).max() / np.abs(right).max())
        for leaf, right in zip(leaves, expected, strict=True)
    )
