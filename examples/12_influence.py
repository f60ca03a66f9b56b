# %% [markdown]
# # Which training samples made this prediction?
#
# *In torch I take `vmap(grad)` of both sets, flatten and multiply: samples × parameters numbers on
# either side. What is it in JAX, and must the gradients be there at all?*
#
# A step on training digit i lowers the loss of test digit j by the learning rate times the inner
# product of their gradients. Summed over checkpoints of the training this is the influence of i
# on j (TracIn): above 0 the training digit helped, below 0 it did harm.

# %% Handwritten digits; twenty of those to train on get a wrong label.
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
planted = np.arange(0, 1437, 72)
y[planted] = (y[planted] + 1) % 10


def loss(params, image, label):
    hidden = jnp.tanh(image @ params["w"] + params["b"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["v"], label)


# %% Training by full-batch descent, which keeps the parameters of each step.
gradients, RATE = fg.per_sample(loss), 0.5
draw = np.random.default_rng(0).standard_normal
start = {"w": draw((64, 128)) / 8, "b": np.zeros(128), "v": draw((128, 10)) / 12}


@jax.jit
def train(params):
    update = lambda p, g: p - RATE * g
    step = lambda p, _: (jax.tree.map(update, p, gradients(p, x, y).mean()), p)
    return jax.lax.scan(step, params, length=200)[1]


path = train(jax.tree.map(jnp.float32, start))
checkpoints = [jax.tree.map(lambda leaf, i=i: leaf[i], path) for i in (20, 60, 199)]


# %% Influence. `gram` multiplies what each side keeps: what came into the layers, and the
# derivatives with respect to what came out. The squared norm is a sample's influence on itself,
# large where a label has to be learnt by heart.
@jax.jit
def influence(params):
    train, test = gradients(params, x, y), gradients(params, x_test, y_test)
    return RATE / len(y) * train.gram(test), train.norms() ** 2


parts, on_itself = zip(*map(influence, checkpoints), strict=True)
influences, on_itself = np.sum(parts, 0), np.sum(on_itself, 0)
by_planted = np.isin(influences.argmin(0), planted)
suspects = np.isin(on_itself.argsort()[::-1][:20], planted).sum()
print(f"for {by_planted.mean():.0%} of the test digits the most harmful is one of 20 planted ones")
print(f"of the 20 digits with the largest influence on themselves, {suspects} are planted")

# %% The same in torch, at the last checkpoint.
if importlib.util.find_spec("torch") is None:
    print("torch is not installed: its side is left out")
else:
    import torch

    weights = {k: torch.tensor(np.asarray(v)) for k, v in checkpoints[-1].items()}

    def torch_loss(params, image, label):
        hidden = torch.tanh(image @ params["w"] + params["b"])
        return torch.nn.functional.cross_entropy(hidden @ params["v"], label)

    def rows(images, labels):
        batch = torch.tensor(images), torch.tensor(labels).long()
        grads = torch.vmap(torch.func.grad(torch_loss), (None, 0, 0))(weights, *batch)
        return torch.cat([grad.flatten(1) for grad in grads.values()], 1)

    theirs = RATE / len(y) * (rows(x, y) @ rows(x_test, y_test).T).numpy()
    difference = np.abs(parts[-1] - theirs).max() / np.abs(theirs).max()
    print(f"largest difference from torch: {difference:.1e} of the largest influence")
    assert difference < 1e-5

# %% Smaller still: random projections keep inner products on average, and can be stored until a
# test digit comes. They come from the same factors, at about the cost of the gradients.
last = checkpoints[-1]
sketch = jax.jit(lambda p: gradients(p, images, labels).project(jax.random.key(1), 128))(last)
approximate = RATE / len(y) * sketch[: len(y)] @ sketch[len(y) :].T
correlation = np.corrcoef(approximate.ravel(), parts[-1].ravel())[0, 1]
print(f"correlation of projected with exact influences: {correlation:.3f}")

formed = len(labels) * sum(leaf.nbytes for leaf in last.values()) / 1e6
kept = jax.eval_shape(gradients, last, images, labels).nbytes / 1e6
print(f"MB: gradients {formed:.1f}, samples {kept:.1f}, projections {sketch.nbytes / 1e6:.1f}")

# %% The picture: the two test digits that a planted digit harmed most, the two that another did.
from matplotlib.figure import Figure

harmed = influences.min(0).argsort()
shown = [*harmed[by_planted[harmed]][:2], *harmed[~by_planted[harmed]][:2]]
figure = Figure(figsize=(9, 6.8), layout="constrained")
for line, j in zip(figure.subplots(4, 7), shown, strict=True):
    ranked = influences[:, j].argsort()
    line[0].imshow(x_test[j].reshape(8, 8), cmap="Blues", interpolation="bicubic")
    line[0].set_title(f"test: a {y_test[j]}")
    for axes, i in zip(line[1:], [*ranked[::-1][:3], *ranked[:3]], strict=True):
        axes.imshow(x[i].reshape(8, 8), cmap="gray_r", interpolation="bicubic")
        name = f"label {y[i]}: {1000 * influences[i, j]:+.0f}"
        axes.set_title(name, color="red" if i in planted else "black")
    for axes in line:
        axes.set(xticks=[], yticks=[])
figure.suptitle(
    "A test digit, the three training digits that helped most, the three that did most harm\n"
    "after the label: by how much, in thousandths of the test loss; red: the label is wrong"
)
out = Path(__file__).parent / "_out"
out.mkdir(exist_ok=True)
figure.savefig(out / "12_influence.png", dpi=110)

# %% What must hold.
assert by_planted.mean() > 0.5 and suspects >= 15
assert correlation > 0.85
assert kept < formed / 5
