"""One transformer, written three ways, whose gradient is taken within a budget."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Size:
    """A transformer: layers, width, heads, and its input."""

    layers: int = 8
    width: int = 256
    heads: int = 8
    time: int = 256
    batch: int = 8


@dataclasses.dataclass(frozen=True)
class Images:
    """A convolutional net, each layer of stride 2, and its input."""

    channels: tuple[int, ...] = (3, 32, 64)
    side: int = 64
    batch: int = 64


QUICK = Size(2, 16, 2, 8, 2)
QUICK_IMAGES = Images((3, 8, 16), 16, 4)
Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What is put around a block, such as ``jax.checkpoint``."""


def _norm(x: Any, scale: Any, shift: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift


def _attend(q: Any, k: Any, v: Any, heads: int) -> Any:
    batch, steps, width = q.shape
    q, k, v = (x.reshape(batch, steps, heads, width // heads) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
    past = jnp.tril(jnp.ones((steps, steps), bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, steps, width)


def _block(x: Any, p: Any, heads: int) -> Any:
    q, k, v = jnp.split(_norm(x, p["scale1"], p["shift1"]) @ p["qkv"], 3, -1)
    x = x + _attend(q, k, v, heads) @ p["out"]
    return x + jax.nn.gelu(_norm(x, p["scale2"], p["shift2"]) @ p["up"]) @ p["down"]


def draw_params(size: Size) -> Any:
    """Each leaf has all layers, in front."""
    draw, n, d = np.random.default_rng(0).standard_normal, size.layers, size.width
    mats = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    params: dict[str, Any] = {
        name: draw((n, *shape), np.float32) * shape[0] ** -0.5 for name, shape in mats.items()
    }
    params |= {name: np.ones((n, d), np.float32) for name in ("scale1", "scale2")}
    return params | {name: np.zeros((n, d), np.float32) for name in ("shift1", "shift2")}


def unrolled(size: Size, around: Around = lambda block: block) -> Callable[..., Any]:
    """The loss of ``params`` and input, its layers in a loop of Python."""
    block = around(functools.partial(_block, heads=size.heads))

    def loss(params: Any, x: Any) -> Any:
        for i in range(size.layers):
            x = block(x, {name: leaf[i] for name, leaf in params.items()})
        return jnp.square(x).mean()

    return loss


def scanned(size: Size, around: Around = lambda block: block) -> Callable[..., Any]:
    """The same, its layers in ``lax.scan``."""
    block = around(functools.partial(_block, heads=size.heads))

    def loss(params: Any, x: Any) -> Any:
        return jnp.square(lax.scan(lambda x, p: (block(x, p), None), x, params)[0]).mean()

    return loss


def draw_input(size: Size) -> np.ndarray:
    """For all of them."""
    shape = (size.batch, size.time, size.width)
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def _modules(size: Size) -> tuple[Callable[..., Any], Any]:
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            q, k, v = jnp.split(nn.Dense(3 * size.width)(nn.LayerNorm()(x)), 3, -1)
            x = x + nn.Dense(size.width)(_attend(q, k, v, size.heads))
            hidden = nn.gelu(nn.Dense(4 * size.width)(nn.LayerNorm()(x)))
            return x + nn.Dense(size.width)(hidden)

    model: Any = nn.Sequential([Block() for _ in range(size.layers)])
    params = model.init(jax.random.key(0), jnp.zeros((1, size.time, size.width)))
    return lambda params, x: jnp.square(model.apply(params, x)).mean(), params


def convolutional(size: Images) -> tuple[Callable[..., Any], Any, np.ndarray]:
    """The loss of kernels and images, the kernels, and the images."""
    draw, layout = np.random.default_rng(0).standard_normal, ("NHWC", "HWIO", "NHWC")
    kernels = [
        draw((3, 3, m, n), np.float32) * (9 * m) ** -0.5
        for m, n in zip(size.channels, size.channels[1:], strict=False)
    ]
    images = draw((size.batch, size.side, size.side, size.channels[0]), np.float32)

    def loss(kernels: Any, x: Any) -> Any:
        for kernel in kernels:
            x = jax.nn.relu(
                lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=layout)
            )
        return jnp.square(x.mean((1, 2))).mean()

    return loss, kernels, images


MODELS: Mapping[str, Callable[[Size], tuple[Callable[..., Any], Any]]] = {
    "unrolled": lambda size: (unrolled(size), draw_params(size)),
    "scanned": lambda size: (scanned(size), draw_params(size)),
    "flax": _modules,
}
