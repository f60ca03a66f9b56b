"""What is kept for the backward pass in another form: its size, its error, its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from conftest import DEEP, PROGRAMS
from funcgrad._compat import unoptimised
from programs import odd_tanh, programs

compiled_quickly = functools.partial(jax.jit, compiler_options=unoptimised())
TEN = (lambda x: 10 * x, lambda x: x)
SAME = (lambda x: x, lambda x: x)
PACKS = {"bfloat16": fg.packs.bfloat16, "int8": fg.packs.int8, "host": fg.packs.host}
A = jnp.array([1.0, 2.0, 3.0])


def everything(saved):
    return True


def net(w, x, mask):
    h = jnp.where(mask > 0, jnp.sin(jnp.tanh(x @ w)), x)
    return jnp.sum(lax.scan(lambda c, _: (jnp.tanh(c @ w), None), h, length=3)[0] ** 2)


rng = np.random.default_rng(0)
W = jnp.asarray(rng.normal(size=(32, 32)) / 6, jnp.float32)
X = jnp.asarray(rng.normal(size=(4, 32)), jnp.float32)
MASK = jnp.asarray(rng.integers(0, 2, size=(4, 32)))


@pytest.mark.parametrize("power", [lambda a: a**2, lambda a: a * a, jnp.square])
def test_residuals_scaled_by_ten_scale_the_gradient(power):
    hooked = fg.saved_tensor_hooks(lambda a: power(a).sum(), *TEN, where=everything)
    np.testing.assert_array_equal(jax.grad(hooked)(A), [20, 40, 60])
    np.testing.assert_array_equal(hooked(A), 14)


@pytest.mark.torch
def test_torch_packs_leaves_too_and_second_derivatives_go_through_its_hooks(torch):
    def theirs(power, order):
        a = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(*TEN):
            y = power(a).sum()
            for _ in range(order):
                (grad,) = torch.autograd.grad(y, a, create_graph=True)
                y = grad.sum()
        return grad.detach().numpy()

    product = lambda a: (a * a).sum()
    hooked = fg.saved_tensor_hooks(product, *TEN, where=everything)
    np.testing.assert_array_equal(theirs(lambda a: a * a, 1), jax.grad(hooked)(A))
    np.testing.assert_array_equal(theirs(lambda a: a * a, 1), [20, 40, 60])
    # Ours without `where` leaves the argument alone: its owner keeps it anyway.
    np.testing.assert_array_equal(jax.grad(fg.saved_tensor_hooks(product, *TEN))(A), [2, 4, 6])
    # The derivative of the gradient that was computed, 20 a.
    second = jax.grad(lambda a: jax.grad(hooked)(a).sum())(A)
    np.testing.assert_array_equal(second, [20, 20, 20])
    np.testing.assert_array_equal(theirs(lambda a: a * a, 2), second)


def test_each_kept_value_is_packed_once_and_others_are_left_alone():
    seen = []
    pack = lambda x: seen.append((x.shape, x.dtype)) or x
    saved = fg.saved_tensors(net, argnums=(0, 1))(W, X, MASK)
    jax.eval_shape(jax.grad(fg.saved_tensor_hooks(net, pack, lambda x: x), (0, 1)), W, X, MASK)
    floats = [t for t in saved if t.kind == "computed" and t.dtype == np.float32]
    assert sorted(map(str, seen)) == sorted(str((t.shape, t.dtype)) for t in floats)
    seen.clear()
    large = lambda t: t.kind == "computed" and t.bytes > 1000
    jax.eval_shape(jax.grad(fg.saved_tensor_hooks(net, pack, lambda x: x, where=large)), W, X, MASK)
    assert {shape for shape, _ in seen} == {(3, 4, 32)}


@pytest.mark.parametrize("name", PACKS)
def test_bytes_fall_as_stated(name):
    plain = fg.saved_tensors(net, argnums=(0, 1))(W, X, MASK)
    hooked = fg.saved_tensor_hooks(net, *PACKS[name])
    saved = fg.saved_tensors(hooked, argnums=(0, 1))(W, X, MASK)
    floats = sum(t.bytes for t in plain if t.kind == "computed" and t.dtype == np.float32)
    rest = plain.bytes - floats
    expected = {"bfloat16": floats / 2, "int8": floats / 4 * (1 + 4 / 32), "host": floats}[name]
    assert saved.bytes - rest == expected


def test_compiled_memory_follows_where_the_loop_packs_each_step():
    def temporaries(pack):
        layer = lambda h, w: jnp.sin(jnp.sin(h) @ w)
        step = fg.saved_tensor_hooks(layer, *pack)
        loss = lambda w, x: lax.scan(lambda h, _: (step(h, w), None), x, length=16)[0].sum()
        args = jnp.ones((64, 64)), jnp.ones((128, 64))
        compiled = compiled_quickly(jax.grad(loss)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(fg.packs.int8) < 0.45 * temporaries(SAME)


@given(
    st.integers(0, 2**16),
    st.sampled_from([(), (1,), (5,), (3, 40), (2, 3, 17), (0, 9), (4, 0)]),
    st.sampled_from(["float32", "float64", "bfloat16", "float16", "complex64"]),
    st.floats(-60, 30),
)
@settings(max_examples=8 if not DEEP else 500)
def test_the_stated_error_bounds(seed, shape, dtype, exponent):
    with jax.enable_x64(True):
        exponent = np.clip(exponent, -10, 10) if dtype == "float16" else exponent
        values = np.random.default_rng(seed).normal(size=shape) * 2.0**exponent
        x = jnp.asarray(values).astype(dtype)
        # Two programs: in one, XLA may drop a rounding.
        packed = compiled_quickly(lambda x: {n: pack.pack(x) for n, pack in PACKS.items()})(x)
        unpack = lambda name, packed: PACKS[name].unpack(packed).astype(dtype)
        back = compiled_quickly(lambda packed: {n: unpack(n, p) for n, p in packed.items()})(packed)
        for name in PACKS:
            exact, found = np.asarray(x, np.complex128), np.asarray(back[name], np.complex128)
            assert found.shape == exact.shape
            error = np.abs(found - exact)
            if name == "host" or dtype == "complex64":
                assert (error == 0).all()
            elif name == "bfloat16":
                assert (error <= 2.0**-8 * np.abs(exact)).all()
            elif x.size:
                row = np.abs(exact).max(-1, keepdims=True) if x.ndim else np.abs(exact)
                rounding = float(jnp.finfo(dtype).eps) * row  # back to the type of x
                assert (error <= row / 254 * (1 + 1e-5) + rounding).all()


def test_int8_keeps_zeros_and_shows_what_is_not_finite():
    rows = jnp.array([[0.0] * 8, [jnp.inf] + [1.0] * 7, [jnp.nan] + [1.0] * 7, [1e-42] * 8])
    back = np.asarray(jax.jit(fg.packs.int8.unpack)(jax.jit(fg.packs.int8.pack)(rows)))
    np.testing.assert_array_equal(back[0], 0)
    assert np.isnan(back[1:3]).all()
    assert (np.abs(back[3]) <= 2e-42).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_int8_shows_what_is_not_finite_in_long_rows(dtype, x64):
    rows = np.ones((4, 5000), dtype)  # XLA's CPU loses a NaN in the maximum of so many
    rows[1:, 1234] = np.nan, np.inf, -np.inf
    back = jax.jit(lambda x: fg.packs.int8.unpack(fg.packs.int8.pack(x)))(rows)
    assert (back[0] == 1).all() and np.isnan(back[1:]).all()


def test_gradients_are_near_and_the_same_under_transformations():
    @compiled_quickly
    def run(w):
        found = {"exact": jax.grad(net)(w, X, MASK)}
        for name, pack in PACKS.items():
            hooked = fg.saved_tensor_hooks(net, *pack)
            found[name] = jax.grad(hooked)(w, X, MASK)
        hooked = fg.saved_tensor_hooks(net, *fg.packs.int8)

        def scanned(w):
            return lax.scan(lambda c, x: (c + hooked(w, x[None], MASK[:1]), None), 0.0, X)[0]

        rows = jax.vmap(jax.grad(hooked), (None, 0, 0))(w, X[:, None], MASK[:, None]).sum(0)
        # Under jax_custom_vjp3 JAX has no checkpoint of a rule with symbolic zeros yet.
        new_rules = getattr(jax.config, "jax_custom_vjp3", False)
        again = jax.grad(hooked if new_rules else jax.checkpoint(hooked))(w, X, MASK)
        same_mask = sum(jax.grad(hooked)(w, x[None], MASK[:1]) for x in X)
        return found, (rows, again, jax.grad(scanned)(w), same_mask), hooked(w, X, MASK)

    found, (rows, again, scanned, same_mask), value = run(W)
    scale = jnp.abs(found["exact"]).max()
    for name, tolerance in {"bfloat16": 0.02, "int8": 0.05, "host": 1e-6}.items():
        np.testing.assert_allclose(found[name] / scale, found["exact"] / scale, atol=tolerance)
    for other, one in ((rows, found["int8"]), (again, found["int8"]), (scanned, same_mask)):
        np.testing.assert_allclose(other / scale, one / scale, atol=1e-5)
    np.testing.assert_allclose(value, net(W, X, MASK), rtol=1e-6)


@given(programs())
@settings(max_examples=PROGRAMS if DEEP else 2)
def test_generated_programs_without_a_change_keep_their_gradient(program):
    with jax.enable_x64(True):
        params, (x, t) = program.params(np.float64), program.inputs(np.float64)
        hooked = fg.saved_tensor_hooks(program.loss, *SAME, where=everything)
        found = compiled_quickly(jax.grad(hooked, (0, 1)))(params, x, t)
        expected = compiled_quickly(jax.grad(program.loss, (0, 1)))(params, x, t)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def loss(fun):
        return jax.shard_map(
            lambda w, x: lax.psum(fun(w, x), "data"),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=check_vma,
        )

    # Some of what is kept varies from device to device, and some does not.
    local = lambda w, x: jnp.sum(jnp.sin(jnp.tanh(x @ w))) + jnp.sum(jnp.sin(jnp.exp(w)))
    hooked = fg.saved_tensor_hooks(local, *SAME)
    found = compiled_quickly(jax.grad(loss(hooked), (0, 1)))(W, X)
    for a, b in zip(found, compiled_quickly(jax.grad(loss(local), (0, 1)))(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_second_derivatives_go_through_the_pack_or_are_refused():
    fun = lambda a: jnp.sum(jnp.sin(a) ** 3)
    twice = lambda fun: jax.grad(lambda a: jax.grad(fun)(a).sum())
    a = jnp.arange(16.0)
    near = compiled_quickly(twice(fg.saved_tensor_hooks(fun, *fg.packs.bfloat16)))(a)
    np.testing.assert_allclose(near, compiled_quickly(twice(fun))(a), atol=0.05)
    small = fg.saved_tensor_hooks(fun, *fg.packs.int8)
    with pytest.raises(NotImplementedError, match="a pack that gives int8, which has no derivat"):
        twice(small)(a)
    with pytest.raises(NotImplementedError, match="second derivative"):
        jax.hessian(small)(a)


def test_a_module_that_counts_its_draws_is_refused():
    hooked = fg.saved_tensor_hooks(lambda model, x: model(x).sum(), *SAME)
    with pytest.raises(ValueError, match=r"^saved_tensor_hooks: .*changes .*count"):
        hooked(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), A)


def test_forward_mode_is_refused():
    hooked = fg.saved_tensor_hooks(jnp.sin, *SAME)
    with pytest.raises((TypeError, NotImplementedError)):  # the second under jax_custom_vjp3
        jax.jvp(hooked, (1.0,), (1.0,))


def test_an_output_that_is_not_used_keeps_its_explicit_sharding():
    mesh = jax.make_mesh((2,), ("data",))
    two = lambda w, x: (jnp.tanh(x @ w).sum(), jnp.tanh(x @ w))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
        first = lambda fun: compiled_quickly(jax.grad(lambda w, x: fun(w, x)[0]))
        hooked = fg.saved_tensor_hooks(two, *SAME)
        np.testing.assert_allclose(first(hooked)(W, x), first(two)(W, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_unpack_gives_the_kind_that_was_packed(dtype):
    wrong = fg.saved_tensor_hooks(lambda a: jnp.sin(a).sum(), *SAME[:1], lambda x: x.astype(dtype))
    with pytest.raises(TypeError, match=f"floating type.* as x is; got {dtype} for float32"):
        jax.grad(wrong)(A)


def test_hooks_may_close_over_what_is_differentiated():
    def tenfold(s, a):
        hooked = fg.saved_tensor_hooks(lambda a: a**2, lambda x: x * s, lambda x: x)
        return jax.grad(hooked)(a)

    np.testing.assert_array_equal(compiled_quickly(jax.value_and_grad(tenfold))(10.0, 3.0), (60, 6))


def test_a_shape_that_changes_is_refused():
    wrong = fg.saved_tensor_hooks(lambda a: jnp.sin(a).sum(), lambda x: x[:1], lambda x: x)
    with pytest.raises(TypeError, match=r"has the shape of x; got \(1,\) for \(3,\)"):
        jax.grad(wrong)(A)


def test_functions_of_every_kind():
    def fun(params, key, train, *, scale=2.0):
        h = odd_tanh(params["w"]) * scale
        if train:
            h = h * jax.random.bernoulli(key, 0.5, h.shape)
        return {"loss": jnp.sin(h).sum(), "steps": params["steps"] + 1, "none": None}

    params = {"w": jnp.arange(4.0), "steps": jnp.array([3]), "nothing": None}
    key = jax.random.key(0)
    hooked = fg.saved_tensor_hooks(fun, *SAME)
    out, expected = (
        jax.eval_shape(lambda p, k, f=f: f(p, k, True), params, key) for f in (hooked, fun)
    )
    assert out == expected
    grad = lambda fun: compiled_quickly(
        jax.grad(lambda w: fun({**params, "w": w}, key, True, scale=w)["loss"])
    )
    np.testing.assert_allclose(grad(hooked)(A + 1), grad(fun)(A + 1), rtol=1e-6)
    assert fg.saved_tensor_hooks(lambda: jnp.ones(2), *SAME)().shape == (2,)
    assert fg.saved_tensor_hooks(lambda x: x + 1, *SAME)(jnp.arange(2)).dtype == jnp.int32
    to = fg.saved_tensor_hooks(lambda x, dtype: x.astype(dtype), *SAME)
    assert to(A, jnp.float16).dtype == to(A, np.float16).dtype == np.float16

    half = jnp.ones((2, 16), jnp.bfloat16)
    packed = fg.saved_tensor_hooks(lambda x: jnp.sin(jnp.sin(x)).sum(), *fg.packs.int8)
    assert jax.eval_shape(jax.grad(packed), half).dtype == jnp.bfloat16
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    loss = lambda model, x: jnp.tanh(model(x)).sum()
    hooked = fg.saved_tensor_hooks(loss, *SAME)
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: np.allclose(a, b, rtol=1e-6),
            compiled_quickly(jax.grad(hooked))(model, jnp.ones((2, 3))),
            compiled_quickly(jax.grad(loss))(model, jnp.ones((2, 3))),
        )
    )


def test_gradients_of_what_is_closed_over():
    def loss(w, fun):
        return fun(lambda x: jnp.sin(x @ w).sum())(X)

    hooked = lambda fun: fg.saved_tensor_hooks(fun, *SAME)
    np.testing.assert_allclose(
        compiled_quickly(jax.grad(lambda w: loss(w, hooked)))(W),
        compiled_quickly(jax.grad(lambda w: loss(w, lambda fun: fun)))(W),
        rtol=1e-6,
        atol=1e-6,
    )
