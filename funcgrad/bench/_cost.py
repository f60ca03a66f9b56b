"""The task ``per-sample``: what clipped per-sample gradients cost on each model."""

import dataclasses
import datetime
import os
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from funcgrad.bench._contenders import PRODUCTS
from funcgrad.bench._measure import Machine
from funcgrad.bench._models import MODELS, SEED
from funcgrad.bench._options import Options
from funcgrad.bench._race import race
from funcgrad.bench._scaling import curves

# A wrong way is off by far more than float32 rounding, and than the few units in the last place
# per sample (3 machine epsilons) that fg.clipped_grad stays below the bound.
TOLERANCE, TOLERANCE_PER_SAMPLE = 1e-4, 5e-7
QUICK_MODELS = ("mlp", "transformer-remat")
# Column headers of the summary, and whose figures stand below.
SUMMARY = {
    "`per_sample(…)` `.clipped_sum`": "fg.per_sample clipped_sum",
    "`clipped_grad`": "fg.clipped_grad",
    "`clipped_grad`, microbatches": "fg.clipped_grad, microbatches",
    "`clipped_grad`, two_pass": "fg.clipped_grad two_pass",
    "norms only": "fg.per_sample norms",
    "`vmap(grad)`, Optax": "vmap(grad), Optax",
    "the same, microbatches": "vmap(grad), Optax, microbatches",
}
_OURS = ("plain", "plain, microbatches", *SUMMARY.values())
_HEADERS = [
    "contender", "time ms", "quartiles ms", "ratio", "temporaries MiB", "peak MiB", "trace s",
    "compile s", "error",
]  # fmt: skip


def per_sample(
    console: Console, options: Options, save: Callable[[dict[str, Any]], object]
) -> tuple[dict[str, Any], bool]:
    """Race all contenders on each model; the figures, and whether all numbers were right."""
    models = options.models or (QUICK_MODELS if options.quick else tuple(MODELS))
    if unknown := [name for name in models if name not in MODELS]:
        raise ValueError(
            f"bench per-sample: a model is one of {', '.join(MODELS)}; got {unknown[0]!r}."
        )
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": dataclasses.asdict(Machine.here()),
        "seed": SEED,
        "turns": options.turns,
        "quick": options.quick,
    }
    results["models"] = _kept(results, options.resume)
    with console.status("") as status:
        for model in models:
            if model not in results["models"]:
                load = os.getloadavg()[0]
                figures = race(
                    model, quick=options.quick, turns=options.turns, progress=status.update
                )
                results["models"][model] = {**figures, "load": load}
            console.print(table(results["models"][model]))
            console.print()
            save(results)
        results["models"] = {name: results["models"][name] for name in models}
        if options.scaling:
            results["scaling"] = curves(options, progress=status.update)
    console.print(Text(legend(results), "dim"))
    return results, right(results)


def _kept(results: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """The models that an interrupted run of the same kind has measured."""
    if earlier is None or any(earlier.get(key) != value for key, value in results.items()):
        return {}
    return dict(earlier["models"])


def right(results: dict[str, Any]) -> bool:
    """Whether every contender's numbers are those of the float64 loop, to rounding."""
    return all(
        figures["error"] <= TOLERANCE + TOLERANCE_PER_SAMPLE * model["batch"]
        for model in results["models"].values()
        for figures in model["contenders"].values()
        if "reason" not in figures
    )


def table(figures: dict[str, Any]) -> Table:
    """A model's contenders, one a line."""
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    out.title = Text(_title(figures), "bold")
    out.add_column("contender", no_wrap=True)
    for header in ("time\nms", "ratio", "temp.\nMiB", "peak\nMiB", "compile\ns", "error"):
        out.add_column(header, justify="right", no_wrap=True)
    for name, row in figures["contenders"].items():
        style = "bold" if name.startswith("fg.") else "dim" if "reason" in row else ""
        if "reason" in row:
            out.add_row(Text(name, style))
            out.add_row(Text(f"  {row['reason']}", "dim italic"))
            continue
        time, _, ratio, temp, peak, _, compiling, error = _cells(row)
        cells = (name, time, ratio, temp, peak, compiling, error)
        out.add_row(*(Text(cell, style) for cell in cells))
    return out


def markdown(results: dict[str, Any]) -> str:
    """The figures as markdown: a summary for the README, then a table of each model.

    Args:
      results: What the task wrote as JSON.

    Returns:
      The text.
    """
    models = {k: m for k, m in results["models"].items() if m.get("asks", "sums") == "sums"}
    products = [m for k, m in results["models"].items() if k not in models]
    head = ["model", "plain: whole / microbatches", *SUMMARY, "goal"]
    rows = []
    for figures in models.values():
        ways = figures["contenders"]
        whole, micro = ways["plain"], ways["plain, microbatches"]
        plain = f"{_ms(whole)}, {_mib(whole)} / {_ms(micro)}, {_mib(micro)}"
        summary = [_summary(ways[name]) if name in ways else "–" for name in SUMMARY.values()]
        rows.append([figures["title"], plain, *summary, _goal(figures, whole)])
    lines = [legend(results)]
    if models:
        peers = [name for name in next(iter(models.values()))["contenders"] if name not in _OURS]
        lines += ["", *_markdown(head, rows)]
        rows = [
            [figures["title"], *(_summary(figures["contenders"][name]) for name in peers)]
            for figures in models.values()
        ]
        words = "Peers: those in JAX to the better plain gradient, those in torch to torch's."
        lines += ["", words, "", *_markdown(["model", *peers], rows)]
    if products:
        lines += ["", *_of_products(products)]
    for figures in results["models"].values():
        lines += ["", f"## {_title(figures)}", ""]
        lines += _markdown(
            _HEADERS, [[name, *_cells(row)] for name, row in figures["contenders"].items()]
        )
    if "scaling" in results:
        lines += ["", "## Scaling", "", *_scaling(results["scaling"])]
    return "\n".join(lines).rstrip() + "\n"


def _of_products(models: list[dict[str, Any]]) -> list[str]:
    """Variance, products with a direction and the Gram matrix: a line for each model and way."""
    ways = {"fg.per_sample": "`per_sample`", "vmap(grad)": "`vmap(grad)`", "loop": "loop"}
    rows = []
    for figures in models:
        of = figures["contenders"]
        for way, title in ways.items():
            cells = [of[f"{way} {kind}"] for kind in PRODUCTS]
            errors = ["" if "reason" in row else f", {row['error']:.0e}" for row in cells]
            sums = [_summary(row) + error for row, error in zip(cells, errors, strict=True)]
            rows.append([figures["title"] if way == "fg.per_sample" else "", title, *sums])
    words = (
        "Variance, products with one direction (`dots`) and with one another (`gram`): time ratio, "
        "temporaries, error. The loop differentiates one sample at a time; its `gram` keeps all "
        "gradients, as `vmap(grad)` does."
    )
    head = ["model", "way", *(f"`{kind}`" for kind in PRODUCTS)]
    return [words, "", *_markdown(head, rows)]


def _scaling(scaling: dict[str, Any]) -> list[str]:
    lines = []
    for curve in scaling["curves"]:
        head = [curve["axis"], "plain ms", "MiB", "clipped_sum ms", "MiB", "ratio", "trace s"]
        rows = [
            [
                str(point["at"]),
                f"{1e3 * point['plain_seconds']:.1f}",
                f"{point['plain_temp_bytes'] / 2**20:.1f}",
                f"{1e3 * point['clipped_seconds']:.1f}",
                f"{point['clipped_temp_bytes'] / 2**20:.1f}",
                f"{point['ratio']:.2f}",
                f"{point['trace_seconds']:.2f}",
            ]
            for point in curve["points"]
        ]
        lines += [f"{curve['title']}:", "", *_markdown(head, rows), ""]
    deep = scaling["deep"]
    return [
        *lines,
        f"Tracing and choosing roads for {deep['depth']} layers: {deep['seconds']:.2f} s.",
    ]


def legend(results: dict[str, Any]) -> str:
    """What the words mean, and where it was measured."""
    machine = Machine(**results["machine"]).describe()
    loads = sorted(figures["load"] for figures in results["models"].values())
    return (
        f"Measured {machine}, shared with other work (load {loads[0]:.1f} to {loads[-1]:.1f}). "
        f"Median of {results['turns']} turns A B C, A B C; each contender in a process of its own, "
        "on the same cores; compilation apart. Ratio: to the better of the plain batch gradient "
        "and its microbatched scan, turn by turn (torch: to torch's plain gradient). "
        "MiB: temporaries of the compiled program; peak: the most its process held, libraries and "
        "compiler included. Error: largest difference from a float64 loop over samples, relative "
        "to the largest entry; fg.clipped_grad stays below the bound on purpose, about 4e-7 per "
        "sample."
    )


def _title(figures: dict[str, Any]) -> str:
    return (
        f"{figures['title']}: {figures['parameters']:,} parameters, "
        f"microbatches of {figures['microbatch']}"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    if "reason" in row:
        return [row["reason"]]
    temp, trace, compiling = (row[k] for k in ("temp_bytes", "trace_seconds", "compile_seconds"))
    seconds = ("–" if s is None else f"{s:.1f}" for s in (trace, compiling))
    return [
        _ms(row).removesuffix(" ms"),
        f"{1e3 * row['low_seconds']:.1f}–{1e3 * row['high_seconds']:.1f}",
        "–" if row["ratio"] is None else f"{row['ratio']:.2f}",
        "–" if temp is None else f"{temp / 2**20:.1f}",
        f"{row['peak_bytes'] / 2**20:.0f}",
        *seconds,
        f"{row['error']:.0e}",
    ]


def _summary(row: dict[str, Any]) -> str:
    if "reason" in row:
        return row["reason"] if "not run" in row["reason"] else "–"
    memory = "" if row["temp_bytes"] is None else f", {_mib(row)}"
    return ("–" if row["ratio"] is None else f"{row['ratio']:.2f}") + memory


def _goal(figures: dict[str, Any], whole: dict[str, Any]) -> str:
    if figures["time_goal"] is None:
        return "runs"
    most = figures["memory_goal"] * whole["temp_bytes"] / 2**20 if "temp_bytes" in whole else 0
    return f"≤ {figures['time_goal']}, {most:.1f} MiB"


def _ms(row: dict[str, Any]) -> str:
    return "–" if "reason" in row else f"{1e3 * row['median_seconds']:.1f} ms"


def _mib(row: dict[str, Any]) -> str:
    return "–" if "reason" in row else f"{row['temp_bytes'] / 2**20:.1f} MiB"


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    rows = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    line = lambda cells: f"| {' | '.join(cells)} |"
    return [line(head), line(["---", *["---:"] * (len(head) - 1)]), *map(line, rows)]
