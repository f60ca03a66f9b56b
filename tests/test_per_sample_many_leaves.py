"""Models of many small leaves, whose norms are taken together, beside one sample at a time."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from funcgrad._per_sample._sums import alike, sum_by_pairs

DEPTH, TERMS, WIDTH, N = 14, 6, 4, 6
ROADS = ["auto", "gram", "direct", "materialize"]


def loss(params, x):
    for layer in params:
        h = x * layer["scale"]
        x = x + jnp.tanh(h @ layer["weight"] + layer["bias"])
    return jnp.mean(jnp.cos(x) * jnp.arange(WIDTH))


def model(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {"scale": (WIDTH,), "weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
    draw = lambda shape: rng.normal(size=shape).astype(dtype) / 2
    params = [{k: draw(shape) for k, shape in shapes.items()} for _ in range(DEPTH)]
    return params, rng.normal(size=(N, TERMS, WIDTH)).astype(dtype)


def rows(params, xs):
    with jax.enable_x64(True):
        wide = lambda x: np.asarray(x, np.float64)
        grad = jax.jit(jax.grad(loss))
        grads = [grad(jax.tree.map(wide, params), wide(x)) for x in xs]
    return jax.tree.map(lambda *gs: np.stack(gs), *grads)


def norm_of(tree):
    flat = [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(tree)]
    return np.linalg.norm(np.concatenate(flat, 1), axis=1)


def clipped(tree, bound):
    weights = np.minimum(1, bound / norm_of(tree))
    return jax.tree.map(lambda g: np.einsum("n,n...->...", weights, g), tree)


def assert_close(found, right, rtol=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.max(np.abs(b))),
        found,
        right,
    )


GROUPS = [dict.fromkeys(("scale", "weight", "bias"), i % 2) for i in range(DEPTH)]


@pytest.mark.parametrize("road", ROADS)
def test_norms_and_sums_are_those_of_one_sample_at_a_time(x64, road):
    params, xs = model(np.float64)
    samples = jax.jit(fg.per_sample(loss, road=road))(params, xs)
    right = rows(params, xs)
    bound = float(np.median(norm_of(right)))
    asked = jax.jit(
        lambda s: (s.norms(), s.leaf_norms(), s.norms([0] * DEPTH), s.clipped_sum(bound))
    )
    norms, by_leaf, by_layer, total = asked(samples)
    np.testing.assert_allclose(norms, norm_of(right), rtol=1e-10)
    of_leaf = lambda g: np.linalg.norm(g.reshape(N, -1), axis=1)
    assert_close(by_leaf, jax.tree.map(of_leaf, right), 1e-10)
    np.testing.assert_allclose(by_layer, [norm_of(layer) for layer in right], rtol=1e-10)
    assert_close(total, clipped(right, bound), 1e-10)


@pytest.mark.parametrize("road", [*ROADS, "two_pass"])
def test_clipped_grad_keeps_to_the_bound_of_each_group(x64, road):
    params, xs = model(np.float64)
    right = rows(params, xs)
    bound = float(np.median(norm_of(right)))
    out = jax.jit(fg.clipped_grad(loss, max_norm=bound, road=road))(params, xs)
    np.testing.assert_allclose(out.norms, norm_of(right), rtol=1e-10)
    assert_close(out.grads, clipped(right, bound), 1e-10)
    # Two groups: the first layer, and all others.
    bounds = [bound / 3, *[bound] * (DEPTH - 1)]
    out = jax.jit(fg.clipped_grad(loss, max_norm=bounds, road=road))(params, xs)
    for k, layer in enumerate(right):
        np.testing.assert_allclose(out.norms[k], norm_of(layer), rtol=1e-10)
        assert_close(out.grads[k], clipped(layer, bounds[k]), 1e-10)


@pytest.mark.parametrize("road", ROADS)
def test_numbers_of_any_size_have_their_norms_and_what_is_not_finite_is_left_out(road):
    """Linear, so that each leaf's gradient is what it is given."""
    names = [f"leaf{i:02}" for i in range(40)]
    params = {k: jnp.ones(2 + i % 3) for i, k in enumerate(names)}
    flat = lambda p, x: sum(jnp.vdot(p[k], x[k]) for k in names)
    rng = np.random.default_rng(0)
    sizes = np.array([1, 1e-25, 1e25, 1e-30, 1, 1, 1e36, 0])
    xs = {k: rng.normal(size=(8, *p.shape)) * sizes[:, None] for k, p in params.items()}
    xs["leaf07"][4, 1], xs["leaf31"][5, 0] = np.nan, np.inf
    xs["leaf20"][1] = 1  # one large leaf among small ones
    xs = {k: x.astype(np.float32) for k, x in xs.items()}
    out = jax.jit(fg.clipped_grad(flat, max_norm=1.0, road=road))(params, xs)
    wide = {k: x.astype(np.float64) for k, x in xs.items()}
    norms = norm_of(wide)
    finite = np.isfinite(norms)
    assert out.nonfinite == 2
    np.testing.assert_allclose(np.asarray(out.norms)[finite], norms[finite], rtol=1e-6)
    assert not np.isfinite(np.asarray(out.norms)[~finite]).any()
    kept = {k: x[finite] for k, x in wide.items()}
    weights = 1 / np.maximum(1, norms[finite])
    assert_close(out.grads, {k: np.einsum("n,n...->...", weights, x) for k, x in kept.items()})


def test_an_empty_batch_has_no_norms_and_sums_of_zero():
    params, xs = model()
    samples = fg.per_sample(loss)(params, xs[:0])
    out = fg.clipped_grad(loss, max_norm=1.0)(params, xs[:0])
    assert samples.norms().shape == out.norms.shape == (0,)
    assert {x.shape for x in jax.tree.leaves(samples.leaf_norms())} == {(0,)}
    for total in (samples.clipped_sum(1.0), out.grads):
        jax.tree.map(lambda g, p: np.testing.assert_array_equal(g, 0 * p), total, params)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_spread_over_devices_they_are_the_same(kind):
    params, xs = model()
    run = lambda p, x: (
        (s := fg.per_sample(loss)(p, x)).norms(),
        s.clipped_sum(0.1),
        fg.clipped_grad(loss, max_norm=0.1)(p, x).grads,
    )
    expected = jax.device_get(jax.jit(run)(params, xs))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    on = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        # Half of the layers lie whole on each device, of the others each device has a part.
        spread = [
            jax.tree.map(lambda w, i=i: on(w, P("model" if i % 2 else None)), layer)
            for i, layer in enumerate(params)
        ]
        if kind == AxisType.Explicit:
            spread = [jax.tree.map(lambda w: on(w, P()), layer) for layer in params]
        assert_close(jax.device_get(jax.jit(run)(spread, on(xs, P("data")))), expected)


def test_inside_shard_map_they_are_those_of_the_devices_samples():
    params, xs = model()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def run(params, x):
        samples = fg.per_sample(loss)(params, x)
        total = fg.clipped_grad(loss, max_norm=0.1)(params, x).grads
        return samples.norms(), jax.tree.map(lambda g: g[None], total)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    norms, total = jax.jit(mapped)(params, xs)
    right = rows(params, xs)
    np.testing.assert_allclose(norms, norm_of(right), rtol=2e-6)
    assert_close(jax.tree.map(lambda g: g.sum(0), total), clipped(right, 0.1))


def test_no_loop_of_the_compiled_program_reads_all_leaves():
    """One that reads 300 vectors takes the CPU backend half a second to compile."""
    params, xs = model()
    text = jax.jit(fg.clipped_grad(loss, max_norm=0.1)).lower(params, xs).compile().as_text()
    fused = re.findall(r"^%fused_computation[^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    assert fused
    assert max(body.count(" parameter(") for body in fused) < 2 * DEPTH
    # A weighted sum of kept gradients, as a product of one row, is compiled for each leaf.
    assert not re.search(r"f32\[1,\d+\]\S* dot\(", text)


def test_many_terms_add_up_as_in_twice_the_precision():
    rng = np.random.default_rng(0)
    for n in (1, 2, 31, 32, 33, 48, 49, 500):
        terms = list(rng.uniform(size=(n, 5)).astype(np.float32))
        np.testing.assert_allclose(sum_by_pairs(terms), np.sum(terms, 0, np.float64), rtol=1e-6)
    terms[17][2], terms[300][3] = np.nan, np.inf
    found = sum_by_pairs(terms)
    assert np.isnan(found[2])
    assert found[3] == np.inf
    assert np.isfinite(found[:2]).all()


def test_terms_of_several_dtypes_add_up_in_the_widest():
    with jax.enable_x64(True):
        terms = [jnp.full(3, 0.1, (jnp.float32, jnp.float64)[i % 2]) for i in range(60)]
        found = sum_by_pairs(terms)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, 30 * np.float64(np.float32(0.1)) + 3, rtol=1e-15)


def test_leaves_alike_are_those_of_several_layers():
    shapes = [(2, 3), (2, 3), (3, 2)]
    with jax.enable_x64(True):
        named = [
            (f"['layers'][{i}]['{role}']", jnp.full((4, *shape), i, dtype))
            for i in range(20)
            for role, shape in zip("qkv", shapes, strict=True)
            for dtype in (jnp.float32, jnp.float64)
        ]
        groups = alike(named)
    assert sorted(len(xs) for xs in groups) == [4] * 6 + [16] * 6
    assert all(len({(x.shape, x.dtype) for x in xs}) == 1 for xs in groups)
    # Each once, and no q beside a k of the same shape.
    assert {id(x) for xs in groups for x in xs} == {id(x) for _, x in named}
    role = {id(x): name[-3] for name, x in named}
    assert all(len({role[id(x)] for x in xs}) == 1 for xs in groups)


def test_kept_gradients_of_layers_of_any_size_have_their_norms():
    """Weights large enough to be kept, in numbers whose squares overflow and underflow."""
    width, depth, n = 80, 5, 4
    rng = np.random.default_rng(0)
    params = {f"layer{i}": rng.normal(size=(width, width)).astype(np.float32) for i in range(depth)}

    def loss(params, x):  # linear in each weight
        return sum(
            jnp.vdot(x["left"][i] @ params[f"layer{i}"], x["right"][i]) for i in range(depth)
        )

    sizes = np.array([1, 1e-12, 1e15, 1])[:, None, None, None]
    draw = lambda: rng.normal(size=(n, depth, 2 * width, width))
    xs = {k: (draw() * sizes).astype(np.float32) for k in ("left", "right")}
    xs["left"][3, 2, 5, 5] = np.inf
    explained = fg.per_sample(loss)(params, xs).explain()
    assert sum("kept for clipped sums" in str(road) for road in explained) == depth
    with jax.enable_x64(True):
        wide = {k: x.astype(np.float64) for k, x in xs.items()}
        right = {f"layer{i}": jnp.einsum("nti,ntj->nij", wide["left"][:, i], wide["right"][:, i])
                 for i in range(depth)}  # fmt: skip
        right = jax.tree.map(lambda x: np.asarray(x)[:3], right)
    out = jax.jit(fg.clipped_grad(loss, max_norm=1.0))(params, xs)
    np.testing.assert_allclose(out.norms[:3], norm_of(right), rtol=1e-5)
    assert not np.isfinite(out.norms[3])
    assert out.nonfinite == 1
    assert_close(out.grads, clipped(right, 1.0), 1e-5)
