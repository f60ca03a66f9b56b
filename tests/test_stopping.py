"""Regions without gradients: no_grad, set_grad_enabled, inference_mode."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from conftest import PROGRAMS
from funcgrad import _jaxpr
from funcgrad._compat import remat3_enabled
from programs import Program, odd_tanh, programs

W = jnp.arange(16.0).reshape(4, 4) / 20 - 0.3
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)

WRAPS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda w: lax.scan(lambda c, _: (c + f(w), None), 0.0, length=2)[0],
    "carried": lambda f: lambda w: lax.scan(lambda c, _: (c, f(c)), w, length=2)[1].sum(),
    "cond": lambda f: lambda w: lax.cond(w.sum() < 9.0, f, lambda w: 0.0, w),
    "vmap": lambda f: lambda w: jax.vmap(f)(jnp.stack([w, w])).sum(),
    "jit of vmap of jit": lambda f: jax.jit(lambda w: jax.vmap(jax.jit(f))(w[None]).sum()),
    "grad": lambda f: lambda w: jax.grad(f)(w).sum(),
}
wraps = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def residual_bytes(fun, *args):
    leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(fun, *a)[1], *args))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def assert_close(got, expected, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), got, expected)


def line_of(fun, word):
    lines, first = inspect.getsourcelines(fun)
    return next(first + i for i, line in enumerate(lines) if word in line)


# no_grad


@wraps
def test_no_grad_is_a_constant_in_reverse_and_forward_mode(wrap):
    def with_region(w):
        target = fg.no_grad(lambda x: jnp.tanh(x @ w) @ w)(X)
        return ((jnp.sin(X @ w) - target) ** 2).sum()

    def with_stop(w):
        target = lax.stop_gradient(jnp.tanh(X @ w) @ w)
        return ((jnp.sin(X @ w) - target) ** 2).sum()

    def derivatives(fun):
        first, second = jax.jvp(fun, (W,), (W,)), jax.jvp(jax.grad(fun), (W,), (W,))
        return first, second, jax.linearize(fun, W)[1](W)

    both = jax.jit(lambda: (derivatives(wrap(with_region)), derivatives(wrap(with_stop))))
    assert_close(*both(), rtol=1e-4)


def test_no_grad_in_an_inner_derivative_stops_the_outer_one_too():
    def inner(a):
        return jax.grad(lambda b: b * fg.no_grad(lambda c: a * b * c)(a + b))(a)

    def known(a):
        return jax.grad(lambda b: b * lax.stop_gradient(a * b * (a + b)))(a)

    for of in (jax.jacfwd(inner), jax.jit(jax.grad(inner))):
        assert (inner(3.0), of(3.0)) == (known(3.0), 0.0)

    @jax.custom_vjp
    def square(x):
        return x * x

    square.defvjp(lambda x: (fg.no_grad(lambda: x * x)(), x), lambda x, g: (2 * x * g,))
    assert jax.grad(jax.grad(square))(3.0) == 2.0
    value, pull = jax.jit(lambda w: fg.no_grad(lambda: jax.vjp(jnp.sin, w))())(1.0)
    assert_close((value, pull(1.0)), (jnp.sin(1.0), (jnp.cos(1.0),)))


def test_regions_leak_no_tracer():
    def fun(w):
        a = fg.no_grad(lambda x: {"a": x * w})(w)["a"]
        b = fg.no_grad(lambda: fg.set_grad_enabled(True)(jnp.sin)(w))()
        return a * b * fg.inference_mode(jnp.sin)(2.0) * w

    known = jnp.sin(2.0) * (jnp.sin(0.5) + 0.5 * jnp.cos(0.5)) * 0.5**2
    with jax.checking_leaks():
        for of in (jax.grad(fun), jax.jit(jax.grad(jax.checkpoint(fun)))):
            assert_close(of(0.5), known)


@settings(max_examples=max(4, PROGRAMS // 10))
@given(programs(depth=1, max_size=4))
def test_no_grad_of_any_program_keeps_values_and_leaves_no_gradient(program: Program):
    params, (x, t) = program.params(), program.inputs()
    plain = lambda p, x: program.loss(p, x, t)
    mixed = lambda p, x: jnp.sin(x).sum() * fg.no_grad(lambda: plain(p, x))()
    constant = jax.jit(plain)(params, x)
    known = lambda p, x: jnp.sin(x).sum() * constant
    assert_close(
        *jax.jit(lambda: [jax.value_and_grad(f, (0, 1))(params, x) for f in (mixed, known)])()
    )


def test_no_grad_saves_nothing_for_the_backward_pass():
    def loss(w, x):
        target = fg.no_grad(lambda: jnp.tanh(jnp.tanh(jnp.sin(x @ w) @ w) @ w))()
        return ((x @ w) * target).sum()

    def rest(w, x):
        target = lax.stop_gradient(jnp.abs(x))
        return ((x @ w) * target).sum()

    def whole(w, x):
        return ((x @ w) * jnp.tanh(jnp.tanh(jnp.sin(x @ w) @ w) @ w)).sum()

    needed = residual_bytes(rest, W, X)
    assert residual_bytes(loss, W, X) == needed
    assert residual_bytes(jax.jit(loss), W, X) == needed
    assert residual_bytes(whole, W, X) > 2 * needed

    def scanned(fun):
        return lambda w, x: lax.scan(lambda c, x: (c + fun(w, x[None]), None), 0.0, x)[0]

    assert residual_bytes(scanned(loss), W, X) == residual_bytes(scanned(rest), W, X)


def test_no_grad_leaves_no_tangent_computation_behind():
    fun = lambda w: fg.no_grad(lambda: jnp.sin(w).sum())() + 2.0 * w.sum()
    jaxpr = jax.make_jaxpr(lambda w, t: jax.jvp(fun, (w,), (t,)))(W, W)
    names = [visit.eqn.primitive.name for visit in _jaxpr.walk(jaxpr)]
    assert names.count("sin") == 1
    assert "cos" not in names


def test_no_grad_lets_in_what_has_no_derivative():
    def callback(w):
        return jax.pure_callback(np.sort, jax.ShapeDtypeStruct((4,), jnp.float32), w)

    def loss(w):
        metric = fg.no_grad(lambda: callback(w[0]).sum() + odd_tanh(w).sum())()
        counted = fg.no_grad(lambda: lax.while_loop(lambda c: c < 3.0, lambda c: c + 1, w[1, 1]))()
        return (w**2).sum() + metric + counted

    assert_close(jax.grad(loss)(W), 2 * W)
    assert_close(jax.jvp(loss, (W,), (W,))[1], (2 * W * W).sum())
    assert_close(jax.grad(jax.jit(loss))(W), 2 * W)


def test_no_grad_keeps_results_and_arguments_of_every_kind():
    key = jax.random.key(0)

    @fg.no_grad
    def step(x, key, *, name, train=True, scale=None):
        """What it does."""
        assert scale is None
        assert isinstance(name, str)
        drawn = jax.random.normal(key, x.shape) if train else x
        return {"x": x + drawn, "name": name, "n": jnp.argmax(x), "key": key, "none": None, "k": 3}

    assert step.__doc__ == "What it does."
    out = step(W[0], key, name="a")

    def inside(w):
        out = step(w, key, name="a")
        assert (out["name"], out["none"], out["k"]) == ("a", None, 3)
        assert out["n"].dtype == jnp.int32
        assert jnp.issubdtype(out["key"].dtype, jax.dtypes.prng_key)
        return (w * out["x"]).sum() + jax.random.normal(out["key"])

    assert_close(jax.grad(inside)(W[0]), out["x"])
    assert_close(jax.jit(jax.vmap(jax.grad(inside)))(W)[0], out["x"])


def test_no_grad_outside_of_transformations_just_calls():
    seen = []

    def fun(x):
        seen.append(type(x))
        return "large" if x > 1 else x  # Python decides by the value

    assert fg.no_grad(fun)(np.float32(2.0)) == "large"
    assert seen == [np.float32]

    def inside(w):  # a known number stays one inside, too
        return w * (fg.no_grad(fun)(3.0) == "large")

    assert jax.grad(inside)(2.0) == 1.0


def test_no_grad_decorates_methods():
    class Teacher:
        def __init__(self, w):
            self.w = w

        @fg.no_grad
        def predict(self, x):
            return x @ self.w

    def loss(w):
        return (Teacher(w).predict(X) * (X @ w)).sum()

    assert_close(jax.grad(loss)(W), X.T @ (X @ W))


def test_flax_modules_may_stop_the_gradient_of_their_parts():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="head")(fg.no_grad(nn.Dense(3, name="body"))(x))

    linen = Linen()
    params = linen.init(jax.random.key(0), X)["params"]
    grads = jax.grad(lambda p: linen.apply({"params": p}, X).sum())(params)
    assert not np.any(grads["body"]["kernel"])
    assert np.all(grads["head"]["bias"] == 3)

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.body, self.head = nnx.Linear(4, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x):
            return self.head(fg.no_grad(self.body)(x))

    grads = nnx.grad(lambda model: model(X).sum())(Nnx(nnx.Rngs(0)))
    assert not np.any(grads["body"]["kernel"][...])
    assert np.all(grads["head"]["bias"][...] == 3)


def test_gradients_taken_inside_no_grad_are_whole():
    def step(w):
        return w - 0.1 * fg.no_grad(jax.grad(lambda w: jnp.sin(w).sum()))(w)

    assert_close(step(W), W - 0.1 * jnp.cos(W))
    assert_close(jax.grad(lambda w: step(w).sum())(W), jnp.ones_like(W))


@pytest.mark.parametrize("check_vma", [True, False])
def test_no_grad_inside_shard_map(check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def local(w, x):
        mean = fg.no_grad(lambda: lax.pmean((x * w).mean(), "data"))()
        return lax.psum(((x * w - mean) ** 2).sum(), "data")

    def fun(w, x):
        specs = (P(), P("data"))
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
        return mapped(w, x)

    def known(w, x):
        return ((x * w - lax.stop_gradient((x * w).mean())) ** 2).sum()

    x = jnp.arange(8.0)
    assert_close(jax.jit(jax.value_and_grad(fun))(0.7, x), jax.value_and_grad(known)(0.7, x))


def test_no_grad_refuses_what_it_cannot_stop():
    def generator(x):
        yield x

    async def coroutine(x):
        return x

    async def both(x):
        yield x

    for fun in (generator, coroutine, both, functools.partial(generator, 1.0)):
        with pytest.raises(TypeError, match="no_grad: fun returns its result.*generator"):
            fg.no_grad(fun)
        with pytest.raises(TypeError, match="set_grad_enabled: fun returns its result"):
            fg.set_grad_enabled(True)(fun)

    class Rows:
        def __call__(self, w):
            yield w**2

    lazy = [Rows(), lambda w: map(jnp.sin, [w]), lambda w: {"a": (v for v in [w])}]
    for fun in lazy:  # would be computed where gradients pass
        for call in (fg.no_grad, fg.set_grad_enabled(True), fg.inference_mode):
            with pytest.raises(TypeError, match="fun returns its result.*which runs later"):
                jax.grad(lambda w, fun=fun, call=call: sum(call(fun)(w)))(3.0)
    with pytest.raises(Exception, match="(?s)enabled.*'no'"):  # the type checker may be first
        fg.set_grad_enabled("no")

    def through_a_reference(w):
        ref = jax.new_ref(w)
        return fg.no_grad(lambda: ref[...] * 2)() * w

    with pytest.raises(TypeError, match="no_grad: .*mutable reference"):
        jax.grad(through_a_reference)(2.0)


# set_grad_enabled


@pytest.mark.parametrize("name", ["eager", "checkpoint", "scan", "cond", "jit of vmap of jit"])
def test_set_grad_enabled_is_no_grad_or_nothing(name):
    wrap = WRAPS[name]

    def fun(w, enabled):
        return fg.set_grad_enabled(enabled)(lambda x: jnp.sin(x @ w).sum())(X) * w[0, 0]

    plain = lambda w: jnp.sin(X @ w).sum() * w[0, 0]
    stopped = lambda w: lax.stop_gradient(jnp.sin(X @ w).sum()) * w[0, 0]
    ours = [wrap(lambda w, enabled=enabled: fun(w, enabled)) for enabled in (True, False)]
    grads = jax.jit(lambda fs: [jax.grad(f)(W) for f in fs], static_argnums=0)
    assert_close(grads(tuple(ours)), grads((wrap(plain), wrap(stopped))))


NESTS = {
    "value used inside": lambda off, on: off(lambda x: x * 5 + on(lambda: x**2)()),
    "value computed between": lambda off, on: off(lambda x: (lambda a: on(lambda: a * x)())(3 * x)),
    "and used behind": lambda off, on: off(lambda x: 2 * on(lambda: x**2)()),
    "stopped inside again": lambda off, on: off(lambda x: on(lambda: x * off(lambda: x**2)())()),
    "opened last": lambda off, on: off(lambda x: on(lambda: off(on(lambda: x**2))() + x)()),
    "in a loop": lambda off, on: off(
        lambda x: sum((on(lambda i=i: i * x)() for i in (1, 2)), 0 * x)
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_nested_regions_follow_torch(nest, torch):
    def torch_region(enabled):
        return lambda fun: torch.set_grad_enabled(enabled)(fun)

    x = torch.tensor(3.0, requires_grad=True)
    value = nest(torch_region(False), torch_region(True))(x) + x
    value.backward()

    ours = nest(fg.set_grad_enabled(False), fg.set_grad_enabled(True))
    for fun in (ours, jax.jit(ours), lambda x: jax.vmap(ours)(x[None])[0]):
        total = lambda x, fun=fun: fun(x) + x
        assert_close(jax.value_and_grad(total)(jnp.float32(3.0)), (value.item(), x.grad.item()))


@pytest.mark.parametrize("body", ["scan", "while", "cond", "jit", "checkpoint"])
def test_an_enabled_region_is_found_in_nested_bodies(body):
    on = fg.set_grad_enabled(True)
    step = lambda x: on(lambda ten: ten + jnp.sin(x))(10 * x)

    run = {
        "scan": lambda x: lax.scan(lambda c, _: (step(c), None), x, length=1)[0],
        "while": lambda x: lax.while_loop(lambda c: c < 5.0, step, x),
        "cond": lambda x: lax.cond(x > 0, step, lambda x: x, x),
        "jit": jax.jit(step),
        "checkpoint": jax.checkpoint(step),
    }[body]
    value, tangent = jax.jvp(fg.no_grad(run), (0.5,), (1.0,))
    assert_close(value, 5 + jnp.sin(0.5))
    assert_close(tangent, jnp.cos(0.5))


ON = fg.set_grad_enabled(True)
HANDED_BACK = {
    "jit": lambda x: jax.jit(lambda x: (x, ON(lambda: x * 2)()))(x)[0],
    "checkpoint": lambda x: jax.checkpoint(lambda x: (x, ON(lambda: x * 2)()))(x)[0],
    "scan": lambda x: lax.scan(
        lambda c, _: (c[::-1], ON(lambda: c[0] * 2)()), (x, x + 1), length=2
    )[0][0],
    "beside": lambda x: (ON(lambda: x * 2)(), x)[1],
}


@pytest.mark.parametrize("body", HANDED_BACK.values(), ids=HANDED_BACK)
def test_an_argument_handed_back_is_stopped_beside_an_enabled_region(body):
    assert_close(jax.jvp(fg.no_grad(body), (3.0,), (1.0,)), (3.0, 0.0))
    # What comes out of the enabled region may pass by the same way.
    through = lambda x: body(ON(lambda: x**2)())
    assert_close(jax.jvp(fg.no_grad(through), (3.0,), (1.0,)), (9.0, 6.0))


# inference_mode


def predict(w, x):
    return jnp.sin(x @ w).sum()


def differentiated(w):
    return fg.inference_mode(predict)(w, X)  # HERE


MODES = {
    "grad": lambda f: jax.grad(f)(W),
    "jvp": lambda f: jax.jvp(f, (W,), (W,)),
    "linearize": lambda f: jax.linearize(f, W),
    "jacfwd": lambda f: jax.jacfwd(f)(W),
    "hessian": lambda f: jax.hessian(f)(W),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(W),
    "grad of jit": lambda f: jax.grad(jax.jit(f))(W),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(W[None]),
    "grad of compiled jit": lambda f: (jax.jit(f)(W), jax.grad(jax.jit(f))(W)),
}


@pytest.mark.parametrize(
    "mode, wrap",
    [(mode, "jit of vmap of jit") for mode in MODES]
    + [(mode, wrap) for mode in ("grad", "linearize") for wrap in WRAPS],
)
def test_differentiating_through_inference_mode_raises_with_the_line(mode, wrap):
    mode, wrap = MODES[mode], WRAPS[wrap]
    if wrap is WRAPS["grad"]:
        wrap = lambda f: lambda w: jax.grad(lambda b: b * f(w))(1.0)
    line = line_of(differentiated, "HERE")
    with pytest.raises(TypeError, match=rf"inference_mode: .*{__file__}:{line} \(differentiated\)"):
        mode(wrap(differentiated))


def test_the_function_is_named_where_a_jit_hides_the_call():
    def predict(w):  # HERE
        return w * 2

    line = line_of(test_the_function_is_named_where_a_jit_hides_the_call, "HERE")
    for wrap in (jax.jit, jax.checkpoint):
        hidden = wrap(fg.inference_mode(predict))
        hidden(1.0)  # not the line to tell
        with pytest.raises(TypeError, match=rf"in a call of predict, {__file__}:{line}\. Use"):
            jax.grad(lambda w, hidden=hidden: hidden(w) * w)(1.0)
    step = fg.inference_mode(lambda c, _: (c * 2, None))
    with pytest.raises(TypeError, match=f"in a call of <lambda>, {__file__}"):
        jax.grad(lambda w: lax.scan(step, w, length=2)[0])(1.0)


@wraps
def test_differentiating_something_else_works_beside_inference_mode(wrap):
    if wrap is WRAPS["checkpoint"] and remat3_enabled():
        pytest.skip("the flag makes JAX differentiate all that enters a checkpoint")

    def fun(w):
        drawn = fg.inference_mode(predict)(W + 1, X)
        return drawn * w.sum()

    known = lambda w: predict(W + 1, X) * w.sum()
    both = lambda f: (jax.grad(wrap(f))(W), jax.jvp(wrap(f), (W,), (W,)))
    assert_close(*jax.jit(lambda: (both(fun), both(known)))())


def test_a_loop_carries_other_derivatives_past_inference_mode():
    def fun(w, x):
        def step(c, x):
            a, b = c
            return (a * jnp.sin(w), fg.inference_mode(jnp.cos)(b) + x), None

        (a, b), _ = lax.scan(step, (1.0, 0.5), x)
        return a * b

    known = lambda w: jnp.sin(w) ** 3
    b = 0.5
    for x in X[:3, 0]:
        b = jnp.cos(b) + x
    assert_close(jax.grad(fun)(0.3, X[:3, 0]), jax.grad(known)(0.3) * b)
    with pytest.raises(TypeError, match="inference_mode"):
        jax.grad(fun, argnums=1)(0.3, X[:3, 0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_inference_mode_inside_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    fun = jax.shard_map(
        lambda w, x: lax.psum((w * fg.inference_mode(jnp.sin)(x)).sum(), "i"),
        mesh=mesh,
        in_specs=(P(), P("i")),
        out_specs=P(),
        check_vma=check_vma,
    )
    x = jnp.arange(4.0)
    assert_close(jax.jit(jax.grad(fun))(2.0, x), jnp.sin(x).sum())
    with pytest.raises(TypeError, match=f"inference_mode: .*{__file__}"):
        jax.eval_shape(jax.grad(fun, argnums=1), 2.0, x)


def test_inference_mode_inside_no_grad_and_after_stop_gradient_is_fine():
    def fun(w):
        a = fg.no_grad(lambda: fg.inference_mode(predict)(w, X))()
        b = fg.inference_mode(predict)(lax.stop_gradient(w), X)
        return (a + b) * w.sum()

    assert_close(jax.grad(fun)(W), jnp.full_like(W, 2 * predict(W, X)))
    # A gradient taken inside is the region's own business.
    inner = fg.inference_mode(jax.grad(predict))
    assert_close(inner(W, X), jax.grad(predict)(W, X))
    assert_close(jax.jit(inner)(W, X), jax.grad(predict)(W, X))


def test_inference_mode_costs_nothing_when_compiled():
    plain = jax.jit(lambda w: predict(w, X) * 2).lower(W).compile()
    region = jax.jit(lambda w: fg.inference_mode(predict)(w, X) * 2).lower(W).compile()
    assert region.cost_analysis() == plain.cost_analysis()
    sizes = lambda c: c.memory_analysis().temp_size_in_bytes
    assert sizes(region) == sizes(plain)


def test_inference_mode_takes_keys_integers_and_results_of_every_kind():
    @fg.inference_mode
    def sample(logits, key):
        return {"token": jax.random.categorical(key, logits), "logits": logits, "n": "x"}

    def loss(b, key):
        drawn = sample(W[0], key)
        assert drawn["n"] == "x"
        return b * W[drawn["token"]].sum()

    keys = jax.random.split(jax.random.key(0), 3)
    grad = jax.jit(jax.grad(loss))
    loop = [grad(1.0, key) for key in keys]
    assert_close(jax.vmap(grad, (None, 0))(1.0, keys), jnp.stack(loop))
