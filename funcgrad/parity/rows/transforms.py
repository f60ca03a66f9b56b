"""Rows of section 8: torch.func and functional modules."""

from typing import Any

import jax
import jax.numpy as jnp

from funcgrad.parity._table import Row, agree, row


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


chunked_vmap = Row(
    "transforms.vmap_chunk_size",
    "vmap(chunk_size)",
    "torch.vmap(f, chunk_size=4)",
    "fg.vmap(f, chunk_size=4)",
    needs=("vmap",),
    note="Any remainder.",
)
randomness = Row(
    "transforms.vmap_randomness",
    "vmap(randomness)",
    "torch.vmap(f, randomness='error')",
    "fg.vmap(f, randomness='error')",
    needs=("vmap",),
    note="A shared key under 'error' raises.",
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


chunked_jacobian = Row(
    "transforms.jacobian_chunk_size",
    "jacrev(chunk_size)",
    "torch.func.jacrev(f, chunk_size=4)",
    "fg.jacrev(f, chunk_size=4)",
    needs=("jacrev",),
    note="Seeds are built per chunk, so that memory does not grow with the output.",
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


hvp = Row(
    "transforms.hvp",
    "autograd.functional.hvp, vhp",
    "torch.autograd.functional.hvp(f, a, v)",
    "fg.hvp(f, a, v); fg.vhp(f, a, v)",
    needs=("hvp", "vhp"),
    note="The sum of a³ at [1, 2] with ones: [6, 12].",
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


@row(
    "transforms.functional_call_linen",
    concept="functional_call of a Linen module",
    torch="functional_call(module, params, (x,))",
    here="module.apply({'params': params}, x)",
    note="A Linen module has no parameters inside: every call is a functional call.",
)
def functional_call_linen():
    """A linear layer called with parameters from outside, and its gradient in them."""
    import flax.linen as nn
    import torch

    weight, x = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [1.0, -1.0]
    module = torch.nn.Linear(2, 3, bias=False)
    call = lambda w: torch.func.functional_call(module, {"weight": w}, (torch.tensor(x),))
    theirs = torch.func.grad(lambda w: (call(w) ** 2).sum())(torch.tensor(weight))

    dense = nn.Dense(3, use_bias=False)
    apply: Any = lambda kernel: dense.apply({"params": {"kernel": kernel}}, jnp.array(x))
    ours = jax.grad(lambda kernel: (apply(kernel) ** 2).sum())(jnp.array(weight).T)

    # A Linen kernel is (inputs, outputs), a torch weight (outputs, inputs).
    return agree(
        value=(call(torch.tensor(weight)), apply(jnp.array(weight).T)), grad=(theirs, ours.T)
    )


functional_call = Row(
    "transforms.functional_call",
    "functional_call, tied weights",
    "functional_call(module, params, x, tie_weights=True)",
    "fg.functional_call(module, params, x)",
    needs=("functional_call",),
    note="Linen and NNX; missing or unexpected names refused; tied 10, untied 11.",
)
stack_modules = Row(
    "transforms.stack_module_state",
    "stack_module_state",
    "torch.func.stack_module_state(models)",
    "fg.stack_modules(models)",
    needs=("stack_modules",),
)


@row(
    "transforms.ensemble",
    concept="an ensemble by vmap",
    torch="torch.vmap(call)(params, buffers, x)",
    here="jax.vmap(model.apply, (0, None))(stacked, x)",
    note="Stacking is one tree.map.",
)
def ensemble():
    """Three linear models in one call equal the loop over them."""
    import flax.linen as nn
    import torch

    models = [torch.nn.Linear(2, 1) for _ in range(3)]
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    params, buffers = torch.func.stack_module_state(models)
    call = lambda p, b, x: torch.func.functional_call(models[0], (p, b), (x,))
    theirs = torch.vmap(call, (0, 0, None))(params, buffers, x)

    array = lambda t: jnp.asarray(t.detach().numpy())
    trees = [{"params": {"kernel": array(m.weight.T), "bias": array(m.bias)}} for m in models]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    ours = jax.vmap(nn.Dense(1).apply, (0, None))(stacked, array(x))

    return agree(outputs=(theirs, ours, torch.stack([m(x) for m in models])))
