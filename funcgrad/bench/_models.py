"""The models whose per-sample gradients are timed: plain JAX, random parameters and inputs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SEED = 0
HEADS = 4
"""Of attention."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A per-sample loss, where it is differentiated, and what is asked of it."""

    loss: Callable[..., Any]
    """``loss(params, *sample)``, a scalar."""
    params: Any
    batch: tuple[Any, ...]
    chunk: int
    """Samples at a time, for the contenders that scan over microbatches."""
    family: str = ""
    """What it is, for who writes it in another library."""
    frozen: Any = None
    """Weights that the loss closes over, for the same."""

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.batch[0])

    @property
    def n_params(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def take(self, index: Any) -> "Task":
        """The same with these samples as batch."""
        return dataclasses.replace(self, batch=tuple(x[index] for x in self.batch))


@dataclasses.dataclass(frozen=True)
class Model:
    """A row of the cost table: how to make it, and the goals of the clipped sum."""

    title: str
    make: Callable[[], Task]
    quick: Callable[[], Task]
    """The same at toy size, for tests."""
    time_goal: float | None = None
    """Time over that of the better of the plain gradient and its microbatched scan."""
    memory_goal: float | None = None
    """Temporaries over those of the plain gradient."""
    asks: Literal["sums", "products"] = "sums"
    """For norms and clipped sums; or for variance and products between gradients."""


class _Draw:
    """Normal numbers from one seed, scaled by the root of the number of inputs."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(SEED)

    def weight(self, *shape: int, scale: float | None = None) -> np.ndarray:
        scale = 1 / math.sqrt(math.prod(shape[:-1])) if scale is None else scale
        return (scale * self.rng.normal(size=shape)).astype(np.float32)

    def inputs(self, *shape: int) -> np.ndarray:
        return self.weight(*shape, scale=1.0)

    def integers(self, high: int, *shape: int) -> np.ndarray:
        return self.rng.integers(0, high, shape).astype(np.int32)


def mlp(batch: int, *, n_inputs: int = 784, width: int = 1024, chunk: int = 16) -> Task:
    """Three dense layers; samples of (inputs,) and a class."""
    draw = _Draw()
    sizes = (n_inputs, width, width, 10)
    params = {
        f"layer{i}": {"bias": draw.weight(n, scale=0.1), "kernel": draw.weight(m, n)}
        for i, (m, n) in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
    }

    def loss(params: Any, x: Any, y: Any) -> Any:
        for i in range(3):
            x = x @ params[f"layer{i}"]["kernel"] + params[f"layer{i}"]["bias"]
            x = jax.nn.relu(x) if i < 2 else x
        return -jax.nn.log_softmax(x)[y]

    inputs = draw.inputs(batch, n_inputs), draw.integers(10, batch)
    return Task(loss, params, inputs, chunk, "mlp")


def cnn(batch: int, *, side: int = 32, channels: int = 32, chunk: int = 16) -> Task:
    """Three convolutions of stride 2 and a dense layer; samples of (side, side, 3) and a class."""
    draw = _Draw()
    sizes = (3, channels, 2 * channels, 2 * channels)
    params = {
        f"layer{i}": {"bias": draw.weight(n, scale=0.1), "kernel": draw.weight(3, 3, m, n)}
        for i, (m, n) in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
    }
    params["layer3"] = {
        "bias": draw.weight(10, scale=0.1),
        "kernel": draw.weight(2 * channels * (side // 8) ** 2, 10),
    }

    def loss(params: Any, x: Any, y: Any) -> Any:
        for i in range(3):
            kernel, layout = params[f"layer{i}"]["kernel"], ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(
                x[None], kernel, (2, 2), [(1, 1), (1, 1)], dimension_numbers=layout
            )[0]
            x = jax.nn.relu(x + params[f"layer{i}"]["bias"])
        logits = x.ravel() @ params["layer3"]["kernel"] + params["layer3"]["bias"]
        return -jax.nn.log_softmax(logits)[y]

    inputs = draw.inputs(batch, side, side, 3), draw.integers(10, batch)
    return Task(loss, params, inputs, chunk, "cnn")


def transformer(
    batch: int,
    *,
    length: int,
    width: int = 256,
    depth: int = 4,
    vocabulary: int = 8192,
    scan: bool = False,
    remat: bool = False,
    chunk: int = 4,
) -> Task:
    """A causal language model, input and output embeddings tied; samples of (length,) tokens."""
    draw = _Draw()
    layers = [
        {
            "qkv": draw.weight(width, 3 * width),
            "out": draw.weight(width, width),
            "up": draw.weight(width, 4 * width),
            "down": draw.weight(4 * width, width),
            "norm1": np.ones(width, np.float32),
            "norm2": np.ones(width, np.float32),
        }
        for _ in range(depth)
    ]
    params = {
        "embedding": draw.weight(vocabulary, width, scale=1 / math.sqrt(width)),
        "position": draw.weight(length, width, scale=1.0),
        "norm": np.ones(width, np.float32),
        "layers": jax.tree.map(lambda *leaves: np.stack(leaves), *layers) if scan else layers,
    }

    def norm(h: Any, scale: Any) -> Any:
        return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * scale

    def block(h: Any, p: Any) -> Any:
        qkv = (norm(h, p["norm1"]) @ p["qkv"]).reshape(length, 3, HEADS, width // HEADS)
        logits = jnp.einsum("thd,shd->hts", qkv[:, 0], qkv[:, 1]) / math.sqrt(width // HEADS)
        logits = jnp.where(jnp.tril(jnp.ones((length, length), bool)), logits, -1e9)
        attended = jnp.einsum("hts,shd->thd", jax.nn.softmax(logits), qkv[:, 2])
        h = h + attended.reshape(length, width) @ p["out"]
        return h + jax.nn.gelu(norm(h, p["norm2"]) @ p["up"]) @ p["down"]

    block = jax.checkpoint(block) if remat else block

    def loss(params: Any, tokens: Any) -> Any:
        h = math.sqrt(width) * params["embedding"][tokens] + params["position"]
        if scan:
            h, _ = lax.scan(lambda h, p: (block(h, p), None), h, params["layers"])
        else:
            for p in params["layers"]:
                h = block(h, p)
        logp = jax.nn.log_softmax(norm(h, params["norm"]) @ params["embedding"].T)
        return -jnp.mean(jnp.take_along_axis(logp[:-1], tokens[1:, None], 1))

    tokens = draw.integers(vocabulary, batch, length)
    return Task(loss, params, (tokens,), chunk, "" if scan else "transformer")


def lstm(batch: int, *, length: int = 64, n_inputs: int = 128, width: int = 256) -> Task:
    """A recurrent classifier by ``lax.scan``; samples of (length, inputs) and a class."""
    draw = _Draw()
    params = {
        "input": draw.weight(n_inputs, 4 * width),
        "hidden": draw.weight(width, 4 * width),
        "bias": draw.weight(4 * width, scale=0.1),
        "out": draw.weight(width, 10),
    }

    def loss(params: Any, xs: Any, y: Any) -> Any:
        def step(carry: Any, x: Any) -> tuple[Any, None]:
            h, c = carry
            gates = x @ params["input"] + h @ params["hidden"] + params["bias"]
            i, f, u, o = jnp.split(gates, 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros(width, xs.dtype)
        (h, _), _ = lax.scan(step, (zeros, zeros), xs)
        return -jax.nn.log_softmax(h @ params["out"])[y]

    inputs = draw.inputs(batch, length, n_inputs), draw.integers(10, batch)
    return Task(loss, params, inputs, 16, "lstm")


def embedding(batch: int, *, rows: int = 1_000_000, width: int = 5, chunk: int = 2000) -> Task:
    """A table of short rows, as in advertising; samples of four row numbers and a label."""
    draw = _Draw()
    params = {"table": draw.weight(rows, width, scale=1.0), "out": draw.weight(width, 1)}

    def loss(params: Any, ids: Any, y: Any) -> Any:
        (score,) = jnp.mean(params["table"][ids], 0) @ params["out"]
        return jax.nn.softplus(score) - y * score

    inputs = draw.integers(rows, batch, 4), draw.integers(2, batch)
    return Task(loss, params, inputs, chunk, "embedding")


def _transformer(title: str, batch: int, goals: tuple[float, float], **sizes: Any) -> Model:
    toy = {"width": 16, "length": 8, "vocabulary": 32, "depth": 2, "chunk": 4}
    return Model(
        title,
        functools.partial(transformer, batch, **sizes),
        functools.partial(transformer, 8, **{**sizes, **toy}),
        *goals,
    )


_TINY_CNN = functools.partial(cnn, 8, side=8, channels=4, chunk=4)
_TINY_LSTM = functools.partial(lstm, 16, length=6, n_inputs=4, width=8)
_TINY_TABLE = functools.partial(embedding, 16, rows=100, chunk=4)

MODELS: Mapping[str, Model] = {
    "mlp": Model(
        "MLP 784-1024-1024-10, batch 256",
        functools.partial(mlp, 256),
        functools.partial(mlp, 8, n_inputs=12, width=16, chunk=4),
        1.1,
        1.3,
    ),
    "transformer-t128": _transformer(
        "transformer d256 L4 T128 V8k tied, batch 16", 16, (1.05, 1.1), length=128
    ),
    "transformer-t256": _transformer(
        "transformer d256 L4 T256 V8k tied, batch 16", 16, (1.05, 1.1), length=256
    ),
    "transformer-d512": _transformer(
        "transformer d512 L4 T64 V8k tied, batch 32", 32, (1.05, 1.1), length=64, width=512
    ),
    "transformer-scan": _transformer(
        "transformer T128, layers scanned, batch 16", 16, (1.1, 1.3), length=128, scan=True
    ),
    "transformer-remat": _transformer(
        "transformer T128, layers scanned, remat, batch 16",
        16,
        (1.1, 1.3),
        length=128,
        scan=True,
        remat=True,
    ),
    "cnn-64": Model("CNN 32×32, batch 64", functools.partial(cnn, 64), _TINY_CNN, 1.2, 1.3),
    "cnn-128": Model("CNN 32×32, batch 128", functools.partial(cnn, 128), _TINY_CNN, 1.2, 1.3),
    "lstm": Model(
        "LSTM T64, batch 64",
        functools.partial(lstm, 64),
        _TINY_LSTM,
        1.3,
        1.5,
    ),
    "embedding": Model(
        "embedding 1M × 5, batch 16,000",
        functools.partial(embedding, 16_000),
        _TINY_TABLE,
    ),
    "mlp-64": Model(
        "MLP 784-1024-1024-10, batch 64",
        functools.partial(mlp, 64),
        functools.partial(mlp, 8, n_inputs=12, width=16, chunk=4),
        asks="products",
    ),
    "transformer-64": Model(
        "transformer d128 L2 T64 V2k tied, batch 64",
        functools.partial(transformer, 64, length=64, width=128, depth=2, vocabulary=2048),
        functools.partial(transformer, 8, length=8, width=16, depth=2, vocabulary=32),
        asks="products",
    ),
    "cnn-products": Model(
        "CNN 32×32, batch 64", functools.partial(cnn, 64), _TINY_CNN, asks="products"
    ),
    "lstm-products": Model(
        "LSTM T64, batch 64", functools.partial(lstm, 64), _TINY_LSTM, asks="products"
    ),
    "embedding-products": Model(
        "embedding 1M × 5, batch 64",
        functools.partial(embedding, 64, chunk=16),
        _TINY_TABLE,
        asks="products",
    ),
}
