"""A gradient added up over micro-batches is that of the whole batch."""

import functools

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
from funcgrad._jaxpr import walk

X, Y, W = np.arange(6.0).reshape(3, 2), np.zeros(3), np.array([1.0, 2.0])
x32, y32, w32 = X.astype(np.float32), Y.astype(np.float32), W.astype(np.float32)


def sums(w, x, y):
    """Two sums: of the squares, and how many."""
    return jnp.sum((x @ w - y) ** 2), y.size


def each(w, x, y):
    """A loss and a weight for each sample."""
    return (x @ w - y) ** 2, jnp.ones(y.shape)


def net(params, tokens, targets):
    """Squares of what tokens are off by; a target below 0 is padding."""
    rows = params["embed"][tokens] @ params["w"]
    hidden = rows / (1 + rows * rows)  # no tanh, of which the compiler makes long programs
    counts = targets >= 0
    return jnp.where(counts, (hidden @ params["out"] - targets) ** 2, 0).sum(1), counts.sum(1)


def make_net(n=10, length=5, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = {"embed": (7, 4), "w": (4, 4), "out": (4,)}
    params = {k: np.asarray(rng.normal(size=s) / 2, dtype) for k, s in shapes.items()}
    tokens, targets = rng.integers(0, 7, (n, length)), rng.integers(0, 6, (n, length))
    targets[np.arange(length) >= rng.integers(1, length + 1, n)[:, None]] = -1
    return params, tokens.astype(np.int32), targets.astype(np.int32)


def run(fun, size, *args, mask=None, **options):
    """One program, since each operation outside of one is compiled by itself."""
    step = jax.jit(lambda *args, mask: fg.accumulate_grads(fun, size, **options)(*args, mask=mask))
    return step(*args, mask=mask)


@functools.partial(jax.jit, static_argnums=0)
def whole(fun, params, *batch):
    """The mean over the batch at once."""

    def mean(params):
        losses, weights = fun(params, *batch)
        return jnp.sum(losses) / jnp.sum(weights)

    return jax.value_and_grad(mean)(params)


def assert_close(a, b, rtol=2e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), a, b)


def test_c12_micro_batches_of_two_and_one_give_the_whole_and_not_the_mean_of_means():
    w, x, y = w32, x32, y32
    for out in jax.jit(lambda: [fg.accumulate_grads(each, n)(w, x, y) for n in (1, 2, 5)])():
        np.testing.assert_allclose(out.grads, [48, 64], rtol=1e-6)
        np.testing.assert_allclose(out.value, 88, rtol=1e-6)
        assert out.weight == 3
    means = (whole(each, w, x[:2], y[:2])[1] + whole(each, w, x[2:], y[2:])[1]) / 2
    np.testing.assert_allclose(means, [64, 83])


@pytest.mark.parametrize("size", [4, 10])
def test_b8_tokens_weigh_the_same_wherever_they_are(size):
    params, tokens, targets = make_net()
    out = run(net, size, params, tokens, targets)
    value, grads = whole(net, params, tokens, targets)
    assert_close(out.grads, grads)
    np.testing.assert_allclose(out.value, value, rtol=1e-6)
    assert out.weight == (targets >= 0).sum()


@pytest.mark.torch
def test_b8_as_torch_with_the_sum_of_the_weights(torch, x64):
    w, x = torch.tensor(W, requires_grad=True), torch.tensor(X)
    for micro in (x[:2], x[2:]):
        (((micro @ w) ** 2).sum() / len(x)).backward()
    out = run(each, 2, W, X, Y)
    np.testing.assert_allclose(out.grads, w.grad, rtol=1e-14)


def masked(size):
    return jax.jit(lambda *args, mask: fg.accumulate_grads(net, size)(*args, mask=mask))


_masked = masked(3)
_masked_whole = jax.jit(
    lambda params, tokens, targets, mask: whole(
        lambda *args: [jnp.where(mask, x, 0) for x in net(*args)], params, tokens, targets
    )
)


@given(bits=st.integers(1, 2**10 - 1))
def test_a_mask_leaves_samples_out(bits):
    batch = make_net()
    mask = np.array([bits >> i & 1 for i in range(10)], bool)
    out = _masked(*batch, mask=mask)
    value, grads = _masked_whole(*batch, mask)
    assert_close(out.grads, grads)
    np.testing.assert_allclose(out.value, value, rtol=1e-5)


def test_what_is_masked_out_may_be_nan_and_nothing_is_compiled_again():
    w, x, y = w32, x32, y32
    step = jax.jit(lambda x, mask: fg.accumulate_grads(each, 2)(w, x, y, mask=mask))
    exact = lambda x, y: 2 * x.T @ (x @ W - y) / len(y)
    for bad in range(3):
        mask = np.arange(3) != bad
        out = step(np.where(mask[:, None], x, np.nan), mask)
        np.testing.assert_allclose(out.grads, exact(X[mask], Y[mask]), rtol=1e-6)
    nothing = step(x * np.nan, np.zeros(3, bool))
    np.testing.assert_array_equal(nothing.grads, [0, 0])
    assert (nothing.value, nothing.weight) == (0, 0)
    assert step._cache_size() == 1


def test_a_sample_that_fills_up_the_rest_is_a_real_one():
    # At zeros the loss would have no finite gradient, and zero times infinity is NaN.
    root = lambda w, x: (jnp.sqrt(jnp.abs(x * w)), jnp.ones(x.shape))
    out = run(root, 2, 2.0, np.array([1.0, 2.0, 3.0], np.float32))
    assert np.isfinite(out.grads)


def test_an_empty_batch_gives_zeros():
    out = run(sums, 2, w32, x32[:0], y32[:0])
    np.testing.assert_array_equal(out.grads, [0, 0])
    assert (out.value, out.weight) == (0, 0)


def test_low_precision_adds_up_in_float32():
    # 256 + 1 is 256 in bfloat16: added up there, the small ones would be lost.
    loss = lambda w, x: (jnp.sum(w * x), x.size)
    x = np.ones(256, jnp.bfloat16)
    x[0] = 256
    out = run(loss, 1, np.ones((), jnp.bfloat16), x)
    assert out.grads.dtype == jnp.bfloat16
    assert out.value.dtype == jnp.float32
    np.testing.assert_allclose(np.float32(out.grads), 511 / 256, rtol=2**-8)
    np.testing.assert_allclose(out.value, 511 / 256, rtol=1e-6)
    plain = lax.scan(lambda total, x: (total + x, None), jnp.zeros((), jnp.bfloat16), x)[0]
    assert plain == 256


def test_float64_is_kept(x64):
    out = run(sums, 1, W / 3, X, Y)
    assert out.grads.dtype == out.value.dtype == jnp.float64
    np.testing.assert_allclose(out.grads, [16, 64 / 3], rtol=1e-14)
    np.testing.assert_allclose(out.value, 88 / 9, rtol=1e-14)
    above = lambda w, x: (w * x, jnp.float32(w * x > 0))  # narrower than the default
    assert run(above, 1, np.float32(1), x32[:, 1]).weight == 3
    low = run(lambda w, x: ((w * x), jnp.full(x.shape, 2**24 + 1)), 2, np.float32(1), x32[:, 1])
    assert (low.value.dtype, low.grads.dtype) == (jnp.float32, jnp.float32)
    assert low.weight == 3 * (2**24 + 1)  # more than float32 counts


def test_argnums_in_axes_aux_and_keys():
    def fun(x, a, scale, b, key):
        noise = jax.random.normal(key, x.shape)
        losses = (x * a * scale + b) ** 2
        return losses.sum(), losses.size, {"noise": noise, "first": x[0]}

    x, scale = np.arange(1, 7, dtype=np.float32), np.float32(3.0)
    step = fg.accumulate_grads(fun, 2, argnums=(1, -2), has_aux=True, in_axes=(0, None, 0))
    out = jax.jit(step)(x, 2.0, scale, 1.0, jax.random.key(0))
    residue = x * 6 + 1
    assert_close(out.grads, (np.mean(2 * residue * x * 3), np.mean(2 * residue)))
    assert out.aux["noise"].shape == (3, 2)
    assert len(np.unique(out.aux["noise"])) == 6  # no two micro-batches draw the same
    np.testing.assert_array_equal(out.aux["first"], [1, 2, 3])  # every third sample
    columns = run(sums, 1, w32, x32.T, y32, in_axes=[1, -1])
    np.testing.assert_allclose(columns.grads, [48, 64])


def test_frozen_leaves_have_no_gradient_and_sgd_skips_none():
    params, tokens, targets = make_net()
    out = run(net, 4, params, tokens, targets, frozen="embed")
    assert out.grads["embed"] is None
    rest = {k: v for k, v in params.items() if k != "embed"}
    embed = jnp.asarray(params["embed"])
    on_rest = lambda rest, *batch: net({"embed": embed, **rest}, *batch)
    del out.grads["embed"]
    assert_close(out.grads, whole(on_rest, rest, tokens, targets)[1])
    jaxpr = jax.make_jaxpr(fg.accumulate_grads(net, 4, frozen="embed"))(params, tokens, targets)
    # The gradient of the lookup would be added up in a table.
    shapes = [v.eqn.outvars[0].aval.shape for v in walk(jaxpr) if "scatter" in str(v.eqn.primitive)]
    assert (7, 4) not in shapes
    stepped = run(net, 4, params, tokens, targets, frozen=["*"])
    assert jax.tree.leaves(stepped.grads) == []
    counter = {"w": w32, "steps": np.int32(3)}
    with_counter = lambda p, x, y: sums(p["w"], x, y)
    with pytest.raises(TypeError, match=r"floating; got int32 in params\['steps'\]\. Name it in"):
        fg.accumulate_grads(with_counter, 1)(counter, X, Y)
    out = run(with_counter, 1, counter, x32, y32, frozen="steps")
    np.testing.assert_allclose(out.grads["w"], [48, 64])


def test_with_checkpoint_inside_and_derivatives_outside():
    params, tokens, targets = make_net()
    mean = fg.accumulate_grads(jax.checkpoint(net), 5)
    value, grads = whole(net, params, tokens, targets)

    @jax.jit
    def derivatives(params):
        outer = jax.grad(lambda p: mean(p, tokens, targets).value)(params)
        inner, second = jax.jvp(lambda p: mean(p, tokens, targets).grads, (params,), (params,))
        by_hand = jax.jvp(lambda p: whole(net, p, tokens, targets)[1], (params,), (params,))[1]
        values = lambda s: mean(jax.tree.map(lambda p: p * s, params), tokens, targets).value
        return outer, inner, second, by_hand, jax.vmap(values)(jnp.array([1.0, 0.0]))

    outer, inner, second, by_hand, many = derivatives(params)
    assert_close(outer, grads)
    assert_close(inner, grads)
    assert_close(second, by_hand, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(many[0], value, rtol=1e-5)


def test_clipped_sample_gradients_add_up_by_chunks_with_one_reduction():
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in {"w": (4, 4), "v": 4}.items()}
    x, y = (rng.normal(size=s).astype(np.float32) for s in [(16, 4), 16])

    @jax.checkpoint
    def loss(params, x, y):
        return (jnp.maximum(params["w"] @ x, 0) @ params["v"] - y) ** 2

    # A sample at a time, the frozen leaf outside of the norm.
    expected, norms = np.zeros(4), []
    for x_i, y_i in zip(np.float64(x), np.float64(y), strict=True):
        hidden = np.maximum(params["w"] @ x_i, 0)
        grad = 2 * (hidden @ params["v"] - y_i) * hidden
        norms.append(np.linalg.norm(grad))
        expected += grad * min(1, 2 / max(norms[-1], 1e-9))
    assert min(norms) < 2 < max(norms)

    clipped = fg.clipped_grad(loss, max_norm=2.0, chunk_size=2, frozen="w")
    local = lambda *args: lax.psum(clipped(*args).grads, "data")
    step = jax.shard_map(
        local, mesh=make_mesh(), in_specs=(P(), P("data"), P("data")), out_specs=P()
    )
    got = jax.jit(step)(params, x, y)
    assert got["w"] is None
    np.testing.assert_allclose(got["v"], expected, rtol=1e-4, atol=1e-5)
    assert [trips for _, trips in psums(step, params, x, y)] == [1]
    half = jax.jit(clipped)
    halves = [half(params, x[i : i + 8], y[i : i + 8]).grads["v"] for i in (0, 8)]
    np.testing.assert_allclose(sum(halves), expected, rtol=1e-4, atol=1e-5)


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
    step = jax.shard_map(
        local, mesh=make_mesh(), in_specs=(P(), P("data"), P("data")), out_specs=P()
    )
    value, grads = whole(net, params, tokens, targets)
    got_value, got, weight = jax.jit(step)(params, tokens, targets)
    assert_close(got, grads)
    np.testing.assert_allclose(got_value, value, rtol=1e-5)
    assert weight == (targets >= 0).sum()
    assert [trips for _, trips in psums(step, params, tokens, targets)] == [1]

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
    x = np.arange(4, dtype=np.float32)
    loss = lambda w, x: (jnp.sum(w * x), x.size)
    step = jax.shard_map(
        lambda w, x: fg.accumulate_grads(loss, 1)(w, x).grads, mesh=make_mesh(),
        in_specs=(P(), P("data")), out_specs=P(),
    )  # fmt: skip
    assert jax.jit(step)(2.0, x) == 1.5  # the mean of 0, 1, 2, 3; pmean of the gradient gives 6


def test_devices_of_unequal_weight_a_mask_and_a_rest():
    params, tokens, targets = make_net(n=12)
    mask = np.arange(12) < 7  # the last device has nothing that counts
    local = lambda p, a, b, mask: fg.accumulate_grads(net, 2)(p, a, b, mask=mask)[:3]
    spec = P("data")
    step = jax.shard_map(local, mesh=make_mesh(), in_specs=(P(), spec, spec, spec), out_specs=P())
    value, grads, _ = jax.jit(step)(params, tokens, targets, mask)
    assert_close((value, grads), whole(net, params, tokens[mask], targets[mask]))


def test_parameters_sharded_over_the_batchs_axis_are_not_reduced_twice():
    x, y = np.arange(16, dtype=np.float32).reshape(8, 2) / 8, np.ones(8, np.float32)

    def fun(params, x, y):
        w = lax.all_gather(params["w"], "data", tiled=True)[:2]
        return (x @ w + params["b"] - y) ** 2, jnp.ones(y.shape)

    params = {"w": np.array([1, 2, 0, 0], np.float32), "b": np.float32(0.5)}
    specs = {"w": P("data"), "b": P()}
    step = jax.shard_map(
        lambda *args: fg.accumulate_grads(fun, 1)(*args).grads, mesh=make_mesh(),
        in_specs=(specs, P("data"), P("data")), out_specs=specs,
    )  # fmt: skip
    flat = lambda p, x, y: ((x @ p["w"][:2] + p["b"] - y) ** 2, jnp.ones(y.shape))
    assert_close(jax.jit(step)(params, x, y), whole(flat, params, x, y)[1])


def test_what_is_reduced_already_is_refused():
    w, x, y = w32, np.ones((8, 2), np.float32), np.ones(8, np.float32)

    def refuse(fun, check_vma=True):
        step = jax.shard_map(
            lambda w, x, y: fg.accumulate_grads(fun, 1)(w, x, y)[:3], mesh=make_mesh(),
            in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=check_vma,
        )  # fmt: skip
        jax.eval_shape(step, w, x, y)

    with pytest.raises(ValueError, match="got losses reduced over data. Leave that reduction out"):
        refuse(lambda w, x, y: (lax.psum(sums(w, x, y)[0], "data"), y.size))
    with pytest.raises(ValueError, match="got weights reduced over data. Leave that reduction out"):
        refuse(lambda w, x, y: (sums(w, x, y)[0], lax.psum(jnp.sum(y), "data")))
    with pytest.raises(ValueError, match="check_vma=False nothing says what differs"):
        refuse(sums, check_vma=False)


def refused(words, fun, *args, error=ValueError, size=1, mask=None, **options):
    """The arguments are those given, and nothing is computed up to the error."""
    with pytest.raises(error, match=words):
        jax.eval_shape(lambda: fg.accumulate_grads(fun, size, **options)(*args, mask=mask))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a22_a_batch_sharded_under_jit(kind):
    params, tokens, targets = make_net(n=16)
    mesh = make_mesh(kind=kind)
    mask = np.arange(16) != 3
    if kind == AxisType.Explicit:  # a lookup in a table has to say how its result lies
        w, x, y = np.ones(5, np.float32), tokens / np.float32(3), targets[:, 0] / np.float32(2)
        batch = jax.device_put((x, y), NamedSharding(mesh, P("data")))
        placed = jax.device_put(mask, NamedSharding(mesh, P("data")))

        @jax.jit
        def all_three(batch, placed):
            eights = fg.accumulate_grads(each, 8)
            rest = fg.accumulate_grads(each, 3)(w, *batch, mask=placed)
            return eights(w, *batch), rest, eights(w, *batch, mask=mask)

        with jax.set_mesh(mesh):
            out, rest, part = all_three(batch, placed)
        residues = x @ w - y
        np.testing.assert_allclose(out.grads, 2 * x.T @ residues / 16, rtol=1e-5)
        expected = 2 * x[mask].T @ residues[mask] / 15
        np.testing.assert_allclose(rest.grads, expected, rtol=1e-5)
        np.testing.assert_allclose(part.grads, expected, rtol=1e-5)
        return
    value, grads = whole(net, params, tokens[mask], targets[mask])
    batch = jax.device_put((tokens, targets), NamedSharding(mesh, P("data")))
    out = run(net, 8, params, *batch, mask=mask)
    assert_close(jax.device_get(out[:2]), jax.device_get((value, grads)))


def test_weights_that_move_with_the_parameters_are_refused():
    w, x, y = w32, x32, y32
    moving = lambda w, x, y: (sums(w, x, y)[0], jnp.sum(x @ w))
    refused("weights do not depend on the parameters", moving, w, x, y)
    # Through integers, or stopped, there is no derivative.
    above = lambda w, x, y: (sums(w, x, y)[0], jnp.sum(x @ w > 2))
    stopped = lambda w, x, y: (sums(w, x, y)[0], lax.stop_gradient(jnp.sum(x @ w)))
    both = jax.jit(lambda: [fg.accumulate_grads(f, 1)(w, x, y).weight for f in (above, stopped)])
    assert both() == [2, 24]


def test_other_mistakes_are_named():
    w, x, y = w32, x32, y32
    refused("microbatch_size is a positive number of samples; got 0", sums, w, x, y, size=0)
    refused(r"returns \(losses, weights\).*got .*Tracer|ArrayImpl", lambda *a: sums(*a)[0], w, x, y)
    refused("got 2 outputs", sums, w, x, y, has_aux=True)
    refused(r"one shape; got \(1,\) and \(\)", lambda *a: (each(*a)[0], 1), w, x, y)
    counts = lambda w, x, y: (1, 1)
    refused("losses are real and floating; got int32", counts, w, x, y, error=TypeError)
    refused("got shape \\(\\) for 2 samples, with a rest of 1 samples", sums, w, x, y, size=2)
    refused("got shape \\(\\) for 1 samples, with a mask", sums, w, x, y, mask=np.ones(3, bool))
    floats = np.ones(3, np.float32)
    refused(r"mask is one boolean per sample; got float32\(3,\)", each, w, x, y, mask=floats)
    refused(r"batch\[0\]: 3, batch\[1\]: 2", sums, w, x, y[:2])
    refused("got none", sums, w, x, y, in_axes=None)
    refused(r"batch\[1\] with shape \(\) and in_axes 0", sums, w, x, 1.0)
    refused("argnums are positions of arguments; got 3", sums, w, x, y, argnums=3)
    refused("'v', which names none", sums, {"w": w}, x, y, frozen="v")
    for wrong in ((), (0, 0), (0, -3)):
        refused("argnums name each argument to differentiate once", sums, w, x, y, argnums=wrong)
    refused("batch.0. with shape .* and in_axes 0.0", sums, w, x, y, in_axes=(0.0, 0))
    refused("microbatch_size is a positive number of samples; got True", sums, w, x, y, size=True)
    turning = lambda w, x, y: (each(w, x, y)[0], jnp.full(y.shape, 1j))
    refused("weights are real; got complex64", turning, w, x, y, error=TypeError)


def test_what_all_share_may_be_a_python_value():
    fun = lambda w, x, y, square: each(w, x, y) if square else None
    table = np.array([1, 2], np.float32)  # looked up by a traced index
    lookup = lambda w, i, table: (w * table[i], jnp.ones(i.shape))

    @jax.jit
    def all_three():
        out = fg.accumulate_grads(fun, 2, in_axes=(0, 0, None))(w32, x32, y32, True)
        looked = fg.accumulate_grads(lookup, 1, in_axes=(0, None))
        listed = fg.accumulate_grads(each, 2)(w32, x32, y32, mask=[True, False, True])
        return out, looked(np.float32(1), np.array([0, 1]), table), listed

    out, looked, listed = all_three()
    np.testing.assert_allclose(out.grads, [48, 64], rtol=1e-6)
    assert looked.grads == 1.5
    assert listed.weight == 2


def test_rows_of_aux_are_put_in_the_samples_order_as_the_docstring_says():
    fun = lambda w, x, y: (*each(w, x, y), {"x": x, "none": None, "i": jnp.argmax(x, 1)})
    aux = run(fun, 2, w32, x32, y32, has_aux=True).aux
    rows = jnp.swapaxes(aux["x"], 0, 1).reshape(-1, *aux["x"].shape[2:])[:3]
    np.testing.assert_array_equal(rows, X)
    assert (aux["none"], aux["i"].dtype) == (None, jnp.int32)


def test_features_split_over_an_axis_and_keys_of_each_device():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x, y = np.arange(8, dtype=np.float32).reshape(4, 2), np.ones(4, np.float32)

    def split(w, x, y, key):
        seen = lax.psum(x[:, lax.axis_index("model")] * w[0], "model")
        noise = 0 * jax.random.normal(key, ())
        return (seen + noise - y) ** 2, jnp.ones(y.shape)

    def local(w, x, y, key):
        key = jax.random.fold_in(key, lax.axis_index("data"))
        return fg.accumulate_grads(split, 1)(w, x, y, key).grads

    spec = P("data")
    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P("model"), spec, spec, P()), out_specs=P("model")
    )
    got = jax.jit(step)(w32, x, y, jax.random.key(0))
    np.testing.assert_allclose(got, x.T @ (x @ W - y) / 2, rtol=1e-6)
