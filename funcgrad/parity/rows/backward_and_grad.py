"""Rows of section 2: the two ways to ask torch for a gradient."""

import jax
import jax.numpy as jnp

import funcgrad as fg
from funcgrad.parity._table import agree, error_of, row


@row(
    "backward_and_grad.backward",
    concept="backward() on a scalar",
    torch="loss.backward(); x.grad",
    here="jax.grad(fun)(x)",
    note="The gradient is returned, never stored on the argument.",
)
def backward():
    """The opening example of the source document: the sum of squares gives 2x."""
    import torch

    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    (x**2).sum().backward()

    here = jax.grad(lambda x: (x**2).sum())(jnp.array([1.0, -2.0, 3.0]))

    return agree(grad=(x.grad, here, [2, -4, 6]))


@row(
    "backward_and_grad.seeds",
    concept="backward(gradient=...)",
    torch="torch.autograd.backward([y, z], [2, 10])",
    here="_, pull = jax.vjp(fun, x); pull((2., 10.))",
    note="One seed per output; they are the cotangent of the output tree.",
)
def seeds():
    """Seeds 2 and 10 on x² and x⁶ at 2: 2·4 + 10·192 = 1928."""
    import torch

    x = torch.tensor(2.0, requires_grad=True)
    torch.autograd.backward([x**2, x**6], [torch.tensor(2.0), torch.tensor(10.0)])

    _, pull = jax.vjp(lambda x: (x**2, x**6), 2.0)

    return agree(grad=(x.grad, pull((2.0, 10.0))[0], 1928))


@row(
    "backward_and_grad.seed_shape",
    concept="a seed of the wrong shape",
    torch="y.backward(torch.ones(3))  # RuntimeError",
    here="pull(jnp.ones(3))  # ValueError",
    note="Both refuse.",
)
def seed_shape():
    """A seed of shape (3,) for a scalar output is refused by both."""
    import torch

    y = torch.tensor(2.0, requires_grad=True) * 2.0
    theirs = error_of(lambda: y.backward(torch.ones(3)), RuntimeError, "Mismatch in shape")

    _, pull = jax.vjp(lambda x: x * 2.0, 2.0)
    ours = error_of(lambda: pull(jnp.ones(3)), ValueError, "expected float64[]")

    return agree(said={"torch": theirs, "here": ours})


@row(
    "backward_and_grad.seed_dtype",
    concept="a seed of the wrong dtype",
    torch="y.backward(seed.float())  # cast",
    here="pull(jnp.float32(1))  # ValueError",
    differs=True,
    note="torch casts the seed in silence, JAX refuses it.",
)
def seed_dtype():
    """A float32 seed for a float64 output: torch casts it, JAX refuses it."""
    import torch

    x = torch.tensor(2.0, requires_grad=True)
    (x * 2.0).backward(torch.tensor(1.0, dtype=torch.float32))

    _, pull = jax.vjp(lambda x: x * 2.0, 2.0)
    ours = error_of(lambda: pull(jnp.float32(1)), ValueError, "got float32[]")

    return agree(torch=(x.grad, 2), said={"here": ours})


@row(
    "backward_and_grad.create_graph",
    concept="autograd.grad with create_graph",
    torch="autograd.grad(y, x, create_graph=True)",
    here="jax.grad(jax.grad(fun))",
    note="A gradient is a function, so it is differentiated again.",
)
def create_graph():
    """x³ at 2: the first three derivatives are 12, 12 and 6."""
    import torch

    x = torch.tensor(2.0, requires_grad=True)
    theirs, y = [], x**3
    for _ in range(3):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        theirs.append(y)

    here, fun = [], lambda x: x**3
    for _ in range(3):
        fun = jax.grad(fun)
        here.append(fun(2.0))

    return agree(derivatives=(theirs, here, [12, 12, 6]))


@row(
    "backward_and_grad.grad_of_grads",
    concept="backward through kept gradients",
    torch="(2 * x.grad + y.grad).backward()",
    here="jax.grad(lambda x, y: 2 * gx(x, y) + gy(x, y))",
    note="torch adds the new gradients to the old in .grad; here the sum is written down.",
)
def grad_of_grads():
    """x² + xy + y² at (1, 1): gradient (3, 3), of 2gₓ + g_y (5, 4); ``.grad`` holds 8, 7."""
    import torch

    x, y = (torch.tensor(1.0, requires_grad=True) for _ in range(2))
    gx, gy = torch.autograd.grad(x**2 + x * y + y**2, (x, y), create_graph=True)
    x.grad, y.grad = gx.detach().clone(), gy.detach().clone()
    (2 * gx + gy).backward()

    grad = jax.grad(lambda x, y: x**2 + x * y + y**2, argnums=(0, 1))
    first = grad(1.0, 1.0)
    second = jax.grad(lambda x, y: 2 * grad(x, y)[0] + grad(x, y)[1], argnums=(0, 1))(1.0, 1.0)

    return agree(
        x=(x.grad, first[0] + second[0], 8),
        y=(y.grad, first[1] + second[1], 7),
    )


@row(
    "backward_and_grad.allow_unused",
    concept="allow_unused",
    torch="autograd.grad(loss, params, allow_unused=True)",
    here="fg.unused_grads(fun)(params)",
    needs=("unused_grads",),
    note="Which leaves provably get no gradient, and why.",
)
def unused():
    """Leaves detached, compared, rounded and forgotten: torch's None and its zeros are ours."""
    import torch

    names = ("detached", "gate", "rounded", "forgotten", "trained")
    p = {name: torch.tensor([0.4, -1.2], requires_grad=True) for name in names}
    gate = (p["gate"] > 0).to(torch.float64)
    loss = (p["detached"].detach() * torch.round(p["rounded"]) + gate * p["trained"]).sum()
    grads = torch.autograd.grad(loss, list(p.values()), allow_unused=True)
    # None, zeros, or a gradient
    theirs = [0 if g is None else 2 if g.any() else 1 for g in grads]

    def fun(p):
        gate = (p["gate"] > 0).astype(jnp.float64)
        kept = jax.lax.stop_gradient(p["detached"])
        return (kept * jnp.round(p["rounded"]) + gate * p["trained"]).sum()

    found = fg.unused_grads(fun)({name: jnp.array([0.4, -1.2]) for name in names})
    verdicts = {leaf.path: {"none": 0, "zero": 1}[leaf.gradient] for leaf in found}
    ours = [verdicts.get(name, 2) for name in names]

    said = {leaf.path: leaf.cuts[0].reason for leaf in found}
    return agree(verdicts=(theirs, ours, [0, 0, 1, 0, 2]), said=said)


@row(
    "backward_and_grad.materialize_grads",
    concept="materialize_grads",
    torch="autograd.grad(loss, [a, b], materialize_grads=True)",
    here="jax.grad(fun, argnums=(0, 1))(a, b)",
    note="JAX always gives zeros, where torch's default is an error.",
)
def materialize_grads():
    """An unused input: an error in torch unless asked for zeros, zeros in JAX."""
    import torch

    a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.ones(3, requires_grad=True)
    unused = error_of(
        lambda: torch.autograd.grad(a.sum(), [a, b]), RuntimeError, "not have been used"
    )
    theirs = torch.autograd.grad(a.sum(), [a, b], materialize_grads=True)

    here = jax.grad(lambda a, b: a.sum(), argnums=(0, 1))(jnp.array([1.0, 2.0]), jnp.ones(3))

    return agree(
        used=(theirs[0], here[0], [1, 1]),
        unused=(theirs[1], here[1], [0, 0, 0]),
        said={"torch by default": unused},
    )


@row(
    "backward_and_grad.is_grads_batched",
    concept="is_grads_batched",
    torch="autograd.grad(y, x, torch.eye(3), is_grads_batched=True)",
    here="jax.vmap(pull)(jnp.eye(3))",
    note="A batch of seeds is a vmap of the pullback.",
)
def is_grads_batched():
    """The identity as the batch of seeds gives the Jacobian."""
    import torch

    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = x.cumsum(0) * x
    (theirs,) = torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)

    fun = lambda x: jnp.cumsum(x) * x
    x = jnp.array([1.0, 2.0, 3.0])
    _, pull = jax.vjp(fun, x)

    return agree(jacobian=(theirs, jax.vmap(pull)(jnp.eye(3))[0], jax.jacrev(fun)(x)))


@row(
    "backward_and_grad.intermediates",
    concept="gradients of intermediates",
    torch="autograd.grad(loss, [a, b])",
    here="fg.capture_grads(fun)(a).cotangents['b']",
    needs=("capture_grads",),
    note="b bears a name, from checkpoint_name; one backward pass gives all.",
)
def intermediates():
    """Sum of squares of b = 2a at [1, 2, 3], with respect to a and to b."""
    import torch
    from jax.ad_checkpoint import checkpoint_name

    a = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    b = 2 * a
    theirs = torch.autograd.grad((b**2).sum(), [a, b])

    loss = lambda a: (checkpoint_name(2 * a, "b") ** 2).sum()
    found = fg.capture_grads(loss)(jnp.array([1.0, 2.0, 3.0]))

    # By hand: the program cut in two at b.
    b, pull = jax.vjp(lambda a: 2 * a, jnp.array([1.0, 2.0, 3.0]))
    of_b = jax.grad(lambda b: (b**2).sum())(b)
    (of_a,) = pull(of_b)

    return agree(
        a=(theirs[0], found.grads, of_a, [8, 16, 24]),
        b=(theirs[1], found.cotangents["b"], of_b, [4, 8, 12]),
    )


@row(
    "backward_and_grad.gather_and_broadcast",
    concept="backward of gather and of broadcast",
    torch="a[[0, 0, 2]], a.expand(3, 2)",
    here="a[jnp.array([0, 0, 2])], jnp.broadcast_to(a, (3, 2))",
    note="Reading twice adds twice.",
)
def gather_and_broadcast():
    """An entry gets the sum over all places that read it."""
    import torch

    a = torch.ones(3, requires_grad=True)
    (gathered,) = torch.autograd.grad(a[[0, 0, 2]].sum(), a)
    b = torch.tensor([1.0, 2.0], requires_grad=True)
    (spread,) = torch.autograd.grad((b.expand(3, 2) * torch.arange(6.0).view(3, 2)).sum(), b)

    here = jax.grad(lambda a: a[jnp.array([0, 0, 2])].sum())(jnp.ones(3))
    weights = jnp.arange(6.0).reshape(3, 2)
    wide = jax.grad(lambda b: (jnp.broadcast_to(b, (3, 2)) * weights).sum())(jnp.array([1.0, 2.0]))

    return agree(gather=(gathered, here, [2, 0, 1]), broadcast=(spread, wide, [6, 9]))
