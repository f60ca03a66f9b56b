# %% [markdown]
# # Derivatives of many things at once, in as much memory as there is
#
# *In torch I write `vmap`, `jacrev` and `hessian`, pass `chunk_size` when memory runs out and
# `randomness` when dropout complains. `jax.vmap` has neither. What do I lose?*
#
# `jax.vmap` runs all rows at once, and gives all of them the same random numbers where they share
# a key, without a word. `jax.jacrev` makes a unit vector for every output before it starts.
# `fg.vmap`, `fg.jacrev`, `fg.jacfwd` and `fg.hessian` take both words of torch.

# %% Iris flowers, and a small network whose Hessian can be looked at.
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_iris

import funcgrad as fg

x, y = load_iris(return_X_y=True)
x, y = ((x - x.mean(0)) / x.std(0)).astype(np.float32), y.astype(np.int32)
rng = np.random.default_rng(0)
draw = lambda *shape: (rng.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)
params = {"layer1": draw(4, 8), "layer2": draw(8, 8), "layer3": draw(8, 3)}


def model(params, x):
    return jnp.tanh(jnp.tanh(x @ params["layer1"]) @ params["layer2"]) @ params["layer3"]


def cross_entropy(logits):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()


loss = lambda params: cross_entropy(model(params, x))
step = jax.jit(lambda p: jax.tree.map(lambda w, g: w - 0.5 * g, p, jax.grad(loss)(p)))
for _ in range(30):
    params = step(params)


# %% A key that all rows share is an error; `"different"` folds the row's number into it, so that
# the draws do not depend on the chunks. (torch: `torch.vmap(f, randomness="different")`.)
def dropped(key, row):
    return model(params, row * jax.random.bernoulli(key, 0.5, row.shape) * 2)


key = jax.random.key(0)
try:
    fg.vmap(dropped, (None, 0))(key, x)
except ValueError as error:
    refused = str(error)
drop = lambda size: fg.vmap(dropped, (None, 0), randomness="different", chunk_size=size)
whole_batch, by_chunks = jax.jit(lambda key: (drop(None)(key, x), drop(64)(key, x)))(key)

# %% The Jacobian of n outputs: what the compiled program takes beside its arguments and result.
weights = draw(16, 2048)
outputs = [128, 512, 2048]


def temporaries(jac, n):
    compiled = jax.jit(jac(lambda x: jnp.tanh(x @ weights[:, :n]))).lower(jnp.ones(16)).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


chunked = lambda fun: fg.jacrev(fun, chunk_size=32)
whole, parts = ([temporaries(jac, n) for n in outputs] for jac in (jax.jacrev, chunked))


# %% The Hessian in chunks of 40 of its 120 columns. Gauss and Newton leave out the curvature of the
# network itself: their product with each unit vector makes the matrix, which has no negative
# eigenvalue. In float64, where rounding is not taken for a small eigenvalue. Without the matrix
# there are products, and estimates with their standard errors.
with jax.enable_x64(True):
    flat, unravel = ravel_pytree(jax.tree.map(np.float64, params))
    loss_of, model_of = (lambda flat: loss(unravel(flat))), (lambda flat: model(unravel(flat), x))

    curved = lambda flat, v: fg.gnvp(model_of, cross_entropy, flat, v)
    second_derivatives = lambda flat: (
        fg.hessian(loss_of, chunk_size=40)(flat),
        fg.vmap(curved, (None, 0), chunk_size=40)(flat, jnp.eye(flat.size)),
        fg.hvp(loss_of, flat, jnp.sign(flat)),
        fg.hessian_trace(loss_of, chunk_size=40)(flat),
        fg.hutchinson(loss_of, n_samples=100)(key, flat),
    )
    found = jax.device_get((flat, *jax.jit(second_derivatives)(flat)))
flat, hessian, gauss_newton, product, trace, estimate = found
values, convex = np.linalg.eigvalsh(hessian), np.linalg.eigvalsh(gauss_newton)
print(f"trace {trace:.3f}, from 100 products {estimate.trace:.3f} ± {estimate.trace_error:.3f}")

# %% The same in torch.
theirs = hessian
if importlib.util.find_spec("torch"):
    import torch

    def torch_loss(f):
        f = f.split([32, 64, 24])
        a, b, c = (w.view(shape) for w, shape in zip(f, [(4, 8), (8, 8), (8, 3)], strict=True))
        logits = ((torch.tensor(x).double() @ a).tanh() @ b).tanh() @ c
        return torch.nn.functional.cross_entropy(logits, torch.tensor(y).long())

    theirs = torch.autograd.functional.hessian(torch_loss, torch.tensor(flat), vectorize=True)

# %% The picture.
from matplotlib.figure import Figure

figure = Figure(figsize=(13, 4.2), layout="constrained")
left, middle, right = figure.subplots(1, 3)
left.loglog(outputs, whole, "o-", label="jax.jacrev")
left.loglog(outputs, parts, "o-", label="fg.jacrev, chunks of 32")
left.set(xlabel="outputs", ylabel="temporaries, MiB", xticks=outputs, xticklabels=outputs)
left.set_title("Jacobian"), left.minorticks_off(), left.legend()
limit = np.quantile(np.abs(hessian), 0.995)
middle.imshow(hessian, cmap="RdBu_r", vmin=-limit, vmax=limit)
for edge in (31.5, 95.5):
    middle.axhline(edge, color="black", lw=0.7), middle.axvline(edge, color="black", lw=0.7)
middle.set(xticks=[16, 64, 108], xticklabels=list(params), yticks=[16, 64, 108])
middle.set_yticklabels(list(params), rotation=90, va="center")
middle.set_title("Hessian, red above zero")
right.plot(values, ".", label="Hessian"), right.plot(convex, ".", label="Gauss-Newton")
right.set_yscale("symlog", linthresh=1e-4)
right.axhline(0, color="grey", lw=0.7)
right.set(xlabel="eigenvalue, in order"), right.set_title("Eigenvalues"), right.legend()
out = Path(__file__).parent / "_out"
out.mkdir(exist_ok=True)
figure.savefig(out / "08_transforms.png", dpi=110)

# %% What must hold.
assert "not mapped, drawn from at" in refused and "dropped" in refused
assert np.allclose(whole_batch, by_chunks, atol=1e-6)
# Of 150 rows about nine lose all four inputs, and those that keep one or two often coincide.
assert 100 < len(np.unique(whole_batch, axis=0)) < 145
assert whole[-1] > 10 * whole[-2] and parts[-1] < whole[-1] / 20
assert np.allclose(hessian, theirs, rtol=0, atol=1e-12)
assert values[0] < -1e-3 and convex[0] > -1e-12
assert np.allclose(product, hessian @ np.sign(flat), rtol=0, atol=1e-12)
assert np.isclose(trace, np.trace(hessian), rtol=1e-12)
assert abs(estimate.trace - trace) < 4 * estimate.trace_error
