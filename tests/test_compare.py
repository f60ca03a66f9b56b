"""compare finds equal functions equal, and says where different ones part, and why if it can."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from funcgrad.parity._compare import KINDS, compare

FOUR = ("value", "grad", "jvp", "hvp")
X = np.array([[0.3, -1.2, 2.0], [0.7, 0.1, -0.4]])


def conventions(result):
    return {hint.convention for hint in result.hints}


# Equal functions: the documented cases


@pytest.mark.parametrize(
    ("ours", "theirs", "inputs"),
    [
        pytest.param(
            lambda x, y: x**2 + x * y + y**2,
            lambda x, y: x**2 + x * y + y**2,
            (np.ones(()), np.ones(())),
            id="C1",
        ),
        pytest.param(lambda x: x**3, lambda x: x**3, (np.array(2.0),), id="C2"),
        pytest.param(
            lambda a: ((2 * a) ** 2).sum(),
            lambda a: ((2 * a) ** 2).sum(),
            (np.array([1.0, 2.0, 3.0]),),
            id="C3",
        ),
        pytest.param(
            lambda a, i: a[i].sum(),
            lambda a, i: torch.gather(a, 0, i).sum(),
            (np.array([5.0, 6.0, 7.0]), np.array([0, 0, 2])),
            id="C4-gather",
        ),
        pytest.param(
            lambda a: (jnp.broadcast_to(a, (3, 2)) * jnp.arange(6.0).reshape(3, 2)).sum(),
            lambda a: (a.expand(3, 2) * torch.arange(6.0).reshape(3, 2)).sum(),
            (np.array([1.0, 2.0]),),
            id="C4-broadcast",
        ),
        pytest.param(
            lambda a: (a + 2 * jax.lax.stop_gradient(a)).sum(),
            lambda a: (a + 2 * a.detach()).sum(),
            (np.array([1.0, 2.0]),),
            id="C5-detach",
        ),
        pytest.param(
            lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x),
            lambda x: x + (torch.round(x) - x).detach(),
            (np.array([0.2, 0.7, 1.6]),),
            id="C5-straight-through",
        ),
        pytest.param(
            lambda a: a * jax.grad(lambda b: a + b)(1.0),
            lambda a: a * torch.func.grad(lambda b: a + b)(torch.ones_like(a)),
            (np.array(1.0),),
            id="C13",
        ),
        pytest.param(
            lambda a: (a**3).sum(), lambda a: (a**3).sum(), (np.array([1.0, 2.0]),), id="C14"
        ),
        pytest.param(
            lambda x: jax.vmap(jnp.sin, out_axes=1)(x),
            lambda x: torch.vmap(torch.sin, out_dims=1)(x),
            (X,),
            id="C15-out-axis",
        ),
        pytest.param(
            lambda w, x: jax.vmap(jnp.dot, in_axes=(None, 0))(w, x),
            lambda w, x: torch.vmap(torch.dot, in_dims=(None, 0))(w, x),
            (np.array([1.0, 2.0, 3.0]), X),
            id="C15-in-axes",
        ),
        pytest.param(
            lambda z: jnp.abs(z) ** 2,
            lambda z: z.abs() ** 2,
            (np.array(1 + 2j),),
            id="C16",
        ),
        pytest.param(
            lambda z: {"a": jnp.exp(z) * jnp.conj(z), "b": jnp.sin(z).sum()},
            lambda z: {"a": torch.exp(z) * z.conj(), "b": torch.sin(z).sum()},
            (np.array([1 + 2j, -0.5 + 0.1j]),),
            id="C16-complex-output",
        ),
    ],
)
def test_the_documented_cases_agree_in_every_derivative(ours, theirs, inputs):
    result = compare(ours, theirs, inputs, what=FOUR)
    assert result.raise_if_different() is result
    assert result.max_abs < 1e-12
    assert not result.hints
    assert {leaf.kind for leaf in result.leaves} == set(FOUR)
    assert all(leaf.jax_dtype == leaf.torch_dtype for leaf in result.leaves)


def test_the_numbers_of_the_cases_are_the_documented_ones():
    # what compare finds equal is also right: it hands the numbers of either side on
    from funcgrad.parity._engines import JaxEngine, TorchEngine

    seed = {"output": np.ones(())}
    ours, theirs = (lambda z: jnp.abs(z) ** 2), (lambda z: z.abs() ** 2)
    inputs = (np.array(1 + 2j),)
    with jax.enable_x64(True):
        one = JaxEngine(ours, inputs, np.dtype(float)).grad(seed)
    two = TorchEngine(theirs, inputs, np.dtype(float)).grad(seed)
    assert one["inputs[0]"] == pytest.approx(2 - 4j)
    assert two["inputs[0]"] == pytest.approx(2 - 4j)
    cube, v = (np.array([1.0, 2.0]),), {"inputs[0]": np.ones(2)}
    with jax.enable_x64(True):
        hvp = JaxEngine(lambda a: (a**3).sum(), cube, np.dtype(float)).hvp(seed, v)
    np.testing.assert_allclose(hvp["inputs[0]"], [6, 12])
    hvp = TorchEngine(lambda a: (a**3).sum(), cube, np.dtype(float)).hvp(seed, v)
    np.testing.assert_allclose(hvp["inputs[0]"], [6, 12])


def jax_loss(params, x, y):
    hidden = jnp.tanh(x @ params["w"][0] + params["b"])
    return ((hidden @ params["w"][1] - y) ** 2).sum()


def torch_loss(params, x, y):
    hidden = torch.tanh(x @ params["w"][0] + params["b"])
    return ((hidden @ params["w"][1] - y) ** 2).sum()


def network(seed=0, batch=4):
    rng = np.random.default_rng(seed)
    params = {"w": [rng.normal(size=(3, 5)), rng.normal(size=(5, 2))], "b": rng.normal(size=5)}
    return params, rng.normal(size=(batch, 3)), rng.normal(size=(batch, 2))


def test_every_kind_agrees_on_a_network_and_names_its_leaves():
    result = compare(jax_loss, torch_loss, network(), what=KINDS).raise_if_different()
    assert [leaf.path for leaf in result.leaves if leaf.kind == "per_sample"] == [
        "inputs[0]['b']",
        "inputs[0]['w'][0]",
        "inputs[0]['w'][1]",
    ]
    assert {leaf.jax_shape for leaf in result.leaves if leaf.kind == "per_sample"} == {
        (4, 5),
        (4, 3, 5),
        (4, 5, 2),
    }


def test_an_empty_batch_has_empty_per_sample_gradients():
    inputs = network(batch=0)
    result = compare(jax_loss, torch_loss, inputs, what=("per_sample",)).raise_if_different()
    assert result.leaves[0].torch_shape == (0, 5)


@pytest.mark.parametrize("dtype", ["float32", "float16", jnp.bfloat16])
def test_other_precisions_are_kept_on_both_sides(dtype):
    result = compare(jnp.sin, torch.sin, (X,), what=("value", "grad"), dtype=dtype)
    result.raise_if_different()
    assert {leaf.jax_dtype for leaf in result.leaves} == {jnp.dtype(dtype).name}
    assert not jax.config.read("jax_enable_x64")


def test_trees_with_none_integer_keys_numbers_and_shared_arrays_go_through():
    x = np.arange(6.0).reshape(2, 3)[:, ::2]  # not contiguous
    tree = {7: x, 1: None, 3: (x, jnp.arange(2, dtype=jnp.int32))}
    result = compare(
        lambda t, n: t[7].sum(n) * t[3][0].T[t[3][1]].sum(),
        lambda t, n: t[7].sum(n) * t[3][0].T[t[3][1]].sum(),
        (tree, 1),
        what=FOUR,
    ).raise_if_different()
    assert [d.path for d in result.leaves if d.kind == "grad"] == [
        "inputs[0][3][0]",
        "inputs[0][7]",
    ]


def test_torch_tensors_and_empty_arrays_are_inputs_too():
    inputs = (torch.ones(2, 2, requires_grad=True), np.zeros((0, 2)))
    fun = lambda x, e: (x @ x).sum() + e.sum()
    compare(fun, fun, inputs, what=FOUR).raise_if_different()


def test_a_gradient_that_is_zero_but_for_noise_is_no_difference():
    def ours(x, shift):
        x = x + shift
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return 10 * x**3

    theirs = lambda x, shift: 10 * F.layer_norm(x + shift, (3,)) ** 3
    result = compare(ours, theirs, (X, np.ones(1)), what=("grad",)).raise_if_different()
    assert 0 < result.max_abs < 1e-11


def test_unused_inputs_and_outputs_without_gradient_are_zero_on_both_sides():
    result = compare(
        lambda x, y: (jax.lax.stop_gradient(x), jnp.argmax(x), x.shape[0] * 2.0),
        lambda x, y: [x.detach(), x.argmax(), x.shape[0] * 2.0],
        (X, X),
        what=FOUR,
    )
    result.raise_if_different()


def test_in_place_torch_code_is_compared_without_touching_the_inputs():
    def theirs(x):
        x += 1
        return (x**2).sum()

    x = X.copy()
    compare(lambda x: ((x + 1) ** 2).sum(), theirs, (x,), what=FOUR).raise_if_different()
    np.testing.assert_array_equal(x, X)


def test_an_operation_without_forward_mode_is_compared_by_two_backwards():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * g

    compare(lambda x: x**3, Cube.apply, (X,), what=FOUR).raise_if_different()


def test_not_a_number_and_infinity_equal_themselves_and_nothing_else():
    same = lambda x: x + 0
    hostile = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert compare(same, same, (hostile,)).ok
    for jax_value, torch_value in (
        (np.nan, 0.0),
        (np.inf, -np.inf),
        (np.inf, 1e300),
        (0.0, np.nan),
    ):
        result = compare(
            lambda x, v=jax_value: x * 0 + v, lambda x, v=torch_value: x * 0 + v, (np.ones(2),)
        )
        assert not result.ok
        assert result.max_abs == np.inf or result.max_abs > 1e299


# Different functions


@given(st.sampled_from(["b", "w"]), st.integers(0, 3), st.floats(1e-8, 1e3), st.booleans())
@settings(max_examples=15)
def test_a_planted_difference_is_found_in_its_leaf_and_measured(leaf, at, size, relative):
    params = {"b": np.full(4, 2.0), "w": np.full(4, 3.0)}

    def theirs(p):
        p = dict(p)
        bump = torch.zeros(4, dtype=torch.float64)
        bump[at] = size
        p[leaf] = p[leaf] + (bump * p[leaf].detach() if relative else bump)
        return p

    result = compare(lambda p: p, theirs, (params,), what=("value", "grad"))
    first = result.first_difference
    assert (first.kind, first.path) == ("value", f"output['{leaf}']")
    expected = size * (params[leaf][at] if relative else 1)
    assert result.max_abs == pytest.approx(expected, rel=1e-6)
    assert first.max_rel == pytest.approx(expected / (params[leaf][at] + expected), rel=1e-6)


def test_a_small_leaf_is_held_to_its_own_scale_and_a_large_one_entry_by_entry():
    pair = lambda factor: (lambda x: x, lambda x: x * factor)
    assert not compare(*pair(1.001), (np.full(3, 1e-11),), what=("value",)).ok
    big = np.array([1e20, 1.0])
    ours = lambda x: x
    assert not compare(ours, lambda x: x + torch.tensor([0, 1.0]), (big,), what=("value",)).ok
    assert compare(*pair(1 + 1e-13), (big,), what=("value",)).ok
    assert compare(*pair(1.5), (big,), what=("value",), rtol=0.4).ok
    assert compare(*pair(1.5), (np.ones(2),), what=("value",), atol=0.6).ok


def test_a_missing_leaf_and_another_shape_are_differences_and_skip_the_derivatives():
    result = compare(lambda x: {"a": x, "b": x.sum(0)}, lambda x: {"a": x, "c": x}, (X,), what=FOUR)
    assert [(d.path, d.ok) for d in result.leaves] == [
        ("output['a']", True),
        ("output['b']", False),
        ("output['c']", False),
    ]
    assert result.skipped == ("grad", "jvp", "hvp")
    assert "missing" in str(result)
    other = compare(lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True), (X,), what=("grad",))
    assert not other.ok
    assert other.first_difference.torch_shape == (1, 3)


def test_another_floating_dtype_is_a_difference():
    result = compare(lambda x: x.astype(jnp.float32), lambda x: x, (np.ones(2),), what=("value",))
    assert not result.ok
    assert result.max_abs == 0
    assert conventions(result) == {"precision"}


def test_large_integers_that_differ_by_one_differ():
    result = compare(lambda n: n, lambda n: n + 1, (np.array([2**60]),), what=("value",))
    assert not result.ok
    assert result.max_abs == 1


def test_the_table_names_kinds_leaves_and_hints():
    result = compare(lambda x: jnp.var(x), lambda x: x.var(), (X,))
    text = str(result)
    for part in (
        "kind",
        "grad",
        "inputs[0]",
        "float64[2,3]",
        "DIFFERENT",
        "First difference: value",
    ):
        assert part in text
    assert "Hint: value of output and 1 more: var or std" in text
    with pytest.raises(AssertionError, match="(?s)jax_fun and torch_fun differ.*Hint"):
        result.raise_if_different()
    console = pytest.importorskip("rich.console").Console(width=150, file=io.StringIO())
    console.print(result)
    assert "inputs[0]" in console.file.getvalue()


def test_wrong_arguments_are_refused_with_the_fix():
    same = lambda x: x
    with pytest.raises(TypeError, match=r"inputs is the tuple.*got ndarray. Write \(x,\)"):
        compare(same, same, X)
    with pytest.raises(TypeError, match=r"got 'grad'. Write \('grad',\)"):
        compare(same, same, (X,), what="grad")
    with pytest.raises(ValueError, match=r"got \['hessian'\]. Choose from"):
        compare(same, same, (X,), what=("hessian",))
    with pytest.raises(ValueError, match="needs a floating or complex array"):
        compare(same, same, (np.arange(3),))
    with pytest.raises(ValueError, match="grad needs a floating output"):
        compare(lambda x: x > 0, lambda x: x > 0, (X,))
    with pytest.raises(ValueError, match="dtype is a floating type; got int32"):
        compare(same, same, (X,), dtype=np.int32)
    with pytest.raises(ValueError, match="one common first axis"):
        compare(same, same, (X, X, X[:1]), what=("per_sample",))
    with pytest.raises(ValueError, match="Put the parameters first"):
        compare(same, same, (np.arange(2), X), what=("per_sample",))
    with pytest.raises(TypeError, match=r"inputs\[0\] must hold numbers; got PRNG keys"):
        compare(same, same, (jax.random.key(0),), what=("value",))
    with pytest.raises(ValueError, match="same floating leaves; got shape"):
        compare(lambda p, x: p * x, lambda p, x: (p * x).sum(), (X[0], X), what=("per_sample",))


def test_an_error_in_a_function_says_where_it_was_raised():
    def theirs(x):
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        compare(lambda x: x, theirs, (X,))
    assert caught.value.__notes__ == ["compare: raised while computing value of torch_fun"]


# Hints: each is seen where the difference is planted


@jax.custom_vjp
def abs2_with_torch_rule(z):
    return (jnp.abs(z) ** 2).sum()


# a rule carried over from torch as it was: its gradient is the conjugate of JAX's
abs2_with_torch_rule.defvjp(lambda z: (abs2_with_torch_rule(z), z), lambda z, g: (2 * g * z,))

PLANTED = {
    "gelu": (lambda x: jax.nn.gelu(x) ** 2, lambda x: F.gelu(x) ** 2, (X,)),
    "ddof": (
        lambda x: jnp.exp(jnp.std(x, 1)).sum() * x.sum(),
        lambda x: torch.exp(x.std(1)).sum() * x.sum(),
        (X,),
    ),
    "epsilon": (
        lambda x: jnp.sin(
            (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
        ),
        lambda x: torch.sin(F.layer_norm(x, (3,))),
        (X,),
    ),
    "padding_idx": (
        lambda w, i: jnp.sin(w[i]).sum(),
        lambda w, i: torch.sin(F.embedding(i, w, padding_idx=1)).sum(),
        (X, np.array([0, 1, 1])),
    ),
    "conjugate": (
        abs2_with_torch_rule,
        lambda z: (z.abs() ** 2).sum(),
        (np.array([1 + 2j, 3j]),),
    ),
    "transpose": (lambda x: x @ x.T @ x, lambda x: (x @ x.T @ x).T, (X,)),
    "sign": (lambda x: -jnp.sin(x).sum(), lambda x: torch.sin(x).sum(), (X,)),
    "sum_or_mean": (lambda x: jnp.sin(x).sum(), lambda x: torch.sin(x).mean(), (X,)),
    "precision": (
        lambda x: jnp.sin(x.astype(jnp.float32)).astype(x.dtype),
        lambda x: torch.sin(x),
        (X,),
    ),
}


def test_a_variance_written_out_is_recognised_by_its_ratio():
    theirs = lambda x: ((x - x.mean()) ** 2).sum() / (x.numel() - 1)
    result = compare(lambda x: jnp.std(x), lambda x: theirs(x).sqrt(), (X,))
    assert conventions(result) == {"ddof"}
    assert "n = 6" in str(result.hints[0])


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_gets_its_hint_and_no_other(name):
    ours, theirs, inputs = PLANTED[name]
    result = compare(ours, theirs, inputs, what=("value", "grad"))
    assert conventions(result) == {name}
    explained = {key for hint in result.hints for key in hint.leaves}
    assert explained == {(d.kind, d.path) for d in result.leaves if not d.ok}


@pytest.mark.parametrize(
    ("ours", "theirs", "point"),
    [
        (jnp.abs, lambda x: x.abs() * 1.0, None),
        (lambda x: jnp.maximum(x, 0.0), lambda x: torch.relu(x), [0.0, 1.0]),
        (lambda x: jnp.clip(x, 0.0, 1.0), lambda x: x.clamp(0.0, 1.0), [0.0, 1.0, 0.5]),
        (lambda x: jnp.linalg.norm(x), lambda x: x.norm(), [0.0, 0.0]),
        (lambda x: jnp.std(x, ddof=1), lambda x: x.std(), [2.0, 2.0, 2.0]),
        (lambda x: jnp.max(x), lambda x: torch.max(x, 0).values, [1.0, 3.0, 3.0]),
        (lambda x: jnp.hypot(x[0], x[1]), lambda x: torch.hypot(x[0], x[1]), [0.0, 0.0]),
        (lambda x: x**0.0, lambda x: x**0.0, [0.0, 0.0]),
        (jax.nn.leaky_relu, F.leaky_relu, [0.0, 1.0]),
        (jax.nn.relu, torch.relu, [np.nan, 1.0]),
    ],
    ids=["abs", "relu", "clamp", "norm", "std", "max", "hypot", "power", "leaky", "nan"],
)
def test_ties_and_kinks_are_told_from_errors(ours, theirs, point):
    away = np.array([0.7, -1.3, 2.2])
    assert compare(ours, theirs, (away,)).ok
    result = compare(ours, theirs, (np.array(point or [0.0, 1.0]),))
    if not result.ok:  # where the libraries pick the same derivative there is nothing to explain
        assert conventions(result) == {"special_point"}
        assert "a tie, a kink or a singularity" in str(result.hints[0])


def test_at_least_the_known_special_points_differ():
    for ours, theirs, point in (
        (lambda x: jnp.linalg.norm(x), lambda x: x.norm(), [0.0, 0.0]),
        (lambda x: jnp.maximum(x, 0.0), lambda x: torch.relu(x), [0.0, 1.0]),
    ):
        assert not compare(ours, theirs, (np.array(point),)).ok


def test_two_conventions_at_once_are_both_named():
    result = compare(
        lambda x: jax.nn.gelu(x) * jnp.var(x), lambda x: F.gelu(x) * x.var(), (X,), what=("value",)
    )
    assert conventions(result) == {"gelu", "ddof"}


@pytest.mark.parametrize(
    "theirs",
    [
        lambda x: F.gelu(x) * 1.001 + x.var(),
        lambda x: F.layer_norm(x, (3,)) * x.std() + 0.01,
        lambda x: torch.sin(x) * 1.3,
        lambda x: torch.relu(x),
        lambda x: torch.sin(x) + 1e-7,
    ],
)
def test_an_error_that_is_no_convention_gets_no_hint(theirs):
    result = compare(jnp.sin, theirs, (X,))
    assert not result.ok
    assert not result.hints


def test_a_wrong_gradient_beside_a_convention_is_not_excused_by_it():
    w, i = X, np.array([0, 1, 1])
    padded = lambda w, i: 1.1 * torch.sin(F.embedding(i, w, padding_idx=1)).sum()
    assert not compare(lambda w, i: jnp.sin(w[i]).sum(), padded, (w, i), what=("grad",)).hints
    z = np.array([1 + 2j, 3j])
    result = compare(jnp.exp, lambda z: 1.1 * torch.exp(z.conj()), (z,), what=("value",))
    assert not result.ok
    assert not result.hints


def test_an_error_beside_a_special_point_is_not_excused_by_it():
    zeros = np.array([0.0, 1.0])
    result = compare(lambda x: 1.5 * jnp.maximum(x, 0.0) + x, lambda x: torch.relu(x) + x, (zeros,))
    assert "special_point" not in conventions(result)


def test_the_variance_forms_of_torch_are_all_recognised():
    forms = [
        lambda x: x.var(),
        lambda x: torch.var(x, unbiased=True),
        lambda x: torch.var(x, 1),
        lambda x: torch.var(x, 1, True, True),
        lambda x: torch.var(x, dim=1, keepdim=True),
        lambda x: torch.std(x, dim=0, correction=1),
        lambda x: torch.var_mean(x, 1)[0],
        lambda x: torch.std_mean(input=x)[0],
    ]
    ours = [
        lambda x: jnp.var(x),
        lambda x: jnp.var(x),
        lambda x: jnp.var(x, 1),
        lambda x: jnp.var(x, 1, keepdims=True),
        lambda x: jnp.var(x, 1, keepdims=True),
        lambda x: jnp.std(x, 0),
        lambda x: jnp.var(x, 1),
        lambda x: jnp.std(x),
    ]
    for one, two in zip(ours, forms, strict=True):
        result = compare(one, two, (X,), what=("value",))
        assert conventions(result) == {"ddof"}
        assert "running" not in str(result.hints[0])
        assert result.hints[0].message.startswith("var or std")
