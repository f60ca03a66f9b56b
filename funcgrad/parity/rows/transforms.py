"""Rows of section 8: torch.func, and derivatives of second order."""

import jax
import jax.numpy as jnp

import funcgrad as fg
from funcgrad.parity._table import agree, error_of, row


@row(
    "transforms.grad",
    concept="grad, grad_and_value, has_aux",
    torch="torch.func.grad_and_value(f, argnums=-1, has_aux=True)",
    here="jax.value_and_grad(f, argnums=-1, has_aux=True)",
    note="torch returns (grad, (value, aux)), JAX ((value, aux), grad).",
)
def grad():
    """A tuple of argnums, a negative one, and an auxiliary output."""
    import torch

    f = lambda x, y: x**2 * y
    aux = lambda x, y: (f(x, y), x + y)
    x, y = torch.tensor(2.0), torch.tensor(3.0)
    both = torch.func.grad(f, argnums=(0, 1))(x, y)
    last, (value, extra) = torch.func.grad_and_value(aux, argnums=-1, has_aux=True)(x, y)

    pair = jax.grad(f, argnums=(0, 1))(2.0, 3.0)
    (same, more), end = jax.value_and_grad(aux, argnums=-1, has_aux=True)(2.0, 3.0)

    return agree(
        argnums=(both, pair, [12, 4]),
        negative=(last, end, 4),
        value=(value, same, 12),
        aux=(extra, more, 5),
    )


@row(
    "transforms.vjp",
    concept="vjp",
    torch="torch.func.vjp(f, x, has_aux=True)",
    here="jax.vjp(f, x, has_aux=True)",
)
def vjp():
    """Value, pulled-back cotangent and auxiliary output."""
    import torch

    f = lambda x: (x.sin(), x.sum())
    x = torch.tensor([0.5, 1.0])
    value, pull, aux = torch.func.vjp(f, x, has_aux=True)
    (theirs,) = pull(torch.tensor([1.0, 2.0]))

    same, back, more = jax.vjp(lambda x: (jnp.sin(x), x.sum()), jnp.array([0.5, 1.0]), has_aux=True)
    (ours,) = back(jnp.array([1.0, 2.0]))

    return agree(value=(value, same), cotangent=(theirs, ours), aux=(aux, more, 1.5))


@row(
    "transforms.jvp",
    concept="jvp and linearize",
    torch="torch.func.jvp(f, (x,), (t,)); linearize(f, x)",
    here="jax.jvp(f, (x,), (t,)); jax.linearize(f, x)",
)
def jvp():
    """The tangent of sin by both, and by the linear map reused at a second tangent."""
    import torch

    x, t = torch.tensor([0.5, 1.0]), torch.tensor([1.0, 2.0])
    tangent = torch.func.jvp(torch.sin, (x,), (t,))[1]
    _, push = torch.func.linearize(torch.sin, x)

    x, u = jnp.array([0.5, 1.0]), jnp.array([1.0, 2.0])
    _, ours = jax.jvp(jnp.sin, (x,), (u,))
    _, linear = jax.linearize(jnp.sin, x)

    return agree(
        jvp=(tangent, ours),
        linearize=(push(t), linear(u), ours),
        again=(push(3 * t), linear(3 * u)),
    )


@row(
    "transforms.vmap",
    concept="vmap(in_dims, out_dims)",
    torch="torch.vmap(f, in_dims=(None, 0), out_dims=1)",
    here="jax.vmap(f, in_axes=(None, 0), out_axes=1)",
)
def vmap():
    """Output axis 1 turns (2, 3) into (3, 2); a shared first argument."""
    import torch

    f = lambda w, x: w * x
    w, xs = torch.tensor([1.0, 2.0, 3.0]), torch.arange(6.0).view(2, 3)
    out = torch.vmap(lambda x: x * 2, out_dims=1)(xs)
    shared = torch.vmap(f, in_dims=(None, 0))(w, xs)

    w, xs = jnp.array([1.0, 2.0, 3.0]), jnp.arange(6.0).reshape(2, 3)
    turned = jax.vmap(lambda x: x * 2, out_axes=1)(xs)

    return agree(
        out_dims=(out, turned, 2 * xs.T),
        shape=(out.shape, turned.shape, (3, 2)),
        in_dims=(shared, jax.vmap(f, in_axes=(None, 0))(w, xs)),
    )


@row(
    "transforms.vmap_chunk_size",
    concept="vmap(chunk_size)",
    torch="torch.vmap(f, in_dims=(None, 0), out_dims=1, chunk_size=4)",
    here="fg.vmap(f, (None, 0), 1, chunk_size=4)",
    needs=("vmap",),
    note="Any remainder, and nothing is filled up.",
)
def chunked_vmap():
    """Ten rows in chunks of every size; a shared first argument, output axis 1."""
    import torch

    sizes = (1, 2, 3, 4, 7, 10, 1000)
    f = lambda w, x: w * x**2
    w, xs = torch.tensor([1.0, 2.0, 3.0]), torch.arange(30.0).view(10, 3)
    theirs = [torch.vmap(f, (None, 0), 1, chunk_size=size)(w, xs) for size in sizes]

    w, xs = jnp.array([1.0, 2.0, 3.0]), jnp.arange(30.0).reshape(10, 3)
    ours = [fg.vmap(f, (None, 0), 1, chunk_size=size)(w, xs) for size in sizes]

    return agree(chunks=(theirs, ours, [(w[None] * xs**2).T] * len(sizes)))


@row(
    "transforms.vmap_randomness",
    concept="vmap(randomness)",
    torch="torch.vmap(f, randomness='error')",
    here="fg.vmap(f, in_axes, randomness='error')",
    needs=("vmap",),
    note="A shared key under 'error' raises with the line; jax.vmap draws the same for all rows.",
)
def randomness():
    """An error, one draw for all rows, or one for each: told apart by the number of values."""
    import torch

    f = lambda x: x + torch.rand(())
    words = error_of(lambda: torch.vmap(f)(torch.zeros(4)), RuntimeError, "randomness")
    count = lambda out: len(set(out.tolist()))
    theirs = [count(torch.vmap(f, randomness=r)(torch.zeros(4))) for r in ("same", "different")]

    g = lambda key, x: x + jax.random.uniform(key)
    run = lambda r, **options: fg.vmap(g, (None, 0), randomness=r, **options)(key, jnp.zeros(4))
    key = jax.random.key(0)
    own = error_of(lambda: run("error"), ValueError, "every row draws from its own key")
    ours = [count(run(r)) for r in ("same", "different")]
    loop = [g(jax.random.fold_in(key, i), 0.0) for i in range(4)]

    return agree(
        distinct=(theirs, ours, [1, 4]),
        folded=(loop, run("different"), run("different", chunk_size=3)),
        said={"torch": words, "fg": own},
    )


@row(
    "transforms.jacobian",
    concept="jacrev, jacfwd",
    torch="torch.func.jacrev(f), torch.func.jacfwd(f)",
    here="jax.jacrev(f), jax.jacfwd(f)",
    note="0-d to 0-d gives 0-d; (1,) to (1,) gives (1, 1).",
)
def jacobian():
    """A small Jacobian by both modes, and the Jacobian of the identity."""
    import torch

    x = torch.tensor([1.0, 2.0])
    f = lambda x: torch.stack([x[0] * x[1], x.sum(), x[0] ** 3])
    theirs = [jac(f)(x) for jac in (torch.func.jacrev, torch.func.jacfwd)]
    scalar, single = (torch.func.jacrev(lambda x: x)(x) for x in (torch.tensor(5.0), torch.ones(1)))

    g = lambda x: jnp.stack([x[0] * x[1], x.sum(), x[0] ** 3])
    ours = [jac(g)(jnp.array([1.0, 2.0])) for jac in (jax.jacrev, jax.jacfwd)]
    zero, one = (jax.jacrev(lambda x: x)(x) for x in (jnp.array(5.0), jnp.ones(1)))

    return agree(
        jacobian=(theirs, ours, [[[2, 1], [1, 1], [3, 0]]] * 2),
        scalar=(scalar, zero, 1),
        single=(single, one, [[1]]),
    )


@row(
    "transforms.jacobian_chunk_size",
    concept="jacrev(chunk_size), jacfwd(chunk_size)",
    torch="torch.func.jacrev(f, chunk_size=4)",
    here="fg.jacrev(f, chunk_size=4)",
    needs=("jacrev", "jacfwd"),
    note="Seeds are built per chunk, so that memory does not grow with the output; "
    "torch's jacfwd has no chunks.",
)
def chunked_jacobian():
    """Chunks of every size, by both modes; and of the identity."""
    import torch

    sizes = (1, 2, 3, 4, 7, 10, 1000)
    x = torch.arange(1.0, 11.0)
    f = lambda x: (x * x.flip(0)).cumsum(0).sin()
    theirs = [[torch.func.jacrev(f, chunk_size=size)(x) for size in sizes]]
    theirs += [[torch.func.jacfwd(f)(x)] * len(sizes)]
    scalar, single = (torch.func.jacrev(lambda x: x)(x) for x in (torch.tensor(5.0), torch.ones(1)))

    x = jnp.arange(1.0, 11.0)
    g = lambda x: jnp.sin(jnp.cumsum(x * x[::-1]))
    ours = [[jac(g, chunk_size=size)(x) for size in sizes] for jac in (fg.jacrev, fg.jacfwd)]
    zero, one = (fg.jacrev(lambda x: x)(x) for x in (jnp.array(5.0), jnp.ones(1)))
    few, many = jnp.ones(16), jnp.ones((16, 512))
    memory = lambda jac: jax.jit(jac).lower(few).compile().memory_analysis().temp_size_in_bytes
    h = lambda x: jnp.tanh(x @ many)

    return agree(
        jacobian=(theirs, ours, [[jax.jacrev(g)(x)] * len(sizes)] * 2),
        scalar=(scalar, zero, 1),
        single=(single, one, [[1]]),
        said={
            "temporary bytes of 512 rows": memory(fg.jacrev(h)),
            "in chunks of 8": memory(fg.jacrev(h, chunk_size=8)),
        },
    )


@row(
    "transforms.jacobian_with_value",
    concept="autograd.functional.jacobian, by the mode that costs less",
    torch="torch.autograd.functional.jacobian(f, x)",
    here="fg.jacobian(f)(x): value, jacobian, aux, mode",
    needs=("jacobian",),
)
def jacobian_with_value():
    """A tall Jacobian by columns, a wide one by rows, the value beside it."""
    import torch

    x = torch.tensor([1.0, 2.0, 3.0])
    tall, wide = (lambda x: x.repeat(2) ** 2), (lambda x: x[:2] * x[1:])
    theirs = [torch.autograd.functional.jacobian(f, x) for f in (tall, wide)]

    x = jnp.array([1.0, 2.0, 3.0])
    found = [fg.jacobian(f)(x) for f in (lambda x: jnp.tile(x, 2) ** 2, wide)]

    return agree(
        tall=(theirs[0], found[0].jacobian),
        wide=(theirs[1], found[1].jacobian, [[2, 1, 0], [0, 3, 2]]),
        value=(tall(torch.tensor([1.0, 2.0, 3.0])), found[0].value),
        forward=([True, False], [f.mode == "forward" for f in found]),
    )


@row(
    "transforms.hessian",
    concept="hessian",
    torch="torch.func.hessian(f)",
    here="jax.hessian(f)",
)
def hessian():
    """The sum of a³ at [1, 2] has the Hessian diag(6, 12)."""
    import torch

    theirs = torch.func.hessian(lambda a: (a**3).sum())(torch.tensor([1.0, 2.0]))

    ours = jax.hessian(lambda a: (a**3).sum())(jnp.array([1.0, 2.0]))

    return agree(hessian=(theirs, ours, [[6, 0], [0, 12]]))


@row(
    "transforms.hvp",
    concept="autograd.functional.hvp, vhp",
    torch="torch.autograd.functional.hvp(f, a, v)",
    here="fg.hvp(f, a, v); fg.vhp(f, a, v)",
    needs=("hvp", "vhp", "hessian"),
    note="Pytrees and argnums; a direction that does not match is refused by the leaf's name.",
)
def hvp():
    """The sum of a³ at [1, 2]: diag(6, 12), and with ones [6, 12] from both sides."""
    import torch

    f = lambda a: (a**3).sum()
    a, v = torch.tensor([1.0, 2.0]), torch.ones(2)
    right = torch.autograd.functional.hvp(f, a, v)[1]
    left = torch.autograd.functional.vhp(f, a, v)[1]
    matrix = torch.func.hessian(f)(a)

    a, v = jnp.array([1.0, 2.0]), jnp.ones(2)

    return agree(
        hvp=(right, fg.hvp(f, a, v), [6, 12]),
        vhp=(left, fg.vhp(f, a, v), [6, 12]),
        hessian=(matrix, fg.hessian(f, chunk_size=1)(a), [[6, 0], [0, 12]]),
    )


@row(
    "transforms.gauss_newton",
    concept="Gauss-Newton times a vector",
    torch="vjp(model)(hvp(loss)(jvp(model)(v)))",
    here="fg.gnvp(model, loss, w, v)",
    needs=("gnvp",),
    note="One linearisation of the model serves both ways.",
)
def gauss_newton():
    """Three transforms by hand; the matrix JᵀHJ."""
    import torch

    w, v = torch.tensor([2.0, 3.0]), torch.tensor([1.0, -1.0])
    model = lambda w: torch.stack([w[0] * w[1], w[1].sin(), w[0]])
    loss = lambda y: (y**4).sum()
    out, tangent = torch.func.jvp(model, (w,), (v,))
    curved = torch.func.jvp(torch.func.grad(loss), (out,), (tangent,))[1]
    (theirs,) = torch.func.vjp(model, w)[1](curved)

    w, v = jnp.array([2.0, 3.0]), jnp.array([1.0, -1.0])
    model = lambda w: jnp.stack([w[0] * w[1], jnp.sin(w[1]), w[0]])
    jac, middle = jax.jacobian(model)(w), jax.hessian(loss)(model(w))

    return agree(gnvp=(theirs, fg.gnvp(model, loss, w, v), jac.T @ (middle @ (jac @ v))))


@row(
    "transforms.hessian_trace",
    concept="diagonal and trace of the Hessian",
    torch="torch.func.hessian(f)(a).diagonal(), .trace()",
    here="fg.hessian_diagonal(f)(a), fg.hessian_trace(f)(a); fg.hutchinson(f, n_samples=n)(key, a)",
    needs=("hessian_diagonal", "hessian_trace", "hutchinson"),
    note="Exact in chunks without the matrix, or estimated with standard errors.",
)
def hessian_trace():
    """Exact; the estimate lies within four of its own standard errors."""
    import torch

    a = torch.tensor([0.5, 1.0, 2.0])
    matrix = torch.func.hessian(lambda a: (a.prod() + (a**3).sum()).sin())(a)

    a = jnp.array([0.5, 1.0, 2.0])
    f = lambda a: jnp.sin(jnp.prod(a) + (a**3).sum())
    trace = fg.hessian_trace(f, chunk_size=2)(a)
    estimate = fg.hutchinson(f, n_samples=200)(jax.random.key(0), a)
    near = abs(estimate.trace - trace) < 4 * estimate.trace_error

    return agree(
        diagonal=(matrix.diagonal(), fg.hessian_diagonal(f, chunk_size=2)(a)),
        trace=(matrix.trace(), trace),
        estimate=(True, bool(near)),
    )


@row(
    "transforms.hvp_by_hand",
    concept="forward over reverse",
    torch="torch.func.jvp(torch.func.grad(f), (a,), (v,))",
    here="jax.jvp(jax.grad(f), (a,), (v,))",
    note="The product without the matrix, from two transforms.",
)
def hvp_by_hand():
    """The sum of a³ at [1, 2]: its Hessian times ones is [6, 12]."""
    import torch

    a, v = torch.tensor([1.0, 2.0]), torch.ones(2)
    theirs = torch.func.jvp(torch.func.grad(lambda a: (a**3).sum()), (a,), (v,))[1]
    _, known = torch.autograd.functional.hvp(lambda a: (a**3).sum(), a, v)

    a, v = jnp.array([1.0, 2.0]), jnp.ones(2)
    _, ours = jax.jvp(jax.grad(lambda a: (a**3).sum()), (a,), (v,))

    return agree(hvp=(theirs, known, ours, [6, 12]))


@row(
    "transforms.perturbation_confusion",
    concept="nested derivatives do not mix",
    torch="grad(lambda a: a * grad(lambda b: a + b)(one))",
    here="jax.grad(lambda a: a * jax.grad(lambda b: a + b)(1.0))",
    note="Confused perturbations would give 2.",
)
def perturbation_confusion():
    """The derivative of a · d/db (a + b) at 1 is 1, in both modes."""
    import torch

    one, grad, jvp = torch.tensor(1.0), torch.func.grad, torch.func.jvp
    reverse = grad(lambda a: a * grad(lambda b: a + b)(one))(one)
    slope = lambda f, x: jvp(f, (x,), (one,))[1]
    forward = slope(lambda a: a * slope(lambda b: a + b, one), one)

    ours = jax.grad(lambda a: a * jax.grad(lambda b: a + b)(1.0))(1.0)
    push = lambda f, x: jax.jvp(f, (x,), (1.0,))[1]

    return agree(
        reverse=(reverse, ours, 1),
        forward=(forward, push(lambda a: a * push(lambda b: a + b, 1.0), 1.0), 1),
    )
