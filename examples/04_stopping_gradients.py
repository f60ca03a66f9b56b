# %% [markdown]
# # Stopping gradients
#
# *In PyTorch I write `with torch.no_grad()`, `x.detach()`, `p.requires_grad_(False)`, and when I
# have cut too much, `.grad` is `None`. JAX has no graph to stay out of and no flag on an array.
# What do I write, and who tells me that a parameter gets no gradient?*

# %% Someone walks on a corridor of nine places, to the right two times in three. The right end
# pays 1. What is each place worth? (The chance to leave at the right; it can be computed.)
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import funcgrad as fg

PLACES, STEPS, RATE = 9, 20_000, 0.02
truth = (1 - 0.5 ** np.arange(1, PLACES + 1)) / (1 - 0.5 ** (PLACES + 1))
rng = np.random.default_rng(0)
place = rng.integers(1, PLACES + 1, STEPS)
following = place + np.where(rng.random(STEPS) < 2 / 3, 1, -1)
walk = jnp.asarray(place), jnp.asarray(following)


# %% A place should be worth what the next is worth. That next value is a *target*: it is computed
# from the same numbers, and must not be moved towards the present one.
def look(values, place):
    return jnp.concatenate([jnp.zeros(1), values, jnp.ones(1)])[place]


def error(values, place, following, stop):
    target = fg.set_grad_enabled(not stop)(look)(values, following)
    return (look(values, place) - target) ** 2 / 2


def learn(stop, n_steps=STEPS):
    def step(values, here):
        return values - RATE * jax.grad(error)(values, *here, stop), None

    return jax.lax.scan(step, jnp.full(PLACES, 0.5), [leaf[:n_steps] for leaf in walk])[0]


run = jax.jit(learn, static_argnums=(0, 1))
stopped, followed = run(True), run(False)
off = [jnp.abs(learned - truth).max() for learned in (stopped, followed)]
print(f"off by {off[0]:.2f}, without the stop {off[1]:.2f}")

# %% The same in PyTorch. `fg.no_grad(fun)` is `fg.set_grad_enabled(False)(fun)`; for one value
# `jax.lax.stop_gradient(x)` is `x.detach()`. A target network, `lerp_` in torch, needs no stop: it
# is one more argument, not differentiated, and `optax.incremental_update` moves it.
if importlib.util.find_spec("torch") is None:
    print("torch is not installed: its side is left out")
else:
    import torch

    values = torch.full((PLACES,), 0.5, requires_grad=True)
    torch_look = lambda p: torch.cat([torch.zeros(1), values, torch.ones(1)])[p]
    for p, f in zip(place[:500], following[:500], strict=True):
        with torch.no_grad():
            target = torch_look(f)
        (grad,) = torch.autograd.grad((torch_look(p) - target) ** 2 / 2, values)
        with torch.no_grad():
            values -= RATE * grad
    difference = np.abs(run(True, 500) - values.detach().numpy()).max()
    print(f"500 steps: largest difference from torch {difference:.1e}")
    assert difference < 1e-6


# %% `inference_mode` is stricter: who differentiates through it is told where.
predict = fg.inference_mode(look)
try:
    jax.grad(lambda values: (values[0] - predict(values, 3)) ** 2)(stopped)
except TypeError as refusal:
    print(str(refusal).split(";")[0])


# %% Who gets no gradient? In torch one finds `None` afterwards; here one asks, and is told the
# line. "none" is torch's `None`, "zero" a gradient that torch computes, of zeros.
def classify(params, x):
    hidden = jnp.round(x @ params["quantised"]) + x @ jax.lax.stop_gradient(params["backbone"])
    chosen = jnp.argmax(x @ params["router"])
    return jnp.sum(jnp.tanh(hidden) @ params["experts"][chosen])


names = ("quantised", "backbone", "router", "experts", "bias")
params = {n: jax.random.normal(jax.random.key(i), (4, 4)) for i, n in enumerate(names)}
table = fg.unused_grads(classify)(params, jnp.ones(4))
print(table)

# %% `requires_grad_(False)`: one specification, for the gradient and for the optimiser. Stopping
# the gradient is not enough: zeros still go through AdamW, whose decay moves the leaf.
frozen = fg.freeze(["backbone", "quantised"])
adamw = optax.adamw(1e-2, weight_decay=0.5)


def norms_of_backbone(tx, gradient):
    def step(carry, _):
        params, state = carry
        updates, state = tx.update(gradient(params, jnp.ones(4)), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), jnp.linalg.norm(params["backbone"])

    (after, state), norms = jax.lax.scan(step, (params, tx.init(params)), length=100)
    return after, state, norms


after, state, kept = norms_of_backbone(frozen.optimizer(adamw), frozen.grad(classify))
_, _, decayed = norms_of_backbone(adamw, jax.grad(classify))
held = sum(leaf.size for leaf in jax.tree.leaves(state))
print(
    f"optimiser state: {held} numbers; the backbone: {kept[0]:.3f}, and decayed {decayed[-1]:.3f}"
)

# %% The picture.
from matplotlib.figure import Figure

figure = Figure(figsize=(9.5, 3.8), layout="constrained")
left, right = figure.subplots(1, 2)
left.plot(range(1, PLACES + 1), truth, color="black", linewidth=1, label="truth")
left.plot(range(1, PLACES + 1), stopped, "o", label="target stopped")
left.plot(range(1, PLACES + 1), followed, "s", label="gradient through the target, too")
left.set(xlabel="place", ylabel="value", ylim=(0, 1.05), title="What a place is worth")
right.plot(kept, label="fg.freeze")
right.plot(decayed, label="gradient stopped, AdamW as it is")
right.set(xlabel="step", ylabel="norm of the weight", ylim=(0, 5.3), title="A frozen weight")
left.legend(loc="lower right"), right.legend(loc="lower left")
out = Path(__file__).parent / "_out"
out.mkdir(exist_ok=True)
figure.savefig(out / "04_stopping_gradients.png", dpi=110)

# %% What must hold.
assert off[0] < 0.1 < 0.3 < off[1]
assert {leaf.path: leaf.gradient for leaf in table} == {
    "backbone": "none", "bias": "none", "quantised": "zero", "router": "none",
}  # fmt: skip
assert after["backbone"].tobytes() == params["backbone"].tobytes()
assert held == 2 * 3 * 16 + 1 and decayed[-1] < 0.7 * kept[-1]
