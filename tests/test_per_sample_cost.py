"""What per-sample sums and norms cost, in counts that do not depend on the machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import funcgrad as fg
from funcgrad import _jaxpr
from funcgrad.bench._models import MODELS, mlp


def temporaries(fun, task):
    memory = jax.jit(fun).lower(task.params, *task.batch).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def batch_gradient(task):
    losses = jax.vmap(task.loss, (None, *(0 for _ in task.batch)))
    return jax.grad(lambda params, *batch: losses(params, *batch).sum())


def clipped_sum(task):
    return lambda params, *batch: fg.per_sample(task.loss)(params, *batch).clipped_sum(1.0)


# Compiled at the shapes of the cost table, and not run: small ones would measure the chunks
# of the norms, whose size is fixed.
@pytest.mark.parametrize("name", ["mlp", "cnn-64", "lstm", "transformer-remat"])
def test_a_clipped_sum_holds_little_more_than_the_batch_gradient(name):
    task, goal = MODELS[name].make(), MODELS[name].memory_goal
    assert temporaries(clipped_sum(task), task) <= goal * temporaries(batch_gradient(task), task)


def primitives_of(fun, *args):
    return {visit.eqn.primitive.name for visit in _jaxpr.walk(jax.make_jaxpr(fun)(*args).jaxpr)}


def test_norms_of_single_products_need_no_loop_and_form_no_gradient():
    task = mlp(64, n_inputs=49, width=512)
    run = lambda params, *batch: fg.per_sample(task.loss)(params, *batch).norms()
    found = primitives_of(run, task.params, *task.batch)
    assert not found & {"while", "scan", "cond"}


def test_products_that_are_added_have_one_cotangent():
    def loss(p, xs):
        def step(h, x):
            return jnp.tanh(x @ p["in"] + h @ p["rec"] + p["bias"]), None

        return lax.scan(step, jnp.zeros(6), xs)[0].sum()

    params = {"in": jnp.ones((5, 6)), "rec": jnp.ones((6, 6)), "bias": jnp.ones(6)}
    xs = jnp.ones((3, 4, 5))
    records = fg.per_sample(loss, road="gram")(params, xs)._records
    stacked = [g for g in records.cotangents if g.shape == (4, 3, 6)]
    assert len(stacked) == 2
    assert stacked[0] is stacked[1]


@pytest.mark.parametrize("used", ["difference", "negated", "twice"])
def test_products_whose_cotangents_differ_have_each_their_own(x64, used):
    def loss(p, x):
        a, b = x @ p["a"], x @ p["b"]
        both = {"difference": a - b, "negated": b - a, "twice": a + b}[used]
        return jnp.sum(jnp.tanh(both)) + (jnp.sum(jnp.sin(a)) if used == "twice" else 0.0)

    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(4, 5)), "b": rng.normal(size=(4, 5))}
    check_sums(loss, params, rng.normal(size=(3, 2, 4)), road="gram")


@pytest.mark.parametrize("numbers", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_small_filter_is_formed_on_the_way_back(x64, numbers, groups):
    def loss(p, x):
        kernel = p if numbers[1] == "HWIO" else p.transpose(3, 2, 0, 1)
        x = x if numbers[0] == "NHWC" else x.transpose(2, 0, 1)
        y = lax.conv_general_dilated(
            x[None], kernel, (2, 1), [(1, 0), (0, 1)], rhs_dilation=(1, 2),
            dimension_numbers=numbers, feature_group_count=groups,
        )  # fmt: skip
        return jnp.sum(jnp.tanh(y))

    rng = np.random.default_rng(0)
    kernel, xs = rng.normal(size=(2, 2, 2 // groups, 16)), rng.normal(size=(3, 8, 7, 2))
    samples = check_sums(loss, kernel, xs, road="auto")
    (road,) = samples.explain()
    assert road.road == "value"
    assert "smaller than its factors" in road.why


def test_a_small_filter_of_low_precision_has_its_gradient_in_float32():
    def loss(p, x):
        y = lax.conv_general_dilated(
            x[None].astype(jnp.bfloat16), p.astype(jnp.bfloat16), (1,), "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
        )  # fmt: skip
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    rng = np.random.default_rng(0)
    args = jnp.float32(rng.normal(size=(3, 2, 8))), jnp.float32(rng.normal(size=(3, 20, 2)))
    formed, direct = (fg.per_sample(loss, road=road)(*args) for road in ("auto", "direct"))
    assert formed.explain()[0].road == "value"
    np.testing.assert_allclose(formed.norms(), direct.norms(), rtol=1e-6)
    np.testing.assert_allclose(formed.sum(), direct.sum(), rtol=1e-5, atol=1e-5)


def check_sums(loss, params, xs, *, road):
    """Norms and a weighted sum, one weight 0, against the gradients of a loop."""
    samples = fg.per_sample(loss, road=road)(params, xs)
    rows = [jax.tree.leaves(jax.grad(loss)(params, x)) for x in xs]
    norms = [np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in row)) for row in rows]
    np.testing.assert_allclose(samples.norms(), norms, rtol=1e-10)
    weights = np.array([0.5, 0.0, 2.0])
    total = [
        sum(w * leaf for w, leaf in zip(weights, leaves, strict=True))
        for leaves in zip(*rows, strict=True)
    ]
    for got, right in zip(jax.tree.leaves(samples.weighted_sum(weights)), total, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-10, atol=1e-12)
    return samples
