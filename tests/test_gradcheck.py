"""Derivatives against differences: torch's verdicts, and what is said where something is wrong."""

import dataclasses
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from conftest import DEEP, PROGRAMS
from programs import programs


def rule(value, backward):
    """A ``custom_vjp`` of one argument from its value and ``backward(x, g)``."""
    fun = jax.custom_vjp(value)
    fun.defvjp(lambda x: (value(x), x), lambda x, g: (backward(x, g),))
    return fun


def verdict(fun, inputs, **options):
    return fg.gradcheck(fun, inputs, raise_exception=False, **options)


X = jnp.array([0.5, -1.5, 2.0])


# Beside torch


@pytest.fixture
def torch_rule(torch):
    def make(value, backward):
        class Rule(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return value(x)

            @staticmethod
            def backward(ctx, g):
                return backward(ctx.saved_tensors[0], g)

        return Rule.apply

    return make


def torch_verdict(torch, fun, x, check="gradcheck", **options):
    inputs = torch.tensor(np.asarray(x), requires_grad=True)
    return getattr(torch.autograd, check)(fun, (inputs,), raise_exception=False, **options)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    "relative, absolute, passes",
    [(9e-4, 0, True), (1.1e-3, 0, False), (0, 9e-6, True), (0, 1.1e-5, False)],
)
def test_tolerances_are_those_of_torch(torch, torch_rule, relative, absolute, passes, fast):
    # A large slope leaves no room for the absolute tolerance, none leaves it alone.
    slope = 1e4 if relative else 0.0
    value, wrong = lambda x: slope * x, lambda x, g: (slope * (1 + relative) + absolute) * g
    x = np.array([1.0, 2.0])
    if absolute:  # in every entry of the Jacobian, as fast mode scales it
        value = lambda x: slope * x.sum() * (x * 0 + 1)
        wrong = lambda x, g: absolute * g.sum() * (x * 0 + 1)
    theirs = torch_verdict(torch, torch_rule(value, wrong), x, fast_mode=fast)
    assert bool(verdict(rule(value, wrong), x, fast_mode=fast)) == theirs == passes


FAULTS = {
    "right": lambda x, g, d, np: d(x) * g,
    "factor": lambda x, g, d, np: 1.01 * d(x) * g,
    "term": lambda x, g, d, np: (d(x) - 0.05 * np.sin(x)) * g,
    "sign": lambda x, g, d, np: -d(x) * g,
    "order": lambda x, g, d, np: np.stopped(d(x)) * g,
}
FUNCTIONS = {
    "sin": (lambda np: np.sin, lambda np: np.cos),
    "cube": (lambda np: lambda x: x**3, lambda np: lambda x: 3 * x**2),
    "tanh": (lambda np: np.tanh, lambda np: lambda x: 1 - np.tanh(x) ** 2),
    "gauss": (
        lambda np: lambda x: np.exp(-x * x),
        lambda np: lambda x: -2 * x * np.exp(-x * x),
    ),
}


@dataclasses.dataclass
class Numbers:
    """The functions of a library that the generated rules use."""

    sin: object
    cos: object
    tanh: object
    exp: object
    stopped: object


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", FUNCTIONS if DEEP else ["gauss"])
def test_verdicts_on_right_and_wrong_rules_are_those_of_torch(torch, torch_rule, name, fault):
    value, derivative = FUNCTIONS[name]
    ours = Numbers(jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jax.lax.stop_gradient)
    theirs = Numbers(torch.sin, torch.cos, torch.tanh, torch.exp, torch.Tensor.detach)
    seed = 10 * list(FUNCTIONS).index(name) + list(FAULTS).index(fault)
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=3), rng.normal(size=(3, 2))

    def program(lib, make, w):
        d = derivative(lib)
        f = make(value(lib), lambda x, g: FAULTS[fault](x, g, d, lib))
        return lambda x: (f(x) * x) @ w

    fast = bool(seed % 2)
    ours, theirs = program(ours, rule, w), program(theirs, torch_rule, torch.tensor(w))
    expected = torch_verdict(torch, theirs, x, fast_mode=fast)
    assert bool(verdict(ours, x, fast_mode=fast)) == expected == (fault in ("right", "order"))
    if fault in ("right", "order"):
        expected = torch_verdict(torch, theirs, x, "gradgradcheck", fast_mode=fast)
        found = fg.gradgradcheck(ours, x, fast_mode=fast, raise_exception=False)
        assert bool(found) == expected == (fault == "right")


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
def test_verdicts_on_complex_functions_are_those_of_torch(torch, torch_rule, wrong, fast):
    z = np.array([1.0 + 2.0j, -0.5 + 0.3j])
    # torch's gradients are conjugates of JAX's.
    theirs = lambda z, g: 2 * g * (z if wrong else z.conj())
    ours = lambda z, g: 2 * g * (z.conj() if wrong else z)
    square = lambda z: z * z
    ends = lambda lib, f: lambda z: (f(z), lib.abs(f(z)), lib.real(f(z)) * z)
    expected = torch_verdict(torch, ends(torch, torch_rule(square, theirs)), z, fast_mode=fast)
    found = verdict(ends(jnp, rule(square, ours)), z, fast_mode=fast)
    assert bool(found) == expected == (not wrong)
    if wrong and not fast:
        assert "conjugate" in str(found)
    if not wrong:
        assert verdict(ends(jnp, square), z, check_forward_ad=True, check_backward_ad=False)


@pytest.mark.torch
def test_relu_at_zero_fails_as_in_torch_and_is_called_a_kink(torch):
    x = np.array([0.0, 1.0, -1.0])
    assert not torch_verdict(torch, torch.relu, x)
    found = verdict(jax.nn.relu, x)
    (entry,) = found.entries
    assert (found.n_off, entry.output, entry.input) == (1, "output[0]", "inputs[0][0]")
    assert entry.because == "kink: slope 0 on the left, 1 on the right"
    np.testing.assert_allclose([entry.numerical, entry.analytical], [0.5, 0], atol=1e-9)


# What is checked

WRONG = ("odd", "stop", "cast")  # steps that differ from their derivative, or round


@settings(max_examples=max(2, PROGRAMS // 15))
@given(
    programs().filter(lambda p: not any(k in str(p) for k in WRONG)),
    st.booleans(),
)
def test_random_programs_pass_in_both_modes(program, fast):
    x, t = program.inputs()
    some = {name: leaf for name, leaf in program.params().items() if name in "Wb"}
    loss = lambda some, x, t: program.loss({**program.params(np.float64), **some}, x, t)
    assert fg.gradcheck(loss, (some, x, t), fast_mode=fast)


def test_trees_keys_and_integers_are_taken_and_the_configuration_left():
    def fun(params, n, key, mode, x):
        assert mode == "mean" and isinstance(n, int)
        noise = jax.random.uniform(key, dtype=x.dtype)
        h = jnp.tanh(params["w"] * x + noise)[params["at"]]
        return {"loss": h.mean() ** n, "h": (h, jnp.argmax(h)), "none": None}

    params = {"w": jnp.bfloat16(0.5), "at": jnp.array([2, 0, 1])}
    before = jax.config.jax_enable_x64
    found = fg.gradcheck(fun, (params, 3, jax.random.key(0), "mean", X), check_forward_ad=True)
    assert found and found.n_compared == 2 * 4 * 4
    assert {e.input.partition("[0]['w']")[1] for e in found.entries} <= {"[0]['w']", ""}
    assert jax.config.jax_enable_x64 == before and jnp.zeros(1).dtype == X.dtype
    with pytest.raises(ZeroDivisionError):
        fg.gradcheck(lambda x: 1 / 0, X)
    assert jnp.zeros(1).dtype == X.dtype


class Params(NamedTuple):
    a: jax.Array
    b: jax.Array


TWICE = rule(lambda x: x**2, lambda x, g: 4 * x * g)


def test_wrong_leaf_is_named_by_path_and_by_what_is_wrong():
    with pytest.raises(fg.GradcheckError, match=r"gradcheck: 2 of 5 derivatives are off") as raised:
        fg.gradcheck(lambda p: {"y": TWICE(p.a).sum() + p.b @ X}, Params(X[:2], X))
    report = pickle.loads(pickle.dumps(raised.value)).report
    assert report == raised.value.report and not report
    assert str(report) == str(raised.value)
    worst = report.entries[0]
    assert (worst.output, worst.input) == ("output['y']", "inputs[0].a[1]")
    assert worst.because == "2 times the numerical" and not worst.ok


def test_control_flow_of_python_and_of_jax_is_taken():
    def loops(x):
        y, _ = jax.lax.scan(lambda c, _: (jnp.sin(c) * x, c), x, None, length=3)
        y = jax.lax.cond(y.sum() > 0, jnp.cos, jnp.sin, y)
        return jax.jit(jax.checkpoint(jnp.tanh))(y)

    assert fg.gradcheck(loops, X, check_forward_ad=True)
    assert fg.gradcheck(lambda x: x**2 if x > 0 else -x, 2.0)
    assert not verdict(lambda x: x**2 if x > 0 else jax.lax.stop_gradient(x), -2.0)


def test_array_laid_out_over_devices_is_taken_whole():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    split = lambda x: jax.reshard(x, P("d"))
    with jax.set_mesh(mesh):
        assert fg.gradcheck(lambda x: jnp.sin(split(x)), split(X[:2]), fast_mode=True)


def test_loop_of_unknown_length_has_forward_mode_only():
    fun = lambda x: jax.lax.while_loop(lambda c: c[0] < 9.0, lambda c: c * 2, x)
    assert verdict(fun, X, check_forward_ad=True, check_backward_ad=False)
    with pytest.raises(fg.GradcheckError, match="reverse mode exists; got ValueError") as raised:
        fg.gradcheck(fun, X)
    assert isinstance(raised.value.__cause__, ValueError)


def kernel_tanh(x, dtype=None):
    def kernel(x_ref, y_ref):
        y_ref[...] = jnp.tanh(x_ref[...])

    out = jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)
    return pl.pallas_call(kernel, out_shape=out, interpret=True)(x)


class KernelTanh(fg.Function):
    @staticmethod
    def forward(ctx, x, dtype=None):
        y = kernel_tanh(x, dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y), None


def test_function_class_around_a_kernel_is_checked_to_second_order():
    assert fg.gradcheck(KernelTanh.apply, X, check_forward_ad=True, check_batched_grad=True)
    assert fg.gradgradcheck(KernelTanh.apply, X, check_fwd_over_rev=DEEP, check_batched_grad=DEEP)
    with pytest.raises(fg.GradcheckError, match="A Pallas kernel has none of its own"):
        fg.gradcheck(kernel_tanh, X)


def test_kernel_of_float32_is_checked_in_float32():
    only = lambda x: KernelTanh.apply(x, jnp.float32)
    with pytest.raises(TypeError, match=r"fun runs in float64.*got ValueError .*dtype=jnp.float32"):
        fg.gradcheck(only, X)
    assert fg.gradcheck(only, X, dtype=jnp.float32)
    wrong = rule(lambda x: kernel_tanh(x, jnp.float32), lambda x, g: g)
    assert not verdict(wrong, X, dtype=jnp.float32)


def test_rounding_inside_is_named_with_its_line():
    found = verdict(lambda x: jnp.sin(x.astype(jnp.float32)), X)  # the line
    assert not found
    assert {entry.because for entry in found.entries} == {"rounding, see the note"}
    (note,) = found.notes
    assert "rounded to float32" in note and "# the line" in note
    assert verdict(lambda x: jnp.sin(x.astype(jnp.float32)), X, dtype=jnp.float32)
    held = jnp.float32(0.1)
    assert verdict(lambda x: held * x, X)


def test_rounding_is_blamed_for_no_more_than_it_does():
    single = lambda x: x.astype(jnp.float32)
    found = verdict(lambda x: TWICE(x) + jnp.argmax(single(x)), X)
    assert {entry.because for entry in found.entries} == {"2 times the numerical"}
    assert not found.notes
    found = verdict(lambda x: single(TWICE(x)).sum(), X)
    assert all(e.because.startswith("rounding, and more: the difference") for e in found.entries)
    # The vjp is linear up to that rounding.
    assert not verdict(lambda x: jnp.sin(x.astype(jnp.bfloat16)), X).faults


def test_one_of_many_entries_costs_no_further_trace_and_fast_mode_no_further_call():
    traces, calls = {}, {}
    for n in (2, 30):

        def traced(x, n=n):
            traces[n] = traces.get(n, 0) + 1
            return jnp.sin(x).sum()

        def called(x, n=n):
            if x[0] > 0:  # asks for a value, and so is run call by call
                calls[n] = calls.get(n, 0) + 1
            return (x**2).sum()

        assert fg.gradcheck(traced, np.ones(n))
        assert fg.gradcheck(called, np.ones(n), fast_mode=True)
    assert traces[2] == traces[30] and calls[2] == calls[30]


# What is wrong, said


def test_two_calls_that_differ_are_named():
    rng = np.random.default_rng(0)
    with pytest.raises(fg.GradcheckError, match="two calls of the function at the same point give"):
        fg.gradcheck(lambda x: x * rng.random(), X)

    def called_back(x):
        return x * jax.pure_callback(
            lambda: np.asarray(rng.random()), jax.ShapeDtypeStruct((), x.dtype)
        )

    assert "two calls of the function" in str(verdict(called_back, X))
    tiny = lambda x: x * (1 + 1e-13 * rng.random())
    assert not verdict(tiny, X) and verdict(tiny, X, nondet_tol=1e-10)
    backward = rule(jnp.sin, lambda x, g: g * jnp.cos(x) * (1 + 1e-9 * rng.random()))
    assert "two calls of the vjp with the same cotangent" in str(verdict(backward, X))
    forward = forward_rule(lambda t: 2 * t * (1 + 1e-9 * rng.random()))
    found = verdict(forward, X, check_forward_ad=True, check_backward_ad=False)
    assert "two calls of the jvp with the same tangent" in str(found)


def forward_rule(moved, value=lambda x: 2 * x):
    fun = jax.custom_jvp(lambda x: 2 * x)
    fun.defjvp(lambda primals, tangents: (value(*primals), moved(*tangents)))
    return fun


@pytest.mark.parametrize(
    "fun, words",
    [
        (rule(lambda x: x, lambda x, g: jnp.clip(g, -1, 1)), "the vjp is linear in the cotangent"),
        (rule(lambda x: x.sum(), lambda x, g: jnp.ones_like(x)), "It is not multiplied by it"),
        # Along each entry these two are right.
        (forward_rule(lambda t: 2 * jnp.sign(t)), "the jvp is linear in the tangent"),
        (forward_rule(lambda t: 2 * t, lambda x: 2.1 * x), r"got 4.2 for 4 at output\[2\]"),
    ],
)
def test_rule_that_is_no_derivative_is_named(fun, words):
    is_forward = isinstance(fun, jax.custom_jvp)
    with pytest.raises(fg.GradcheckError, match=words):
        fg.gradcheck(fun, X, check_forward_ad=is_forward, check_backward_ad=not is_forward)


def test_forward_half_with_other_values_is_named():
    fun = jax.custom_vjp(lambda x: {"y": 2 * x})
    fun.defvjp(lambda x: ({"y": 2.1 * x}, None), lambda _, g: (2 * g["y"],))
    with pytest.raises(fg.GradcheckError, match=r"got 4.2 for 4 at output\['y'\]\[2\]"):
        fg.gradcheck(fun, X)


def test_missing_forward_mode_is_named():
    with pytest.raises(fg.GradcheckError, match=r"forward mode exists; got TypeError.*fg.Function"):
        fg.gradcheck(rule(jnp.sin, lambda x, g: g * jnp.cos(x)), X, check_forward_ad=True)


def test_wrong_and_missing_batching_rules_are_named():
    @jax.custom_batching.custom_vmap
    def triple(g):
        return 3 * g

    triple.def_vmap(lambda size, batched, g: (2 * g, True))
    fun = rule(lambda x: 3 * x, lambda x, g: triple(g))
    assert verdict(fun, X)
    with pytest.raises(fg.GradcheckError, match="reverse mode under jax.vmap gives what single"):
        fg.gradcheck(fun, X, check_batched_grad=True)
    once = lambda g: jax.pure_callback(lambda g: np.asarray(3 * g), g, g)  # knows no batches
    found = verdict(rule(lambda x: 3 * x, lambda x, g: once(g)), X, check_batched_grad=True)
    assert "reverse mode runs under jax.vmap; got" in str(found)


CAUSES = {
    "abs": (jnp.abs, 3e-7, "kink: slope -0.4 on the left, 1 on the right"),
    "round": (jnp.round, 0.5, "jump: the value is 0 on the left, 1 on the right"),
    "beyond": (jnp.round, 0.5 + 3e-7, "jump: the value is 0 on the left, 1 on the right"),
    "log": (jnp.log, 2e-6, "curved within the step: a smaller eps gives another difference"),
    "stop": (
        lambda x: jax.lax.stop_gradient(x) ** 2,
        1.0,
        "no gradient at all: see fg.unused_grads",
    ),
}


def test_causes_stand_in_the_table():
    points = {name: x for name, (_, x, _) in CAUSES.items()}
    found = verdict(lambda p: {name: CAUSES[name][0](x) for name, x in p.items()}, points)
    assert {e.input: e.because for e in found.entries} == {
        f"inputs[0][{name!r}]": words for name, (*_, words) in CAUSES.items()
    }


@pytest.mark.parametrize(
    "fun, x, words",
    [
        (jnp.sqrt, [0.0, 1.0], "the value at x - 1e-06 is nan"),
        (lambda x: jnp.log(x - 1), [1.0, 2.0], "the value itself is -inf"),
        (lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0 * x), [-1.0, 1.0], "the rule gives no finite"),
    ],
)
def test_what_is_not_finite_stands_in_the_table(fun, x, words):
    with jax.debug_nans(True):  # which is for other programs
        assert words in str(verdict(fun, np.array(x)))


def test_noise_is_not_taken_for_a_kink():
    def noisy(x):
        far = jnp.full_like(x, 1e7)
        return jnp.cumsum(jnp.stack([far, jnp.sin(x), -far]), axis=0)[2]

    found = verdict(noisy, np.random.default_rng(0).normal(size=60))
    assert {entry.because for entry in found.entries} == {""} and not found


def test_steps_and_values_beyond_the_precision_are_noted():
    assert "the largest input, 1e+12, loses the step" in str(verdict(lambda x: x**2, 1e12))
    assert "values as large as 1e+12 leave noise" in str(verdict(lambda x: jnp.sin(x) + 1e12, X))


def test_passed_check_prints_the_derivatives_nearest_to_the_tolerance():
    lines = str(fg.gradcheck(lambda x: jnp.sin(x).sum(), X)).splitlines()
    assert lines[0] == "gradcheck: 3 derivatives agree with differences."
    assert lines[1].split() == "derivative of by numerical analytical error allowed".split()
    assert sorted(line.split()[1] for line in lines[2:]) == [f"inputs[0][{i}]" for i in range(3)]
    many = str(fg.gradcheck(jnp.sin, X)).splitlines()
    assert many[0].endswith("9 derivatives agree with differences; the 8 nearest to the tolerance.")
    assert len(many) == 10


def test_empty_leaves_are_compared_with_nothing():
    found = fg.gradcheck(lambda x, y: {"x": x, "y": y**2}, (jnp.zeros((0, 3)), X), fast_mode=True)
    assert found.n_compared == 1


# Second order


def test_cotangents_are_inputs_of_the_second_check():
    fun = lambda x: {"y": jnp.sin(x), "n": jnp.argmax(x)}
    found = fg.gradgradcheck(fun, X, {"y": 2 * X, "n": None}, check_fwd_over_rev=True)
    assert found.n_compared == 2 * 3 * 6
    names = {entry.input for entry in found.entries}
    assert any(name.startswith("grad_outputs['y']") for name in names)
    assert all(entry.output.startswith("grad of inputs[0]") for entry in found.entries)
    by_x = [e for e in found.entries if e.output[8:] == e.input and e.numerical]
    at = {f"inputs[0][{i}]": -np.sin(float(x)) * 2 * float(x) for i, x in enumerate(X)}
    np.testing.assert_allclose([e.analytical for e in by_x], [at[e.input] for e in by_x], rtol=1e-6)
    with pytest.raises(ValueError, match=r"grad_outputs is like .* got .* of shapes \[\(2,\)\]"):
        fg.gradgradcheck(fun, X, {"y": X[:2], "n": None})


def test_a_second_check_without_reverse_mode_is_refused():
    fun = lambda x: jax.lax.while_loop(lambda c: c[0] < 9.0, lambda c: c * 2, x)
    words = (
        "gradgradcheck: it differentiates the vjp of fun.* got ValueError: Reverse-mode.* forward"
    )
    with pytest.raises(TypeError, match=words):
        fg.gradgradcheck(fun, X)
    on_values = lambda x: fun(x) if x[0] > -9.0 else x  # cannot be traced
    with pytest.raises(TypeError, match=words):
        fg.gradgradcheck(on_values, X)


# Refused


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda: fg.gradcheck(jnp.sin, 3), ValueError, "some leaf of inputs is floating; got int"),
        (lambda: fg.gradcheck(lambda x: x > 0, X), ValueError, "returns a floating leaf; got none"),
        (lambda: fg.gradcheck(jnp.sin, X, check_backward_ad=False), ValueError, "got neither"),
        (lambda: fg.gradcheck(jnp.sin, X, dtype=jnp.bfloat16), TypeError, "got bfloat16"),
        (lambda: fg.gradcheck(jnp.sin, X, eps=0.0), ValueError, "eps is positive, and no tol"),
        (lambda: fg.gradcheck(jnp.sin, X, rtol=np.nan), ValueError, "no tolerance negative; got"),
        (lambda: jax.jit(lambda x: fg.gradcheck(jnp.sin, x).ok)(X), TypeError, "inside of a trans"),
        (lambda: jax.grad(lambda y: fg.gradcheck(lambda x: x * y, X))(1.0), TypeError, "inside of"),
    ],
)
def test_what_cannot_be_checked_is_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()
