"""The task ``derivatives``: Jacobian, Hessian and products with it, whole and in chunks."""

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
from funcgrad.bench._race_tables import LEGEND, contenders
from funcgrad.bench._tables import Table

NOTES = (
    *LEGEND,
    "Chunks are of 64 rows or columns. The ratio of what is in JAX is to JAX's own function, "
    "without chunks, or to forward over reverse.",
)
CHUNK = 64


class Derivative(Problem):
    """A function of the first of ``args``, written for both libraries, and its derivative.

    ``fun(library, *args)`` uses ``library.tanh`` and operators only.
    """

    fun: Callable[..., Any]
    first: str
    """The contender that gives the right numbers."""

    def __init__(self, title: str, quick: bool) -> None:
        self.title = f"{type(self).__name__.lower()} at toy size" if quick else title
        self.draw = np.random.default_rng(SEED).normal
        self.baselines = {
            library: tuple(name for name, way in self.contenders.items() if way.library == library)
            for library in ("jax", "torch")
        }
        self.baselines["jax"] = (self.first,)

    def matrix(self, rows: int, columns: int) -> np.ndarray:
        """A layer that keeps the size of what goes through."""
        return (self.draw(size=(rows, columns)) / rows**0.5).astype(np.float32)

    def reference(self) -> Right:
        """What JAX gives in float64."""
        with enable_x64(True):
            way = self.contenders[self.first]
            found = way.make(self)(*_problem.float64(self.args))
            return {way.kind: [np.asarray(leaf) for leaf in jax.tree.leaves(found)]}


def _in_jax(way: Callable[..., Any]) -> Callable[..., Any]:
    """``way(fun)`` at the first argument, the others given."""

    def make(problem: Derivative) -> Callable[..., Any]:
        fun = functools.partial(type(problem).fun, jnp)
        return lambda x, *rest: way(lambda x: fun(x, *rest))(x)

    return make


def _in_torch(way: Callable[..., Any]) -> Callable[..., Any]:
    """The same in torch: ``way(fun)`` of tensors, which imports what it needs."""

    def make(problem: Derivative) -> Callable[..., Any]:
        import torch

        fun = functools.partial(type(problem).fun, torch)
        tensor = lambda x: torch.from_numpy(np.array(x))

        def run(*args: Any) -> Any:
            x, *rest = jax.tree.map(tensor, args)
            found = way(lambda x: fun(x, *rest))(x)
            return [leaf.detach().numpy() for leaf in jax.tree.leaves(found)]

        return run

    return make


def _torch_func(name: str, **options: Any) -> Callable[..., Any]:
    def way(fun: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        return getattr(torch.func, name)(fun, **options)

    return way


class Jacobian(Derivative):
    """Of many outputs of two layers in few inputs, row by row: where the seeds are largest."""

    first = "jax.jacrev"
    contenders = {
        "jax.jacrev": Contender(_in_jax(jax.jacrev), "jacobian"),
        "fg.jacrev": Contender(_in_jax(fg.jacrev), "jacobian"),
        "fg.jacrev, chunks": Contender(
            _in_jax(functools.partial(fg.jacrev, chunk_size=CHUNK)), "jacobian"
        ),
        "torch.func.jacrev": Contender(_in_torch(_torch_func("jacrev")), "jacobian", "torch"),
        "torch.func.jacrev, chunks": Contender(
            _in_torch(_torch_func("jacrev", chunk_size=CHUNK)), "jacobian", "torch"
        ),
    }

    def __init__(self, quick: bool) -> None:
        n, m = (6, 130) if quick else (256, 4096)
        super().__init__(f"Jacobian by rows, {m} × {n}", quick)
        self.args = (self.draw(size=n).astype(np.float32), self.matrix(n, n), self.matrix(n, m))

    @staticmethod
    def fun(library: Any, x: Any, w: Any, v: Any) -> Any:
        """Two layers."""
        return library.tanh(library.tanh(x @ w) @ v)


def _torch_hessian_chunks(fun: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    # Its jacfwd has no chunks.
    return torch.func.jacrev(torch.func.jacrev(fun), chunk_size=CHUNK)


class Hessian(Derivative):
    """Of a loss in the weights of a layer."""

    first = "jax.hessian"
    contenders = {
        "jax.hessian": Contender(_in_jax(jax.hessian), "hessian"),
        "fg.hessian": Contender(_in_jax(fg.hessian), "hessian"),
        "fg.hessian, chunks": Contender(
            _in_jax(functools.partial(fg.hessian, chunk_size=CHUNK)), "hessian"
        ),
        "torch.func.hessian": Contender(_in_torch(_torch_func("hessian")), "hessian", "torch"),
        "torch.func, chunks": Contender(_in_torch(_torch_hessian_chunks), "hessian", "torch"),
    }

    def __init__(self, quick: bool) -> None:
        n, m, batch = (4, 20, 6) if quick else (32, 32, 64)
        super().__init__(f"Hessian in {n * m} weights, {batch} samples", quick)
        x = self.draw(size=(batch, n)).astype(np.float32)
        self.args = (self.matrix(n, m), x, self.matrix(m, m))

    @staticmethod
    def fun(library: Any, w: Any, x: Any, v: Any) -> Any:
        """The mean square of two layers."""
        return (library.tanh(library.tanh(x @ w) @ v) ** 2).mean()


def _product(order: Callable[..., Any]) -> Callable[..., Any]:
    """Of a pair of weights and direction: were both the same, products would coincide."""
    return lambda fun: lambda pair: order(fun, *pair)


def _dot(a: Any, b: Any) -> Any:
    return sum(jnp.vdot(x, y) for x, y in zip(a, b, strict=True))


def _forward_over_reverse(fun: Any, x: Any, v: Any) -> Any:
    return jax.jvp(jax.grad(fun), (x,), (v,))[1]


def _reverse_over_forward(fun: Any, x: Any, v: Any) -> Any:
    return jax.grad(lambda x: jax.jvp(fun, (x,), (v,))[1])(x)


def _reverse_over_reverse(fun: Any, x: Any, v: Any) -> Any:
    return jax.grad(lambda x: _dot(jax.grad(fun)(x), v))(x)


def _torch_functional(fun: Any, x: Any, v: Any) -> Any:
    import torch

    whole = lambda *leaves: fun(list(leaves))
    return torch.autograd.functional.hvp(whole, tuple(x), tuple(v))[1]


def _torch_over_grad(fun: Any, x: Any, v: Any) -> Any:
    import torch

    return torch.func.jvp(torch.func.grad(fun), (x,), (v,))[1]


class HVP(Derivative):
    """A deep net's Hessian times a vector."""

    first = "forward over reverse"
    contenders = {
        "forward over reverse": Contender(_in_jax(_product(_forward_over_reverse)), "hvp"),
        "reverse over forward": Contender(_in_jax(_product(_reverse_over_forward)), "hvp"),
        "reverse over reverse": Contender(_in_jax(_product(_reverse_over_reverse)), "hvp"),
        "fg.hvp": Contender(_in_jax(_product(lambda fun, x, v: fg.hvp(fun, (x,), v))), "hvp"),
        "fg.vhp": Contender(_in_jax(_product(lambda fun, x, v: fg.vhp(fun, (x,), v))), "hvp"),
        "torch: functional.hvp": Contender(_in_torch(_product(_torch_functional)), "hvp", "torch"),
        "torch.func: jvp of grad": Contender(_in_torch(_product(_torch_over_grad)), "hvp", "torch"),
    }

    def __init__(self, quick: bool) -> None:
        width, depth, batch = (8, 2, 4) if quick else (512, 6, 256)
        super().__init__(f"Hessian times vector, {depth} layers of {width}, {batch}", quick)
        x = self.draw(size=(batch, width)).astype(np.float32)
        weights, direction = ([self.matrix(width, width) for _ in range(depth)] for _ in range(2))
        self.args = ((weights, direction), x)

    @staticmethod
    def fun(library: Any, weights: Any, x: Any) -> Any:
        """The mean square of all layers."""
        for w in weights:
            x = library.tanh(x @ w)
        return (x**2).mean()


MODELS: Mapping[str, Callable[[bool], Derivative]] = {
    "jacobian": Jacobian,
    "hessian": Hessian,
    "hvp": HVP,
}
NAMES = tuple(MODELS)
WHY: Mapping[str, str] = dict.fromkeys(
    ("jacobian", "hessian"),
    "Without chunks the compiled program has JAX's operations: it is the machine.",
)
"""By model: why funcgrad is behind, where it is."""


def measure(name: str, options: Options, progress: Progress) -> dict[str, Any]:
    """Race all contenders on one derivative."""
    make = functools.partial(MODELS[name], options.quick)
    return race(make, turns=options.turns, progress=progress)


def tables(models: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Each derivative's contenders."""
    return [contenders(of, why=WHY.get(name, "")) for name, of in models.items()]
