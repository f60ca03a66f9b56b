import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from conftest import PROGRAMS
from programs import programs

KEY = jax.random.key(7)
XS = jnp.arange(30.0).reshape(10, 3)


def leaves_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)


def noisy(key, x):
    return x + jax.random.uniform(key, x.shape)  # whose arithmetic is exact in any compilation


# Chunks.


@pytest.mark.parametrize("n", [0, 1, 11])
def test_chunks_equal_the_map_for_any_remainder(n):
    xs = jnp.arange(n * 3.0).reshape(n, 3)
    fun = lambda x: {"a": 3 * x, "b": (x.sum(), jnp.int32(3)), "weak": 2.0}
    chunked = lambda xs: [fg.vmap(fun, chunk_size=size)(xs) for size in (1, 3, 4, 7, 1000)]
    for found in jax.jit(chunked)(xs):
        leaves_equal(found, jax.vmap(fun)(xs))
        assert found["weak"].weak_type


AXES = st.sampled_from([0, 1, 2, -1, -3, None])


@settings(max_examples=PROGRAMS // 5)
@given(st.data())
def test_any_axes_of_a_tree_equal_the_loop(data):
    n = data.draw(st.integers(1, 7))
    in_axes = {k: data.draw(AXES) for k in "pqr"}
    in_axes["p"] = 0 if in_axes["p"] is None else in_axes["p"]
    out_axes = (data.draw(AXES.filter(lambda a: a is not None)), {"s": 0, "t": None})
    rng = np.random.default_rng(n)
    rows = {k: rng.normal(size=(n, 2, 3)).astype(np.float32) for k in "pqr"}
    put = lambda k: rows[k][0] if in_axes[k] is None else np.moveaxis(rows[k], 0, in_axes[k])
    fun = lambda t, y: (t["p"] * t["q"] + t["r"] + y, {"s": t["p"].sum(), "t": y + 1})

    chunked = fg.vmap(fun, (in_axes, None), out_axes, chunk_size=data.draw(st.integers(1, 8)))
    first, rest = jax.jit(chunked)({k: put(k) for k in "pqr"}, np.ones(3, np.float32))

    pick = lambda k, i: rows[k][0 if in_axes[k] is None else i]
    loop = [fun({k: pick(k, i) for k in "pqr"}, np.ones(3)) for i in range(n)]
    assert np.allclose(first, np.stack([a for a, _ in loop], out_axes[0]), atol=1e-5)
    assert np.allclose(rest["s"], [b["s"] for _, b in loop], atol=1e-5)
    assert np.array_equal(rest["t"], np.full(3, 2.0))


@settings(max_examples=PROGRAMS // 10)
@given(programs(depth=1, max_size=3))
def test_chunked_gradients_of_programs_equal_the_map(program):
    params, (xs, ts) = program.params(), program.inputs(batch=5)
    grad = jax.grad(program.loss)
    axes = (None, 0, 0)
    both = lambda *args: (fg.vmap(grad, axes, chunk_size=2)(*args), jax.vmap(grad, axes)(*args))
    for a, b in zip(*map(jax.tree.leaves, jax.jit(both)(params, xs, ts)), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_derivatives_through_chunks_and_of_chunks_under_other_transforms():
    w = jnp.arange(3.0)
    chunked = lambda w, xs: fg.vmap(lambda x: jnp.sin(w * x), chunk_size=4)(xs)
    whole = lambda w, xs: jnp.sin(w * xs)
    loss = lambda fun: lambda w, xs: (fun(w, xs) ** 2).sum()
    derivatives = (
        (lambda f: jax.grad(f, (0, 1)), XS),
        (jax.hessian, XS),
        (lambda f: jax.vmap(jax.grad(f), (None, 0)), jnp.stack([XS, 2 * XS])),
        (lambda f: lambda *at: jax.jvp(f, at, at), XS),
    )
    run = lambda fun: jax.jit(lambda w: [of(loss(fun))(w, rows) for of, rows in derivatives])(w)
    for a, b in zip(*map(jax.tree.leaves, (run(chunked), run(whole))), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_chunk_holds_no_row_of_padding():
    # The derivative of the square root at 0, the value of a row of zeros, is infinite.
    xs = jnp.arange(1.0, 12.0)
    grad = jax.grad(lambda xs: fg.vmap(jnp.sqrt, chunk_size=4)(xs).sum())(xs)
    assert jnp.allclose(grad, 0.5 / jnp.sqrt(xs))
    with jax.debug_nans(True), jax.debug_infs(True):
        fg.vmap(jnp.log, chunk_size=4)(xs)


def body_copies(fun, *args):
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    return sum(v.eqn.primitive.name == "tan" for v in fg._jaxpr.walk(jaxpr))


def test_the_body_is_compiled_twice_only_where_no_near_size_divides():
    copies = lambda n, size: body_copies(fg.vmap(jnp.tan, chunk_size=size), jnp.ones(n))
    assert copies(1000, 64) == copies(12, 4) == copies(10, 7) == copies(5, 9) == 1
    assert copies(11, 4) == 2


def test_temporaries_do_not_grow_with_the_number_of_rows():
    def fun(x):
        return jnp.sort(jnp.outer(x, x), axis=None)[:3]

    def temporaries(n, size):
        run = jax.jit(fg.vmap(fun, chunk_size=size)).lower(jnp.ones((n, 64))).compile()
        return run.memory_analysis().temp_size_in_bytes

    assert temporaries(256, 4) < 1.3 * temporaries(32, 4) < 0.3 * temporaries(32, None)


def test_keys_are_mapped_and_returned_like_arrays():
    keys = jax.random.split(KEY, 5)
    fun = lambda key, x: (jax.random.fold_in(key, 1), noisy(key, x), key)
    maps = fg.vmap(fun, chunk_size=2), jax.vmap(fun)
    a, b = jax.jit(lambda *args: [run(*args) for run in maps])(keys, XS[:5])
    assert a[0].dtype == keys.dtype
    data = jax.random.key_data
    leaves_equal((data(a[0]), a[1], data(a[2])), (data(b[0]), b[1], data(b[2])))


def test_keyword_arguments_static_arguments_and_axis_size():
    fun = lambda x, n, *, y: x[:n] + y  # n decides a shape, so it keeps its value
    for size in (None, 3):
        out = fg.vmap(fun, (0, None), chunk_size=size)(XS, 2, y=jnp.arange(10.0))
        assert jnp.array_equal(out, XS[:, :2] + jnp.arange(10.0)[:, None])
        same = fg.vmap(lambda x: 2 * x, None, axis_size=4, chunk_size=size)(XS)
        assert jnp.array_equal(same, jnp.stack([2 * XS] * 4))


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_chunks_of_arrays_spread_over_devices(spec):
    mesh = jax.make_mesh((2,), ("x",))
    with jax.set_mesh(mesh):
        xs = jax.device_put(jnp.arange(24.0).reshape(6, 4), jax.NamedSharding(mesh, spec))
        out = jax.jit(fg.vmap(jnp.sin, chunk_size=4))(xs)
        inside = jax.shard_map(fg.vmap(jnp.sin, chunk_size=2), in_specs=spec, out_specs=spec)(xs)
    assert jnp.allclose(np.asarray(out), np.sin(np.asarray(xs)))
    assert jnp.allclose(np.asarray(inside), np.sin(np.asarray(xs)))


# Randomness.

raw = jax.random.PRNGKey(3)


@pytest.mark.parametrize("key", [KEY, raw], ids=["typed", "raw"])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_a_shared_key_is_an_error_unless_asked_for(key, chunk_size):
    with pytest.raises(ValueError, match="not mapped, drawn from at .*test_vmap.py.*noisy"):
        fg.vmap(noisy, (None, 0), chunk_size=chunk_size)(key, XS)
    with pytest.raises(ValueError, match="not mapped"):  # closed over
        fg.vmap(lambda x: noisy(key, x), chunk_size=chunk_size)(XS)

    def run(xs):
        mapped = lambda fun, axes, how: fg.vmap(fun, axes, chunk_size=chunk_size, randomness=how)
        return (
            mapped(noisy, (None, 0), "same")(key, xs),
            mapped(noisy, (None, 0), "different")(key, xs),
            mapped(lambda x: noisy(key, x), 0, "different")(xs),  # closed over
        )

    same, *different = jax.jit(run)(XS)
    leaves_equal(same, jax.vmap(noisy, (None, 0))(key, XS))
    loop = jnp.stack([noisy(jax.random.fold_in(key, i), x) for i, x in enumerate(XS)])
    leaves_equal(different, [loop, loop])


ADDED = jax.custom_batching.custom_vmap(lambda x: noisy(KEY, x))
ADDED.def_vmap(lambda n, is_mapped, x: (noisy(KEY, x), True))
SHARED = {
    "in a scan": lambda x: lax.scan(lambda c, k: (noisy(k, c), None), x, jax.random.split(KEY))[0],
    "in a branch": lambda x: lax.cond(x.sum() > 9, lambda x: noisy(KEY, x), jnp.sin, x),
    "in a while": lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: noisy(KEY, x) + 9, x),
    "in a jit": jax.jit(lambda x: noisy(KEY, x)),
    "checkpointed": jax.checkpoint(lambda x: noisy(KEY, x)),
    "from a seed": lambda x: noisy(jax.random.key(0), x),
    "gamma": lambda x: x + jax.random.gamma(KEY, 2.0),
    "by the row's number of nothing": lambda x: noisy(jax.random.fold_in(KEY, 3), x),
    "in a linear solver": lambda x: lax.custom_linear_solve(
        lambda v: v, x, lambda _, b: noisy(KEY, b), symmetric=True
    ),
    "under a rule for maps": lambda x: ADDED(x),
    "in an inner map": lambda x: jax.vmap(lambda y: y * jax.random.uniform(KEY))(x),
    "before a gradient": jax.grad(lambda x: noisy(KEY, x) @ x),
}
OWN = {
    "folded with data": lambda x: noisy(jax.random.fold_in(KEY, x[0].astype(int)), x),
    "carried by a loop": lambda x: lax.fori_loop(
        0, 3, lambda i, s: (jax.random.fold_in(s[0], i), noisy(s[0], s[1])),
        (jax.random.fold_in(KEY, x[0].astype(int)), x),
    )[1],
    "no draw": lambda x: x + jax.random.key_data(KEY).sum(),
}  # fmt: skip


@pytest.mark.parametrize("fun", SHARED.values(), ids=SHARED)
def test_shared_draws_are_found_in_every_construct(fun):
    with pytest.raises(ValueError, match="vmap: every row draws from its own key"):
        fg.vmap(fun)(XS)


@pytest.mark.parametrize("fun", OWN.values(), ids=OWN)
def test_own_draws_pass(fun):
    leaves_equal(*jax.jit(lambda xs: (fg.vmap(fun)(xs), jax.vmap(fun)(xs)))(XS))


def test_an_array_of_keys_and_keys_within_constructs_differ_by_row_whatever_the_chunks():
    def fun(keys, x):
        drop = jax.checkpoint(lambda x: x * jax.random.bernoulli(keys[0], shape=x.shape))
        return lax.scan(lambda c, k: (noisy(k, c), None), drop(x), keys)[0]

    run = lambda size: fg.vmap(fun, (None, 0), chunk_size=size, randomness="different")
    own = lambda keys, i: jax.vmap(lambda k: jax.random.fold_in(k, i))(keys)
    everything = lambda keys: (run(None)(keys, XS), run(4)(keys, XS), fun(own(keys, 7), XS[7]))
    whole, chunked, row = jax.jit(everything)(jax.random.split(KEY, 3))
    leaves_equal(chunked, whole)
    assert np.allclose(whole[7], row, atol=1e-6)


def test_different_refuses_a_key_that_is_made_inside():
    # A constant of a jit is none of its inputs.
    made = SHARED["from a seed"], lambda x: noisy(jnp.stack([raw, raw])[0], x), SHARED["in a jit"]
    for fun in made:
        with pytest.raises(ValueError, match="keys come from outside of fun.*test_vmap.py"):
            fg.vmap(fun, randomness="different")(XS)


def test_an_outer_map_sees_what_an_inner_one_shares():
    rows = lambda key, x: fg.vmap(noisy, (None, 0), randomness="different")(key, x)
    xs = jnp.zeros((2, 4, 3))
    with pytest.raises(ValueError, match="not mapped"):
        fg.vmap(rows, (None, 0))(KEY, xs)
    out = fg.vmap(rows, (None, 0), randomness="different")(KEY, xs)
    assert len(np.unique(out)) == out.size


def test_dropout_of_flax_is_found():
    from flax import linen as nn

    drop = lambda x: nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": KEY})
    with pytest.raises(ValueError, match="not mapped"):
        fg.vmap(drop)(XS)
    out = jax.jit(fg.vmap(drop, randomness="different", chunk_size=3))(jnp.ones((20, 8)))
    assert len({tuple(row) for row in np.asarray(out)}) > 15


# Collectives, and what is refused.


def test_a_collective_over_a_named_axis_is_refused_in_chunks_only():
    fun = lambda x: x - lax.pmean(x, "rows")
    assert jnp.allclose(fg.vmap(fun, axis_name="rows")(XS), XS - XS.mean(0))
    for randomness in ("same", "error"):
        for size in (4, 10):
            with pytest.raises(ValueError, match="psum at .*test_vmap.py"):
                options = {"chunk_size": size, "randomness": randomness}
                fg.vmap(fun, axis_name="rows", **options)(XS)
    with pytest.raises(ValueError, match="axis_index at"):
        fg.vmap(lambda x: x + lax.axis_index("rows"), axis_name="rows", chunk_size=4)(XS)


def test_a_collective_over_another_axis_works_in_chunks():
    inner = fg.vmap(lambda x: x - lax.pmean(x, "out"), axis_name="in", chunk_size=4)
    out = jax.vmap(inner, axis_name="out")(jnp.stack([XS, 3 * XS]))
    assert jnp.allclose(out, jnp.stack([-XS, XS]))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: fg.vmap(jnp.sin, chunk_size=0), "chunk_size is a positive number of rows; got 0"),
        (lambda: fg.vmap(jnp.sin, randomness="random"), "'error', 'same' or 'different'"),
        (lambda: fg.vmap(jnp.sin, 2)(XS), r"got 2 for args\[0\] with shape \(10, 3\)"),
        (lambda: fg.vmap(jnp.sin, True)(XS), "got True for args"),
        (lambda: fg.vmap(jnp.sin, None)(XS), "Pass axis_size"),
        (
            lambda: fg.vmap(jnp.add, (0, 1))(XS, XS),
            r"same number of rows; got args\[0\]: 10, args\[1\]: 3",
        ),
        (lambda: fg.vmap(jnp.sin, out_axes=None, chunk_size=4)(XS), "out_axes|batched on axis 0"),
        (lambda: fg.vmap(jnp.sin, out_axes=(0, 0), chunk_size=4)(XS), "a prefix has the struct"),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_python_that_needs_a_shared_value_is_told_of_the_way_out():
    branching = lambda x, w: x if float(w.sum()) > 0 else -x
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        fg.vmap(branching, (0, None))(XS, jnp.ones(2))
    assert "randomness='same'" in caught.value.__notes__[0]
    out = fg.vmap(branching, (0, None), randomness="same")(XS, jnp.ones(2))
    assert jnp.array_equal(out, XS)
