"""The contenders of the task ``derivatives`` beside its float64 numbers."""

import pytest

from funcgrad.bench import _derivatives, _report
from funcgrad.bench import _worker as worker


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of the first dual number
@pytest.mark.parametrize("name", _derivatives.NAMES)
def test_derivatives_agree_with_float64(name, tmp_path):
    session, errors = worker.Session(lambda: _derivatives.MODELS[name](True)), {}
    session.reference(tmp_path / "right.npz")
    for way, contender in session.problem.contenders.items():
        if not contender.absent():
            session.prepare(way, tmp_path / "right.npz")
            errors[way] = session.check()["error"]
    assert len(errors) >= 3 and max(errors.values()) < 1e-5, errors


def test_the_task_is_registered():
    assert tuple(_report.TASKS["derivatives"].names) == ("jacobian", "hessian", "hvp")
