"""Rows of section 8: Flax modules as functions, stacked and mapped."""

from typing import Any

import jax
import jax.numpy as jnp

import funcgrad as fg
from funcgrad.parity._table import agree, error_of, row


@row(
    "transforms.functional_call_linen",
    concept="functional_call of a Linen module",
    torch="functional_call(module, params, (x,))",
    here="module.apply({'params': params}, x)",
    note="A Linen module has no parameters inside: every call is a functional call.",
)
def functional_call_linen():
    """A linear layer called with parameters from outside, and its gradient in them."""
    import flax.linen as nn
    import torch

    weight, x = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [1.0, -1.0]
    module = torch.nn.Linear(2, 3, bias=False)
    call = lambda w: torch.func.functional_call(module, {"weight": w}, (torch.tensor(x),))
    theirs = torch.func.grad(lambda w: (call(w) ** 2).sum())(torch.tensor(weight))

    dense = nn.Dense(3, use_bias=False)
    apply: Any = lambda kernel: dense.apply({"params": {"kernel": kernel}}, jnp.array(x))
    ours = jax.grad(lambda kernel: (apply(kernel) ** 2).sum())(jnp.array(weight).T)

    # A Linen kernel is (inputs, outputs), a torch weight (outputs, inputs).
    return agree(
        value=(call(torch.tensor(weight)), apply(jnp.array(weight).T)), grad=(theirs, ours.T)
    )


@row(
    "transforms.functional_call",
    concept="functional_call, tied weights",
    torch="torch.func.functional_call(module, params, (x,))",
    here="fg.functional_call(module, params, x).output",
    needs=("functional_call",),
    note="Linen and NNX; state comes back; missing and unexpected names are refused.",
)
def functional_call():
    """A weight under two names: tied 5 + 5, untied 5 + 6, tied with two values refused."""
    import torch
    from flax import nnx

    class Torch(torch.nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.foo = torch.nn.Parameter(torch.tensor(1.0))
            self.bar = self.foo if tied else torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return x + self.foo + self.bar

    class Here(nnx.Module):
        def __init__(self, tied):
            self.foo = nnx.Param(jnp.array(1.0))
            self.bar = self.foo if tied else nnx.Param(jnp.array(1.0))

        def __call__(self, x):
            return x + self.foo[...] + self.bar[...]

    zero, one, both = torch.tensor(0.0), {"foo": 5.0}, {"foo": 5.0, "bar": 6.0}
    tensors = lambda tree: {name: torch.tensor(x) for name, x in tree.items()}
    theirs = lambda tied, tree: torch.func.functional_call(Torch(tied), tensors(tree), (zero,))
    ours = lambda tied, tree: fg.functional_call(Here(tied), tree, 0.0).output
    slope = torch.func.grad(lambda w: torch.func.functional_call(Torch(True), {"foo": w}, (zero,)))
    unknown = lambda: fg.functional_call(Here(True), {"fo": 5.0}, 0.0)

    return agree(
        tied=(theirs(True, one), ours(True, one), ours(True, {"bar": 5.0}), 10),
        untied=(theirs(False, both), ours(False, both), 11),
        grad=(slope(torch.tensor(5.0)), jax.grad(lambda w: ours(True, {"foo": w}))(5.0), 2),
        said={
            "torch": error_of(lambda: theirs(True, both), ValueError, "multiple values"),
            "here": error_of(lambda: ours(True, both), ValueError, "one value; got two"),
            "unknown": error_of(unknown, ValueError, "missing 'bar'; unexpected 'fo'"),
        },
    )


@row(
    "transforms.stack_module_state",
    concept="stack_module_state",
    torch="torch.func.stack_module_state(models)",
    here="fg.stack_modules(models)",
    needs=("stack_modules", "functional_call"),
    note="NNX modules, or variables of a Linen module; another structure is refused by path.",
)
def stack_modules():
    """Three layers with batch statistics: outputs and new statistics equal the loop."""
    import torch
    from flax import nnx

    xs = torch.randn(3, 5, 2)
    theirs = [torch.nn.BatchNorm1d(2) for _ in range(3)]
    for i, model in enumerate(theirs):
        torch.nn.init.constant_(model.weight, i + 1.0)
    stacked = torch.func.stack_module_state(theirs)
    call = lambda p, b, x: torch.func.functional_call(theirs[0], (p, b), (x,))
    out = torch.vmap(call)(*stacked, xs)
    loop = torch.stack([model(x) for model, x in zip(theirs, xs, strict=True)])

    ours = [nnx.BatchNorm(2, epsilon=1e-5, rngs=nnx.Rngs(0)) for _ in range(3)]
    for i, model in enumerate(ours):
        model.scale = nnx.Param(jnp.full(2, i + 1.0))
        model.mean, model.var = nnx.BatchStat(jnp.zeros(2)), nnx.BatchStat(jnp.ones(2))
    call = jax.vmap(lambda variables, x: fg.functional_call(ours[0], variables, x))
    with jax.numpy_dtype_promotion("standard"):  # Flax promotes float64 statistics with float32
        called = call(fg.stack_modules(ours), jnp.asarray(xs.numpy()))
    # torch's momentum counts the other way round: 0.1 there, and 0.99 here.
    means = [10 * model.running_mean for model in theirs]
    return agree(
        output=(loop, out, called.output),
        mean=(torch.stack(means), 100 * called.state["mean"].get_value()),
    )


@row(
    "transforms.ensemble",
    concept="an ensemble by vmap",
    torch="torch.vmap(call)(params, buffers, x)",
    here="jax.vmap(model.apply, (0, None))(stacked, x)",
    note="Stacking is one tree.map.",
)
def ensemble():
    """Three linear models in one call equal the loop over them."""
    import flax.linen as nn
    import torch

    models = [torch.nn.Linear(2, 1) for _ in range(3)]
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    params, buffers = torch.func.stack_module_state(models)
    call = lambda p, b, x: torch.func.functional_call(models[0], (p, b), (x,))
    theirs = torch.vmap(call, (0, 0, None))(params, buffers, x)

    array = lambda t: jnp.asarray(t.detach().numpy())
    trees = [{"params": {"kernel": array(m.weight.T), "bias": array(m.bias)}} for m in models]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    ours = jax.vmap(nn.Dense(1).apply, (0, None))(stacked, array(x))

    return agree(outputs=(theirs, ours, torch.stack([m(x) for m in models])))
