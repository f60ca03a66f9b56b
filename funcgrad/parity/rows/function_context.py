"""Rows of section 3: what ``ctx`` of an ``fg.Function`` says and marks."""

from typing import Any

import jax
import jax.numpy as jnp

import funcgrad as fg
from funcgrad.parity._table import agree, error_of, row


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
