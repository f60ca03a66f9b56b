"""The pictures of the demo."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from funcgrad._demo._digits import Digits
from funcgrad._demo._training import Recipe, Trained

_BLUE, _ORANGE, _RED, _GREY = "#1f6fb4", "#d9730d", "#b3261e", "#6b6b6b"
_COLUMNS = 8


def draw_training(
    file: Path,
    private: Trained,
    plain: Trained,
    norms: tuple[np.ndarray, np.ndarray],
    misread: np.ndarray,
    recipe: Recipe,
    epsilon: float,
) -> None:
    """Test accuracy over the steps; and the norms after training, beside those before it."""
    figure = Figure(figsize=(11, 4.4), layout="constrained", dpi=110)
    left, right = figure.subplots(1, 2)

    for trained, color, name in (
        (plain, _GREY, "ordinary training"),
        (private, _BLUE, f"private, epsilon {epsilon:.2f}"),
    ):
        label = f"{name}: {trained.accuracies[-1]:.1%} at the end"
        left.plot(trained.steps, [100 * a for a in trained.accuracies], color=color, label=label)
    left.axhline(90, color="black", linewidth=0.8, linestyle=":")
    left.text(recipe.steps, 89, "90%, the goal", va="top", ha="right", fontsize=9)
    left.set(xlabel="step", ylabel="test digits read as labelled (%)", ylim=(0, 100))
    left.set_title("What privacy costs in accuracy", loc="left")
    left.legend(loc="lower right", frameon=False)

    before, after = norms
    lowest = max(min(after.min(), recipe.max_norm / 2), 1e-6)
    bins = np.geomspace(lowest, max(before.max(), after.max()), 41)
    right.hist(
        [after[~misread], after[misread]],
        bins,
        stacked=True,
        color=[_BLUE, _RED],
        label=["trained, read as labelled", "trained, misread"],
    )
    right.axvspan(
        before.min(), before.max(), color=_ORANGE, alpha=0.35, lw=0, label="untrained: all in here"
    )
    above = (after > recipe.max_norm).mean()
    right.axvline(
        recipe.max_norm,
        color="black",
        linewidth=1.2,
        label=f"clipping bound, {above:.0%} of trained above",
    )
    right.set(xscale="log", xlabel="norm of one digit's gradient", ylabel="training digits")
    right.set_ylim(top=1.5 * right.get_ylim()[1])
    right.set_title("How large each digit's gradient is", loc="left")
    right.legend(loc="upper left", frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def draw_largest(
    file: Path, digits: Digits, read: np.ndarray, norms: np.ndarray, rows: int = 2
) -> list[int]:
    """The digits with the largest gradients above ordinary ones; returns the former's indices."""
    order = np.argsort(norms)[::-1]
    largest = order[: rows * _COLUMNS].tolist()
    middle = (len(order) - _COLUMNS) // 2
    ordinary = order[middle : middle + _COLUMNS].tolist()

    figure = Figure(figsize=(12, 1 + 2.05 * (rows + 1)), layout="constrained", dpi=110)
    parts: Any = figure.subfigures(2, 1, height_ratios=[rows + 0.15, 1.15])
    for part, chosen, title in (
        (
            parts[0],
            largest,
            f"The {len(largest)} training digits with the largest gradients "
            "(red: the trained network reads another digit than the label)",
        ),
        (parts[1], ordinary, "To compare: digits whose gradient is of median size"),
    ):
        part.suptitle(title, x=0.005, ha="left", fontsize=13)
        grid = part.subplots(len(chosen) // _COLUMNS, _COLUMNS, squeeze=False).ravel()
        for axes, i in zip(grid, chosen, strict=True):
            _draw_digit(axes, digits, i, int(read[i]), float(norms[i]))
    figure.savefig(file)
    return largest


def _draw_digit(axes: Any, digits: Digits, i: int, read: int, norm: float) -> None:
    label = int(digits.labels[i])
    # Eight by eight squares are hard to read as a digit from near by.
    axes.imshow(digits.images[i, :, :, 0], cmap="gray_r", vmin=0, vmax=1, interpolation="bicubic")
    axes.set(xticks=[], yticks=[])
    color = _RED if read != label else "black"
    axes.set_title(f"label {label}, read {read}", fontsize=10, color=color)
    axes.set_xlabel(f"norm {norm:.2g}\nno. {digits.places[i]}", fontsize=9)
