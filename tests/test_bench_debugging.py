"""The contenders of the task ``debugging``: right numbers, and a fault that each finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from funcgrad.bench import _debugging
from funcgrad.bench import _worker as worker

CHECKED = ("fg.detect_anomaly", "jax.debug_nans", "checkify, nan_checks")


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("model", _debugging.NAMES)
def test_contenders_agree_with_float64(model, tmp_path):
    session, found = worker.Session(lambda: _debugging.MODELS[model](True)), {}
    session.reference(tmp_path / "right.npz")
    for name, way in session.problem.contenders.items():
        if not way.absent():
            session.prepare(name, tmp_path / "right.npz")
            found[name] = session.check()
            assert way.library == "torch" or way.compiles == ("compile_seconds" in found[name])
    assert len(found) >= 4 and max(f["error"] for f in found.values()) < 1e-5, found


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("name", [n for n, w in _debugging.STEPS.items() if w.kind == "checked"])
def test_what_is_timed_finds_an_anomaly(name):
    way, problem = _debugging.STEPS[name], _debugging.TrainingStep(True)
    if way.absent():
        pytest.skip(way.absent())
    weights, x = problem.args
    x = np.full_like(x, np.nan)
    run = way.make(problem)
    with pytest.raises((RuntimeError, FloatingPointError, ValueError), match=r"(?i)nan"):
        run(weights, x) if way.library == "torch" else run(*jax.tree.map(jnp.asarray, (weights, x)))
