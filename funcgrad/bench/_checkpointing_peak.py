"""The task ``checkpointing``: budgets for the temporaries of the compiled gradient."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax

from funcgrad._remat._graph import Closure
from funcgrad._remat._peak import choose_peak, plain_temp_bytes, temp_bytes
from funcgrad._remat._planner import Flat, Planner
from funcgrad._remat._portfolio import by_hand
from funcgrad._remat._solve import Infeasible
from funcgrad._remat._stages import crossing
from funcgrad.bench._checkpointing_models import (
    MODELS,
    QUICK,
    QUICK_IMAGES,
    Images,
    Size,
    convolutional,
    draw_input,
)
from funcgrad.bench._options import Options, Progress
from funcgrad.bench._tables import Column, Row, Table

BUDGETS = (0.5, 0.3)
# Those of JAX, around each block.
_POLICIES = ("nothing", "dots without batch dimensions", "dots")
_CNN = "peak-cnn"
NAMES = (*(f"peak-{name}" for name in MODELS), _CNN)
NOTES = (
    "Peak: budgets for the temporaries of the compiled gradient, as fractions of those without a "
    "plan. Policies stand around each block; a loop's body is one. Compiled: the gradients "
    "compiled to find the plan.",
)
_MIB, _GIGA = 2**20, 1e9


def measure(name: str, options: Options, progress: Progress) -> dict[str, Any]:
    """Plan one model within budgets, beside the policies of JAX."""
    size, loss, params, x = _model(name, options.quick)
    flat, values = Flat.of(loss, (params, x), {}, "bench")
    marked = len(jax.tree.leaves(params))
    marks = [flat.n_closed <= i < flat.n_closed + marked for i in range(len(values))]
    planner = Planner(flat, values, marks)
    progress("compiling", 0.0)
    rows = {"without a plan": _work(planner, planner.graph.keeping(), plain_temp_bytes(planner))}
    for i, budget in enumerate(BUDGETS):
        progress(f"budget {budget:g}", i / (len(BUDGETS) + 1))
        start = time.perf_counter()
        try:
            choice = choose_peak(planner, budget)
        except Infeasible as error:
            rows[f"budget={budget:g}"] = {"least": error.least}
            continue
        rows[f"budget={budget:g}"] = {
            **_work(planner, choice.closure, choice.temp_bytes),
            "budget": budget,
            "note": choice.note,
            "seconds": time.perf_counter() - start,
            "compiled": choice.compiled,
        }
    blocks = by_hand(planner.graph, crossing(planner.graph))
    for policy in _POLICIES:
        progress(policy, len(BUDGETS) / (len(BUDGETS) + 1))
        if policy in blocks:
            rows[policy] = _work(planner, blocks[policy], temp_bytes(planner, blocks[policy]))
    return {"size": dataclasses.asdict(size), "rows": rows}


def _model(name: str, quick: bool) -> tuple[Any, Any, Any, Any]:
    """Size, loss, parameters and input."""
    if name == _CNN:
        images = QUICK_IMAGES if quick else Images()
        return images, *convolutional(images)
    size = QUICK if quick else Size()
    return size, *MODELS[name.removeprefix("peak-")](size), draw_input(size)


def _work(planner: Planner, closure: Closure, temporaries: int | None) -> dict[str, Any]:
    steps = [planner.graph.steps[i] for i in closure.again]
    return {
        "temporaries": temporaries,
        "again": closure.cost / planner.graph.forward_cost,
        "flops": sum(step.flops for step in steps),
    }


def table(name: str, model: Mapping[str, Any]) -> Table:
    """Plans and policies of one model."""
    columns = (
        Column("temporaries", "MiB", "lower"),
        Column("runs again", "", "lower", ".2%"),
        Column("floating-point operations again", "billion", "lower", ".2f", detail=True),
        Column("planned in", "s", "lower"),
        Column("compiled", form="d"),
    )
    sizes = ", ".join(f"{k} {v}" for k, v in model["size"].items()) + "."
    rows = model["rows"]
    notes = (sizes, *(f"{label}: {row['note']}" for label, row in rows.items() if row.get("note")))
    title = "a convolutional net" if name == _CNN else f"layers {name.removeprefix('peak-')}"
    return Table(
        f"Temporaries, {title}",
        "policy or budget",
        columns,
        tuple(_row(label, row, rows) for label, row in rows.items()),
        notes,
    )


def _row(label: str, row: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> Row:
    ours = label.startswith("budget")
    if "least" in row:
        reason = f"the least possible is {row['least'] / _MIB:.1f} MiB"
        return Row(label, group="budgets", ours=True, reason=reason)
    values = (
        row["temporaries"] / _MIB,
        row["again"],
        row["flops"] / _GIGA,
        row.get("seconds"),
        row.get("compiled"),
    )
    wrong = ours and (
        not row["note"]
        and row["temporaries"] > row["budget"] * rows["without a plan"]["temporaries"]
        or any(_better(other, row) for other in rows.values() if "least" not in other)
    )
    return Row(label, values, "budgets" if ours else "policies", ours=ours, wrong=bool(wrong))


def _better(other: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether another way does no more work with fewer temporaries."""
    return other["again"] <= row["again"] and other["temporaries"] < row["temporaries"]
