"""What Function is for: sharded layers, kernels, rounding, fixed points, callbacks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcgrad as fg


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_trees_close(got, expected, rtol=2e-5, atol=2e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


# Megatron's pair


class Copy(fg.Function):
    """Megatron's f: forward the value, backward the sum over the shards."""

    @staticmethod
    def forward(x, varying=False):
        return lax.pcast(x, "tp", to="varying") if varying else x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return lax.psum(g, "tp")


class Reduce(fg.Function):
    """Megatron's g: forward the sum, backward the gradient as it is."""

    @staticmethod
    def forward(x, varying=False):
        return lax.psum(x, "tp")

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.varying = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return lax.pcast(g, "tp", to="varying") if ctx.varying else g


def mlp(x, a, b):
    return jnp.sin(jnp.tanh(x @ a) @ b).sum()


@pytest.mark.parametrize("check_vma", [True, False])
def test_megatrons_pair_gives_the_gradients_of_the_whole_layer(check_vma):
    x, a, b = random(3), random(3, 8, seed=1), random(8, 2, seed=2)
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))

    def local(x, a, b):
        h = jnp.tanh(Copy.apply(x, varying=check_vma) @ a)
        return jnp.sin(Reduce.apply(h @ b, varying=check_vma)).sum()

    specs = (P(), P(None, "tp"), P("tp"))
    # Inside the map, as Megatron takes it: each device has its own loss, the same on all.
    inside = jax.shard_map(
        jax.value_and_grad(local, (0, 1, 2)),
        mesh=mesh,
        in_specs=specs,
        out_specs=(P(), specs),
        check_vma=check_vma,
    )
    expected = jax.value_and_grad(mlp, (0, 1, 2))(x, a, b)
    assert_trees_close(jax.jit(inside)(x, a, b), expected)
    if check_vma:
        loss = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
        assert_trees_close(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, a, b), expected)
        along = tuple(map(jnp.cos, (x, a, b)))
        tangent = lambda f: jax.jit(lambda: jax.jvp(f, (x, a, b), along)[1])()
        assert_trees_close(tangent(loss), tangent(mlp))
        hessians = [
            jax.jit(jax.grad(lambda x, f=f: jax.grad(f)(x, a, b).sum()))(x) for f in (loss, mlp)
        ]
        assert_trees_close(*hessians)


# Kernels


def like(*arrays):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def call(kernel, out, *args):
    return pl.pallas_call(kernel, out, interpret=True)(*args)


def rms_forward(x, w, y, r):
    r[...] = lax.rsqrt(jnp.mean(x[...] ** 2, axis=-1) + 1e-6)
    y[...] = x[...] * r[...][:, None] * w[...][None, :]


def rms_backward(x, w, r, g, dx, dw):
    h, gw = x[...] * r[...][:, None], g[...] * w[...][None, :]
    dx[...] = r[...][:, None] * (gw - h * jnp.mean(gw * h, axis=-1, keepdims=True))
    dw[...] = (g[...] * h).sum(0)


def rms_tangent(x, w, r, dx, dw, dy):
    h, dh = x[...] * r[...][:, None], dx[...] * r[...][:, None]
    turned = dh - h * jnp.mean(h * dh, axis=-1, keepdims=True)
    dy[...] = turned * w[...][None, :] + h * dw[...][None, :]


class RMSNorm(fg.Function):
    """A forward and a backward kernel."""

    @staticmethod
    def forward(ctx, x, w):
        y, r = call(rms_forward, like(x, x[:, 0]), x, w)
        ctx.save_for_backward(x, w, r)
        return y

    @staticmethod
    def backward(ctx, g):
        x, w, r = ctx.saved_tensors
        return tuple(call(rms_backward, like(x, w), x, w, r, g))


class RMSNormBothModes(RMSNorm):
    """A third kernel for forward mode: a kernel cannot be transposed."""

    @staticmethod
    def jvp(ctx, dx, dw):
        x, w, r = ctx.saved_tensors
        (dy,) = call(rms_tangent, like(x), x, w, r, dx, dw)
        return dy


def rms(x, w):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * w


def test_an_rms_norm_of_two_kernels_equals_plain_code():
    x, w = random(4, 8), random(8, seed=1)
    rows = jnp.stack([x, 2 * x])

    def everything(f):
        loss = lambda x, w: jnp.sin(f(x, w)).sum()
        each = jax.vmap(jax.grad(loss, 1), (0, None))(rows, w)
        again = jax.grad(jax.checkpoint(loss), (0, 1))(x, w)
        return jax.value_and_grad(loss, (0, 1))(x, w), again, each

    assert_trees_close(*(jax.jit(everything, static_argnums=0)(f) for f in (RMSNorm.apply, rms)))
    kept = jax.eval_shape(lambda x, w: jax.vjp(RMSNorm.apply, x, w)[1], x, w)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(kept)) == [(4,), (4, 8), (8,)]
    with pytest.raises(TypeError, match="RMSNorm: forward mode transposes.*got pallas_call"):
        jax.jvp(RMSNorm.apply, (x, w), (x, w))
    tangent = lambda f: jax.jvp(f, (x, w), (jnp.cos(x), jnp.cos(w)))
    both = (jax.jit(tangent, static_argnums=0)(f) for f in (RMSNormBothModes.apply, rms))
    assert_trees_close(*both)


def scores(q, k):
    return q @ k.T / np.sqrt(q.shape[-1])


def attention_forward(q, k, v, o, lse):
    s = scores(q[...], k[...])
    top = s.max(-1, keepdims=True)
    e = jnp.exp(s - top)
    total = e.sum(-1, keepdims=True)
    o[...] = (e / total) @ v[...]
    lse[...] = (top + jnp.log(total))[:, 0]


def attention_backward(q, k, v, o, lse, g, dq, dk, dv):
    p = jnp.exp(scores(q[...], k[...]) - lse[...][:, None])  # recomputed, never saved
    dv[...] = p.T @ g[...]
    ds = p * (g[...] @ v[...].T - (g[...] * o[...]).sum(-1, keepdims=True))
    ds = ds / np.sqrt(q.shape[-1])
    dq[...] = ds @ k[...]
    dk[...] = ds.T @ q[...]


class Attention(fg.Function):
    """Saves inputs, output and one number per row; backward computes the weights again."""

    @staticmethod
    def forward(ctx, q, k, v):
        o, lse = call(attention_forward, like(q, q[:, 0]), q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, g):
        q, k, v, o, lse = ctx.saved_tensors
        return tuple(call(attention_backward, like(q, k, v), q, k, v, o, lse, g))


@pytest.mark.torch
def test_an_attention_kernel_that_recomputes_equals_torch_and_saves_no_weights(torch):
    q, k, v = (random(2, 6, 4, seed=i) for i in range(3))
    tensors = [torch.tensor(np.asarray(x), requires_grad=True) for x in (q, k, v)]
    value = torch.nn.functional.scaled_dot_product_attention(*tensors)
    value.sin().sum().backward()
    heads = jax.vmap(Attention.apply)
    loss = lambda q, k, v: jnp.sin(heads(q, k, v)).sum()
    assert_trees_close(heads(q, k, v), value.detach().numpy())
    assert_trees_close(
        jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v), [t.grad.numpy() for t in tensors]
    )
    kept = jax.eval_shape(lambda *args: jax.vjp(heads, *args)[1], q, k, v)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(kept)) == [(2, 6), *[(2, 6, 4)] * 4]

    layer = jax.checkpoint(lambda h: h + heads(h, h, h))
    layers = lambda q: lax.scan(lambda h, _: (layer(h), None), q, None, length=2)[0].sum()
    got, expected = (jax.jit(jax.grad(f))(q) for f in (layers, lambda q: plain_layers(q).sum()))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def plain_layers(q):
    attend = jax.vmap(lambda q, k, v: jax.nn.softmax(scores(q, k)) @ v)
    for _ in range(2):
        q = q + attend(q, q, q)
    return q


# Rounding, reversal


class Round(fg.Function):
    @staticmethod
    def forward(ctx, x):
        return jnp.round(x)

    @staticmethod
    def backward(ctx, g):
        return g


class Reverse(fg.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x

    @staticmethod
    def backward(ctx, g):
        return -ctx.strength * g, None


def test_straight_through_and_reversal_hold_in_both_modes():
    x = jnp.array([0.2, 0.7, 1.6])
    np.testing.assert_array_equal(Round.apply(x), [0, 1, 2])
    for mode in (jax.jacrev, jax.jacfwd):
        both = lambda x: (Round.apply(x), Reverse.apply(x, 2.0))
        rounding, reversal = jax.jit(mode(both))(x)
        np.testing.assert_array_equal(rounding, np.eye(3))
        np.testing.assert_array_equal(reversal, -2 * np.eye(3))
    quantised = lambda w: ((Round.apply(4 * w) / 4 - x) ** 2).sum()
    np.testing.assert_allclose(jax.grad(quantised)(x), 2 * (jnp.round(4 * x) / 4 - x), rtol=1e-6)


# A fixed point


class FixedPoint(fg.Function):
    """z = step(params, z): backward solves with the linearised step instead of unrolling."""

    @staticmethod
    def forward(step, params, start):
        return lax.fori_loop(0, 60, lambda _, z: step(params, z), start)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.step, params, _ = inputs
        ctx.save_for_backward(params, output)

    @staticmethod
    def backward(ctx, g):
        params, z = ctx.saved_tensors
        _, pull = jax.vjp(ctx.step, params, z)
        jacobian = jax.jacobian(ctx.step, argnums=1)(params, z)
        u = jnp.linalg.solve(jnp.eye(len(z)) - jacobian.T, g)
        return None, pull(u)[0], None


def step(params, z):
    return jnp.tanh(params["w"] @ z + params["b"])


def test_the_implicit_derivative_of_a_fixed_point_equals_unrolling(x64):
    w = np.random.default_rng(0).normal(size=(3, 3)) / 4
    params, start = {"w": jnp.asarray(w), "b": jnp.arange(3.0) / 3}, jnp.zeros(3)

    def unrolled(params):
        return lax.scan(lambda z, _: (step(params, z), None), start, None, length=60)[0]

    solved = lambda params: FixedPoint.apply(step, params, start)
    loss = lambda f: lambda params: (f(params) ** 3).sum()
    close = functools.partial(assert_trees_close, rtol=1e-8, atol=1e-10)
    along = jax.tree.map(jnp.cos, params)

    def orders(f):
        gradient = jax.grad(loss(f))
        tangent = lambda g: jax.jvp(g, (params,), (along,))[1]
        twice = jax.grad(lambda p: jnp.sin(gradient(p)["w"]).sum())(params)
        return gradient(params), tangent(f), tangent(gradient), twice

    close(*(jax.jit(functools.partial(orders, f))() for f in (solved, unrolled)))
    kept = jax.eval_shape(lambda params: jax.vjp(solved, params)[1], params)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(kept)) == [(3,), (3,), (3, 3)]


# A callback


class Sylvester(fg.Function):
    """Solves a x + x b = c in SciPy; so is the equation of the gradient."""

    @staticmethod
    def forward(a, b, c):
        solve = lambda a, b, c: scipy.linalg.solve_sylvester(a, b, c).astype(c.dtype)
        like = jax.ShapeDtypeStruct(c.shape, c.dtype)
        return jax.pure_callback(solve, like, a, b, c, vmap_method="sequential")

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2], output)

    @staticmethod
    def backward(ctx, g):
        a, b, x = ctx.saved_tensors
        u = Sylvester.apply(a.T, b.T, g)
        return -u @ x.T, -x.T @ u, u


def by_kronecker(a, b, c):
    n, m = c.shape
    system = jnp.kron(a, jnp.eye(m)) + jnp.kron(jnp.eye(n), b.T)
    return jnp.linalg.solve(system, c.reshape(-1)).reshape(n, m)


def test_a_scipy_callback_is_differentiated_by_hand_at_every_order(x64):
    a, b, c = (
        jnp.asarray(np.random.default_rng(i).normal(size=s) + 3 * np.eye(*s))
        for i, s in enumerate([(3, 3), (2, 2), (3, 2)])
    )
    close = functools.partial(assert_trees_close, rtol=1e-8, atol=1e-10)
    rows = jnp.stack([c, 2 * c])

    def everything(f):
        loss = lambda *args: jnp.sin(f(*args)).sum()
        second = jax.grad(lambda a: jnp.cos(jax.grad(loss)(a, b, c)).sum())(a)
        each = jax.vmap(jax.grad(loss, 2), (None, None, 0))(a, b, rows)
        return f(a, b, c), jax.grad(loss, (0, 1, 2))(a, b, c), second, each

    close(*(jax.jit(functools.partial(everything, f))() for f in (Sylvester.apply, by_kronecker)))
    # The rule uses itself on the gradient: a callback inside cannot be shown to be linear.
    with pytest.raises(TypeError, match="Sylvester: forward mode.*got pure_callback"):
        jax.jvp(lambda c: Sylvester.apply(a, b, c), (c,), (c,))
