"""A function under a budget inside and around every transformation of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from funcgrad._compat import unoptimised
from funcgrad._remat._budget import checkpoint_under_budget


@jax.custom_vjp
def odd_tanh(x):
    return jnp.tanh(x)


odd_tanh.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (0.8 * g * (1 - jnp.tanh(x) ** 2),))


@jax.custom_jvp
def odd_sin(x):
    return jnp.sin(x)


@odd_sin.defjvp
def _(primals, tangents):
    return jnp.sin(primals[0]), 0.9 * jnp.cos(primals[0]) * tangents[0]


def unrolled(w, x):
    for i in range(2):
        x = jnp.tanh(x @ w[i])
        x = odd_sin(x - x.mean(-1, keepdims=True))
    return (jax.nn.softmax(x) * x).sum()


def scanned(w, x):
    def outer(x, w):
        x = jnp.tanh(x @ w)
        x, inner = lax.scan(lambda c, _: (odd_sin(c * 0.9), c.sum()), x, None, length=2)
        return x - x.mean(-1, keepdims=True), inner.sum() * jnp.exp(w).mean()

    x, sums = lax.scan(outer, x, w, reverse=True)
    return (jax.nn.softmax(x) * x).sum() + sums.var()


def with_rules(w, x):
    x, sums = lax.scan(lambda c, w: (odd_tanh(c @ w), c.sum()), x, w)
    branch = lax.cond(sums.sum() > 0, lambda x: jnp.sin(x), lambda x: x * x, x)
    kept = jax.checkpoint(lambda x: jnp.exp(jnp.sin(x)))(branch)
    return (odd_tanh(kept) * sums.sum()).sum()


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@jax.custom_jvp
def flat(x):
    return jnp.sin(x)


flat.defjvp(lambda x, t: (jnp.sin(x[0]), jnp.zeros_like(x[0])))


class Clipped(fg.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return jnp.clip(g, -0.1, 0.1)


W = jax.random.normal(jax.random.key(0), (2, 4, 4)) / 2
X = jax.random.normal(jax.random.key(1), (8, 4))
CASES = [(unrolled, 0.3), (scanned, 0.9), (with_rules, 0.5)]

each = pytest.mark.parametrize(("fun", "budget"), CASES)
# What costs is the compiler's own optimisation, which is not in question here.
quickly = functools.partial(jax.jit, compiler_options=unoptimised())
both = lambda fun: jax.grad(fun, argnums=(0, 1))


def same(transform, fun, budget, *args, rtol=1e-4):
    """``transform`` of the planned function at ``args`` equals that of the plain one."""
    planned = checkpoint_under_budget(fun, budget)
    got, want = quickly(lambda *args: [transform(f)(*args) for f in (planned, fun)])(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.abs(b).max() + 1e-6))


@each
def test_gradients_of_jit_checkpoint_and_scan_around_it(fun, budget):
    def around(fun):
        step = lambda c, x: (c + jax.checkpoint(jax.jit(fun))(W, x) * jnp.cos(c), None)
        return both(lambda w, x: fun(w, x) * lax.scan(step, 1.0, jnp.stack([x, x + 1]))[0])

    same(around, fun, budget, W, X)


@pytest.mark.parametrize(
    "rule",
    [
        clipped,
        jax.checkpoint(clipped),
        lambda w: lax.cond(w.sum() > -99, clipped, lambda w: w, w),
        checkpoint_under_budget(lambda w: clipped(jnp.sin(w)), 0.5),
        Clipped.apply,
        lambda w: fg.grad_hook(w, lambda g: jnp.clip(g, -0.1, 0.1)),
    ],
    ids=["custom_vjp", "checkpoint", "cond", "budget", "Function", "hook"],
)
def test_a_rule_that_clips_clips_in_each_iteration(rule):
    def fun(w, x):
        return lax.scan(lambda c, _: (jnp.tanh(c @ rule(w * 2)), None), x, None, length=3)[0].sum()

    same(both, fun, 0.7, W[0], X)


def test_what_never_runs_makes_no_nan():
    def fun(w):
        return lax.scan(lambda c, y: (c * jnp.log(w * 0).sum() + y, y), w[0], jnp.zeros(0))[0]

    np.testing.assert_array_equal(jax.grad(checkpoint_under_budget(fun, 0.0))(X[0]), [1, 0, 0, 0])


@pytest.mark.parametrize("still", [jnp.floor, flat], ids=["floor", "rule"])
def test_loops_over_what_has_no_derivative(still):
    def fun(x):
        double = lambda c, _: (2 * c, None)
        scale = lax.scan(double, still(x.sum()), None, length=2)[0]

        def body(c, _):
            return jnp.tanh(c) * scale, lax.scan(double, still(c.sum()), None, length=2)[0]

        c, sums = lax.scan(body, x, None, length=2)
        return (c * sums.sum()).sum()

    # Newer JAX keeps less of tanh: hardly more than what cannot be run again.
    same(jax.grad, fun, 0.6 if jax.__version_info__ < (0, 11) else 1.0, X)


def test_a_while_loop_has_its_forward_mode():
    def fun(x):
        step = lambda s: (s[0] + 1, jnp.tanh(s[1] * 1.5))
        return lax.while_loop(lambda s: s[0] < x.shape[0], step, (0, x))[1].sum()

    same(lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)), fun, 0.0, X[0])
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(checkpoint_under_budget(fun, 0.0))(X[0])


def test_no_tracer_outlives_its_trace():
    inner = checkpoint_under_budget(lambda c: jnp.tanh(jnp.sin(c) * jnp.exp(-c)), 0.5)
    planned = checkpoint_under_budget(
        lambda x: lax.scan(lambda c, _: (inner(c * x), None), x, None, length=2)[0].sum(), 0.9
    )
    with jax.checking_leaks():
        jax.jit(jax.grad(planned))(X[0])


def test_forward_mode_is_the_plain_one():
    def all_three(f):
        return lambda w, x: (
            jax.jvp(f, (w, x), (jnp.cos(w), x)),
            jax.jacfwd(f, 1)(w, x),
            jax.linearize(f, w, x)[1](w, x),
        )

    same(all_three, scanned, 0.9, W, X)


def test_forward_mode_of_a_reverse_rule_is_refused_by_jax():
    planned = checkpoint_under_budget(with_rules, 0.5)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda w, x: jax.jvp(planned, (w, x), (w, x)))(W, X)


@pytest.mark.parametrize(("fun", "budget"), CASES[1:])
def test_second_derivatives_backward_twice(fun, budget):
    same(lambda f: jax.grad(lambda x: jnp.sin(both(f)(W, x)[1]).sum()), fun, budget, X)


def test_second_derivatives_with_forward_mode():
    def all_three(f):
        f = lambda x, f=f: f(W, x)
        along = lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1]
        return lambda x: (
            jax.jvp(jax.grad(f), (x,), (jnp.cos(x),))[1],
            jax.grad(along)(x),
            jax.jvp(along, (x,), (x,))[1],
        )

    same(all_three, scanned, 0.9, X, rtol=1e-3)


@pytest.mark.parametrize(("fun", "budget"), CASES[1:])
def test_vmap_of_the_gradient_and_gradient_of_the_vmap(fun, budget):
    def both_ways(f):
        of_sum = lambda w, xs: jax.vmap(f, (None, 2))(w, jnp.moveaxis(xs, 0, 2)).sum()
        return lambda w, xs: (jax.vmap(both(f), (None, 0))(w, xs), both(of_sum)(w, xs))

    same(both_ways, fun, budget, W, jnp.stack([X, 2 * X, X + 1]))


def test_a_collective_inside_runs_under_a_mapped_axis():
    fun = lambda w, x: unrolled(w, x) * lax.psum(jnp.sin(x).sum(), "i")
    xs = jnp.stack([X, 2 * X])
    of_sum = lambda f: both(lambda w, xs: jax.vmap(f, (None, 0), axis_name="i")(w, xs).sum())
    same(of_sum, fun, 0.2, W, xs)


def test_what_is_closed_over_has_its_gradient():
    closed = lambda w: checkpoint_under_budget(lambda x: scanned(w, x), 0.9)(X)
    got = quickly(jax.grad(lambda w: jax.jit(closed)(w)))(W)
    np.testing.assert_allclose(got, quickly(jax.grad(scanned))(W, X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fun", "budget", "check_vma"), [(unrolled, 0.0, False), (scanned, 0.9, True)]
)
def test_shard_map_around_and_inside(fun, budget, check_vma):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharded(fun):
        return jax.shard_map(
            lambda w, x: fun(w, x)[None],
            mesh=mesh,
            in_specs=(P(), P("d")),
            out_specs=P("d"),
            check_vma=check_vma,
        )

    def around(fun):
        return both(lambda w, x: sharded(fun)(w, x).sum())

    if fun is scanned:
        same(both, lambda w, x: sharded(fun)(w, x).sum(), 0.8, W, X)
    else:
        same(around, fun, budget, W, X)
    if check_vma:

        def within(fun):
            spec = P(), P("d")
            return jax.shard_map(both(fun), mesh=mesh, in_specs=spec, out_specs=spec)

        same(within, fun, budget, W, X)


@pytest.mark.parametrize("flag", ["jax_remat3", "jax_custom_vjp3"])
def test_new_kinds_of_rules(flag):
    if not hasattr(jax.config, flag):
        pytest.skip(f"this jax has no {flag}")
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        same(both, with_rules, 0.5, W, X)
    finally:
        jax.config.update(flag, before)
