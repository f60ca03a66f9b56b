import dataclasses
import functools
import json
import os
import platform
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from funcgrad import bench
from funcgrad.bench import _cost, measure
from funcgrad.bench import _per_sample as per_sample
from funcgrad.bench import _worker as worker
from funcgrad.bench._models import MODELS
from funcgrad.bench._options import Options
from funcgrad.bench._per_sample import Problem, Reference, Road
from funcgrad.bench._race import not_run, race
from funcgrad.bench._worker import CONTENDERS, RACERS, Session

X = jnp.arange(8.0)


@pytest.fixture
def console():
    return Console(record=True, width=80, force_terminal=False)


def test_figures_are_in_the_order_of_the_contenders_and_hold_their_outputs():
    figures = measure({"b": lambda x: x + 1, "a": lambda x: x * 2}, (X,), rounds=3)
    assert [timing.name for timing in figures.timings] == ["b", "a"]
    assert jnp.array_equal(figures["a"].output, X * 2)
    for timing in figures.timings:
        assert 0 < timing.low_seconds <= timing.median_seconds <= timing.high_seconds
        assert timing.compile_seconds > 0 and timing.temp_bytes >= 0 and timing.ratio > 0


def test_ratio_of_the_named_baseline_is_one():
    figures = measure({"a": jnp.sin, "b": jnp.cos}, (X,), baseline="b", rounds=1)
    assert figures.baseline == "b" and figures["b"].ratio == 1


def test_memory_is_that_of_the_intermediate_values():
    # An outer product that is reduced over both axes in turn cannot be fused away.
    big = {"sorted": lambda x: jnp.sort(jnp.outer(x, x), axis=None)[0], "sum": jnp.sum}
    figures = measure(big, (jnp.arange(256.0),), rounds=1)
    assert figures["sorted"].temp_bytes >= 256 * 256 * 4 > figures["sum"].temp_bytes


def test_contenders_run_in_turns():
    calls = []

    def noting(name):
        def fun(x):
            jax.debug.callback(lambda: calls.append(name), ordered=True)
            return x + 1

        return fun

    measure({"a": noting("a"), "b": noting("b")}, (X,), rounds=3)
    jax.effects_barrier()
    assert calls[2:] == ["a", "b"] * 4


def test_figures_are_json_and_name_no_place():
    figures = measure({"a": jnp.sin}, (X,), rounds=2)
    text = json.dumps(figures.to_json())
    back = json.loads(text)
    assert back["machine"]["versions"]["jax"] == jax.__version__
    assert back["machine"]["cores"] >= 1
    assert set(back["timings"][0]) >= {"name", "median_seconds", "temp_bytes", "ratio"}
    assert platform.node() not in text and "/" not in json.dumps(back["machine"])


@pytest.mark.parametrize(
    "contenders, options, words",
    [
        ({}, {}, "contenders are functions by name; got none"),
        ({"a": jnp.sin}, {"baseline": "b"}, "baseline is a contender; got 'b'. Use one of 'a'"),
        ({"a": jnp.sin}, {"rounds": 0}, "rounds is 1 or more; got 0"),
    ],
)
def test_measure_refuses(contenders, options, words):
    with pytest.raises(ValueError, match=words):
        measure(contenders, (X,), **options)


@pytest.fixture
def fast_compiler():
    """Compile sooner to slower code, where nothing but the compiler takes time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def linear_problem():
    # The gradient of sample i is its input.
    xs = jnp.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    return Problem("linear", lambda w, xs, ys: (xs @ w).sum(), jnp.ones(2), xs, jnp.zeros(3))


def test_reference_is_the_clipped_sum_in_float64():
    reference = Reference.of(linear_problem())
    assert reference.norms.dtype == np.float64
    np.testing.assert_allclose(reference.norms, [5, 0.5, 0], rtol=1e-7)
    np.testing.assert_allclose(reference.total(1.0)[0], [0.9, 1.2], rtol=1e-7)
    np.testing.assert_allclose(reference.total(None)[0], [3.3, 4.4], rtol=1e-7)


def test_bound_is_the_median_norm_unless_one_is_given():
    report = per_sample.compare_roads(linear_problem(), chunk_size=1, rounds=1)
    assert report.max_norm == pytest.approx(0.5) and report.right


def test_road_with_a_wrong_sum_is_found(monkeypatch, console, tmp_path):
    def wrong(problem, max_norm, chunk_size):
        norms = jnp.array([5.0, 0.5, 0.0])
        return [
            Road("plain", "", lambda w, xs, ys: (xs.sum(0), None), clips=False),
            Road("wrong", "", lambda w, xs, ys: (1.01 * max_norm * xs.sum(0), norms)),
        ]

    monkeypatch.setattr(per_sample, "all_roads", wrong)
    report = per_sample.compare_roads(linear_problem(), max_norm=1.0, chunk_size=1, rounds=1)
    assert report.norm_errors == {"plain": None, "wrong": pytest.approx(0, abs=1e-6)}
    assert report.sum_errors["plain"] < 1e-6 < 1 < report.sum_errors["wrong"]
    assert not report.right


def test_road_with_a_nan_is_wrong():
    report = per_sample.compare_roads(linear_problem(), chunk_size=1, rounds=1)
    errors = {**report.sum_errors, report.roads[0].name: float("nan")}
    assert not dataclasses.replace(report, sum_errors=errors).right


@pytest.mark.parametrize(
    "model, name",
    [
        ("lstm", "fg.per_sample clipped_sum"),
        ("embedding", "vmap(grad), Optax, microbatches"),
        ("mlp-64", "fg.per_sample variance"),
        ("mlp-64", "vmap(grad) dots"),
        ("mlp-64", "loop gram"),
        ("mlp-64", "loop variance"),
    ],
)
def test_contender_agrees_with_the_float64_loop(model, name, tmp_path, fast_compiler):
    session = Session(model, quick=True)
    about = session.reference(tmp_path / "reference.npz")
    session.prepare(name, about["max_norm"])
    assert session.check(tmp_path / "reference.npz")["error"] < 1e-5


@pytest.mark.torch
@pytest.mark.parametrize(
    "model, name",
    [
        ("mlp", "torch: plain"),
        ("cnn-64", "torch: vmap(grad)"),
        ("transformer-t128", "torch: plain"),
        ("lstm", "torch: vmap(grad)"),
    ],
)
def test_peer_in_torch_is_the_same_model(model, name, tmp_path, fast_compiler):
    pytest.importorskip("torch")
    session = Session(model, quick=True)
    about = session.reference(tmp_path / "reference.npz")
    session.prepare(name, about["max_norm"])
    assert session.check(tmp_path / "reference.npz")["error"] < 1e-5


def test_reference_of_repeated_samples_is_that_of_the_whole_batch(fast_compiler):
    task = MODELS["mlp"].quick()
    reference = worker.Reference.of(task)
    xs, ys = task.take(reference.repeats).batch
    problem = Problem("mlp", lambda p, xs, ys: task.loss(p, xs[0], ys[0]), task.params, xs, ys)
    whole = Reference.of(problem)
    np.testing.assert_allclose(reference.norms[reference.repeats], whole.norms, rtol=1e-12)
    for leaf, right in zip(reference.sums["clipped"], whole.total(reference.max_norm), strict=True):
        np.testing.assert_allclose(leaf, right, rtol=1e-10, atol=1e-12)
    assert reference.error("norms", whole.norms) < 1e-12
    assert reference.error("norms", 1.01 * whole.norms) == pytest.approx(0.01)


def test_contender_that_would_fill_the_memory_is_not_run():
    task = MODELS["embedding"].make()
    assert not_run("vmap(grad), Optax", "embedding", task) == "not run: 298 GiB of gradients"
    small = dataclasses.replace(task, chunk=10)
    assert "in microbatches" in not_run("vmap(grad), Optax, microbatches", "embedding", small)
    assert not_run("fg.clipped_grad", "embedding", task) is None


def test_absent_peer_is_named(monkeypatch):
    peer = dataclasses.replace(CONTENDERS["jax_privacy"], needs="no_such_package")
    assert peer.absent() == "absent: no_such_package is not installed"
    monkeypatch.setitem(CONTENDERS, "jax_privacy", peer)
    assert not_run("jax_privacy", "mlp", MODELS["mlp"].quick()) == peer.absent()


def test_worker_says_what_failed():
    served = worker.Worker("mlp", True, sorted(os.sched_getaffinity(0)))
    with pytest.raises(worker.WorkerError, match="failed: KeyError: 'nobody'"):
        served.ask("prepare", "nobody", 1.0)
    assert served.ask("peak") > 2**20
    with pytest.raises(worker.WorkerError, match="stopped: reference took more than 0 s"):
        served.ask("reference", "nowhere", timeout=0.0)
    served.close()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of three contenders on one model, and the folder of the report."""
    out = tmp_path_factory.mktemp("bench")
    names = ["plain", "plain, microbatches", "fg.per_sample clipped_sum", "jax_privacy"]
    absent = dataclasses.replace(CONTENDERS["jax_privacy"], needs="no_such_package")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONTENDERS, "jax_privacy", absent)
        patch.setattr(_cost, "race", functools.partial(race, contenders=names))
        status = bench.run(
            out / "new", ["per-sample"], quick=True, models=["mlp"], console=Console(quiet=True)
        )
    file = out / "new" / f"per_sample_{jax.default_backend()}.json"
    return status, json.loads(file.read_text()), file.with_suffix(".md").read_text()


def test_race_gives_the_figures_of_each_contender(results):
    status, figures, _ = results
    assert status == 0 and figures["quick"] and figures["turns"] == 1
    ways = figures["models"]["mlp"]["contenders"]
    assert ways["jax_privacy"]["reason"].startswith("absent")
    for name, row in ways.items():
        if "reason" not in row:
            assert row["error"] < 1e-5 and row["peak_bytes"] > row["temp_bytes"] > 0
            assert len(row["seconds"]) == 1 and row["compile_seconds"] > 0, name
    assert min(ways[name]["ratio"] for name in ("plain", "plain, microbatches")) == 1


def test_resumed_run_keeps_what_was_measured_the_same_way():
    kind = {"date": "today", "turns": 5, "machine": {"cores": 2}}
    earlier = {**kind, "models": {"mlp": {"title": "MLP"}}}
    assert _cost._kept(kind, earlier) == earlier["models"]
    assert _cost._kept({**kind, "turns": 1}, earlier) == {} == _cost._kept(kind, None)


def test_race_names_no_place(results):
    _, figures, text = results
    assert not re.search(rf"\b{re.escape(platform.node())}\b", json.dumps(figures) + text)
    assert "/" not in json.dumps(figures["machine"])


def test_markdown_has_a_row_for_each_model_and_each_contender(results):
    _, figures, text = results
    assert "| mlp at toy size | " in text and "| jax_privacy | absent: " in text
    assert "| fg.per_sample clipped_sum | " in text
    assert bench.TASKS["per-sample"].markdown(figures) == text
    widths = {line.count("|") for line in text.split("## ")[1].splitlines() if "|" in line}
    assert len(widths) == 1


def test_markdown_has_a_table_of_variance_and_products(results):
    _, figures, _ = results
    row = figures["models"]["mlp"]["contenders"]["fg.per_sample clipped_sum"]
    ways = dict.fromkeys(RACERS["products"], row)
    other = {**figures["models"]["mlp"], "asks": "products", "contenders": ways}
    text = _cost.markdown({**figures, "models": {**figures["models"], "mlp-64": other}})
    assert "| model | way | `variance` | `dots` | `gram` |" in text
    assert text.count("| mlp at toy size | `per_sample` | ") == 1
    assert "| loop gram | " in text


def test_curves_are_drawn(tmp_path, monkeypatch):
    from funcgrad.bench import _scaling

    point = {"at": 1, "plain_seconds": 1, "clipped_seconds": 2}
    point |= {"plain_temp_bytes": 2**20, "clipped_temp_bytes": 2**21}
    lines = [{"axis": "batch", "title": "MLP", "points": [point, {**point, "at": 2}]}]
    _scaling.draw(lines, Options(tmp_path))
    assert next(tmp_path.glob("*.png")).read_bytes().startswith(b"\x89PNG")


def test_bench_fails_when_a_task_was_wrong(monkeypatch, console, tmp_path):
    from funcgrad.bench import _report

    bad = _report.BenchTask(lambda console, options, save: ({}, False), lambda figures: "")
    monkeypatch.setattr(_report, "TASKS", {"bad": bad})
    assert bench.run(tmp_path, console=console) == 1
    assert "bad: some numbers are wrong" in console.export_text()


@pytest.mark.parametrize(
    "tasks, options, words",
    [
        (["x"], {}, "a task is one of per-sample, checkpointing; got 'x'"),
        ([], {"models": ["x"]}, "a model is one of mlp, .*; got 'x'"),
        ([], {"turns": 0}, "turns is 1 or more; got 0"),
    ],
)
def test_bench_refuses(tasks, options, words, tmp_path, console):
    with pytest.raises(ValueError, match=words):
        bench.run(tmp_path, tasks, console=console, **options)
