"""The task ``per-sample``: what clipped per-sample gradients cost on each model."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from funcgrad.bench import _scaling
from funcgrad.bench._contenders import PRODUCTS
from funcgrad.bench._lora import LORA
from funcgrad.bench._models import MODELS
from funcgrad.bench._options import Options, Progress
from funcgrad.bench._per_sample_race import PerSample
from funcgrad.bench._race import race
from funcgrad.bench._race_tables import LEGEND, across, contenders, named
from funcgrad.bench._tables import Column, Plot, Row, Table
from funcgrad.bench._torch_peers import TORCH_CONTENDERS

NAMES = tuple(MODELS)
QUICK = ("mlp", "transformer-remat")
FULL = (*LORA, *_scaling.CURVES)
# Column headers of the summary, and whose figures stand below.
SUMMARY = {
    "plain": "plain",
    "plain, microbatches": "plain, microbatches",
    "clipped_sum": "fg.per_sample clipped_sum",
    "clipped_grad": "fg.clipped_grad",
    "clipped_grad, microbatches": "fg.clipped_grad, microbatches",
    "clipped_grad, two_pass": "fg.clipped_grad two_pass",
    "norms": "fg.per_sample norms",
    "vmap(grad)": "vmap(grad), Optax",
    "vmap(grad), microbatches": "vmap(grad), Optax, microbatches",
}
ROADS = {
    "auto": "fg.clipped_grad",
    **{road: f"fg.clipped_grad {road}" for road in ("gram", "direct", "two_pass", "materialize")},
}
PEERS = {
    name.removeprefix("torch: "): name
    for name in ("jax_privacy", "jax_privacy, microbatches", *TORCH_CONTENDERS)
    if name != "torch: plain"
}
_PRODUCT_WAYS = {
    "per_sample": "fg.per_sample",
    "vmap(grad)": "vmap(grad)",
    "loop": "loop",
    "torch vmap(grad)": "torch: vmap(grad)",
    "BackPACK": "torch: BackPACK",
}
WHY: Mapping[str, str] = dict.fromkeys(
    ("transformer-t128", "transformer-t256", "transformer-scan", "transformer-remat", "lora"),
    "Microbatches are added together with their rounding errors: a second copy of the sum.",
) | dict.fromkeys(
    (*(name for name, model in MODELS.items() if model.asks == "products"), "lora-products"),
    "The loop holds one sample at a time; per_sample holds the factors of all.",
)
"""By model: why funcgrad is behind, where it is."""


def measure(name: str, options: Options, progress: Progress) -> dict[str, Any]:
    """Race all contenders on a model, or the main ones along a curve."""
    if name in _scaling.CURVES:
        return _scaling.measure(name, options, progress)
    if name in LORA:
        make = functools.partial(LORA[name], options.quick)
    else:
        make = functools.partial(PerSample.of, name, options.quick)
    return race(make, turns=options.turns, progress=progress)


def tables(models: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Summaries, then each model's contenders, then the curves."""
    raced = {name: of for name, of in models.items() if "contenders" in of}
    sums = {name: of for name, of in raced.items() if of["asks"] == "sums"}
    products = [of for of in raced.values() if of["asks"] == "products"]
    out = []
    if sums:
        out += [_over_plain(sums), _temporaries(sums), _roads(sums), _peers(sums)]
    if products:
        out += [
            _of_products(products, "ratio", Column("ratio", "", "lower", ".2f")),
            _of_products(products, "temp_bytes", Column("temporaries", "MiB", "lower")),
        ]
    for name, of in raced.items():
        sizes = f"{of['title']}: {of['parameters']:,} parameters"
        sizes += f", microbatches of {of['microbatch']}"
        notes = (f"{sizes}, bound {of['max_norm']:.3g}.",)
        out.append(contenders(of, notes=notes, why=WHY.get(name, "")))
    for name, of in models.items():
        if name not in raced:
            out += _scaling.tables(of)
    return out


NOTES = (
    *LEGEND,
    "fg.clipped_grad stays below the bound on purpose, about 4e-7 for each sample.",
    "The plain gradient has neither norms nor clipping.",
)


def _over_plain(sums: Mapping[str, Mapping[str, Any]]) -> Table:
    column = Column("ratio", "", "lower", ".2f")
    table = across(sums, SUMMARY, "ratio", column, "Time over the plain gradient")
    return _with_goals(table, [of["time_goal"] for of in sums.values()])


def _temporaries(sums: Mapping[str, Mapping[str, Any]]) -> Table:
    column = Column("temporaries", "MiB", "lower")
    table = across(sums, SUMMARY, "temp_bytes", column, "Memory of the compiled program")
    goals = []
    for of in sums.values():
        plain = of["contenders"].get("plain", {}).get("temp_bytes")
        goal = of["memory_goal"]
        goals.append(None if plain is None or goal is None else goal * plain / 2**20)
    return _with_goals(table, goals)


def _with_goals(table: Table, goals: list[float | None]) -> Table:
    column = named(table.columns[0], "goal", "")
    rows = [
        dataclasses.replace(row, values=(*row.values, goal))
        for row, goal in zip(table.rows, goals, strict=True)
    ]
    return dataclasses.replace(table, columns=(*table.columns, column), rows=tuple(rows))


def _roads(sums: Mapping[str, Mapping[str, Any]]) -> Table:
    column = Column("ratio", "", "lower", ".2f")
    return across(sums, ROADS, "ratio", column, "Time of clipped_grad's roads")


def _peers(sums: Mapping[str, Mapping[str, Any]]) -> Table:
    column = Column("ratio", "", "lower", ".2f")
    note = "jax_privacy over the better plain gradient in JAX, the others over torch's own."
    return across(sums, PEERS, "ratio", column, "Time of the peers", notes=(note,))


def _of_products(models: list[Mapping[str, Any]], what: str, column: Column) -> Table:
    """Variance, products with a direction and the Gram matrix: a line for each and model."""
    columns = [named(column, name, way) for name, way in _PRODUCT_WAYS.items()]
    rows = []
    for of in models:
        for kind in PRODUCTS:
            ways = [of["contenders"].get(f"{way} {kind}", {}) for way in _PRODUCT_WAYS.values()]
            cells = [way.get(what) for way in ways]
            if what == "temp_bytes":
                cells = [None if cell is None else cell / 2**20 for cell in cells]
            rows.append(Row(f"{of['title']}, {kind}", tuple(cells)))
    note = (
        "Variance, products with one direction (dots) and with one another (gram). The loop "
        "differentiates one sample at a time; its gram keeps all gradients, as vmap(grad) does. "
        "Time of PyTorch's is over its own plain gradient; what it allocates is not counted."
    )
    return Table(
        f"Variance and products: {'time over the plain gradient' if what == 'ratio' else 'memory'}",
        "model",
        tuple(columns),
        tuple(rows),
        (note,),
        Plot(tuple(_PRODUCT_WAYS), line=1.0 if what == "ratio" else None),
        summary=True,
    )
