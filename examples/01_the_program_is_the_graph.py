# %% [markdown]
# # The program is the graph
#
# *In PyTorch every operation on a tensor with `requires_grad=True` adds a node to a graph:
# `loss.grad_fn` is its end, `next_functions` lead back to the leaves, `backward()` walks it and
# adds what it finds to `.grad`. A JAX array has no `grad_fn`. Where is the graph?*
#
# It is the program. A function can be traced and read, before anything runs.

# %% A net of two layers, in torch first: its graph is found by following `next_functions`.
import importlib.util
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import funcgrad as fg

rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
params = {"w1": draw(3, 8), "b1": draw(8), "w2": draw(8, 1)}
x, y = draw(16, 3), draw(16, 1)
theirs = None
if importlib.util.find_spec("torch") is None:
    print("torch is not installed: its side is left out")
else:
    import torch

    p = {name: torch.tensor(leaf, requires_grad=True) for name, leaf in params.items()}
    hidden = torch.tanh(torch.tensor(x) @ p["w1"] + p["b1"])
    torch_loss = ((hidden @ p["w2"] - torch.tensor(y)) ** 2).mean()
    theirs, fn = [], torch_loss.grad_fn
    while fn is not None:
        theirs.append(fn.name())
        fn = fn.next_functions[0][0]
    print("torch:", " → ".join(theirs))


# %% The same here. Both passes are shown, with what is kept for the second (◆ in the drawing),
# sizes, floating-point operations and the line that made each node.
def loss(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


graph = fg.graph(loss, argnums=0)(params, x, y)
print(graph)
chain, node = [], graph.backward[0]
while following := graph.readers(node):  # `next_functions`
    node = following[-1]
    chain.append(node.operation)
print("here:", " → ".join(chain), node.name)

# %% A leaf is an argument that one differentiates: there is no flag on an array, so there is
# none to forget. An integer is refused.
gradients = [node.name for node in graph.backward if node.operation == "gradient"]
try:
    jax.grad(lambda n: n * 2.0)(3)
except TypeError as error:
    refusal = str(error).splitlines()[0]
print("gradients of", gradients, "-", refusal)

# %% Saved tensors: those nodes whose values the backward pass reads. `fg.saved_tensors` lists
# them alone, `fg.checkpoint` decides about them (lesson 6).
saved = fg.saved_tensors(loss, argnums=0)(params, x, y)
print(f"{graph.saved_bytes} bytes are kept, {saved.computed_bytes} of them computed")


# %% The version counter watches for saved tensors that were changed in place, and `backward()`
# raises. Here nothing can be changed: `.at[0].set` makes another array, and both have their use.
def spoil(x):
    kept = jnp.exp(x)
    try:
        kept[0] = 1.0
    except TypeError as error:
        print("in place:", str(error).splitlines()[0][:70])
    return (kept * kept.at[0].set(1.0)).sum()


spoilt = jax.grad(spoil)(jnp.zeros(2))

# %% `retain_graph`: the backward pass is a function. Nothing is freed, it is called at will.
value, pull = jax.vjp(lambda x: x**3, jnp.array([1.0, 2.0]))
twice = [pull(jnp.array(seed))[0] for seed in ([1.0, 0.0], [0.0, 1.0])]
print("two seeds, one forward pass:", *twice)

# %% Accumulation: `.grad` of a leaf adds up until `zero_grad()`, and a forgotten call is a wrong
# step. A gradient is returned here; who wants a sum writes one, and micro-batches have a function.
grads = jax.grad(loss)(params, x, y)
small = fg.accumulate_grads(lambda *args: (loss(*args) * len(args[1]), len(args[1])), 4)
in_parts = small(params, x, y).grads


# %% A drawing, and a page to zoom, search and open groups in: a block of a transformer.
class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(4, name="attention")(nn.LayerNorm()(x))
        return x + nn.Dense(32)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))


block, tokens = Block(), jax.ShapeDtypeStruct((2, 10, 32), jnp.float32)
shapes = jax.eval_shape(block.init, jax.random.key(0), tokens)  # shapes are enough


def transformer_block(params, x):
    return (block.apply(params, x) ** 2).mean()


large = fg.graph(transformer_block)(shapes, tokens)
out = Path(__file__).parent / "_out"
out.mkdir(exist_ok=True)
graph.save(out / "01_graph.svg")
large.save(out / "01_transformer_block.html")

# %% What must hold.
if theirs is not None:
    assert theirs[:3] == ["MeanBackward0", "PowBackward0", "SubBackward0"]
    torch_loss.backward()
    np.testing.assert_allclose(p["w1"].grad, grads["w1"], rtol=1e-4, atol=1e-6)
assert chain[-1] == "gradient" and gradients == [f"params['{n}']" for n in sorted(params)]
assert graph.saved_bytes == saved.bytes
assert spoilt.tolist() == [1.0, 2.0]
assert np.stack(twice).tolist() == [[3.0, 0.0], [0.0, 12.0]]
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), in_parts, grads)
assert large.flops("backward") > large.flops("forward") > 2 * 20 * 32 * 128
assert "attention" in large.svg() and "tanh" in str(graph)
