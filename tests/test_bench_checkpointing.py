"""The steps of the task ``checkpointing`` beside their float64 gradient."""

import functools

import jax
import pytest

from funcgrad._remat._solve import Infeasible
from funcgrad.bench import _checkpointing, _checkpointing_race, _report
from funcgrad.bench import _checkpointing_peak as peak
from funcgrad.bench import _worker as worker
from funcgrad.bench._checkpointing_models import (
    QUICK,
    draw_input,
    draw_params,
    scanned,
    unrolled,
)
from funcgrad.bench._options import Options


# One race has them all, and fails when one is wrong; here are the fewest that say it can.
def test_steps_agree_with_float64(tmp_path):
    make = functools.partial(_checkpointing_race.Step, "scanned", True)
    session, errors = worker.Session(make), {}
    session.reference(tmp_path / "right.npz")
    for name in ("fg.checkpoint, budget 0.2", "torch: plain", "torch: checkpoint, dots"):
        if not session.problem.contenders[name].absent():
            session.prepare(name, tmp_path / "right.npz")
            errors[name] = session.check()["error"]
    assert errors and max(errors.values()) < 1e-5, errors


def test_layers_in_a_loop_and_in_a_scan_are_one_model():
    args = draw_params(QUICK), draw_input(QUICK)
    a, b = (jax.jit(loss)(*args) for loss in (unrolled(QUICK), scanned(QUICK)))
    assert float(a) == pytest.approx(float(b), rel=1e-6)


def test_time_stands_against_both_measures_of_memory():
    row = {"kind": "checkpointed", "library": "jax", "ratio": 1.0, "error": 1e-7}
    row |= dict.fromkeys(("low_seconds", "median_seconds", "high_seconds"), 0.5)
    row |= {"temp_bytes": 2**20, "peak_bytes": 2**21, "trace_seconds": 1, "compile_seconds": 1}
    ways = {
        "jax.checkpoint, dots": row,
        "fg.checkpoint, budget 0.2": row | {"error": float("nan")},
        "torch: plain": row | {"temp_bytes": None},
        "torch: away": {"kind": "plain", "library": "torch", "reason": "absent"},
    }
    step = {"title": "t", "size": {"layers": 2}, "tolerance": 1e-4, "contenders": ways}
    _, temporaries, peak = _checkpointing.tables({"step-scanned": step})
    assert [row.values for row in temporaries.rows] == [(1.0, 500.0)] * 2
    assert [row.values for row in peak.rows] == [(2.0, 500.0)] * 3
    assert [row.group for row in peak.rows] == ["jax.checkpoint", "fg.checkpoint", "torch: plain"]
    assert [row.wrong for row in peak.rows] == [False, True, False]


def test_a_loss_says_why():
    ways = {"plain": {"median_seconds": 3.0}, "torch: plain": {"median_seconds": 1.5}}
    assert "torch's plain gradient itself is 2.0 times as fast" in _checkpointing_race._why(ways)
    for slow in ({"median_seconds": 4.0}, {"reason": "absent"}):
        why = _checkpointing_race._why(ways | {"torch: plain": slow})
        assert "a budget of 0.1 was asked for" in why
        assert "torch" not in why


@pytest.mark.parametrize("name", ["peak-scanned", "peak-cnn"])
def test_policies_of_people_stand_beside_budgets_for_the_peak(monkeypatch, name):
    def out_of_reach(planner, budget):
        raise Infeasible(1)

    monkeypatch.setattr(peak, "plain_temp_bytes", lambda planner: 2**20)
    monkeypatch.setattr(peak, "temp_bytes", lambda planner, closure: closure.nbytes)
    monkeypatch.setattr(peak, "choose_peak", out_of_reach)
    figures = peak.measure(name, Options(quick=True), lambda text, share: None)
    table = peak.table(name, figures)
    rows = {row.name: row for row in table.rows}
    policies = ("nothing", "dots without batch dimensions", "dots")
    kept = [table.number(rows[policy], "temporaries") or 0.0 for policy in policies]
    assert kept == sorted(kept) and kept[0] < kept[1]
    assert "least possible" in rows["budget=0.3"].reason


def test_the_steps_are_registered():
    assert set(_checkpointing_race.NAMES) < set(_report.TASKS["checkpointing"].names)
