"""Faults planted in small programs: each is found at its line, and where it stands is said."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcgrad as fg
import programs as generated
from conftest import DEEP
from programs import Program, Step, programs

# Compiling is most of what these tests do: without jit, the operations of one serve the next.
EXAMPLES = 200 if DEEP else 2
W = jnp.array([[0.5, -0.3, 0.2], [0.1, 0.4, -0.6], [-0.2, 0.3, 0.7]])
X = jnp.array([[0.5, 1.0, 2.0], [1.5, 0.0, 0.5]])


@dataclasses.dataclass(frozen=True)
class Fault:
    """A program with one line marked ``# fault``, and what the report of it says."""

    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    says: dict[str, Any]
    path: str
    text: str

    @property
    def line(self) -> int:
        lines, first = inspect.getsourcelines(self.build)
        return next(first + i for i, line in enumerate(lines) if "# fault" in line)


FAULTS: dict[str, Fault] = {}


def fault(path: str = "", text: str = "", **says: Any) -> Any:
    def add(build: Any) -> Any:
        FAULTS[build.__name__] = Fault(build, says, path, text)
        return build

    return add


def report_of(fun, *args):
    with pytest.raises(fg.AnomalyError) as caught:
        fg.detect_anomaly(fun)(*args)
    assert str(caught.value.report) in str(caught.value)
    return caught.value.report


# The derivative or the value of one operation


@fault(operation="div", derivative_of="sqrt", phase="backward", kind="inf", reached=("result",))
def sqrt_at_zero():
    def loss(w, x):
        hidden = jnp.tanh(x @ w)
        distance = jnp.sqrt(x)  # fault
        return (hidden * distance).sum()

    return jax.grad(loss, argnums=1), (W, X)


@fault(operation="log", phase="forward", kind="inf", rows="row 1 of 2 of x")
def log_at_zero():
    def loss(w, x):
        p = x.min(axis=1)
        return jnp.log(p).sum() * w.sum()  # fault

    return jax.value_and_grad(loss), (W, X)


@fault(operation="exp", phase="forward", kind="inf")
def softmax_overflow():
    def loss(w, x):
        scores = 300.0 * x @ w
        e = jnp.exp(scores)  # fault
        p = e / e.sum(axis=1, keepdims=True)
        return p[:, 0].sum()

    return jax.value_and_grad(loss), (W, X)


@fault(operation="div", phase="forward", kind="nan")
def zero_over_zero():
    def loss(w, x):
        count = jnp.sum(x > 9.0, axis=1).astype(x.dtype)
        mean = (x * count[:, None]).sum(axis=1) / count  # fault
        return (mean @ x @ w).sum()

    return loss, (W, X)


@fault(derivative_of="sqrt", phase="backward")
def norm_at_zero():
    def loss(w, x):
        gap = x @ w - x @ w
        return jnp.linalg.norm(gap)  # fault

    return jax.value_and_grad(loss), (W, X)


@fault(operation="acos", kind="nan", text="here 2")
def arccos_out_of_range():
    return lambda w, x: (jnp.arccos(x) @ w).sum(), (W, X)  # fault


@fault(kind="inf", phase="backward")
def power_at_zero():
    def loss(w, x):
        y = x**0.5  # fault
        return (y @ w).sum()

    return jax.grad(loss, argnums=1), (W, X)


@fault(phase="backward", kind="nan")
def arctan2_at_the_origin():
    def loss(w, x):
        return jnp.arctan2(x - x, 0.0 * x).sum() + w.sum()  # fault

    return jax.grad(loss, argnums=1), (W, X)


@fault(operation="sub", kind="nan", text="already not finite: a number at")
def softmax_of_a_masked_row():
    def attend(w, x):
        scores = jnp.where(jnp.array([[True, True, False], [False] * 3]), x @ w, -jnp.inf)
        return jax.nn.softmax(scores)  # fault

    return attend, (W, X)


@fault(kind="inf", operation="convert_element_type")
def half_precision_overflow():
    def loss(w, x):
        big = 1e5 * (x @ w)
        low = big.astype(jnp.float16)  # fault
        return low.astype(jnp.float32).sum()

    return loss, (W, X)


@fault(kind="inf", operation="exp")
def bfloat16_overflow():
    def loss(w, x):
        h = (100.0 * x).astype(jnp.bfloat16)
        return jnp.exp(h).sum() + w.sum()  # fault

    return loss, (W, X)


@fault(phase="backward", text="jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0)")
def where_trap():
    def loss(w, x):
        root = jnp.where(x > 0, jnp.sqrt(x), 0.0)  # fault
        return (root @ w).sum()

    return jax.grad(loss, argnums=1), (W, X)


# Inside of other programs


@fault(path="iteration 4 of 6", kind="inf")
def scan():
    def loss(w, x):
        def step(carry, x):
            gate = 1.0 / (4.0 - x)  # fault
            return jnp.tanh(carry @ w) * gate, carry.sum()

        return lax.scan(step, X, jnp.arange(6.0))[0].sum() + x.sum()

    return jax.value_and_grad(loss), (W, X)


@fault(path="iteration 150 of 200", kind="nan")
def long_scan():
    def loss(w, x):
        def step(carry, x):
            carry = 0.9 * carry + jnp.sqrt(149.5 - x)  # fault
            return carry, None

        return lax.scan(step, w.sum(), jnp.arange(200.0))[0] + x.sum()

    return loss, (W, X)


@fault(path="iteration 3 of 6", phase="backward", derivative_of="sqrt")
def backward_of_a_scan():
    def loss(w, x):
        def step(carry, t):
            return carry + jnp.sqrt(w.sum() ** 2 * (t - 3.0) ** 2), None  # fault

        return lax.scan(step, x.sum(), jnp.arange(6.0))[0]

    return jax.value_and_grad(loss), (W, X)


@fault(path="iteration 38", operation="mul", kind="inf")
def long_while():
    def grow(w, x):
        def step(state):
            i, y = state
            return i + 1, y * 10.0  # fault

        return lax.while_loop(lambda state: state[0] < 60, step, (0, jnp.ones(3)))[1] + w + x.sum()

    return grow, (W, X)


@fault(path="branch 1")
def cond():
    def loss(w, x):
        bad = lambda y: jnp.log(y - y)  # fault
        return lax.cond(x.sum() > 0, bad, jnp.sin, x @ w).sum()

    return loss, (W, X)


@fault(rows="row 1 of 2 of x", operation="log")
def sample_of_a_vmap():
    def one(w, x):
        low = jnp.log(jnp.abs(x @ w).sum() * x[1])  # fault
        return low * x[0]

    return jax.vmap(one, (None, 0)), (W, X)


@fault(derivative_of="sqrt", phase="backward")
def checkpoint():
    @jax.checkpoint
    def block(w, x):
        y = jnp.sin(x @ w) + jnp.sqrt(x)  # fault
        return jnp.cos(y)

    return jax.grad(lambda w, x: block(w, x).sum(), argnums=1), (W, X)


@fault(operation="log")
def jit_in_jit():
    @jax.jit
    def inner(x):
        return jnp.log(x - x)  # fault

    outer = jax.jit(lambda w, x: inner(x @ w).sum())
    return lambda w, x: outer(w, x) * 2.0, (W, X)


@fault(path="device d=1", operation="log", text="here 0")
def shard_map():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def local(w, x):
        y = jnp.log(x[:, 1])  # fault
        return lax.psum((y * w.sum()).sum(), "d")

    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P()), (W, X)


@fault(path="iteration 2 of 4", kind="nan")
def scan_in_shard_map():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def local(w, x):
        def step(c, t):
            return c * jnp.sqrt(1.0 - t), None  # fault

        return lax.scan(step, x @ w, jnp.arange(4.0))[0]

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"), check_vma=False
    )
    return mapped, (W, X)


# Rules of one's own


@fault(phase="backward", operation="div", kind="inf", derivative_of=None)
def backward_of_a_custom_vjp():
    @jax.custom_vjp
    def soft(x):
        return jnp.tanh(x)

    def backward(x, g):
        half = jnp.sin(g)
        return (half / x,)

    soft.defvjp(lambda x: (jnp.tanh(x), x), backward)

    def loss(w, x):
        h = soft(x)  # fault: JAX keeps no other line of this rule
        return (h @ w).sum()

    return jax.grad(loss, argnums=1), (W, X)


@fault(phase="forward", operation="log")
def forward_of_a_custom_vjp():
    @jax.custom_vjp
    def soft(x):
        return jnp.tanh(x)

    def forward(x):
        y = jnp.log(x)  # fault
        return y, x

    soft.defvjp(forward, lambda x, g: (g,))
    return jax.value_and_grad(lambda w, x: (soft(x) @ w).sum(), argnums=1), (W, X)


@fault(operation="div", kind="inf")
def rule_of_a_custom_jvp():
    @jax.custom_jvp
    def soft(x):
        return jnp.tanh(x)

    @soft.defjvp
    def _(primals, tangents):
        return soft(primals[0]), tangents[0] / primals[0]  # fault

    return jax.grad(lambda w, x: (soft(x) @ w).sum(), argnums=1), (W, X)


@fault(phase="backward", operation="div", kind="inf")
def backward_of_a_function():
    class Root(fg.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return jnp.sqrt(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g / jnp.sqrt(x)  # fault

    return jax.grad(lambda w, x: (Root.apply(x) @ w).sum(), argnums=1), (W, X)


@fault(operation="log")
def forward_of_a_function():
    class Log(fg.Function):
        @staticmethod
        def forward(ctx, x):
            return jnp.log(x)  # fault

        @staticmethod
        def backward(ctx, g):
            return g

    return lambda w, x: (Log.apply(x) @ w).sum(), (W, X)


# Modules and training


@fault(operation="div", text="in module Net")
def linen_module():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(3, name="first")(x)
            h = h / (h - h).sum()  # fault
            return nn.Dense(3, name="last")(h).sum()

    net = Net()
    params = {"params": {name: {"kernel": W, "bias": W[0]} for name in ("first", "last")}}
    return net.apply, (params, X)


@fault(operation="log", text="and 2 more", reached=("result",))
def nnx_training_step():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            return jnp.log(0.0 * self.layer(x))  # fault

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: model(x).sum())(model)
        optimizer.update(model, grads)
        return loss

    return step, (model, optimizer, X)


@fault(operation="div", phase="forward", kind="nan", reached=("result[0]['unused']",))
def optimiser_update():
    tx = optax.adam(0.1, eps=0.0)
    params = {"w": W[0], "unused": W[1]}

    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: (p["w"] * x).sum())(params)
        updates, state = tx.update(grads, state, params)  # fault
        return optax.apply_updates(params, updates), state, loss

    return step, (params, tx.init(params), X[0] + 1.0)


@fault(kind="inf", phase="backward")
def gradient_of_a_gradient():
    def loss(w, x):
        flat = jnp.abs(x) ** 1.5  # fault
        return (flat @ w).sum()

    return jax.grad(lambda w, x: jax.grad(loss, argnums=1)(w, x).sum(), argnums=1), (W, X)


@pytest.mark.parametrize("name", FAULTS)
def test_the_planted_line_is_named(name):
    planted = FAULTS[name]
    fun, args = planted.build()
    report = report_of(fun, *args)
    assert report.line is not None, report
    assert (report.line.file, report.line.line) == (__file__, planted.line), report
    assert "# fault" in report.line.code
    for field, value in planted.says.items():
        found = getattr(report, field)
        assert value in found if field == "rows" else found == value, report
    assert planted.path in "; ".join(report.path), report
    assert planted.text in str(report)


# Generated programs with one fault more


def put(where, planted, steps):
    """``steps`` with ``planted`` at the place that ``where`` chooses, inside of loops, too."""
    nested = [i for i, step in enumerate(steps) if step.body]
    i = where % (len(steps) + 1)
    if nested and where % 3:
        k = nested[where % len(nested)]
        inner = dataclasses.replace(steps[k], body=put(where // 3, planted, steps[k].body))
        return (*steps[:k], inner, *steps[k + 1 :])
    # What follows reads it or what is made of it, and so does the result.
    rest = [
        dataclasses.replace(step, operands=(i + 1 + j,) * len(step.operands))
        for j, step in enumerate(steps[i:])
    ]
    return (*steps[:i], planted, *rest, Step("add", (len(steps) + 1, i + 1)))


BAD = {
    "log": lambda h: h + jnp.log(h[:1] - h[:1]),  # log
    "sqrt": lambda h: h + jnp.sqrt(-1.0 - h * h),  # sqrt
    "exp": lambda h: h + jnp.exp(100.0 + h * h),  # exp
    "div": lambda h: h / (h - h).sum(),  # div
}


@pytest.fixture(scope="module", autouse=True)
def bad_steps():
    with pytest.MonkeyPatch.context() as patch:
        for name, fun in BAD.items():
            patch.setitem(generated.UNARY, "bad " + name, fun)
        yield


@given(
    program=programs(2 if DEEP else 1, max_size=2),
    kind=st.sampled_from(sorted(BAD)),
    where=st.integers(0, 99),
)
@settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_a_fault_in_a_generated_program_is_found_at_its_line(program, kind, where):
    steps = put(where, Step("bad " + kind, (where,)), program.steps)
    faulty = Program(steps, program.seed)
    fun = jax.jit(jax.value_and_grad(faulty.loss))
    args = (faulty.params(), *faulty.inputs())
    value, grads = fun(*args)
    if np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(grads)):
        fg.detect_anomaly(fun)(*args)  # as in a branch not taken
        return
    report = report_of(fun, *args)
    assert report.line is not None and report.line.code.endswith(f"# {kind}"), (faulty, report)
