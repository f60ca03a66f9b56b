"""One derivative of a function in JAX and in torch, both as NumPy arrays by leaf.

The two engines have the same methods and the same convention, JAX's: torch's reverse-mode
derivatives of complex numbers are conjugated here.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad.parity._bridge import numpy_to_tensor, tensor_to_numpy

Arrays: TypeAlias = dict[str, np.ndarray]


def by_path(tree: Any, root: str) -> dict[str, Any]:
    """The leaves of a tree by their path, in order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {root + jax.tree_util.keystr(path): leaf for path, leaf in flat}


def is_inexact(array: Any) -> bool:
    """Whether an array holds floats or complex numbers, bfloat16 included."""
    return jnp.issubdtype(array.dtype, jnp.inexact)


class Engine:
    """A function and its inputs; ``Array`` leaves move or are rows, others are passed as is."""

    def __init__(self, fun: Callable[..., Any], inputs: tuple[Any, ...], dtype: np.dtype):
        self.fun = fun
        self.dtype = dtype
        named = by_path(inputs, "inputs")
        self.treedef = jax.tree.structure(inputs)
        self.leaves = {
            path: self.array(leaf) if isinstance(leaf, np.ndarray) else leaf
            for path, leaf in named.items()
        }
        self.moving = [
            path for path, x in named.items() if isinstance(x, np.ndarray) and is_inexact(x)
        ]
        first = by_path(inputs[0], "inputs[0]") if inputs else {}
        self.params = [path for path in self.moving if path in first]
        self.rows = [p for p, x in named.items() if p not in first and isinstance(x, np.ndarray)]

    def array(self, leaf: np.ndarray) -> Any:
        """A leaf as this engine's array."""
        raise NotImplementedError

    def call(self, new: dict[str, Any]) -> dict[str, Any]:
        """The outputs by path, with some input leaves replaced."""
        leaves = [new.get(path, leaf) for path, leaf in self.leaves.items()]
        named = by_path(self.fun(*jax.tree.unflatten(self.treedef, leaves)), "output")
        return {
            path: self.array(np.asarray(leaf, self.dtype)) if type(leaf) is float else leaf
            for path, leaf in named.items()
        }


class JaxEngine(Engine):
    """The derivatives by JAX's own transforms."""

    def array(self, leaf):
        return jnp.asarray(leaf)

    def outputs(self, new: dict[str, Any]) -> dict[str, jax.Array]:
        named = {path: jnp.asarray(x) for path, x in self.call(new).items()}
        return {path: x for path, x in named.items() if is_inexact(x)}

    def at(self, paths: list[str]) -> dict[str, Any]:
        return {path: self.leaves[path] for path in paths}

    def value(self) -> Arrays:
        return {path: np.asarray(x) for path, x in self.call({}).items()}

    def grad(self, cotangents: Arrays) -> Arrays:
        return _numpy(self._pull(self.at(self.moving), cotangents))

    def jvp(self, tangents: Arrays) -> Arrays:
        _, out = jax.jvp(self.outputs, (self.at(self.moving),), (_jax(tangents),))
        return _numpy(out)

    def hvp(self, cotangents: Arrays, tangents: Arrays) -> Arrays:
        gradient = lambda point: self._pull(point, cotangents)
        _, out = jax.jvp(gradient, (self.at(self.moving),), (_jax(tangents),))
        return _numpy(out)

    def sample_outputs(self) -> dict[str, Any]:
        """Shapes and dtypes of the floating outputs of one sample."""
        rows = {
            path: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
            for path, x in self.at(self.rows).items()
        }
        return jax.eval_shape(self.outputs, rows)

    def per_sample(self, cotangents: Arrays) -> Arrays:
        params = self.at(self.params)
        return _numpy(
            jax.vmap(lambda rows: self._pull(params, cotangents, rows))(self.at(self.rows))
        )

    def _pull(self, point, cotangents, rows=None):
        _, pull = jax.vjp(lambda moving: self.outputs({**moving, **(rows or {})}), point)
        return pull(_jax(cotangents))[0]


class TorchEngine(Engine):
    """The derivatives by ``torch.autograd``, each from the most basic call there is."""

    def array(self, leaf):
        if leaf.dtype.kind == "i":
            leaf = leaf.astype(np.int64)  # the one integer that torch takes as index or target
        return numpy_to_tensor(np.array(leaf, order="C"))

    def outputs(self, new: dict[str, Any]) -> dict[str, Any]:
        import torch

        fresh = {p: x.clone() for p, x in self.leaves.items() if isinstance(x, torch.Tensor)}
        # clones, so that the function may change its inputs in place
        fresh.update({path: x.clone() for path, x in new.items()})
        return {path: torch.as_tensor(x) for path, x in self.call(fresh).items()}

    def at(self, paths: list[str]) -> dict[str, Any]:
        return {path: self.leaves[path].clone().requires_grad_() for path in paths}

    def value(self) -> Arrays:
        return {path: _array(x) for path, x in self.outputs({}).items()}

    def grad(self, cotangents: Arrays) -> Arrays:
        return _conjugated(self._grad(self.at(self.moving), cotangents))

    def jvp(self, tangents: Arrays) -> Arrays:
        import torch
        from torch.autograd import forward_ad

        point = {path: self.leaves[path].clone() for path in self.moving}
        steps = self._tensors(tangents)
        _start_forward_mode()
        try:
            with forward_ad.dual_level():
                dual = {path: forward_ad.make_dual(x, steps[path]) for path, x in point.items()}
                out = {path: forward_ad.unpack_dual(x) for path, x in self.outputs(dual).items()}
                return {
                    path: _array(torch.zeros_like(x) if dx is None else dx)
                    for path, (x, dx) in out.items()
                    if x.is_floating_point() or x.is_complex()
                }
        except NotImplementedError:  # no forward mode for some operation
            return self._jvp_by_two_backwards(steps)

    def hvp(self, cotangents: Arrays, tangents: Arrays) -> Arrays:
        point = self.at(self.moving)
        grads = self._grad(point, cotangents, create_graph=True)
        return _conjugated(self._pull(point, grads, self._tensors(tangents)))

    def per_sample(self, cotangents: Arrays) -> Arrays:
        import torch

        size = len(self.leaves[self.rows[0]])
        found: dict[str, list[Any]] = {path: [] for path in self.params}
        for n in range(size):
            rows = {path: self.leaves[path][n] for path in self.rows}
            for path, x in self._grad(self.at(self.params), cotangents, rows).items():
                found[path].append(x)
        return _conjugated(
            {
                path: torch.stack(all_rows) if all_rows else self.leaves[path].new_zeros(shape)
                for path, all_rows in found.items()
                for shape in [(0, *self.leaves[path].shape)]
            }
        )

    def _tensors(self, arrays: Arrays) -> dict[str, Any]:
        return {path: numpy_to_tensor(np.array(x)) for path, x in arrays.items()}

    def _grad(self, point, cotangents, rows=None, *, create_graph=False):
        outputs = self.outputs({**point, **(rows or {})})
        floating = {p: x for p, x in outputs.items() if x.is_floating_point() or x.is_complex()}
        for path in floating.keys() | cotangents.keys():
            shapes = [tuple(d[path].shape) if path in d else None for d in (floating, cotangents)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    "compare: both functions must return the same floating leaves; got shape "
                    f"{shapes[1]} from jax_fun and {shapes[0]} from torch_fun at {path}. "
                    "Return the same tree of arrays."
                )
        seeds = self._tensors(cotangents)
        seeds = {path: x.conj().to(floating[path].dtype) for path, x in seeds.items()}
        return self._pull(point, floating, seeds, create_graph=create_graph)

    def _pull(self, point, outputs, seeds, *, create_graph=False):
        """The vector-Jacobian product; zeros where nothing depends on an input."""
        import torch

        linked = [path for path, x in outputs.items() if x.requires_grad]
        grads = [None] * len(point)
        if linked:
            grads = torch.autograd.grad(
                [outputs[path] for path in linked],
                list(point.values()),
                [seeds[path] for path in linked],
                allow_unused=True,
                create_graph=create_graph,
            )
        return {
            path: torch.zeros_like(x) if g is None else g
            for (path, x), g in zip(point.items(), grads, strict=True)
        }

    def _jvp_by_two_backwards(self, steps):
        import torch

        point = self.at(self.moving)
        outputs = self.outputs(point)
        floating = {p: x for p, x in outputs.items() if x.is_floating_point() or x.is_complex()}
        dummy = {path: torch.zeros_like(x, requires_grad=True) for path, x in floating.items()}
        grads = self._pull(point, floating, dummy, create_graph=True)
        return {path: _array(x) for path, x in self._pull(dummy, grads, steps).items()}


def _start_forward_mode() -> None:
    """The first dual number loads rules by torch.jit.script, which warns that it is deprecated."""
    import torch
    from torch.autograd import forward_ad

    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", r"`torch\.jit", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


def _jax(arrays: Arrays) -> dict[str, jax.Array]:
    return {path: jnp.asarray(x) for path, x in arrays.items()}


def _numpy(arrays: dict[str, Any]) -> Arrays:
    return {path: np.asarray(x) for path, x in arrays.items()}


def _array(tensor: Any) -> np.ndarray:
    return np.array(tensor_to_numpy(tensor))


def _conjugated(tensors: dict[str, Any]) -> Arrays:
    return {path: np.asarray(np.conj(_array(x))) for path, x in tensors.items()}
