"""Rows of section 3 that JAX has itself: rules of one's own with ``custom_vjp``."""

import jax
import jax.numpy as jnp

from funcgrad.parity._table import agree, row


@row(
    "function.custom_rule",
    concept="a backward of one's own, reverse mode only",
    torch="class GELU(torch.autograd.Function)",
    here="jax.custom_vjp(gelu); gelu.defvjp(fwd, bwd)",
    note="jvp, jacfwd and linearize refuse a custom_vjp; fg.Function does not.",
)
def custom_rule():
    """The source document's GELU with its backward, beside the same rule in JAX."""
    import torch

    class GELU(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 0.5 * (1 + torch.erf(x / 2**0.5))

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            density = torch.exp(-(x**2) / 2) / (2 * torch.pi) ** 0.5
            return g * (0.5 * (1 + torch.erf(x / 2**0.5)) + x * density)

    x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    y = GELU.apply(x)
    y.backward(torch.ones(3))

    @jax.custom_vjp
    def gelu(x):
        return x * jax.scipy.stats.norm.cdf(x)

    def bwd(x, g):
        return (g * (jax.scipy.stats.norm.cdf(x) + x * jax.scipy.stats.norm.pdf(x)),)

    gelu.defvjp(lambda x: (gelu(x), x), bwd)
    value, pull = jax.vjp(gelu, jnp.array([-1.0, 0.0, 2.0]))

    return agree(value=(y, value), grad=(x.grad, pull(jnp.ones(3))[0]))


@row(
    "function.saved_output",
    concept="a rule that saves its output, any order",
    torch="ctx.save_for_backward(y)",
    here="exp.defvjp(lambda x: (exp(x), exp(x)), bwd)",
    note="The residual is itself differentiated at the next order.",
)
def saved_output():
    """Exp saved by its output: the first three derivatives at 1 are all e."""
    import torch

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    x = torch.tensor(1.0, requires_grad=True)
    theirs, y = [], Exp.apply(x)
    for _ in range(3):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        theirs.append(y)

    exp = jax.custom_vjp(jnp.exp)
    exp.defvjp(lambda x: (exp(x),) * 2, lambda y, g: (g * y,))
    first = jax.grad(exp)
    second = jax.grad(first)
    here = [first(1.0), second(1.0), jax.grad(second)(1.0)]

    return agree(derivatives=(theirs, here, [jnp.e] * 3))


@row(
    "function.unused_output",
    concept="an output that nobody uses",
    torch="def backward(ctx, g, h)  # h is 0",
    here="def bwd(residuals, gh)  # h is 0",
    note="The cotangent of an unused output is zeros, as with torch's materialised grads.",
)
def unused_output():
    """The rule of an unused second output receives zeros of its shape."""
    import torch

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, g, h):
            return 2 * g + 3 * h + (h + 1)

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    Two.apply(x)[0].sum().backward()

    two = jax.custom_vjp(lambda x: (x * 2, x * 3))
    two.defvjp(lambda x: (two(x), None), lambda _, g: (2 * g[0] + 3 * g[1] + (g[1] + 1),))
    here = jax.grad(lambda x: two(x)[0].sum())(jnp.array([1.0, 2.0]))

    return agree(grad=(x.grad, here, [3, 3]))


@row(
    "function.duplicate_output",
    concept="one result returned twice",
    torch="return y, y.clone()",
    here="return y, y",
    note="Each output has its own cotangent.",
)
def duplicate_output():
    """The rule 2g + 2h on the sum of both outputs gives 4."""
    import torch

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, x * 2

        @staticmethod
        def backward(ctx, g, h):
            return 2 * g + 2 * h

    x = torch.tensor(1.0, requires_grad=True)
    y, z = Twice.apply(x)
    (y + z).backward()

    twice = jax.custom_vjp(lambda x: (x * 2, x * 2))
    twice.defvjp(lambda x: (twice(x), None), lambda _, g: (2 * g[0] + 2 * g[1],))
    here = jax.grad(lambda x: sum(twice(x)))(1.0)

    return agree(grad=(x.grad, here, 4))


@row(
    "function.vmap_of_rule",
    concept="generate_vmap_rule",
    torch="generate_vmap_rule = True; torch.vmap(F.apply)",
    here="jax.vmap(f)",
    note="custom_vjp has a batching rule of itself.",
)
def vmap_of_rule():
    """x·w at xs = [1, 2, 3], w = 2: gradient over vmap 6, vmap of gradient [1, 2, 3]."""
    import torch

    class Times(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, w):
            return x * w

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g * w, g * x

    xs, w = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(2.0)
    over = torch.func.grad(lambda w: torch.vmap(Times.apply, (0, None))(xs, w).sum())(w)
    of = torch.vmap(torch.func.grad(Times.apply, argnums=1), (0, None))(xs, w)

    times = jax.custom_vjp(lambda x, w: x * w)
    times.defvjp(lambda x, w: (times(x, w), (x, w)), lambda xw, g: (g * xw[1], g * xw[0]))
    xs = jnp.array([1.0, 2.0, 3.0])
    here = jax.grad(lambda w: jax.vmap(times, (0, None))(xs, w).sum())(2.0)
    each = jax.vmap(jax.grad(times, argnums=1), (0, None))(xs, 2.0)

    return agree(over_vmap=(over, here, 6), of_vmap=(of, each, [1, 2, 3]))


@row(
    "function.recompute",
    concept="recompute in backward",
    torch="class Recompute(torch.autograd.Function)",
    here="f.defvjp(fwd, lambda x, g: jax.vjp(fun, x)[1](g))",
    note="Save the input, run the function again: jax.checkpoint is this rule, ready made.",
)
def recompute():
    """A hand-written rule that saves only its input, and ``jax.checkpoint``."""
    import torch

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin().exp()

        @staticmethod
        def backward(ctx, g):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                return torch.autograd.grad(x.sin().exp(), x, g)

    x = torch.tensor([0.5, 2.0], requires_grad=True)
    Recompute.apply(x).sum().backward()

    fun = lambda x: jnp.exp(jnp.sin(x))
    again = jax.custom_vjp(fun)
    again.defvjp(lambda x: (fun(x), x), lambda x, g: jax.vjp(fun, x)[1](g))
    by_hand, ready = (
        jax.grad(lambda x, f=f: f(x).sum())(jnp.array([0.5, 2.0]))
        for f in (again, jax.checkpoint(fun))
    )

    return agree(grad=(x.grad, by_hand, ready))


@row(
    "function.straight_through",
    concept="straight-through estimator",
    torch="x + (x.round() - x).detach()",
    here="x + stop_gradient(jnp.round(x) - x)",
    note="Value of the rounding, gradient of the identity.",
)
def straight_through():
    """Round at [0.2, 0.7, 1.6]: value [0, 1, 2], gradient ones."""
    import torch

    x = torch.tensor([0.2, 0.7, 1.6], requires_grad=True)
    y = x + (x.round() - x).detach()
    y.sum().backward()

    through = lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x)
    value, pull = jax.vjp(through, jnp.array([0.2, 0.7, 1.6]))

    return agree(value=(y, value, [0, 1, 2]), grad=(x.grad, pull(jnp.ones(3))[0], [1, 1, 1]))


@row(
    "function.gradient_reversal",
    concept="gradient reversal",
    torch="class Reverse(torch.autograd.Function)",
    here="reverse.defvjp(fwd, lambda _, g: (-g,))",
    note="The adversary's sign change of domain adaptation.",
)
def gradient_reversal():
    """The identity whose backward changes the sign."""
    import torch

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return -g

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (Reverse.apply(x) ** 2).sum().backward()

    reverse = jax.custom_vjp(lambda x: x)
    reverse.defvjp(lambda x: (x, None), lambda _, g: (-g,))
    here = jax.grad(lambda x: (reverse(x) ** 2).sum())(jnp.array([1.0, 2.0]))

    return agree(grad=(x.grad, here, [-2, -4]))
