# %% [markdown]
# # How do I clip gradients and accumulate micro-batches?
#
# *In torch I call `loss.backward()` for each micro-batch, then `clip_grad_norm_`, then step. What
# replaces them, and which mistakes do they let through?*
#
# Here the batch is one argument and its gradient one result: a function of the whole batch that
# runs in pieces, then a function of the gradients. Three mistakes that no error reports: a mean of
# means where sentences differ in length; a norm that overflows and turns all gradients to zeros;
# and, on several devices, a norm of one's own part.

# %% Sentences of unequal length: a token is a step of a linear recurrence, padding is masked.
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import importlib.util
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcgrad as fg

rng = np.random.default_rng(0)
lengths = np.sort(rng.geometric(0.12, 64).clip(1, 40))
x = rng.standard_normal((64, 40, 8)).astype(np.float32)
drift = np.linspace(0, 2, 40)  # later tokens are harder, so long sentences teach more
y = (x.sum(-1) + drift).astype(np.float32)
params = {"w": jnp.zeros(8), "b": jnp.zeros(())}


def losses_and_tokens(params, x, y, lengths):
    keep = jnp.arange(40) < lengths[:, None]
    squares = (x @ params["w"] + params["b"] - y) ** 2
    return jnp.where(keep, squares, 0).sum(1), lengths


def whole(params):
    losses, tokens = losses_and_tokens(params, x, y, lengths)
    return losses.sum() / tokens.sum()


# %% One gradient, some sentences at a time. `fun` gives sums, so each token counts the same.
micros = [1, 4, 16, 64]
accumulate = lambda *args: [fg.accumulate_grads(losses_and_tokens, m)(*args) for m in micros]
outs = jax.jit(accumulate)(params, x, y, lengths)
full = jax.jit(jax.grad(whole))(params)
apart = lambda a, b: math.hypot(*[np.linalg.norm(np.subtract(a[k], b[k])) for k in "wb"])
size = float(fg.global_norm(full))


def mean_of_means(micro):
    def mean(params):
        losses, tokens = losses_and_tokens(params, x, y, lengths)
        of_micro = lambda rows: rows.reshape(-1, micro).sum(1)
        return jnp.mean(of_micro(losses) / of_micro(tokens))

    return jax.grad(mean)(params)


all_means = jax.jit(lambda: [mean_of_means(micro) for micro in micros])()
wrong = [apart(means, full) / size for means in all_means]
right = [apart(out.grads, full) / size for out in outs]
print(f"mean of means, 4 at a time: {wrong[1]:.0%} off; accumulated: {right[1]:.0e}")

# %% The same in torch, with the sum of the weights known beforehand; then its clipping.
clipped, norm = fg.clip_grad_norm(outs[1].grads, 1.0, eps=1e-6)
if importlib.util.find_spec("torch") is None:
    print("torch is not installed: its side is left out")
else:
    import torch

    w, b = (torch.zeros(n, requires_grad=True) for n in (8, 1))
    keep = torch.arange(40) < torch.tensor(lengths)[:, None]
    for i in range(0, 64, 8):
        rows = slice(i, i + 8)
        squares = (torch.tensor(x[rows]) @ w + b - torch.tensor(y[rows])) ** 2
        ((squares * keep[rows]).sum() / lengths.sum()).backward()
    torch_norm = torch.nn.utils.clip_grad_norm_([w, b], 1.0)
    print(f"norm: torch {torch_norm:.5f}, here {norm:.5f}")
    assert math.isclose(torch_norm, norm, rel_tol=1e-5)
    np.testing.assert_allclose(clipped["w"], w.grad, rtol=1e-4, atol=1e-6)

# %% Large gradients. The square of 1e20 is no float32: elsewhere the norm is infinite, and what is
# divided by it is zero.
sizes = np.logspace(-30, 38, 69, dtype=np.float32)
rows = sizes[:, None] * np.float32([0.6, 0.8])
naive = jax.jit(lambda rows: jnp.sqrt(jnp.sum(rows**2, 1)))(rows)
safe = jax.jit(jax.vmap(fg.global_norm))(rows)

# %% Four devices. A leaf in parts, a leaf on all of them: the types say which is which, and the
# norm is that of the whole. `optax.clip_by_global_norm` here would see the device's own part.
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
grads = {"parts": np.float32([6, 6, 6, 0]), "copy": np.float32([4, 4, 4])}
specs = {"parts": P("data"), "copy": P()}
norm_of = jax.shard_map(fg.global_norm, mesh=mesh, in_specs=(specs,), out_specs=P())
on_devices = jax.jit(norm_of)(grads)
step = jax.shard_map(
    lambda *args: fg.accumulate_grads(losses_and_tokens, 4)(*args).grads,
    mesh=mesh, in_specs=(P(), P("data"), P("data"), P("data")), out_specs=P(),
)  # fmt: skip
from_devices = jax.jit(step)(params, x, y, jnp.asarray(lengths))
print(f"norm of parts and a copy: {on_devices:.2f}, not {math.sqrt(204):.2f} or 6 to 9")

# %% The picture.
from matplotlib.figure import Figure

figure = Figure(figsize=(9.5, 3.6), layout="constrained")
left, right_axes = figure.subplots(1, 2)
left.plot(micros, wrong, "o-", color="#c44e52", label="mean of means")
left.plot(micros, right, "o-", color="#4c72b0", label="accumulate_grads")
left.set_xscale("log", base=2)
left.set(xlabel="sentences in a micro-batch", ylabel="distance from the whole, relative")
left.set_xticks(micros, micros)
left.set_title("the gradient of a batch of 64", fontsize=10)
left.legend(frameon=False)
seen = np.isfinite(naive) & (np.asarray(naive) > 0)
right_axes.loglog(sizes, safe, color="#4c72b0", linewidth=2, label="global_norm")
line = {"color": "#c44e52", "linewidth": 6, "alpha": 0.5, "label": "root of the sum of squares"}
right_axes.loglog(sizes[seen], naive[seen], **line)
right_axes.set(xlabel="true norm of a float32 gradient", ylabel="norm found")
right_axes.set_title("outside its line, a norm is zero or infinite", fontsize=10)
right_axes.legend(frameon=False)
folder = Path(__file__).parent / "_out"
folder.mkdir(exist_ok=True)
figure.savefig(folder / "07_clipping_and_accumulation.png", dpi=110)

# %% What must hold.
assert max(right) < 1e-5 < 0.02 < wrong[0]
np.testing.assert_allclose(safe, sizes, rtol=1e-6)
assert not np.isfinite(naive[sizes > 3e19]).any()
assert math.isclose(on_devices, math.sqrt(156), rel_tol=1e-6)
assert apart(from_devices, full) < 1e-5 * size
