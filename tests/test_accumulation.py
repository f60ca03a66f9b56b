"""A gradient added up over micro-batches is that of the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from funcgrad._jaxpr import walk

X, Y, W = np.arange(6.0).reshape(3, 2), np.zeros(3), np.array([1.0, 2.0])


def sums(w, x, y):
    """Two sums: of the squares, and how many."""
    return jnp.sum((x @ w - y) ** 2), y.size


def each(w, x, y):
    """A loss and a weight for each sample."""
    return (x @ w - y) ** 2, jnp.ones(y.shape)


def net(params, tokens, targets):
    """Cross-entropy of tokens; a target below 0 is padding."""
    hidden = jnp.tanh(params["embed"][tokens] @ params["w"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        hidden @ params["out"], jnp.maximum(targets, 0)
    )
    counts = targets >= 0
    return jnp.where(counts, losses, 0).sum(1), counts.sum(1)


def make_net(n=10, length=5, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = {"embed": (7, 4), "w": (4, 4), "out": (4, 6)}
    params = {k: jnp.asarray(rng.normal(size=s) / 2, dtype) for k, s in shapes.items()}
    tokens, targets = rng.integers(0, 7, (n, length)), rng.integers(0, 6, (n, length))
    targets[np.arange(length) >= rng.integers(1, length + 1, n)[:, None]] = -1
    return params, jnp.asarray(tokens), jnp.asarray(targets)


def whole(fun, params, *batch):
    """The mean over the batch at once."""

    def mean(params):
        losses, weights = fun(params, *batch)
        return jnp.sum(losses) / jnp.sum(weights)

    return jax.value_and_grad(mean)(params)


def assert_close(a, b, rtol=2e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), a, b)


def test_c12_micro_batches_of_two_and_one_give_the_whole_and_not_the_mean_of_means():
    w, x, y = map(jnp.asarray, (W, X, Y))
    for size in (1, 2, 3, 5):
        out = fg.accumulate_grads(each, size)(w, x, y)
        np.testing.assert_allclose(out.grads, [48, 64], rtol=1e-6)
        np.testing.assert_allclose(out.value, 88, rtol=1e-6)
        assert out.weight == 3
    grad = jax.grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2))
    means = (grad(w, x[:2], y[:2]) + grad(w, x[2:], y[2:])) / 2
    np.testing.assert_allclose(means, [64, 83])


@pytest.mark.parametrize("size", [1, 3, 4, 10])
def test_b8_tokens_weigh_the_same_wherever_they_are(size):
    params, tokens, targets = make_net()
    out = jax.jit(fg.accumulate_grads(net, size))(params, tokens, targets)
    value, grads = whole(net, params, tokens, targets)
    assert_close(out.grads, grads)
    np.testing.assert_allclose(out.value, value, rtol=1e-6)
    assert out.weight == (targets >= 0).sum()


@pytest.mark.torch
def test_b8_as_torch_with_the_sum_of_the_weights(torch, x64):
    w, x = torch.tensor(W, requires_grad=True), torch.tensor(X)
    for micro in (x[:2], x[2:]):
        (((micro @ w) ** 2).sum() / len(x)).backward()
    out = fg.accumulate_grads(each, 2)(jnp.asarray(W), jnp.asarray(X), jnp.asarray(Y))
    np.testing.assert_allclose(out.grads, w.grad, rtol=1e-14)


def masked(size):
    return jax.jit(lambda *args, mask: fg.accumulate_grads(net, size)(*args, mask=mask))


_masked = {3: masked(3), 4: masked(4)}
_masked_whole = jax.jit(
    lambda params, tokens, targets, mask: whole(
        lambda *args: [jnp.where(mask, x, 0) for x in net(*args)], params, tokens, targets
    )
)


@given(bits=st.integers(1, 2**10 - 1), size=st.sampled_from([3, 4]))
def test_a_mask_leaves_samples_out(bits, size):
    batch = make_net()
    mask = np.array([bits >> i & 1 for i in range(10)], bool)
    out = _masked[size](*batch, mask=mask)
    value, grads = _masked_whole(*batch, mask)
    assert_close(out.grads, grads)
    np.testing.assert_allclose(out.value, value, rtol=1e-5)


def test_what_is_masked_out_may_be_nan_and_nothing_is_compiled_again():
    w, x, y = map(jnp.asarray, (W, X, Y))
    run = jax.jit(lambda x, mask: fg.accumulate_grads(each, 2)(w, x, y, mask=mask))
    for bad in range(3):
        mask = np.arange(3) != bad
        out = run(x.at[bad].set(jnp.nan), mask)
        np.testing.assert_allclose(out.grads, whole(each, w, x[mask], y[mask])[1], rtol=1e-6)
    nothing = run(x * jnp.nan, np.zeros(3, bool))
    np.testing.assert_array_equal(nothing.grads, [0, 0])
    assert (nothing.value, nothing.weight) == (0, 0)
    assert run._cache_size() == 1


def test_a_sample_that_fills_up_the_rest_is_a_real_one():
    # At zeros the loss would have no finite gradient, and zero times infinity is NaN.
    root = lambda w, x: (jnp.sqrt(jnp.abs(x * w)), jnp.ones(x.shape))
    out = fg.accumulate_grads(root, 2)(2.0, jnp.array([1.0, 2.0, 3.0]))
    assert np.isfinite(out.grads)


def test_an_empty_batch_gives_zeros():
    out = fg.accumulate_grads(sums, 2)(jnp.asarray(W), jnp.zeros((0, 2)), jnp.zeros(0))
    np.testing.assert_array_equal(out.grads, [0, 0])
    assert (out.value, out.weight) == (0, 0)


def test_low_precision_adds_up_in_float32():
    # 256 + 1 is 256 in bfloat16: added up there, the small ones would be lost.
    loss = lambda w, x: (jnp.sum(w * x), x.size)
    x = jnp.concatenate([jnp.full(1, 256.0), jnp.ones(255)]).astype(jnp.bfloat16)
    out = fg.accumulate_grads(loss, 1)(jnp.ones((), jnp.bfloat16), x)
    assert out.grads.dtype == jnp.bfloat16
    assert out.value.dtype == jnp.float32
    np.testing.assert_allclose(out.grads.astype(jnp.float32), 511 / 256, rtol=2**-8)
    np.testing.assert_allclose(out.value, 511 / 256, rtol=1e-6)
    plain = lax.scan(lambda total, x: (total + x, None), jnp.zeros((), jnp.bfloat16), x)[0]
    assert plain == 256


def test_float64_is_kept(x64):
    out = fg.accumulate_grads(sums, 1)(*map(jnp.asarray, (W, X, Y)))
    assert out.grads.dtype == jnp.float64
    np.testing.assert_allclose(out.grads, [48, 64], rtol=1e-14)


def test_argnums_in_axes_aux_and_keys():
    def fun(x, a, scale, b, key):
        noise = jax.random.normal(key, x.shape)
        losses = (x * a * scale + b) ** 2
        return losses.sum(), losses.size, {"noise": noise, "first": x[0]}

    x, scale = jnp.arange(1.0, 7.0), jnp.float32(3.0)
    run = fg.accumulate_grads(fun, 2, argnums=(1, -2), has_aux=True, in_axes=(0, None, 0))
    out = run(x, 2.0, scale, 1.0, jax.random.key(0))
    expected = jax.grad(lambda a, b: jnp.mean((x * a * scale + b) ** 2), (0, 1))(2.0, 1.0)
    assert_close(out.grads, expected)
    assert out.aux["noise"].shape == (3, 2)
    assert len(np.unique(out.aux["noise"])) == 6  # no two micro-batches draw the same
    np.testing.assert_array_equal(out.aux["first"], [1, 2, 3])  # every third sample
    columns = fg.accumulate_grads(sums, 1, in_axes=(1, 0))(jnp.asarray(W), X.T, Y)
    np.testing.assert_allclose(columns.grads, [48, 64])


def test_frozen_leaves_have_no_gradient_and_sgd_skips_none():
    params, tokens, targets = make_net()
    out = fg.accumulate_grads(net, 4, frozen="embed")(params, tokens, targets)
    assert out.grads["embed"] is None
    rest = {k: v for k, v in params.items() if k != "embed"}
    on_rest = lambda rest, *batch: net({**params, **rest}, *batch)
    del out.grads["embed"]
    assert_close(out.grads, whole(on_rest, rest, tokens, targets)[1])
    jaxpr = jax.make_jaxpr(fg.accumulate_grads(net, 4, frozen="embed"))(params, tokens, targets)
    # The gradient of the lookup would be added up in a table.
    shapes = [v.eqn.outvars[0].aval.shape for v in walk(jaxpr) if "scatter" in str(v.eqn.primitive)]
    assert (7, 4) not in shapes
    stepped = fg.accumulate_grads(net, 4, frozen=["*"])(params, tokens, targets)
    assert jax.tree.leaves(stepped.grads) == []
    counter = {"w": jnp.asarray(W), "steps": jnp.array(3)}
    with_counter = lambda p, x, y: sums(p["w"], x, y)
    with pytest.raises(TypeError, match=r"floating; got int32 in params\['steps'\]\. Name it in"):
        fg.accumulate_grads(with_counter, 1)(counter, X, Y)
    out = fg.accumulate_grads(with_counter, 1, frozen="steps")(counter, X, Y)
    np.testing.assert_allclose(out.grads["w"], [48, 64])


def test_with_checkpoint_inside_and_derivatives_outside():
    params, tokens, targets = make_net()
    run = fg.accumulate_grads(jax.checkpoint(net), 5)
    value, grads = whole(net, params, tokens, targets)
    assert_close(run(params, tokens, targets).grads, grads)
    outer = jax.grad(lambda p: run(p, tokens, targets).value)(params)
    assert_close(outer, grads)
    second = lambda g: jax.jvp(g, (params,), (params,))[1]
    assert_close(
        jax.jit(lambda: second(lambda p: run(p, tokens, targets).grads))(),
        second(lambda p: whole(net, p, tokens, targets)[1]),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip
    many = jax.vmap(lambda s: run(jax.tree.map(lambda p: p * s, params), tokens, targets).value)
    np.testing.assert_allclose(many(jnp.array([1.0, 0.0]))[0], value, rtol=1e-5)


def test_clipping_each_sample_inside_a_micro_batch():
    params, tokens, targets = make_net()

    def loss(params, tokens, targets):
        return net(params, tokens[None], targets[None])[0][0]

    def clipped(params, tokens, targets):
        frozen = lax.stop_gradient(params)
        norms = fg.per_sample(loss)(frozen, tokens, targets).norms()
        losses = jax.vmap(loss, (None, 0, 0))(params, tokens, targets)
        return losses * jnp.minimum(1, 0.5 / norms), jnp.ones(losses.shape)

    out = jax.jit(fg.accumulate_grads(clipped, 4))(params, tokens, targets)
    expected = fg.clipped_grad(loss, max_norm=0.5, mean_over=10)(params, tokens, targets)
    assert_close(out.grads, expected.grads)


def test_memory_does_not_grow_with_the_number_of_micro_batches():
    params, *_ = make_net()

    def temporaries(n):
        shape = jax.ShapeDtypeStruct((n, 64), jnp.int32)
        return (
            jax.jit(fg.accumulate_grads(net, 8)).lower(params, shape, shape).compile()
        ).memory_analysis().temp_size_in_bytes  # fmt: skip

    few, many = temporaries(32), temporaries(512)
    at_once = jax.jit(functools.partial(whole, net)).lower(
        params, *[jax.ShapeDtypeStruct((512, 64), jnp.int32)] * 2
    )
    assert many <= few * 1.01
    assert many < at_once.compile().memory_analysis().temp_size_in_bytes / 10


def make_mesh(n=4, kind=AxisType.Auto):
    return jax.make_mesh((n,), ("data",), axis_types=(kind,))


def psums(fun, *args):
    found = [v for v in walk(jax.make_jaxpr(fun)(*args)) if v.eqn.primitive.name.startswith("psum")]
    return [(v.eqn.primitive.name, v.trips) for v in found]


def test_b1_inside_shard_map_all_devices_together_with_one_reduction():
    params, tokens, targets = make_net(n=16)
    local = lambda *args: fg.accumulate_grads(net, 2)(*args)[:3]
    run = jax.shard_map(
        local, mesh=make_mesh(), in_specs=(P(), P("data"), P("data")), out_specs=P()
    )
    value, grads = whole(net, params, tokens, targets)
    got_value, got, weight = jax.jit(run)(params, tokens, targets)
    assert_close(got, grads)
    np.testing.assert_allclose(got_value, value, rtol=1e-5)
    assert weight == (targets >= 0).sum()
    assert [trips for _, trips in psums(run, params, tokens, targets)] == [1]

    def by_hand(params, tokens, targets):
        def step(total, micro):
            grads = jax.grad(lambda p: net(p, *micro)[0].sum())(params)
            return jax.tree.map(jnp.add, total, grads), None

        rows = tokens.reshape(2, 2, -1), targets.reshape(2, 2, -1)
        return lax.scan(step, jax.tree.map(jnp.zeros_like, params), rows)[0]

    naive = jax.shard_map(
        by_hand, mesh=make_mesh(), in_specs=(P(), P("data"), P("data")), out_specs=P()
    )
    assert [trips for _, trips in psums(naive, params, tokens, targets)] == [2, 2, 2]


def test_b1_six_and_not_one_and_a_half():
    x = jnp.arange(4.0)
    loss = lambda w, x: (jnp.sum(w * x), x.size)
    run = jax.shard_map(
        lambda w, x: fg.accumulate_grads(loss, 1)(w, x).grads, mesh=make_mesh(),
        in_specs=(P(), P("data")), out_specs=P(),
    )  # fmt: skip
    assert run(2.0, x) == 1.5  # the mean of 0, 1, 2, 3; pmean of the gradient gives 6


def test_devices_of_unequal_weight_a_mask_and_a_rest():
    params, tokens, targets = make_net(n=12)
    mask = np.arange(12) < 7  # the last device has nothing that counts
    local = lambda p, a, b, mask: fg.accumulate_grads(net, 2)(p, a, b, mask=mask)[:3]
    spec = P("data")
    run = jax.shard_map(local, mesh=make_mesh(), in_specs=(P(), spec, spec, spec), out_specs=P())
    value, grads, _ = jax.jit(run)(params, tokens, targets, mask)
    assert_close((value, grads), whole(net, params, tokens[mask], targets[mask]))


def test_parameters_sharded_over_the_batchs_axis_are_not_reduced_twice():
    x, y = jnp.arange(16.0).reshape(8, 2) / 8, jnp.ones(8)

    def fun(params, x, y):
        w = lax.all_gather(params["w"], "data", tiled=True)[:2]
        return (x @ w + params["b"] - y) ** 2, jnp.ones(y.shape)

    params = {"w": jnp.array([1.0, 2.0, 0.0, 0.0]), "b": jnp.float32(0.5)}
    specs = {"w": P("data"), "b": P()}
    run = jax.shard_map(
        lambda *args: fg.accumulate_grads(fun, 1)(*args).grads, mesh=make_mesh(),
        in_specs=(specs, P("data"), P("data")), out_specs=specs,
    )  # fmt: skip
    flat = lambda p, x, y: ((x @ p["w"][:2] + p["b"] - y) ** 2, jnp.ones(y.shape))
    assert_close(jax.jit(run)(params, x, y), whole(flat, params, x, y)[1])


def test_what_is_reduced_already_is_refused():
    w, x, y = jnp.asarray(W), jnp.ones((8, 2)), jnp.ones(8)

    def run(fun, check_vma=True):
        jax.shard_map(
            lambda w, x, y: fg.accumulate_grads(fun, 1)(w, x, y)[:3], mesh=make_mesh(),
            in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=check_vma,
        )(w, x, y)  # fmt: skip

    with pytest.raises(ValueError, match="got losses reduced over data. Leave that reduction out"):
        run(lambda w, x, y: (lax.psum(sums(w, x, y)[0], "data"), y.size))
    with pytest.raises(ValueError, match="got weights reduced over data. Leave that reduction out"):
        run(lambda w, x, y: (sums(w, x, y)[0], lax.psum(jnp.sum(y), "data")))
    with pytest.raises(ValueError, match="check_vma=False nothing says what differs"):
        run(sums, check_vma=False)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a22_a_batch_sharded_under_jit(kind):
    params, tokens, targets = make_net(n=16)
    mesh = make_mesh(kind=kind)
    mask = np.arange(16) != 3
    value, grads = whole(net, params, tokens[mask], targets[mask])
    if kind == AxisType.Explicit:  # a lookup in a table has to say how its result lies
        loss = lambda w, x, y: (jnp.sum((x @ w - y) ** 2), y.size)
        w, x, y = jnp.ones((5, 2)), tokens / 3, targets[:, :2] / 2
        batch = jax.device_put((x, y), NamedSharding(mesh, P("data")))
        with jax.set_mesh(mesh):
            out = jax.jit(fg.accumulate_grads(loss, 8))(w, *batch)
        assert_close(jax.device_get(out.grads), whole(loss, w, x, y)[1])
        return
    batch = jax.device_put((tokens, targets), NamedSharding(mesh, P("data")))
    run = jax.jit(lambda *args: fg.accumulate_grads(net, 8)(*args, mask=mask))
    assert_close(jax.device_get(run(params, *batch)[:2]), jax.device_get((value, grads)))


def test_weights_that_move_with_the_parameters_are_refused():
    w, x, y = map(jnp.asarray, (W, X, Y))
    with pytest.raises(ValueError, match="weights do not depend on the parameters"):
        fg.accumulate_grads(lambda w, x, y: (sums(w, x, y)[0], jnp.sum(x @ w)), 1)(w, x, y)
    # Through integers, or stopped, there is no derivative.
    above = lambda w, x, y: (sums(w, x, y)[0], jnp.sum(x @ w > 2))
    stopped = lambda w, x, y: (sums(w, x, y)[0], lax.stop_gradient(jnp.sum(x @ w)))
    assert fg.accumulate_grads(above, 1)(w, x, y).weight == 2
    assert fg.accumulate_grads(stopped, 1)(w, x, y).weight == 24


def refused(words, fun, *args, error=ValueError, size=1, mask=None, **options):
    with pytest.raises(error, match=words):
        fg.accumulate_grads(fun, size, **options)(*args, mask=mask)


def test_other_mistakes_are_named():
    w, x, y = map(jnp.asarray, (W, X, Y))
    refused("microbatch_size is a positive number of samples; got 0", sums, w, x, y, size=0)
    refused(r"returns \(losses, weights\).*got .*Tracer|ArrayImpl", lambda *a: sums(*a)[0], w, x, y)
    refused("got 2 outputs", sums, w, x, y, has_aux=True)
    refused(r"one shape; got \(1,\) and \(\)", lambda *a: (each(*a)[0], 1), w, x, y)
    counts = lambda w, x, y: (1, 1)
    refused("losses are real and floating; got int32", counts, w, x, y, error=TypeError)
    refused("got shape \\(\\) for 2 samples, with a rest of 1 samples", sums, w, x, y, size=2)
    refused("got shape \\(\\) for 1 samples, with a mask", sums, w, x, y, mask=np.ones(3, bool))
    refused(r"mask is one boolean per sample; got float32\(3,\)", each, w, x, y, mask=jnp.ones(3))
    refused(r"batch\[0\]: 3, batch\[1\]: 2", sums, w, x, y[:2])
    refused("got none", sums, w, x, y, in_axes=None)
    refused(r"batch\[1\] with shape \(\) and in_axes 0", sums, w, x, 1.0)
    refused("argnums are positions of arguments; got 3", sums, w, x, y, argnums=3)
    refused("'v', which names none", sums, {"w": w}, x, y, frozen="v")
