"""The concept table: complete, proved row by row, and honest about what is missing."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from funcgrad.parity import ROWS, Check, Row, evaluate, markdown, run, update_readme
from funcgrad.parity import _table as table
from funcgrad.parity._table import agree, error_of, select

# Every concept of the source document and of the contract, and the rows that carry it.
CONCEPTS = {
    "graph, grad_fn": ["engine.graph"],
    "leaf, requires_grad, is_leaf": ["engine.leaf", "engine.integer_leaf"],
    "saved tensors": ["engine.saved_tensors"],
    "version counter, in-place corruption": ["engine.version_counter"],
    "retain_graph": ["engine.retain_graph"],
    "accumulation, zero_grad": [
        "engine.accumulation",
        "engine.accumulate_grads",
        "engine.zero_grad",
    ],
    "backward, gradient=": [
        "backward_and_grad.backward",
        "backward_and_grad.seeds",
        "backward_and_grad.seed_shape",
        "backward_and_grad.seed_dtype",
    ],
    "autograd.grad(create_graph)": [
        "backward_and_grad.create_graph",
        "backward_and_grad.grad_of_grads",
    ],
    "allow_unused, materialize_grads": [
        "backward_and_grad.allow_unused",
        "backward_and_grad.materialize_grads",
    ],
    "is_grads_batched": ["backward_and_grad.is_grads_batched"],
    "grads of intermediates": ["backward_and_grad.intermediates"],
    "gather, broadcast": ["backward_and_grad.gather_and_broadcast"],
    "Function, both spellings": ["function.apply", "function.classic", "function.custom_rule"],
    "one gradient per forward input": ["function.gradient_count"],
    "save_for_backward, ctx attributes": [
        "function.save_for_backward",
        "function.ctx_attributes",
        "function.saved_output",
    ],
    "needs_input_grad, set_materialize_grads, mark_non_differentiable, once_differentiable": [
        "function.needs_input_grad",
        "function.mark_non_differentiable",
        "function.once_differentiable",
        "function.unused_output",
    ],
    "mark_dirty": ["function.mark_dirty"],
    "generate_vmap_rule, vmap static": ["function.vmap_of_rule", "function.vmap_static"],
    "arguments of every kind": ["function.arguments", "function.duplicate_output"],
    "forward mode of a Function": ["function.forward_mode"],
    "uses of Function": [
        "function.megatron_pair",
        "function.fused_kernel",
        "function.recompute",
        "function.straight_through",
        "function.gradient_reversal",
    ],
    "detach": ["stopping.detach"],
    "no_grad, set_grad_enabled": ["stopping.no_grad", "stopping.set_grad_enabled"],
    "inference_mode": ["stopping.inference_mode"],
    "requires_grad_(False)": ["stopping.freeze"],
    "EMA, target network": ["stopping.ema"],
    "tensor.register_hook": ["hooks.register_hook", "hooks.summed_cotangent"],
    "module hooks": ["hooks.full_backward_hook", "hooks.forward_hook", "hooks.forward_hook_linen"],
    "post_accumulate_grad_hook, DDP overlap": ["hooks.post_accumulate_grad", "hooks.ddp_overlap"],
    "handle.remove()": ["hooks.remove"],
    "reading activations and gradients": ["hooks.capture", "hooks.activations_linen"],
    "NaN check in a hook": ["hooks.nan_check"],
    "checkpoint, checkpoint_sequential": [
        "checkpointing.checkpoint",
        "checkpointing.nested",
        "checkpointing.sequential",
    ],
    "RNG preserved": ["checkpointing.rng", "checkpointing.rng_nnx"],
    "selective checkpointing": ["checkpointing.selective"],
    "activation_memory_budget": ["checkpointing.budget"],
    "saved_tensors_hooks, save_on_cpu": ["checkpointing.saved_tensors_hooks"],
    "about 33% more compute": ["checkpointing.compute"],
    "clip_grad_norm_, get_total_norm": [
        "clipping.clip_grad_norm",
        "clipping.total_norm",
        "clipping.error_if_nonfinite",
        "clipping.overflow",
    ],
    "distributed norm": ["clipping.distributed"],
    "clip_grad_value_": ["clipping.clip_grad_value"],
    "micro-batches": ["clipping.micro_batches", "clipping.mean_of_means"],
    "manual SGD step": [
        "clipping.manual_step",
        "clipping.momentum",
        "clipping.nesterov",
        "clipping.dampening",
        "clipping.weight_decay",
    ],
    "grad, grad_and_value, vjp, jvp, linearize": [
        "transforms.grad",
        "transforms.vjp",
        "transforms.jvp",
        "transforms.perturbation_confusion",
    ],
    "vmap": ["transforms.vmap", "transforms.vmap_chunk_size", "transforms.vmap_randomness"],
    "jacrev, jacfwd, hessian": [
        "transforms.jacobian",
        "transforms.jacobian_chunk_size",
        "transforms.jacobian_with_value",
        "transforms.hessian",
        "transforms.hessian_trace",
    ],
    "autograd.functional.hvp, vhp": [
        "transforms.hvp",
        "transforms.hvp_by_hand",
        "transforms.gauss_newton",
    ],
    "functional_call, ties": ["transforms.functional_call", "transforms.functional_call_linen"],
    "stack_module_state, ensembles": ["transforms.stack_module_state", "transforms.ensemble"],
    "per-sample gradients": [
        "transforms.per_sample_grads",
        "transforms.per_sample_norms",
        "transforms.per_sample_sums",
        "transforms.per_sample_products",
        "transforms.per_sample_projections",
        "transforms.clipped_grad",
        "transforms.sample_mixing",
    ],
    "set_detect_anomaly": ["debugging.detect_anomaly"],
    "gradcheck, gradgradcheck": ["debugging.gradcheck", "debugging.gradgradcheck"],
    "_base, views": ["debugging.views"],
    "comparing with torch": ["debugging.bridge", "debugging.modules", "debugging.compare"],
    "where the two differ": [
        f"conventions.{name}"
        for name in (
            "abs clamp norm std power_zero hypot atan2 leaky_relu relu_nan hardtanh xlogy "
            "max_ties median_ties median_even variance gelu complex"
        ).split()
    ],
}

README = Path(__file__).parents[1] / "README.md"


def fake(check=None, **fields):
    return Row("engine.fake", "fake", "a | b", "c", check=check, **fields)


def printed(*rows, width=100, **options):
    from rich.console import Console

    out = io.StringIO()
    status = run(rows=rows, console=Console(file=out, width=width), **options)
    return status, out.getvalue()


@pytest.mark.torch
@pytest.mark.parametrize("row", [r for r in ROWS if r.check], ids=lambda row: row.id)
def test_row_is_proved(row):
    if not row.built:
        pytest.skip(f"not built yet: {row.lacks}")
    # A reader may run with the strictest promotion there is.
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        outcome = evaluate(row)
    assert outcome.verdict == "pass", f"{outcome.reason}\n{outcome.check}"


def test_ids_are_unique():
    assert len({row.id for row in ROWS}) == len(ROWS)


def test_every_concept_has_its_rows_and_every_row_a_concept():
    assert sorted(id for ids in CONCEPTS.values() for id in ids) == sorted(row.id for row in ROWS)


def test_what_jax_already_has_is_never_missing():
    assert [row.id for row in ROWS if not row.needs and not row.built] == []


def test_every_row_says_how_both_spell_it():
    assert [row.id for row in ROWS if not (row.concept and row.torch and row.here)] == []


@pytest.mark.torch
def test_a_wrong_number_fails_and_exits_nonzero():
    status, text = printed(fake(lambda: agree(value=(1.0, 1.5))), ROWS[0])
    assert status == 1
    assert "differs by 0.5" in text
    assert "1 failed" in text


@pytest.mark.torch
@pytest.mark.parametrize(
    "wrong",
    [
        lambda: agree(value=(1.0, float("nan"))),
        lambda: agree(value=(float("inf"), -float("inf"))),
        lambda: agree(value=([1.0], [1.0, 1.0])),
        lambda: agree(a=(0.0, 0.0), b=(1.0, 1.0, 1.0 + 1e-9)),
        lambda: agree(value=(1 + 2j, 1 - 2j)),
        lambda: agree(said={"torch": error_of(lambda: 1, ValueError, "")}),
        lambda: agree(said={"torch": error_of(lambda: int("x"), ValueError, "other words")}),
        lambda: {}["no such key"],
        lambda: Check(math.nan, 1.0, {}),
    ],
)
def test_whatever_is_wrong_in_a_check_fails_its_row(wrong):
    assert evaluate(fake(wrong)).verdict == "fail"


@pytest.mark.torch
def test_equal_specials_agree():
    nan, inf = float("nan"), float("inf")
    check = agree(value=([nan, inf, -inf, 1.0], [nan, inf, -inf, 1.0]))
    assert check.difference == 0


@pytest.mark.parametrize(
    "row",
    [
        fake(lambda: agree(value=(1, 1)), needs=("no_such_function",)),
        fake(lambda: agree(value=(1, 1)), needs=("per_sample.no_such_function",)),
        # A submodule of the name is not the function.
        fake(lambda: agree(value=(1, 1)), needs=("parity.rows",)),
        fake(None, needs=()),
    ],
)
def test_a_row_that_is_not_built_is_missing_and_never_passed(row):
    status, text = printed(row)
    assert evaluate(row).verdict == "missing"
    assert status == 0
    assert "0 proved" in text
    assert "1 missing" in text
    assert "not built yet |" in markdown([row])


def test_without_torch_rows_are_skipped_and_never_passed(monkeypatch):
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda name: None)
    status, text = printed(fake(lambda: agree(value=(1, 1))), fake(needs=("no_such_function",)))
    assert status == 0
    assert "0 proved" in text
    assert "1 missing" in text
    assert "1 skipped (torch not installed)" in text


@pytest.mark.torch
def test_a_check_computes_in_float64_and_leaves_no_trace(torch):
    before = jnp.ones(1).dtype, torch.get_default_dtype(), torch.get_rng_state()
    seen = []
    evaluate(fake(lambda: seen.append((jnp.ones(1).dtype, torch.randn(1))) or agree(v=(1, 1))))
    assert seen[0][0] == jnp.float64
    assert seen[0][1].dtype == torch.float64
    after = jnp.ones(1).dtype, torch.get_default_dtype(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_selection_by_id_section_and_title():
    assert [r.id for r in select(ROWS, ["hooks.capture"])] == ["hooks.capture"]
    assert {r.section for r in select(ROWS, ["hooks.", "stopping."])} == {"hooks", "stopping"}
    assert {r.section for r in select(ROWS, ["training operations"])} == {"clipping"}
    assert select(ROWS, []) == ROWS
    with pytest.raises(ValueError, match="must hold 'nothing'; got none"):
        select(ROWS, ["nothing"])


def test_an_id_names_a_section():
    with pytest.raises(ValueError, match="got 'nowhere'"):
        Row("nowhere.at_all", "a", "b", "c")


@pytest.mark.torch
def test_json_is_strict_and_complete(tmp_path):
    path = tmp_path / "parity.json"
    complex_and_nan = fake(lambda: agree(z=(1j, 1j), nan=(math.nan, math.nan), gap=(0, math.nan)))
    printed(complex_and_nan, ROWS[0], json_path=path)
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert found["counts"] == {"pass": 0, "fail": 1, "missing": 1 - ROWS[0].built, "skip": 0} | (
        {"pass": 1} if ROWS[0].built else {}
    )
    assert found["rows"][0]["id"] == "engine.fake"
    assert found["rows"][0]["difference"] is None


@pytest.mark.parametrize("width", [60, 100, 140])
def test_no_printed_line_is_wider_than_the_terminal(width, monkeypatch):
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda name: None)
    _, text = printed(*ROWS, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_pipes_are_escaped_in_the_readme():
    assert r"| fake | `a \| b` | `c` |" in markdown([fake()])


def test_the_readme_table_is_replaced_between_its_markers():
    text = "before\n<!-- concept-table:begin -->\nold\n<!-- concept-table:end -->\nafter\n"
    once = update_readme(text)
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "old" not in once
    assert update_readme(once) == once
    with pytest.raises(ValueError, match="got no <!-- concept-table:end -->"):
        update_readme("<!-- concept-table:begin -->")


def test_the_readme_is_current():
    text = README.read_text()
    assert update_readme(text) == text, "run python -m funcgrad parity --write-readme README.md"


def test_importing_the_table_imports_no_extra():
    # Flax itself imports rich.
    extras = {"torch", "typer", "matplotlib", "sklearn", "dp_accounting"}
    code = f"import sys, funcgrad.parity; print(*{extras} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
