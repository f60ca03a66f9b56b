# %% [markdown]
# # One gradient per sample
#
# *In PyTorch, `loss.backward()` leaves the gradient of the whole batch in `.grad`. I want each
# sample's own gradient: to clip it, to find odd samples, to weigh them. What do I write, and
# must I hold as many copies of the parameters as there are samples?*

# %% Handwritten digits, and a network with one hidden layer.
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import funcgrad as fg

images, labels = load_digits(return_X_y=True)
xs, ys = jnp.asarray(images[:32] / 16, jnp.float32), jnp.asarray(labels[:32])
keys = jax.random.split(jax.random.key(0), 2)
params = {
    "hidden": jax.random.normal(keys[0], (64, 128)) / 8,
    "out": jax.random.normal(keys[1], (128, 10)) / 11,
}


# %% In JAX the loss is a function of the parameters and ONE sample; nothing is recorded.
def loss(params, x, y, nudge=0.0):
    hidden = jnp.tanh(x @ params["hidden"] + nudge)  # nudge: for the picture below
    return -jax.nn.log_softmax(hidden @ params["out"])[y]


grads = fg.per_sample_grads(loss)(params, xs, ys).grads
print("each sample's gradient of the hidden layer:", grads["hidden"].shape)

# %% The same in PyTorch: torch.func, which is JAX's grad and vmap under torch's name.
if importlib.util.find_spec("torch") is None:
    print("torch is not installed: its side is left out")
else:
    import torch

    def torch_loss(params, x, y):
        hidden = torch.tanh(x @ params["hidden"])
        return -torch.log_softmax(hidden @ params["out"], 0).gather(0, y[None])[0]

    torch_params = {name: torch.tensor(np.asarray(leaf)) for name, leaf in params.items()}
    one_gradient = torch.func.grad(torch_loss)
    all_gradients = torch.func.vmap(one_gradient, in_dims=(None, 0, 0))
    torch_grads = all_gradients(
        torch_params, torch.tensor(np.asarray(xs)), torch.tensor(np.asarray(ys)).long()
    )
    difference = max(
        float(np.abs(np.asarray(grads[name]) - torch_grads[name].numpy()).max()) for name in grads
    )
    print(f"largest difference from torch: {difference:.1e}")
    assert difference < 1e-6

# %% [markdown]
# That is 32 times the memory of the parameters. Look at one of these gradients, though: it is
# an outer product, of what came into the layer (64 numbers) and of the derivative with respect
# to what came out (128). Its norm is the product of two short vectors' norms:
#
# `norm(outer(a, g)) = norm(a) * norm(g)`
#
# How to get `g`? Add a zero to what comes out, and differentiate with respect to that zero.

# %%
a = xs[0]
g = jax.grad(loss, argnums=3)(params, xs[0], ys[0], jnp.zeros(128))
assert jnp.allclose(jnp.outer(a, g), grads["hidden"][0], atol=1e-6)

# %% `fg.per_sample` does this at each use of each parameter, in one backward pass. It returns
# what the factors can answer; the gradients themselves are never formed where that costs more.
samples = fg.per_sample(loss)(params, xs, ys)
norms = samples.norms()
formed = jnp.sqrt(sum(jnp.sum(leaf**2, (1, 2)) for leaf in grads.values()))
print(f"largest difference of the norms: {jnp.abs(norms - formed).max():.1e}")
print("the three samples with the largest gradients:", jnp.argsort(-norms)[:3])

# %% Clipping: no sample moves the sum by more than 5. `clipped_grad` keeps that bound in floating
# point too, for differential privacy; it is Opacus' clipping without hooks and without layers.
clipped = fg.clipped_grad(loss, max_norm=5.0)(params, xs, ys)
by_hand = jnp.einsum("b,bio->io", jnp.minimum(1, 5 / formed), grads["hidden"])
print(f"{clipped.clip_fraction:.0%} of the samples were clipped")

# %% The picture: 192 numbers say what 8,192 do.
from matplotlib.figure import Figure

figure = Figure(figsize=(8.4, 4.6), layout="constrained")
axes = figure.subplots(
    2, 2, gridspec_kw={"width_ratios": [1, 9], "height_ratios": [1, 7]}, squeeze=False
)
axes[0, 0].set_axis_off()
for ax, values, title in (
    (axes[0, 1], g[None, :], f"g, derivative by what came out: 128 numbers, norm "
     f"{jnp.linalg.norm(g):.3f}"),
    (axes[1, 0], a[:, None], f"a, what came in:\n64 numbers,\nnorm {jnp.linalg.norm(a):.2f}"),
    (axes[1, 1], grads["hidden"][0], "one sample's gradient, a times g: 8,192 numbers, "
     f"norm {jnp.linalg.norm(grads['hidden'][0]):.3f}"),
):  # fmt: skip
    limit = float(jnp.abs(values).max())
    ax.imshow(values, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    ax.set_title(title, fontsize=10, loc="left")
    ax.set(xticks=[], yticks=[])
out = Path(__file__).parent / "_out"
out.mkdir(exist_ok=True)
figure.savefig(out / "08_per_sample_gradients.png", dpi=110)

# %% What must hold.
assert grads["hidden"].shape == (32, 64, 128)
assert jnp.allclose(norms, formed, rtol=1e-5)
assert jnp.isclose(jnp.linalg.norm(a) * jnp.linalg.norm(g), jnp.linalg.norm(grads["hidden"][0]))
assert jnp.allclose(clipped.grads["hidden"], by_hand, atol=1e-4)
