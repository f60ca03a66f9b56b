"""The norm of all gradients, at any size and order, and what is clipped by it."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funcgrad as fg
from funcgrad._jaxpr import walk

ORDERS = [0, 0.5, 1, 2, 3, math.inf, -math.inf]
TINY = {"float32": 2.0**-149, "float64": 2.0**-1074}


def flat(tree):
    leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)]
    wide = [x.astype("clongdouble" if np.iscomplexobj(x) else "longdouble") for x in leaves]
    return np.concatenate(wide) if wide else np.zeros(0, np.longdouble)


def wide_norm(tree, order=2):
    """The definition, in numbers with more digits and a larger range than float64."""
    entries = np.abs(flat(tree))
    return np.linalg.norm(entries, order) if entries.size else np.longdouble(0)


_norm = {
    order: jax.jit(functools.partial(fg.global_norm, order=order))
    for order in [*ORDERS, 0.7, 1.5, 4, 5, 7, 16]
}


@functools.partial(jax.jit, static_argnames=("order", "nonfinite"))
def clip(grads, max_norm, *, order=2, eps=0.0, nonfinite="keep"):
    """One program, since each operation outside of one is compiled by itself."""
    return fg.clip_grad_norm(grads, max_norm, order=order, eps=eps, nonfinite=nonfinite)


def assert_is_norm(tree, order=2, rtol=1e-6):
    got, expected = np.longdouble(_norm[order](tree)), wide_norm(tree, order)
    largest = np.finfo(_norm[order](tree).dtype).max
    if np.isnan(expected) or expected > largest:
        assert np.isnan(got) == np.isnan(expected)
        assert np.isnan(got) or np.isinf(got)
    else:
        # What is left below the normal numbers is the distance between two subnormal ones.
        tiny = TINY[str(_norm[order](tree).dtype)]
        assert abs(got - expected) <= rtol * expected + tiny, (got, expected)


@st.composite
def gradients(draw, n=7):
    """Entries of sizes that have nothing to do with each other, in leaves of fixed shapes."""
    low, high = sorted((draw(st.integers(-149, 127)), draw(st.integers(-149, 127))))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    signs = rng.choice([-1, 1, 0, 1, 1], n)
    entries = signs * np.exp2(rng.uniform(low, high, n)) * rng.uniform(0.5, 1, n)
    return {"a": entries[:4].reshape(2, 2), "b": [entries[4:6], entries[6]]}


@pytest.mark.parametrize(
    ("dtype", "order"),
    [("float32", p) for p in ORDERS] + [("bfloat16", 2), ("float16", 2), ("float16", 3)],
)
@given(tree=gradients())
def test_the_norm_is_that_of_numpy_at_any_size(dtype, order, tree):
    with np.errstate(over="ignore"):
        tree = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float32)).astype(dtype), tree)
    assert_is_norm(tree, order)


@pytest.mark.parametrize("order", [1.5, 2, 7, math.inf])
@pytest.mark.parametrize("exponent", [-1065, -1020, -500, 0, 500, 1019])
def test_so_it_is_in_float64(x64, exponent, order):
    x = np.ldexp(np.random.default_rng(0).uniform(-1, 1, 50), exponent)
    got = np.longdouble(_norm[order](x))
    expected = wide_norm(x, order)
    assert abs(got - expected) <= 1e-14 * expected + TINY["float64"]


@pytest.mark.parametrize("order", [0.7, 1.5, 4, 5, 16])
@pytest.mark.parametrize("exponent", [-120, 0, 120])
def test_orders_in_between(order, exponent):
    x = np.ldexp(np.random.default_rng(1).uniform(-1, 1, 50), exponent).astype(np.float32)
    got, expected = np.longdouble(_norm[order](x)), wide_norm(x, order)
    # A power that is no whole number is good to about 30 roundings of float32.
    np.testing.assert_allclose(got, expected if expected < 3e38 else np.inf, rtol=4e-6)


def test_b5_large_gradients_do_not_overflow():
    big = {"w": np.full(4, 1e20, np.float32), "b": np.full(5, 1e20, np.float32)}
    clipped, norm = clip(big, 1.0)
    np.testing.assert_allclose(norm, 3e20, rtol=1e-6)
    np.testing.assert_allclose(clipped["w"], 1 / 3, rtol=1e-6)
    # What happens elsewhere, without a word.
    theirs, _ = optax.clip_by_global_norm(1.0).update(big, optax.EmptyState())
    assert not np.any(theirs["w"])

    half = np.full(100, 300, np.float16)
    clipped, norm = clip(half, 1.0)
    assert (norm, norm.dtype, clipped.dtype) == (3000, jnp.float32, jnp.float16)
    np.testing.assert_allclose(clipped, 0.1, rtol=1e-3)


@pytest.mark.parametrize("size", [1, 300])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e30])
def test_gradients_are_clipped_even_where_the_norm_is_beyond_float32(size, max_norm):
    clipped, norm = clip(np.full(size, 3e38, np.float32), max_norm)
    np.testing.assert_allclose(clipped, max_norm / np.sqrt(size), rtol=1e-6)
    assert np.isinf(norm) == (size > 1)


@pytest.mark.parametrize("order", [0.5, 1, 2, 3, math.inf])
@pytest.mark.parametrize("size", [1, 9])
def test_a_norm_of_subnormal_gradients_is_subnormal_and_not_zero(size, order):
    x = np.full(size, 3e-42, np.float32)
    got = np.longdouble(np.asarray(_norm[order](jnp.asarray(x))))
    np.testing.assert_allclose(got, wide_norm(x, order), atol=1e-45, rtol=1e-6)


@pytest.mark.parametrize("value", [1e-45, 1e-30, 1e-10, 0.1, 1.0, 1e10, 3e38])
@pytest.mark.parametrize("order", [1, 2, 3, math.inf, -math.inf])
def test_the_norm_of_one_number_is_its_modulus(value, order):
    assert_is_norm([jnp.array(-value, jnp.float32)], order, rtol=2e-7)


def test_a_million_equal_entries_are_added_up_well():
    x = jnp.full((1000, 1000), 0.1)
    np.testing.assert_allclose(float(_norm[2](x)), float(wide_norm(x)), rtol=1e-6)


@pytest.mark.parametrize("order", ORDERS)
def test_special_values_come_through(order):
    nan, inf = math.nan, math.inf
    for values in ([nan, 1], [inf, 1], [-inf, nan], [0.0, -0.0], [inf, inf]):
        expected = wide_norm(np.array(values), order)
        if order == 0:  # how many are not zero
            expected = sum(value != 0 for value in values)
        np.testing.assert_array_equal(_norm[order](jnp.array(values)), np.float32(expected))
    for nothing in ([], {}, {"a": None}, [jnp.zeros((0, 3))], [jnp.array([1, 2])]):
        assert order not in (0, 2, -math.inf) or _norm[order](nothing) == 0
    with_empty = [jnp.zeros((0, 3)), jnp.full(1, 4.0)]
    assert _norm[order](with_empty) == (1 if order == 0 else 4)


def test_complex_gradients_count_by_their_modulus():
    z = {"z": np.array([3e25 + 4e25j, 12e25j], np.complex64), "r": np.zeros(1, np.float32)}
    for order, expected in [(2, 13e25), (1, 17e25), (math.inf, 12e25)]:
        np.testing.assert_allclose(_norm[order](z), expected, rtol=1e-6)
    clipped, _ = clip(z, 13.0)
    np.testing.assert_allclose(clipped["z"], [3 + 4j, 12j], rtol=1e-6)
    assert clipped["z"].dtype == jnp.complex64


@pytest.mark.parametrize("order", ORDERS)
def test_so_do_those_near_the_ends_of_the_range(order):
    # One over a number near the largest is subnormal, and taken for zero.
    ends = [3e38, 2e38 - 2e38j, 3e38 + 1e-40j, 1e-45 + 1e-45j, -4e-42 + 3e-42j, 1e-38 + 1e-40j]
    for z in [*ends, 3e20 - 4e20j, -3e-20j, 1e10 + 1j, 0]:
        assert_is_norm(np.array([z], np.complex64), order)
    for nan in (complex(math.nan, math.inf), complex(1, math.nan)):
        assert np.isnan(_norm[order](np.array([nan], np.complex64))) == (order != 0)


def test_c10_norms_and_clipping_as_torch(x64):
    grads = [np.array([3.0, -4.0])]
    assert _norm[math.inf](grads) == 4
    assert _norm[1](grads) == 7
    below, norm = clip(grads, 5.0)
    np.testing.assert_array_equal(below[0], grads[0])
    assert norm == 5


@pytest.mark.torch
@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.0, math.inf, -math.inf])
def test_clipping_is_torchs_to_the_last_bit_of_the_norm(torch, x64, order):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        grads = [rng.normal(size=s) * 10 ** rng.uniform(-4, 4) for s in [(3,), (2, 5), ()]]
        params = [torch.nn.Parameter(torch.zeros(np.shape(g), dtype=torch.float64)) for g in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.tensor(g)
        theirs = torch.nn.utils.clip_grad_norm_(params, 1.5, norm_type=order)
        clipped, norm = clip(grads, 1.5, order=order, eps=1e-6)
        np.testing.assert_allclose(norm, theirs, rtol=4e-15)
        for p, g in zip(params, clipped, strict=True):
            # The same norm gives the same bits; sums may be added up in another order.
            rtol = 0 if norm == float(theirs) else 4e-15
            np.testing.assert_allclose(g, p.grad, rtol=rtol, atol=0)


@pytest.mark.torch
def test_c10_three_four_twelve_bit_for_bit(torch, x64):
    params = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (2, 1)]
    params[0].grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    params[1].grad = torch.tensor([12.0], dtype=torch.float64)
    theirs = torch.nn.utils.clip_grad_norm_(params, 1.0)
    clipped, norm = fg.clip_grad_norm([jnp.array([3.0, 4.0]), jnp.array([12.0])], 1.0, eps=1e-6)
    assert float(norm) == float(theirs) == 13
    for p, g, whole in zip(params, clipped, ([3.0, 4.0], [12.0]), strict=True):
        np.testing.assert_array_equal(g, p.grad)
        np.testing.assert_allclose(g, np.array(whole) / 13.000001, rtol=1e-15)


@pytest.mark.torch
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_keep_is_what_torch_does_with_what_is_not_finite(torch, value):
    p = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    p[0].grad, p[1].grad = torch.tensor([value, 1.0]), torch.tensor([2.0])
    theirs = torch.nn.utils.clip_grad_norm_(p, 1.0)
    clipped, norm = fg.clip_grad_norm([jnp.array([value, 1.0]), jnp.array([2.0])], 1.0, eps=1e-6)
    np.testing.assert_array_equal(norm, theirs)
    for q, g in zip(p, clipped, strict=True):
        np.testing.assert_array_equal(g, q.grad)


def test_zero_skips_the_step_and_raise_names_the_leaf():
    bad = {"w": np.array([1, np.nan], np.float32), "b": np.ones(2, np.float32)}
    clipped, norm = clip(bad, 1.0, nonfinite="zero")
    assert np.isnan(norm)
    np.testing.assert_array_equal(np.concatenate([clipped["w"], clipped["b"]]), np.zeros(4))
    with pytest.raises(FloatingPointError, match=r"got nan from grads\['w'\]\. Find the operation"):
        fg.clip_grad_norm(bad, 1.0, nonfinite="raise")
    with pytest.raises(ValueError, match="needs a norm that is known; got one that is traced"):
        jax.jit(lambda g: fg.clip_grad_norm(g, 1.0, nonfinite="raise"))(bad)
    large = np.full(4, 3e38, np.float32)
    fg.clip_grad_norm(large, 1.0, nonfinite="raise")  # each entry is finite
    good, _ = clip(large, 1.0, nonfinite="zero")
    np.testing.assert_allclose(good, 0.5, rtol=1e-6)


def test_b4_frozen_leaves_do_not_count():
    grads = {"embed": jnp.array([100.0]), "head": jnp.array([1.0, 1.0])}
    clipped, norm = fg.clip_grad_norm(grads, 1.0, frozen="embed")
    np.testing.assert_allclose(norm, np.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(clipped["head"], 0.707, atol=2e-4)
    assert clipped["embed"] == 0
    counted, _ = fg.clip_grad_norm(grads, 1.0)
    np.testing.assert_allclose(counted["head"], 0.01, atol=1e-4)
    for spec in (["emb*"], {"embed": True, "head": False}, lambda path, leaf: path == "embed"):
        assert fg.global_norm(grads, frozen=spec) == norm
    with pytest.raises(ValueError, match="got 'embde', which names none"):
        fg.global_norm(grads, frozen="embde")
    with pytest.raises(TypeError, match="frozen is patterns, .*; got object"):
        fg.global_norm(grads, frozen=object())


def test_what_has_no_gradient_passes():
    key = jax.random.key(0)
    tree = {"w": jnp.array([3.0, 4.0]), "n": None, "i": jnp.array([7]), "k": key, "x": 12.0}
    clipped, norm = fg.clip_grad_norm(tree, 6.5)
    assert norm == 13
    np.testing.assert_allclose(clipped["w"], [1.5, 2.0])
    assert clipped["n"] is None
    assert clipped["i"] == 7
    assert clipped["k"] is key
    # jax.grad gives integers a gradient of a type without bits.
    grads = jax.grad(lambda p: jnp.sum(p["w"]), allow_int=True)({"w": jnp.ones(4), "i": 3})
    assert fg.global_norm(grads) == 2
    assert fg.clip_grad_norm(grads, 1.0).grads["i"].dtype == jax.dtypes.float0


def test_leaves_keep_their_dtypes_and_wider_ones_set_the_norms(x64):
    tree = [np.ones(2, jnp.bfloat16), np.ones(2, np.float32), np.ones(2)]
    clipped, norm = clip(tree, 1.0)
    assert norm.dtype == jnp.float64
    assert [g.dtype for g in clipped] == [g.dtype for g in tree]
    assert jax.eval_shape(fg.global_norm, tree[:2]).dtype == jnp.float32


def test_gradients_within_the_bound_stay_bit_for_bit():
    x = jnp.asarray(np.array([1e-45, -0.0, 0.1, 1e-39], np.float32))
    clipped, _ = clip(x, 1.0)
    bits = lambda x: np.asarray(x).view(np.uint32)
    np.testing.assert_array_equal(bits(clipped), bits(x))


@given(seed=st.integers(0, 2**16), bound=st.sampled_from([0.0, 1e-6, 0.5, 3.0, 1e6, math.inf]))
def test_the_clipped_norm_is_at_most_the_bound(seed, bound):
    rng = np.random.default_rng(seed)
    tree = [np.float32(rng.normal(size=(3, 2)) * 10 ** rng.uniform(-3, 3))]
    clipped, norm = clip(tree, bound)
    after = float(wide_norm(clipped))
    assert after <= bound * (1 + 1e-6)
    np.testing.assert_allclose(after, min(float(norm), bound), rtol=1e-6)
    again, _ = clip(clipped, bound)
    np.testing.assert_allclose(again[0], clipped[0], rtol=1e-6)


def test_a_bound_and_a_norm_of_zero_give_zeros():
    clipped, norm = clip(np.zeros(3, np.float32), 0.0)
    np.testing.assert_array_equal(clipped, np.zeros(3))
    assert norm == 0
    np.testing.assert_array_equal(clip(np.ones(3, np.float32), 0.0).grads, np.zeros(3))


@pytest.mark.parametrize("bound", [-1.0, math.nan, np.float32(-0.5), jnp.array(-2.0)])
def test_a_bound_is_not_negative(bound):
    with pytest.raises(ValueError, match="max_norm is at least 0; got"):
        fg.clip_grad_norm(jnp.ones(2), bound)
    with pytest.raises(ValueError, match="eps is at least 0; got"):
        fg.clip_grad_norm(jnp.ones(2), 1.0, eps=bound)


def test_a_traced_bound_that_is_negative_makes_nan_and_does_not_turn_gradients_around():
    g = np.array([3.0, 4.0], np.float32)
    assert np.isnan(clip(g, -1.0).grads).all()
    assert np.isnan(clip(g, 1.0, eps=-20.0).grads).all()
    assert np.isnan(jax.jit(fg.clip_grad_value)(g, -1.0)).all()


@pytest.mark.parametrize("bound", ["1", None, 1j])
def test_a_bound_is_a_number(bound):
    with pytest.raises(TypeError, match="max_norm is a number; got"):
        fg.clip_grad_norm(jnp.ones(2), bound)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bits_are_clipped_by_bounds_that_they_do_not_hold(dtype):
    g = np.array([1, -2, 3], np.float32).astype(jnp.dtype(dtype))
    for bound, expected in [(1e5, [1, -2, 3]), (2.0, [1, -2, 2])]:
        clipped = jax.jit(fg.clip_grad_value)(g, bound)
        assert clipped.dtype == g.dtype
        np.testing.assert_array_equal(np.float32(clipped), expected)
    np.testing.assert_allclose(_norm[2](g), math.sqrt(14), rtol=1e-6)


def test_other_arguments_are_refused():
    with pytest.raises(ValueError, match=r"max_norm is one number; got shape \(2,\)"):
        fg.clip_grad_norm(jnp.ones(2), jnp.ones(2))
    with pytest.raises(ValueError, match="nonfinite is 'keep', 'zero' or 'raise'; got 'error'"):
        # Without the check of its annotations, where that is on.
        inspect.unwrap(fg.clip_grad_norm)(jnp.ones(2), 1.0, nonfinite="error")
    for order in (-1, 0.1, 100, math.nan, "fro", None):
        with pytest.raises(ValueError, match="order is from 0.5 to 16, or 0, inf or -inf; got"):
            fg.global_norm(jnp.ones(2), order=order)


@pytest.mark.parametrize("order", [1, 1.5, 2, 3, math.inf])
def test_the_derivative_is_that_of_differences_and_0_at_zero(x64, order):
    x = {"a": np.array([0.3, -1.2]), "b": np.array([[2.0], [0.7]])}
    dot = {"a": np.array([1.0, 0.5]), "b": np.array([[-0.4], [2.0]])}
    norm = functools.partial(fg.global_norm, order=order)
    clipped = lambda x: fg.clip_grad_norm(x, 1.0, order=order).grads

    @jax.jit
    def derivatives(x, dot):
        along = lambda fun: jax.jvp(fun, (x,), (dot,))[1]
        pull = jax.vjp(clipped, x)[1]
        return along(norm), jax.grad(norm)(x), along(jax.grad(norm)), along(clipped), pull(dot)[0]

    first, grad, second, moved, pulled = derivatives(x, dot)
    at, step = flat(x), np.longdouble(1e-6)

    def difference(fun, direction):
        return (fun(at + step * direction) - fun(at - step * direction)) / (2 * step)

    wide_grad = lambda v: np.array(
        [difference(lambda u: wide_norm(u + v - at, order), e) for e in np.eye(4)]
    )
    wide_clip = lambda v: v / max(1, wide_norm(v, order))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-8)
    close(first, difference(lambda v: wide_norm(v, order), flat(dot)))
    close(flat(grad), wide_grad(at))
    close(flat(second), difference(wide_grad, flat(dot)), atol=1e-5)
    close(flat(moved), difference(wide_clip, flat(dot)))
    close(flat(pulled), [difference(wide_clip, e) @ flat(dot) for e in np.eye(4)])
    at_zero = derivatives(jax.tree.map(np.zeros_like, x), dot)
    assert not flat(at_zero[:2]).any()


def test_the_derivative_does_not_overflow():
    grads = jax.jit(jax.grad(fg.global_norm))(jnp.full(4, 1e30))
    np.testing.assert_allclose(grads, 0.5, rtol=1e-6)
    for order in (1, 2):  # conjugated, by JAX's convention
        grad = jax.jit(jax.grad(functools.partial(fg.global_norm, order=order)))
        z = np.array([6e37 + 8e37j, 0], np.complex64)
        np.testing.assert_allclose(grad(z), [0.6 - 0.8j, 0], rtol=1e-6)


def test_the_derivative_of_the_1_norm_is_the_sign_however_small_the_entry():
    grad = jax.jit(jax.grad(lambda g: fg.global_norm(g, order=1)))
    np.testing.assert_array_equal(grad(np.array([1e30, -1e-30, 0], np.float32)), [1, -1, 0])


def test_vmap_gives_a_norm_per_sample():
    rows = {
        "a": np.arange(12, dtype=np.float32).reshape(4, 3),
        "b": np.float32([0, 1e30, 1e30, 1e30]),
    }
    norms = jax.jit(jax.vmap(fg.global_norm))(rows)
    each = [wide_norm(jax.tree.map(lambda x, i=i: x[i], rows)) for i in range(4)]
    np.testing.assert_allclose(norms, np.float64(each), rtol=1e-6)
    clipped, _ = jax.jit(jax.vmap(lambda g: fg.clip_grad_norm(g, 1.0)))(rows)
    np.testing.assert_allclose(jax.jit(jax.vmap(fg.global_norm))(clipped), 1.0, rtol=1e-6)


def test_it_runs_under_scan_checkpoint_and_strict_types():
    step = jax.checkpoint(lambda g: fg.clip_grad_norm(g, 1.0, eps=1e-6, nonfinite="zero").grads)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        start = jnp.full(4, 2.0), jnp.ones((2, 2), "bfloat16")
        out, norms = jax.lax.scan(lambda g, _: (step(g), fg.global_norm(g)), start, length=2)
    np.testing.assert_allclose(norms[1], 1.0, rtol=1e-2)
    assert out[1].dtype == jnp.bfloat16


def test_value_clipping_keeps_nan_and_dtypes():
    tree = {"a": jnp.array([3.0, -4.0, 0.5, jnp.nan]), "i": jnp.array([9]), "n": None}
    clipped = fg.clip_grad_value(tree, 1.0)
    np.testing.assert_array_equal(clipped["a"], [1.0, -1.0, 0.5, np.nan])
    assert clipped["i"] == 9
    low = fg.clip_grad_value(jnp.array([3e4, -jnp.inf], jnp.float16), 1e6)
    assert low.dtype == jnp.float16
    frozen = fg.clip_grad_value({"a": jnp.ones(1), "b": jnp.ones(1)}, 0.5, frozen="a")
    assert (frozen["a"], frozen["b"]) == (0, 0.5)
    with pytest.raises(TypeError, match=r"gradients are real; got complex64 in grads\['z'\]"):
        fg.clip_grad_value({"z": jnp.ones(2, "complex64")}, 1.0)
    with pytest.raises(ValueError, match="max_value is at least 0; got -1"):
        fg.clip_grad_value(jnp.ones(2), -1.0)


def test_the_transformation_clips_and_tells_the_norm():
    params = {"w": jnp.ones(2), "embed": jnp.ones(1), "i": jnp.array(3)}
    grads = {"w": jnp.array([3.0, 4.0]), "embed": jnp.array([50.0]), "i": jnp.array(0)}
    opt = optax.chain(fg.clip_by_total_norm(1.0, frozen="embed"), optax.sgd(1.0))

    def step(state, _):
        updates, state = opt.update(grads, state, params)
        return state, (updates, state[0].norm)

    _, (updates, norms) = jax.lax.scan(step, opt.init(params), length=3)
    np.testing.assert_allclose(norms, [5, 5, 5], rtol=1e-6)
    np.testing.assert_allclose(updates["w"][0], [-0.6, -0.8], rtol=1e-6)
    assert not updates["embed"].any()


def test_the_transformation_takes_a_schedule():
    bound = optax.linear_schedule(2.0, 0.0, 2)
    opt = optax.inject_hyperparams(fg.clip_by_total_norm)(max_norm=bound)
    grads = jnp.array([3.0, 4.0])
    state, norms = opt.init(grads), []
    for _ in range(3):
        updates, state = jax.jit(opt.update)(grads, state, grads)
        norms.append(float(wide_norm(updates)))
    np.testing.assert_allclose(norms, [2, 1, 0], rtol=1e-6)
    value = optax.inject_hyperparams(fg.clip_by_value)(max_value=lambda count: 2.0 - count)
    updates, _ = value.update(grads, value.init(grads), grads)
    np.testing.assert_array_equal(updates, [2.0, 2.0])
    wrong = optax.inject_hyperparams(fg.clip_by_total_norm)(max_norm=1.0, order=1)
    with pytest.raises(ValueError, match='number known while tracing.*static_args="order"'):
        jax.jit(wrong.update)(grads, wrong.init(grads), grads)


def test_entries_are_read_once_for_an_ordinary_norm():
    jaxpr = jax.make_jaxpr(fg.global_norm)([jnp.ones(3), jnp.ones((2, 2))])
    reads = [visit for visit in walk(jaxpr) if visit.eqn.primitive.name.startswith("reduce_")]
    ordinary = [visit for visit in reads if not any("cond" in part for part in visit.path)]
    names = [visit.eqn.primitive.name for visit in ordinary if visit.eqn.invars[0].aval.size > 3]
    assert names == ["reduce_sum"]  # of the leaf of four; all other reductions are of scalars
    assert len(reads) > len(ordinary)  # for what is huge, tiny or not finite
