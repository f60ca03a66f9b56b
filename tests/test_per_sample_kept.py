"""Clipped sums whose gradients are formed once and kept, leaf by leaf, against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from conftest import DEEP
from test_per_sample import assert_equal, draw, loop
from test_per_sample_cases import bumpy


@jax.custom_vjp
def cubed_back(x):
    return x


cubed_back.defvjp(lambda x: (x, None), lambda _, g: (g**3,))


@jax.custom_jvp
def bent(x):
    return jnp.tanh(x)


bent.defjvp(lambda primals, tangents: (bent(*primals), 2 * tangents[0] * jnp.cos(primals[0])))


def recurrent(p, x, t):
    step = lambda h, row: (jnp.tanh(h @ p + row), None)
    return bumpy(lax.scan(step, x[0], x)[0])


def layers(p, x, t):
    return bumpy(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0])


def recomputed(p, x, t):
    body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    return bumpy(lax.scan(body, jnp.concatenate([x, x[:1] + 1]), p)[0])


def branches(p, x, t):
    return lax.cond(x[0, 0] > 0, lambda p: bumpy(x @ p), lambda p: bumpy(jnp.cos(x) @ p.T), p)


def tied(p, x, t):
    return bumpy(jnp.tanh(p[t] * x[:, :4]) @ p.T)


def weight_norm(p, x, t):
    return bumpy(x @ (p / jnp.linalg.norm(p, axis=0)))


def wide_product(p, x, t):
    y = jnp.tile(x, (1, 4))
    return bumpy(y @ p)


# The loss, the shape of its parameter, and whether its gradients are kept.
CASES = {
    "dense": (lambda p, x, t: bumpy(jnp.tanh(x @ p)), (6, 6), True),
    "twice": (lambda p, x, t: bumpy(jnp.tanh(x @ p) @ p.T), (6, 6), True),
    "tied": (tied, (8, 4), True),
    "lookup": (lambda p, x, t: bumpy(p[t] * x[:, :4]), (4, 4), True),
    "recurrent": (recurrent, (6, 6), True),
    "layers": (layers, (2, 6, 6), True),
    "recomputed": (recomputed, (2, 6, 6), True),
    "recomputed, larger": (jax.checkpoint(lambda p, x, t: bumpy(x @ p)), (6, 6), False),
    "branches": (branches, (6, 6), True),
    "custom_jvp": (lambda p, x, t: bumpy(bent(x @ p)), (6, 6), True),
    "custom_vjp": (lambda p, x, t: bumpy(cubed_back(x @ p)), (6, 6), True),
    "rule of the weight": (lambda p, x, t: bumpy(x @ cubed_back(p)), (6, 6), False),
    "weight norm": (weight_norm, (6, 6), True),
    "complex": (lambda p, x, t: bumpy(x @ p.real) + bumpy(x @ p.imag), (6, 6), True),
    "used as it is, too": (lambda p, x, t: bumpy(x @ p) + bumpy(p * x.sum()), (6, 6), True),
    "low rank": (lambda p, x, t: bumpy(jnp.tile(x, (1, 4)) @ (p @ p.T)), (24, 1), False),
    "one number": (
        lambda p, x, t: bumpy(jnp.tile(x, (1, 4)) @ (p * jnp.ones((24, 24)))),
        (),
        False,
    ),
    "one term": (lambda p, x, t: bumpy(x[0] @ p), (6, 6), False),
    "large": (wide_product, (24, 24), False),
    "bias": (lambda p, x, t: bumpy(x + p), (6,), False),
    "none": (lambda p, x, t: 0.0, (6,), False),
}


def make(names, n=4):
    loss = lambda p, x, t: sum(CASES[name][0](p[name], x, t) for name in names)
    params = {name: draw(i, *CASES[name][1]) / 2 for i, name in enumerate(names)}
    if "complex" in params:
        params["complex"] = params["complex"] * (1 + 0.5j)
    x = draw(99, n, 2, 6)
    t = jnp.asarray(np.random.default_rng(5).integers(0, 4, (n, 2)))
    return loss, params, x, t


def clipped(rows, bounds, counts=None):
    """The clipped sum by the definition; ``bounds`` is one number or one for each leaf."""
    rows = jax.tree.map(np.asarray, rows)
    n = len(jax.tree.leaves(rows)[0])
    counts = np.ones(n, bool) if counts is None else np.asarray(counts)

    def clip(tree, bound):
        square = lambda g: np.sum(np.abs(g) ** 2, tuple(range(1, g.ndim)), dtype=np.float64)
        norms = np.sqrt(sum(map(square, jax.tree.leaves(tree)), np.zeros(n)))
        factor = np.minimum(1, bound / np.where(norms > 0, norms, 1))
        return jax.tree.map(lambda g: np.tensordot(factor[counts], g[counts], 1), tree)

    if isinstance(bounds, dict):
        return {k: clip(rows[k], bounds[k]) for k in rows}
    return clip(rows, bounds)


def kept(loss, *args, **options):
    """The bytes that are kept of each leaf, by its name."""
    roads = jax.eval_shape(fg.per_sample(loss, **options), *args).explain()
    assert all(("kept for clipped sums" in str(road)) == bool(road.kept) for road in roads)
    return {road.name[8:-2]: road.kept for road in roads}


def test_gradients_about_as_large_as_their_factors_are_kept(x64):
    found = {name: bytes_each > 0 for name, bytes_each in kept(*make(CASES)).items()}
    assert found == {name: keep for name, (_, _, keep) in CASES.items()}


# Each costs a second to compile; the others are in other tests, or near one of these.
SOME = ["twice", "layers", "recurrent", "branches", "custom_vjp", "weight norm", "complex", "bias"]


def test_the_clipped_sum_of_kept_and_other_leaves_is_that_of_a_loop(x64):
    loss, params, x, t = make(CASES if DEEP else SOME)
    got = jax.jit(lambda *args: fg.per_sample(loss)(*args).clipped_sum(2.0))(params, x, t)
    assert_equal(got, clipped(loop(loss, params, x, t), 2.0), 1e-10)


MIXED = ("tied", "large", "dense")


def test_bounds_by_leaf_masks_chunks_and_frozen_leaves_leave_kept_gradients_right(x64):
    loss, params, x, t = make(MIXED, 5)
    rows, mask = loop(loss, params, x, t), np.array([True, False, True, True, True])
    each = {"tied": 0.5, "large": 2.0, "dense": 3.0}
    options = {"max_norm": each, "chunk_size": 2, "frozen": "dense", "mean_over": 2}
    grads = jax.jit(fg.clipped_grad(loss, **options))(params, x, t, mask=mask).grads
    assert grads.pop("dense") is None
    rows.pop("dense")
    assert_equal(grads, jax.tree.map(lambda g: g / 2, clipped(rows, each, mask)), 1e-10)


@pytest.mark.parametrize("road", ["gram", "direct", "materialize"])
def test_a_road_that_was_asked_for_keeps_nothing(x64, road):
    assert not any(kept(*make(MIXED), road=road).values())


def test_kept_bytes_are_those_of_the_dtype_that_gradients_have(x64):
    def found(dtype):
        params = {"w": jnp.ones((6, 6), dtype)}
        return kept(lambda p, x: bumpy(x @ p["w"]), params, jnp.ones((3, 2, 6), dtype))["w"]

    assert [found(dtype) for dtype in ("float32", "float64")] == [36 * 4, 36 * 8]
    # Factors in bfloat16 are half as large, the gradient is not.
    assert found("bfloat16") == 0


def test_a_gradient_formed_through_a_larger_one_is_not_kept():
    loss = lambda p, x: bumpy(x @ (p["a"] @ p["b"]))
    params = {"a": jnp.ones((64, 2)), "b": jnp.ones((2, 64))}
    assert kept(loss, params, jnp.ones((3, 4, 64))) == {"a": 0, "b": 0}


# Not finite, too large to square, subnormal, zero.
_BAD = [1.0, np.nan, np.inf, 1e25, 1e-40, 0.0]


@pytest.mark.parametrize("bounds", [1.0, {"kept": 0.5, "factored": 1.0}], ids=["one", "two"])
def test_a_sample_that_is_not_finite_in_one_leaf_is_left_out_of_all(bounds):
    def loss(p, x, y):
        return jnp.sum((x @ p["kept"]) * jnp.arange(1.0, 7)) + jnp.sum(y @ p["factored"])

    params = {"kept": jnp.ones((6, 6)), "factored": jnp.ones((9, 9))}
    scale = np.array([(a, 1.0) for a in _BAD] + [(1.0, b) for b in _BAD], np.float32)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 2, 6)).astype(np.float32)
    y = rng.normal(size=(12, 1, 9)).astype(np.float32)
    # One entry alone is not a number, so that nothing but the norm tells.
    x[:, 0, 0] *= scale[:, 0]
    y[:, 0, 0] *= scale[:, 1]
    for i, (a, b) in enumerate(scale):
        x[i, 1:] *= a if np.isfinite(a) else 1
        y[i, 0, 1:] *= b if np.isfinite(b) else 1
    assert {k for k, size in kept(loss, params, x, y).items() if size} == {"kept"}
    run = jax.jit(fg.clipped_grad(loss, max_norm=bounds))
    finite = np.isfinite(scale).all(1)
    with np.errstate(invalid="ignore"):
        rows = {
            "kept": np.einsum("nti,j->nij", x.astype(float), np.arange(1.0, 7)),
            "factored": np.einsum("nti,j->nij", y.astype(float), np.ones(9)),
        }
        rows = {k: np.where(finite.reshape(-1, 1, 1), g, 0) for k, g in rows.items()}
    for mask in (np.ones(12, bool), np.arange(12) % 2 == 0, np.zeros(12, bool), finite):
        out = run(params, x, y, mask=mask)
        assert_equal(out.grads, clipped(rows, bounds, mask & finite), 1e-5)
        assert out.nonfinite == np.sum(mask & ~finite)
    if isinstance(bounds, float):
        plain = jax.jit(lambda *args: fg.per_sample(loss)(*args).clipped_sum(bounds))
        # What is too large to square has no norm there.
        counts = finite & (scale < 1e20).all(1)
        assert_equal(plain(params, x, y), clipped(rows, bounds, counts), 1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"] if DEEP else ["float16"])
def test_norms_of_kept_gradients_of_short_floats_are_in_float32(dtype):
    # Squares of 2475 are infinite in float16, and a sum in bfloat16 would stop growing.
    loss = lambda w, x: jnp.sum(x.astype(w.dtype) @ w, dtype=jnp.float32)
    w, x = jnp.ones((66, 66), dtype), jnp.full((3, 33, 66), 75.0, dtype)
    samples = fg.per_sample(loss)(w, x)
    assert samples.explain()[0].kept == 66 * 66 * 4
    out = jax.jit(fg.clipped_grad(loss, max_norm=1.0))(w, x)
    np.testing.assert_allclose(out.norms, 2475 * 66, rtol=1e-6)
    np.testing.assert_allclose(out.grads, 3 / 66, rtol=1e-4)
    np.testing.assert_allclose(samples.clipped_sum(1.0), 3 / 66, rtol=1e-6)


def simple():
    loss = lambda p, x: bumpy(jnp.tanh(x @ p["w"]) @ p["v"])
    params = {"w": draw(0, 6, 6, dtype=jnp.float32), "v": draw(1, 6, 6, dtype=jnp.float32)}
    x = draw(2, 4, 2, 6, dtype=jnp.float32)
    assert all(kept(loss, params, x).values())
    return loss, params, x


def both(loss):
    """The two clipped sums."""

    return lambda p, x: (
        fg.clipped_grad(loss, max_norm=1.0)(p, x).grads,
        fg.per_sample(loss)(p, x).clipped_sum(1.0),
    )


def test_an_empty_batch_and_one_sample():
    loss, params, x = simple()
    rows = loop(loss, params, x)
    for n in (0, 1):
        rows_of_some = jax.tree.map(lambda g, n=n: g[:n], rows)
        for got in jax.jit(both(loss))(params, x[:n]):
            assert_equal(got, clipped(rows_of_some, 1.0), 1e-5)


def test_vmap_around_and_scan_around():
    loss, params, x = simple()
    expected = [clipped(loop(loss, params, part), 1.0) for part in (x, 2 * x)]
    expected = jax.tree.map(lambda *a: np.stack(a), *expected)
    both_batches = jnp.stack([x, 2 * x])
    for got in jax.jit(jax.vmap(both(loss), (None, 0)))(params, both_batches):
        assert_equal(got, expected, 1e-5)
    one = lambda p, x: fg.clipped_grad(loss, max_norm=1.0)(p, x).grads
    scanned = jax.jit(lambda p, xs: lax.map(lambda x: one(p, x), xs))
    assert_equal(scanned(params, both_batches), expected, 1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_spread_over_devices(kind):
    loss, params, x = simple()
    expected = clipped(loop(loss, params, x), 1.0)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        spread = put(params, P(None, "model") if kind == AxisType.Auto else P())
        for got in jax.jit(both(loss))(spread, put(x, P("data"))):
            assert_equal(got, expected, 1e-5)


def test_inside_shard_map_each_device_clips_its_own():
    loss, params, x = simple()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    local = lambda p, x: lax.psum(both(loss)(p, x), "data")
    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    for got in jax.jit(run)(params, x):
        assert_equal(got, clipped(loop(loss, params, x), 1.0), 1e-5)
