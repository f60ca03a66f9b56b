"""Rows of section 3: ``fg.Function``, most of them one class text for both frameworks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import funcgrad as fg
from funcgrad.parity._table import agree, error_of, row


def _exp(base: Any, xp: Any) -> Any:
    """Exp saved by its output, in the modern form."""

    class Exp(base):
        @staticmethod
        def forward(x):
            return xp.exp(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx, g):
            (y,) = ctx.saved_tensors
            return g * y

    return Exp


def _scaled_tanh(base: Any, xp: Any) -> Any:
    """A static argument, and a derivative tenfold that of tanh, in the classic form."""

    class ScaledTanh(base):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale = scale
            ctx.save_for_backward(x)
            return scale * xp.tanh(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 10 * ctx.scale * g * (1 - xp.tanh(x) ** 2), None

    return ScaledTanh


@row(
    "function.apply",
    concept="Function: forward, setup_context, backward",
    torch="class F(torch.autograd.Function); F.apply(x)",
    here="class F(fg.Function); F.apply(x)",
    needs=("Function",),
    note="Under reverse and forward mode, any order, vmap, jit, scan and checkpoint.",
)
def apply():
    """Exp saved by its output: the first three derivatives at 1 are e, in any order of modes."""
    import torch

    x = torch.tensor(1.0, requires_grad=True)
    theirs, y = [], _exp(torch.autograd.Function, torch).apply(x)
    for _ in range(3):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        theirs.append(y)
    exp = _exp(fg.Function, jnp).apply
    backwards = [jax.grad(exp), jax.grad(jax.grad(exp)), jax.grad(jax.grad(jax.grad(exp)))]
    mixed = [
        jax.jacfwd(jax.jit(exp)),
        jax.jacfwd(jax.grad(jax.checkpoint(exp))),
        jax.grad(jax.jacfwd(jax.jacfwd(exp))),
    ]

    return agree(
        derivatives=(theirs, [f(1.0) for f in backwards], [f(1.0) for f in mixed], [np.e] * 3)
    )


@row(
    "function.classic",
    concept="Function: forward(ctx, ...)",
    torch="def forward(ctx, x, scale)",
    here="def forward(ctx, x, scale)",
    needs=("Function",),
    note="The rule given is the rule used: here ten times the derivative, at both orders.",
)
def classic():
    """The first and second derivative of the classic form, of a rule that is no derivative."""
    import torch

    x = torch.tensor([0.5, -1.0], requires_grad=True)
    value = _scaled_tanh(torch.autograd.Function, torch).apply(x, 3.0)
    (first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    tanh = _scaled_tanh(fg.Function, jnp).apply
    here = jnp.array([0.5, -1.0])
    grad = jax.grad(lambda x: jax.checkpoint(lambda x: tanh(x, 3.0))(x).sum())

    return agree(
        value=(value, tanh(here, 3.0)),
        first=(first, grad(here)),
        second=(second, jax.grad(lambda x: grad(x).sum())(here)),
    )


def _returning(base: Any, *grads: Any) -> Any:
    class Product(base):
        @staticmethod
        def forward(ctx, x, w):
            return x * w

        @staticmethod
        def backward(ctx, g):
            return grads

    return Product


@row(
    "function.gradient_count",
    concept="one gradient per input, None where there is none",
    torch="return grad_x, None",
    here="return grad_x, None",
    needs=("Function",),
    note="Count, tree, shape and dtype are checked; the error names class and argument. "
    "torch adds up and casts a gradient that can be; here it is refused.",
)
def gradient_count():
    """One for two is refused by both, None is zero; a gradient of another dtype is refused here."""
    import torch

    x = torch.ones(3, requires_grad=True)
    call = lambda *grads: _returning(torch.autograd.Function, *grads).apply(x, x + 0).sum()
    here = lambda *grads: jax.grad(
        lambda x: _returning(fg.Function, *grads).apply(x, lax.stop_gradient(x)).sum()
    )(jnp.ones(3))
    said = {
        "torch": error_of(
            lambda: call(torch.ones(3)).backward(), RuntimeError, "incorrect number of gradients"
        ),
        "here": error_of(lambda: here(jnp.ones(3)), ValueError, "got 1 for 2: x, w"),
        "dtype": error_of(
            lambda: here(jnp.ones(3, jnp.bfloat16), None), ValueError, "x has its shape and dtype"
        ),
        "shape": error_of(lambda: here(jnp.ones(4), None), ValueError, "got float64[4]"),
    }
    call(torch.full((3,), 2.0), None).backward()

    return agree(grad=(x.grad, here(jnp.full(3, 2.0), None)), said=said)


@row(
    "function.save_for_backward",
    concept="save_for_backward, saved_tensors",
    torch="ctx.save_for_backward(x)",
    here="ctx.save_for_backward(x)",
    needs=("Function", "saved_tensors"),
    note="What is saved becomes a residual, visible in fg.saved_tensors.",
)
def save_for_backward():
    """Exactly the output of Exp is kept: as many bytes in torch's hooks and ours."""
    import torch

    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        _exp(torch.autograd.Function, torch).apply(torch.ones(4, 5, requires_grad=True))
    kept = fg.saved_tensors(_exp(fg.Function, jnp).apply)(jnp.ones((4, 5)))

    return agree(
        bytes=(sum(t.nbytes for t in packed), sum(t.bytes for t in kept), 160),
        count=(len(packed), len(list(kept)), 1),
    )


@row(
    "function.ctx_attributes",
    concept="attributes on ctx",
    torch="ctx.scale = scale",
    here="ctx.scale = scale",
    needs=("Function",),
    note="Static values only; an array is refused with the fix.",
)
def ctx_attributes():
    """A number travels on ctx; torch lets a tensor travel too, ours says where it belongs."""
    import torch

    class Keeps(fg.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x
            return x

    x = torch.tensor(0.5, requires_grad=True)
    _scaled_tanh(torch.autograd.Function, torch).apply(x, 3.0).backward()
    grad = jax.grad(_scaled_tanh(fg.Function, jnp).apply)(0.5, 3.0)
    words = "Call ctx.save_for_backward with it"

    return agree(
        grad=(x.grad, grad),
        said={"array": error_of(lambda: Keeps.apply(jnp.ones(2)), TypeError, words)},
    )


def _frugal(base: Any, seen: list[Any]) -> Any:
    class Product(base):
        @staticmethod
        def forward(ctx, x, w):
            ctx.set_materialize_grads(False)
            seen.append(ctx.needs_input_grad)
            ctx.save_for_backward(w)
            return x * w, x + w

        @staticmethod
        def backward(ctx, g, h):
            (w,) = ctx.saved_tensors
            seen.append(h is None)
            return g * w if ctx.needs_input_grad[0] else None, None

    return Product


@row(
    "function.needs_input_grad",
    concept="needs_input_grad, set_materialize_grads",
    torch="ctx.needs_input_grad[0]",
    here="ctx.needs_input_grad[0]",
    needs=("Function",),
    note="Known when the program is traced.",
)
def needs_input_grad():
    """Asked for x alone: (True, False), and None for the output that nobody uses."""
    import torch

    theirs: list[Any] = []
    x, w = torch.tensor(2.0, requires_grad=True), torch.tensor(5.0)
    _frugal(torch.autograd.Function, theirs).apply(x, w)[0].backward()
    here: list[Any] = []
    grad = jax.grad(lambda x: _frugal(fg.Function, here).apply(x, jnp.array(5.0))[0])(2.0)
    last = lambda seen: [*next(s for s in reversed(seen) if isinstance(s, tuple)), seen[-1]]

    return agree(grad=(x.grad, grad, 5), seen=(last(theirs), last(here), [True, False, True]))


def _sort(base: Any, xp: Any) -> Any:
    class Sort(base):
        @staticmethod
        def forward(ctx, x):
            order = xp.argsort(x)
            ranked = x[order] * 1.0
            twice = 2 * ranked
            ctx.mark_non_differentiable(order, twice)
            ctx.save_for_backward(order)
            return ranked, order, twice

        @staticmethod
        def backward(ctx, g, g_order, g_twice):
            (order,) = ctx.saved_tensors
            back = xp.argsort(order)
            return g[back] + g_twice[back]

    return Sort


@row(
    "function.mark_non_differentiable",
    concept="mark_non_differentiable",
    torch="ctx.mark_non_differentiable(indices)",
    here="ctx.mark_non_differentiable(indices)",
    needs=("Function",),
    note="No gradient passes through it, in either mode; backward is given zeros for it.",
)
def mark_non_differentiable():
    """A sort with its order and a multiple of the result: the gradient ignores both."""
    import torch

    weights = [1.0, 2.0, 3.0]
    x = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)
    ranked, _, twice = _sort(torch.autograd.Function, torch).apply(x)
    (ranked * torch.tensor(weights) + 100 * twice).sum().backward()

    def loss(x):
        ranked, _, twice = _sort(fg.Function, jnp).apply(x)
        return (ranked * jnp.array(weights) + 100 * twice).sum()

    here = jnp.array([3.0, 1.0, 2.0])
    return agree(grad=(x.grad, jax.grad(loss)(here), jax.jacrev(jax.jit(loss))(here), [3, 1, 2]))


@row(
    "function.once_differentiable",
    concept="once_differentiable",
    torch="@once_differentiable",
    here="@fg.once_differentiable",
    needs=("Function", "once_differentiable"),
    note="A second derivative raises.",
)
def once_differentiable():
    """The first derivative of (x²)² is 108 at 3; the second is refused by both."""
    import torch

    def make(base, once):
        class Square(base):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x

            @staticmethod
            @once
            def backward(ctx, g):
                return 2 * g * ctx.saved_tensors[0]

        return Square.apply

    theirs = make(torch.autograd.Function, torch.autograd.function.once_differentiable)
    here = make(fg.Function, fg.once_differentiable)
    x = torch.tensor(3.0, requires_grad=True)
    (first,) = torch.autograd.grad(theirs(x) ** 2, x, create_graph=True)
    grad, words = jax.grad(lambda x: here(x) ** 2), "once_differentiable"

    return agree(
        first=(first, grad(3.0), 108),
        said={
            "torch": error_of(first.backward, RuntimeError, words),
            "here": error_of(lambda: jax.grad(grad)(3.0), TypeError, words),
        },
    )


@row(
    "function.mark_dirty",
    concept="mark_dirty, in-place forward",
    torch="ctx.mark_dirty(x)",
    here="ctx.mark_dirty(x)  # refused",
    needs=("Function",),
    note="The new value is returned; there is no old one to change.",
)
def mark_dirty():
    """Doubling in place: torch marks it, here the doubled value is simply the output."""
    import torch

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    def make(dirty):
        class Double(fg.Function):
            @staticmethod
            def forward(ctx, x):
                if dirty:
                    ctx.mark_dirty(x)
                return 2 * x

            @staticmethod
            def backward(ctx, g):
                return 2 * g

        return Double.apply

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    value = InPlace.apply(x.clone())
    value.sum().backward()
    here = jnp.array([1.0, 2.0])
    refuse = lambda: make(dirty=True)(here)

    return agree(
        value=(value, make(dirty=False)(here)),
        grad=(x.grad, jax.grad(lambda x: make(dirty=False)(x).sum())(here)),
        said={"here": error_of(refuse, TypeError, "never changed in place")},
    )


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

    class Tanh(_scaled_tanh(torch.autograd.Function, torch)):
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
    tanh = _scaled_tanh(fg.Function, jnp).apply
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
