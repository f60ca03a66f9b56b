"""Rows of section 6: computing again instead of keeping."""

import jax
import jax.numpy as jnp

from funcgrad.parity._table import Row, agree, error_of, row


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


sequential = Row(
    "checkpointing.sequential",
    "checkpoint_sequential",
    "checkpoint_sequential(funs, segments, x)",
    "fg.checkpoint_sequential(funs, segments)(x)",
    needs=("checkpoint_sequential",),
    note="Five functions in two segments run 01234, then 01 again.",
)


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
    note="NNX Rngs count their draws: jax.checkpoint refuses the change, nnx.remat carries it.",
)
def rng_nnx():
    """An NNX dropout: refused by ``jax.checkpoint``, the same mask by ``nnx.remat``."""
    import torch
    from flax import nnx
    from torch.utils.checkpoint import checkpoint

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

    return agree(torch=(y, x.grad), here=(value, grad), said={"jax.checkpoint": refused})


selective = Row(
    "checkpointing.selective",
    "selective checkpointing (SAC)",
    "checkpoint(fun, x, context_fn=sac_contexts)",
    "jax.checkpoint(fun, policy=fg.policies.save_dots)",
    needs=("policies.save_dots",),
    note="By operation, by name (unknown names refused), offloaded, combined.",
)
budget = Row(
    "checkpointing.budget",
    "a memory budget for activations",
    "activation_memory_budget = 0.5",
    "fg.checkpoint(fun, budget=0.5)",
    needs=("checkpoint",),
    note="Bytes or a fraction; the planner picks what to save.",
)
saved_tensor_hooks = Row(
    "checkpointing.saved_tensors_hooks",
    "saved_tensors_hooks, save_on_cpu",
    "saved_tensors_hooks(pack, unpack)",
    "fg.saved_tensor_hooks(fun, pack, unpack)",
    needs=("saved_tensor_hooks",),
    note="Keep residuals as bfloat16, int8, or on the host.",
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
