"""The README's table of what per-sample gradients cost, and of where funcgrad loses."""

from collections.abc import Mapping, Sequence
from typing import Any

from funcgrad import _markers
from funcgrad.bench._page import Section, facts
from funcgrad.bench._tables import losses

MEMORY = 1.3
"""Temporaries over those of the plain gradient above which they are bold."""
_HEAD = (
    "model",
    "plain gradient, whole / microbatches",
    "`per_sample(...)` `.clipped_sum`",
    "`clipped_grad`",
    "the same, microbatches",
    "norms only",
    "`vmap(grad)` and Optax, whole / microbatches",
)


def update_readme(text: str, sections: Sequence[Section]) -> str:
    """Replace what stands between the cost table's markers in a README.

    Args:
      text: The README, with a line ``<!-- cost-table:begin -->`` and, after it, a line
        ``<!-- cost-table:end -->``.
      sections: Tasks with their figures, those of ``per-sample`` among them.

    Returns:
      The text with the tables of these figures.

    Raises:
      ValueError: A marker is absent, or there are no figures of ``per-sample``.
    """
    of = {section.name: section for section in sections}
    if "per-sample" not in of:
        raise ValueError(
            f"update_readme: the table is of the task per-sample; got {', '.join(of) or 'none'}."
        )
    figures = of["per-sample"].figures
    said = dict(facts(figures))
    measured = (
        f"{said['date']}; {said['machine']}, shared with other work; {said['versions']}; float32; "
        f"the median of {said['turns']} turns."
    )
    content = "\n".join([measured, "", *_costs(figures), "", *_behind(sections)])
    return _markers.replace(text, "cost-table", f"{content}\n")


def _costs(figures: Mapping[str, Any]) -> list[str]:
    sums = [m for m in figures["models"].values() if m.get("asks") == "sums"]
    return [*_header(_HEAD), *(_line(_cells(of)) for of in sums)]


def _cells(of: Mapping[str, Any]) -> list[str]:
    contenders = of["contenders"]
    plain, whole = contenders["plain"], "vmap(grad), Optax"
    time = lambda name: f"{_three(contenders[name]['median_seconds'] * 1e3)} ms"
    memory = lambda name: f"{_three(contenders[name]['temp_bytes'] / 2**20)} MiB"

    def ours(name: str) -> str:
        ratio, nbytes = contenders[name]["ratio"], contenders[name]["temp_bytes"]
        parts = {
            f"{ratio:.2f}": round(ratio, 2) > 1,
            memory(name): nbytes > MEMORY * plain["temp_bytes"],
        }
        return ", ".join(f"**{text}**" if bold else text for text, bold in parts.items())

    def theirs() -> str:
        if "reason" in contenders[whole]:
            return str(contenders[whole]["reason"])
        ratios = [contenders[name]["ratio"] for name in (whole, f"{whole}, microbatches")]
        return f"{_three(ratios[0])}, {memory(whole)} / {_three(ratios[1])}"

    return [
        of["title"],
        f"{time('plain')}, {memory('plain')} / {time('plain, microbatches')}",
        ours("fg.per_sample clipped_sum"),
        ours("fg.clipped_grad"),
        ours("fg.clipped_grad, microbatches"),
        ours("fg.per_sample norms"),
        theirs(),
    ]


def _three(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _behind(sections: Sequence[Section]) -> list[str]:
    """Where the best of ours takes longer; each task's own tables tell of all else."""
    found = [
        (section.name, loss)
        for section in sections
        for loss in losses(section.tables)
        if loss.column.name == "time"
    ]
    lines = [
        _line(
            [
                f"{task}: {loss.table.title}",
                loss.group,
                f"{loss.factor:.2f}",
                loss.theirs.name,
                loss.table.why or "–",
            ]
        )
        for task, loss in sorted(found, key=lambda pair: -pair[1].factor)
    ]
    head = ("where funcgrad takes longer", "for", "times the best", "which is", "why")
    return [*_header(head), *lines]


def _header(names: Sequence[str]) -> list[str]:
    return [_line(names), _line(["---", *["---:"] * (len(names) - 1)])]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
