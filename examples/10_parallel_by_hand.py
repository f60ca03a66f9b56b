# %% [markdown]
# # How do I write data, tensor and pipeline parallelism by hand?
#
# *In torch each is a few `autograd.Function`s and hooks around `dist.all_reduce`. What are they
# here, and how do I know that no gradient is off by the number of devices?*
#
# A scheme is a loss that each device runs; `fg.assert_matches_unsharded` runs it on one as well. In
# more processes (on a cluster MASTER_ADDR is the first host's, and the line with XLA_FLAGS goes):
#
#     for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_ADDR=localhost:29500 python THIS & done; wait

# %% Eight devices, in one process or more.
import os

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={8 // world}")

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

import funcgrad as fg
from funcgrad import collectives as co

if world > 1:
    jax.distributed.initialize(os.environ["MASTER_ADDR"], world, rank)
rng, P = np.random.default_rng(0), jax.P
draw = lambda *shape: (rng.standard_normal(shape) / 2).astype(np.float32)
mean_over_data = lambda own: co.reduce(jnp.mean(own), "data") / jax.lax.axis_size("data")


# %% Data parallel as DDP does it: hooks reduce each bucket where its gradients are born.
def ddp(layers, x, y):
    for bucket in (layers[:2], layers[2:]):
        for w in fg.grad_hook(jnp.stack(bucket), lambda g: jax.lax.psum(g, "data")):
            x = jax.nn.relu(x @ w)
    return mean_over_data((x - y) ** 2)


# %% Fully sharded: a layer is gathered when it is used, its gradient reduced and scattered.
def fsdp(layers, x, y):
    for w in layers:
        x = jax.nn.relu(x @ co.all_gather(w, "data"))
    return mean_over_data((x - y) ** 2)


# %% A transformer block, heads and hidden units in parts; between them the sequence is in parts.
def block(p, x):
    scale = co.copy(p["scale"], "tp")  # each device scales its own tokens
    norm = lambda x, i: x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale[i]
    q, k, v = jnp.einsum("sd,dnhe->nhse", co.all_gather(norm(x, 0), "tp"), p["qkv"])
    scores = q @ k.mT / 4 + jnp.where(jnp.tri(q.shape[1]) == 0, -1e9, 0)
    heads = jnp.einsum("hse,hed->sd", jax.nn.softmax(scores) @ v, p["out"])
    x = x + co.reduce_scatter(heads, "tp")
    h = jax.nn.relu(co.all_gather(norm(x, 1), "tp") @ p["up"])
    return co.reduce(((x + co.reduce_scatter(h @ p["down"], "tp")) ** 2).sum(), "tp")


# %% A pipeline: each stage has half the layers, works on a micro-batch, hands it to the next.
def pipeline(layers, x, y):
    stage, stages = jax.lax.axis_index("pp"), jax.lax.axis_size("pp")
    x, y, layers = co.copy(x, "pp"), co.copy(y, "pp"), co.copy(layers, "data")

    def tick(come, t):
        h = jnp.where(stage == 0, x[jnp.minimum(t, len(x) - 1)], come)
        for w in layers:
            h = jax.nn.relu(h @ w)
        return co.shift(h, "pp"), h

    _, out = jax.lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(len(x) + stages - 1))
    error = jnp.where(stage == stages - 1, out[stages - 1 :] - y, 0)
    return mean_over_data(co.reduce(error, "pp") ** 2)


# %% What a program computes and sends, in its order.
COLORS = {"product": "0.8", "sum": "C3", "gather": "C0", "sum and scatter": "C2", "pass on": "C1"}
KINDS = {"dot_general": "product", "all_gather": "gather", "reduce_scatter": "sum and scatter"}
KINDS |= {"psum": "sum", "psum_invariant": "sum", "collective_reduce": "sum", "ppermute": "pass on"}


def operations(program):
    for eqn in getattr(program, "eqns", ()):
        yield from filter(None, [KINDS.get(eqn.primitive.name)])
        for body in jax.tree.leaves(eqn.params):
            yield from operations(body)


# %% All have the values and gradients of one device, whatever the processes they are on.
mesh_of = lambda shape, *names: jax.sharding.Mesh(np.reshape(jax.devices(), shape), names)
layers, x, y = [draw(8, 8) for _ in range(4)], draw(16, 8), draw(16, 8)
shapes = {"qkv": (16, 3, 8, 4), "out": (8, 4, 16), "up": (16, 32), "down": (32, 16)}
params = {"scale": draw(2, 16)} | {name: draw(*shape) for name, shape in shapes.items()}
rows, micro, up, down = P("data"), P(None, "data"), P(None, "tp"), P("tp")
parts = {"scale": P(), "qkv": P(None, None, "tp"), "out": down, "up": up, "down": down}
stack = np.stack(layers), draw(4, 16, 8), draw(4, 16, 8)
schemes = {
    "DDP, two buckets": (ddp, mesh_of(8, "data"), (P(), rows, rows), (layers, x, y), False),
    "FSDP": (fsdp, mesh_of(8, "data"), (rows, rows, rows), (layers, x, y), True),
    "tensor, sequence": (block, mesh_of(8, "tp"), (parts, P("tp")), (params, draw(16, 16)), True),
    "two stages": (pipeline, mesh_of((2, 4), "pp", "data"), (P("pp"), micro, micro), stack, True),
}
steps = {}
for name, (fun, mesh, specs, args, check_vma) in schemes.items():
    fg.assert_matches_unsharded(fun, mesh, specs, check_vma=check_vma)(*args)
    how = {"mesh": mesh, "in_specs": specs, "out_specs": specs[0], "check_vma": check_vma}
    steps[name] = list(operations(jax.make_jaxpr(jax.shard_map(jax.grad(fun), **how))(*args)))

# %% Megatron's f, `co.copy`, in torch, here with one rank.
if world == 1 and importlib.util.find_spec("torch"):
    import torch
    from torch import distributed as dist

    class Copy(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.view_as(x))
        backward = staticmethod(lambda ctx, g: (dist.all_reduce(g := g.clone()), g)[1])

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.tanh(Copy.apply(x_torch := torch.tensor(x, requires_grad=True))).sum().backward()
    dist.destroy_process_group()
    np.testing.assert_allclose(jax.grad(lambda x: jnp.tanh(x).sum())(x), x_torch.grad, 1e-4, 1e-5)

# %% The picture: what is sent between the products of a step.
if rank == 0:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(9.5, 2.8), layout="constrained")).subplots()
    for kind, color in COLORS.items():
        at = [(i, n) for n, s in enumerate(steps.values()) for i, op in enumerate(s) if op == kind]
        axes.scatter(*zip(*at, strict=True), c=color, marker="s", s=90, label=kind)
    axes.set(xlabel="operations of forward and backward, in order", ylim=(3.6, -0.6))
    axes.set_yticks(range(len(steps)), steps)
    axes.legend(frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.4, 1))
    os.makedirs(folder := os.path.join(os.path.dirname(__file__), "_out"), exist_ok=True)
    figure.savefig(os.path.join(folder, "10_parallel_by_hand.png"), dpi=110)

# %% What must hold.
assert steps["DDP, two buckets"].count("sum") == 3  # two buckets and the loss
assert steps["FSDP"].count("sum and scatter") == steps["FSDP"].count("gather") == len(layers)
