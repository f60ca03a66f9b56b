"""Rows of section 7: norms, clipping, micro-batches and the step by hand."""

import jax
import jax.numpy as jnp
import optax

from funcgrad.parity._table import agree, error_of, row


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


@row(
    "clipping.clip_grad_norm",
    concept="clip_grad_norm_",
    torch="clip_grad_norm_(params, 1.0)",
    here="fg.clip_grad_norm(grads, 1.0)",
    needs=("clip_grad_norm",),
    note="Returns the clipped tree and the norm; torch's factor to the bit with eps=1e-6.",
)
def clip_grad_norm():
    """[3, 4] with [12] to the bit, and orders from ½ to inf, for which sums may be rounded."""
    import torch

    import funcgrad as fg

    def theirs(norm_type):
        params = [torch.nn.Parameter(torch.zeros(n)) for n in (2, 1)]
        params[0].grad, params[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0, norm_type=norm_type)
        return [float(x) for x in (norm, *params[0].grad, *params[1].grad)]

    def ours(order):
        grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])}
        clipped, norm = fg.clip_grad_norm(grads, 1.0, order=order, eps=1e-6)
        return [float(x) for x in (norm, *clipped["w"], *clipped["b"])]

    known = [13, 3 / 13.000001, 4 / 13.000001, 12 / 13.000001]
    orders = [0.5, 1.0, 3.0, float("inf"), -float("inf")]
    return agree(
        bits=(theirs(2.0) == ours(2.0), True),
        two=(theirs(2.0), ours(2.0), known),
        orders=([theirs(p) for p in orders], [ours(p) for p in orders]),
        tolerance=1e-12,
    )


@row(
    "clipping.error_if_nonfinite",
    concept="error_if_nonfinite",
    torch="clip_grad_norm_(params, 1.0, error_if_nonfinite=True)",
    here="fg.clip_grad_norm(grads, 1.0, nonfinite='raise')",
    needs=("clip_grad_norm",),
    note="Raise, zero or keep; under jit, where a value cannot be looked at: zero or keep.",
)
def nonfinite():
    """Both raise, here with the leaf's name; kept as in torch; or zeros."""
    import torch

    import funcgrad as fg

    def clip(value, **options):
        p = torch.nn.Parameter(torch.zeros(2))
        p.grad = torch.tensor([value, 1.0])
        return [torch.nn.utils.clip_grad_norm_([p], 1.0, **options), *p.grad]

    def kept(value, **options):
        clipped, norm = fg.clip_grad_norm({"w": jnp.array([value, 1.0])}, 1.0, **options)
        return [norm, *clipped["w"]]

    nan, inf = float("nan"), float("inf")
    said = {
        "torch": error_of(lambda: clip(nan, error_if_nonfinite=True), RuntimeError, "non-finite"),
        "here": error_of(lambda: kept(nan, nonfinite="raise"), FloatingPointError, "grads['w']"),
    }
    return agree(
        nan=(clip(nan), kept(nan)),
        inf=(clip(inf), kept(inf)),
        zeros=(kept(nan, nonfinite="zero"), [nan, 0, 0]),
        said=said,
    )


@row(
    "clipping.overflow",
    concept="a norm that overflows",
    torch="clip_grad_norm_(params, 1.0)  # grads of 1e20",
    here="fg.clip_grad_norm(grads, 1.0)",
    needs=("clip_grad_norm",),
    note="In torch and Optax large gradients become zeros; here the norm is right.",
    differs=True,
)
def overflow():
    """Four of 1e20 in float32, a hundred of 300 in float16."""
    import torch

    import funcgrad as fg

    def theirs(value, n, dtype):
        p = torch.nn.Parameter(torch.zeros(n, dtype=dtype))
        p.grad = torch.full((n,), value, dtype=dtype)
        norm = torch.nn.utils.clip_grad_norm_([p], 1.0)
        return [float(norm), float(p.grad[0])]

    def with_optax(value, n, dtype):
        grads = jnp.full(n, value, dtype)
        clipped, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
        return jnp.asarray(clipped)[0]

    def ours(value, n, dtype):
        clipped, norm = fg.clip_grad_norm(jnp.full(n, value, dtype), 1.0)
        return [float(norm) / value, float(clipped[0])]

    return agree(
        torch=(theirs(1e20, 4, torch.float32), [float("inf"), 0]),
        optax=(with_optax(1e20, 4, jnp.float32), with_optax(300.0, 100, jnp.float16), 0),
        here=(ours(1e20, 4, jnp.float32), [2, 0.5]),
        float16=(ours(300.0, 100, jnp.float16), [10, 0.1]),
        tolerance=1e-4,
    )


@row(
    "clipping.distributed",
    concept="norm of sharded gradients",
    torch="dist.all_reduce(norm**2)",
    here="jax.shard_map(fg.clip_grad_norm, ...)",
    needs=("clip_grad_norm",),
    note="Sharded leaves are reduced once, replicated leaves counted once: 12.49, not 14.28.",
)
def distributed():
    """The reduction of two ranks by hand; ours on two devices where there are two."""
    import torch

    import funcgrad as fg

    parts, copy = [6.0, 6.0, 6.0, 0.0], [4.0, 4.0, 4.0]
    ranks = [torch.tensor(parts[:2]), torch.tensor(parts[2:])]
    theirs = torch.sqrt(sum((part**2).sum() for part in ranks) + (torch.tensor(copy) ** 2).sum())

    spec = jax.sharding.PartitionSpec
    n = min(2, jax.device_count())
    mesh = jax.make_mesh((n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"parts": spec("data"), "copy": spec()}
    norm_of = lambda grads: fg.clip_grad_norm(grads, 1.0).norm
    run = jax.shard_map(norm_of, mesh=mesh, in_specs=(specs,), out_specs=spec())
    norm = run({"parts": jnp.array(parts), "copy": jnp.array(copy)})
    return agree(norm=(theirs, norm, 156**0.5))


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


@row(
    "clipping.micro_batches",
    concept="micro-batches, weighted",
    torch="(loss_sum(micro) / tokens).backward()",
    here="fg.accumulate_grads(fun, microbatch_size)",
    needs=("accumulate_grads",),
    note="Sum of losses over sum of weights: equal to the full batch, uneven tail and all.",
)
def micro_batches():
    """Samples of 1, 3 and 2 tokens, two at a time, each token of equal weight."""
    import torch

    import funcgrad as fg

    data, counts = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], [1, 3, 2]

    w, x = torch.tensor(2.0, requires_grad=True), torch.tensor(data)
    keep = torch.arange(3) < torch.tensor(counts)[:, None]
    for rows in (slice(0, 2), slice(2, 3)):
        ((((x[rows] * w - 1) ** 2) * keep[rows]).sum() / sum(counts)).backward()

    def losses_and_tokens(w, x, counts):
        keep = jnp.arange(3)[None] < counts[:, None]
        return jnp.where(keep, (x * w - 1) ** 2, 0).sum(1), counts

    batch = jnp.array(data), jnp.array(counts)
    out = fg.accumulate_grads(losses_and_tokens, 2)(jnp.array(2.0), *batch)

    def full(w):
        losses, tokens = losses_and_tokens(w, *batch)
        return losses.sum() / tokens.sum().astype(losses.dtype)

    grad = jax.grad(full)(jnp.array(2.0))
    return agree(grad=(w.grad, out.grads, grad), tokens=(out.weight, 6))


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
