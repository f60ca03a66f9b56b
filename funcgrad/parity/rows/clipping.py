"""Rows of section 7: norms, clipping, micro-batches and the step by hand."""

import jax
import jax.numpy as jnp
import optax

from funcgrad.parity._table import Row, agree, row


@row(
    "clipping.total_norm",
    concept="get_total_norm",
    torch="torch.nn.utils.get_total_norm(grads, norm_type)",
    here="optax.tree.norm(grads, ord=norm_type)",
    note="Orders 1, 2 and inf; all orders, without overflow: fg.clip_grad_norm.",
)
def total_norm():
    """[3, 4] with [12]: 19, 13 and 12; [3, −4] alone: 7, 5 and 4."""
    import torch

    both, one = [[3.0, 4.0], [12.0]], [[3.0, -4.0]]
    orders = (1, 2, float("inf"))

    def theirs(grads):
        return [torch.nn.utils.get_total_norm(map(torch.tensor, grads), p) for p in orders]

    def ours(grads):
        return [optax.tree.norm([jnp.array(g) for g in grads], ord=p) for p in orders]

    return agree(
        both=(theirs(both), ours(both), [19, 13, 12]), one=(theirs(one), ours(one), [7, 5, 4])
    )


clip_grad_norm = Row(
    "clipping.clip_grad_norm",
    "clip_grad_norm_",
    "clip_grad_norm_(params, 1.0)",
    "fg.clip_grad_norm(grads, 1.0)",
    needs=("clip_grad_norm",),
    note="Returns the clipped tree and the norm; any order.",
)
nonfinite = Row(
    "clipping.error_if_nonfinite",
    "error_if_nonfinite",
    "clip_grad_norm_(params, 1.0, error_if_nonfinite=True)",
    "fg.clip_grad_norm(grads, 1.0, nonfinite='raise')",
    needs=("clip_grad_norm",),
    note="Raise, zero or keep.",
)
overflow = Row(
    "clipping.overflow",
    "a norm that overflows",
    "clip_grad_norm_(params, 1.0)  # grads of 1e20",
    "fg.clip_grad_norm(grads, 1.0)",
    needs=("clip_grad_norm",),
    note="Scaled accumulation: the norm stays finite.",
)
distributed = Row(
    "clipping.distributed",
    "norm of sharded gradients",
    "dist.all_reduce(norm**2)",
    "jax.shard_map(fg.clip_grad_norm, ...)",
    needs=("clip_grad_norm",),
    note="Sharded leaves are reduced once, replicated leaves counted once.",
)


@row(
    "clipping.clip_grad_value",
    concept="clip_grad_value_",
    torch="torch.nn.utils.clip_grad_value_(params, 1.0)",
    here="optax.clip(1.0)",
    note="A NaN stays a NaN.",
)
def clip_grad_value():
    """[3, −4, 0.5, NaN] clipped to 1."""
    import torch

    p = torch.nn.Parameter(torch.zeros(4))
    p.grad = torch.tensor([3.0, -4.0, 0.5, torch.nan])
    torch.nn.utils.clip_grad_value_([p], 1.0)

    clipped, _ = optax.clip(1.0).update(jnp.array([3.0, -4.0, 0.5, jnp.nan]), optax.EmptyState())

    return agree(clipped=(p.grad, clipped, [1, -1, 0.5, float("nan")]))


@row(
    "clipping.mean_of_means",
    concept="micro-batches of unequal size",
    torch="(loss(micro) / len(micros)).backward()",
    here="sum(grad(w, m) for m in micros) / len(micros)",
    note="The mean of means is not the mean: [64, 83], not [48, 64].",
)
def mean_of_means():
    """Micro-batches of 2 and 1 with mean losses, against the full batch."""
    import torch

    data, w = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], [1.0, 2.0]

    p, x = torch.tensor(w, requires_grad=True), torch.tensor(data)
    (full,) = torch.autograd.grad(((x @ p) ** 2).mean(), p)
    for micro in (x[:2], x[2:]):
        (((micro @ p) ** 2).mean() / 2).backward()

    grad = jax.grad(lambda w, x: ((x @ w) ** 2).mean())
    w, x = jnp.array(w), jnp.array(data)
    means = (grad(w, x[:2]) + grad(w, x[2:])) / 2

    return agree(full=(full, grad(w, x), [48, 64]), means=(p.grad, means, [64, 83]))


micro_batches = Row(
    "clipping.micro_batches",
    "micro-batches, weighted",
    "(loss_sum(micro) / tokens).backward()",
    "fg.accumulate_grads(fun, microbatch)",
    needs=("accumulate_grads",),
    note="Sum of losses over sum of weights: equal to the full batch, uneven tail and all.",
)


def _sgd(steps, **options):
    """SGD of torch on the sum of p², from [1, 2] with rate 0.1."""
    import torch

    p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    opt = torch.optim.SGD([p], lr=0.1, **options)
    for _ in range(steps):
        opt.zero_grad()
        (p**2).sum().backward()
        opt.step()
    return p


def _optax(steps, opt):
    """The same with an Optax optimiser."""
    p = jnp.array([1.0, 2.0])
    state = opt.init(p)
    for _ in range(steps):
        updates, state = opt.update(jax.grad(lambda p: (p**2).sum())(p), state, p)
        p = optax.apply_updates(p, updates)
    return p


@row(
    "clipping.manual_step",
    concept="SGD step by hand",
    torch="with torch.no_grad(): p.add_(p.grad, alpha=-lr)",
    here="jax.tree.map(lambda p, g: p - lr * g, params, grads)",
    note="New parameters instead of changed ones.",
)
def manual_step():
    """One step of 0.1 on the sum of p² from [1, 2]."""
    import torch

    p = torch.tensor([1.0, 2.0], requires_grad=True)
    (p**2).sum().backward()
    with torch.no_grad():
        if p.grad is not None:
            p.add_(p.grad, alpha=-0.1)

    params = {"p": jnp.array([1.0, 2.0])}
    grads = jax.grad(lambda params: (params["p"] ** 2).sum())(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return agree(one=(p, params["p"], [0.8, 1.6]))


@row(
    "clipping.momentum",
    concept="SGD momentum",
    torch="torch.optim.SGD(params, lr, momentum=0.9)",
    here="optax.sgd(lr, momentum=0.9)",
    note="Two steps 0.46, three 0.062.",
)
def momentum():
    """Momentum 0.9, two and three steps."""
    opt = optax.sgd(0.1, momentum=0.9)
    return agree(
        two=(_sgd(2, momentum=0.9), _optax(2, opt), [0.46, 0.92]),
        three=(_sgd(3, momentum=0.9), _optax(3, opt), [0.062, 0.124]),
    )


@row(
    "clipping.nesterov",
    concept="SGD nesterov",
    torch="torch.optim.SGD(params, lr, 0.9, nesterov=True)",
    here="optax.sgd(lr, momentum=0.9, nesterov=True)",
)
def nesterov():
    """Nesterov momentum, three steps."""
    opt = optax.sgd(0.1, momentum=0.9, nesterov=True)
    return agree(three=(_sgd(3, momentum=0.9, nesterov=True), _optax(3, opt)))


@row(
    "clipping.dampening",
    concept="SGD dampening",
    torch="torch.optim.SGD(params, lr, momentum=0.9, dampening=0.5)",
    here="m = 0.9 * m + 0.5 * g",
    note="Optax has no dampening: it is this line, and torch does not damp the first step.",
)
def dampening():
    """Momentum 0.9 with dampening 0.5, two steps."""
    p, m = jnp.array([1.0, 2.0]), None
    for _ in range(2):
        g = jax.grad(lambda p: (p**2).sum())(p)
        m = g if m is None else 0.9 * m + 0.5 * g
        p = p - 0.1 * m

    return agree(two=(_sgd(2, momentum=0.9, dampening=0.5), p, [0.54, 1.08]))


@row(
    "clipping.weight_decay",
    concept="SGD weight decay",
    torch="torch.optim.SGD(params, lr, weight_decay=0.1)",
    here="optax.chain(optax.add_decayed_weights(0.1), optax.sgd(lr))",
    note="Decay enters the gradient before the momentum.",
)
def weight_decay():
    """Weight decay 0.1, two steps, and once more with momentum."""
    plain = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))
    moving = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
    return agree(
        two=(_sgd(2, weight_decay=0.1), _optax(2, plain), [0.6241, 1.2482]),
        with_momentum=(_sgd(3, weight_decay=0.1, momentum=0.9), _optax(3, moving)),
    )
