"""The reference road: every sample's gradient, against a loop."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from conftest import DEEP, PROGRAMS
from programs import Program, programs


def net(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.sum((hidden @ params["v"] - y) ** 2)


def make_net(n=5, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return {"w": draw(3, 4), "b": draw(4), "v": draw(4, 2)}, draw(n, 3), draw(n, 2)


def loop(loss, params, *batch):
    one = jax.jit(jax.grad(loss))
    rows = [one(params, *sample) for sample in zip(*batch, strict=True)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def assert_close(got, expected, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@settings(max_examples=PROGRAMS if DEEP else PROGRAMS // 4)
@given(programs())
def test_generated_programs_equal_the_loop(program: Program):
    with jax.enable_x64(True):
        params, batch = program.params(np.float64), program.inputs(np.float64, batch=3)
        out = jax.jit(fg.per_sample_grads(program.loss, chunk_size=2))(params, *batch)
        one = jax.jit(jax.value_and_grad(program.loss))
        for i in range(3):
            value, grads = one(params, batch[0][i], batch[1][i])
            assert_close(jax.tree.map(lambda g, i=i: g[i], out.grads), grads, 1e-10, 1e-10)
            np.testing.assert_allclose(out.values[i], value, rtol=1e-10, atol=1e-10)


def test_any_chunk_size_gives_the_same_rows():
    params, x, y = make_net()
    rows = loop(net, params, x, y)
    for chunk_size in (1, 2, 3, 4, 5, 99) if DEEP else (1, 3, 5, 99):
        out = jax.jit(fg.per_sample_grads(net, chunk_size=chunk_size))(params, x, y)
        assert_close(out.grads, rows)


def test_chunks_are_scanned_and_not_unrolled():
    params, x, y = make_net(n=40)
    fun = fg.per_sample_grads(net, chunk_size=4)
    few = len(jax.make_jaxpr(fun)(params, x[:8], y[:8]).eqns)
    many = len(jax.make_jaxpr(fun)(params, x, y).eqns)
    assert few == many


def test_an_empty_batch_gives_no_rows_of_the_right_shapes():
    params, x, y = make_net(n=0)
    with_aux = lambda p, x, y: (net(p, x, y), {"x": x})
    out = jax.jit(fg.per_sample_grads(with_aux, has_aux=True))(params, x, y)
    assert jax.tree.map(jnp.shape, out.grads) == {"w": (0, 3, 4), "b": (0, 4), "v": (0, 4, 2)}
    assert out.values.shape == (0,)
    assert out.aux["x"].shape == (0, 3)


def test_values_and_aux_come_back_per_sample():
    params, x, y = make_net()
    with_aux = lambda p, x, y: (net(p, x, y), {"twice": 2 * x, "one": 1})
    out = fg.per_sample_grads(with_aux, has_aux=True, chunk_size=2)(params, x, y)
    assert isinstance(out, fg.PerSampleGrads)
    expected = jnp.stack([net(params, a, b) for a, b in zip(x, y, strict=True)])
    np.testing.assert_allclose(out.values, expected, rtol=1e-6)
    np.testing.assert_array_equal(out.aux["twice"], 2 * x)
    np.testing.assert_array_equal(out.aux["one"], np.ones(5))


def test_axes_may_be_moved_or_shared_by_leaf():
    params, x, y = make_net()
    loss = lambda p, batch, scale: scale["s"] * net(p, batch["x"], batch["y"])
    in_axes = ({"x": 1, "y": 0}, None)
    out = fg.per_sample_grads(loss, in_axes=in_axes)(params, {"x": x.T, "y": y}, {"s": 2.0})
    expected = jax.tree.map(lambda g: 2 * g, loop(net, params, x, y))
    assert_close(out.grads, expected)


def test_position_ids_shared_by_all_samples_need_no_copy():
    table = {"pos": jnp.arange(8.0).reshape(4, 2), "tok": jnp.ones((5, 2))}
    loss = lambda p, tok, pos: jnp.sum(jnp.tanh(p["tok"][tok] + p["pos"][pos]) ** 2)
    tokens, positions = jnp.array([[0, 1, 0], [4, 4, 4]]), jnp.array([0, 1, 3])
    out = fg.per_sample_grads(loss, in_axes=(0, None))(table, tokens, positions)
    assert_close(out.grads, loop(loss, table, tokens, jnp.stack([positions] * 2)))


def test_frozen_leaves_have_no_gradient_and_may_be_integers():
    params, x, y = make_net()
    full = loop(net, params, x, y)
    with_int = {**params, "step": jnp.int32(3)}
    loss = lambda p, x, y: net({k: p[k] for k in "wbv"}, x, y) * p["step"] / 3
    for spec in (["w", "step"], lambda path, leaf: path in ("w", "step"),
                 {"w": True, "b": False, "v": False, "step": True}):  # fmt: skip
        grads = fg.per_sample_grads(loss, frozen=spec)(with_int, x, y).grads
        assert grads["w"] is None
        assert grads["step"] is None
        assert_close({k: grads[k] for k in "bv"}, {k: full[k] for k in "bv"})


def test_a_frozen_weight_may_have_a_trained_bias():
    model = nn.Dense(3)
    variables = model.init(jax.random.key(0), jnp.ones(2))
    loss = lambda p, x: jnp.sum(model.apply(p, x) ** 2)
    grads = fg.per_sample_grads(loss, frozen="*/kernel")(variables, jnp.eye(2)).grads
    assert grads["params"]["kernel"] is None
    expected = loop(loss, variables, jnp.eye(2))
    assert_close(grads["params"]["bias"], expected["params"]["bias"])


def test_a_pattern_that_names_no_leaf_is_an_error_with_near_names():
    params, x, y = make_net()
    with pytest.raises(ValueError, match=r"frozen.*'ww'.*names none.*Near names: w"):
        fg.per_sample_grads(net, frozen="ww")(params, x, y)


def test_an_integer_leaf_is_refused_by_name():
    with pytest.raises(TypeError, match=r"params\['a'\]\[1\] of int32"):
        fg.per_sample_grads(lambda p, x: x)({"a": [1.0, jnp.int32(2)]}, jnp.ones(3))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda w, x: w * x, r"real floating scalar; got float32\(2,\)"),
        (lambda w, x: (w.sum(), x), "real floating scalar; got a tree"),
        (lambda w, x: jnp.int32(1), "real floating scalar; got int32"),
        (lambda w, x: w.sum() * 1j, "real floating scalar; got complex64"),
    ],
    ids=["vector", "pair", "integer", "complex"],
)
def test_a_loss_that_is_no_real_scalar_is_refused(loss, words):
    with pytest.raises(TypeError, match=words):
        fg.per_sample_grads(loss)(jnp.ones(2), jnp.ones((3, 2)))


def test_arguments_that_do_not_fit_are_refused():
    params, x, y = make_net()
    with pytest.raises(
        ValueError, match=r"same number of samples; got batch\[0\]: 5, batch\[1\]: 4"
    ):
        fg.per_sample_grads(net)(params, x, y[:4])
    with pytest.raises(ValueError, match="has a sample axis; got none"):
        fg.per_sample_grads(net, in_axes=None)(params, x[0], y[0])
    with pytest.raises(ValueError, match=r"batch\[1\] with shape \(\) and in_axes 0"):
        fg.per_sample_grads(net)(params, x, 1.0)
    with pytest.raises(ValueError, match="chunk_size is a positive number"):
        fg.per_sample_grads(net, chunk_size=0)
    with pytest.raises(TypeError, match="returns a pair"):
        fg.per_sample_grads(net, has_aux=True)(params, x, y)
    with pytest.raises(ValueError, match="a prefix has the structure"):
        fg.per_sample_grads(net, in_axes=(0, 0, 0))(params, x, y)


def dropout(w, x, key):
    return jnp.sum(w * x * jax.random.bernoulli(key, 0.5, x.shape))


def test_one_key_among_the_arguments_is_split_and_chunks_do_not_change_it():
    w, x, key = jnp.ones(32), jnp.ones((6, 32)), jax.random.key(1)
    rows = fg.per_sample_grads(dropout)(w, x, key).grads
    assert len({tuple(row) for row in np.asarray(rows).tolist()}) == 6
    expected = loop(dropout, w, x, jax.random.split(key, 6))
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(
        fg.per_sample_grads(dropout, chunk_size=4)(w, x, key).grads, expected
    )
    own = fg.per_sample_grads(dropout)(w, x, jax.random.split(key, 6)).grads
    np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_a_shared_key_is_refused_with_the_line_unless_it_is_wanted(make_key):
    w, x, key = jnp.ones(8), jnp.ones((3, 8)), make_key(1)
    with pytest.raises(ValueError, match=r"one key shared by all samples at .*\(dropout\)"):
        fg.per_sample_grads(dropout, in_axes=(0, None))(w, x, key)
    closed = lambda w, x: dropout(w, x, key)
    with pytest.raises(ValueError, match=r"one key shared by all samples at .*\(dropout\)"):
        fg.per_sample_grads(closed)(w, x)
    rows = fg.per_sample_grads(closed, randomness="same")(w, x).grads
    assert len({tuple(row) for row in np.asarray(rows).tolist()}) == 1


def test_a_key_folded_with_the_sample_is_the_samples_own():
    key = jax.random.key(0)
    loss = lambda w, i: w * jax.random.normal(jax.random.fold_in(key, i))
    rows = fg.per_sample_grads(loss)(1.0, jnp.arange(3)).grads
    assert len(set(np.asarray(rows).tolist())) == 3


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_batch_sharded_over_devices_gives_the_rows_of_one_device(chunk_size):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    params, x, y = make_net(n=8)
    split = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, y)]
    out = jax.jit(fg.per_sample_grads(net, chunk_size=chunk_size))(params, *split)
    assert_close(out.grads, loop(net, params, x, y))


@pytest.mark.parametrize(("check_vma", "chunk_size"), [(True, None), (False, None), (True, 1)])
def test_inside_shard_map_each_device_has_the_rows_of_its_own_samples(check_vma, chunk_size):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    params, x, y = make_net(n=8)
    rows = jax.shard_map(
        lambda p, x, y: fg.per_sample_grads(net, chunk_size=chunk_size)(p, x, y).grads,
        mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P("data"), check_vma=check_vma,
    )  # fmt: skip
    assert_close(jax.jit(rows)(params, x, y), loop(net, params, x, y))


def test_one_samples_bad_numbers_stay_in_its_row():
    # JAX maps the gradient of the filter as a convolution in groups, which the compiler widens
    # by zeros; zero times NaN is NaN: vmap of grad has it in every row.
    def loss(k, x):
        numbers = ("NWC", "WIO", "NWC")
        y = lax.conv_general_dilated(
            x[None], k, (1,), "SAME", dimension_numbers=numbers, feature_group_count=2
        )
        return jnp.sum(jnp.square(y)), y

    k, x = jnp.ones((3, 1, 4)), jnp.ones((4, 5, 2))
    rows = fg.per_sample_grads(loss, has_aux=True)
    run = jax.jit(rows)
    right = run(k, x)
    for bad in (np.nan, np.inf):
        found = run(k, x.at[2].set(bad))
        assert not np.isfinite(found.grads[2]).any()
        for got, expected in zip(found, right, strict=True):
            np.testing.assert_allclose(np.delete(got, 2, 0), np.delete(expected, 2, 0), rtol=1e-6)
    # And they may still be differentiated.
    ours = lambda x: jnp.sum(jnp.sin(rows(k, x).grads))
    by_hand = lambda x: sum(jnp.sum(jnp.sin(jax.grad(loss, has_aux=True)(k, row)[0])) for row in x)
    got, expected = jax.jit(lambda x: (jax.grad(ours)(x), jax.grad(by_hand)(x)))(x)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_low_precision_parameters_keep_their_dtype():
    params, x, y = make_net(dtype=jnp.bfloat16)
    grads = fg.per_sample_grads(net)(params, x, y).grads
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}


def test_complex_parameters_follow_jax_grad():
    w, x = jnp.array([1 + 2j, 3j]), jnp.array([[1.0, 2.0], [3j, 4.0]])
    loss = lambda w, x: jnp.abs(w @ x) ** 2
    np.testing.assert_allclose(fg.per_sample_grads(loss)(w, x).grads, loop(loss, w, x), rtol=1e-5)


def test_a_gradient_of_a_norm_of_per_sample_gradients_is_the_hand_made_one():
    params, x, y = make_net()

    def penalty(rows):
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(rows))

    def hand(p):
        rows = [jax.grad(net)(p, *sample) for sample in zip(x, y, strict=True)]
        return penalty(rows)

    ours = jax.jit(jax.grad(lambda p: penalty(fg.per_sample_grads(net)(p, x, y).grads)))(params)
    assert_close(ours, jax.jit(jax.grad(hand))(params), rtol=1e-4)


@pytest.mark.torch
@settings(max_examples=3)
@given(n=st.sampled_from([1, 5]), seed=st.integers(0, 99))
def test_rows_equal_torch_func(n, seed):
    import torch

    with jax.enable_x64(True):
        params, x, y = make_net(n, seed, jnp.float64)
        ours = fg.per_sample_grads(net)(params, x, y).grads

        def torch_net(p, x, y):
            hidden = torch.tanh(x @ p["w"] + p["b"])
            return torch.sum((hidden @ p["v"] - y) ** 2)

        to = lambda a: torch.tensor(np.asarray(a))
        theirs = torch.func.vmap(torch.func.grad(torch_net), (None, 0, 0))(
            {k: to(v) for k, v in params.items()}, to(x), to(y)
        )
        for name, rows in theirs.items():
            np.testing.assert_allclose(ours[name], rows.numpy(), rtol=1e-10)
