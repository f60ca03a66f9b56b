import dataclasses
import functools
import inspect
import io
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
from funcgrad.bench import _checkpointing, _cost, _function, _problem, _scaling, measure
from funcgrad.bench import _per_sample as per_sample
from funcgrad.bench import _report as report
from funcgrad.bench import _training_step as training_step
from funcgrad.bench import _worker as worker
from funcgrad.bench._lora import LORA, lora
from funcgrad.bench._models import MODELS, Task
from funcgrad.bench._options import Options
from funcgrad.bench._per_sample import Problem, Reference, Road
from funcgrad.bench._per_sample_race import PerSample
from funcgrad.bench._race import race

X = jnp.arange(8.0)
LOOPS = ("loop variance", "loop dots", "loop gram")


@pytest.fixture
def console():
    return Console(record=True, width=80, force_terminal=False, file=io.StringIO())


# measure: functions in one process


def test_figures_are_in_the_order_of_the_contenders_and_hold_their_outputs():
    figures = measure({"b": lambda x: x + 1, "a": lambda x: x * 2}, (X,), baseline="a", rounds=3)
    assert [timing.name for timing in figures.timings] == ["b", "a"]
    assert figures.baseline == "a" and figures["a"].ratio == 1
    assert jnp.array_equal(figures["a"].output, X * 2)
    for timing in figures.timings:
        assert 0 < timing.low_seconds <= timing.median_seconds <= timing.high_seconds
        assert timing.compile_seconds > 0 and timing.temp_bytes >= 0 and timing.ratio > 0


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


# the demo's roads


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


def test_bound_is_the_median_norm_and_a_nan_is_wrong():
    report = per_sample.compare_roads(linear_problem(), chunk_size=None, rounds=1)
    assert report.max_norm == pytest.approx(0.5) and report.right
    errors = {**report.sum_errors, report.roads[0].name: float("nan")}
    assert not dataclasses.replace(report, sum_errors=errors).right


def test_road_with_a_wrong_sum_is_found(monkeypatch):
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


# contenders: each beside its problem's float64 numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("right")


def errors(make, names, folder):
    """Of contenders, as a worker finds them."""
    session = worker.Session(make)
    file = folder / "right.npz"
    session.reference(file)
    found = {}
    for name in names:
        session.prepare(name, file)
        found[name] = session.check()["error"]
    return found


def small_task():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
    loss = lambda p, x, y: jnp.sum(jnp.tanh(x @ p["w"] + p["b"] - y) ** 2)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return Task(loss, params, (draw(8, 3), draw(8, 2)), chunk=2)


# A contender that is wrong fails the benchmark itself; here are those that this package writes.
@pytest.mark.parametrize(
    "asks, names",
    [
        (
            "sums",
            [
                "plain, microbatches",
                "fg.per_sample clipped_sum",
                "fg.clipped_grad, microbatches",
                "vmap(grad), Optax, microbatches",
            ],
        ),
        ("products", ["fg.per_sample dots", "vmap(grad) variance", *LOOPS]),
    ],
)
def test_per_sample_contenders_agree_with_the_loop(asks, names, folder):
    found = errors(lambda: PerSample(small_task, "small", asks=asks), names, folder)
    assert max(found.values()) < 1e-5, found


def test_reference_is_that_of_the_whole_batch_of_repeats():
    problem = PerSample(small_task, "small")
    right = problem.reference()
    _, *batch = problem.trial(right)
    task = problem.task
    whole = Problem("", lambda p, xs, ys: task.loss(p, xs[0], ys[0]), task.params, *batch)
    reference = Reference.of(whole)
    bound = float(right["bound"][0])
    np.testing.assert_allclose(right["norms"][0], reference.norms, rtol=1e-12)
    for leaf, expected in zip(right["clipped"], reference.total(bound), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-10, atol=1e-12)
    assert _problem.error(1.01 * reference.norms, right["norms"]) == pytest.approx(0.01)


def test_error_is_that_of_the_worst_leaf_and_keeps_a_nan():
    right = [np.array([1.0, 2.0]), np.zeros(2)]
    assert _problem.error([np.array([1.0, 2.2]), np.zeros(2)], right) == pytest.approx(0.1)
    assert np.isnan(_problem.error([np.array([1.0, np.nan]), np.ones(2)], right))
    assert np.isnan(_problem.error([np.ones(2), np.array([np.nan, 0])], right))


@pytest.mark.torch
@pytest.mark.parametrize("model", ["cnn-64", "transformer-t128", "lstm", "embedding", "lora"])
def test_peer_in_torch_is_the_same_model(model, folder):
    make = LORA[model] if model in LORA else functools.partial(PerSample.of, model)
    names = ["torch: plain"]
    if model == "transformer-t128":
        names += ["torch: vmap(grad)", "torch: vmap(grad), microbatches"]
    found = errors(functools.partial(make, True), names, folder)
    assert max(found.values()) < 1e-5, found


@pytest.mark.torch
def test_products_in_torch_are_those_of_the_rows(folder):
    names = [f"torch: vmap(grad) {kind}" for kind in ("variance", "dots", "gram")]
    make = functools.partial(PerSample.of, "embedding-products", True)
    found = errors(make, names, folder)
    assert max(found.values()) < 1e-5, found


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::UserWarning")  # as in the processes that are timed
@pytest.mark.parametrize("package", ["opacus", "backpack"])
def test_installed_peers_agree_with_the_loop(package, folder):
    pytest.importorskip(package)
    for model in ("mlp", "mlp-64"):
        make = functools.partial(PerSample.of, model, True)
        names = [name for name, way in make().contenders.items() if way.needs == package]
        found = errors(make, names, folder)
        assert all(error < 1e-5 for error in found.values()), found


@pytest.mark.torch
def test_peer_stays_away_from_what_it_has_no_adapter_for():
    scanned = PerSample.of("transformer-scan", True)
    assert scanned.not_run("torch: plain") == "no adapter for this model"
    assert PerSample.of("mlp", True).not_run("torch: plain") is None


@pytest.mark.parametrize("name", ["elementwise", "matmul"])
def test_rules_agree_with_what_jax_derives(name, folder):
    ways = _function.CONTENDERS.items()
    names = [n for n, way in ways if way.kind == "rule" and not way.absent()]
    found = errors(functools.partial(_function.Rule, name, True), names, folder)
    assert max(found.values()) < 1e-5, found


def test_chain_applies_its_rule_to_its_own_result():
    rule = _function.Rule("chain", True)
    assert rule.chain(lambda x: x + 1, [0]) == _function.DEPTH


@pytest.mark.parametrize("name", ["clip-leaves", "accumulate-mlp"])
def test_steps_agree_with_float64(name, folder):
    make = functools.partial(training_step.MODELS[name], True)
    left_out = ("torch: plain", "plain", "fg.clip_grad_norm", "scan by hand")
    ways = make().contenders.items()
    names = [n for n, way in ways if n not in left_out and not way.absent()]
    found = errors(make, names, folder)
    assert found and max(found.values()) < 1e-5, found


def test_contender_that_would_fill_the_memory_is_not_run():
    problem = PerSample(small_task, "small", memory_limit=8 * 8 * 4)
    assert problem.not_run("fg.clipped_grad") is None
    assert problem.not_run("vmap(grad), Optax") is None
    problem.memory_limit -= 1
    assert problem.not_run("vmap(grad), Optax") == "not run: 0 GiB of gradients"
    assert problem.not_run("vmap(grad), Optax, microbatches") is None
    problem.task = dataclasses.replace(problem.task, batch=(np.zeros((2**32, 0)),))
    assert "in microbatches" in problem.not_run("vmap(grad), Optax, microbatches")


def test_adapters_alone_are_differentiated():
    task = lora(2, length=4, width=8, depth=1, vocabulary=16, rank=1)
    assert task.n_params == sum(m + n for m, n in [(8, 24), (8, 8), (8, 32), (32, 8)])
    assert jax.eval_shape(task.loss, task.params, task.batch[0][0]).shape == ()


def test_microbatches_divide_each_batch():
    for name, model in MODELS.items():
        batch = model.make.args[0]
        default = inspect.signature(model.make.func).parameters.get("chunk")
        chunk = model.make.keywords.get("chunk", default and default.default) or 16
        assert batch % chunk == 0, name


def test_curves_are_over_sizes_that_microbatches_divide():
    for name, of in _scaling.CURVES.items():
        assert list(of.sizes) == sorted(of.sizes)
        task = _scaling.problem(name, of.sizes[0], True).task
        assert task.size % task.chunk == 0, name


# workers, and the race


def test_worker_says_what_failed():
    cores = sorted(os.sched_getaffinity(0))
    served = worker.Worker(functools.partial(_function.Rule, "elementwise", True), cores)
    with pytest.raises(worker.WorkerError, match="failed: KeyError: 'nobody'"):
        served.ask("prepare", "nobody", None)
    assert served.ask("peak") > 2**20
    with pytest.raises(worker.WorkerError, match="stopped: reference took more than 0 s"):
        served.ask("reference", "nowhere", timeout=0.0)
    with pytest.raises(worker.WorkerError, match="failed: its process was killed, .* at peak"):
        served.ask("peak")
    served.close()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of three contenders on one rule, and the folder of the report."""
    out = tmp_path_factory.mktemp("bench") / "new"
    names = ["plain", "fg.Function", "jax.custom_vjp"]
    absent = dataclasses.replace(_function.CONTENDERS["jax.custom_vjp"], needs="no_such_package")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_function.CONTENDERS, "jax.custom_vjp", absent)
        patch.setattr(_function, "race", functools.partial(race, contenders=names))
        console = Console(record=True, width=100, file=io.StringIO())
        status = bench.run(
            out, ["function"], quick=True, models=["elementwise"], html=True, console=console
        )
    file = out / f"function_{jax.default_backend()}.json"
    figures = json.loads(file.read_text())
    return status, figures, file, console.export_text()


def test_race_gives_the_figures_of_each_contender(results):
    status, figures, _, _ = results
    assert status == 0 and figures["quick"] and figures["turns"] == 1
    ways = figures["models"]["elementwise"]["contenders"]
    assert ways["jax.custom_vjp"]["reason"] == "absent: no_such_package is not installed"
    for name in ("plain", "fg.Function"):
        row = ways[name]
        assert row["error"] < 1e-5 and row["peak_bytes"] > row["temp_bytes"] >= 0
        assert len(row["seconds"]) == 1 and row["compile_seconds"] > 0, name
    assert ways["plain"]["ratio"] == 1


def test_race_names_no_place(results):
    _, figures, file, printed = results
    text = file.read_text() + file.with_suffix(".md").read_text()
    assert not re.search(rf"\b{re.escape(platform.node())}\b", text)
    assert "/" not in json.dumps(figures["machine"])


def test_terminal_and_markdown_have_the_same_tables(results):
    _, _, file, printed = results
    text = file.with_suffix(".md").read_text()
    assert "### elementwise at toy size" in text and "elementwise at toy size" in printed
    assert "| fg.Function | " in text and "fg.Function" in printed
    absent = "absent: no_such_package is not installed"
    assert f"| jax.custom_vjp | {absent} | " in text and f"{absent}: jax.custom_vjp" in printed
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_report_is_made_again_from_its_figures(results, tmp_path, console):
    _, figures, file, _ = results
    assert bench.run(tmp_path, source=file.parent, console=console, json=True) == 0
    assert (tmp_path / file.name).read_text() == file.read_text()
    for name in (file.with_suffix(".md").name, f"report_{jax.default_backend()}.html"):
        assert (file.parent / name).exists()
    assert (tmp_path / f"{file.stem}.md").read_text() == file.with_suffix(".md").read_text()
    assert json.loads(console.export_text()) == {"function": figures}
    assert not list(tmp_path.glob("*.html"))
    with pytest.raises(FileNotFoundError, match=r"figures to report are in training_step_.*json"):
        bench.run(tmp_path, ["training-step"], source=file.parent, console=console)


def test_resumed_run_keeps_what_was_measured_the_same_way():
    kind = {"date": "today", "turns": 5, "machine": {"cores": 2, "date": "today"}}
    earlier = {**kind, "date": "before", "machine": {"cores": 2, "date": "before"}}
    earlier["models"] = {"mlp": {"title": "MLP"}, "cnn": {"date": "long before"}}
    assert report._kept(kind, earlier) == {
        "mlp": {"title": "MLP", "date": "before"},
        "cnn": {"date": "long before"},
    }
    assert report._kept({**kind, "turns": 1}, earlier) == {} == report._kept(kind, None)
    assert report._kept({**kind, "machine": {"cores": 4, "date": "today"}}, earlier) == {}


def test_resumed_run_measures_the_rest(monkeypatch, console, tmp_path):
    measured = []

    def note(name, options, progress):
        measured.append(name)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return {"of": name}

    task = report.Benchmark("Notes", ("a", "b", "c"), note, lambda models: [])
    monkeypatch.setattr(report, "TASKS", {"notes": task})
    with pytest.raises(KeyboardInterrupt):
        bench.run(tmp_path, console=console)
    assert bench.run(tmp_path, console=console, resume=True) == 0
    assert measured == ["a", "b", "b", "c"]
    (file,) = tmp_path.glob("*.json")
    figures = json.loads(file.read_text())
    assert list(figures["models"]) == ["a", "b", "c"]


def test_interrupted_run_leaves_what_an_earlier_one_measured(monkeypatch, console, tmp_path):
    def note(name, options, progress):
        if name == "b":
            raise KeyboardInterrupt
        return {"of": name}

    task = report.Benchmark("Notes", ("a", "b", "c"), note, lambda models: [])
    monkeypatch.setattr(report, "TASKS", {"notes": task})
    bench.run(tmp_path, models=["c"], console=console)
    with pytest.raises(KeyboardInterrupt):
        bench.run(tmp_path, console=console, resume=True)
    (file,) = tmp_path.glob("*.json")
    assert list(json.loads(file.read_text())["models"]) == ["a", "c"]


def test_quick_full_and_named_models_are_chosen():
    task = bench.TASKS["per-sample"]
    assert task.chosen(Options(quick=True), ()) == list(_cost.QUICK)
    assert task.chosen(Options(), ()) == list(MODELS)
    assert task.chosen(Options(full=True), ()) == [*MODELS, *_cost.FULL]
    assert task.chosen(Options(), ["lora", "unrolled"]) == ["lora"]


def test_bench_fails_when_some_number_is_wrong(monkeypatch, console, tmp_path):
    row = {"kind": "plain", "library": "jax", "error": float("nan"), "ratio": 1.0}
    row |= dict.fromkeys(("median_seconds", "low_seconds", "high_seconds"), 1.0)
    row |= dict.fromkeys(("temp_bytes", "peak_bytes", "trace_seconds", "compile_seconds"))
    model = {"title": "t", "tolerance": 1e-4, "contenders": {"off": row}}
    bad = report.Benchmark("Bad", ("one",), lambda *args: model, _function.tables)
    monkeypatch.setattr(report, "TASKS", {"bad": bad})
    assert bench.run(tmp_path, console=console) == 1
    assert "bad: some numbers are wrong, see the errors of off" in console.export_text()
    assert "| off: WRONG | " in next(tmp_path.glob("*.md")).read_text()


def test_plan_that_is_worse_than_a_policy_is_wrong():
    policies = {"dots": {"kept": 2**20, "again": 0.2, "planned_again": 0.1}}
    budgets = [{"budget": 0.5, "kept": 2**20, "again": 0.1}]
    model = {"size": {"layers": 2}, "plan_seconds": 1.0, "plain_kept": 2**21}
    model |= {"plain_temporaries": None, "policies": policies, "budgets": budgets}
    wrong = lambda: [row.wrong for row in _checkpointing.tables({"m": model})[0].rows]
    assert wrong() == [False, False]
    policies["dots"]["planned_again"], budgets[0]["kept"] = 0.3, 2**21
    assert wrong() == [True, True]


@pytest.mark.parametrize(
    "tasks, options, words",
    [
        (["x"], {}, "a task is one of per-sample, checkpointing, .*; got 'x'"),
        ([], {"models": ["x"]}, "a model is one of mlp, .*; got 'x'"),
        (["function"], {"models": ["mlp"]}, "a model is one of elementwise, .*; got 'mlp'"),
        ([], {"turns": 0}, "turns is 1 or more; got 0"),
    ],
)
def test_bench_refuses(tasks, options, words, tmp_path, console):
    with pytest.raises(ValueError, match=words):
        bench.run(tmp_path, tasks, console=console, **options)
