"""Rows of section 3: how an ``fg.Function`` is written, one class text for both frameworks."""

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


def scaled_tanh(base: Any, xp: Any) -> Any:
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
    value = scaled_tanh(torch.autograd.Function, torch).apply(x, 3.0)
    (first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    tanh = scaled_tanh(fg.Function, jnp).apply
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
    scaled_tanh(torch.autograd.Function, torch).apply(x, 3.0).backward()
    grad = jax.grad(scaled_tanh(fg.Function, jnp).apply)(0.5, 3.0)
    words = "Call ctx.save_for_backward with it"

    return agree(
        grad=(x.grad, grad),
        said={"array": error_of(lambda: Keeps.apply(jnp.ones(2)), TypeError, words)},
    )
