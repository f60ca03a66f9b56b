"""Rows of section 9: finding what went wrong, and comparing the two sides."""

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad.parity._table import Row, agree, error_of, row

detect_anomaly = Row(
    "debugging.detect_anomaly",
    "set_detect_anomaly",
    "torch.autograd.set_detect_anomaly(True)",
    "fg.detect_anomaly(fun)(x)",
    needs=("detect_anomaly",),
    note="The first equation that makes a non-finite value, with its source line.",
)
gradcheck = Row(
    "debugging.gradcheck",
    "gradcheck",
    "torch.autograd.gradcheck(f, (x,))",
    "fg.gradcheck(f, (x,))",
    needs=("gradcheck",),
    note="In float64 by itself; kinks are found.",
)
gradgradcheck = Row(
    "debugging.gradgradcheck",
    "gradgradcheck",
    "torch.autograd.gradgradcheck(f, (x,))",
    "fg.gradgradcheck(f, (x,))",
    needs=("gradgradcheck",),
)


@row(
    "debugging.views",
    concept="_base, views",
    torch="y = x.view(-1); y._base is x",
    here="y = x.at[0].set(9.0)  # views: impossible",
    note="A write through a view changes the base; an update here leaves every other name alone.",
)
def views():
    """Torch changes x through its view; JAX cannot, and gives a new array."""
    import torch

    x = torch.zeros(2, 2)
    y = x.view(-1)
    y[0] = 9.0

    u = jnp.zeros((2, 2))
    v = u.reshape(-1).at[0].set(9.0)

    def write(v):
        v[0] = 9.0

    refused = error_of(lambda: write(v), TypeError, "item assignment")
    return agree(
        torch_view=(y._base is x, True),
        torch_base=(x, [[9, 0], [0, 0]]),
        here_base=(u, [[0, 0], [0, 0]]),
        new=(y, v, [9, 0, 0, 0]),
        said={"here": refused},
    )


@row(
    "debugging.bridge",
    concept="tensors to arrays and back",
    torch="tensor.numpy(), torch.from_numpy(array)",
    here="parity.to_jax(tree), parity.to_torch(tree)",
    needs=("parity.to_jax", "parity.to_torch", "parity.grads_to_torch"),
    note="Dtypes are kept, bfloat16 too; gradients of complex numbers are conjugated.",
)
def bridge():
    """A tree there and back, and a complex gradient in either convention."""
    import torch

    from funcgrad import parity

    tree = {"w": torch.randn(2, 3).T, "half": torch.ones(2, dtype=torch.bfloat16)}
    there = parity.to_jax(tree)
    back = parity.to_torch(there)

    z = torch.tensor(1.0 + 2.0j, requires_grad=True)
    (z.abs() ** 2).backward()
    ours = jax.grad(lambda z: jnp.abs(z) ** 2)(parity.to_jax(z))

    return agree(
        w=(tree["w"], there["w"], back["w"]),
        dtype=(back["half"].dtype == tree["half"].dtype, there["half"].dtype == jnp.bfloat16),
        gradient=(z.grad, parity.grads_to_torch(ours), 2 + 4j),
    )


@row(
    "debugging.modules",
    concept="weights and gradients of modules",
    torch="module.state_dict(), p.grad",
    here="parity.flax_params(params, module)",
    needs=("parity.flax_params", "parity.flax_grads"),
    note="Kernels are transposed, names matched; whatever finds no partner is an error.",
)
def modules():
    """A convolution and a dense layer: same output, and torch's gradients in Flax's layout."""
    import flax.linen as nn
    import torch

    from funcgrad import parity

    theirs = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 3), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    x = torch.randn(1, 2, 6)
    y = theirs(x)
    (y**2).sum().backward()

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.tanh(nn.Conv(3, (3,), padding="VALID", name="conv", param_dtype=x.dtype)(x))
            return nn.Dense(2, name="dense", param_dtype=x.dtype)(h.swapaxes(1, 2))

    x, rename = parity.to_jax(x).swapaxes(1, 2), {"0": "conv", "2": "dense"}
    template = jax.eval_shape(Net().init, jax.random.key(0), x)
    params = parity.flax_params(template, theirs, rename=rename)
    ours = Net().apply(params, x)
    grads = jax.grad(lambda params: (Net().apply(params, x) ** 2).sum())(params)
    known = parity.flax_grads(template, theirs, rename=rename)

    leaves = zip(jax.tree.leaves(known), jax.tree.leaves(grads), strict=True)
    return agree(output=(y, ours), **{f"grad_{i}": pair for i, pair in enumerate(leaves)})


@row(
    "debugging.compare",
    concept="a torch function beside a JAX function",
    torch="torch.testing.assert_close(a, b)",
    here="parity.compare(jax_fun, torch_fun, inputs)",
    needs=("parity.compare",),
    note="Value, gradient, jvp, hvp and per-sample gradients, leaf by leaf, with hints.",
)
def compare():
    """The same loss agrees in every kind; another default is found and named."""
    import torch

    from funcgrad import parity

    inputs = (np.array([0.5, -1.0, 2.0]), np.array([[1.0, 2.0, 3.0], [0.0, -1.0, 1.0]]))
    same = parity.compare(
        lambda w, x: (jnp.tanh(x @ w) ** 2).sum(),
        lambda w, x: (torch.tanh(x @ w) ** 2).sum(),
        inputs,
        what=("value", "grad", "jvp", "hvp", "per_sample"),
    )
    other = parity.compare(jnp.var, torch.var, inputs[:1], what=("value",))

    return agree(
        difference=(same.max_abs, 0),
        ok=(same.ok, True),
        differs=(other.ok, False),
        said={"hint": str(other.hints[0])},
    )
