"""Rows of section 8: torch.func, per-sample gradients, and functional modules."""

from typing import Any

import jax
import jax.numpy as jnp

from funcgrad.parity._table import Row, agree, error_of, row


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


@row(
    "transforms.per_sample_grads",
    concept="per-sample gradients",
    torch="vmap(grad(loss), (None, 0, 0))(params, x, y)",
    here="fg.per_sample_grads(loss)(params, x, y).grads",
    needs=("per_sample_grads",),
    note="One gradient per sample, with a leading batch axis on every leaf.",
)
def per_sample_grads():
    """A two-layer network on five samples, leaf by leaf."""
    import torch

    import funcgrad as fg

    draw = torch.randn
    params = {"w": draw(3, 4), "b": draw(4), "v": draw(4)}
    x, y = draw(5, 3), draw(5)

    def theirs(p, x, y):
        return (torch.tanh(x @ p["w"] + p["b"]) @ p["v"] - y) ** 2

    torch_grads = torch.vmap(torch.func.grad(theirs), in_dims=(None, 0, 0))(params, x, y)

    def ours(p, x, y):
        return (jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] - y) ** 2

    params, x, y = jax.tree.map(lambda t: jnp.asarray(t.numpy()), (params, x, y))
    grads = fg.per_sample_grads(ours)(params, x, y).grads

    return agree(
        w=(torch_grads["w"], grads["w"]),
        b=(torch_grads["b"], grads["b"]),
        v=(torch_grads["v"], grads["v"]),
    )


@row(
    "transforms.clipped_grad",
    concept="clipped per-sample gradient",
    torch="(grads / norms.clamp(min=1)).sum(0)",
    here="fg.clipped_grad(loss, max_norm=1.0)(params, x, y)",
    needs=("clipped_grad",),
    note="Each sample's gradient within the bound, then their sum: the step of DP-SGD.",
)
def clipped_grad():
    """Five samples of a linear model, some below and some above the bound."""
    import torch

    import funcgrad as fg

    w, x, y = torch.randn(3), torch.randn(5, 3) * 0.5, torch.randn(5)
    each = torch.vmap(torch.func.grad(lambda w, x, y: (x @ w - y) ** 2), (None, 0, 0))(w, x, y)
    norms = each.norm(dim=1)
    clipped = (each / norms.clamp(min=1.0)[:, None]).sum(0)

    w, x, y = (jnp.asarray(t.numpy()) for t in (w, x, y))
    ours = fg.clipped_grad(lambda w, x, y: (x @ w - y) ** 2, max_norm=1.0)(w, x, y)

    return agree(
        grads=(clipped, ours.grads),
        norms=(norms, ours.norms),
        clip_fraction=((norms > 1).double().mean(), ours.clip_fraction),
    )


@row(
    "transforms.per_sample_norms",
    concept="per-sample gradient norms",
    torch="norms of vmap(grad(loss))(params, x, y)",
    here="fg.per_sample(loss)(params, x, y).norms()",
    needs=("per_sample",),
    note="No gradient is formed: the factors of each layer, one backward pass.",
)
def per_sample_norms():
    """A shared weight counts once, with the cross term of its two uses."""
    import torch

    import funcgrad as fg

    params = {"w": torch.randn(4, 4), "v": torch.randn(4)}
    x, y = torch.randn(5, 4), torch.randn(5)

    def theirs(p, x, y):
        return (torch.tanh(torch.tanh(x @ p["w"]) @ p["w"]) @ p["v"] - y) ** 2

    each = torch.vmap(torch.func.grad(theirs), (None, 0, 0))(params, x, y)
    norms = {name: each[name].flatten(1).norm(dim=1) for name in each}

    def ours(p, x, y):
        return (jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"]) @ p["v"] - y) ** 2

    arrays = jax.tree.map(lambda t: jnp.asarray(t.numpy()), (params, x, y))
    samples = jax.jit(fg.per_sample(ours))(*arrays)
    by_leaf = samples.leaf_norms()

    return agree(
        norms=(torch.hypot(norms["w"], norms["v"]), samples.norms()),
        w=(norms["w"], by_leaf["w"]),
        v=(norms["v"], by_leaf["v"]),
    )


@row(
    "transforms.per_sample_sums",
    concept="weighted and clipped sums of per-sample gradients",
    torch="torch.einsum('n,n...->...', weights, grads)",
    here="samples.weighted_sum(weights); samples.clipped_sum(1.0)",
    needs=("per_sample",),
    note="One product per layer: the weights scale a factor of it.",
)
def per_sample_sums():
    """Five samples of a linear layer, with weights of either sign, and clipped."""
    import torch

    import funcgrad as fg

    w, x, weights = torch.randn(3, 4), torch.randn(5, 3), torch.randn(5)
    each = torch.vmap(torch.func.grad(lambda w, x: torch.tanh(x @ w).sum()), (None, 0))(w, x)
    factors = (1 / each.flatten(1).norm(dim=1)).clamp(max=1)
    theirs = [torch.einsum("n,n...->...", scale, each) for scale in (weights, factors)]

    w, x, weights = (jnp.asarray(t.numpy()) for t in (w, x, weights))
    samples = fg.per_sample(lambda w, x: jnp.tanh(x @ w).sum())(w, x)

    return agree(
        weighted=(theirs[0], samples.weighted_sum(weights)),
        clipped=(theirs[1], samples.clipped_sum(1.0)),
    )


@row(
    "transforms.per_sample_products",
    concept="inner products of per-sample gradients",
    torch="grads @ direction, grads @ grads.T",
    here="samples.dots(direction), samples.gram()",
    needs=("per_sample",),
    note="Influence and the empirical neural tangent kernel, from the factors.",
)
def per_sample_products():
    """Five samples of a linear layer, with a direction and with one another."""
    import torch

    import funcgrad as fg

    w, x, direction = torch.randn(3, 4), torch.randn(5, 3), torch.randn(3, 4)
    each = torch.vmap(torch.func.grad(lambda w, x: torch.tanh(x @ w).sum()), (None, 0))(w, x)
    each = each.flatten(1)
    theirs = each @ direction.flatten(), each @ each.T

    w, x, direction = (jnp.asarray(t.numpy()) for t in (w, x, direction))
    samples = fg.per_sample(lambda w, x: jnp.tanh(x @ w).sum())(w, x)

    return agree(dots=(theirs[0], samples.dots(direction)), gram=(theirs[1], samples.gram()))


@row(
    "transforms.sample_mixing",
    concept="a batch loss that mixes its samples",
    torch="vmap(grad(loss))(w, x)  # 0, silently",
    here="fg.per_sample_loss(loss)  # SampleMixingError",
    needs=("per_sample_loss", "SampleMixingError"),
    differs=True,
    note="The error names the equation and the source line.",
)
def sample_mixing():
    """A batch of one hides that each sample depends on the others; ours refuses."""
    import torch

    import funcgrad as fg

    def loss(w, x):
        h = x * w[0]
        return ((h - h.mean(0, keepdims=True)) ** 2).sum(-1)

    x = torch.tensor([[1.0], [3.0]])
    single = lambda w, x: loss(w, x[None])[0]
    silent = torch.vmap(torch.func.grad(single), (None, 0))(torch.tensor([2.0]), x)
    batch = torch.func.grad(lambda w: loss(w, x).sum())(torch.tensor([2.0]))

    w, x = jnp.array([2.0]), jnp.array([[1.0], [3.0]])
    refused = error_of(
        lambda: fg.per_sample_grads(fg.per_sample_loss(loss))(w, x),
        fg.SampleMixingError,
        "transforms.py",
    )

    return agree(
        torch_sum=(silent.sum(), 0),
        torch_batch=(batch, [8]),
        said={"here": refused},
    )
