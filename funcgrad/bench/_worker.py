"""A contender in a process of its own, which compiles, checks and runs when it is asked to."""

import dataclasses
import functools
import multiprocessing
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._compat import enable_x64
from funcgrad.bench._contenders import JAX_CONTENDERS, PRODUCT_CONTENDERS, PRODUCTS, Contender
from funcgrad.bench._models import MODELS, SEED, Task
from funcgrad.bench._torch_peers import TORCH_CONTENDERS

# What each kind of model is raced by.
RACERS = {"sums": {**JAX_CONTENDERS, **TORCH_CONTENDERS}, "products": PRODUCT_CONTENDERS}
CONTENDERS = {**RACERS["sums"], **RACERS["products"]}
REFERENCE_SAMPLES = 8
_SHORT = 0.2


class WorkerError(Exception):
    """A contender failed, took too long, or its process died; the words go in the table."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """What a float64 loop gives for a batch that repeats a few samples."""

    norms: np.ndarray
    max_norm: float
    """The median of the norms, so that half of the samples are clipped."""
    repeats: np.ndarray
    """Which sample stands at each place of the batch."""
    sums: dict[str, list[np.ndarray]]
    """Of the gradients as they are (``"plain"``), and ``"clipped"``; and what else is asked."""

    @staticmethod
    def of(task: Task, products: bool = False) -> "Reference":
        """Differentiate some samples one after another, in float64."""
        n = min(REFERENCE_SAMPLES, task.size)
        with enable_x64(True):
            params, batch = jax.tree.map(_float64, (task.params, task.take(slice(n)).batch))
            grad = jax.jit(jax.grad(task.loss))
            grads = [
                [np.asarray(leaf) for leaf in jax.tree.leaves(grad(params, *(x[i] for x in batch)))]
                for i in range(n)
            ]
        norms = np.array([np.sqrt(sum(np.sum(leaf**2) for leaf in sample)) for sample in grads])
        # Exact in float32, and below 1 ulp of the median: every contender gets the same bound.
        max_norm = float(np.float32(np.median(norms)))
        repeats = np.random.default_rng(SEED).integers(0, n, task.size)
        counts = np.bincount(repeats, minlength=n)
        weights = {"plain": counts, "clipped": counts * np.minimum(1, max_norm / norms)}
        sums = {
            kind: [
                functools.reduce(np.add, (w * g for w, g in zip(weight, leaf, strict=True)))
                for leaf in zip(*grads, strict=True)
            ]
            for kind, weight in weights.items()
        }
        if products:
            sums |= _products(grads, jax.tree.leaves(params), repeats, counts)
        return Reference(norms, max_norm, repeats, sums)

    def error(self, kind: str, output: Any) -> float:
        """The largest difference over the largest entry, of the leaf where it is worst."""
        leaves = jax.tree.leaves(output)
        right = [self.norms[self.repeats]] if kind == "norms" else self.sums[kind]
        return max(
            float(np.abs(np.asarray(leaf, np.float64) - r).max() / np.abs(r).max())
            for leaf, r in zip(leaves, right, strict=True)
        )

    def save(self, file: Path) -> None:
        """Write it for the other processes."""
        arrays: dict[str, Any] = {"norms": self.norms, "bound": self.max_norm}
        arrays |= {f"{k}{i}": x for k, xs in self.sums.items() for i, x in enumerate(xs)}
        np.savez(file, repeats=self.repeats, **arrays)

    @staticmethod
    def load(file: Path) -> "Reference":
        """Read what ``save`` wrote."""
        with np.load(file) as held:
            sums = {
                kind: [held[f"{kind}{i}"] for i in range(sum(k.startswith(kind) for k in held))]
                for kind in ("plain", "clipped", *PRODUCTS)
            }
            return Reference(held["norms"], float(held["bound"]), held["repeats"], sums)


def _products(
    grads: list[list[np.ndarray]], params: list[np.ndarray], repeats: np.ndarray, counts: np.ndarray
) -> dict[str, list[np.ndarray]]:
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


class Session:
    """What a worker does, one method for each command."""

    def __init__(self, model: str, quick: bool) -> None:
        self.task = MODELS[model].quick() if quick else MODELS[model].make()
        self.asks = MODELS[model].asks

    def reference(self, file: Path) -> dict[str, Any]:
        """Write the float64 loop's numbers, and say what the task is."""
        reference = Reference.of(self.task, self.asks == "products")
        reference.save(file)
        return {
            "parameters": self.task.n_params,
            "batch": self.task.size,
            "microbatch": self.task.chunk,
            "max_norm": reference.max_norm,
            "float64_samples": len(reference.norms),
        }

    def prepare(self, contender: str, max_norm: float) -> dict[str, Any]:
        """Compile."""
        self.contender: Contender = CONTENDERS[contender]
        fun = self.contender.make(self.task, max_norm)
        if self.contender.library == "torch":
            self.args = (None, *self.task.batch)
            self.call = fun
            return {"trace_seconds": None, "compile_seconds": None, "temp_bytes": None}
        self.args = jax.tree.map(jnp.asarray, (self.task.params, *self.task.batch))
        start = time.perf_counter()
        lowered: Any = jax.jit(fun).lower(*self.args)
        traced = time.perf_counter()
        self.call = lowered.compile()
        return {
            "trace_seconds": traced - start,
            "compile_seconds": time.perf_counter() - traced,
            "temp_bytes": int(self.call.memory_analysis().temp_size_in_bytes),
        }

    def check(self, file: Path) -> dict[str, Any]:
        """The error against the float64 loop, of the program that is timed."""
        reference = Reference.load(file)
        batch = self.task.take(reference.repeats).batch
        output = self.call(self.args[0], *batch)
        return {"error": reference.error(self.contender.kind, output)}

    def run(self) -> float:
        """Seconds of one call; short ones are repeated for a while, and the median counts."""
        calls: list[float] = []
        while sum(calls) < _SHORT:
            start = time.perf_counter()
            jax.block_until_ready(self.call(*self.args))
            calls.append(time.perf_counter() - start)
        return statistics.median(calls)

    def peak(self) -> int:
        """The most memory that this process ever held, in bytes."""
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Worker:
    """The parent's end: a process that serves a ``Session``."""

    def __init__(self, model: str, quick: bool, cores: Sequence[int]) -> None:
        context = _context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, model, quick, tuple(cores)), daemon=True
        )
        self._process.start()
        theirs.close()

    def ask(self, command: str, *args: Any, timeout: float = 300.0) -> Any:
        """Have a method of the session called, and wait for what it returns."""
        try:
            self._pipe.send((command, args))
            if not self._pipe.poll(timeout):
                self._process.kill()
                raise WorkerError(f"stopped: {command} took more than {timeout:.0f} s")
            fine, result = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerError(f"failed: its process died at {command}") from None
        if not fine:
            raise WorkerError(f"failed: {result}")
        return result

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _context() -> Any:
    """How processes start: forked from one that has imported JAX but not used it, if possible."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _serve(pipe: Any, model: str, quick: bool, cores: Sequence[int]) -> None:
    # Before either library makes its threads.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    if cores:
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
    warnings.simplefilter("ignore")  # the peers', of hooks and the like
    session = None
    while True:
        try:
            command, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            session = session or Session(model, quick)
            answer = True, getattr(session, command)(*args)
        except Exception as error:
            words = str(error).strip().splitlines() or [""]
            answer = False, f"{type(error).__name__}: {words[0][:200]}"
        pipe.send(answer)


def _float64(leaf: Any) -> Any:
    return np.asarray(leaf, np.float64) if np.issubdtype(leaf.dtype, np.floating) else leaf
