# %% [markdown]
# # Differentially private training
#
# *With torch I let Opacus wrap the model, or write `vmap(grad)`, clip and add noise. What is the
# step in JAX, and what exactly does it guarantee?*
#
# Three things make it private. Each sample joins a batch by its own coin. Each sample's gradient
# is clipped to norm C *before* the sum, so that one sample moves the sum by C at the most.
# Gaussian noise in proportion to C is added. From these an accountant computes epsilon.

# %% Handwritten digits, and logistic regression.
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import funcgrad as fg

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))
images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
(x, x_test), (y, y_test) = np.split(images, [1437]), np.split(labels, [1437])
BATCH, CAPACITY, CLIP, NOISE, STEPS, DELTA = 128, 200, 1.0, 2.0, 150, 1e-4


def loss(params, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(image @ params, label)


# %% Batches drawn by coins. Their size differs from step to step, the shape of a compiled step
# does not: they are padded, and a mask says who counts. To drop what does not fit would be another
# sampling than the one that epsilon is computed for (the chance that one does not is 3e-8).
rng = np.random.default_rng(1)
drawn = [np.flatnonzero(rng.random(len(y)) < BATCH / len(y)) for _ in range(STEPS)]
assert max(map(len, drawn)) <= CAPACITY
places = [np.pad(d, (0, CAPACITY - len(d))) for d in drawn]
masks = [np.arange(CAPACITY) < len(d) for d in drawn]
first = x[places[0]], y[places[0]]

# %% The gradient, each sample's clipped. `sensitivity()` is CLIP / BATCH, and floats keep it.
clipped = fg.clipped_grad(loss, max_norm=CLIP, mean_over=BATCH)
sensitivity = clipped.sensitivity()
private = jax.jit(lambda params, *batch, mask: clipped(params, *batch, mask=mask).grads)
grads = private(jnp.zeros((64, 10)), *first, mask=masks[0])

# %% The same in torch, where the batch needs no padding.
if importlib.util.find_spec("torch") is None:
    print("torch is not installed: its side is left out")
else:
    import torch

    def torch_loss(params, image, label):
        return torch.nn.functional.cross_entropy(image @ params, label)

    batch = torch.tensor(x[drawn[0]]), torch.tensor(y[drawn[0]]).long()
    rows = torch.vmap(torch.func.grad(torch_loss), (None, 0, 0))(torch.zeros(64, 10), *batch)
    factors = (CLIP / rows.flatten(1).norm(dim=1)).clamp(max=1)
    theirs = torch.einsum("n,n...->...", factors, rows) / BATCH
    difference = np.abs(grads - theirs.numpy()).max()
    print(f"{len(drawn[0])} digits in {CAPACITY} places: differs from torch by {difference:.1e}")
    assert difference < 1e-5


# %% Training. In earnest, batches and noise come from keys that nobody knows. The parameters are
# one array here; `optax.tree.random_like` draws the noise for a tree.
@jax.jit
def plain(params, image, label, mask):
    total = lambda p: jnp.sum(jax.vmap(loss, (None, 0, 0))(p, image, label) * mask) / BATCH
    return jax.grad(total)(params)


def train(gradient, deviation):
    params, right = jnp.zeros((64, 10)), []
    for step, (place, mask) in enumerate(zip(places, masks, strict=True)):
        grads = gradient(params, x[place], y[place], mask=mask)
        noise = deviation * jax.random.normal(jax.random.key(step), grads.shape)
        params = params - 2 * (grads + noise)
        right.append(100 * np.mean(np.argmax(x_test @ params, -1) == y_test))
    return params, right


_, plain_right = train(plain, 0.0)
params, private_right = train(private, NOISE * sensitivity)

# %% What was spent, when a neighbour is a data set with one digit more or less.
name = "private"
if importlib.util.find_spec("dp_accounting") is None:
    print("dp-accounting is not installed: epsilon is not computed")
else:
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    one = dp.PoissonSampledDpEvent(BATCH / len(y), dp.GaussianDpEvent(NOISE))
    epsilon = PLDAccountant().compose(dp.SelfComposedDpEvent(one, STEPS)).get_epsilon(DELTA)
    name += f", epsilon {epsilon:.2f} at delta {DELTA}"
print(f"test digits read: {private_right[-1]:.1f}% {name}; {plain_right[-1]:.1f}% not private")

# %% What goes wrong when the mean is clipped: `clip_grad_norm_` (Optax: `clip_by_global_norm`)
# bounds the gradient of the batch, not what one sample does to it. Leave out each digit in turn;
# one is hostile, mislabelled and a thousand times too bright. The noise hides one sensitivity.
first[0][0] *= 1000
first[1][0] = (first[1][0] + 1) % 10
without = masks[0] & ~np.eye(CAPACITY, dtype=bool)[: len(drawn[0])]


def moves(gradient):
    whole, *others = (gradient(params, *first, mask=mask) for mask in (masks[0], *without))
    return np.array([jnp.linalg.norm(whole - g) / sensitivity for g in others])


clip = lambda g: g * jnp.minimum(1, CLIP / jnp.linalg.norm(g))
of_each, of_mean = moves(private), moves(lambda *batch, mask: clip(plain(*batch, mask)))
print(f"largest move, in sensitivities: {of_each.max():.4f}; clipped mean: {of_mean.max():.0f}")

# %% The picture: the hostile digit has the clipped mean to itself.
from matplotlib.figure import Figure

figure = Figure(figsize=(11, 4), layout="constrained")
left, right = figure.subplots(1, 2)
left.semilogy(np.sort(of_each), ".", label="clip each, then average")
left.semilogy(np.sort(of_mean), ".", label="average, then clip")
left.axhline(1, color="black", linewidth=1, label="sensitivity: what the noise hides")
left.text(len(of_mean) - 4, of_mean.max(), "the hostile digit", ha="right", va="center")
left.set(xlabel="digits, sorted", ylabel="move without the digit, in sensitivities")
right.plot(private_right, label=name)
right.plot(plain_right, label="not private")
right.set(xlabel="step", ylabel="test digits read correctly (%)", ylim=(0, 100))
left.legend(loc="upper left"), right.legend(loc="lower right")
out = Path(__file__).parent / "_out"
out.mkdir(exist_ok=True)
figure.savefig(out / "11_differentially_private_training.png", dpi=110)

# %% What must hold.
assert of_each.max() <= 1 < 100 < of_mean.max()
assert private_right[-1] > 88
