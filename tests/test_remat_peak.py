"""Budgets for the temporaries of the compiled gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from funcgrad._compat import unoptimised
from funcgrad._remat import _peak
from funcgrad._remat._budget import checkpoint_under_budget
from funcgrad._remat._live import predicted_peak
from funcgrad._remat._plan import plan
from funcgrad._remat._planner import Flat, Planner
from funcgrad._remat._stages import Stages, crossing

quickly = functools.partial(jax.jit, compiler_options=unoptimised())
ARGS = jnp.ones((64, 16)), jnp.ones((8, 16, 16))


def planner_of(fun, *args):
    flat, values = Flat.of(fun, args, {}, "test")
    return Planner(flat, values, [True] * len(values))


def temporaries(fun, *args):
    compiled: Any = jax.jit(jax.value_and_grad(fun)).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def wide(x, w):
    return lax.scan(lambda x, w: (jnp.tanh(jnp.sin(x @ w) * jnp.exp(-x)), None), x, w)[0].sum()


@pytest.fixture(scope="module")
def compiled_once():
    """Each plan of each function is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("plain_temp_bytes", "temp_bytes"):
            seen, measure = {}, getattr(_peak, name)

            def once(planner, *closure, seen=seen, measure=measure):
                of = str(planner.flat.jaxpr), *planner.level.diff_in
                key = *of, *(c.kept for c in closure)
                if key not in seen:
                    seen[key] = measure(planner, *closure)
                return seen[key]

            patch.setattr(_peak, name, once)
        yield


def test_a_budget_for_the_peak_is_honoured_by_what_is_compiled(compiled_once):
    (planned,) = plan(wide, [0.5], budget_kind="peak", argnums=0)(*ARGS)
    assert planned.temp_bytes is not None and planned.plain_temp_bytes is not None
    assert planned.temp_bytes <= 0.5 * planned.plain_temp_bytes
    graph, closure = planned._planner.graph, planned._choice.closure
    assert predicted_peak(graph, closure) == pytest.approx(planned.temp_bytes, rel=0.5)
    assert predicted_peak(graph, graph.keeping()) == pytest.approx(
        planned.plain_temp_bytes, rel=0.2
    )
    assert planned.plain_temp_bytes == pytest.approx(temporaries(wide, *ARGS), rel=0.1)
    under = checkpoint_under_budget(wide, 0.5, "peak")
    assert temporaries(under, *ARGS) <= 1.1 * planned.temp_bytes
    found, expected = quickly(jax.grad(under))(*ARGS), quickly(jax.grad(wide))(*ARGS)
    np.testing.assert_allclose(
        found, expected, rtol=2e-5, atol=2e-5 * float(jnp.abs(expected).max())
    )


def test_a_peak_that_needs_no_plan_is_left_alone_and_one_out_of_reach_says_so(compiled_once):
    (plain,) = plan(wide, [1.0], budget_kind="peak", argnums=0)(*ARGS)
    assert plain.method == "as it is"
    assert plain.recompute == 0
    with pytest.raises(ValueError, match="within reach of some plan") as error:
        jax.grad(checkpoint_under_budget(wide, 64, "peak"))(*ARGS)
    least = int(str(error.value).split("budget=")[1].split()[0])
    (found,) = plan(wide, [least], budget_kind="peak", argnums=0)(*ARGS)
    assert found.temp_bytes <= least < plain.plain_temp_bytes


def test_no_policy_has_fewer_temporaries_at_no_more_work_than_the_plan_for_a_peak(compiled_once):
    def fun(x, w):
        for _ in range(2):
            x = x + jnp.tanh(jnp.exp(-jnp.square(x @ w)) @ w.T)
        return x.sum()

    planner = planner_of(fun, jnp.ones((64, 16)), jnp.ones((16, 32)))
    choice = _peak.choose_peak(planner, 0.75)
    assert choice.temp_bytes <= 0.75 * _peak.plain_temp_bytes(planner)
    assert choice.compiled <= 6
    policies = [s.closure for s in _peak.policies(planner) if s.closure.cost <= choice.closure.cost]
    assert policies
    for closure in policies:
        assert _peak.temp_bytes(planner, closure) >= choice.temp_bytes


def test_stages_begin_where_the_residual_stream_passes_alone():
    def fun(x, w):
        x = jnp.sin(x)
        for _ in range(4):
            x = x + jnp.tanh((x - x.mean(-1, keepdims=True)) @ w) @ w.T
        return x.sum()

    planner = planner_of(fun, jnp.ones((8, 16)), jnp.ones((16, 32)))
    graph = planner.graph
    shapes = {graph.candidates[i].aval.shape for i in crossing(graph)}
    assert shapes <= {(8, 16), ()}
    assert Stages.of(graph).count >= 4


def test_what_compilers_fuse_takes_no_memory_and_what_products_read_does():
    def fun(x, w):
        return jnp.sum((2 * x + 1) * (jnp.sin(x) @ w))

    graph = planner_of(fun, jnp.ones((64, 16)), jnp.ones((16, 16))).graph
    size = 64 * 16 * 4
    # The sine and the product; then the cotangent of the sine, over its cosine.
    assert 2 * size <= predicted_peak(graph, graph.keeping()) <= 4 * size


def test_a_convolutional_net_whose_temporaries_no_plan_lowers_is_left_alone():
    def net(weights, x):
        for w in weights:
            x = jax.nn.relu(lax.conv(x, w, (2, 2), "SAME"))
        return jnp.square(x.mean((2, 3))).sum()

    args = [jnp.ones((8, 1, 3, 3)), jnp.ones((16, 8, 3, 3))], jnp.ones((8, 1, 16, 16))
    (planned,) = plan(net, [0.5], budget_kind="peak", argnums=0)(*args)
    assert (planned.method, planned.recompute) == ("as it is", 0)
    assert "no plan lowers the temporaries" in planned.explain()
    with pytest.warns(UserWarning, match="It is left as it is"):
        jax.grad(checkpoint_under_budget(jnp.sum, 0, "peak"))(jnp.ones(64))
