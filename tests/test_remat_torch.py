"""Budgets against torch's own solver, on torch's own graph."""

import pytest


@pytest.mark.torch
def test_no_budget_of_torch_runs_less_again_at_equal_bytes_on_its_graph(torch):
    from funcgrad.bench._torch_graph import compare, transformer

    torch.manual_seed(0)
    loss, params = transformer(layers=1, width=16, heads=2)
    rows = compare(loss, [*params, torch.randn(2, 8, 16)], [0.0, 0.1, 0.3, 0.5, 0.7, 1.0])
    for row in rows:
        assert row.ours <= row.theirs * (1 + 1e-9), row
    assert rows[0].nbytes == 0
    assert rows[0].theirs == rows[0].ours == 1
    assert rows[4].ours <= rows[4].theirs < 0.5
