# %% [markdown]
# # I have a `torch.autograd.Function`. What is it in JAX?
#
# *`jax.custom_vjp` is two loose functions, without `ctx`, without forward mode, and broadcasts a
# gradient of the wrong tree. Can I keep my class? Yes: the same text with another base.*

# %% One text, two bases: rounding whose gradient passes straight through.
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import funcgrad as fg


def straight_through(base, xp):
    class Round(base):
        @staticmethod
        def forward(ctx, x, levels):
            ctx.levels = levels  # static: a number
            ctx.save_for_backward(x)  # an array: becomes a residual
            return xp.round(x * levels) / levels

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * (abs(x) <= 1), None  # one gradient for each input

    return Round.apply


quantise = straight_through(fg.Function, jnp)
x = np.linspace(-1.5, 1.5, 7, dtype=np.float32)
grad = jax.grad(lambda x: (quantise(x, 4) ** 2).sum())(x)
tangent = jax.jvp(lambda x: quantise(x, 4), (x,), (np.ones_like(x),))[1]  # backward, transposed

if importlib.util.find_spec("torch") is None:
    print("torch is not installed: its side is left out")
else:
    import torch

    t = torch.tensor(x, requires_grad=True)
    (straight_through(torch.autograd.Function, torch)(t, 4) ** 2).sum().backward()
    print(f"largest difference from torch: {np.abs(grad - t.grad.numpy()).max():.1e}")
    assert np.allclose(grad, t.grad)


# %% A layer of 9 levels learns with that gradient, and without it learns nothing.
data = np.random.default_rng(0)
inputs = data.standard_normal((256, 16)).astype(np.float32)
targets = np.tanh(inputs @ data.uniform(-1, 1, (16, 4)).astype(np.float32))


def train(rounded):
    loss = lambda w: jnp.mean((jnp.tanh(inputs @ rounded(w)) - targets) ** 2)
    step = lambda w, _: (w - 0.5 * jax.grad(loss)(w), loss(w))
    return jax.lax.scan(step, jnp.full((16, 4), 0.05), length=150)[1]


curves = {
    "no rounding": train(lambda w: w),
    "rounding, JAX's gradient": train(lambda w: jnp.round(w * 4) / 4),
    "rounding, straight through": train(lambda w: quantise(w, 4)),
}
print("losses at the end:", {name: f"{losses[-1]:.4f}" for name, losses in curves.items()})


# %% Attention that keeps one number per row instead of the weights, and computes them again.
class Attention(fg.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        s = q @ k.T / q.shape[1] ** 0.5
        lse = jax.nn.logsumexp(s, axis=1, keepdims=True)
        out = jnp.exp(s - lse) @ v
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, g):
        q, k, v, out, lse = ctx.saved_tensors
        p = jnp.exp(q @ k.T / q.shape[1] ** 0.5 - lse)
        ds = p * (g @ v.T - (g * out).sum(1, keepdims=True)) / q.shape[1] ** 0.5
        return ds @ k, ds.T @ q, p.T @ g


plain = lambda q, k, v: jax.nn.softmax(q @ k.T / q.shape[1] ** 0.5) @ v


def kept(fun, tokens):
    like = jax.ShapeDtypeStruct((tokens, 64), jnp.float32)
    return fg.saved_tensors(fun)(like, like, like).bytes / 2**20


lengths = [256, 512, 1024, 2048, 4096]
both = {"plain code": plain, "Attention(fg.Function)": Attention.apply}
memory = {name: [kept(fun, n) for n in lengths] for name, fun in both.items()}
q, k, v = data.standard_normal((3, 32, 8)).astype(np.float32)
hessian = lambda fun: jax.jit(jax.hessian(lambda q: jnp.sin(fun(q, k, v)).sum()))(q)
apart = float(np.abs(hessian(plain) - hessian(Attention.apply)).max())
print("MiB kept at 4096 tokens:", {name: f"{sizes[-1]:.1f}" for name, sizes in memory.items()})
print(f"second derivatives apart by {apart:.1e}")


# %% What is wrong says so.
class Careless(fg.Function):
    forward = staticmethod(lambda ctx, params: params["w"].sum() * params["b"])
    backward = staticmethod(lambda ctx, g: g)  # for a dict: custom_vjp broadcasts it


try:
    jax.grad(Careless.apply)({"w": jnp.ones(3), "b": 2.0})
except ValueError as error:
    said = str(error).splitlines()[0]
print(said)

# %% The picture.
from matplotlib.figure import Figure

figure = Figure(figsize=(10, 4), layout="constrained")
left, right = figure.subplots(1, 2)
left.plot(np.stack(list(curves.values()), 1), label=list(curves))
left.set(xlabel="step", ylabel="loss", yscale="log", title="A layer of 9 levels")
right.loglog(lengths, np.stack(list(memory.values()), 1), "o-", base=2, label=list(memory))
right.set(xlabel="tokens", ylabel="MiB kept for backward", title="Attention, one head of 64")
right.set_xticks(lengths, lengths, minor=False)
right.set_yticks(ticks := [0.25, 1, 4, 16, 64], ticks)
left.legend(loc="upper right", bbox_to_anchor=(1, 0.93))
right.legend()
out = Path(__file__).parent / "_out" / "03_function.png"
out.parent.mkdir(exist_ok=True)
figure.savefig(out, dpi=110)

# %% What must hold.
assert np.array_equal(tangent, np.abs(x) <= 1) and apart < 1e-5
flat, learnt = curves["rounding, JAX's gradient"], curves["rounding, straight through"]
assert flat[-1] == flat[0] and learnt[-1] < learnt[0] / 10
assert memory["Attention(fg.Function)"][-1] < memory["plain code"][-1] / 10
assert "Careless.backward: the gradient of params has its tree" in said
