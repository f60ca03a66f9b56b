"""The demo's four parts, what they print, and the files that they leave."""

import dataclasses
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from funcgrad._demo import _digits, _pictures, _training
from funcgrad._demo._digits import Digits
from funcgrad._demo._training import Recipe, Sampling, Trained
from funcgrad.bench import Machine
from funcgrad.bench._per_sample import Problem, Report, compare_roads

_GOAL = 0.9


def run(out: Path, quick: bool = False, *, console: Console | None = None) -> int:
    """Run the four parts, and write ``demo.json``, ``parity.json`` and two pictures to ``out``.

    Args:
      out: A folder; made if absent.
      quick: Whether to do a few steps only, which reach no accuracy.
      console: Where to print; the terminal if ``None``.

    Returns:
      0; or 1 when a road's numbers are wrong, the accuracy is not reached, or a concept differs.

    Example:
      >>> from pathlib import Path
      >>> run(Path("funcgrad-demo"))  # doctest: +SKIP
      0
    """
    console = console or Console()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(steps=4, expected_batch=8) if quick else Recipe()
    digits = _digits.load()
    seconds: dict[str, float] = {}

    report = _timed(seconds, "roads", _show_roads, digits[0], recipe, quick, console)
    training, private, plain = _timed(seconds, "training", _train, digits, recipe, console)
    largest = _timed(
        seconds,
        "pictures",
        _show_largest,
        digits[0],
        recipe,
        training,
        private,
        plain,
        out,
        console,
    )
    parity_status, parity = _timed(seconds, "parity", _show_parity, out, quick, console)

    reached = quick or training["test_accuracy"] > _GOAL
    figures = {
        "quick": quick,
        "machine": dataclasses.asdict(Machine.here()),
        "roads": report.to_json(),
        "training": training,
        "largest_gradients": largest,
        "parity": parity,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }
    (out / "demo.json").write_text(json.dumps(figures, indent=2) + "\n")
    console.rule("Files", align="left")
    for name, meaning in (
        ("training.png", "test accuracy over the steps, and the norms of all gradients"),
        ("largest_gradients.png", "the digits with the largest gradients"),
        ("demo.json", "all figures above"),
        ("parity.json", "the concept table with its evidence"),
    ):
        console.print(Text.assemble((f"{out / name}", "bold"), f": {meaning}"))
    if not report.right:
        console.print(Text("A road's numbers are wrong: see the errors in part 1.", "bold red"))
    if not reached:
        console.print(Text(f"The test accuracy is not above {_GOAL:.0%}.", "bold red"))
    return int(not report.right or not reached or parity_status != 0)


def _timed(seconds: dict[str, float], name: str, call: Any, *args: Any) -> Any:
    start = time.perf_counter()
    result = call(*args)
    seconds[name] = time.perf_counter() - start
    return result


def _show_roads(digits: Digits, recipe: Recipe, quick: bool, console: Console) -> Report:
    console.rule("1  Norms and clipped sum of per-sample gradients, by every road", align="left")
    console.print(
        "Private training needs the norm of each digit's gradient, and the sum of the gradients "
        f"after each is clipped to norm {recipe.max_norm}. What does that cost, beside the plain "
        "gradient of ordinary training?\n",
        highlight=False,
    )
    batch = 8 if quick else 256
    problem = Problem(
        "Two convolutions and a dense layer on 8×8 digits",
        _digits.loss_of_batch,
        _digits.new_params(recipe.seed),
        digits.images[:batch],
        digits.labels[:batch],
    )
    with console.status("The float64 loop") as status:
        report = compare_roads(
            problem,
            max_norm=recipe.max_norm,
            chunk_size=None if quick else batch // 8,
            rounds=3 if quick else 15,
            progress=status.update,
        )
    report.show(console)
    console.print()
    report.explain(console)
    console.print()
    return report


def _train(
    digits: tuple[Digits, Digits], recipe: Recipe, console: Console
) -> tuple[dict[str, Any], Trained, Trained]:
    console.rule("2  Training with clipped and noised per-sample gradients", align="left")
    sampling = Sampling.of(recipe, len(digits[0]))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("test accuracy {task.fields[accuracy]:.1%}"),
        TimeElapsedColumn(),
    )
    trained = {}
    with Progress(*columns, console=console) as bars:
        for name, private in (("private", True), ("ordinary, to compare", False)):
            bar = bars.add_task(name, total=recipe.steps, accuracy=0.0)
            trained[private] = _training.train(
                recipe,
                sampling,
                digits,
                private=private,
                progress=lambda step, accuracy, bar=bar: bars.update(
                    bar, completed=step, accuracy=accuracy
                ),
            )
    figures = {
        **dataclasses.asdict(recipe),
        "train_digits": len(digits[0]),
        "test_digits": len(digits[1]),
        "test_accuracy": trained[True].accuracies[-1],
        "test_accuracy_without_privacy": trained[False].accuracies[-1],
        "epsilon": _training.epsilon(recipe, sampling),
        "accountant": "dp-accounting, privacy loss distribution",
        "neighbours": "one digit added or removed",
        "sampling": "Poisson",
        "sampling_rate": sampling.rate,
        "padded_batch": sampling.capacity,
        "overflow_probability": sampling.overflow,
    }
    console.print(_privacy(figures), highlight=False)
    return figures, trained[True], trained[False]


def _privacy(figures: dict[str, Any]) -> str:
    deviation = figures["noise_multiplier"] * figures["max_norm"]
    return "\n".join(
        (
            f"\n[bold]Test accuracy {figures['test_accuracy']:.1%} with epsilon "
            f"{figures['epsilon']:.2f} at delta {figures['delta']:g}[/bold]; without privacy "
            f"{figures['test_accuracy_without_privacy']:.1%} after as many steps.",
            f"Each of the {figures['steps']} steps draws every digit by its own coin, with "
            f"probability {figures['sampling_rate']:.4f} (Poisson sampling: "
            f"{figures['expected_batch']} of {figures['train_digits']} on average, padded to "
            f"{figures['padded_batch']}), clips each gradient to norm {figures['max_norm']:g}, "
            f"sums, and adds Gaussian noise of standard deviation {deviation:g}, "
            f"{figures['noise_multiplier']:g} times the bound, to each entry.",
            "Epsilon is for one digit added or removed, by dp-accounting from the privacy loss "
            "distribution. It covers the trained weights, were the seed secret and the noise "
            "exactly Gaussian (it is drawn in float32). It covers neither the choice of these "
            "settings nor the norms and the pictures below, which look at the training digits.\n",
        )
    )


def _show_largest(
    digits: Digits,
    recipe: Recipe,
    training: dict[str, Any],
    private: Trained,
    plain: Trained,
    out: Path,
    console: Console,
) -> list[dict[str, Any]]:
    console.rule("3  The digits with the largest gradients", align="left")
    images, labels = digits.images, digits.labels
    before, after = (
        np.asarray(_digits.gradient_norms(params, images, labels))
        for params in (_digits.new_params(recipe.seed), private.params)
    )
    read = np.asarray(_digits.predict(private.params, images))
    _pictures.draw_training(
        out / "training.png",
        private,
        plain,
        (before, after),
        read != labels,
        recipe,
        training["epsilon"],
    )
    chosen = _pictures.draw_largest(out / "largest_gradients.png", digits, read, after)
    largest = [
        {
            "place": int(digits.places[i]),
            "label": int(digits.labels[i]),
            "read": int(read[i]),
            "norm": float(after[i]),
        }
        for i in chosen
    ]
    wrong = sum(digit["label"] != digit["read"] for digit in largest)
    first = largest[0]
    console.print(
        f"In the trained network the {len(largest)} training digits with the largest gradients "
        f"have norms from {largest[-1]['norm']:.3g} to {first['norm']:.3g}; the median of all "
        f"{len(digits)} is {np.median(after):.2g}. The network misreads {wrong} of the "
        f"{len(largest)}; the largest, no. {first['place']} of the data set, is labelled "
        f"{first['label']} and read as {first['read']}.\n",
        highlight=False,
    )
    return largest


def _show_parity(out: Path, quick: bool, console: Console) -> tuple[int, dict[str, int]]:
    from funcgrad import parity

    console.rule("4  Every concept of PyTorch's autograd, beside this", align="left")
    if importlib.util.find_spec("torch") is None:
        console.print(
            "torch is not installed, so that nothing can be compared: every built row below is "
            "skipped. With it the table runs both sides of each: pip install 'funcgrad[torch]'"
        )
    file = out / "parity.json"
    only = ("stopping",) if quick else ()
    status = parity.run(*only, json_path=file, console=console)
    return status, json.loads(file.read_text())["counts"]
