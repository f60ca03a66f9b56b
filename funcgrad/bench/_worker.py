"""A contender in a process of its own, which compiles, checks and runs when it is asked to."""

import multiprocessing
import os
import resource
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad.bench import _problem
from funcgrad.bench._problem import Contender, Problem

_SHORT = 0.2


class WorkerError(Exception):
    """A contender failed, took too long, or its process died; the words go in the table."""


class Session:
    """What a worker does, one method for each command."""

    def __init__(self, make: Callable[[], Problem]) -> None:
        self.problem = make()

    def reference(self, file: Path) -> dict[str, Any]:
        """Write the right numbers, and say what the problem is."""
        right = self.problem.reference()
        _problem.save(file, right)
        return self.problem.about(right)

    def prepare(self, name: str, file: Path) -> dict[str, Any]:
        """Compile."""
        self.contender: Contender = self.problem.contenders[name]
        self.right = _problem.load(file)
        fun = self.problem.make(self.contender, self.right)
        self.args = self.problem.args
        if self.contender.library == "jax":
            self.args = jax.tree.map(jnp.asarray, self.args)
        if self.contender.library == "torch" or self.contender.compiles:
            self.call = fun
            return {"trace_seconds": None, "compile_seconds": None, "temp_bytes": None}
        start = time.perf_counter()
        lowered: Any = jax.jit(fun).lower(*self.args)
        traced = time.perf_counter()
        self.call = lowered.compile()
        return {
            "trace_seconds": traced - start,
            "compile_seconds": time.perf_counter() - traced,
            "temp_bytes": int(self.call.memory_analysis().temp_size_in_bytes),
        }

    def check(self) -> dict[str, Any]:
        """The error of the program that is timed."""
        start = time.perf_counter()
        output = jax.block_until_ready(self.call(*self.problem.trial(self.right)))
        took = time.perf_counter() - start
        found = {"error": _problem.error(output, self.right[self.contender.kind])}
        return found | ({"compile_seconds": took} if self.contender.compiles else {})

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

    def __init__(self, make: Callable[[], Problem], cores: Sequence[int]) -> None:
        context = _context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, make, tuple(cores)), daemon=True
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
            self._process.join(10)
            killed = self._process.exitcode == -signal.SIGKILL
            how = "was killed, as when memory runs out," if killed else "died"
            raise WorkerError(f"failed: its process {how} at {command}") from None
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
    context.set_forkserver_preload(["funcgrad.bench"])
    return context


def _serve(pipe: Any, make: Callable[[], Problem], cores: Sequence[int]) -> None:
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
            session = session or Session(make)
            answer = True, getattr(session, command)(*args)
        except Exception as error:
            words = str(error).strip().splitlines() or [""]
            answer = False, f"{type(error).__name__}: {words[0][:200]}"
        pipe.send(answer)
