# %% [markdown]
# # What is kept for the backward pass, and who decides?
#
# *In torch I wrap each block in `checkpoint`, hope that it helps, and read the memory off the GPU.
# Can I see what is kept, and choose it?*
#
# In JAX the backward pass is a function, and what it keeps are the leaves of that function. They
# can be listed, each with the line that made it, before anything has run.

# %% Two transformer blocks of eight matrix products each.
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import funcgrad as fg

BLOCKS, BATCH, TIME, WIDTH, HEADS = 2, 4, 32, 64, 4
rng = np.random.default_rng(0)
draw = lambda *shape: (rng.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32)
mats = lambda: {"qkv": draw(3, WIDTH, WIDTH), "o": draw(WIDTH, WIDTH)}
params = [mats() | {"up": draw(WIDTH, 256), "down": draw(256, WIDTH)} for _ in range(BLOCKS)]
x = draw(BATCH, TIME, WIDTH)
norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def block(p, x):
    with jax.named_scope("attention"):
        q, k, v = ((norm(x) @ w).reshape(BATCH, TIME, HEADS, -1).swapaxes(1, 2) for w in p["qkv"])
        weights = jax.nn.softmax(q @ k.swapaxes(2, 3) / (WIDTH / HEADS) ** 0.5)
        x = x + checkpoint_name((weights @ v).swapaxes(1, 2).reshape(x.shape) @ p["o"], "attended")
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def loss(params, x, block=block):
    for i, p in enumerate(params):
        with jax.named_scope(f"block_{i}"):
            x = block(p, x)
    return jnp.mean(norm(x) ** 3)


# %% All that is kept. In the picture each scope has a frame, and areas are bytes.
out = Path(__file__).parent / "_out"
out.mkdir(exist_ok=True)
saved = fg.saved_tensors(loss, argnums=0)(params, x)
(out / "06_saved_tensors.svg").write_text(saved.treemap(title="Two transformer blocks"))
print(*str(saved).splitlines()[:6], sep="\n")

# %% A policy says what to keep, by operation, name, scope or predicate, and they combine. A name
# that marks nothing is an error; JAX's own policy would compute everything again without a word.
policies = fg.policies
chosen = {
    "nothing": policies.save_nothing(),
    "products": policies.save_dots(batched=False),
    "attended": policies.save_names("attended"),
    "attention": policies.save_paths("attention") & policies.save_dots(),
}
again = {name: fg.checkpoint(block, policy=policy) for name, policy in chosen.items()}
runs = {name: lambda p, x, run=run: loss(p, x, run) for name, run in again.items()}
# What is kept may also be kept smaller, at the price of an error in the gradient.
runs |= {"plain": loss, "int8": fg.saved_tensor_hooks(loss, *fg.packs.int8)}
try:
    loss(params, x, fg.checkpoint(block, policy=policies.save_names("atended")))
except ValueError as error:
    misspelt = str(error)


# %% The price: "about 33% more", one more forward pass where forward and backward are three.
def flops(fun, *args):
    return jax.jit(jax.grad(fun, (0, 1))).lower(*args).cost_analysis()["flops"]  # as written


kept = {n: fg.saved_tensors(f, 0)(params, x).computed_bytes / 2**20 for n, f in runs.items()}
plain = flops(loss, params, x)
extra = {name: 100 * (flops(fun, params, x) / plain - 1) for name, fun in runs.items()}


def chain_flops(depth, segments):
    layers = lambda ws: [lambda x, w=w: jnp.tanh(x @ w) for w in ws]
    run = lambda ws, x: fg.checkpoint_sequential(layers(ws), segments)(x).sum()
    return flops(run, [np.eye(64)] * depth, np.ones((64, 64)))


depths = [1, 2, 4, 9, 16]
each = [100 * (chain_flops(n, n) / chain_flops(n, 1) - 1) for n in depths]
theirs = each[:4]

# %% torch counts the matrix products of the same chain, XLA all arithmetic.
if importlib.util.find_spec("torch"):
    import torch
    from torch.utils.checkpoint import checkpoint_sequential
    from torch.utils.flop_counter import FlopCounterMode

    def torch_flops(depth, segments):
        ws = [torch.eye(64, requires_grad=True) for _ in range(depth)]
        x = torch.ones(64, 64, requires_grad=True)
        funs = [lambda x, w=w: torch.tanh(x @ w) for w in ws]
        with FlopCounterMode(display=False) as counter:
            checkpoint_sequential(funs, segments, x, use_reentrant=False).sum().backward()
        return counter.get_total_flops()

    theirs = [100 * (torch_flops(n, n) / torch_flops(n, 1) - 1) for n in depths[:4]]

# %% Or a budget, in bytes or as a fraction: what to keep is then chosen for the least work again.
curve = fg.plan(loss, [0.0, 0.05, 0.1, 0.17, 0.23, 0.5, 1.0], argnums=0)(params, x)
print(curve, *curve[2].explain().splitlines()[:6], sep="\n")
under = fg.checkpoint(loss, budget=0.1)
both = jax.jit(lambda *args: [jax.grad(fun)(*args) for fun in (under, loss)])
again = [100 * plan.recompute_flops / plain for plan in curve]

# %% The picture.
from matplotlib.figure import Figure

figure = Figure(figsize=(11, 4), layout="constrained")
left, right = figure.subplots(1, 2, sharey=True)
left.semilogx(depths, each, "o-", label="chain of layers, each checkpointed")
left.semilogx(depths[:4], theirs, "kx", label="torch")
left.axhline(100 / 3, color="grey", linestyle=":", label="one third")
left.set(xlabel="layers", ylabel="more arithmetic, percent", xticks=depths, xticklabels=depths)
left.minorticks_off(), left.legend()
for name in runs:
    right.plot(kept[name], extra[name], "o")
    right.annotate(name, (kept[name], extra[name]), (5, 5), textcoords="offset points")
right.plot([plan.nbytes / 2**20 for plan in curve], again, ".-", color="grey", zorder=0)
right.annotate("budgets", (curve[-2].nbytes / 2**20, again[-2]), (5, 5), textcoords="offset points")
right.set(xlabel="two blocks: kept for backward, MiB", xlim=(-0.1, 3.0))
figure.savefig(out / "06_checkpointing.png", dpi=110)

# %% What must hold.
assert "Near it: attended" in misspelt
assert 30 < each[-1] < 100 / 3 and kept["nothing"] < 0.05 * kept["plain"]
assert np.allclose(theirs, each[:4], atol=0.5)
assert extra["products"] < 4 and kept["products"] < 0.3 * kept["plain"]
within = fg.saved_tensors(under, 0)(params, x).computed_bytes / 2**20
assert within <= 0.1 * kept["plain"] and curve[4].recompute < 0.5 < curve[0].recompute
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *both(params[:1], x))
