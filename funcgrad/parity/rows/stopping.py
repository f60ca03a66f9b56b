"""Rows of section 4: detach, no_grad, freezing, and the moving average of a teacher."""

import jax
import jax.numpy as jnp
import optax

from funcgrad.parity._table import Row, agree, row


@row(
    "stopping.detach",
    concept="detach",
    torch="a + 2 * a.detach()",
    here="a + 2 * jax.lax.stop_gradient(a)",
    note="A value without its history.",
)
def detach():
    """The slope of a + 2·detach(a) is 1; the sum of x − detach(x²) has gradient ones."""
    import torch

    a = torch.tensor(3.0, requires_grad=True)
    (a + 2 * a.detach()).backward()
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (x - (x**2).detach()).sum().backward()

    stop = jax.lax.stop_gradient
    slope = jax.grad(lambda a: a + 2 * stop(a))(3.0)
    ones = jax.grad(lambda x: (x - stop(x**2)).sum())(jnp.array([1.0, 2.0, 3.0]))

    return agree(scalar=(a.grad, slope, 1), vector=(x.grad, ones, [1, 1, 1]))


no_grad = Row(
    "stopping.no_grad",
    "no_grad block and decorator",
    "with torch.no_grad(): y = fun(x)",
    "fg.no_grad(fun)(x)",
    needs=("no_grad",),
    note="Same value, no gradient, no tangent, nothing saved for backward.",
)
set_grad_enabled = Row(
    "stopping.set_grad_enabled",
    "set_grad_enabled(flag), nested",
    "with torch.set_grad_enabled(flag): ...",
    "fg.set_grad_enabled(flag)(fun)(x)",
    needs=("set_grad_enabled",),
)
inference_mode = Row(
    "stopping.inference_mode",
    "inference_mode",
    "with torch.inference_mode(): ...",
    "fg.inference_mode(fun)(x)",
    needs=("inference_mode",),
    note="Differentiating through it raises, with the source line.",
)
freeze = Row(
    "stopping.freeze",
    "requires_grad_(False), frozen embedding",
    "embed.weight.requires_grad_(False)",
    "fg.freeze(params, 'embed')",
    needs=("freeze",),
    note="One specification for gradient, clip norm, weight decay and optimiser state.",
)


@row(
    "stopping.ema",
    concept="moving-average teacher",
    torch="with torch.no_grad(): teacher.lerp_(student, 0.1)",
    here="optax.incremental_update(student, teacher, 0.1)",
    note="The target is detached; the average is one more value carried along.",
)
def ema():
    """Ten steps of a student towards its own slowly moving average."""
    import torch

    inputs = [[1.0 + i / 10, 2.0 - i / 10] for i in range(10)]

    student, teacher = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([0.5, 3.0])
    for x in map(torch.tensor, inputs):
        loss = ((student * x - (teacher * x).detach()) ** 2).sum()
        (grad,) = torch.autograd.grad(loss, student)
        with torch.no_grad():
            student -= 0.05 * grad
            teacher.lerp_(student, 0.1)

    def distance(student, teacher, x):
        return ((student * x - jax.lax.stop_gradient(teacher * x)) ** 2).sum()

    ours, average = jnp.array([1.0, 2.0]), jnp.array([0.5, 3.0])
    for x in map(jnp.array, inputs):
        ours = ours - 0.05 * jax.grad(distance)(ours, average, x)
        average = optax.incremental_update(ours, average, 0.1)

    return agree(student=(student, ours), teacher=(teacher, average))
