"""The task ``checkpointing``: budgets against policies on one transformer, written three ways."""

import dataclasses
import importlib.util
import time
from collections.abc import Mapping
from typing import Any

import jax

import funcgrad as fg
from funcgrad.bench import _checkpointing_peak as peak
from funcgrad.bench import _checkpointing_race as steps
from funcgrad.bench._checkpointing_models import MODELS, QUICK, Size, draw_input
from funcgrad.bench._options import Options, Progress
from funcgrad.bench._tables import Column, Plot, Row, Table

BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
_MIB = 2**20
ON_TORCH = "torch's graph"
_THEIRS = (ON_TORCH,) if importlib.util.find_spec("torch") else ()
NAMES = (*steps.NAMES, *MODELS, *peak.NAMES, *_THEIRS)
NOTES = (
    *steps.NOTES,
    "One transformer, written three ways; kept: what the backward pass holds of the forward pass.",
    "Runs again: operations and half of the bytes moved, over those of the forward pass; planned "
    "at equal bytes: the same for a plan within what the policy keeps, and never more.",
    "Temporaries: of the compiled gradient.",
    *peak.NOTES,
    "torch's graph: what torch's dp solver keeps of its own joint graph under each budget, and "
    "ours on the same graph at no more bytes; work as torch estimates it.",
)


def measure(name: str, options: Options, progress: Progress) -> dict[str, Any]:
    """Race the steps of one model; or plan it within budgets, and the bytes of each policy."""
    if name in steps.NAMES:
        return steps.measure(name, options, progress)
    if name in peak.NAMES:
        return peak.measure(name, options, progress)
    size = QUICK if options.quick else Size()
    progress("planning", 0.0)
    if name == ON_TORCH:
        return _on_torch(size)
    loss, params = MODELS[name](size)
    x = draw_input(size)
    start = time.perf_counter()
    first = fg.plan(loss, [0.2], argnums=0)(params, x)
    seconds = time.perf_counter() - start
    # Second, so that what JAX does but once is the plan's.
    start = time.perf_counter()
    jax.make_jaxpr(jax.grad(loss))(params, x)
    trace_seconds = time.perf_counter() - start
    hand = first.by_hand
    at_equal = fg.plan(loss, [nbytes for nbytes, _ in hand.values()], argnums=0)(params, x)
    policies = {
        policy: {"kept": nbytes, "again": work, "planned_again": plan.recompute}
        for (policy, (nbytes, work)), plan in zip(hand.items(), at_equal, strict=True)
    }
    plans = fg.plan(loss, BUDGETS, argnums=0)(params, x)
    # Unrolled code takes long to compile.
    stepped = (0.1, 0.2, 0.5) if name == "scanned" or options.quick else (0.2, 0.5)
    plain = _temporaries(_compile(loss, params, x))
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
            planned = _compile(fg.checkpoint(loss, budget=float(plan.budget)), params, x)
            row["temporaries"] = _temporaries(planned)
        budgets.append(row)
    return {
        "size": dataclasses.asdict(size),
        "plan_seconds": seconds,
        "trace_seconds": trace_seconds,
        "plain_kept": first.plain_nbytes,
        "plain_temporaries": plain,
        "policies": policies,
        "budgets": budgets,
    }


def _compile(loss: Any, params: Any, x: Any) -> Any:
    lowered: Any = jax.jit(jax.value_and_grad(loss)).lower(params, x)
    return lowered.compile()


def _temporaries(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


def tables(models: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Memory against time, then policies and budgets of each model, by what they keep."""
    columns = (
        Column("kept", "MiB", "lower"),
        Column("runs again", "", "lower", ".2%"),
        Column("planned at equal bytes", "", "lower", ".2%"),
        Column("temporaries", "MiB", "lower", ".0f"),
    )
    raced = [
        table for name in steps.NAMES if name in models for table in steps.tables(models[name])
    ]
    peaks = [peak.table(name, models[name]) for name in peak.NAMES if name in models]
    apart = (ON_TORCH, *steps.NAMES, *peak.NAMES)
    planned = {n: of for n, of in models.items() if n not in apart}
    theirs = [_of_torch(models[ON_TORCH])] if ON_TORCH in models else []
    return [*raced, *theirs, *peaks] + [
        Table(
            _title(name, model),
            "policy or budget",
            columns,
            tuple(_rows(model)),
            (", ".join(f"{k} {v}" for k, v in model["size"].items()) + ".",),
            Plot(("runs again",), x="kept", log=False),
        )
        for name, model in planned.items()
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
            wrong=row["ours"] > row["theirs"] * (1 + 1e-9),
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
    text += f"planned in {model['plan_seconds']:.1f} s"
    if "trace_seconds" in model:
        text += f" (tracing the plain gradient takes {model['trace_seconds']:.1f} s)"
    return text


def _rows(model: Mapping[str, Any]) -> list[Row]:
    rows = [
        Row(
            policy,
            (row["kept"] / _MIB, row["again"], row["planned_again"]),
            "policies",
            wrong=row["planned_again"] > row["again"] * (1 + 1e-9),
        )
        for policy, row in sorted(model["policies"].items(), key=lambda item: item[1]["kept"])
    ]
    for row in model["budgets"]:
        temporaries = row.get("temporaries")
        values = (
            row["kept"] / _MIB,
            row["again"],
            None,
            None if temporaries is None else temporaries / _MIB,
        )
        wrong = row["kept"] > row["budget"] * model["plain_kept"]
        rows.append(Row(f"budget={row['budget']:g}", values, "budgets", ours=True, wrong=wrong))
    return rows
