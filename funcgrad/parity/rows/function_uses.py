"""Rows of section 3: an ``fg.Function`` mapped, in forward mode, and put to use."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import funcgrad as fg
from funcgrad.parity._table import agree, error_of, row
from funcgrad.parity.rows.function_class import scaled_tanh


def _mapped(base: Any, moveaxis: Any, seen: list[Any]) -> Any:
    class Scale(base):
        @staticmethod
        def forward(x, k):
            return x * k

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.k = inputs[1]

        @staticmethod
        def backward(ctx, g):
            return g * ctx.k, None

        @staticmethod
        def vmap(info, in_dims, x, k):
            seen.append(info.batch_size)
            return Scale.apply(moveaxis(x, in_dims[0], 0) + 100.0, k), 0

    return Scale.apply


@row(
    "function.vmap_static",
    concept="a vmap rule of one's own",
    torch="def vmap(info, in_dims, x)",
    here="def vmap(info, in_dims, x)",
    needs=("Function",),
    note="Honoured where it is given, automatic where not.",
)
def vmap_static():
    """A rule that adds 100, so that it shows, over the second axis, and its gradient."""
    import torch

    data, theirs, here = np.arange(6.0).reshape(2, 3), [], []
    fun = _mapped(torch.autograd.Function, torch.movedim, theirs)
    x = torch.tensor(data, requires_grad=True)
    value = torch.vmap(lambda x: fun(x, 2.0), in_dims=1)(x)
    value.sum().backward()
    ours = _mapped(fg.Function, jnp.moveaxis, here)
    mapped = jax.vmap(lambda x: ours(x, 2.0), in_axes=1)

    return agree(
        value=(value, mapped(data)),
        grad=(x.grad, jax.grad(lambda x: mapped(x).sum())(jnp.asarray(data))),
        size=(theirs[0], here[0], 3),
    )


@row(
    "function.arguments",
    concept="keyword, tree, integer and closed-over arguments",
    torch="F.apply(x, flag)",
    here="F.apply(x, flag=True)",
    needs=("Function",),
    note="A tree has a tree of gradients; what forward closes over cannot be differentiated "
    "silently: torch gives nothing for it, here it is refused.",
)
def arguments():
    """A dict, an integer array, a flag and a function; and a closed-over factor."""
    import torch

    class Torch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, b, index, fn, negate):
            ctx.save_for_backward(w, index)
            ctx.sign = -1 if negate else 1
            return ctx.sign * fn(w)[index] + b

        @staticmethod
        def backward(ctx, g):
            w, index = ctx.saved_tensors
            slope = torch.zeros_like(w).index_add(0, index, g) * w.cos()
            return ctx.sign * slope, g, None, None, None

    class Here(fg.Function):
        @staticmethod
        def forward(ctx, params, index, fn, *, negate=False):
            ctx.save_for_backward(params["w"], index)
            ctx.sign = -1 if negate else 1
            return ctx.sign * fn(params["w"])[index] + params["b"]

        @staticmethod
        def backward(ctx, g):
            w, index = ctx.saved_tensors
            slope = jnp.zeros_like(w).at[index].add(g) * jnp.cos(w)
            return {"w": ctx.sign * slope, "b": g}, None, None

    w = torch.tensor([1.0, 2.0], requires_grad=True)
    b = torch.zeros(3, requires_grad=True)
    Torch.apply(w, b, torch.tensor([0, 0, 1]), torch.sin, True).sum().backward()
    loss = lambda p: Here.apply(p, jnp.array([0, 0, 1]), jnp.sin, negate=True).sum()
    grads = jax.jit(jax.grad(loss))({"w": jnp.array([1.0, 2.0]), "b": jnp.zeros(3)})

    def closed(factor, x):
        class Closed(fg.Function):
            @staticmethod
            def forward(ctx, x):
                return factor * x

            @staticmethod
            def backward(ctx, g):
                return factor * g

        return Closed.apply(x)

    words = "which forward closes over"
    return agree(
        w=(w.grad, grads["w"]),
        b=(b.grad, grads["b"]),
        closed=(jax.grad(closed, 1)(3.0, 2.0), 3),
        said={"closed over": error_of(lambda: jax.grad(closed)(3.0, 2.0), TypeError, words)},
    )


@row(
    "function.forward_mode",
    concept="forward mode of a custom Function",
    torch="def jvp(ctx, t)",
    here="jax.jvp(F.apply, (x,), (t,))",
    needs=("Function",),
    note="Derived by transposing backward; a backward that is not linear says so.",
)
def forward_mode():
    """torch needs a jvp of its own; here backward is enough, unless it clips."""
    import torch

    class Tanh(scaled_tanh(torch.autograd.Function, torch)):
        @staticmethod
        def jvp(ctx, t, _):
            return 10 * ctx.scale * t * (1 - ctx.y**2)

        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale, ctx.y = scale, torch.tanh(x)
            return scale * ctx.y

    class Clip(fg.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, g):
            return jnp.clip(g, -1, 1)

    point, along = [0.5, -1.0], [1.0, 2.0]
    ad = torch.autograd.forward_ad
    with ad.dual_level():
        dual = ad.make_dual(torch.tensor(point), torch.tensor(along))
        theirs = ad.unpack_dual(Tanh.apply(dual, 3.0)).tangent
    tanh = scaled_tanh(fg.Function, jnp).apply
    here = jax.jvp(lambda x: tanh(x, 3.0), (jnp.array(point),), (jnp.array(along),))[1]
    clip = lambda: jax.jvp(Clip.apply, (1.0,), (1.0,))

    return agree(
        tangent=(theirs, here),
        said={"clip": error_of(clip, TypeError, "must be linear in the cotangent; got max")},
    )


@row(
    "function.megatron_pair",
    concept="Megatron's f and g",
    torch="class _Copy(torch.autograd.Function)",
    here="class Copy(fg.Function); lax.psum(g, 'tp')",
    needs=("Function",),
    note="Forward copy with backward sum, and the other way round; under shard_map or vmap.",
)
def megatron_pair():
    """A layer split over two shards: the gradients of the whole layer in torch."""
    import torch

    class Copy(fg.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, g):
            return lax.psum(g, "tp")

    class Reduce(fg.Function):
        @staticmethod
        def forward(ctx, x):
            return lax.psum(x, "tp")

        @staticmethod
        def backward(ctx, g):
            return g

    rng = np.random.default_rng(0)
    data = rng.normal(size=3), rng.normal(size=(3, 4)), rng.normal(size=(4, 2))
    x, a, b = (torch.tensor(v, requires_grad=True) for v in data)
    (torch.tanh(x @ a) @ b).sin().sum().backward()

    def local(x, a, b):
        return jnp.sin(Reduce.apply(jnp.tanh(Copy.apply(x) @ a) @ b)).sum()

    x_, a_, b_ = map(jnp.asarray, data)
    shards = x_, jnp.stack(jnp.split(a_, 2, axis=1)), jnp.stack(jnp.split(b_, 2))
    grads = jax.vmap(jax.grad(local, (0, 1, 2)), (None, 0, 0), axis_name="tp")(*shards)

    return agree(
        x=(x.grad, grads[0][0], grads[0][1]),
        a=(a.grad, jnp.concatenate(list(grads[1]), axis=1)),
        b=(b.grad, jnp.concatenate(list(grads[2]))),
    )


@row(
    "function.fused_kernel",
    concept="a fused kernel with its own backward",
    torch="class RMSNorm(torch.autograd.Function)",
    here="class RMSNorm(fg.Function)  # pallas_call in both",
    needs=("Function",),
    note="Forward and backward are Pallas kernels, interpreted on CPU.",
)
def fused_kernel():
    """An RMS norm of two kernels, against torch's own."""
    import torch
    from jax.experimental import pallas as pl

    def forward_kernel(x, w, y, r):
        r[...] = lax.rsqrt(jnp.mean(x[...] ** 2, axis=-1) + 1e-6)
        y[...] = x[...] * r[...][:, None] * w[...][None, :]

    def backward_kernel(x, w, r, g, dx, dw):
        h, gw = x[...] * r[...][:, None], g[...] * w[...][None, :]
        dx[...] = r[...][:, None] * (gw - h * jnp.mean(gw * h, axis=-1, keepdims=True))
        dw[...] = (g[...] * h).sum(0)

    like = lambda *arrays: [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]

    class RMSNorm(fg.Function):
        @staticmethod
        def forward(ctx, x, w):
            y, r = pl.pallas_call(forward_kernel, like(x, x[:, 0]), interpret=True)(x, w)
            ctx.save_for_backward(x, w, r)
            return y

        @staticmethod
        def backward(ctx, g):
            x, w, r = ctx.saved_tensors
            return tuple(pl.pallas_call(backward_kernel, like(x, w), interpret=True)(x, w, r, g))

    rng = np.random.default_rng(0)
    data = rng.normal(size=(4, 8)), rng.normal(size=8)
    x, w = (torch.tensor(v, requires_grad=True) for v in data)
    value = torch.nn.functional.rms_norm(x, (8,), w, eps=1e-6)
    value.sin().sum().backward()
    loss = lambda x, w: jnp.sin(RMSNorm.apply(x, w)).sum()
    here = jax.jit(jax.grad(loss, (0, 1)))(*map(jnp.asarray, data))

    return agree(
        value=(value, RMSNorm.apply(*map(jnp.asarray, data))),
        x=(x.grad, here[0]),
        w=(w.grad, here[1]),
    )
