"""Rows of section 8: per-sample gradients, their sums, norms, products and projections."""

import jax
import jax.flatten_util
import jax.numpy as jnp

from funcgrad.parity._table import agree, error_of, row


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
    "transforms.per_sample_projections",
    concept="random projections of per-sample gradients",
    torch="torch.stack([flatten(grad(loss(x_i), params)) for x_i in x]) @ P",
    here="samples.project(key, dim)",
    needs=("per_sample",),
    note="`P`, which the key stands for, is never there: the factors are sketched.",
)
def per_sample_projections():
    """Five samples of two layers; `P` is read off from unit gradients, given as they are."""
    import torch

    import funcgrad as fg

    params = {"b": torch.randn(4), "v": torch.randn(4, 2), "w": torch.randn(3, 4)}
    params = {name: p.requires_grad_() for name, p in params.items()}
    x = torch.randn(5, 2, 3)

    def gradient(x):
        loss = (torch.tanh(x @ params["w"] + params["b"]) @ params["v"]).sin().sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, params.values())])

    theirs = torch.stack([gradient(x_i) for x_i in x])

    key, dim = jax.random.key(0), 8
    arrays = jax.tree.map(lambda t: jnp.asarray(t.detach().numpy()), params)
    flat, like_params = jax.flatten_util.ravel_pytree(arrays)

    def given(p, row):
        pairs = zip(jax.tree.leaves(p), jax.tree.leaves(row), strict=True)
        return sum(jnp.sum(a * b) for a, b in pairs)

    def ours(p, x):
        return jnp.sin(jnp.tanh(x @ p["w"] + p["b"][None]) @ p["v"]).sum()

    units = jax.vmap(like_params)(jnp.eye(flat.size))
    matrix = fg.per_sample(given)(arrays, units).project(key, dim)
    roads = {
        road: jax.jit(fg.per_sample(ours, road=road))(arrays, jnp.asarray(x.numpy()))
        for road in ("gram", "materialize")
    }

    return agree(
        factored=(theirs @ torch.tensor(matrix.tolist()), roads["gram"].project(key, dim)),
        formed=(theirs @ torch.tensor(matrix.tolist()), roads["materialize"].project(key, dim)),
    )


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
        "per_sample.py",
    )

    return agree(
        torch_sum=(silent.sum(), 0),
        torch_batch=(batch, [8]),
        said={"here": refused},
    )
