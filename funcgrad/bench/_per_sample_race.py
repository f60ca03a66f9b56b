"""The problem of the task ``per-sample``: sums, norms and products of per-sample gradients."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from funcgrad._compat import enable_x64
from funcgrad.bench import _problem
from funcgrad.bench._contenders import JAX_CONTENDERS, PRODUCT_CONTENDERS, Contender
from funcgrad.bench._models import MODELS, SEED, Task
from funcgrad.bench._problem import Problem, Right
from funcgrad.bench._torch_peers import TORCH_CONTENDERS, TORCH_PRODUCTS

REFERENCE_SAMPLES = 8
MEMORY_LIMIT = 8 * 2**30
"""Bytes of gradients that a contender may write in one go."""
TRAFFIC_LIMIT = 64 * 2**30
"""Bytes of gradients that it may write in one call."""
# What each kind of model is raced by.
RACERS = {
    "sums": {**JAX_CONTENDERS, **TORCH_CONTENDERS},
    "products": {**PRODUCT_CONTENDERS, **TORCH_PRODUCTS},
}


class PerSample(Problem):
    """A task of the models, and the float64 loop over a batch that repeats a few samples."""

    baselines = {
        "jax": ("plain", "plain, microbatches"),
        "torch": (next(iter(TORCH_CONTENDERS)),),
    }

    def __init__(
        self,
        make: Callable[[], Task],
        title: str,
        *,
        model: str = "",
        asks: str = "sums",
        memory_limit: int = MEMORY_LIMIT,
    ) -> None:
        self.task = make()
        self.title, self.model, self.asks, self.memory_limit = title, model, asks, memory_limit
        self.args = (self.task.params, *self.task.batch)
        self.contenders = RACERS[asks]
        # fg.clipped_grad stays below the bound by 3 machine epsilons for each sample.
        self.tolerance = 1e-4 + 5e-7 * self.task.size

    @staticmethod
    def of(model: str, quick: bool) -> "PerSample":
        """That of a key of ``MODELS``."""
        row = MODELS[model]
        title = f"{model} at toy size" if quick else row.title
        return PerSample(row.quick if quick else row.make, title, model=model, asks=row.asks)

    def reference(self) -> Right:
        """Differentiate some samples one after another."""
        task = self.task
        n = min(REFERENCE_SAMPLES, task.size)
        with enable_x64(True):
            params, batch = _problem.float64((task.params, task.take(slice(n)).batch))
            grad = jax.jit(jax.grad(task.loss))
            grads = [
                [np.asarray(leaf) for leaf in jax.tree.leaves(grad(params, *(x[i] for x in batch)))]
                for i in range(n)
            ]
        norms = np.array([np.sqrt(sum(np.sum(leaf**2) for leaf in sample)) for sample in grads])
        # The median, so that half of the samples are clipped; exact in float32, so that every
        # contender gets the same bound.
        bound = np.float32(np.median(norms))
        repeats = np.random.default_rng(SEED).integers(0, n, task.size)
        counts = np.bincount(repeats, minlength=n)
        weights = {"plain": counts, "clipped": counts * np.minimum(1, bound / norms)}
        right: Right = {"repeats": [repeats], "norms": [norms[repeats]]}
        right["bound"] = [np.asarray(bound)]
        for kind, weight in weights.items():
            right[kind] = [
                functools.reduce(np.add, (w * g for w, g in zip(weight, leaf, strict=True)))
                for leaf in zip(*grads, strict=True)
            ]
        if self.asks == "products":
            right |= _products(grads, jax.tree.leaves(params), repeats, counts)
        return right

    def about(self, right: Right) -> dict[str, Any]:
        """Sizes, the bound, and the goals of the model."""
        row = MODELS.get(self.model)
        return {
            "parameters": self.task.n_params,
            "batch": self.task.size,
            "microbatch": self.task.chunk,
            "max_norm": float(right["bound"][0]),
            "float64_samples": min(REFERENCE_SAMPLES, self.task.size),
            "asks": self.asks,
            "time_goal": row.time_goal if row else None,
            "memory_goal": row.memory_goal if row else None,
        }

    def make(self, contender: _problem.Contender, right: Right) -> Callable[..., Any]:
        """The contender's function, which gets the bound."""
        return contender.make(self.task, float(right["bound"][0]))

    def trial(self, right: Right) -> tuple[Any, ...]:
        """The batch of repeats."""
        return (self.task.params, *self.task.take(right["repeats"][0]).batch)

    def not_run(self, name: str) -> str | None:
        """Whether it is absent, knows the model, and has memory for its gradients."""
        way: Contender = self.contenders[name]  # pyright: ignore[reportAssignmentType]
        if absent := way.absent():
            return absent
        if way.models is not None and self.task.family not in way.models:
            return "no adapter for this model"
        gradient = 4 * self.task.n_params
        if way.held(self.task) * gradient > self.memory_limit:
            return f"not run: {_gib(way.held(self.task) * gradient)} of gradients"
        if way.held(self.task) and self.task.size * gradient > TRAFFIC_LIMIT:
            return (
                f"not run: writes {_gib(self.task.size * gradient)} of gradients, in microbatches"
            )
        return None


def _products(
    grads: list[list[np.ndarray]], params: list[np.ndarray], repeats: np.ndarray, counts: np.ndarray
) -> Right:
    """Variance, products with the parameters and with one another, of a batch of repeats."""
    n, variance = len(repeats), []
    for leaf in zip(*grads, strict=True):
        rows = np.stack(leaf)
        apart = rows - np.tensordot(counts / n, rows, 1)
        variance.append(np.tensordot(counts / (n - 1), apart**2, 1))
    flat = np.stack([np.concatenate([leaf.ravel() for leaf in sample]) for sample in grads])
    dots = flat @ np.concatenate([np.ravel(p) for p in params])
    gram = flat @ flat.T
    return {"variance": variance, "dots": [dots[repeats]], "gram": [gram[repeats][:, repeats]]}


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.0f} GiB"
