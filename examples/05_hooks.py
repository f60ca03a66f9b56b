# %% [markdown]
# # Hooks: seeing and changing gradients on their way
#
# *In PyTorch I hang a hook on a tensor to print its gradient or to change it, and on modules to
# read what goes in and out, forward and backward. A JAX program has no tensors that live on and
# no backward graph to hang things on. Where do hooks go?*
#
# Into the function. A hook is a value of the program, like any other.

# %% One tensor: `register_hook` twice in PyTorch, one call here.
import importlib.util
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import funcgrad as fg


def hooked(a):
    return fg.grad_hook(3 * a, lambda g: 2 * g, lambda g: g + 1)


assert jax.grad(hooked)(1.0) == 9

if importlib.util.find_spec("torch") is None:
    print("torch is not installed: its side is left out")
else:
    import torch

    a = torch.tensor(1.0, requires_grad=True)
    t = 3 * a
    t.register_hook(lambda g: 2 * g)
    t.register_hook(lambda g: g + 1)
    t.backward()
    print("the gradient of a:", a.grad.item(), "in torch,", jax.grad(hooked)(1.0), "here")
    assert a.grad == 9

# %% [markdown]
# Forward mode passes through it unchanged, `vmap` shows it one sample, `scan` one iteration,
# and `checkpoint` runs it once, not twice. To print or log, use `jax.debug.callback`: it works
# under `jit`. A check for NaN, which says where the gradient went bad:

# %%
reports = []


def check(name):
    report = lambda bad: bad and reports.append(name)
    return lambda g: jax.debug.callback(report, jnp.isnan(g).any(), ordered=True)


@jax.jit
@jax.grad
def length_squared(x):
    square = fg.grad_hook(x**2, check("what goes into the root"))
    root = fg.grad_hook(jnp.sqrt(square), check("what comes out of it"))
    return root**2


print("the gradient at 0:", length_squared(0.0))
jax.effects_barrier()
print("NaN in the gradient of:", *reports)

# %% Modules: the four kinds of hooks, chosen by path or by class; the model is not edited.
model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(16), nn.tanh, nn.Dense(1)])
x = jnp.linspace(-1, 1, 12).reshape(4, 3)
params = jax.jit(model.init)(jax.random.key(0), x)
calls = []
put = lambda text: jax.debug.callback(lambda: calls.append(text), ordered=True)
apply = fg.module_hooks(
    model.apply,  # an NNX model is given itself
    nn.Dense,
    forward=lambda path, args, output: put(f"forward {path}"),
    backward=lambda path, grad_input, grad_output: put(f"backward {path}"),
)
grads = jax.jit(jax.grad(lambda params: (apply(params, x) ** 2).sum()))(params)
jax.effects_barrier()
print("\n".join(calls))

# %% [markdown]
# To look at everything, ask for values and cotangents by name. Names come from
# `checkpoint_name`, or from `fg.name_outputs` for all modules of a Flax model. Inside a `scan`
# over layers they come out stacked; with `reduce` only the numbers asked for are kept.
#
# A network of 30 layers, with weights of three sizes: where do activations and gradients go?

# %%
DEPTH, WIDTH = 30, 100


def layer(h, w):
    return checkpoint_name(jnp.tanh(h @ w), "layer"), None


def loss(weights, x):
    return jax.lax.scan(jax.checkpoint(layer), x, weights)[0].sum()


data = np.random.default_rng(0)
x = data.standard_normal((64, WIDTH), np.float32)
weights = data.standard_normal((DEPTH, WIDTH, WIDTH), np.float32) / np.float32(np.sqrt(WIDTH))
size = lambda values: jnp.sqrt(jnp.mean(values**2))
look = jax.jit(fg.capture_grads(loss, "layer", reduce=size))
found = {scale: look(scale * weights, x) for scale in (0.7, 1.0, 1.8)}
print("kept for each:", found[1.0].values["layer"].shape, "numbers of 30 layers")

# %% The picture.
from matplotlib.figure import Figure

figure = Figure(figsize=(9, 3.8), layout="constrained")
panels = figure.subplots(1, 2)
titles = {"values": "What each layer gives", "cotangents": "The gradient with respect to it"}
for ax, (part, title) in zip(panels, titles.items(), strict=True):
    for color, scale in zip(("#1f6fb4", "#6b6b6b", "#b3261e"), found, strict=True):
        sizes = getattr(found[scale], part)["layer"]
        ax.semilogy(range(1, DEPTH + 1), sizes, color=color, label=f"weights × {scale}")
    ax.set_title(title, loc="left", fontsize=11)
    ax.set(xlabel="layer", xlim=(1, DEPTH))
    ax.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("root mean square")
panels[0].legend(frameon=False)
out = Path(__file__).parent / "_out"
out.mkdir(exist_ok=True)
figure.savefig(out / "05_hooks.png", dpi=110)

# %% What must hold.
assert reports == ["what goes into the root"]
assert calls[:3] == [f"forward layers_{i}" for i in (0, 2, 4)]
assert calls[3:] == [f"backward layers_{i}" for i in (4, 2, 0)]
sizes = {scale: captured.cotangents["layer"] for scale, captured in found.items()}
assert sizes[0.7][0] < 1e-3 * sizes[0.7][-1]
assert sizes[1.8][0] > 10 * sizes[1.8][-1]
grads = jax.jit(jax.grad(loss))(weights, x)
np.testing.assert_allclose(found[1.0].grads, grads, rtol=1e-4, atol=1e-6)
