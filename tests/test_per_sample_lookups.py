"""Clipped sums in chunks of tables that are looked up: only the rows touched are added."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from test_clipped_grad import flat, hostile_rows
from test_per_sample import assert_equal, draw

TABLE, N = (50, 3), 8


def looked_up(p, t, x):
    """A table read twice, and something beside it."""
    h = jnp.sum(jnp.sin(p["e"][t] * x), 0) + jnp.sum(2.0 * p["e"][t[:1]] * x, 0)
    return jnp.sum(jnp.tanh(h) * p["v"])


def inputs(copies=1):
    dtype = jnp.result_type(float)
    params = {
        "e": jnp.tile(draw(0, *TABLE, dtype=dtype), (copies, 1)),
        "v": draw(1, 3, dtype=dtype),
    }
    ids = np.random.default_rng(0).integers(0, 6, (N, 4))  # few rows, so that they repeat
    return params, jnp.asarray(ids), draw(2, N, 3, dtype=dtype)


def clipped(loss, chunk_size, **options):
    return jax.jit(fg.clipped_grad(loss, max_norm=0.7, chunk_size=chunk_size, **options))


@pytest.mark.parametrize("mode", ["fill", "clip"])
@pytest.mark.parametrize("chunk_size", [3, 4])
def test_in_chunks_the_sum_is_that_of_the_whole(x64, chunk_size, mode, monkeypatch):
    from funcgrad._per_sample import _lookups

    params, ids, x = inputs()
    ids = ids.at[0, 0].set(99)  # no row, or the last
    mask = jnp.arange(N) != 2

    def loss(p, t, x):
        rows = p["e"].at[t].get(mode=mode, fill_value=0)
        return jnp.sum(jnp.tanh(jnp.sum(jnp.sin(rows * x), 0)) * p["v"])

    whole = clipped(loss, None, road="materialize")(params, ids, x, mask=mask)
    monkeypatch.setattr(_lookups, "_WORTH", 0)
    ours = clipped(loss, chunk_size)(params, ids, x, mask=mask)
    assert_equal(ours.grads, whole.grads, 1e-10)
    np.testing.assert_allclose(ours.norms, whole.norms, rtol=1e-10)


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, t, x: jnp.sum(jnp.sin(p["e"][t, 1] * x[:1]) * p["v"][0]),
        lambda p, t, x: jnp.sum(jnp.sin(p["e"].T[:, t].T * x) * p["v"]),
        lambda p, t, x: jnp.sum(jnp.sin(p["e"][:7][t] * x) * p["v"]),
        lambda p, t, x: jnp.sum(jnp.sin(-2.0 * p["e"][t] * x) * p["v"]),
        lambda p, t, x: jnp.sum(jnp.sin(p["e"][t] * x) @ p["e"][:4].T) * p["v"][0],
        lambda p, t, x: jnp.sum(lax.scan(lambda c, i: (c + jnp.sin(p["e"][i] * x), None), p["v"], t)[0]),  # noqa: E501
        looked_up,
    ],
    ids=["columns", "turned", "cut", "scaled", "used otherwise too", "in a loop", "twice"],
)  # fmt: skip
def test_tables_of_every_arrangement(x64, loss, monkeypatch):
    from funcgrad._per_sample import _lookups

    monkeypatch.setattr(_lookups, "_WORTH", 0)
    args = inputs()
    whole = clipped(loss, None, road="materialize")(*args)
    assert_equal(clipped(loss, 3)(*args).grads, whole.grads, 1e-10)


def test_a_table_that_is_read_in_a_wider_type_is_added_in_its_own(x64):
    params, ids, x = inputs(copies=40)
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    loss = lambda p, t, x: looked_up(jax.tree.map(lambda q: q.astype(jnp.float64), p), t, x)
    whole = clipped(loss, None)(params, ids, x)
    ours = clipped(loss, 3)(params, ids, x)
    assert ours.grads["e"].dtype == jnp.float32
    assert_equal(ours.grads, whole.grads, 1e-6)


def test_no_pass_over_the_table_is_made_for_a_chunk():
    def makers(jaxpr, inside):
        """What gives whole tables in a scan, but where gradients are formed to look for trouble."""
        found = set()
        for eqn in jaxpr.eqns:
            sizes = [var.aval.size for var in eqn.outvars]
            if inside and max(sizes, default=0) >= args[0]["e"].size:
                found.add(eqn.primitive.name)
            for param in jax.tree.leaves(list(eqn.params.values())):
                body = getattr(param, "jaxpr", param)
                if hasattr(body, "eqns") and eqn.primitive.name != "cond":
                    found |= makers(body, inside or eqn.primitive.name == "scan")
        return found

    args = inputs(copies=2000)
    fun = fg.clipped_grad(looked_up, max_norm=0.7, chunk_size=2)
    made = makers(jax.make_jaxpr(fun)(*args).jaxpr, False)
    # The custom rule is the identity that refuses derivatives.
    assert made - {"jit", "custom_jvp_call"} <= {"reshape", "scatter", "scatter-add"}


@pytest.mark.parametrize("chunk_size", [1, 2])
@given(rows=hostile_rows(), left_out=st.integers(0, 4), spread=st.booleans())
def test_one_sample_never_moves_the_sum_by_more_than_the_bound(chunk_size, rows, left_out, spread):
    with np.errstate(over="ignore"):
        rows = jnp.asarray(rows, jnp.float32)
    ids = jnp.arange(5) if spread else jnp.zeros(5, int)
    everyone = _clip[chunk_size](ids, rows, jnp.ones(5, bool))
    without = _clip[chunk_size](ids, rows, jnp.arange(5) != left_out)
    assert np.isfinite(flat(everyone.grads)).all()
    moved = np.linalg.norm(flat(everyone.grads) - flat(without.grads))
    assert moved <= 0.7  # no tolerance: this is the guarantee


_clip = {
    size: jax.jit(
        lambda ids, rows, mask, size=size: fg.clipped_grad(
            lambda p, i, row: jnp.sum(p[i] * row), max_norm=0.7, chunk_size=size
        )(jnp.zeros((1000, 6)), ids, rows, mask=mask)
    )
    for size in (1, 2)
}


@given(seed=st.integers(0, 2**16), scale=st.sampled_from([1e-3, 1.0, 1e15]))
def test_the_bound_holds_where_all_samples_meet_at_one_row(seed, scale):
    rng = np.random.default_rng(seed)
    rows = np.repeat(rng.normal(size=(1, 64)).astype(np.float32) * np.float32(scale), 96, 0)
    everyone = _meet(rows, jnp.ones(96, bool)).grads
    without = _meet(rows, jnp.arange(96) != int(rng.integers(96))).grads
    assert np.linalg.norm(flat(everyone) - flat(without)) <= 1e-2


_meet = jax.jit(
    lambda rows, mask: fg.clipped_grad(
        lambda p, i, row: jnp.sum(p[i] * row), max_norm=1e-2, chunk_size=8
    )(jnp.zeros((4000, 64)), jnp.zeros(96, int), rows, mask=mask)
)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_and_in_chunks(check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    params, ids, x = inputs(copies=40)
    ours = fg.clipped_grad(looked_up, max_norm=0.7, chunk_size=1)
    run = jax.shard_map(
        lambda *a: lax.psum(ours(*a).grads, "data"),
        mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    total = jax.jit(run)(params, ids, x)
    assert_equal(total, clipped(looked_up, None)(params, ids, x).grads, 1e-5)


def test_a_sharded_batch_in_chunks():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    params, ids, x = inputs(copies=40)
    expected = jax.device_get(clipped(looked_up, None)(params, ids, x).grads)
    split = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (ids, x)]
    whole = jax.device_put(params, NamedSharding(mesh, P()))
    assert_equal(clipped(looked_up, 4)(whole, *split).grads, expected, 1e-5)


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_indices_narrower_than_the_rest_are_right_under_strict_promotion(x64, dtype):
    params = {"e": draw(0, 300, 3, dtype=jnp.float64), "w": draw(1, 3, 2, dtype=jnp.float64)}
    loss = lambda p, t: jnp.sum(jnp.tanh(p["e"][t] @ p["w"]))
    ids = jnp.array([[1, 5, 1], [0, 250, 7]], dtype)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        samples = fg.per_sample(loss)(params, ids)
        norms, projected = samples.norms(), samples.project(jax.random.key(0), 7)
    rows = jax.vmap(jax.grad(loss), (None, 0))(params, ids)
    flat_rows = jnp.concatenate([rows["e"].reshape(2, -1), rows["w"].reshape(2, -1)], 1)
    np.testing.assert_allclose(norms, jnp.linalg.norm(flat_rows, axis=1), rtol=1e-12)
    assert projected.shape == (2, 7)


@pytest.mark.parametrize("terms", [3, 4, 7, 8])
@pytest.mark.parametrize("columns", [3, 4, 7, 8])
def test_products_of_few_terms_with_few_columns(x64, terms, columns):
    """On CPU some of these sizes go another way."""

    def loss(p, t, x):
        return jnp.sum(jnp.tanh(p["e"][t] * x)) + jnp.sum(jnp.tanh(x.T @ p["w"]))

    params = {"e": draw(0, 9, columns), "w": draw(1, terms, 5)}
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 4, (N, terms)))
    samples = jax.jit(fg.per_sample(loss, road="gram"))(params, ids, draw(2, N, terms, columns))
    rows = samples.materialize()
    expected = jax.tree.map(lambda g: np.linalg.norm(g.reshape(N, -1), axis=1), rows)
    assert_equal(samples.leaf_norms(), expected, 1e-10)
