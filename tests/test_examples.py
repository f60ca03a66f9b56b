"""Each lesson runs to its end, where its assertions are."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example_runs(file, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    runpy.run_path(str(file), run_name="__main__")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example_is_short_and_ends_in_assertions(file):
    lines = file.read_text().splitlines()
    assert len(lines) <= 140
    last_cell = max(i for i, line in enumerate(lines) if line.startswith("# %%"))
    assert any(line.startswith("assert ") for line in lines[last_cell:])
