"""A function under a budget inside and around every transformation of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

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


W = jax.random.normal(jax.random.key(0), (2, 4, 4)) / 2
X = jax.random.normal(jax.random.key(1), (8, 4))
CASES = [(unrolled, 0.0), (unrolled, 0.5), (scanned, 0.9), (with_rules, 0.5)]
SMOOTH = CASES[:1] + CASES[2:3]

each = pytest.mark.parametrize(("fun", "budget"), CASES)
smooth = pytest.mark.parametrize(("fun", "budget"), SMOOTH)
both = lambda fun: jax.grad(fun, argnums=(0, 1))


def same(transform, fun, budget, *args, rtol=1e-4):
    """``transform`` of the planned function at ``args`` equals that of the plain one."""
    got = jax.jit(transform(checkpoint_under_budget(fun, budget)))(*args)
    want = jax.jit(transform(fun))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.abs(b).max() + 1e-6))


@each
def test_gradients_of_jit_checkpoint_and_scan_around_it(fun, budget):
    def around(fun):
        step = lambda c, x: (c + jax.checkpoint(jax.jit(fun))(W, x) * jnp.cos(c), None)
        return both(lambda w, x: fun(w, x) * lax.scan(step, 1.0, jnp.stack([x, x + 1]))[0])

    same(around, fun, budget, W, X)


@smooth
def test_forward_mode_is_the_plain_one(fun, budget):
    def all_three(f):
        return lambda w, x: (
            jax.jvp(f, (w, x), (jnp.cos(w), x)),
            jax.jacfwd(f, 1)(w, x),
            jax.linearize(f, w, x)[1](w, x),
        )

    same(all_three, fun, budget, W, X)


def test_forward_mode_of_a_reverse_rule_is_refused_by_jax():
    planned = checkpoint_under_budget(with_rules, 0.5)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda w, x: jax.jvp(planned, (w, x), (w, x)))(W, X)


@pytest.mark.parametrize(("fun", "budget"), [CASES[0], CASES[2], CASES[3]])
def test_second_derivatives_backward_twice(fun, budget):
    same(lambda f: jax.grad(lambda x: jnp.sin(both(f)(W, x)[1]).sum()), fun, budget, X)


@pytest.mark.parametrize(("fun", "budget"), [CASES[0], CASES[2]])
def test_second_derivatives_with_forward_mode(fun, budget):
    def all_three(f):
        f = lambda x, f=f: f(W, x)
        along = lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1]
        return lambda x: (
            jax.jvp(jax.grad(f), (x,), (jnp.cos(x),))[1],
            jax.grad(along)(x),
            jax.jvp(along, (x,), (x,))[1],
        )

    same(all_three, fun, budget, X, rtol=1e-3)


@each
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


@pytest.mark.parametrize("fun", [unrolled, scanned])
def test_what_is_closed_over_has_its_gradient(fun):
    around = lambda f: jax.grad(lambda w: jax.jit(f)(w))
    closed = lambda budget: lambda w: checkpoint_under_budget(lambda x: fun(w, x), budget)(X)
    got = jax.jit(around(closed(0.9)))(W)
    np.testing.assert_allclose(got, jax.grad(fun)(W, X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("fun", "budget"), [CASES[0], CASES[2]])
@pytest.mark.parametrize("check_vma", [True, False])
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
