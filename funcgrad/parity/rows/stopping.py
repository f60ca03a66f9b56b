"""Rows of section 4: detach, no_grad, freezing, and the moving average of a teacher."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import funcgrad as fg
from funcgrad.parity._table import agree, error_of, row


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


@row(
    "stopping.no_grad",
    concept="no_grad block and decorator",
    torch="with torch.no_grad(): y = fun(x)",
    here="fg.no_grad(fun)(x)",
    needs=("no_grad",),
    note="Same value, no gradient, no tangent, nothing saved for backward.",
)
def no_grad():
    """A target of the weights' own, block and decorator; and the numbers kept for backward."""
    import torch

    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    w = torch.tensor([[0.5, -0.2], [0.1, 0.3]], requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        with torch.no_grad():
            target = torch.tanh(torch.tanh(x @ w) @ w)
        loss = (x @ w * target).sum()
    loss.backward()
    # Behind `x @ w` it is x, behind `* target` the target.
    theirs = sum(t.numel() for t in kept)

    @fg.no_grad
    def teach(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    def distance(w):
        return (x_ @ w * teach(x_, w)).sum()

    x_, w_ = jnp.array(x.numpy()), jnp.array(w.detach().numpy())
    value, grad = jax.value_and_grad(distance)(w_)
    _, tangent = jax.jvp(distance, (w_,), (w_,))
    residuals = jax.tree.leaves(jax.eval_shape(lambda w: jax.vjp(distance, w)[1], w_))

    return agree(
        value=(loss, value),
        grad=(w.grad, grad),
        tangent=((w * w.grad).sum(), tangent),
        numbers_kept=(theirs, sum(leaf.size for leaf in residuals), 8),
    )


@row(
    "stopping.set_grad_enabled",
    concept="set_grad_enabled(flag), nested",
    torch="with torch.set_grad_enabled(flag): ...",
    here="fg.set_grad_enabled(flag)(fun)(x)",
    needs=("set_grad_enabled",),
    note="The innermost wins, as in torch.",
)
def set_grad_enabled():
    """Either flag alone, and True within False: what is computed between has no gradient."""
    import torch

    def nested(x, between, enabled):
        def outer():
            a = 3 * x
            return between(True)(lambda: a * x)()

        return between(False)(outer)() + enabled(lambda: x**2)()

    theirs = []
    for flag in (True, False):
        x = torch.tensor(2.0, requires_grad=True)
        nested(x, torch.set_grad_enabled, torch.set_grad_enabled(flag)).backward()
        theirs.append(x.grad)

    ours = [
        jax.grad(lambda x, flag: nested(x, fg.set_grad_enabled, fg.set_grad_enabled(flag)))(2.0, f)
        for f in (True, False)
    ]

    return agree(grads=(theirs, ours, [6 + 4, 6]))


@row(
    "stopping.inference_mode",
    concept="inference_mode",
    torch="with torch.inference_mode(): ...",
    here="fg.inference_mode(fun)(x)",
    needs=("inference_mode",),
    note="Differentiating through it raises, with the source line.",
)
def inference_mode():
    """w times what was predicted from w: torch raises when it would save it, JAX at the call."""
    import torch

    def theirs():
        w = torch.tensor(2.0, requires_grad=True)
        with torch.inference_mode():
            predicted = torch.sin(w)
        (w * predicted).backward()

    def ours(w):
        return w * fg.inference_mode(jnp.sin)(w)

    said = {
        "torch": error_of(theirs, RuntimeError, "Inference tensors cannot be saved for backward"),
        "here": error_of(lambda: jax.grad(ours)(2.0), TypeError, "stopping.py"),
        "here, forward": error_of(
            lambda: jax.jvp(ours, (2.0,), (1.0,)), TypeError, "being differentiated"
        ),
    }
    with torch.inference_mode():
        value = torch.sin(torch.tensor(2.0))

    return agree(value=(value, fg.inference_mode(jnp.sin)(2.0)), said=said)


@row(
    "stopping.freeze",
    concept="requires_grad_(False), frozen embedding",
    torch="embed.weight.requires_grad_(False)",
    here="fg.freeze('embed').grad(loss)(params)",
    needs=("freeze", "clip_by_total_norm"),
    note="One specification for gradient, clip norm, weight decay and optimiser state.",
)
def freeze():
    """Ten steps of clipped SGD with momentum and decay; a frozen weight of large slope."""
    import torch

    embed, head = [[1.0, -2.0], [0.5, -0.0], [3.0, 1.0]], [[0.3], [-0.7]]
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(embed))
        model[1].weight.copy_(torch.tensor(head).T)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    norms = []
    for _ in range(10):
        optimizer.zero_grad()
        (model(torch.tensor([0, 2])) ** 2).sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()

    frozen = fg.freeze("embed")
    params: Any = {"embed": jnp.array(embed), "head": jnp.array(head)}
    loss = lambda p: ((p["embed"][jnp.array([0, 2])] @ p["head"]) ** 2).sum()
    clip, decay = fg.clip_by_total_norm(1.0, eps=1e-6), optax.add_decayed_weights(0.5)
    tx = frozen.optimizer(optax.chain(clip, decay, optax.sgd(0.1, momentum=0.9)))
    state: Any = tx.init(params)
    ours = []
    for _ in range(10):
        grads = frozen.grad(loss)(params)
        ours.append(optax.tree.norm(grads))
        updates, state = tx.update(grads, state, params)
        params = dict(optax.apply_updates(params, updates))

    numbers = sum(s["momentum_buffer"].numel() for s in optimizer.state.values())
    held = sum(leaf.size for leaf in jax.tree.leaves(state[1:]))
    same = np.asarray(params["embed"]).tobytes() == model[0].weight.numpy().tobytes()
    return agree(
        head=(model[1].weight.T, params["head"]),
        norms=(norms, ours),
        embed_keeps_its_bits=(True, same),
        optimiser_state=(numbers, held, 2),
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
