"""Time and memory of several ways to the same numbers, measured side by side."""

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

_PACKAGES = (
    *("funcgrad", "jax", "jaxlib", "flax", "optax", "numpy"),
    *("torch", "opacus", "backpack-for-pytorch", "jax-privacy"),
)


@dataclasses.dataclass(frozen=True)
class Timing:
    """One contender's figures; seconds are of one call, without compilation."""

    name: str
    compile_seconds: float
    temp_bytes: int
    """Memory the compiled program takes beside its inputs and outputs."""
    median_seconds: float
    low_seconds: float
    """A quarter of the calls were faster than this."""
    high_seconds: float
    """A quarter of the calls were slower than this."""
    ratio: float
    """To the baseline's call in the same round; the median over the rounds."""
    output: Any = dataclasses.field(repr=False, compare=False)
    """What the call returned; not part of the JSON."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The kind of machine and the versions, without anything that names the place."""

    date: str
    processor: str
    cores: int
    device: str
    system: str
    python: str
    versions: dict[str, str]

    @staticmethod
    def here() -> "Machine":
        """The machine that runs this, today."""
        device = jax.devices()[0]
        return Machine(
            date=datetime.date.today().isoformat(),
            processor=_processor(),
            cores=_cores(),
            device=f"{device.platform} ({device.device_kind})",
            system=platform.system(),
            python=platform.python_version(),
            versions={name: v for name in _PACKAGES if (v := _version(name))},
        )

    def describe(self) -> str:
        """One line for the foot of a table."""
        versions = ", ".join(f"{k} {v}" for k, v in self.versions.items() if k in ("jax", "optax"))
        where = "" if self.device.startswith("cpu") else f", computed on {self.device}"
        return (
            f"{self.date}, {self.processor}, {self.cores} cores{where}, "
            f"Python {self.python}, {versions}"
        )


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The figures of all contenders, the baseline's among them."""

    baseline: str
    rounds: int
    timings: tuple[Timing, ...]
    machine: Machine

    def __getitem__(self, name: str) -> Timing:
        """The figures of one contender."""
        return {timing.name: timing for timing in self.timings}[name]

    def to_json(self) -> dict[str, Any]:
        """The figures as plain numbers, strings, lists and dicts."""
        return {
            "baseline": self.baseline,
            "rounds": self.rounds,
            "machine": dataclasses.asdict(self.machine),
            "timings": [
                {
                    field.name: getattr(timing, field.name)
                    for field in dataclasses.fields(timing)
                    if field.name != "output"
                }
                for timing in self.timings
            ],
        }


def measure(
    contenders: Mapping[str, Callable[..., Any]],
    args: tuple[Any, ...],
    *,
    baseline: str | None = None,
    rounds: int = 10,
    progress: Callable[[str], object] | None = None,
) -> Measurement:
    """Compile each contender, then run all of them in turns.

    The turns (A B C, A B C, ...) let a machine that gets slower or faster meanwhile do so for
    all.  The first round warms up and does not count.  PyTorch: ``torch.utils.benchmark.Timer``,
    which runs one contender after the other.

    Args:
      contenders: Functions of ``args``, by name; each is compiled by ``jax.jit``.
      args: The arguments of all of them.
      baseline: The contender whose time is 1; the first, if ``None``.
      rounds: Calls of each that count.
      progress: Called with each contender's name before it is compiled.

    Returns:
      A ``Measurement``; its order is that of ``contenders``.

    Raises:
      ValueError: There is no contender, ``baseline`` is none of them, or ``rounds`` is below 1.

    Example:
      >>> from funcgrad.bench import measure
      >>> both = {"twice": lambda x: x + x, "cube": lambda x: x**3}
      >>> figures = measure(both, (jnp.arange(3.0),), rounds=2)
      >>> [(timing.name, timing.output.tolist()) for timing in figures.timings]
      [('twice', [0.0, 2.0, 4.0]), ('cube', [0.0, 1.0, 8.0])]
      >>> figures["twice"].ratio
      1.0
    """
    if not contenders:
        raise ValueError("measure: contenders are functions by name; got none. Pass one or more.")
    baseline = next(iter(contenders)) if baseline is None else baseline
    if baseline not in contenders:
        raise ValueError(
            f"measure: baseline is a contender; got {baseline!r}. "
            f"Use one of {', '.join(map(repr, contenders))}."
        )
    if rounds < 1:
        raise ValueError(f"measure: rounds is 1 or more; got {rounds}. Leave it out for 10.")

    compiled, compile_seconds, outputs = {}, {}, {}
    for name, fun in contenders.items():
        if progress is not None:
            progress(name)
        compile_seconds[name], compiled[name] = _timed(_compile, fun, *args)
        outputs[name] = jax.block_until_ready(compiled[name](*args))
    seconds = [
        {name: _timed(program, *args)[0] for name, program in compiled.items()}
        for _ in range(rounds + 1)
    ][1:]

    timings = []
    for name, program in compiled.items():
        calls = [turn[name] for turn in seconds]
        low, median, high = quartiles(calls)
        timings.append(
            Timing(
                name=name,
                compile_seconds=compile_seconds[name],
                temp_bytes=int(program.memory_analysis().temp_size_in_bytes),
                median_seconds=median,
                low_seconds=low,
                high_seconds=high,
                ratio=statistics.median(turn[name] / turn[baseline] for turn in seconds),
                output=outputs[name],
            )
        )
    return Measurement(baseline, rounds, tuple(timings), Machine.here())


def _compile(fun: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(fun).lower(*args).compile()


def _timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = jax.block_until_ready(call(*args))
    return time.perf_counter() - start, result


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """A quarter, half and three quarters of the values are below these."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.machine())


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
