# %% [markdown]
# # How large a batch is worth its price?
#
# *In torch I would compare the gradients of a small and a large batch over many steps. Does the
# backward pass of one batch not know it already?*
#
# The squared norm of the mean gradient of B samples is `signal + noise / B` on average: the squared
# norm of the true gradient, and the trace of the covariance of the samples' gradients over B. At B
# equal to the *noise scale*, `noise / signal`, both are equal. Far below it, a step on twice the
# batch makes nearly twice the progress; far above it, hardly more.

# %% Handwritten digits, and a network with one hidden layer.
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import funcgrad as fg

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype(np.float32), y.astype(np.int32)
rng = np.random.default_rng(0)
start = {"w": rng.normal(size=(64, 64)) / 8, "b": np.zeros(64), "v": np.zeros((64, 10))}
STEPS, BATCH, SMALL = 300, 128, 16
places = rng.integers(len(y), size=(STEPS, BATCH))


def loss(params, image, label):
    hidden = jnp.tanh(image @ params["w"] + params["b"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["v"], label)


# %% The textbook (McCandlish et al.) takes the gradients of two batches, here of 16 and of 128.
def textbook(params, image, label):
    mean = lambda p, n: jnp.mean(jax.vmap(loss, (None, 0, 0))(p, image[:n], label[:n]))
    gradients = [jax.grad(mean)(params, n) for n in (SMALL, BATCH)]
    small, big = (optax.tree.norm(gradient, squared=True) for gradient in gradients)
    signal = (BATCH * big - SMALL * small) / (BATCH - SMALL)
    return signal, (small - big) / (1 / SMALL - 1 / BATCH)


# %% `noise_scale()` is the sharpest case of it: the small batches are the single samples, all of
# them. Their norms come from the backward pass that the step needs anyway.
@jax.jit
def train(params):
    def step(params, place):
        batch = jnp.take(x, place, 0), jnp.take(y, place)
        samples = fg.per_sample(loss)(params, *batch)
        ours = samples.noise_scale()
        moved = jax.tree.map(lambda p, g: p - 0.5 * g, params, samples.mean())
        return moved, (params, ours, textbook(params, *batch))

    return jax.lax.scan(step, params, places)[1]


path, ours, theirs = train(jax.tree.map(jnp.float32, start))
agreement, spread = theirs[1].mean() / ours[1].mean(), theirs[1].std() / ours[1].std()
print(
    f"noise by the textbook: {agreement:.2f} times ours on average, {spread:.1f} times the spread"
)

# %% Against the gradients themselves, in torch: one batch, in the middle of the training.
middle = 105
params = jax.tree.map(lambda leaf: leaf[middle], path)
if importlib.util.find_spec("torch") is None:
    print("torch is not installed: its side is left out")
else:
    import torch

    def torch_loss(params, image, label):
        hidden = torch.tanh(image @ params["w"] + params["b"])
        return torch.nn.functional.cross_entropy(hidden @ params["v"], label)

    weights = {k: torch.tensor(np.asarray(v)) for k, v in params.items()}
    batch = torch.tensor(x[places[middle]]), torch.tensor(y[places[middle]]).long()
    grads = torch.vmap(torch.func.grad(torch_loss), (None, 0, 0))(weights, *batch)
    rows = torch.cat([grad.flatten(1) for grad in grads.values()], 1)
    noise = rows.var(0).sum()
    signal = rows.mean(0).square().sum() - noise / BATCH
    difference = max(
        abs(ours[0][middle] / signal.item() - 1), abs(ours[1][middle] / noise.item() - 1)
    )
    print(f"largest relative difference from torch: {difference:.1e}")
    assert difference < 1e-3


# %% Against all 1,797 digits, now and then. In the middle also against batches drawn from 512: the
# mean of their `gram` over a batch's rows and columns is the squared norm of its mean gradient.
of_all = jax.jit(lambda params: fg.per_sample(loss)(params, x, y).noise_scale().scale)
checked = range(15, STEPS, 45)
scales = [of_all(jax.tree.map(lambda leaf, i=i: leaf[i], path)) for i in checked]


@jax.jit
def of_some(params):
    samples = fg.per_sample(loss)(params, x[:512], y[:512])
    return samples.noise_scale(), samples.gram()


found, gram = of_some(params)
(signal, noise), scale = found, found.scale
sizes = 2 ** np.arange(2, 9)
ranks = np.argsort(rng.random((2000, 512)), 1)
batches = [(ranks < size).astype(np.float32) / size for size in sizes]
measured = np.array([np.mean(np.sum(batch @ gram * batch, 1)) for batch in batches])
off = np.abs(measured / (signal + noise / sizes) - 1).max()
print(f"batches of {sizes.tolist()}: squared norms within {off:.1%} of signal + noise / B")

# %% The picture. Signal and noise are averaged over steps before they are divided.
from matplotlib.figure import Figure

smooth = lambda values: np.convolve(values, np.ones(50) / 50, mode="valid")
steps = np.arange(STEPS - 49) + 24.5
figure = Figure(figsize=(11, 4), layout="constrained")
left, right = figure.subplots(1, 2)
for (s, n), name in ((ours, "noise_scale()"), (theirs, f"textbook, {SMALL} and {BATCH}")):
    left.semilogy(steps, smooth(n) / smooth(s), label=f"{name}: mean of 50 steps")
left.plot(checked, scales, "k.", ms=9, label="all 1,797 digits, one step")
left.axhline(BATCH, color="grey", linestyle=":", label="batch of the training")
left.set(xlabel="step", ylabel="noise scale, in samples")
right.loglog(sizes, signal + noise / sizes, label="signal + noise / B")
right.loglog(sizes, measured, "k.", ms=9, label="mean of 2,000 batches")
right.axhline(signal, color="grey", linestyle=":", label="signal")
right.axvline(scale, color="grey", label="noise scale")
right.set(xlabel=f"batch size B, at step {middle}", ylabel="squared norm of the mean gradient")
left.legend(), right.legend()
out = Path(__file__).parent / "_out"
out.mkdir(exist_ok=True)
figure.savefig(out / "13_gradient_noise_scale.png", dpi=110)

# %% What must hold.
assert abs(agreement - 1) < 0.1 and spread > 2
assert off < 0.1
assert scales[-1] > 3 * scales[0]
