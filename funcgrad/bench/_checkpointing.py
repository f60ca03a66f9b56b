"""The task ``checkpointing``: budgets against policies on one transformer, written three ways."""

import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import funcgrad as fg
from funcgrad.bench._options import Options, Progress
from funcgrad.bench._tables import Column, Plot, Row, Table

BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Size:
    """A transformer: layers, width, heads, and its input."""

    layers: int = 8
    width: int = 256
    heads: int = 8
    time: int = 256
    batch: int = 8


QUICK = Size(2, 16, 2, 8, 2)


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


def _params(size: Size) -> Any:
    draw, n, d = np.random.default_rng(0).standard_normal, size.layers, size.width
    mats = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    params: dict[str, Any] = {
        name: draw((n, *shape), np.float32) * shape[0] ** -0.5 for name, shape in mats.items()
    }
    params |= {name: np.ones((n, d), np.float32) for name in ("scale1", "scale2")}
    return params | {name: np.zeros((n, d), np.float32) for name in ("shift1", "shift2")}


def _unrolled(size: Size) -> tuple[Callable[..., Any], Any]:
    def loss(params: Any, x: Any) -> Any:
        for i in range(size.layers):
            x = _block(x, {name: leaf[i] for name, leaf in params.items()}, size.heads)
        return jnp.square(x).mean()

    return loss, _params(size)


def _scanned(size: Size) -> tuple[Callable[..., Any], Any]:
    def loss(params: Any, x: Any) -> Any:
        step = lambda x, p: (_block(x, p, size.heads), None)
        return jnp.square(lax.scan(step, x, params)[0]).mean()

    return loss, _params(size)


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


MODELS: Mapping[str, Callable[[Size], tuple[Callable[..., Any], Any]]] = {
    "unrolled": _unrolled,
    "scanned": _scanned,
    "flax": _modules,
}


ON_TORCH = "torch's graph"
NAMES = (*MODELS, ON_TORCH) if importlib.util.find_spec("torch") else tuple(MODELS)
NOTES = (
    "One transformer, written three ways; kept: what the backward pass holds of the forward pass.",
    "Runs again: operations and half of the bytes moved, over those of the forward pass; planned "
    "at equal bytes: the same for a plan within what the policy keeps, and never more.",
    "Time over plain: of a step, in turns with the step without a budget. Temporaries are of the "
    "compiled step.",
    "torch's graph: what torch's dp solver keeps of its own joint graph under each budget, and "
    "ours on the same graph at no more bytes; work as torch estimates it.",
)


def measure(name: str, options: Options, progress: Progress) -> dict[str, Any]:
    """Plan one model within budgets, and within the bytes of each policy."""
    size = QUICK if options.quick else Size()
    progress("planning", 0.0)
    if name == ON_TORCH:
        return _on_torch(size)
    loss, params = MODELS[name](size)
    x = np.random.default_rng(1).standard_normal((size.batch, size.time, size.width), np.float32)
    start = time.perf_counter()
    first = fg.plan(loss, [0.2], argnums=0)(params, x)
    seconds = time.perf_counter() - start
    hand = first.by_hand
    at_equal = fg.plan(loss, [nbytes for nbytes, _ in hand.values()], argnums=0)(params, x)
    policies = {
        policy: {"kept": nbytes, "again": work, "planned_again": plan.recompute}
        for (policy, (nbytes, work)), plan in zip(hand.items(), at_equal, strict=True)
    }
    plans = fg.plan(loss, BUDGETS, argnums=0)(params, x)
    # Unrolled code takes long to compile.
    stepped = (0.1, 0.2, 0.5) if name == "scanned" or options.quick else (0.2, 0.5)
    plain = _compile(loss, params, x)
    budgets = []
    for i, plan in enumerate(plans):
        progress(f"budget {plan.budget:g}", 0.3 + 0.7 * i / len(plans))
        row = {
            "budget": plan.budget,
            "kept": plan.nbytes,
            "again": plan.recompute,
            "matmuls_again": plan.recompute_matmul,
            "gap": plan.gap,
            "method": plan.method,
        }
        if plan.budget in stepped:
            row |= _step(loss, params, x, float(plan.budget), plain, options.turns)
        budgets.append(row)
    return {
        "size": dataclasses.asdict(size),
        "plan_seconds": seconds,
        "plain_kept": first.plain_nbytes,
        "plain_temporaries": _temporaries(plain),
        "policies": policies,
        "budgets": budgets,
    }


def _compile(loss: Any, params: Any, x: Any) -> Any:
    lowered: Any = jax.jit(jax.value_and_grad(loss)).lower(params, x)
    return lowered.compile()


def _temporaries(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


def _step(loss: Any, params: Any, x: Any, budget: float, plain: Any, turns: int) -> dict[str, Any]:
    planned = _compile(fg.checkpoint(loss, budget=budget), params, x)
    a, b = jax.tree.leaves(plain(params, x)), jax.tree.leaves(planned(params, x))
    error = max(float(jnp.abs(p - q).max() / jnp.abs(p).max()) for p, q in zip(a, b, strict=True))
    ratios = []
    for _ in range(turns):
        seconds = []
        for fun in (plain, planned):
            start = time.perf_counter()
            jax.block_until_ready(fun(params, x))
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[1] / seconds[0])
    return {
        "temporaries": _temporaries(planned),
        "error": error,
        "time_over_plain": statistics.median(ratios),
    }


def tables(models: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Policies and budgets of each model, by what they keep."""
    columns = (
        Column("kept", "MiB", "lower"),
        Column("runs again", "", "lower", ".2%"),
        Column("planned at equal bytes", "", "lower", ".2%"),
        Column("temporaries", "MiB", "lower", ".0f"),
        Column("time over plain", "", "lower", ".2f"),
        Column("error", "", "lower", ".0e"),
    )
    measured = {name: model for name, model in models.items() if name != ON_TORCH}
    theirs = [_of_torch(models[ON_TORCH])] if ON_TORCH in models else []
    return theirs + [
        Table(
            _title(name, model),
            "policy or budget",
            columns,
            tuple(_rows(model)),
            (", ".join(f"{k} {v}" for k, v in model["size"].items()) + ".",),
            Plot(("runs again",), x="kept", log=False),
        )
        for name, model in measured.items()
    ]


def _on_torch(size: Size) -> dict[str, Any]:
    import torch

    from funcgrad.bench._torch_graph import compare, transformer

    loss, params = transformer(size.layers, size.width, size.heads)
    x = torch.randn(size.batch, size.time, size.width)
    rows = compare(loss, [*params, x], [i / 10 for i in range(11)])
    return {"size": dataclasses.asdict(size), "budgets": [dataclasses.asdict(row) for row in rows]}


def _of_torch(model: Mapping[str, Any]) -> Table:
    columns = (
        Column("kept", "MiB", "lower"),
        Column("torch runs again", "", "lower", ".2%"),
        Column("planned at equal bytes", "", "lower", ".2%"),
    )
    rows = [
        Row(
            f"activation_memory_budget={row['budget']:g}",
            (row["nbytes"] / _MIB, row["theirs"], row["ours"]),
            wrong=row["ours"] > row["theirs"] + 1e-9,
        )
        for row in model["budgets"]
    ]
    sizes = (", ".join(f"{k} {v}" for k, v in model["size"].items()) + ".",)
    return Table("torch's solver and ours on torch's graph", "budget", columns, tuple(rows), sizes)


def _title(name: str, model: Mapping[str, Any]) -> str:
    temporaries = model["plain_temporaries"]
    text = f"{name}: {model['plain_kept'] / _MIB:.0f} MiB kept without a budget, "
    if temporaries is not None:
        text += f"{temporaries / _MIB:.0f} MiB of temporaries, "
    return text + f"planned in {model['plan_seconds']:.1f} s"


def _rows(model: Mapping[str, Any]) -> list[Row]:
    rows = [
        Row(
            policy,
            (row["kept"] / _MIB, row["again"], row["planned_again"]),
            "policies",
            wrong=row["planned_again"] > row["again"] + 1e-9,
        )
        for policy, row in sorted(model["policies"].items(), key=lambda item: item[1]["kept"])
    ]
    for row in model["budgets"]:
        temporaries, error = row.get("temporaries"), row.get("error")
        values = (
            row["kept"] / _MIB,
            row["again"],
            None,
            None if temporaries is None else temporaries / _MIB,
            row.get("time_over_plain"),
            error,
        )
        within = row["kept"] <= row["budget"] * model["plain_kept"]
        wrong = not within or not (error is None or error < 1e-4)
        rows.append(Row(f"budget={row['budget']:g}", values, "budgets", ours=True, wrong=wrong))
    return rows
