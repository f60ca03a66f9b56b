"""The task ``function``: a rule of one's own as ``fg.Function``, ``jax.custom_vjp`` and torch's."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import funcgrad as fg
from funcgrad._compat import enable_x64
from funcgrad.bench import _problem
from funcgrad.bench._models import SEED
from funcgrad.bench._options import Options, Progress
from funcgrad.bench._problem import Contender, Problem, Right
from funcgrad.bench._race import race
from funcgrad.bench._race_tables import LEGEND, across, contenders
from funcgrad.bench._tables import Column, Table

NOTES = (
    *LEGEND,
    "The gradient of a sum, forward and backward; the rule has the cost of what JAX and torch "
    "derive by themselves (plain), so that what it adds is the price of the way to say it.",
)
DEPTH = 32


def _swish(sigmoid: Any) -> dict[str, Callable[..., Any]]:
    """``x + x sigmoid(x) / 8``, which neither vanishes nor explodes in a chain."""

    def derivative(x: Any) -> Any:
        s = sigmoid(x)
        return 1 + s * (1 + x * (1 - s)) / 8

    return {
        "plain": lambda x: x + x * sigmoid(x) / 8,
        "backward": lambda saved, g: g * derivative(*saved),
    }


def _matmul(sigmoid: Any) -> dict[str, Callable[..., Any]]:
    return {
        "plain": lambda x, w: x @ w,
        "backward": lambda saved, g: (g @ saved[1].T, saved[0].T @ g),
    }


def _as_class(base: Any, rule: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The same text, with torch's base class or with ours."""

    class Rule(base):
        @staticmethod
        def forward(ctx: Any, *xs: Any) -> Any:
            ctx.save_for_backward(*xs)
            return rule["plain"](*xs)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return rule["backward"](ctx.saved_tensors, g)

    return Rule.apply


def _as_pair(rule: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    fun = jax.custom_vjp(rule["plain"])

    def backward(saved: Any, g: Any) -> tuple[Any, ...]:
        grads = rule["backward"](saved, g)
        return grads if isinstance(grads, tuple) else (grads,)

    fun.defvjp(lambda *xs: (rule["plain"](*xs), xs), backward)
    return fun


def _in_jax(way: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    def make(problem: "Rule") -> Callable[..., Any]:
        fun = way(problem.rule(jax.nn.sigmoid))
        loss = lambda xs, weights: jnp.sum(problem.chain(fun, xs) * weights)
        return lambda weights, *xs: jax.grad(loss)(xs, weights)

    return make


def _in_torch(custom: bool) -> Callable[..., Any]:
    def make(problem: "Rule") -> Callable[..., Any]:
        import torch

        rule = problem.rule(torch.sigmoid)
        fun = _as_class(torch.autograd.Function, rule) if custom else rule["plain"]

        def run(weights: Any, *xs: Any) -> Any:
            tensors = [torch.from_numpy(np.asarray(x)).requires_grad_() for x in xs]
            value = (problem.chain(fun, tensors) * torch.from_numpy(np.asarray(weights))).sum()
            return tuple(grad.numpy() for grad in torch.autograd.grad(value, tensors))

        return run

    return make


CONTENDERS = {
    "plain": Contender(_in_jax(lambda rule: rule["plain"]), "plain"),
    "fg.Function": Contender(_in_jax(functools.partial(_as_class, fg.Function)), "rule"),
    "jax.custom_vjp": Contender(_in_jax(_as_pair), "rule"),
    "torch: plain": Contender(_in_torch(custom=False), "plain", "torch"),
    "torch: autograd.Function": Contender(_in_torch(custom=True), "rule", "torch"),
}
# Title, rule, times in a row, shapes of the arguments and those at toy size.
_MODELS: Mapping[str, Any] = {
    "elementwise": ("elementwise, 1024 × 1024", _swish, 1, [(1024, 1024)], [(8, 8)]),
    "matmul": (
        "matmul, 256 × 512 by 512 × 512",
        _matmul,
        1,
        [(256, 512), (512, 512)],
        [(4, 8), (8, 8)],
    ),
    "chain": (
        f"{DEPTH} elementwise rules in a row, 128 × 256",
        _swish,
        DEPTH,
        [(128, 256)],
        [(8, 8)],
    ),
}
NAMES = tuple(_MODELS)
WHY = (
    "What is compiled has the operations of jax.custom_vjp: it is the machine. Tracing also checks "
    "what the rule returns."
)
"""Why fg.Function is behind, where it is."""


class Rule(Problem):
    """A rule, applied once or several times, and a weighted sum of its result."""

    contenders = CONTENDERS
    baselines = {"jax": ("plain",), "torch": ("torch: plain",)}

    def __init__(self, name: str, quick: bool) -> None:
        self.title, self.rule, self.times, shapes, toy = _MODELS[name]
        if quick:
            self.title, shapes = f"{name} at toy size", toy
        rng = np.random.default_rng(SEED)
        draw = lambda shape: rng.normal(size=shape).astype(np.float32)
        xs = [draw(shape) for shape in shapes]
        self.args = (draw((shapes[0][0], shapes[-1][1])), *xs)

    def chain(self, fun: Callable[..., Any], xs: Any) -> Any:
        """The function of its own result, some times."""
        for _ in range(self.times):
            xs = [fun(*xs)]
        return xs[0]

    def reference(self) -> Right:
        """What JAX derives without a rule, in float64."""
        with enable_x64(True):
            grads = CONTENDERS["plain"].make(self)(*_problem.float64(self.args))
            leaves = [np.asarray(leaf) for leaf in grads]
        return {"plain": leaves, "rule": leaves}


def measure(name: str, options: Options, progress: Progress) -> dict[str, Any]:
    """Race all contenders on one rule."""
    make = functools.partial(Rule, name, options.quick)
    return race(make, turns=options.turns, progress=progress)


def tables(models: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Run time and compile time of all rules, then each rule's contenders."""
    ways = {name: name for name in CONTENDERS}
    in_jax = {name: name for name, way in CONTENDERS.items() if way.library == "jax"}
    ratio, seconds = Column("ratio", "", "lower", ".2f"), Column("time", "s", "lower", ".2f")
    return [
        across(models, ways, "ratio", ratio, "Forward and backward over the plain gradient"),
        across(models, in_jax, "trace_seconds", seconds, "Time to trace"),
        across(models, in_jax, "compile_seconds", seconds, "Time to compile"),
        *(contenders(of, compared=("time", "trace", "compile"), why=WHY) for of in models.values()),
    ]
