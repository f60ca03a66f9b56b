"""Low-rank adapters on a frozen transformer: few parameters, whose gradients are small."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad.bench._models import HEADS, SEED, Task
from funcgrad.bench._per_sample_race import PerSample


def lora(
    batch: int,
    *,
    length: int = 128,
    width: int = 256,
    depth: int = 4,
    vocabulary: int = 8192,
    rank: int = 8,
    chunk: int = 4,
) -> Task:
    """A causal language model, adapters at each dense layer; samples of (length,) tokens."""
    rng = np.random.default_rng(SEED)
    sizes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    draw = lambda *shape: (rng.normal(size=shape) / math.sqrt(shape[0])).astype(np.float32)
    frozen = [{name: draw(*shape) for name, shape in sizes.items()} for _ in range(depth)]
    embedding = draw(vocabulary, width) * math.sqrt(vocabulary / width)
    params = [
        {name: {"down": draw(m, rank), "up": draw(rank, n)} for name, (m, n) in sizes.items()}
        for _ in range(depth)
    ]

    def norm(h: Any) -> Any:
        return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)

    def loss(params: Any, tokens: Any) -> Any:
        # Cast, since the float64 loop has parameters of that dtype.
        dtype = params[0]["qkv"]["up"].dtype
        table = jnp.asarray(embedding, dtype)
        h = math.sqrt(width) * table[tokens]
        for weights, adapters in zip(frozen, params, strict=True):

            def dense(x: Any, name: str, w: Any = weights, a: Any = adapters) -> Any:
                return x @ jnp.asarray(w[name], dtype) + (x @ a[name]["down"]) @ a[name]["up"]

            qkv = dense(norm(h), "qkv").reshape(length, 3, HEADS, width // HEADS)
            logits = jnp.einsum("thd,shd->hts", qkv[:, 0], qkv[:, 1]) / math.sqrt(width // HEADS)
            logits = jnp.where(jnp.tril(jnp.ones((length, length), bool)), logits, -1e9)
            mixed = jnp.einsum("hts,shd->thd", jax.nn.softmax(logits), qkv[:, 2])
            h = h + dense(mixed.reshape(length, width), "out")
            h = h + dense(jax.nn.gelu(dense(norm(h), "up")), "down")
        logp = jax.nn.log_softmax(norm(h) @ table.T)
        return -jnp.mean(jnp.take_along_axis(logp[:-1], tokens[1:, None], 1))

    tokens = rng.integers(0, vocabulary, (batch, length)).astype(np.int32)
    weights = {"layers": frozen, "embedding": embedding}
    return Task(loss, params, (tokens,), chunk, "lora", weights)


def _problem(asks: Literal["sums", "products"], quick: bool) -> PerSample:
    if quick:
        toy = functools.partial(lora, 8, length=8, width=16, depth=2, vocabulary=32, rank=2)
        return PerSample(toy, "lora at toy size", asks=asks)
    title = "LoRA of rank 8, transformer d256 L4 T128 V8k, batch 16"
    return PerSample(functools.partial(lora, 16), title, asks=asks)


LORA: Mapping[str, Callable[[bool], PerSample]] = {
    "lora": functools.partial(_problem, "sums"),
    "lora-products": functools.partial(_problem, "products"),
}
