"""Two functions at one point: any derivative on both sides, with the same seeds."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._compat import enable_x64
from funcgrad.parity._bridge import tensor_to_numpy
from funcgrad.parity._engines import Arrays, JaxEngine, TorchEngine, by_path, is_inexact


@dataclasses.dataclass(frozen=True)
class Problem:
    """Two functions at one point; runs any kind on both sides."""

    jax_fun: Callable[..., Any]
    torch_fun: Callable[..., Any]
    inputs: tuple[Any, ...]
    dtype: np.dtype
    seed: int

    def run(self, kind: str) -> tuple[Arrays, Arrays]:
        """One kind on both sides."""
        return self.run_jax(kind), self.run_torch(kind)

    def run_jax(self, kind: str) -> Arrays:
        """One kind by JAX."""
        with self.precision():
            engine = JaxEngine(self.jax_fun, self.inputs, self.dtype)
            return _noted("jax_fun", kind, lambda: getattr(engine, kind)(*self._seeds(kind)))

    def run_torch(self, kind: str) -> Arrays:
        """One kind by torch."""
        engine = TorchEngine(self.torch_fun, self.inputs, self.dtype)
        seeds = self._seeds(kind)
        return _noted("torch_fun", kind, lambda: getattr(engine, kind)(*seeds))

    def precision(self) -> Any:
        """A context in which JAX has the dtype asked for."""
        return enable_x64(True) if self.dtype.itemsize == 8 else contextlib.nullcontext()

    def jaxpr(self) -> str:
        """The JAX program as text, empty if it cannot be traced as a whole."""
        try:
            with self.precision():
                engine = JaxEngine(self.jax_fun, self.inputs, self.dtype)
                return str(jax.make_jaxpr(engine.call)(engine.at(engine.moving)))
        except Exception:  # concrete values are needed: hints do without
            return ""

    def moved(self, step: Callable[[np.ndarray], np.ndarray]) -> "Problem":
        """The same functions at another point."""
        move = lambda x: step(x) if isinstance(x, np.ndarray) and is_inexact(x) else x
        return dataclasses.replace(self, inputs=jax.tree.map(move, self.inputs))

    @functools.cached_property
    def _outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        with self.precision():
            engine = JaxEngine(self.jax_fun, self.inputs, self.dtype)
            outputs = _noted("jax_fun", "value", lambda: engine.outputs({}))
        return {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in outputs.items()}

    @functools.cached_property
    def _sample_outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        with self.precision():
            engine = JaxEngine(self.jax_fun, self.inputs, self.dtype)
            return _noted("jax_fun", "per_sample", engine.sample_outputs)

    def _seeds(self, kind: str) -> list[Arrays]:
        if kind == "value":
            return []
        outputs = self._sample_outputs if kind == "per_sample" else self._outputs
        if not outputs:
            raise ValueError(
                f"compare: {kind} needs a floating output; got none. Compare the value alone."
            )
        rng = np.random.default_rng(self.seed)
        cotangents = {path: _random(rng, x) for path, x in outputs.items()}
        if len(outputs) == 1:
            [(path, x)] = outputs.items()
            if x.shape == () and not jnp.issubdtype(x.dtype, jnp.complexfloating):
                cotangents = {path: np.ones((), x.dtype)}
        moving = {
            path: x
            for path, x in by_path(self.inputs, "inputs").items()
            if isinstance(x, np.ndarray) and is_inexact(x)
        }
        tangents = {path: _random(rng, x) for path, x in moving.items()}
        chosen = {"grad": [cotangents], "per_sample": [cotangents], "jvp": [tangents]}
        return chosen.get(kind, [cotangents, tangents])


def _random(rng: np.random.Generator, like: Any) -> np.ndarray:
    draw = rng.normal(size=like.shape)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        draw = draw + 1j * rng.normal(size=like.shape)
    return np.asarray(draw, dtype=like.dtype)


def _noted(side: str, kind: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        error.add_note(f"compare: raised while computing {kind} of {side}")
        raise


def prepare(inputs: tuple[Any, ...], dtype: np.dtype) -> tuple[Any, ...]:
    """All arrays as NumPy arrays, the floating ones in the precision asked for."""
    complex_dtype = np.dtype(np.complex128 if dtype.itemsize == 8 else np.complex64)

    def leaf(path, x):
        if not hasattr(x, "dtype"):
            return x
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"compare: inputs{jax.tree_util.keystr(path)} must hold numbers; got PRNG keys. "
                "Draw the random numbers first and pass them."
            )
        array = tensor_to_numpy(x) if hasattr(x, "resolve_conj") else np.asarray(x)
        if not is_inexact(array):
            return array
        return array.astype(complex_dtype if array.dtype.kind == "c" else dtype)

    return jax.tree_util.tree_map_with_path(leaf, inputs)
