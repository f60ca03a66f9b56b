"""The ways to a clipped sum of per-sample gradients, each a function of ``(params, *batch)``."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

import funcgrad as fg
from funcgrad.bench import _problem
from funcgrad.bench._models import Task

Kind = Literal["plain", "norms", "clipped", "variance", "dots", "gram"]
PRODUCTS: tuple[Kind, ...] = ("variance", "dots", "gram")
"""What is asked of all gradients together, beside their sum."""


@dataclasses.dataclass(frozen=True)
class Contender(_problem.Contender):
    """A way to numbers of per-sample gradients: ``make(task, max_norm)``.

    Its kind: ``"plain"``, the sum of the gradients; ``"norms"`` of them; ``"clipped"``, their
    sum; their ``"variance"``, ``"dots"`` with the parameters, and ``"gram"`` matrix.
    """

    held: Callable[[Task], int] = lambda task: 0
    """Samples whose gradients it writes out in one go."""
    models: tuple[str, ...] | None = None
    """The families of models that it can differentiate; all, if ``None``."""


def _batch_loss(task: Task) -> Callable[..., Any]:
    def loss(params: Any, *batch: Any) -> Any:
        return jnp.sum(jax.vmap(task.loss, (None, *(0 for _ in batch)))(params, *batch))

    return loss


def _in_chunks(task: Task, fun: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of ``fun`` over microbatches."""

    def run(params: Any, *batch: Any) -> Any:
        def add(total: Any, chunk: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, fun(params, *chunk)), None

        chunks = [x.reshape(-1, task.chunk, *x.shape[1:]) for x in batch]
        return lax.scan(add, jax.tree.map(jnp.zeros_like, params), chunks)[0]

    return run


def _plain(task: Task, max_norm: float) -> Callable[..., Any]:
    return jax.grad(_batch_loss(task))


def _plain_chunks(task: Task, max_norm: float) -> Callable[..., Any]:
    return _in_chunks(task, jax.grad(_batch_loss(task)))


def _norms(task: Task, max_norm: float) -> Callable[..., Any]:
    return lambda params, *batch: fg.per_sample(task.loss)(params, *batch).norms()


def _factored(task: Task, max_norm: float) -> Callable[..., Any]:
    return lambda params, *batch: fg.per_sample(task.loss)(params, *batch).clipped_sum(max_norm)


def _clipped(**options: Any) -> Callable[[Task, float], Callable[..., Any]]:
    def make(task: Task, max_norm: float) -> Callable[..., Any]:
        fun = fg.clipped_grad(task.loss, max_norm=max_norm, **options)
        return lambda params, *batch: fun(params, *batch).grads

    return make


def _clipped_chunks(task: Task, max_norm: float) -> Callable[..., Any]:
    return _clipped(chunk_size=task.chunk)(task, max_norm)


def _vmap(task: Task, max_norm: float) -> Callable[..., Any]:
    def run(params: Any, *batch: Any) -> Any:
        grads = jax.vmap(jax.grad(task.loss), (None, *(0 for _ in batch)))(params, *batch)
        return optax.per_example_global_norm_clip(grads, max_norm)[0]

    return run


def _vmap_chunks(task: Task, max_norm: float) -> Callable[..., Any]:
    return _in_chunks(task, _vmap(task, max_norm))


def _jax_privacy(chunked: bool) -> Callable[[Task, float], Callable[..., Any]]:
    def make(task: Task, max_norm: float) -> Callable[..., Any]:
        from jax_privacy import clipping  # pyright: ignore[reportMissingImports]

        return clipping.clipped_grad(
            task.loss,
            l2_clip_norm=max_norm,
            batch_argnums=tuple(range(1, 1 + len(task.batch))),
            keep_batch_dim=False,
            microbatch_size=task.chunk if chunked else None,
        )

    return make


def _of_samples(kind: Kind) -> Callable[[Task, float], Callable[..., Any]]:
    def make(task: Task, max_norm: float) -> Callable[..., Any]:
        def run(params: Any, *batch: Any) -> Any:
            samples = fg.per_sample(task.loss)(params, *batch)
            return samples.dots(params) if kind == "dots" else getattr(samples, kind)()

        return run

    return make


def _of_rows(kind: Kind) -> Callable[[Task, float], Callable[..., Any]]:
    """From all gradients in memory."""

    def make(task: Task, max_norm: float) -> Callable[..., Any]:
        def run(params: Any, *batch: Any) -> Any:
            rows = jax.vmap(jax.grad(task.loss), (None, *(0 for _ in batch)))(params, *batch)
            if kind == "variance":
                return jax.tree.map(lambda g: jnp.var(g, 0, ddof=1), rows)
            return _products(kind, rows, params)

        return run

    return make


def _products(kind: Kind, rows: Any, params: Any) -> Any:
    flat = [g.reshape(len(g), -1) for g in jax.tree.leaves(rows)]
    if kind == "gram":
        return sum(g @ g.T for g in flat)
    return sum(g @ p.ravel() for g, p in zip(flat, jax.tree.leaves(params), strict=True))


def _of_loop(kind: Kind) -> Callable[[Task, float], Callable[..., Any]]:
    """From the gradients one by one; only the products between them need all in memory."""

    def make(task: Task, max_norm: float) -> Callable[..., Any]:
        def run(params: Any, *batch: Any) -> Any:
            one = lambda sample: jax.grad(task.loss)(params, *sample)
            if kind == "gram":
                return _products(kind, lax.map(one, batch), params)
            if kind == "dots":
                row = lambda sample: jax.tree.map(lambda g: g[None], one(sample))
                return lax.map(lambda sample: _products(kind, row(sample), params)[0], batch)

            def add(state: Any, sample: Any) -> tuple[Any, None]:
                n, mean, squares = state
                grad = one(sample)
                apart = jax.tree.map(jnp.subtract, grad, mean)
                mean = jax.tree.map(lambda m, d: m + d / (n + 1), mean, apart)
                squares = jax.tree.map(
                    lambda s, d, g, m: s + d * (g - m), squares, apart, grad, mean
                )
                return (n + 1, mean, squares), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            (n, _, squares), _ = lax.scan(add, (0, zeros, zeros), batch)
            return jax.tree.map(lambda s: s / (n - 1), squares)

        return run

    return make


_WHOLE = lambda task: task.size
_CHUNK = lambda task: task.chunk

# The first two are what the others' times are compared with.
JAX_CONTENDERS: Mapping[str, Contender] = {
    "plain": Contender(_plain, "plain"),
    "plain, microbatches": Contender(_plain_chunks, "plain"),
    "fg.per_sample norms": Contender(_norms, "norms"),
    "fg.per_sample clipped_sum": Contender(_factored, "clipped"),
    "fg.clipped_grad": Contender(_clipped(), "clipped"),
    "fg.clipped_grad, microbatches": Contender(_clipped_chunks, "clipped"),
    "fg.clipped_grad two_pass": Contender(_clipped(road="two_pass"), "clipped"),
    "fg.clipped_grad gram": Contender(_clipped(road="gram"), "clipped"),
    "fg.clipped_grad direct": Contender(_clipped(road="direct"), "clipped"),
    "fg.clipped_grad materialize": Contender(_clipped(road="materialize"), "clipped", held=_WHOLE),
    "vmap(grad), Optax": Contender(_vmap, "clipped", held=_WHOLE),
    "vmap(grad), Optax, microbatches": Contender(_vmap_chunks, "clipped", held=_CHUNK),
    "jax_privacy": Contender(_jax_privacy(False), "clipped", needs="jax_privacy", held=_WHOLE),
    "jax_privacy, microbatches": Contender(
        _jax_privacy(True), "clipped", needs="jax_privacy", held=_CHUNK
    ),
}

PRODUCT_CONTENDERS: Mapping[str, Contender] = {
    "plain": JAX_CONTENDERS["plain"],
    "plain, microbatches": JAX_CONTENDERS["plain, microbatches"],
    **{f"fg.per_sample {kind}": Contender(_of_samples(kind), kind) for kind in PRODUCTS},
    **{f"vmap(grad) {kind}": Contender(_of_rows(kind), kind, held=_WHOLE) for kind in PRODUCTS},
    **{
        f"loop {kind}": Contender(
            _of_loop(kind), kind, held=_WHOLE if kind == "gram" else lambda task: 1
        )
        for kind in PRODUCTS
    },
}
