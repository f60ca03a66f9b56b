# %% [markdown]
# # Is my gradient right?
#
# *In PyTorch I wrote a `backward` and called `torch.autograd.gradcheck` on it, in double precision,
# or it failed for no reason. In JAX everything is float32. What do I call, and what does it say
# when it fails?*

# %% A rule by hand: softplus, which has overflowed once, and so got a backward of its own.
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import funcgrad as fg


class Softplus(fg.Function):
    @staticmethod
    def forward(ctx, x, sharpness):
        ctx.save_for_backward(x, sharpness)
        return jnp.logaddexp(sharpness * x, 0.0) / sharpness

    @staticmethod
    def backward(ctx, g):
        x, sharpness = ctx.saved_tensors
        slope = jax.nn.sigmoid(sharpness * x)
        value = jnp.logaddexp(sharpness * x, 0.0)
        return g * slope, jnp.sum(g * (x * slope - value / sharpness))  # ... / sharpness, forgotten


x, sharpness = jnp.array([-1.0, 0.0, 2.0]), jnp.array(3.0)
report = fg.gradcheck(Softplus.apply, (x, sharpness), raise_exception=False)
print(report)

# %% What is compared: slopes of the function a small step apart, and the gradient. The step is a
# bargain between curvature, which wants it small, and rounding, which float32 has too much of:
# `gradcheck` computes in float64 by itself, and leaves your program's own precision alone.
steps = np.logspace(-11, -0.5, 60)


def errors(dtype, fun, at, slope):
    with jax.enable_x64(True):
        shifted = [np.asarray(fun((at + s * steps).astype(dtype)), float) for s in (1, -1)]
    return np.abs((shifted[0] - shifted[1]) / (2 * steps) - slope)


sine = {dtype: errors(dtype, jnp.sin, 1.0, np.cos(1.0)) for dtype in (np.float32, np.float64)}

# %% At a kink there is no slope to agree with: relu at 0 fails, as it does in torch, and is called
# what it is.
kink = fg.gradcheck(jax.nn.relu, jnp.array([0.0, 1.0]), raise_exception=False)
print(kink)
at_kink = errors(np.float64, jax.nn.relu, 0.0, 0.0)

# %% The same verdicts in torch.
if importlib.util.find_spec("torch") is None:
    print("torch is not installed: its side is left out")
else:
    import torch

    point = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    check = lambda fun: torch.autograd.gradcheck(fun, (point,), raise_exception=False)
    verdicts = [check(fun) for fun in (torch.relu, torch.nn.functional.softplus)]
    print(f"torch: relu at 0 {verdicts[0]}, softplus {verdicts[1]}")
    assert verdicts == [bool(kink), bool(fg.gradcheck(jax.nn.softplus, jnp.array([0.0, 1.0])))]

# %% The picture.
from matplotlib.figure import Figure

figure = Figure(figsize=(9.5, 3.8), layout="constrained")
left, right = figure.subplots(1, 2)
left.loglog(steps, sine[np.float32], color="#d9730d", label="sin at 1, float32")
left.loglog(steps, sine[np.float64], color="#1f6fb4", label="sin at 1, float64")
left.loglog(steps, at_kink, "k:", label="relu at 0")
left.axvline(1e-6, color="0.7", linewidth=1)
left.text(1.4e-6, 1e-7, "eps=1e-6", color="0.4")
left.axhline(1e-5 + 1e-3 * np.cos(1.0), color="0.7", linewidth=1, linestyle="--")
left.text(1e-11, 8e-5, "allowed", color="0.4")
left.set(xlabel="step", ylabel="error", ylim=(1e-12, 1e4), title="Differences against the gradient")
left.legend(loc="upper right", frameon=False, fontsize=8)
z = np.linspace(-1, 1, 201)
right.plot(z, np.maximum(z, 0), color="black", label="relu")
right.plot(z, 0 * z, color="#1f6fb4", linestyle="--", label="gradient at 0: slope 0")
right.plot(z, 0.5 * z, color="#b3261e", linestyle="--", label="difference: slope ½")
right.set(xlabel="x", ylim=(-0.6, 1.05), title="A kink: no slope is right")
right.legend(loc="upper left", frameon=False, fontsize=8)
out = Path(__file__).parent / "_out"
out.mkdir(exist_ok=True)
figure.savefig(out / "09_gradcheck.png", dpi=110)

# %% What must hold.
assert not report and {entry.input for entry in report.entries} == {"inputs[1]"}
assert "kink: slope 0 on the left, 1 on the right" in str(kink)
assert sine[np.float64].min() < 1e-9 < 1e-6 < sine[np.float32].min()
