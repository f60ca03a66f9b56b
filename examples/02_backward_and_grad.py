# %% [markdown]
# # `backward()` and `autograd.grad`
#
# *PyTorch has two ways to start a backward pass. `loss.backward()` writes into the `.grad` of every
# leaf, for the training loop; `torch.autograd.grad(outputs, inputs)` returns gradients, for
# everything else: part of the inputs, higher derivatives, meta-learning. Which one is
# `jax.grad`?*
#
# The second. The first is `params = update(params, grads)`, written down.
# %%
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import funcgrad as fg

torch = importlib.util.find_spec("torch") and importlib.import_module("torch")
if torch is None:
    print("torch is not installed: its side is left out")

leaf = lambda value: torch.tensor(value, requires_grad=True)

# %% A scalar needs no seed.
square = lambda x: (x**2).sum()
grads = jax.grad(square)(jnp.array([1.0, -2.0, 3.0]))

# %% Anything else does, in torch `y.backward(gradient=...)`. `jax.vjp` returns the value and the
# backward pass, a function of one seed for each output. A seed of another shape is refused.
value, pull = jax.vjp(lambda x: (x**2, x**6), 2.0)
(seeded,) = pull((2.0, 10.0))
try:
    pull((jnp.ones(3), 10.0))
except ValueError as error:
    print("refused:", str(error).splitlines()[0][:90])

# %% `create_graph=True` keeps the graph of the backward pass, to differentiate it again. Here a
# gradient is a function like any other. A penalty on the gradient, a step of MAML:
derivatives, fun = [], lambda x: x**3
for _ in range(3):
    fun = jax.grad(fun)
    derivatives.append(float(fun(2.0)))


def task(w, x, y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def after_a_step(w, rate, x, y):  # MAML: the loss after a step, as a function of where it began
    return task(w - rate * jax.grad(task)(w, x, y), x, y)


rng = np.random.default_rng(0)
w, x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 1), (20, 3), (20, 1)))
rates = np.linspace(0.0, 1.2, 41, dtype=np.float32)
both = jax.value_and_grad(after_a_step, argnums=(0, 1))
losses, (meta, slopes) = jax.jit(jax.vmap(both, (None, 0, None, None)))(w, rates, x, y)


# %% `allow_unused`: torch gives None for an input that the outputs do not depend on, or raises.
# JAX gives zeros, without a word; `fg.unused_grads` says which are none at all, and why.
def rated(params):
    chosen = jnp.where(params["gate"] > 0, 1.0, 0.5)
    return (params["weight"] * chosen * jax.lax.stop_gradient(params["scale"])).sum()


names = ("weight", "gate", "scale", "bias")
params = {name: jnp.array([0.5, -1.0]) for name in names}
unused = fg.unused_grads(rated)(params)
print(unused)

# %% `is_grads_batched`: a batch of seeds is a `vmap` of the backward pass. The identity as seeds
# gives the Jacobian; `fg.jacrev` makes it in chunks (lesson 8).
point = jnp.array([1.0, 2.0, 3.0])
_, pull = jax.vjp(lambda x: jnp.cumsum(x) * x, point)
jacobian = jax.vmap(pull)(jnp.eye(3))[0]


# %% Gradients of intermediates: `autograd.grad(loss, [a, b])` with b on the way from a. Here it
# bears a name, and one backward pass gives all.
def through(a):
    b = checkpoint_name(2 * a, "b")
    return (b**2).sum()


captured = fg.capture_grads(through)(point)

# %% All of it in PyTorch.
if torch is not None:
    x1 = leaf([1.0, -2.0, 3.0])
    (x1**2).sum().backward()
    x2 = leaf(2.0)
    torch.autograd.backward([x2**2, x2**6], [torch.tensor(2.0), torch.tensor(10.0)])
    x3, again = leaf(2.0), []
    result = x3**3
    for _ in range(3):
        (result,) = torch.autograd.grad(result, x3, create_graph=True)
        again.append(result.item())
    p = {name: leaf([0.5, -1.0]) for name in names}
    product = p["weight"] * torch.where(p["gate"] > 0, 1.0, 0.5) * p["scale"].detach()
    found = torch.autograd.grad(product.sum(), list(p.values()), allow_unused=True)
    a = leaf([1.0, 2.0, 3.0])
    (rows,) = torch.autograd.grad(a.cumsum(0) * a, a, torch.eye(3), is_grads_batched=True)
    b = 2 * a
    of_both = torch.autograd.grad((b**2).sum(), [a, b])

# %% The picture: how long should the step be? Its gradient goes through a gradient.
from matplotlib.figure import Figure

figure = Figure(figsize=(7, 3.6), layout="constrained")
ax = figure.subplots()
ax.plot(rates, losses, color="#1f6fb4")
for at in (5, 16, 28):
    near = rates[at] + np.array([-0.15, 0.15])
    ax.plot(near, losses[at] + slopes[at] * (near - rates[at]), color="#b3261e")
ax.set_title("The loss after one step, and its derivative by the rate", loc="left", fontsize=11)
ax.set(xlabel="rate of the step", ylabel="loss", xlim=(0, 1.2))
ax.spines[["top", "right"]].set_visible(False)
out = Path(__file__).parent / "_out"
out.mkdir(exist_ok=True)
figure.savefig(out / "02_backward_and_grad.png", dpi=110)

# %% What must hold.
assert grads.tolist() == [2, -4, 6] and seeded == 1928 and derivatives == [12, 12, 6]
assert {u.path for u in unused} == {"gate", "scale", "bias"}
assert np.allclose(np.diff(losses) / 0.03, (slopes[1:] + slopes[:-1]) / 2, atol=2e-2)
assert meta.shape == (len(rates), *w.shape)
assert captured.grads.tolist() == [8, 16, 24] and captured.cotangents["b"].tolist() == [4, 8, 12]
if torch is not None:
    assert (
        x1.grad.tolist() == grads.tolist()
        and x2.grad.item() == float(seeded)
        and again == derivatives
    )
    assert [g is None for g in found] == [name in {u.path for u in unused} for name in names]
    np.testing.assert_allclose(rows, jacobian)
    assert [g.tolist() for g in of_both] == [[8, 16, 24], [4, 8, 12]]
