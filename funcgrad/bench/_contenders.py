"""The ways to a clipped sum of per-sample gradients, each a function of ``(params, *batch)``."""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

import funcgrad as fg
from funcgrad.bench._models import Task

Kind = Literal["plain", "norms", "clipped"]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way, what it gives, and what it needs."""

    make: Callable[[Task, float], Callable[..., Any]]
    """``make(task, max_norm)`` is a function of ``(params, *batch)``."""
    kind: Kind
    """``"plain"``: the sum of the gradients; ``"norms"`` of them; ``"clipped"``: their sum."""
    library: Literal["jax", "torch"] = "jax"
    needs: str | None = None
    """The package that brings it."""
    held: Callable[[Task], int] = lambda task: 0
    """Samples whose gradients it writes out in one go."""
    models: tuple[str, ...] | None = None
    """The models that it can differentiate; all, if ``None``."""

    def absent(self) -> str | None:
        """Why it cannot run on any model, if so."""
        packages = [p for p in (self.needs, self.library) if p]
        missing = [p for p in packages if importlib.util.find_spec(p) is None]
        return f"absent: {missing[0]} is not installed" if missing else None


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
    "vmap(grad), Optax": Contender(_vmap, "clipped", held=_WHOLE),
    "vmap(grad), Optax, microbatches": Contender(_vmap_chunks, "clipped", held=_CHUNK),
    "jax_privacy": Contender(_jax_privacy(False), "clipped", needs="jax_privacy", held=_WHOLE),
    "jax_privacy, microbatches": Contender(
        _jax_privacy(True), "clipped", needs="jax_privacy", held=_CHUNK
    ),
}
