"""The task ``training-step``: what clipping and accumulation add to a step."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import funcgrad as fg
from funcgrad._compat import enable_x64
from funcgrad.bench import _models, _problem
from funcgrad.bench._models import SEED
from funcgrad.bench._options import Options, Progress
from funcgrad.bench._problem import Contender, Problem, Right
from funcgrad.bench._race import race
from funcgrad.bench._race_tables import LEGEND, across, contenders
from funcgrad.bench._tables import Column, Table

RATE = 0.1
NOTES = (
    *LEGEND,
    "Clipping: the updates of plain gradient descent, with the gradient's norm bound to half of "
    "what it is; on many small leaves the gradients are given, and the step is all else.",
    "Accumulation: the mean gradient in micro-batches; plain is that of the whole batch at once.",
)


class Step(Problem):
    """Inputs of a step, the gradient of which is known in float64."""

    baselines = {"jax": ("plain",), "torch": ("torch: plain",)}
    microbatch = 0
    gradient: Callable[..., Any]
    """The mean gradient in JAX, of ``args``."""
    torch_gradient: Callable[..., list[Any]]
    """Leaves in torch that hold it."""

    def reference(self) -> Right:
        """Updates with and without a bound, and the bound."""
        with enable_x64(True):
            leaves = [
                np.asarray(leaf)
                for leaf in jax.tree.leaves(self.gradient(*_problem.float64(self.args)))
            ]
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in leaves))
        bound = np.float32(norm / 2)
        updates = [-RATE * leaf for leaf in leaves]
        clipped = [bound / norm * leaf for leaf in updates]
        return {
            "bound": [np.asarray(bound)],
            "plain": updates,
            "clipped": clipped,
            "accumulated": updates,
        }

    def make(self, contender: Contender, right: Right) -> Callable[..., Any]:
        """The contender's function, which gets the bound."""
        return contender.make(self, float(right["bound"][0]))


class OnMLP(Step):
    """The mean loss of a batch on a network of three layers."""

    def __init__(self, accumulate: bool, quick: bool) -> None:
        sizes = {"n_inputs": 12, "width": 16} if quick else {}
        batch = (8 if quick else 256) if accumulate else (8 if quick else 64)
        self.microbatch = batch // 8 if accumulate else batch
        task = _models.mlp(batch, **sizes)
        self.loss = task.loss
        xs, ys = task.batch
        # Where the input of a relu is nearly zero, rounding decides the gradient.
        clear = np.flatnonzero(_distance_from_kinks(task.params, np.asarray(xs)) > 1e-6)
        self.args = (task.params, xs[np.resize(clear, batch)], ys[np.resize(clear, batch)])
        self.contenders = ACCUMULATING if accumulate else CLIPPING
        what = f"in {batch // self.microbatch} micro-batches" if accumulate else "clipped"
        kind = "MLP at toy size" if quick else "MLP 784-1024-1024-10"
        self.title = f"{kind}, batch {batch}, {what}"

    def losses(self, params: Any, xs: Any, ys: Any) -> Any:
        """A loss for each sample."""
        return jax.vmap(self.loss, (None, 0, 0))(params, xs, ys)

    def gradient(self, params: Any, xs: Any, ys: Any) -> Any:
        """Of the mean loss."""
        return jax.grad(lambda params: jnp.mean(self.losses(params, xs, ys)))(params)

    def torch_gradient(self, params: Any, xs: Any, ys: Any) -> list[Any]:
        """Of the mean loss, micro-batch by micro-batch, in the order of ``jax.tree.leaves``."""
        import torch
        from torch.nn import functional

        leaves = [torch.from_numpy(np.asarray(p)).requires_grad_() for p in jax.tree.leaves(params)]
        x, y = torch.from_numpy(np.asarray(xs)), torch.from_numpy(np.asarray(ys)).long()
        for i in range(0, len(x), self.microbatch):
            h = x[i : i + self.microbatch]
            for layer in range(3):
                bias, kernel = leaves[2 * layer : 2 * layer + 2]
                h = torch.addmm(bias, h, kernel)
                h = h.relu() if layer < 2 else h
            loss = functional.cross_entropy(h, y[i : i + self.microbatch], reduction="sum")
            (loss / len(x)).backward()
        return leaves


def _distance_from_kinks(params: Any, xs: Any) -> Any:
    """The smallest input of a relu, in modulus, for each sample."""
    distance, h = np.full(len(xs), np.inf), xs
    for layer in range(2):
        kernel, bias = (params[f"layer{layer}"][name] for name in ("kernel", "bias"))
        h = h @ np.asarray(kernel, np.float64) + np.asarray(bias)
        distance = np.minimum(distance, np.abs(h).min(1))
        h = np.maximum(h, 0)
    return distance


class OnLeaves(Step):
    """Gradients that are given, in many small leaves."""

    def __init__(self, quick: bool) -> None:
        n = 10 if quick else 1000
        rng = np.random.default_rng(SEED)
        grads = {f"leaf{i:04}": rng.normal(size=32).astype(np.float32) for i in range(n)}
        self.args = (grads,)
        self.title = f"{n} leaves of 32, clipped"
        self.contenders = CLIPPING

    def gradient(self, grads: Any) -> Any:
        """As they come."""
        return grads

    def torch_gradient(self, grads: Any) -> list[Any]:
        """Parameters with these gradients; copies, since torch clips in place."""
        import torch

        leaves = [torch.zeros(32, requires_grad=True) for _ in grads]
        for leaf, grad in zip(leaves, grads.values(), strict=True):
            leaf.grad = torch.from_numpy(np.array(grad))
        return leaves


def _updates(grads: Any) -> Any:
    return jax.tree.map(lambda g: -RATE * g, grads)


def _plain(step: Step, bound: float) -> Callable[..., Any]:
    return lambda *args: _updates(step.gradient(*args))


def _clip_grad_norm(step: Step, bound: float) -> Callable[..., Any]:
    return lambda *args: _updates(fg.clip_grad_norm(step.gradient(*args), bound).grads)


def _clip_by_total_norm(step: Step, bound: float) -> Callable[..., Any]:
    return _with_optax(fg.clip_by_total_norm(bound), step)


def _clip_by_global_norm(step: Step, bound: float) -> Callable[..., Any]:
    return _with_optax(optax.clip_by_global_norm(bound), step)


def _with_optax(clip: Any, step: Step) -> Callable[..., Any]:
    optimizer = optax.chain(clip, optax.sgd(RATE))

    def run(*args: Any) -> Any:
        return optimizer.update(step.gradient(*args), optimizer.init(args[0]))[0]

    return run


def _accumulate_grads(step: OnMLP, bound: float) -> Callable[..., Any]:
    def fun(params: Any, xs: Any, ys: Any) -> tuple[Any, Any]:
        losses = step.losses(params, xs, ys)
        return losses, jnp.ones_like(losses)

    accumulated = fg.accumulate_grads(fun, step.microbatch)
    return lambda params, *batch: _updates(accumulated(params, *batch).grads)


def _scan(step: OnMLP, bound: float) -> Callable[..., Any]:
    def run(params: Any, *batch: Any) -> Any:
        def add(total: Any, micro: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, step.gradient(params, *micro)), None

        micros = [x.reshape(-1, step.microbatch, *x.shape[1:]) for x in batch]
        total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), micros)
        return jax.tree.map(lambda g: -RATE * g / len(micros[0]), total)

    return run


def _torch(step: Step, bound: float) -> Callable[..., Any]:
    return lambda *args: [-RATE * p.grad.numpy() for p in step.torch_gradient(*args)]


def _torch_whole(step: OnMLP, bound: float) -> Callable[..., Any]:
    step.microbatch = len(step.args[1])
    return _torch(step, bound)


def _torch_clip(step: Step, bound: float) -> Callable[..., Any]:
    import torch

    def run(*args: Any) -> Any:
        params = step.torch_gradient(*args)
        torch.nn.utils.clip_grad_norm_(params, bound)
        return [-RATE * p.grad.numpy() for p in params]

    return run


CLIPPING = {
    "plain": Contender(_plain, "plain"),
    "fg.clip_grad_norm": Contender(_clip_grad_norm, "clipped"),
    "fg.clip_by_total_norm": Contender(_clip_by_total_norm, "clipped"),
    "optax.clip_by_global_norm": Contender(_clip_by_global_norm, "clipped"),
    "torch: plain": Contender(_torch, "plain", "torch"),
    "torch: clip_grad_norm_": Contender(_torch_clip, "clipped", "torch"),
}
ACCUMULATING = {
    "plain": Contender(_plain, "plain"),
    "fg.accumulate_grads": Contender(_accumulate_grads, "accumulated"),
    "scan by hand": Contender(_scan, "accumulated"),
    "torch: plain": Contender(_torch_whole, "plain", "torch"),
    "torch: loop": Contender(_torch, "accumulated", "torch"),
}
MODELS: Mapping[str, Callable[[bool], Step]] = {
    "clip-mlp": functools.partial(OnMLP, False),
    "clip-leaves": OnLeaves,
    "accumulate-mlp": functools.partial(OnMLP, True),
}
NAMES = tuple(MODELS)
WHY: Mapping[str, str] = dict.fromkeys(
    ("clip-mlp", "clip-leaves"),
    "Its norm neither overflows nor underflows: beside the usual program stands one for what is "
    "huge or tiny, which needs the gradients in memory of their own.",
) | {"accumulate-mlp": "So is a scan by hand: XLA multiplies small micro-batches slowly on CPU."}
"""By model: why funcgrad is behind, where it is."""


def measure(name: str, options: Options, progress: Progress) -> dict[str, Any]:
    """Race all contenders on one step."""
    make = functools.partial(MODELS[name], options.quick)
    return race(make, turns=options.turns, progress=progress)


def tables(models: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Time over the plain step, then each step's contenders."""
    ways = {name: name for name in (*CLIPPING, *ACCUMULATING) if not name.endswith("plain")}
    ratio = Column("ratio", "", "lower", ".2f")
    return [
        across(models, ways, "ratio", ratio, "Time over the plain step"),
        *(
            contenders(of, compared=("time", "temporaries", "compile"), why=WHY.get(name, ""))
            for name, of in models.items()
        ),
    ]
