"""The task ``checkpointing``: budgets against policies on one transformer, written three ways."""

import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table
from rich.text import Text

import funcgrad as fg
from funcgrad.bench._measure import Machine
from funcgrad.bench._options import Options

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


def checkpointing(
    console: Console, options: Options, save: Callable[[dict[str, Any]], object]
) -> tuple[dict[str, Any], bool]:
    """Plan each model; the figures, and whether no policy did better and all numbers are right."""
    names = options.models or tuple(MODELS)
    if unknown := [name for name in names if name not in MODELS]:
        raise ValueError(
            f"bench checkpointing: a model is one of {', '.join(MODELS)}; got {unknown[0]!r}."
        )
    size = QUICK if options.quick else Size()
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": dataclasses.asdict(Machine.here()),
        "size": dataclasses.asdict(size),
        "quick": options.quick,
        "models": {},
    }
    for name in names:
        with console.status(name):
            results["models"][name] = _measure(name, size, options)
        console.print(_table(name, results["models"][name]))
        console.print()
        save(results)
    return results, all(_right(model) for model in results["models"].values())


def _measure(name: str, size: Size, options: Options) -> dict[str, Any]:
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
    # On CPU the compiler's own scheduling hides the memory of unrolled code.
    compiled = name == "scanned" or options.quick
    plain = _compile(loss, params, x) if compiled else None
    budgets = []
    for plan in plans:
        row = {
            "budget": plan.budget,
            "kept": plan.nbytes,
            "again": plan.recompute,
            "matmuls_again": plan.recompute_matmul,
            "gap": plan.gap,
            "method": plan.method,
        }
        if plain is not None and plan.budget in (0.1, 0.2, 0.5):
            row |= _step(loss, params, x, float(plan.budget), plain, options.turns)
        budgets.append(row)
    return {
        "plan_seconds": seconds,
        "plain_kept": first.plain_nbytes,
        "plain_temporaries": None if plain is None else _temporaries(plain),
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


def _right(model: dict[str, Any]) -> bool:
    no_worse = all(
        row["planned_again"] <= row["again"] + 1e-9 for row in model["policies"].values()
    )
    within = all(row["kept"] <= row["budget"] * model["plain_kept"] for row in model["budgets"])
    return no_worse and within and all(row.get("error", 0) < 1e-4 for row in model["budgets"])


def _table(name: str, model: dict[str, Any]) -> Table:
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    out.title = Text(_title(name, model), "bold")
    out.add_column("", overflow="fold")
    for header in (
        "kept\nMiB",
        "runs again",
        "planned at\nequal bytes",
        "temp.\nMiB",
        "time over\nplain",
    ):
        out.add_column(header, justify="right", no_wrap=True, min_width=6)
    for cells in _rows(model):
        out.add_row(*cells)
    return out


def _title(name: str, model: dict[str, Any]) -> str:
    temporaries = model["plain_temporaries"]
    text = f"{name}: {model['plain_kept'] / _MIB:.0f} MiB kept without a budget, "
    if temporaries is not None:
        text += f"{temporaries / _MIB:.0f} MiB of temporaries, "
    return text + f"planned in {model['plan_seconds']:.1f} s"


def _rows(model: dict[str, Any]) -> list[list[str]]:
    rows = [
        [
            policy,
            f"{row['kept'] / _MIB:.1f}",
            f"{row['again']:.2%}",
            f"{row['planned_again']:.2%}",
            "",
            "",
        ]
        for policy, row in sorted(model["policies"].items(), key=lambda item: item[1]["kept"])
    ]
    for row in model["budgets"]:
        temporaries, ratio = row.get("temporaries"), row.get("time_over_plain")
        rows.append(
            [
                f"budget={row['budget']:g}",
                f"{row['kept'] / _MIB:.1f}",
                f"{row['again']:.2%}",
                "",
                "" if temporaries is None else f"{temporaries / _MIB:.0f}",
                "" if ratio is None else f"{ratio:.2f}",
            ]
        )
    return rows


def markdown(results: dict[str, Any]) -> str:
    """The figures as markdown, a table of each model.

    Args:
      results: What the task wrote as JSON.

    Returns:
      The text.
    """
    machine, size = results["machine"], results["size"]
    lines = [
        f"{results['date']}; {', '.join(f'{k} {v}' for k, v in machine.items())}.",
        f"Transformer: {', '.join(f'{k} {v}' for k, v in size.items())}.",
        "Runs again: operations and half of the bytes moved, over those of the forward pass.",
    ]
    head = ["policy or budget", "kept MiB", "runs again", "planned at equal bytes"]
    head += ["temporaries MiB", "time over plain"]
    for name, model in results["models"].items():
        lines += ["", f"**{_title(name, model)}**", "", "| " + " | ".join(head) + " |"]
        lines += ["| --- |" + " ---: |" * (len(head) - 1)]
        lines += ["| " + " | ".join(cells) + " |" for cells in _rows(model)]
    return "\n".join(lines) + "\n"
