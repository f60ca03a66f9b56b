"""The task ``debugging``: what ``detect_anomaly`` costs while all is well, and ``gradcheck``."""

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import funcgrad as fg
from funcgrad.bench._models import SEED
from funcgrad.bench._options import Options, Progress
from funcgrad.bench._tables import Column, Row, Table

NAMES = ("training step", "gradcheck")
NOTES = (
    "A training step of a tanh network, eight layers of width 512, batch 256; over plain is the "
    "median over turns of the time with the check over that without, one right after the other.",
    "gradcheck compares all entries of a Jacobian in float64, its compilation included.",
)


def measure(name: str, options: Options, progress: Progress) -> dict[str, Any]:
    """Seconds of each contender."""
    progress(name, 0.0)
    if name == "gradcheck":
        return _gradcheck(4 if options.quick else 16, options.turns)
    width, depth, batch = (8, 2, 4) if options.quick else (512, 8, 256)
    rng = np.random.default_rng(SEED)
    weights = [rng.normal(size=(width, width), scale=width**-0.5) for _ in range(depth)]
    weights = [np.asarray(w, np.float32) for w in weights]
    x = rng.normal(size=(batch, width)).astype(np.float32)
    found = {"funcgrad": _in_jax(weights, x, options.turns)}
    progress(name, 0.5)
    if importlib.util.find_spec("torch") is not None:
        found["torch"] = _in_torch(weights, x, options.turns)
    return found


def _in_jax(weights: Any, x: Any, turns: int) -> dict[str, Any]:
    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    @jax.jit
    def step(weights: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    weights, x = jax.device_put((weights, x))
    checked = fg.detect_anomaly(step)
    run = lambda fun: jax.block_until_ready(fun(weights, x))
    return _ratio(lambda: run(step), lambda: run(checked), turns)


def _in_torch(weights: Any, x: Any, turns: int) -> dict[str, Any]:
    import torch

    tensors = [torch.from_numpy(w).requires_grad_() for w in weights]
    x = torch.from_numpy(x)

    def step() -> Any:
        y = x
        for w in tensors:
            y = torch.tanh(y @ w)
        value = y.square().mean()
        grads = torch.autograd.grad(value, tensors)
        return [w.detach() - 0.1 * g for w, g in zip(tensors, grads, strict=True)], value

    def checked() -> Any:
        with torch.autograd.set_detect_anomaly(True):
            return step()

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that anomaly detection makes it slow
        return _ratio(step, checked, turns)


def _ratio(plain: Callable[[], Any], checked: Callable[[], Any], turns: int) -> dict[str, Any]:
    for fun in (plain, checked):
        fun()
    pairs = []
    for _ in range(max(1, 4 * turns)):
        seconds = []
        for fun in (plain, checked):
            start = time.perf_counter()
            fun()
            seconds.append(time.perf_counter() - start)
        pairs.append(seconds)
    return {
        "plain_seconds": statistics.median(p for p, _ in pairs),
        "checked_seconds": statistics.median(c for _, c in pairs),
        "over_plain": statistics.median(c / p for p, c in pairs),
    }


def _gradcheck(size: int, turns: int) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    x, w = rng.normal(size=(2, size)), rng.normal(size=(size, size))

    def ours() -> Any:
        jax.clear_caches()
        return fg.gradcheck(lambda x, w: jnp.tanh(x @ w), (x, w))

    found = {"funcgrad": {"seconds": _seconds(ours, turns)}}
    if importlib.util.find_spec("torch") is not None:
        import torch

        inputs = tuple(torch.from_numpy(a).requires_grad_() for a in (x, w))
        theirs = lambda: torch.autograd.gradcheck(lambda x, w: torch.tanh(x @ w), inputs)
        found["torch"] = {"seconds": _seconds(theirs, turns)}
    return found


def _seconds(fun: Callable[[], Any], turns: int) -> float:
    seconds = []
    for _ in range(turns):
        start = time.perf_counter()
        fun()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def tables(models: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """A table of each."""
    found = []
    ratio = Column("over plain", "", "lower", ".2f")
    if step := models.get("training step"):
        columns = (Column("plain", "ms"), Column("checked", "ms", "lower"), ratio)
        rows = (
            Row(
                {"funcgrad": "fg.detect_anomaly", "torch": "torch: set_detect_anomaly"}[library],
                (1e3 * t["plain_seconds"], 1e3 * t["checked_seconds"], t["over_plain"]),
                ours=library == "funcgrad",
            )
            for library, t in step.items()
        )
        title = "Looking for anomalies, none there"
        found.append(Table(title, "contender", columns, tuple(rows), compared=("over plain",)))
    if check := models.get("gradcheck"):
        rows = (
            Row(
                {"funcgrad": "fg.gradcheck", "torch": "torch: autograd.gradcheck"}[library],
                (1e3 * t["seconds"],),
                ours=library == "funcgrad",
            )
            for library, t in check.items()
        )
        columns = (Column("time", "ms", "lower"),)
        found.append(Table("Gradcheck of tanh(x @ w)", "contender", columns, tuple(rows)))
    return found
