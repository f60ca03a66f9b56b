import dataclasses
import json
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from funcgrad import bench
from funcgrad.bench import _per_sample as per_sample
from funcgrad.bench import measure
from funcgrad.bench._per_sample import Problem, Reference, Road

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


def test_quick_bench_writes_its_figures_and_every_road_is_right(console, tmp_path, fast_compiler):
    assert bench.run(tmp_path / "new", quick=True, console=console) == 0
    figures = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert figures["quick"] and set(figures["tasks"]) == set(bench.TASKS)
    problems = figures["tasks"]["per-sample"]["problems"]
    assert [problem["problem"].split()[0] for problem in problems] == ["MLP", "CNN"]
    for problem in problems:
        assert {"parameters", "batch", "max_norm", "machine"} <= set(problem)
        for timing in problem["timings"]:
            assert timing["sum_error"] < 1e-4
            assert timing["name"].startswith("plain") or timing["norm_error"] < 1e-5
    text = console.export_text()
    assert "fg.clipped_grad" in text and "median of" in text


def test_bench_fails_when_a_task_was_wrong(monkeypatch, console, tmp_path):
    from funcgrad.bench import _report

    monkeypatch.setattr(_report, "TASKS", {"bad": lambda console, quick: ({}, False)})
    assert bench.run(tmp_path, console=console) == 1
    assert "bad: some numbers are wrong" in console.export_text()
