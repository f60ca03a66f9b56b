"""Random programs: what every transformation of this library is tested on.

A program is a loss of one sample, ``loss(params, x, t)``: ``params`` a dict of arrays, of
which each may be used several times and through a random structure (transposed, sliced,
scaled, masked, multiplied together), ``x`` a float matrix and ``t`` an integer vector.  It
is drawn as a tree of steps, so that a failing one shrinks, prints as text, and runs
wherever a function of JAX runs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from conftest import let_go_of_compiled_code

ROWS, WIDTH, VOCAB, TAPS = 3, 4, 5, 2
SHAPES = {
    "W": (WIDTH, WIDTH),
    "V": (WIDTH, WIDTH),
    "b": (WIDTH,),
    "E": (VOCAB, WIDTH),
    "K": (TAPS, WIDTH, WIDTH),
}


@jax.custom_jvp
def odd_sin(x):
    return jnp.sin(x)


@odd_sin.defjvp
def _(primals, tangents):  # a derivative that differs from the true one, so that losing it shows
    return jnp.sin(primals[0]), 0.9 * jnp.cos(primals[0]) * tangents[0]


@jax.custom_vjp
def odd_tanh(x):
    return jnp.tanh(x)


odd_tanh.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (0.8 * g * (1 - jnp.tanh(x) ** 2),))

WEIGHTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "W": lambda p: p["W"],
    "W.T": lambda p: p["W"].T,
    "V": lambda p: p["V"],
    "V.T": lambda p: p["V"].T,
    "2W": lambda p: 2.0 * p["W"],
    "-W": lambda p: -p["W"],
    "W[::-1]": lambda p: p["W"][::-1],
    "W@V": lambda p: p["W"] @ p["V"],
    "tril(W)": lambda p: jnp.tril(p["W"]),
    "W/|W|": lambda p: p["W"] / jnp.linalg.norm(p["W"], axis=0, keepdims=True),
    "cat(W[:2],V[2:])": lambda p: jnp.concatenate([p["W"][:2], p["V"][2:]]),
    "E[:4]": lambda p: p["E"][:WIDTH],
    "E[1:].T": lambda p: p["E"][1:].T,
    "K[0]": lambda p: p["K"][0],
    "reshape(W)": lambda p: p["W"].reshape(2, 2, WIDTH).reshape(WIDTH, WIDTH),
}

UNARY: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "softmax": lambda h: jax.nn.softmax(h, axis=-1),
    "logsumexp": lambda h: h - jax.nn.logsumexp(h, axis=-1, keepdims=True),
    "rms": lambda h: h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-2),
    "centre": lambda h: h - h.mean(0),
    "cumsum": lambda h: jnp.cumsum(h, axis=0) / ROWS,
    "sort": lambda h: jnp.sort(h, axis=0),
    "where": lambda h: jnp.where(h > 0, h, 0.1 * h),
    "roll": lambda h: jnp.roll(h, 1, axis=0),
    "stop": lambda h: h + lax.stop_gradient(h),
    "name": lambda h: checkpoint_name(jnp.cos(h), "cos"),
    "odd_sin": odd_sin,
    "odd_tanh": odd_tanh,
    "transpose": lambda h: (h.T @ h / ROWS).T[:ROWS],
    "clip": lambda h: jnp.clip(h, -1.5, 1.5),
    "logistic": jax.nn.sigmoid,
    "cast": lambda h: h.astype(jnp.float32).astype(h.dtype) if h.dtype == jnp.float64 else h,
}

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda g, h: g + h,
    "mul": lambda g, h: jnp.tanh(g) * h,
    "sub": lambda g, h: g - 0.5 * h,
    "attend": lambda g, h: jax.nn.softmax(g @ h.T / 2) @ h,
    "heads": lambda g, h: jnp.einsum(
        "thk,shk->tsh", g.reshape(ROWS, 2, 2), h.reshape(ROWS, 2, 2)
    ).reshape(ROWS, -1)[:, :WIDTH],
    "max": jnp.maximum,
    "scatter": lambda g, h: g.at[np.array([0, 2, 0])].add(0.3 * h),
    "scatter_set": lambda g, h: g.at[1].set(h[0]),
}

# With a weight drawn from WEIGHTS, or a parameter used as it is.
WEIGHTED: dict[str, Callable[..., Any]] = {
    "dense": lambda h, w, p, t: h @ w / 2,
    "dense_t": lambda h, w, p, t: lax.dot_general(h, w, (((1,), (1,)), ((), ()))) / 2,
    "left": lambda h, w, p, t: (w @ h.T / 2).T,
    "bias": lambda h, w, p, t: h + p["b"],
    "scale": lambda h, w, p, t: h * p["b"],
    "embed": lambda h, w, p, t: h + p["E"][t],
    "unembed": lambda h, w, p, t: (h @ p["E"].T)[:, :WIDTH],
    "position": lambda h, w, p, t: h + p["E"][:ROWS],
    "conv": lambda h, w, p, t: lax.conv_general_dilated(
        h[None], p["K"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[0],
    "depthwise": lambda h, w, p, t: lax.conv_general_dilated(
        h[None],
        p["K"][:, :1],
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=WIDTH,
    )[0],
    "mean_use": lambda h, w, p, t: h + w.mean(),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation: what it is, which earlier values it reads, its weight, its body."""

    kind: str
    operands: tuple[int, ...] = ()
    weight: str = "W"
    body: tuple["Step", ...] = ()

    def __str__(self) -> str:
        inside = "; ".join(map(str, self.body))
        return (
            f"{self.kind}{list(self.operands)}"
            + (f"<{self.weight}>" if self.kind in WEIGHTED else "")
            + (f"{{{inside}}}" if inside else "")
        )


def run_steps(steps: tuple[Step, ...], params: Any, h: Any, t: Any) -> Any:
    """The last value of a block that starts from ``h``; all values have the shape of ``h``."""
    pool = [h]
    for step in steps:
        args = [pool[i % len(pool)] for i in step.operands]
        pool.append(_run(step, params, args, t))
    return pool[-1]


def _run(step: Step, params: Any, args: list[Any], t: Any) -> Any:
    h = args[0]
    if step.kind in UNARY:
        return UNARY[step.kind](h)
    if step.kind in BINARY:
        return BINARY[step.kind](h, args[1])
    if step.kind in WEIGHTED:
        return WEIGHTED[step.kind](h, WEIGHTS[step.weight](params), params, t)

    def block(params: Any, h: Any) -> Any:
        return jnp.tanh(run_steps(step.body, params, h, t))

    if step.kind == "jit":
        return jax.jit(block)(params, h)
    if step.kind == "remat":
        return jax.checkpoint(block)(params, h)
    if step.kind == "scan":  # weights constant over time
        out, ys = lax.scan(lambda c, _: (block(params, c), c.sum()), h, None, length=2)
        return out + ys.mean()
    if step.kind == "layers":  # weights scanned over
        stacked = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), params)
        return lax.scan(lambda c, p: (block(p, c), None), h, stacked, reverse=True)[0]
    if step.kind == "fori":
        return lax.fori_loop(0, 2, lambda _, c: block(params, c), h)
    if step.kind == "cond":
        return lax.cond(h.sum() > 0, block, lambda p, h: jnp.sin(h), params, h)
    if step.kind == "vmap":
        return jax.vmap(lambda r: jnp.tanh(r) * 0.9)(h)
    raise AssertionError(step.kind)


@dataclasses.dataclass(frozen=True)
class Program:
    """A drawn loss of one sample, with what it takes to make its inputs."""

    steps: tuple[Step, ...]
    seed: int

    def __str__(self) -> str:
        return f"Program(seed={self.seed}: " + "; ".join(map(str, self.steps)) + ")"

    __repr__ = __str__

    def loss(self, params: Any, x: Any, t: Any) -> Any:
        h = run_steps(self.steps, params, x, t)
        return jnp.sum(jnp.sin(h + jnp.arange(h.size, dtype=h.dtype).reshape(h.shape) / 7))

    def params(self, dtype: Any = np.float32) -> dict[str, Any]:
        rng = np.random.default_rng(self.seed)
        return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in SHAPES.items()}

    def inputs(self, dtype: Any = np.float32, batch: int | None = None) -> tuple[Any, Any]:
        rng = np.random.default_rng(self.seed + 1)
        lead = () if batch is None else (batch,)
        x = jnp.asarray(rng.normal(size=(*lead, ROWS, WIDTH)), dtype)
        return x, jnp.asarray(rng.integers(0, VOCAB, size=(*lead, ROWS)), np.int32)


_SIMPLE = [*UNARY, *BINARY, *WEIGHTED]
_NESTED = ["jit", "remat", "scan", "layers", "fori", "cond"]


@st.composite
def _steps(draw: Any, depth: int, max_size: int) -> tuple[Step, ...]:
    steps = []
    for _ in range(draw(st.integers(min(2, max_size), max_size))):
        kinds = st.sampled_from([*WEIGHTED, *_SIMPLE, "vmap", *(_NESTED * 2 if depth else [])])
        kind = draw(kinds)
        steps.append(
            Step(
                kind,
                tuple(draw(st.integers(0, 6)) for _ in range(1 + (kind in BINARY))),
                draw(st.sampled_from(sorted(WEIGHTS))) if kind in WEIGHTED else "W",
                draw(_steps(depth - 1, 3)) if kind in _NESTED else (),
            )
        )
    return tuple(steps)


@st.composite
def programs(draw: Any, depth: int = 2, max_size: int = 5) -> Program:
    """Strategy for programs; ``depth`` bodies within bodies at the most."""
    let_go_of_compiled_code()
    return Program(draw(_steps(depth, max_size)), draw(st.integers(0, 2**16)))
