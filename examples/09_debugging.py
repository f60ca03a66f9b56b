# %% [markdown]
# # Debugging: where does the NaN come from?
#
# *In PyTorch I switch on `torch.autograd.set_detect_anomaly(True)` and get a traceback of the
# forward operation whose gradient is NaN. In JAX the step is one compiled program; the loss is
# NaN, and nobody says where. What do I do?*
#
# Put `fg.detect_anomaly` around the step. While all is well it looks at the result and nothing
# else; when something is not finite it runs the program again and says where it began.

# %% A mixture of two bumps is fitted to a line of points. One of its bumps has all its weight
# taken away, and somebody has guarded the logarithm with a `where`.
import importlib.util
import linecache
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import funcgrad as fg

rng = np.random.default_rng(0)
points = jnp.asarray(np.concatenate([rng.normal(-2, 0.5, 60), rng.normal(1, 1.0, 60)]))
RATE = 0.05


def loss(params, x):
    weights = jnp.square(params["weight"])
    log_weights = jnp.where(weights > 0, jnp.log(weights), -1e9)
    bumps = -0.5 * ((x[:, None] - params["mean"]) / params["width"]) ** 2
    return -jax.nn.logsumexp(bumps - jnp.log(params["width"]) + log_weights, axis=1).mean()


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value


start = {
    "weight": jnp.array([0.5, 0.5, 0.0]),
    "mean": jnp.array([-1.0, 0.5, 3.0]),
    "width": jnp.ones(3),
}

# %% The loss is finite, and so are two of the three gradients. After one more step everything is
# NaN, and the place where that shows is not the place where it began.
checked = fg.detect_anomaly(jax.jit(step))
try:
    checked(start, points)
except fg.AnomalyError as error:
    report = error.report
print(report)

# %% PyTorch, at the same place. Its gradient is NaN as well; the line that it names is the one
# of the logarithm, and what a `where` has to do with it is for the reader to know.
if importlib.util.find_spec("torch") is None:
    print("torch is not installed: its side is left out")
else:
    import warnings

    import torch

    weight = torch.tensor([0.5, 0.5, 0.0], requires_grad=True)
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the traceback comes as a warning
        try:
            w = weight.square()
            torch.where(w > 0, torch.log(w), -1e9).logsumexp(0).backward()
        except RuntimeError as error:
            said = str(error)
    print(said)
    assert "LogBackward0" in said


# %% The repair is the one that the report prints, in the names of this file: two `where`.
def repaired(params, x):
    weights = jnp.square(params["weight"])
    log_weights = jnp.where(weights > 0, jnp.log(jnp.where(weights > 0, weights, 1.0)), -1e9)
    bumps = -0.5 * ((x[:, None] - params["mean"]) / params["width"]) ** 2
    return -jax.nn.logsumexp(bumps - jnp.log(params["width"]) + log_weights, axis=1).mean()


fit = fg.detect_anomaly(jax.jit(jax.value_and_grad(repaired)))
params, curve = start, []
for _ in range(60):
    value, grads = fit(params, points)
    params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    curve.append(float(value))


# %% In a loop the iteration is named, in a batch the rows, if an experiment shows which.
def roll(decay, x):
    def move(state, t):
        state = jnp.exp(decay * t) * state + x
        return state, state

    return jax.lax.scan(move, x, jnp.arange(40.0))[1]


try:
    fg.detect_anomaly(roll)(jnp.float32(3.0), jnp.ones(2))
except fg.AnomalyError as error:
    in_loop = error.report
print(in_loop)

# %% The picture: the state up to the iteration that is named, and the fit before and after.
from matplotlib.figure import Figure

bad = int(in_loop.path[0].split("iteration ")[1].split()[0])
states = np.asarray(roll(jnp.float32(3.0), jnp.ones(2)))[:, 0]
figure = Figure(figsize=(9.5, 3.8), layout="constrained")
left, right = figure.subplots(1, 2)
left.semilogy(states[: bad + 1], "o-")
left.axvline(bad, color="tab:red", label=f"iteration {bad}, as reported")
left.axhline(np.finfo(np.float32).max, color="gray", linestyle="--", label="largest float32")
left.set(xlabel="iteration", ylabel="state", ylim=(1, 1e42), title="A scan that overflows")
right.plot(curve, label="two where")
right.plot([0], [float(loss(start, points))], "rx", label="one where: NaN after this step")
right.set(xlabel="step", ylabel="loss", title="The masked logarithm")
left.legend(), right.legend()
out = Path(__file__).parent / "_out"
out.mkdir(exist_ok=True)
figure.savefig(out / "09_debugging.png", dpi=110)

# %% What must hold.
assert report.line.code == linecache.getline(__file__, report.line.line).strip()
assert "jnp.log(weights)" in report.line.code and report.reached[0] == "result[0]['weight']"
assert "jnp.log(jnp.where(weights > 0, weights, 1.0))" in report.repair
assert math.isfinite(curve[-1]) and curve[-1] < curve[0]
assert np.isfinite(states[bad - 1]) and not np.isfinite(states[bad])
