"""Function: the rule given is the rule used, in every mode, at any order, under every transform."""

import functools
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from funcgrad import _jaxpr
from funcgrad._compat import primitives
from funcgrad._function import _trace
from funcgrad._jaxpr import FUNCTION


class Lying(fg.Function):
    """x², with ten times its gradient: losing the rule shows."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 10 * 2 * x * g


class Exp(fg.Function):
    """Saved by its output, with the derivative threefold: a saved output has the rule too."""

    @staticmethod
    def forward(x):
        return jnp.exp(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return 3 * g * y


class Tanh(fg.Function):
    """tanh(x) w, saving what is neither input nor output."""

    @staticmethod
    def forward(ctx, x, w):
        m = checkpoint_name(jnp.tanh(x), "m")
        ctx.save_for_backward(m, x, w)
        return m @ w

    @staticmethod
    def backward(ctx, g):
        m, _, w = ctx.saved_tensors
        return (g @ w.T) * (1 - m * m), m.T @ g


class Times(fg.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, g * x


def function(forward, backward=None, **methods):
    """A class of one of these tests."""
    methods = {"forward": forward, "backward": backward, **methods}
    return type("F", (fg.Function,), {k: staticmethod(v) for k, v in methods.items() if v})


@jax.custom_vjp
def through_vjp(x):
    return Lying.apply(x)


through_vjp.defvjp(lambda x: jax.vjp(Lying.apply, x), lambda pull, g: pull(g))


@jax.custom_jvp
def through_jvp(x):
    return Lying.apply(x)


through_jvp.defjvp(lambda primals, tangents: jax.jvp(Lying.apply, primals, tangents))

POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "all": jax.checkpoint_policies.everything_saveable,
    "name": jax.checkpoint_policies.save_only_these_names("m"),
    "but": jax.checkpoint_policies.save_anything_except_these_names("m"),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["m"],
        names_which_can_be_offloaded=[],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
WRAPS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "remat_all": functools.partial(jax.checkpoint, policy=POLICIES["all"]),
    "remat_dots": functools.partial(jax.checkpoint, policy=POLICIES["dots"]),
    "jit_remat_jit": lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "remat_scan": lambda f: WRAPS["scan"](jax.checkpoint(f)),
    "fori": lambda f: lambda x: lax.fori_loop(0, 1, lambda _, c: f(c), x),
    "cond": lambda f: lambda x: lax.cond(x.sum() > -99, f, lambda x: x, x),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x]))[1],
    "rewrite": lambda f: _jaxpr.rewrite(f, lambda eqn: None),
    "custom_jvp": lambda f: through_jvp,
    "no_vmap": lambda f: lambda x: lax.map(f, jnp.stack([x]))[0],
}
MODES = {
    "grad": jax.grad,
    "jacfwd": jax.jacfwd,
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.ones_like(x)),
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x]))[0],
}


def test_a_rule_that_lies_is_used_in_every_mode_and_at_the_second_order():
    orders = (jax.jacfwd, jax.jacrev)

    def everything(wrap, x):
        fun = WRAPS[wrap](Lying.apply)
        first = [derivative(fun)(x) for derivative in MODES.values()]
        return [fun(x), *first, *(a(b(fun))(x) for a in orders for b in orders)]

    x = jnp.float32(3.0)
    found = jax.jit(lambda x: {wrap: everything(wrap, x) for wrap in WRAPS})(x)
    expected = [9.0] + [60.0] * len(MODES) + [20.0] * 4
    for wrap, got in (found | {"nothing traced": everything("plain", x)}).items():
        np.testing.assert_array_equal(got, expected, err_msg=wrap)


def test_a_rule_inside_custom_vjp_is_used_where_custom_vjp_allows_it():
    for mode in ("grad", "vmap"):
        assert MODES[mode](through_vjp)(3.0) == 60.0
    assert jax.grad(jax.grad(through_vjp))(3.0) == 20.0


@pytest.mark.parametrize("flag", ["jax_remat3", "jax_custom_vjp3"])
def test_the_new_implementations_of_remat_and_custom_vjp_use_the_rule(flag):
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        inside = jax.custom_vjp(lambda x: checkpoint_name(jnp.sin(x), "m"))
        inside.defvjp(lambda x: (inside(x), x), lambda x, g: (7 * g,))
        mixed = function(lambda ctx, x: inside(x), lambda ctx, g: 10 * inside(g))
        funs = [WRAPS[w](Lying.apply) for w in ("plain", "jit", "remat_all", "remat_scan")]
        first = [MODES[mode](f) for mode in ("grad", "jacfwd", "linearize", "vmap") for f in funs]
        second = [jax.grad(jax.grad(f)) for f in funs]
        got = jax.jit(lambda x: [f(x) for f in first + second])(3.0)
        np.testing.assert_array_equal(got, [60.0] * 16 + [20.0] * 4)
        for wrap in ("plain", "remat_scan"):
            grad = jax.grad(WRAPS[wrap](mixed.apply))(3.0)
            np.testing.assert_allclose(grad, 10 * np.sin(1.0), rtol=1e-6)
    finally:
        jax.config.update(flag, before)


def test_the_third_derivative_in_all_eight_orders_is_that_of_the_rule():
    modes = (jax.jacfwd, jax.jacrev)
    all_eight = [a(b(c(Exp.apply))) for a in modes for b in modes for c in modes]
    got = jax.jit(lambda x: [f(x) for f in all_eight])(1.0)
    np.testing.assert_allclose(got, [27 * np.e] * 8, rtol=1e-6)


def test_a_saved_intermediate_has_the_derivative_of_the_code_that_made_it():
    x = jax.random.normal(jax.random.key(0), (4, 3))
    w = jax.random.normal(jax.random.key(1), (3, 3))
    plain = jax.custom_vjp(lambda x, w: jnp.tanh(x) @ w)

    def forward(x, w):
        m = checkpoint_name(jnp.tanh(x), "m")
        return m @ w, (m, x, w)

    def backward(kept, g):
        m, _, w = kept
        return (g @ w.T) * (1 - m * m), m.T @ g

    plain.defvjp(forward, backward)

    def loss(f, policy, x, w):
        block = lambda x, w: jnp.sin(f(f(x, w), w))
        if policy:
            block = jax.checkpoint(block, policy=POLICIES[policy])
        return block(x, w).sum()

    def orders(f, policy):
        first = jax.grad(functools.partial(loss, f, policy))
        second = jax.grad(lambda w: (first(x, w) ** 2).sum())(w)
        return jax.grad(functools.partial(loss, f, policy), 1)(x, w), second

    expected = jax.jit(lambda: orders(plain, None))()
    for policy, ours in jax.jit(
        lambda: {p: orders(Tanh.apply, p) for p in ("", *POLICIES)}
    )().items():
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-6, err_msg=policy)
        ours, theirs = (
            residuals(functools.partial(loss, f, policy), x, w) for f in (Tanh.apply, plain)
        )
        assert sorted(ours) == sorted(theirs), policy


def test_gradients_of_shared_arguments_add_up_over_vmap():
    xs, w = jnp.array([1.0, 2.0, 3.0]), 2.0
    assert jax.grad(lambda w: jax.vmap(Times.apply, (0, None))(xs, w).sum())(w) == 6.0
    np.testing.assert_array_equal(
        jax.vmap(jax.grad(Times.apply, argnums=1), (0, None))(xs, w), [1, 2, 3]
    )
    tangent = jax.jvp(lambda w: jax.vmap(Times.apply, (0, None))(xs, w).sum(), (w,), (1.0,))[1]
    assert tangent == 6.0
    hessian = jax.hessian(lambda w: (jax.vmap(Times.apply, (0, None))(xs, w) ** 2).sum())(w)
    assert hessian == 28.0
    assert jax.vmap(Times.apply, (None, None), out_axes=None, axis_size=4)(3.0, w) == 6.0


def test_a_linear_function_is_transposed_by_its_backward():
    scale = function(lambda ctx, x: 2.0 * x, lambda ctx, g: 20.0 * g)
    assert jax.linear_transpose(scale.apply, 1.0)(1.0) == (20.0,)
    nested = function(lambda ctx, x: x, lambda ctx, g: scale.apply(g))
    assert jax.grad(nested.apply)(1.0) == 2.0
    assert jax.jvp(nested.apply, (1.0,), (1.0,))[1] == 20.0
    with pytest.raises(TypeError, match="transposed where it is linear"):
        jax.linear_transpose(Lying.apply, 1.0)(1.0)


# What ctx does


def residuals(fun, *args):
    pull = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    return [leaf.shape for leaf in jax.tree.leaves(pull)]


def test_the_residuals_are_what_was_saved_and_nothing_else():
    save = lambda *saved: function(
        lambda ctx, x, y: (ctx.save_for_backward(*(f(x, y) for f in saved)), jnp.sin(x).sum() + y)[
            1
        ],
        lambda ctx, g: (jnp.ones((4, 3)) * g, g * len(ctx.saved_tensors)),
    )
    x, y = jnp.ones((4, 3)), jnp.float32(1.0)
    assert residuals(save().apply, x, y) == []
    assert residuals(save(lambda x, y: x).apply, x, y) == [(4, 3)]
    assert residuals(save(lambda x, y: x[0], lambda x, y: None).apply, x, y) == [(3,)]
    tree = save(lambda x, y: {"a": x[:2], "b": [y, None]})
    assert sorted(residuals(tree.apply, x, y)) == [(), (2, 3)]
    assert jax.grad(tree.apply, argnums=1)(x, y) == 1.0


def test_needs_input_grad_is_static_and_saves_only_what_is_asked_for():
    seen = []

    def forward(ctx, x, w):
        seen.append(ctx.needs_input_grad)
        x_needed, w_needed = ctx.needs_input_grad
        ctx.save_for_backward(x if w_needed else None, w if x_needed else None)
        return x * w

    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return None if w is None else g * w, None if x is None else g * x

    f = function(forward, backward).apply
    x, w = jnp.full(3, 2.0), jnp.full(3, 5.0)
    assert residuals(f, x, w) == [(3,), (3,)]
    assert residuals(lambda x: f(x, w), x) == [(3,)]
    assert seen == [(True, True), (True, False)]
    np.testing.assert_array_equal(jax.jvp(lambda w: f(x, w), (w,), (x,))[1], x * x)

    # A first derivative that asks for one input leaves the other's rule as it was.
    loss = lambda x, w: (f(x, w) ** 2).sum()
    for first in (jax.value_and_grad(loss), lambda x, w: jax.linearize(lambda x: loss(x, w), x)):
        value = lambda w, first=first: first(x, w)[0]
        np.testing.assert_array_equal(jax.grad(value)(w), 2 * x * x * w)
    mixed = jax.grad(lambda w: jax.grad(loss)(x, w).sum())(w)
    np.testing.assert_array_equal(mixed, 4 * x * w)
    rows = jax.vmap(jax.grad(lambda x, w: f(x, w).sum()), (0, None))(jnp.stack([x, x]), w)
    np.testing.assert_array_equal(rows, jnp.stack([w, w]))
    shared = jax.grad(lambda w: jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), w).sum())(w)
    np.testing.assert_array_equal(shared, 3 * x)


def test_an_unused_output_has_a_gradient_of_zeros_or_none():
    seen = []

    def make(materialize):
        def forward(ctx, x):
            ctx.set_materialize_grads(materialize)
            return x * 2, {"a": x * 3}

        def backward(ctx, g, h):
            seen.append((g is None, h["a"] is None))
            return (0 if g is None else 2 * g) + (0 if h["a"] is None else 3 * h["a"])

        return function(forward, backward).apply

    def check(materialize, expected):
        seen.clear()
        f = make(materialize)
        assert jax.grad(lambda x: f(x)[0])(1.0) == 2.0
        assert jax.grad(lambda x: f(x)[1]["a"])(1.0) == 3.0
        rows = jax.vmap(jax.grad(lambda x: f(x)[1]["a"]))(jnp.ones(3))
        np.testing.assert_array_equal(rows, [3, 3, 3])
        assert jax.jvp(f, (1.0,), (1.0,))[1] == (2.0, {"a": 3.0})
        assert set(seen) == expected

    check(True, {(False, False)})
    check(False, {(False, False), (True, False), (False, True)})


def test_what_is_marked_non_differentiable_has_no_gradient_in_any_mode():
    seen = []

    def forward(ctx, x):
        order = jnp.argsort(x)
        y, doubled = x[order], 2 * x
        ctx.mark_non_differentiable(order, doubled)
        ctx.save_for_backward(order)
        return y, order, doubled, 5, "text"

    def backward(ctx, g, g_order, g_doubled, number, text):
        (order,) = ctx.saved_tensors
        seen.append((g_order.dtype, g_doubled.shape, number, text))
        return jnp.zeros(3).at[order].add(g) + g_doubled

    f, x = function(forward, backward).apply, jnp.array([3.0, 1.0, 2.0])
    assert f(x)[3:] == (5, "text")
    weights = jnp.arange(3.0)
    loss = lambda x: (f(x)[0] * weights + 100 * f(x)[2]).sum()
    np.testing.assert_array_equal(jax.grad(loss)(x), [2, 0, 1])
    np.testing.assert_array_equal(jax.jacfwd(loss)(x), [2, 0, 1])
    assert set(seen) == {(jnp.dtype("int32"), (3,), None, None)}
    with pytest.raises(ValueError, match="takes outputs of forward; got a .*Tracer"):
        function(lambda ctx, x: ctx.mark_non_differentiable(x + 1)).apply(x)


def test_once_differentiable_refuses_the_second_derivative_in_every_order():
    once = function(Lying.forward, fg.once_differentiable(lambda ctx, g: Lying.backward(ctx, g)))
    also = type(
        "F",
        (fg.Function,),
        {"forward": staticmethod(Lying.forward)}
        | {"backward": fg.once_differentiable(staticmethod(lambda ctx, g: Lying.backward(ctx, g)))},
    )
    held = lambda w, x: function(ONE, fg.once_differentiable(lambda ctx, g: w * g)).apply(x)
    with pytest.raises(TypeError, match="F: backward is marked once_differentiable"):
        jax.grad(jax.grad(held, 1))(3.0, 1.0)
    for cls in (once, also):
        for mode, derivative in MODES.items():
            assert derivative(jax.checkpoint(cls.apply))(3.0) == 60.0, mode
        for outer in (jax.jacfwd, jax.jacrev):
            for inner in (jax.jacfwd, jax.jacrev):
                with pytest.raises(TypeError, match="F: backward is marked once_differentiable"):
                    outer(inner(cls.apply))(3.0)


def test_a_jvp_is_forward_mode_and_alone_also_reverse_mode():
    def forward(ctx, x, n):
        ctx.save_for_backward(x, n)
        ctx.save_for_forward(jnp.cos(x))
        return jnp.sin(x) * n

    def jvp(ctx, t, _):
        return 7 * t * ctx.saved_tensors[0]

    def backward(ctx, g):
        x, n = ctx.saved_tensors
        return g * jnp.cos(x) * n, None

    alone = function(forward, jvp=jvp).apply
    both = function(forward, backward, jvp=jvp).apply
    cos, sin = np.cos(1.0), np.sin(1.0)
    np.testing.assert_allclose(jax.jacfwd(both)(1.0, 2), 7 * cos, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(both)(1.0, 2), 2 * cos, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(jax.grad(both))(1.0, 2), -2 * sin, rtol=1e-6)
    np.testing.assert_allclose(jax.jacfwd(jax.jacfwd(both))(1.0, 2), -7 * sin, rtol=1e-6)
    for first in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(first(alone)(1.0, 2), 7 * cos, rtol=1e-6)
        for second in (jax.grad, jax.jacfwd):
            np.testing.assert_allclose(second(first(alone))(1.0, 2), -7 * sin, rtol=1e-6)
    rows = jax.vmap(jax.grad(alone), (0, None))(jnp.ones(2), jnp.int32(2))
    np.testing.assert_allclose(rows, [7 * cos] * 2, rtol=1e-6)
    bad = function(forward, jvp=lambda ctx, t, _: (t, t)).apply
    with pytest.raises(ValueError, match="F.jvp: the tangent of output 0 has its tree"):
        jax.jvp(bad, (1.0, 2.0), (1.0, 1.0))


def test_reverse_mode_says_so_when_a_jvp_is_not_linear():
    save = lambda ctx, x: (ctx.save_for_backward(x), x * x)[1]
    for jvp, words in (
        (lambda ctx, t: t * t, "got mul, a product of it with itself"),
        (lambda ctx, t: t + ctx.saved_tensors[0], "got add, which joins it with a constant"),
    ):
        fun = function(save, jvp=jvp).apply
        np.testing.assert_array_equal(jax.jvp(fun, (3.0,), (2.0,))[1], [4.0, 5.0]["add" in words])
        with pytest.raises(TypeError, match=f"F: reverse mode transposes jvp.*{words}"):
            jax.grad(fun)(3.0)


def test_what_a_jvp_does_beside_its_tangents_is_done():
    total = lambda x: lax.psum(x, "i")
    own, seen = function(lambda ctx, x: total(x), jvp=lambda ctx, t: total(t)).apply, []
    for mode in (lambda f, x: jax.jvp(f, (x,), (x,))[1], lambda f, x: jax.grad(f)(x)):
        run = lambda f, mode=mode: jax.vmap(lambda r: r + mode(f, jnp.float32(2)), axis_name="i")
        np.testing.assert_array_equal(run(own)(jnp.zeros(3)), run(total)(jnp.zeros(3)))
    loud = function(
        lambda ctx, x: x, jvp=lambda ctx, t: (jax.debug.callback(lambda: seen.append(1)), t)[1]
    )
    jax.jit(lambda x: jax.jvp(loud.apply, (x,), (x,))[0])(1.0)
    jax.effects_barrier()
    assert seen == [1]


def test_a_vmap_of_ones_own_is_called_and_its_axes_are_kept():
    seen = []

    class Scale(fg.Function):
        @staticmethod
        def forward(x, k):
            return x * k, {"twice": 2 * x}

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.k = inputs[1]

        @staticmethod
        def backward(ctx, g, h):
            return g * ctx.k + 2 * h["twice"], None

        @staticmethod
        def vmap(info, in_dims, x, k):
            seen.append((info.batch_size, in_dims, x.shape))
            y, rest = Scale.apply(jnp.moveaxis(x, in_dims[0], 0) + 100.0, k)
            return (y.T, rest), (1, {"twice": 0})

    x = jnp.arange(6.0).reshape(2, 3)
    y, rest = jax.vmap(lambda x: Scale.apply(x, 2.0), in_axes=1)(x)
    np.testing.assert_array_equal(y, 2 * (x.T + 100))
    np.testing.assert_array_equal(rest["twice"], 2 * (x.T + 100))
    assert seen == [(3, (0, None), (3, 2))]
    loss = lambda x: Scale.apply(x, 2.0)[0].sum()
    np.testing.assert_array_equal(
        jax.grad(lambda x: jax.vmap(loss)(x).sum())(x), jnp.full((2, 3), 2)
    )
    np.testing.assert_array_equal(jax.vmap(jax.grad(loss))(x), jnp.full((2, 3), 2))
    assert jax.vmap(jax.value_and_grad(loss))(x)[0][0] == 2 * 303
    with pytest.raises(ValueError, match="F.vmap: returns"):
        cls = function(lambda x: x, setup_context=lambda *_: None, vmap=lambda info, dims, x: x)
        jax.vmap(cls.apply)(jnp.ones(3))
    with pytest.raises(TypeError, match="goes with setup_context"):
        function(lambda ctx, x: x, vmap=lambda *_: None).apply(1.0)
    with pytest.raises(TypeError, match="got generate_vmap_rule too"):
        cls = function(lambda x: x, setup_context=lambda *_: None, vmap=lambda *_: None)
        cls.generate_vmap_rule = True
        cls.apply(1.0)


def test_collectives_over_a_mapped_axis_keep_the_rule():
    total = function(lambda ctx, x: lax.psum(x, "i"), lambda ctx, g: g)
    mapped = jax.vmap(total.apply, axis_name="i")
    np.testing.assert_array_equal(mapped(jnp.arange(3.0)), [3, 3, 3])
    np.testing.assert_array_equal(jax.grad(lambda x: mapped(x).sum())(jnp.arange(3.0)), [1, 1, 1])
    each = jax.vmap(jax.grad(total.apply), axis_name="i")
    np.testing.assert_array_equal(each(jnp.arange(3.0)), [1, 1, 1])
    constant = jax.vmap(lambda x: total.apply(jnp.float32(2.0)) + x, axis_name="i")
    np.testing.assert_array_equal(constant(jnp.zeros(3)), [6, 6, 6])


# Arguments


class Every(fg.Function):
    @staticmethod
    def forward(ctx, params, *rest, key, flag=True, mode="a", fn=jnp.sin):
        ctx.save_for_backward(params, None, rest)
        ctx.fn, ctx.shapes = fn, {"w": params["w"].shape}
        noise = jax.random.uniform(key) if flag else 0.0
        return {"out": fn(params["w"]) * rest[0] + noise, "mode": mode}

    @staticmethod
    def backward(ctx, g):
        params, nothing, rest = ctx.saved_tensors
        assert nothing is None and g["mode"] is None and ctx.shapes["w"] == params["w"].shape
        _, pull = jax.vjp(ctx.fn, params["w"])
        return {"w": pull(g["out"] * rest[0])[0], "n": None}, g["out"] * ctx.fn(params["w"]), None


@pytest.mark.parametrize("jit", [False, True])
def test_arguments_of_every_kind_arrive_as_they_are(jit):
    x, w, key = jnp.full(3, 2.0), jnp.full(3, 5.0), jax.random.key(0)

    def loss(params, rest):
        out = Every.apply(params, rest, 3, key=key, flag=False, fn=jnp.cos)
        assert out["mode"] == "a"
        return out["out"].sum()

    grad = jax.grad(loss, argnums=(0, 1), allow_int=True)
    grads = (jax.jit(grad) if jit else grad)({"w": x, "n": jnp.arange(3)}, w)
    np.testing.assert_allclose(grads[0]["w"], -np.sin(2.0) * w, rtol=1e-6)
    np.testing.assert_allclose(grads[1], np.cos(x), rtol=1e-6)
    assert grads[0]["n"].dtype == jax.dtypes.float0
    again = Every.apply({"w": x, "n": 3}, w, 3, key=key)["out"]
    np.testing.assert_allclose(again, jnp.sin(x) * w + jax.random.uniform(key))
    with pytest.raises(TypeError, match=r"those of forward after ctx; got a call with missing"):
        Every.apply({"w": x})


def test_static_arguments_that_differ_make_different_programs():
    add = function(lambda ctx, x, k: x + jnp.copysign(1.0, k), lambda ctx, g: (g, None)).apply
    assert [float(add(jnp.zeros(()), k)) for k in (0.0, -0.0, 0.0)] == [1.0, -1.0, 1.0]
    kind = function(lambda ctx, x, k: x + {bool: 1, int: 2, float: 3}[type(k)]).apply
    assert [float(kind(jnp.zeros(()), k)) for k in (True, 1, 1.0)] == [1.0, 2.0, 3.0]
    listed = function(lambda ctx, x, k: x + len(k["unhashable"])).apply
    assert [float(listed(jnp.zeros(()), {"unhashable": {1, 2}})) for _ in range(2)] == [2.0, 2.0]
    assert add(1.0, 1.0) == 2.0  # numbers alone: nothing is traced, and nothing differentiated
    with pytest.raises(TypeError, match="got a mutable reference"):
        add(jax.new_ref(jnp.ones(())), 1.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_dtypes_and_weak_types_are_those_of_plain_code(dtype):
    x = jnp.ones(3, dtype)
    assert Times.apply(x, x).dtype == dtype
    value, pull = jax.vjp(Times.apply, x, jnp.asarray(2, dtype) * x)
    assert {leaf.dtype.name for leaf in (value, *pull(value))} == {dtype}
    assert jax.typeof(jax.jit(Times.apply)(1.0, 2.0)).weak_type


def test_complex_gradients_follow_jax(x64):
    z = jnp.asarray(1 + 2j)
    square = function(
        lambda ctx, z: (ctx.save_for_backward(z), z * z)[1],
        lambda ctx, g: 2 * g * ctx.saved_tensors[0],
    )
    plain = lambda f: jax.grad(lambda z: jnp.real(f(z)) + 3 * jnp.imag(f(z)))(z)
    np.testing.assert_allclose(plain(square.apply), plain(lambda z: z * z))
    ours, theirs = (jax.jvp(f, (z,), (1 - 1j,))[1] for f in (square.apply, lambda z: z * z))
    np.testing.assert_allclose(ours, theirs)


def test_empty_arrays_donation_and_no_arguments():
    empty = jnp.zeros((0, 3))
    assert jax.grad(lambda x: Times.apply(x, x).sum())(empty).shape == (0, 3)
    assert jax.jacfwd(lambda x: Times.apply(x, x))(jnp.zeros(0)).shape == (0, 0)
    donated = jax.jit(lambda x: Times.apply(x, x), donate_argnums=0)
    np.testing.assert_array_equal(donated(jnp.full(3, 2.0)), [4, 4, 4])
    nothing = function(lambda ctx: jnp.ones(2), lambda ctx, g: ())
    assert nothing.apply().shape == (2,)


def test_effects_inside_happen_in_order(capfd):
    def forward(ctx, x):
        jax.debug.print("forward {}", x, ordered=True)
        return x

    def backward(ctx, g):
        jax.debug.print("backward {}", g)
        return 3 * g

    loud = function(forward, backward).apply
    assert jax.jit(jax.grad(loud))(1.0) == 3.0
    jax.jit(lambda x: lax.scan(lambda c, _: (loud(c), None), x, None, length=2))(2.0)
    loud(jnp.float32(4.0))
    jax.effects_barrier()
    said = capfd.readouterr().out.split("\n")
    assert said[:-1] == ["forward 1.0", "backward 1.0", "forward 2.0", "forward 2.0", "forward 4.0"]


# Closing over values


def closes_over(w, forward=True, backward=True):
    return function(
        lambda ctx, x: x * w if forward else 2.0 * x,
        lambda ctx, g: g * w * w if backward else 2.0 * g,
    ).apply


@pytest.mark.parametrize("wrap", ["plain", "jit", "remat_scan"])
def test_a_derivative_with_respect_to_what_forward_closes_over_is_refused(wrap):
    fun = lambda w, x: WRAPS[wrap](closes_over(w))(x)
    np.testing.assert_allclose(jax.grad(fun, argnums=1)(3.0, 2.0), 9.0)
    np.testing.assert_allclose(jax.jacfwd(fun, argnums=1)(3.0, 2.0), 9.0)
    rows = jax.vmap(jax.grad(fun, argnums=1), (0, None))(jnp.arange(3.0), 2.0)
    np.testing.assert_allclose(rows, [0, 1, 4])
    for derivative in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(TypeError, match="float32.*, which forward closes over. Pass it to"):
            derivative(fun)(3.0, 2.0)
    stopped = lambda w, x: fun(lax.stop_gradient(w), x)
    assert jax.grad(stopped)(3.0, 2.0) == 0.0


@pytest.mark.parametrize("wrap", ["plain", "jit", "remat_scan"])
def test_what_backward_closes_over_is_differentiated_at_the_second_order(wrap):
    fun = lambda w, x: WRAPS[wrap](closes_over(w, forward=False))(x)
    for outer in (jax.jacfwd, jax.jacrev):
        for inner in (jax.jacfwd, jax.jacrev):
            np.testing.assert_allclose(outer(inner(fun, argnums=1))(5.0, 3.0), 10.0)
    assert jax.grad(fun)(5.0, 3.0) == 0.0


def test_no_tracer_outlives_its_transformation():
    x, w = jnp.full(3, 2.0), jnp.full(3, 5.0)
    with jax.checking_leaks():
        loss = lambda x, w: jnp.sin(Times.apply(x, Tanh.apply(x[None], jnp.outer(w, w))[0])).sum()
        jax.jit(jax.grad(loss))(x, w)
        jax.jit(jax.vmap(jax.hessian(loss), (0, None)))(jnp.stack([x, x]), w)
        jax.jit(lambda x: lax.scan(lambda c, _: (jax.grad(loss)(c, w), None), x, None, length=2))(x)
        jax.jit(jax.vmap(jax.grad(lambda w, x: closes_over(w)(x), 1), (0, None)))(x, 3.0)


def test_a_value_that_a_name_is_bound_to_and_nobody_uses_is_let_go():
    held = None
    f = function(lambda ctx, x: x if held is None else 2 * x, lambda ctx, g: 2 * g).apply

    def run(x, y, *, at):
        nonlocal held
        held = at(y)
        try:
            return f(x)
        finally:
            held = None

    for at in (lambda y: y, lambda y: {"deep": [y]}, lambda y: lambda: y):
        with jax.checking_leaks():
            jax.jit(functools.partial(run, at=at))(1.0, 2.0)


def test_a_class_that_is_let_go_is_let_go():
    def make():
        cls = function(
            lambda ctx, x, n: ((x * n), setattr(ctx, "n", n))[0],
            lambda ctx, g: (g if ctx.n else cls.apply(g, 1), None),
        )
        assert jax.grad(lambda x: cls.apply(x, 2))(1.0) == 1.0
        return weakref.ref(cls)

    gone = make()
    gc.collect()
    assert gone() is None


def test_the_values_that_old_rules_close_over_are_bounded(monkeypatch):
    monkeypatch.setattr(_trace, "_MOST", 6)
    gone = []
    f = function(lambda ctx, x: x * held[0]).apply
    for i in range(6):
        held = jnp.full(2**18, float(i))  # one MiB, and one for the rule
        gone.append(weakref.ref(held))
        assert f(jnp.ones(())) == i
    gc.collect()
    assert sum(x() is not None for x in gone) <= 3


# How often the methods run


def test_methods_run_once_for_each_kind_of_call():
    runs = {"forward": 0, "backward": 0}

    def forward(ctx, x, k):
        runs["forward"] += 1
        return k * x

    def backward(ctx, g):
        runs["backward"] += 1
        return g, None

    f = function(forward, backward).apply
    x = jnp.ones(3)
    for _ in range(2):
        f(x, 2.0)
        jax.grad(lambda x: (f(x, 2.0) ** 3).sum())(x)
        jax.jit(jax.hessian(lambda x: (f(f(x, 2.0), 2.0) ** 3).sum()))(x)
        jax.vmap(jax.grad(lambda x: f(x, 2.0)))(x[None][0])
    assert runs == {"forward": 2, "backward": 2}  # shapes (3,) and ()
    f(x, 3.0)
    with jax.enable_x64(True):
        f(x, 3.0)
    assert runs == {"forward": 4, "backward": 4}


def test_a_backward_may_use_its_own_class():
    runs = []

    class Cos(fg.Function):
        @staticmethod
        def forward(ctx, x, turns):
            ctx.turns = turns
            ctx.save_for_backward(x)
            return jnp.cos(x + turns * jnp.pi / 2)

        @staticmethod
        def backward(ctx, g):
            runs.append(ctx.turns)
            (x,) = ctx.saved_tensors
            return g * Cos.apply(x, (ctx.turns + 1) % 4), None

    f = lambda x: Cos.apply(x, 0)
    for fun, expected in ((f, np.cos), (jax.grad(f), lambda x: -np.sin(x))):
        np.testing.assert_allclose(fun(0.5), expected(0.5), rtol=1e-6)
    np.testing.assert_allclose(jax.jacfwd(jax.grad(jax.grad(f)))(0.5), np.sin(0.5), rtol=1e-5)
    assert len(runs) < 16  # it ends: the inner one is traced when it is differentiated


def test_a_name_bound_to_something_else_is_seen():
    scale = 2.0
    f = function(lambda ctx, x: scale * x, lambda ctx, g: scale * g).apply
    assert f(jnp.ones(())) == 2.0
    scale = 3.0
    assert f(jnp.ones(())) == 3.0
    assert jax.grad(f)(1.0) == 3.0
    by = jnp.float32(2.0)
    call = function(lambda ctx, x, fn: fn(x), lambda ctx, g: (g, None)).apply
    fn = lambda x: by * x
    assert call(jnp.ones(()), fn) == 2.0
    by = jnp.float32(5.0)
    assert call(jnp.ones(()), fn) == 5.0

    defaults = lambda x, *, k=1.0: k * x
    nested = function(lambda ctx, x: jax.vmap(lambda r: r * SCALE)(x)).apply
    keyword = function(lambda ctx, x: defaults(x)).apply
    assert nested(jnp.ones(1)) == 2.0 and keyword(jnp.ones(())) == 1.0
    globals()["SCALE"], defaults = 7.0, lambda x, *, k=5.0: k * x
    assert nested(jnp.ones(1)) == 7.0 and keyword(jnp.ones(())) == 5.0
    globals()["SCALE"] = 2.0


SCALE = 2.0


def test_an_attribute_of_the_class_set_to_something_else_is_seen():
    class Scale(fg.Function):
        k = 2.0

        @classmethod
        def forward(cls, ctx, x):
            return cls.k * SCALE * x

        @classmethod
        def backward(cls, ctx, g):
            return cls.k * g

    class Other(Scale):
        k = 5.0

        @staticmethod
        def backward(ctx, g):
            return 11.0 * g

    run = lambda cls: tuple(map(float, jax.value_and_grad(cls.apply)(1.0)))
    assert (run(Scale), run(Other)) == ((4.0, 2.0), (10.0, 11.0))
    Scale.k = 3.0
    assert (run(Scale), run(Other)) == ((6.0, 3.0), (10.0, 11.0))
    Scale.backward = staticmethod(lambda ctx, g: 7.0 * g)
    Scale.forward = functools.partial(lambda k, ctx, x: k * x, 9.0)
    assert (run(Scale), run(Other)) == ((9.0, 7.0), (9.0, 11.0))


def test_rules_are_traced_on_many_threads_at_once():
    # A second thread must not take the first one's tracing for its own.
    started, got = threading.Barrier(2, timeout=60), []

    def make(w):
        def forward(ctx, x):
            started.wait()
            return x * 1.0

        return function(forward, lambda ctx, g: w * g)

    slow = make(3.0)

    def run():
        got.append(float(jax.jit(jax.grad(slow.apply))(jnp.float32(2.0))))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [3.0, 3.0] and not vars(_trace._running).get("requests")


# Errors


ONE = lambda ctx, x: x * 1.0
BAD = {
    "count": (lambda ctx, g: (g, g), ONE, (1.0,), r"F.backward: one gradient .* got 2 for 1: x\."),
    "few": (lambda ctx, g: g, lambda ctx, x, y: x * y, (1.0, 2.0), "got 1 for 2: x, y"),
    "shape": (lambda ctx, g: g, lambda ctx, x: x.sum(), (np.ones(3, np.float32),),
              r"the gradient of x has its shape and dtype, float32\[3\]; got float32\[\]"),
    "dtype": (lambda ctx, g: g.astype(jnp.bfloat16), ONE, (1.0,), r"float32\[\]; got bfloat16\[\]"),
    "leaf for dict": (lambda ctx, g: g, lambda ctx, p: p["w"] * p["b"], ({"w": 1.0, "b": 2.0},),
                      r"the gradient of p has its tree; got PyTreeDef\(\*\)"),
    "missing leaf": (lambda ctx, g: {"w": g}, lambda ctx, p: p["w"] * p["b"],
                     ({"w": 1.0, "b": 2.0},), "the gradient of p has its tree"),
    "leaf in dict": (lambda ctx, g: {"w": g, "b": g[None]}, lambda ctx, p: p["w"] * p["b"],
                     ({"w": 1.0, "b": 2.0},), r"the gradient of p\['b'\] has its shape"),
    "dict for leaf": (lambda ctx, g: {"w": g}, ONE, (1.0,), "the gradient of x has its tree"),
    "integer": (lambda ctx, g: (g, g), lambda ctx, x, n: x * n, (1.0, np.int32(2)),
                r"not floating has no gradient; got one for n, which is int32\[\]. Return None"),
    "static": (lambda ctx, g: (g, g), lambda ctx, x, mode: x, (1.0, "mode"),
               "a static input has no gradient; got one for mode, which is str. Return None"),
    "no array": (lambda ctx, g: "text", ONE, (1.0,), "is an array; got str"),
    "float0": (lambda ctx, g: np.zeros((), jax.dtypes.float0), ONE, (1.0,), "got float0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_gradient_that_does_not_fit_is_refused_by_name(case):
    backward, forward, args, words = BAD[case]
    fun = function(forward, backward).apply
    fun(*args)  # the value needs no gradient
    for mode in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.jit(jax.jacfwd(f))):
        with pytest.raises((ValueError, TypeError), match=words):
            mode(lambda x: fun(x, *args[1:]).sum())(jax.tree.map(jnp.float32, args[0]))


def test_a_gradient_of_none_is_zero_for_an_input_or_a_part_of_it():
    none = function(
        lambda ctx, p, x: p["a"] * p["b"][0] * x, lambda ctx, g: ({"a": g, "b": None}, None)
    )
    grads = jax.grad(none.apply, argnums=(0, 1))({"a": 1.0, "b": [2.0, 3.0]}, 4.0)
    assert grads == ({"a": 1.0, "b": [0.0, 0.0]}, 0.0)
    surplus = function(lambda ctx, x: x, lambda ctx, g: (g, None))
    assert jax.grad(surplus.apply)(1.0) == 1.0
    assert jax.grad(lambda x: Times.apply(x, 3.0))(2.0) == 3.0  # the number's is dropped
    number = function(lambda ctx, x: x, lambda ctx, g: 3.0)
    assert jax.grad(number.apply)(1.0) == 3.0


def test_ctx_refuses_arrays_as_attributes_and_what_cannot_be_saved():
    x = jnp.ones(3)
    for value in (lambda x: x, lambda x: {"deep": [x]}, lambda x: jnp.ones(2)):
        with pytest.raises(TypeError, match="got an array for ctx.x. Call ctx.save_for_backward"):
            function(lambda ctx, x, value=value: setattr(ctx, "x", value(x))).apply(x)
    with pytest.raises(TypeError, match="takes arrays.*got str at .1.. Set it as an attribute"):
        function(lambda ctx, x: ctx.save_for_backward(x, "text")).apply(x)
    with pytest.raises(TypeError, match="never changed in place; got ctx.mark_dirty"):
        function(lambda ctx, x: ctx.mark_dirty(x)).apply(x)
    with pytest.raises(AttributeError, match="ctx.saved_tensors is part of ctx"):
        function(lambda ctx, x: setattr(ctx, "saved_tensors", 1)).apply(x)
    with pytest.raises(RuntimeError, match="in backward and jvp; got a read in forward"):
        function(lambda ctx, x: ctx.saved_tensors).apply(x)
    with pytest.raises(NotImplementedError, match="a gradient needs a static backward"):
        jax.grad(function(lambda ctx, x: x).apply)(1.0)
    with pytest.raises(NotImplementedError, match="Function.apply: the class has a static forward"):
        fg.Function.apply(1.0)


NOT_LINEAR = {
    "clip": (lambda g, x: jnp.clip(g, -1, 1), "got max, which is not linear, or has no transpose"),
    "affine": (lambda g, x: g + 1, "got add, which joins it with a constant"),
    "constant": (lambda g, x: jnp.ones_like(g), "got a result that does not depend on it"),
    "square": (lambda g, x: g * g, "got mul, a product of it with itself"),
    "sign": (lambda g, x: jnp.where(g > 0, g, 0.0), "got gt"),
    "normalise": (lambda g, x: x / g, "got div, which divides by it"),
    "loop": (lambda g, x: lax.scan(lambda c, _: (c + x, None), g, None, length=3)[0], "got add"),
    "branch": (lambda g, x: lax.cond(g > 0, lambda g: g, lambda g: 2 * g, g), "got gt"),
    "branches": (lambda g, x: lax.cond(x > 0, lambda g: g, lambda g: x, g), "got cond, which"),
    "to integers": (lambda g, x: g.astype(int) * x, "got convert_element_type, not floating"),
    "relu": (lambda g, x: jax.nn.relu(g), "got max"),
    "stopped": (lambda g, x: lax.stop_gradient(g), "got stop_gradient"),
    "callback": (lambda g, x: jax.pure_callback(lambda g: g, g, g, vmap_method="sequential"),
                 "got pure_callback"),
    "while": (lambda g, x: lax.while_loop(lambda c: c < 3, lambda c: 2 * c, g), "got while"),
    "stack": (lambda g, x: jnp.stack([g, jnp.ones(())]).sum(), "got stack, which joins it with"),
    "subtract": (lambda g, x: jnp.ones(2).at[0].subtract(g).sum(), "got scatter-sub, which joins"),
    "barrier": (lambda g, x: lax.optimization_barrier((g, x))[1], "result that does not depend"),
    "solve": (lambda g, x: lax.custom_linear_solve(lambda v: g * v, x, lambda _, b: b / g,
                                                   lambda _, b: b / g),
              "got custom_linear_solve, which is another function of it"),
    "inner jvp": (lambda g, x: jax.jvp(Times.apply, (g, x), (g, x))[1],
                  f"got {FUNCTION}_derivative, which is another function of it"),
}  # fmt: skip


def with_backward(backward):
    return function(
        lambda ctx, x: (ctx.save_for_backward(x), jnp.sin(x))[1],
        lambda ctx, g: backward(g, *ctx.saved_tensors),
    ).apply


def test_forward_mode_says_so_when_backward_is_not_linear():
    for case, (backward, words) in NOT_LINEAR.items():
        fun = with_backward(backward)
        for run in (jax.jacfwd(fun), jax.jit(jax.jacfwd(fun)).lower, jax.hessian(fun)):
            with pytest.raises(
                TypeError, match=f"F: forward mode transposes backward.*{words}"
            ) as error:
                run(0.5)
            found = __file__ in str(error.value)
            assert found or case in ("constant", "callback", "barrier"), case


def test_reverse_mode_runs_a_backward_that_is_not_linear():
    def both(x):
        for backward, _ in NOT_LINEAR.values():
            fun = with_backward(backward)
            for f in (fun, jax.checkpoint(jax.jit(fun))):
                yield jax.grad(lambda x, f=f: 5 * f(x))(x), backward(jnp.full_like(x, 5.0), x)

    for i, pair in enumerate(jax.jit(lambda x: list(both(x)))(0.5)):
        np.testing.assert_allclose(*pair, err_msg=[*NOT_LINEAR][i // 2])


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2,), (2,), "VALID")


LINEAR = {
    "buffer": lambda g, x: jnp.zeros(3).at[1].add(2 * g)[1],
    "masked": lambda g, x: jnp.where(x > 0, g, 0.0),
    "scanned": lambda g, x: lax.scan(lambda c, _: (c * x, c), g, None, length=3)[1].sum(),
    "cond": lambda g, x: lax.cond(x > 0, lambda g: 2 * g, lambda g: jnp.zeros_like(g), g),
    "cast": lambda g, x: g.astype(jnp.float16).astype(jnp.float32) * x,
    "solve": lambda g, x: jnp.linalg.solve(jnp.diag(jnp.arange(1.0, 4.0)), g * jnp.ones(3)).sum(),
    "padded": lambda g, x: jnp.pad(jnp.stack([g, x * g]), 1).sum(),
    "cumulated": lambda g, x: jnp.cumsum(jnp.stack([g, 0 * g, g]))[-1] + 0.0,
    "einsum": lambda g, x: jnp.einsum("i,i->", jnp.full(2, g), jnp.full(2, x)),
    "own vjp": lambda g, x: jax.vjp(jnp.tanh, x)[1](g)[0],
    "unneeded": lambda g, x: (g * g, 2 * g)[1],
    "stacked": lambda g, x: jnp.stack([g, jnp.zeros(()), x * g]).sum(),
    # With an operand beside g, JAX 0.12 cannot transpose it.
    "barrier": lambda g, x: x * lax.optimization_barrier(2 * g),
    "linear solve": lambda g, x: lax.custom_linear_solve(
        lambda v: x * v, g, lambda _, b: b / x, lambda _, b: b / x
    ),
    "inner jvp": lambda g, x: jax.jvp(Lying.apply, (x,), (g,))[1],
    "max pool": lambda g, x: jax.vjp(pool, jnp.stack([x, -x]))[1](g[None])[0].sum(),
}


def test_forward_mode_transposes_a_backward_that_is_linear():
    def each(case, x):
        fun = with_backward(LINEAR[case])
        first = jax.jacfwd(fun)(x), LINEAR[case](jnp.ones_like(x), x)
        return *first, jax.jacfwd(jax.jacfwd(fun))(x), jax.grad(jax.grad(fun))(x)

    found = jax.jit(lambda x: {case: each(case, x) for case in LINEAR})(0.5)
    for case, (got, expected, *second) in found.items():
        np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=case)
        np.testing.assert_allclose(*second, rtol=1e-5, err_msg=case)


# What it costs


def rms(x, w):
    return lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rms_backward(x, w, r, g):
    h = x * r
    gw = g * w
    return r * (gw - h * jnp.mean(gw * h, axis=-1, keepdims=True)), (g * h).sum(0)


RULES = {
    "inputs": (
        lambda x, w: x @ w,
        lambda x, w, y: (x, w),
        lambda x, w, g: (g @ w.T, x.T @ g),
    ),
    "output": (
        lambda x, w: jax.nn.softmax(x @ w),
        lambda x, w, y: (x, w, y),
        lambda x, w, y, g: (
            (y * (g - (g * y).sum(-1, keepdims=True))) @ w.T,
            x.T @ (y * (g - (g * y).sum(-1, keepdims=True))),
        ),
    ),
    "intermediate": (
        lambda x, w: x * rms(x, w) * w[0],
        lambda x, w, y: (x, w, rms(x, w)),
        lambda x, w, r, g: (
            rms_backward(x, w[0], r, g)[0],
            jnp.zeros_like(w).at[0].add(rms_backward(x, w[0], r, g)[1]),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_rule_costs_what_the_same_custom_vjp_does(name):
    forward, saved, backward = RULES[name]

    def run(ctx, x, w):
        y = forward(x, w)
        ctx.save_for_backward(*saved(x, w, y))
        return y

    ours = function(run, lambda ctx, g: backward(*ctx.saved_tensors, g)).apply
    theirs = jax.custom_vjp(forward)

    def run_theirs(x, w):
        y = forward(x, w)
        return y, saved(x, w, y)

    theirs.defvjp(run_theirs, lambda kept, g: backward(*kept, g))
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))

    def layers(f):
        return lambda x, w: lax.scan(lambda h, _: (jnp.cos(f(h, w)), None), x, None, length=3)[0]

    def measured(f):
        loss = lambda x, w: layers(f)(x, w).sum()
        kept = jax.eval_shape(lambda x, w: jax.vjp(loss, x, w)[1], x, w)
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, w).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        return compiled(x, w), nbytes, compiled.cost_analysis()["flops"], temporary

    (got, *cost, temporary), (expected, *their_cost, their_temporary) = map(
        measured, (ours, theirs)
    )
    assert cost == their_cost
    assert temporary <= their_temporary
    assert cost[0] > 0 and cost[1] > 0
    jax.tree.map(np.testing.assert_array_equal, got, expected)


# Beside the rest of the library


def dense_loss(dense):
    return lambda params, x, t: ((jnp.tanh(dense(x, params["w"])) @ params["v"] - t) ** 2).sum()


class Dense(fg.Function):
    """x w, with the weight's gradient threefold."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.T, 3 * jnp.outer(x, g)


def test_per_sample_gradients_are_those_of_the_rule():
    params = {
        "w": jax.random.normal(jax.random.key(0), (3, 4)),
        "v": jax.random.normal(jax.random.key(1), (4, 2)),
    }
    x, t = jax.random.normal(jax.random.key(2), (5, 3)), jnp.ones((5, 2))
    loss = dense_loss(Dense.apply)
    rows = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(params, x, t)
    norms = jnp.sqrt(sum((g.reshape(5, -1) ** 2).sum(1) for g in jax.tree.leaves(rows)))
    samples = jax.jit(lambda *args: fg.per_sample(loss)(*args).norms())(params, x, t)
    np.testing.assert_allclose(samples, norms, rtol=1e-5)


def test_a_batched_loss_with_a_rule_is_split_into_samples():
    square = function(
        lambda ctx, x: (ctx.save_for_backward(x), x * x)[1],
        lambda ctx, g: 20 * ctx.saved_tensors[0] * g,
    ).apply
    params = {"w": jnp.arange(6.0).reshape(3, 2) / 7}
    x = jnp.arange(12.0).reshape(4, 3) / 11
    batched = lambda params, x: square(x @ params["w"]).sum(1)
    rows = jax.jit(jax.vmap(jax.grad(lambda p, x: batched(p, x[None])[0]), (None, 0)))(params, x)
    norms = jnp.sqrt((rows["w"].reshape(4, -1) ** 2).sum(1))
    samples = jax.jit(lambda *args: fg.per_sample(fg.per_sample_loss(batched))(*args).norms())
    np.testing.assert_allclose(samples(params, x), norms, rtol=1e-5)


def test_the_core_sees_forward_and_keeps_the_rule_whole():
    def replaced(eqn):
        return (lambda x: [jnp.cos(x)]) if eqn.primitive is primitives.sin_p else None

    sine = function(lambda ctx, x: jnp.sin(x), lambda ctx, g: 10 * g).apply
    traced = _jaxpr.trace(lambda x: sine(jnp.sin(x)), 1.0)
    visits = {visit.path: visit for visit in _jaxpr.walk(traced.jaxpr)}
    inside = next(visit for path, visit in visits.items() if path)
    assert inside.eqn.primitive is primitives.sin_p
    assert __file__ in str(inside.line)
    assert _jaxpr.follow(traced.jaxpr.jaxpr, [True]) == [True]
    fun = _jaxpr.rewrite(lambda x: sine(jnp.sin(x)), replaced)
    np.testing.assert_allclose(fun(1.0), np.sin(np.cos(1.0)), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(fun)(1.0), -10 * np.sin(1.0), rtol=1e-6)
    two = function(lambda ctx, x, y: (x, y), lambda ctx, g, h: (g, h)).apply
    marks = _jaxpr.follow(_jaxpr.trace(two, 1.0, 2.0).jaxpr.jaxpr, [True, False])
    assert marks == [True, False]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shardings_pass_through(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    rows = NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0), rows)
        value, grad = jax.jit(jax.value_and_grad(lambda x: Lying.apply(x).sum()))(x)
        assert value == (x**2).sum() and grad.sharding.is_equivalent_to(rows, 1)
        np.testing.assert_array_equal(grad, 20 * x)
        np.testing.assert_array_equal(jax.jit(jax.vmap(jax.grad(Lying.apply)))(x), 20 * x)
        tangent = jax.jit(lambda x: jax.jvp(Lying.apply, (x,), (x,))[1])(x)
        np.testing.assert_array_equal(tangent, 20 * x * x)


def test_a_gradient_that_differs_between_devices_is_refused():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    local = lambda w, x: lax.psum(Times.apply(w, x[0]), "i")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    with pytest.raises(ValueError, match="same on all devices of 'i'.*Add it up with jax.lax.psum"):
        jax.eval_shape(jax.grad(mapped), 2.0, jnp.arange(4.0))
    # Unless nobody asks for it.
    grads = jax.jit(jax.grad(mapped, 1))(2.0, jnp.arange(4.0))
    np.testing.assert_array_equal(grads, [2, 2, 2, 2])
