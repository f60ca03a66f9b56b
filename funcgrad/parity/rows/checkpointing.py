"""Rows of section 6: computing again instead of keeping."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from funcgrad.parity._table import agree, error_of, row


@row(
    "checkpointing.checkpoint",
    concept="checkpoint(use_reentrant=False)",
    torch="checkpoint(fun, x, use_reentrant=False)",
    here="jax.checkpoint(fun)(x)",
    note="Bit-equal, executed once forward and once more in backward.",
)
def checkpoint():
    """Value, gradient and second derivative bit for bit, and two executions."""
    import torch
    from torch.utils.checkpoint import checkpoint

    calls = []

    def theirs(x):
        calls.append(x)
        return x.sin() * x.exp()

    t = torch.tensor(1.5, requires_grad=True)
    torch.autograd.grad(checkpoint(theirs, t, use_reentrant=False), t)
    executed = len(calls)
    plain, again = [], []
    for y, orders in (
        (theirs(t), plain),
        (checkpoint(theirs, t, use_reentrant=False), again),
    ):
        (first,) = torch.autograd.grad(y, t, create_graph=True)
        orders.extend([y, first, *torch.autograd.grad(first, t)])

    def ours(x):
        jax.debug.callback(lambda: ran.append(1))
        return jnp.sin(x) * jnp.exp(x)

    ran: list[int] = []
    saved, remat = (
        [f(1.5), jax.grad(f)(1.5), jax.grad(jax.grad(f))(1.5)] for f in (ours, jax.checkpoint(ours))
    )
    jax.effects_barrier()
    ran.clear()
    jax.grad(jax.checkpoint(ours))(1.5)
    jax.effects_barrier()

    bit_equal = (plain == again, saved == remat, True)
    return agree(executions=(executed, len(ran), 2), bit_equal=bit_equal, values=(plain, saved))


@row(
    "checkpointing.nested",
    concept="checkpoint inside a checkpoint",
    torch="checkpoint(outer, x, use_reentrant=False)",
    here="jax.checkpoint(outer)(x)",
    note="The inner runs three times, the outer twice.",
)
def nested():
    """Executions of an inner checkpoint within an outer one: inner 3, outer 2."""
    import torch
    from torch.utils.checkpoint import checkpoint

    calls = []

    def inner(x):
        calls.append("inner")
        return x.sin() * x

    def outer(x):
        calls.append("outer")
        return checkpoint(inner, x, use_reentrant=False).sin()

    x = torch.tensor(1.0, requires_grad=True)
    checkpoint(outer, x, use_reentrant=False).backward()

    ran = []

    @jax.checkpoint
    def inside(x):
        jax.debug.callback(lambda: ran.append("inner"))
        return jnp.sin(x) * x

    @jax.checkpoint
    def outside(x):
        jax.debug.callback(lambda: ran.append("outer"))
        return jnp.sin(inside(x))

    grad = jax.grad(outside)(1.0)
    jax.effects_barrier()

    return agree(
        inner=(calls.count("inner"), ran.count("inner"), 3),
        outer=(calls.count("outer"), ran.count("outer"), 2),
        grad=(x.grad, grad),
    )


@row(
    "checkpointing.sequential",
    concept="checkpoint_sequential",
    torch="checkpoint_sequential(funs, segments, x)",
    here="fg.checkpoint_sequential(funs, segments)(x)",
    needs=("checkpoint_sequential",),
    note="Five functions in two segments run 01234, then 01 again.",
)
def sequential():
    """The schedule, read from callbacks, and the gradient of five layers in two segments."""
    import torch
    from torch.utils.checkpoint import checkpoint_sequential

    import funcgrad as fg

    theirs, ours = [], []
    layer = lambda i: lambda x: (theirs.append(i), x.sin())[1]
    x = torch.tensor(1.0, requires_grad=True)
    y = checkpoint_sequential([layer(i) for i in range(5)], 2, x, use_reentrant=False)
    y.backward()

    def step(i):
        def run(x):
            jax.debug.callback(lambda: ours.append(i), ordered=True)
            return jnp.sin(x)

        return run

    grad = jax.grad(fg.checkpoint_sequential([step(i) for i in range(5)], 2))(1.0)
    jax.effects_barrier()

    return agree(ran=(theirs, ours, [0, 1, 2, 3, 4, 0, 1]), grad=(x.grad, grad))


@row(
    "checkpointing.rng",
    concept="preserve_rng_state",
    torch="checkpoint(dropout, x, preserve_rng_state=True)",
    here="jax.checkpoint(lambda x: dropout(key, x))(x)",
    note="A key is a value: the second run draws the same mask, nothing to restore.",
)
def rng():
    """The gradient's mask is the forward's mask, on both sides, though the draws differ."""
    import torch
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(32, requires_grad=True)
    y = checkpoint(lambda x: torch.nn.functional.dropout(x, 0.5), x, use_reentrant=False)
    y.sum().backward()

    def dropout(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x / 0.5, 0.0)

    value, pull = jax.vjp(jax.checkpoint(lambda x: dropout(jax.random.key(0), x)), jnp.ones(32))

    # A linear function of ones: the gradient equals the value exactly when the masks agree.
    return agree(torch=(y, x.grad), here=(value, pull(jnp.ones(32))[0]))


@row(
    "checkpointing.rng_nnx",
    concept="a stateful generator inside a checkpoint",
    torch="checkpoint(dropout_module, x)",
    here="nnx.remat(fun)(model, x)",
    needs=("checkpoint",),
    note="NNX Rngs count their draws: fg.checkpoint refuses the change, nnx.remat carries it.",
)
def rng_nnx():
    """An NNX dropout: refused by ``jax.checkpoint``, the same mask by ``nnx.remat``."""
    import torch
    from flax import nnx
    from torch.utils.checkpoint import checkpoint

    import funcgrad as fg

    x = torch.ones(32, requires_grad=True)
    y = checkpoint(torch.nn.Dropout(0.5), x, use_reentrant=False)
    y.sum().backward()

    def fun(model, x):
        y = model(x)
        return y.sum(), y

    make = lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    model = make()
    closed = jax.checkpoint(lambda x: model(x).sum())
    refused = error_of(lambda: jax.grad(closed)(jnp.ones(32)), Exception, "trace level")
    (_, value), grad = nnx.value_and_grad(nnx.remat(fun), argnums=1, has_aux=True)(
        make(), jnp.ones(32)
    )

    # As an argument, JAX takes the model apart: the draw that it counts is lost, and the next
    # call repeats the mask. fg.checkpoint refuses that.
    lost, ones = make(), jnp.ones(32)
    masks = [jax.checkpoint(lambda model, x: model(x))(lost, ones) for _ in range(2)]
    argument = fg.checkpoint(lambda model, x: model(x))
    changed = error_of(lambda: argument(make(), ones), ValueError, "count")

    return agree(
        torch=(y, x.grad),
        here=(value, grad),
        lost=(masks[0], masks[1]),
        said={"jax.checkpoint": refused, "fg.checkpoint": changed},
    )


@row(
    "checkpointing.selective",
    concept="selective checkpointing (SAC)",
    torch="checkpoint(fun, x, context_fn=sac_contexts)",
    here="fg.checkpoint(fun, policy=fg.policies.save_dots())",
    needs=("checkpoint", "policies.save_dots", "policies.save_names"),
    note="By operation, by name (unknown names refused), offloaded, combined.",
)
def selective():
    """Matrix products that an attention layer runs again: none, the batched or all are kept."""
    import torch
    from torch.utils import checkpoint as tc
    from torch.utils._python_dispatch import TorchDispatchMode

    import funcgrad as fg

    def theirs(w, x):
        q, k, v = (x @ m for m in w)
        return torch.tanh(torch.softmax(q @ k.transpose(-1, -2), -1) @ v).sum()

    def ours(w, x):
        q, k, v = (x @ m for m in w)
        weights = checkpoint_name(jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2)), "weights")
        return jnp.tanh(weights @ v).sum()

    w, x = torch.randn(3, 4, 4), torch.randn(2, 3, 4)
    mm, bmm = torch.ops.aten.mm.default, torch.ops.aten.bmm.default

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.count += op in (mm, bmm)
            return op(*args, **(kwargs or {}))

    def count(*saved):
        def policy(ctx, op, *args, **kwargs):
            keep = op in saved
            return tc.CheckpointPolicy.MUST_SAVE if keep else tc.CheckpointPolicy.MUST_RECOMPUTE

        contexts = lambda: tc.create_selective_checkpoint_contexts(policy)
        leaf = w.clone().requires_grad_()
        with Products() as counter:
            tc.checkpoint(theirs, leaf, x, use_reentrant=False, context_fn=contexts).backward()
        return counter.count, leaf.grad

    weights, inputs = jnp.asarray(w.numpy()), jnp.asarray(x.numpy())

    def products(policy):
        grad = jax.grad(fg.checkpoint(ours, policy=policy))
        return str(jax.make_jaxpr(grad)(weights, inputs)).count("dot_general["), grad

    policies = fg.policies
    chosen = policies.save_nothing(), policies.save_dots(batched=False), policies.save_dots()
    here = [products(policy) for policy in chosen]
    there = [count(*saved) for saved in ((), (mm,), (mm, bmm))]
    misspelt = policies.save_names("wieghts")
    refused = error_of(lambda: products(misspelt), ValueError, "Near it: weights")

    return agree(
        products=([n for n, _ in there], [n for n, _ in here]),
        recomputed=([n - there[2][0] for n, _ in there], [5, 2, 0]),
        grads=([g for _, g in there], [grad(weights, inputs) for _, grad in here]),
        said={"a misspelt name": refused},
    )


@row(
    "checkpointing.budget",
    concept="a memory budget for activations",
    torch="activation_memory_budget = 0.5",
    here="fg.checkpoint(fun, budget=0.5)",
    needs=("checkpoint", "plan"),
    note="Bytes or a fraction; never more work again than torch's solver, the gradient the same.",
)
def budget():
    """Layers of unequal width: products run again against torch's own solver; the gradient."""
    import torch
    from torch._functorch._activation_checkpointing.knapsack import dp_knapsack

    import funcgrad as fg

    widths, rows = [8, 32, 4, 16, 64, 8, 24], 16
    weights = [torch.randn(m, n) / m for m, n in zip(widths, widths[1:], strict=False)]
    x = torch.randn(rows, widths[0])
    inner = widths[1:]
    # torch's items: bytes over all bytes, and the time to make each again.
    memory = [n / sum(inner) for n in inner]
    work = [float(m * n) for m, n in zip(widths, widths[1:], strict=False)]
    fractions = [0.0, 0.1, 0.25, 0.4, 0.5, 0.75, 0.9, 1.0]
    theirs = [sum(work[i] for i in dp_knapsack(memory, work, b)[2]) / sum(work) for b in fractions]

    def torch_loss(weights):
        h = x
        for w in weights:
            h = torch.tanh(h @ w)
        return h.sum()

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x.sum()

    leaves = [w.clone().requires_grad_() for w in weights]
    grads = torch.autograd.grad(torch_loss(leaves), leaves)
    arrays, x_array = [jnp.asarray(w.numpy()) for w in weights], jnp.asarray(x.numpy())
    nbytes = [int(b * sum(inner) * rows * 8) for b in fractions]
    curve = fg.plan(loss, nbytes, argnums=0)(arrays, x_array)
    ours = [plan.recompute_matmul for plan in curve]
    planned = jax.grad(fg.checkpoint(loss, budget=0.5))(arrays, x_array)
    more = [max(0.0, here - there) for here, there in zip(ours, theirs, strict=True)]

    return agree(
        more_work_than_torch=(more, [0.0] * len(more)),
        within=([p.nbytes <= b for p, b in zip(curve, nbytes, strict=True)], [True] * len(nbytes)),
        gradient=tuple(
            jnp.concatenate([jnp.ravel(jnp.asarray(g)) for g in side])
            for side in ([g.numpy() for g in grads], planned)
        ),
        said={"products run again": {"torch": theirs, "here": ours}},
    )


@row(
    "checkpointing.saved_tensors_hooks",
    concept="saved_tensors_hooks, save_on_cpu",
    torch="saved_tensors_hooks(pack, unpack)",
    here="fg.saved_tensor_hooks(fun, pack, unpack)",
    needs=("saved_tensor_hooks", "packs.int8.pack"),
    note="Keep residuals as bfloat16, int8, or on the host; leaves only when asked.",
)
def saved_tensor_hooks():
    """What is kept times ten: 20, 40, 60, its derivative 20; int8 within 1/254 of the row."""
    import torch

    import funcgrad as fg

    tenfold = lambda x: 10 * x, lambda x: x
    a = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(*tenfold):
        (first,) = torch.autograd.grad((a * a).sum(), a, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), a)

    # torch packs leaves too; here an argument is kept by its owner, unless one asks.
    product = lambda a: (a * a).sum()
    hooked = fg.saved_tensor_hooks(product, *tenfold, where=lambda saved: True)
    grad = jax.grad(hooked)
    points = jnp.array([1.0, 2.0, 3.0])
    left = jax.grad(fg.saved_tensor_hooks(product, *tenfold))(points)

    x = torch.randn(8, 64)

    class Int8(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self):
            scale = lambda x: x.abs().amax(-1, keepdim=True) / 127
            super().__init__(
                lambda x: ((x / scale(x)).round().to(torch.int8), scale(x)),
                lambda packed: packed[0].to(packed[1].dtype) * packed[1],
            )

    leaf = x.clone().requires_grad_()
    with Int8():
        leaf.sin().sin().sum().backward()
    twice = lambda x: jnp.sin(jnp.sin(x)).sum()
    inputs = jnp.asarray(x.numpy())
    small = fg.saved_tensor_hooks(twice, *fg.packs.int8)
    sizes = [fg.saved_tensors(fun)(inputs).bytes for fun in (twice, small)]
    exact = jax.grad(twice)(inputs)
    bound = 3 / 254  # two factors below one, each within 1/254 of its row's largest
    near = [float(abs(grad - exact).max()) < bound for grad in (jax.grad(small)(inputs),)]
    torch_near = float(abs(leaf.grad.numpy() - exact).max()) < bound

    return agree(
        first=(first, grad(points), [20, 40, 60]),
        second=(second, jax.grad(lambda a: grad(a).sum())(points), [20, 20, 20]),
        leaves_left_alone=(left, [2, 4, 6]),
        within_the_bound=(torch_near, near[0], True),
        bytes=(sizes, [2 * 8 * 64 * 8, 2 * 8 * (64 + 8)]),
    )


@row(
    "checkpointing.compute",
    concept="about 33% more compute",
    torch="FlopCounterMode()",
    here="jax.make_jaxpr(jax.grad(jax.checkpoint(fun)))",
    note="Three layers: 8 matrix products without, 11 with; 33% as the depth grows.",
)
def compute():
    """Matrix products of a gradient, three tanh layers, with and without checkpointing."""
    import torch
    from torch.utils.checkpoint import checkpoint
    from torch.utils.flop_counter import FlopCounterMode

    def theirs(ws, x):
        for w in ws:
            x = torch.tanh(x @ w)
        return x.sum()

    def flops(run):
        ws = [torch.eye(4, requires_grad=True) for _ in range(3)]
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(run(ws, torch.ones(4, 4)), ws)
        return counter.get_total_flops() / (2 * 4**3)

    def ours(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x.sum()

    def products(fun):
        jaxpr = jax.make_jaxpr(jax.grad(fun))([jnp.eye(4)] * 3, jnp.ones((4, 4)))
        return str(jaxpr).count("dot_general[")

    again = flops(lambda ws, x: checkpoint(theirs, ws, x, use_reentrant=False))
    return agree(
        without=(flops(theirs), products(ours), 8),
        checkpointed=(again, products(jax.checkpoint(ours)), 11),
    )
