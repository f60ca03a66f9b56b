"""Rows of section 9: finding what went wrong, and comparing the two sides."""

import jax
import jax.numpy as jnp
import numpy as np

import funcgrad as fg
from funcgrad.parity._table import agree, error_of, row


@row(
    "debugging.detect_anomaly",
    concept="set_detect_anomaly",
    torch="torch.autograd.set_detect_anomaly(True)",
    here="fg.detect_anomaly(fun)(x)",
    needs=("detect_anomaly",),
    note="The first equation that makes a non-finite value, with its source line.",
)
def detect_anomaly():
    """The same gradients, finite or not; torch names an operation, here the cause has a line."""
    import warnings

    import torch

    def blame(theirs, ours, at):
        """Torch's gradient and ours, torch's words for a NaN, and the report."""
        x = torch.tensor(at, requires_grad=True)
        (grad,) = torch.autograd.grad(theirs(x), x)
        said = "nothing"
        with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                torch.autograd.grad(theirs(x), x)
            except RuntimeError as error:
                said = str(error)
        gradient = jax.grad(ours)
        try:
            fg.detect_anomaly(gradient)(jnp.asarray(at))
        except fg.AnomalyError as error:
            return (grad, gradient(jnp.asarray(at))), said, error.report
        raise AssertionError("no anomaly was found")

    def softmax(exp, x):
        powers = exp(x)
        return (powers / powers.sum())[0]

    root, root_said, root_found = blame(
        lambda x: torch.sqrt(x).sum(), lambda x: jnp.sqrt(x).sum(), [4.0, 0.0]
    )
    log, log_said, log_found = blame(
        lambda x: torch.log(x).sum(), lambda x: jnp.log(x).sum(), [1.0, 0.0]
    )
    soft, soft_said, soft_found = blame(
        lambda x: softmax(torch.exp, x), lambda x: softmax(jnp.exp, x), [800.0, 0.0]
    )
    trap, trap_said, trap_found = blame(
        lambda a: torch.where(a > 0, a.sqrt(), 0.0).sum(),
        lambda a: jnp.where(a > 0, jnp.sqrt(a), 0.0).sum(),
        [1.0, -1.0],
    )
    found = (root_found, log_found, soft_found, trap_found)
    is_repaired = "where(a > 0, a, 1.0)" in trap_found.repair
    return agree(
        sqrt_at_zero=root,
        log_at_zero=log,
        softmax_overflow=soft,
        where=trap,
        lines=([report.line is not None for report in found], [True] * 4),
        # To torch an infinite gradient is no anomaly, and one that turns NaN later is not named.
        torch_silent=([root_said == "nothing", log_said == "nothing"], [True, True]),
        cause=([soft_found.operation == "exp", is_repaired], [True, True]),
        said={"torch, softmax": soft_said, "torch, where": trap_said, "here": str(trap_found)},
    )


@row(
    "debugging.gradcheck",
    concept="gradcheck",
    torch="torch.autograd.gradcheck(f, (x,), raise_exception=False)",
    here="fg.gradcheck(f, (x,), raise_exception=False)",
    needs=("gradcheck",),
    note="The same tolerances, in fast mode too; in float64 by itself, kinks are called that.",
)
def gradcheck():
    """Relative errors of 9e-4 and 1.1e-3, absolute ones of 9e-6 and 1.1e-5, and relu at 0."""
    import torch

    slopes = [(1e4, 9e-4, 0), (1e4, 1.1e-3, 0), (0, 0, 9e-6), (0, 0, 1.1e-5)]
    x, kink = np.array([1.0, 2.0]), np.array([0.0, 1.0])
    theirs, ours = [], []
    for slope, relative, absolute in slopes:
        wrong = slope * (1 + relative) + absolute

        class Torch(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, slope=slope):
                return slope * x.sum()

            @staticmethod
            def backward(ctx, g, wrong=wrong):
                return wrong * g * torch.ones(2)

        class Here(fg.Function):
            @staticmethod
            def forward(ctx, x, slope=slope):
                return slope * x.sum()

            @staticmethod
            def backward(ctx, g, wrong=wrong):
                return wrong * g * jnp.ones(2)

        for fast in (False, True):
            given = {"raise_exception": False, "fast_mode": fast}
            t = torch.tensor(x, requires_grad=True)
            theirs.append(torch.autograd.gradcheck(Torch.apply, (t,), **given))
            ours.append(fg.gradcheck(Here.apply, (x,), **given).ok)

    t = torch.tensor(kink, requires_grad=True)
    theirs.append(torch.autograd.gradcheck(torch.relu, (t,), raise_exception=False))
    found = fg.gradcheck(jax.nn.relu, (kink,), raise_exception=False)
    ours.append(found.ok)

    expected = [True, True, False, False] * 2 + [False]
    return agree(verdicts=(theirs, ours, expected), said={"relu": found.entries[0].because})


@row(
    "debugging.gradgradcheck",
    concept="gradgradcheck",
    torch="torch.autograd.gradgradcheck(f, (x,), raise_exception=False)",
    here="fg.gradgradcheck(f, (x,), raise_exception=False)",
    needs=("gradgradcheck",),
    note="Finds a backward half that holds constant what it should not.",
)
def gradgradcheck():
    """A right rule of x³, and one whose backward detaches x: right to first order only."""
    import torch

    x, theirs, ours = np.array([1.0, -2.0]), [], []
    for detach in (False, True):

        class Torch(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x**3

            @staticmethod
            def backward(ctx, g, detach=detach):
                (x,) = ctx.saved_tensors
                return 3 * (x.detach() if detach else x) ** 2 * g

        class Here(fg.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x**3

            @staticmethod
            def backward(ctx, g, detach=detach):
                (x,) = ctx.saved_tensors
                return 3 * (jax.lax.stop_gradient(x) if detach else x) ** 2 * g

        for name in ("gradcheck", "gradgradcheck"):
            t = torch.tensor(x, requires_grad=True)
            theirs.append(getattr(torch.autograd, name)(Torch.apply, (t,), raise_exception=False))
            ours.append(getattr(fg, name)(Here.apply, (x,), raise_exception=False).ok)

    return agree(verdicts=(theirs, ours, [True, True, True, False]))


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
