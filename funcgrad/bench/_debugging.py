"""The task ``debugging``: what ``detect_anomaly`` costs while all is well, and ``gradcheck``."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.test_util import check_grads

import funcgrad as fg
from funcgrad._compat import enable_x64
from funcgrad.bench import _problem
from funcgrad.bench._models import SEED
from funcgrad.bench._options import Options, Progress
from funcgrad.bench._problem import Contender, Problem, Right
from funcgrad.bench._race import race
from funcgrad.bench._race_tables import LEGEND, contenders
from funcgrad.bench._tables import Table

RATE = 0.1
NOTES = (
    *LEGEND,
    "Training step: the updated weights and the loss of a tanh network. Each call is looked at, "
    "and nothing is found. torch looks at every operation of backward and checkify at every one, "
    "jax.debug_nans and fg.detect_anomaly at the results; only the last at infinities, too.",
    "gradcheck, of tanh(x @ w) in float64: all entries of the Jacobian, or (fast) one projection "
    "of it. In JAX a check traces and compiles anew at each call, which counts.",
    "Of what compiles by itself, the first call is its compilation.",
)


class TrainingStep(Problem):
    """Gradient descent on a network of equal layers."""

    baselines = {"jax": ("plain",), "torch": ("torch: plain",)}

    def __init__(self, quick: bool) -> None:
        width, depth, batch = (8, 2, 4) if quick else (512, 8, 256)
        draw = np.random.default_rng(SEED).normal
        weights = [draw(size=(width, width), scale=width**-0.5) for _ in range(depth)]
        self.args = (
            [w.astype(np.float32) for w in weights],
            draw(size=(batch, width)).astype(np.float32),
        )
        self.title = f"Training step, {depth} layers of {width}, batch {batch}: no anomaly"
        self.contenders = STEPS

    def reference(self) -> Right:
        """The weights after the step and the loss, in float64."""
        with enable_x64(True):
            found = jax.jit(_step)(*_problem.float64(self.args))
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
        return {"plain": leaves, "checked": leaves}


def _step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.square(y).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - RATE * g, weights, grads), value


def _debug_nans(problem: Problem) -> Callable[..., Any]:
    step = jax.jit(_step)

    def run(*args: Any) -> Any:
        with jax.debug_nans(True):
            return step(*args)

    return run


def _checkify(problem: Problem) -> Callable[..., Any]:
    step = jax.jit(checkify.checkify(_step, errors=checkify.nan_checks))

    def run(*args: Any) -> Any:
        error, found = step(*args)
        error.throw()
        return found

    return run


def _torch_step(problem: Problem) -> Callable[..., Any]:
    import torch

    def run(weights: Any, x: Any) -> Any:
        tensors = [torch.from_numpy(w).requires_grad_() for w in weights]
        y = torch.from_numpy(x)
        for w in tensors:
            y = torch.tanh(y @ w)
        value = y.square().mean()
        grads = torch.autograd.grad(value, tensors)
        updated = [(w.detach() - RATE * g).numpy() for w, g in zip(tensors, grads, strict=True)]
        return updated, value.detach().numpy()

    return run


def _torch_checked(problem: Problem) -> Callable[..., Any]:
    import torch

    step = _torch_step(problem)

    def run(*args: Any) -> Any:
        with torch.autograd.set_detect_anomaly(True):
            return step(*args)

    return run


STEPS = {
    "plain": Contender(lambda problem: _step, "plain"),
    "fg.detect_anomaly": Contender(
        lambda problem: fg.detect_anomaly(jax.jit(_step)), "checked", compiles=True
    ),
    "jax.debug_nans": Contender(_debug_nans, "checked", compiles=True),
    "checkify, nan_checks": Contender(_checkify, "checked", compiles=True),
    "torch: plain": Contender(_torch_step, "plain", "torch"),
    "torch: set_detect_anomaly": Contender(_torch_checked, "checked", "torch"),
}


class Gradcheck(Problem):
    """The verdict on a layer, beside its gradient."""

    baselines = {"jax": ("plain",), "torch": ("torch: plain",)}

    def __init__(self, quick: bool) -> None:
        n = 4 if quick else 16
        draw = np.random.default_rng(SEED).normal
        # In float32, so that float64 has the same numbers.
        self.args = tuple(draw(size=shape).astype(np.float32) for shape in ((2, n), (n, n)))
        self.title = f"Gradcheck of tanh(x @ w), 2 × {n} by {n} × {n}"
        self.contenders = CHECKS

    def reference(self) -> Right:
        """The gradient of the sum, written out; all is well."""
        x, w = _problem.float64(self.args)
        slopes = 1 - np.tanh(x @ w) ** 2
        verdict = [np.ones(())]
        return {"plain": [slopes @ w.T, x.T @ slopes], "checked": verdict, "fast": verdict}


def _layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def _gradient(problem: Problem) -> Callable[..., Any]:
    return jax.grad(lambda *args: _layer(*args).sum(), (0, 1))


def _checked(**options: Any) -> Callable[[Problem], Callable[..., Any]]:
    return lambda problem: lambda *args: float(bool(fg.gradcheck(_layer, args, **options)))


def _check_grads(problem: Problem) -> Callable[..., Any]:
    def run(*args: Any) -> float:
        with enable_x64(True):
            check_grads(_layer, _problem.float64(args), order=1, modes=["rev"])
        return 1.0

    return run


def _torch_gradient(problem: Problem) -> Callable[..., Any]:
    import torch

    def run(*args: Any) -> Any:
        x, w = (torch.from_numpy(a).requires_grad_() for a in args)
        return [g.numpy() for g in torch.autograd.grad(torch.tanh(x @ w).sum(), (x, w))]

    return run


def _torch_gradcheck(**options: Any) -> Callable[[Problem], Callable[..., Any]]:
    def make(problem: Problem) -> Callable[..., Any]:
        import torch

        layer = lambda x, w: torch.tanh(x @ w)

        def run(*args: Any) -> float:
            inputs = tuple(torch.from_numpy(a).double().requires_grad_() for a in args)
            return float(torch.autograd.gradcheck(layer, inputs, **options))

        return run

    return make


CHECKS = {
    "plain": Contender(_gradient, "plain"),
    "fg.gradcheck": Contender(_checked(), "checked", compiles=True),
    "fg.gradcheck, fast": Contender(_checked(fast_mode=True), "fast", compiles=True),
    "jax.test_util.check_grads": Contender(_check_grads, "fast", compiles=True),
    "torch: plain": Contender(_torch_gradient, "plain", "torch"),
    "torch: gradcheck": Contender(_torch_gradcheck(), "checked", "torch"),
    "torch: gradcheck, fast": Contender(_torch_gradcheck(fast_mode=True), "fast", "torch"),
}
MODELS: Mapping[str, Callable[[bool], Problem]] = {
    "training step": TrainingStep,
    "gradcheck": Gradcheck,
}
NAMES = tuple(MODELS)
WHY: Mapping[str, str] = {"gradcheck": "Each check traces and compiles; torch runs eagerly."}
"""By model: why funcgrad is behind, where it is."""


def measure(name: str, options: Options, progress: Progress) -> dict[str, Any]:
    """Race all contenders on one step or check."""
    make = functools.partial(MODELS[name], options.quick)
    return race(make, turns=options.turns, progress=progress)


def tables(models: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Each model's contenders."""
    return [
        contenders(of, compared=("time",), why=WHY.get(name, "")) for name, of in models.items()
    ]
