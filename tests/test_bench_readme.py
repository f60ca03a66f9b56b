"""The README's table of costs is that of the figures beside the code."""

from pathlib import Path

import pytest

from funcgrad.bench import sections, update_readme

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "funcgrad" / "bench" / "results"


def test_the_readme_has_the_committed_figures():
    text = (ROOT / "README.md").read_text()
    again = "python -m funcgrad bench --from funcgrad/bench/results --write-readme README.md"
    assert update_readme(text, sections(RESULTS)) == text, again


def test_a_readme_without_figures_or_a_place_for_them_is_refused(tmp_path):
    with pytest.raises(ValueError, match="table is of the task per-sample; got none"):
        update_readme("<!-- cost-table:begin --> <!-- cost-table:end -->", sections(tmp_path))
    with pytest.raises(ValueError, match="got no <!-- cost-table:end -->"):
        update_readme("<!-- cost-table:begin -->", sections(RESULTS))
