"""detect_anomaly: what counts as a fault, what it costs, what it says when it cannot tell."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from funcgrad._anomaly import _loops
from funcgrad._anomaly._call import _finite
from funcgrad._anomaly._report import summarise

X = jnp.array([[0.5, 1.0, 2.0], [1.5, 0.0, 0.5]])


def report_of(fun, *args, **kwargs):
    with pytest.raises(fg.AnomalyError) as caught:
        fg.detect_anomaly(fun, **kwargs)(*args)
    return caught.value.report


# What counts


def test_what_never_reaches_the_result_is_no_fault():
    def masked(x):
        logs = jnp.where(x > 0, jnp.log(x), 0.0)
        scores = jnp.where(jnp.array([True, True, False]), x, -jnp.inf)
        return logs + jax.nn.softmax(scores) + 1.0 / jnp.exp(1000.0 * jnp.ones(3))

    np.testing.assert_array_equal(fg.detect_anomaly(masked)(X), masked(X))


def test_the_line_that_matters_is_named_not_a_benign_one_before_it():
    def fun(x):
        benign = jnp.log(x)
        kept = jnp.where(x > 0, benign, 0.0)
        return jnp.where(x == 2.0, jnp.sqrt(x - 9.0), kept)  # here

    report = report_of(fun, X)
    assert report.operation == "sqrt" and report.line.code.endswith("# here")
    assert report.n_others == 0


def test_of_several_causes_the_first_is_named_and_the_others_counted():
    def fun(x):
        return jnp.log(x), jnp.sqrt(x - 1.0), 1.0 / (x - 0.5)

    def lines(x):
        first = jnp.log(x)
        second = jnp.sqrt(x - 1.0)
        return first, first + second

    report = report_of(lines, X)
    assert (report.operation, report.n_others) == ("log", 1)
    assert report.reached == ("result[0]", "result[1]")
    assert report_of(fun, X).n_others == 0  # all on one line


def test_inputs_that_are_not_finite_already_are_named():
    params = {"dense": {"kernel": X.at[0, 1].set(jnp.nan), "bias": jnp.ones(3)}}
    report = report_of(lambda params, x: params["dense"]["kernel"] * x, params, X)
    assert "already not finite: input params['dense']['kernel']" in str(report)
    assert report.inputs[0].index == (0, 1) and report.inputs[0].n_nan == 1
    assert report.line is None and report.kind == ""


def test_a_nan_made_of_given_infinities_is_where_it_is_made():
    def fun(x, scale):
        y = x + 1.0
        return y - scale * jnp.inf + scale * jnp.inf  # here

    report = report_of(fun, X, 1.0)
    assert report.kind == "nan" and report.line.code.endswith("# here")
    weights = jnp.array([jnp.inf, 1.0, 1.0])
    report = report_of(lambda x, w: (x * 0.0) * w, X, weights)
    assert report.operation == "mul" and report.inputs[0].name == "input w"


def test_leaves_that_may_be_infinite_are_left_out():
    def fun(x):
        return {"loss": x.sum(), "aux": {"logits": jnp.log(x)}}

    assert report_of(fun, X).reached == ("result['aux']['logits']",)
    checked = fg.detect_anomaly(fun, ignore="aux/logits")
    assert jax.tree.structure(checked(X)) == jax.tree.structure(fun(X))
    with pytest.raises(ValueError, match="names none"):
        fg.detect_anomaly(fun, ignore="logit")(X)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.complex64])
def test_other_dtypes_are_looked_at(dtype):
    x = jnp.array([0.0, 1.0], dtype)
    report = report_of(lambda x: 1.0 / x, x)
    assert report.operation == "div" and jnp.dtype(dtype).name in report.output.type


def test_what_cannot_be_infinite_passes():
    out = (jnp.arange(3), jax.random.key(0), jnp.zeros((0, 2)), None, 2.0, "text", np.float32(1))
    others = (np.array(["text"]), np.array([None]), np.zeros(2, jax.dtypes.float0))
    assert fg.detect_anomaly(lambda: (out, others))()[0] is out
    for number in (np.array([np.nan]), float("inf"), complex("nan")):
        report = report_of(lambda number=number: (number, others))
        assert "already not finite" in str(report) and report.note == ""


def test_keys_among_the_operands_are_named_by_their_type():
    assert summarise("operand 0", jax.random.key(0)).type == "key<fry>[]"


def test_numbers_too_large_for_float32_are_infinite_inputs():
    with np.errstate(over="ignore"):
        report = report_of(lambda x: jnp.exp(-x) * x, np.array([1e300, 1.0]))
    assert report.inputs[0].name == "input x" and report.operands[1].n_inf == 1


def test_a_mask_that_is_a_result_of_its_own_is_said_to_be_a_number_in_the_code():
    report = report_of(lambda x: jnp.where(x > 1.0, x, -jnp.inf), X)
    assert report.operation == "" and "a number at" in report.inputs[0].name


# The trap


def test_the_trap_is_recognised_where_the_branch_has_a_line_of_its_own():
    def loss(x):
        root = jnp.log(x)
        return jnp.where(x > 0, root, x).sum()

    report = report_of(jax.grad(loss), X)
    assert report.repair.endswith("    root = jnp.log(jnp.where(x > 0, x, 1.0))")
    fixed = lambda x: jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), x).sum()
    assert np.isfinite(fg.detect_anomaly(jax.grad(fixed))(X)).all()


def test_the_trap_in_the_third_argument_and_under_vmap():
    def loss(x):
        return jnp.where(x <= 0, 0.0, jnp.sqrt(x)).sum()

    report = report_of(jax.vmap(jax.grad(loss)), X)
    assert "jnp.where(x <= 0, 0.0, jnp.sqrt(jnp.where(x <= 0, 1.0, x)))" in report.repair


def test_zeros_that_no_where_made_are_no_trap():
    report = report_of(jax.grad(lambda x: jnp.sqrt(x).sum()), X)
    assert report.repair == "" and report.derivative_of == "sqrt"

    def loss(x):
        y = jnp.sqrt(x) @ jnp.zeros((3, 3))  # this is what makes the gradient 0
        return jnp.where(jnp.array([True, True, False]), y, 0.0).sum()

    assert report_of(jax.grad(loss), X).repair == ""


def test_where_it_is_not_known_what_is_safe_no_value_is_proposed():
    def loss(x):
        return jnp.where(jnp.abs(x) < 1, jnp.sqrt(1 - x * x), 0.0).sum()  # 1.0 would not do

    report = report_of(jax.grad(loss), X)
    assert "jnp.where(mask, x, safe_value)" in report.repair and "1.0" not in report.repair


# How it is said


def test_forward_comes_before_backward():
    report = report_of(jax.value_and_grad(lambda x: jnp.log(x).sum()), X)
    assert report.phase == "forward" and report.operation == "log"
    assert report_of(jax.grad(lambda x: jnp.log(x).sum()), X).phase == "backward"
    forward = lambda x: jax.jvp(jnp.sqrt, (x,), (jnp.ones_like(x),))[1]
    assert report_of(forward, X).phase == "forward"


def test_rows_are_named_only_where_an_experiment_shows_it():
    def of_rows(w, x):  # both have as many rows
        return jnp.log(w * x.sum(axis=1))

    one, zero = jnp.ones(2), X.at[1].set(0.0)
    assert report_of(of_rows, one, zero).rows.startswith("row 1 of 2 of x: with row 0 there")
    assert report_of(of_rows, one.at[1].set(0.0), X).rows.startswith("row 1 of 2 of w:")
    assert report_of(of_rows, one.at[1].set(0.0), zero).rows.startswith("row 1 of 2 of w, x:")
    # The second column is at fault: its number is that of no row.
    x = jnp.array([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [1.0, -3.0, 1.0]])
    assert report_of(lambda x: jnp.log(jnp.ones(3) @ x), x).rows == ""


def test_a_derivative_is_that_of_an_operation_whose_rule_makes_such_equations():
    report = report_of(jax.grad(lambda a: jnp.linalg.eigh(a)[1].sum()), jnp.eye(2))
    # `add`, `div` and others stand on the same line within `eigh`.
    assert (report.operation, report.derivative_of) == ("integer_pow", "eigh")


def test_where_no_line_is_the_users_none_is_said():
    report = report_of(jax.jacfwd(jnp.sqrt), X[1])
    assert "_anomaly" not in str(report) and report.derivative_of == "sqrt"


def test_modules_loops_and_branches_are_named():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            step = lambda c, t: (lax.cond(t > 1, lambda c: c / (t - t), lambda c: c, c), None)
            return lax.scan(step, x, jnp.arange(3.0))[0]

    report = report_of(lambda x: Net(name="net").apply({}, x), X)
    assert report.path[0].endswith("iteration 2 of 3") and report.path[1].endswith("branch 1")
    assert report.module == "net"


# What it costs


def test_the_program_stays_as_it_is_and_the_check_is_one_program():
    traces = []

    @jax.jit
    def step(params, x):
        traces.append(1)
        loss, grads = jax.value_and_grad(lambda p: (p["w"] * x).sum() + p["b"])(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {"w": jnp.ones(3), "b": jnp.zeros(())}
    checked = fg.detect_anomaly(step)
    program = str(jax.make_jaxpr(step)(params, X))
    step(params, X)
    before = _finite._cache_size()
    for _ in range(3):
        params, _ = checked(params, X)
    assert len(traces) == 1 and step._cache_size() == 1
    assert str(jax.make_jaxpr(step)(params, X)) == program
    assert _finite._cache_size() == before + 1
    # One number leaves it, and it holds one reduction of each leaf and of these.
    leaves = jax.tree.leaves((params, 1.0))
    text = str(jax.make_jaxpr(_finite)(leaves))
    assert text.count("is_finite") == text.count("reduce_and") - 1 == len(leaves)


def test_a_long_loop_is_not_run_one_equation_at_a_time(monkeypatch):
    calls = []

    def body(i, c):
        jax.debug.callback(lambda i: calls.append(int(i)), i)
        return c + 1.0

    # With a print in it, it is; this is what is saved elsewhere.
    report = report_of(lambda x: jnp.log(0.0 * lax.fori_loop(0, 20, body, x)), X)
    assert report.operation == "log" and len(calls) == 20

    looked_into = []
    run = _loops._Scan.run
    monkeypatch.setattr(_loops._Scan, "run", lambda *a: looked_into.append(a[-1]) or run(*a))
    step = lambda c, t: (c + jnp.sqrt(1999.5 - t), None)
    report = report_of(lambda x: lax.scan(step, x, jnp.arange(2500.0))[0], X)
    assert report.path[0].endswith("iteration 2000 of 2500")
    assert looked_into == [*range(_loops._SHORT), 2000]


def test_of_many_iterations_the_one_that_counts_is_named():
    def body(state):
        i, x = state
        bad = jnp.log(x - x - 1.0)  # in every iteration
        return i + 1, jnp.where(i < 29, x, bad)

    report = report_of(lambda x: lax.while_loop(lambda s: s[0] < 40, body, (0, x))[1], X)
    assert report.path[0].endswith("iteration 29")


def test_a_loop_that_other_values_would_keep_running_ends():
    def body(state):
        i, best, y = state
        return i + 1, best, y - best + best  # here

    go_on = lambda s: ((s[1] > 1.0) & (s[0] < 30)) | (s[1] < 0.9)
    report = report_of(lambda x: lax.while_loop(go_on, body, (0, jnp.float32(jnp.inf), x)), 1.0)
    assert report.line.code.endswith("# here") and report.kind == "nan"


def test_under_vmap_each_row_leaves_a_while_by_itself():
    def count(n):
        body = lambda s: (s[0] + 1, 1.0 / (3.0 - s[0]))
        return lax.while_loop(lambda s: s[0] < n, body, (0.0, n))[1]

    rows = jnp.array([2.0, 3.0, 5.0])
    np.testing.assert_array_equal(fg.detect_anomaly(jax.vmap(count))(rows), [0.5, 1.0, -1.0])
    report = report_of(jax.vmap(count), rows.at[1].set(4.0))
    assert report.path[0].endswith("iteration 3") and report.rows.startswith("rows 1, 2 of 3 of n")


def test_arrays_of_an_explicit_mesh_are_looked_at():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        report = report_of(jax.jit(jnp.log), x)
    assert report.operation == "log" and report.rows.startswith("row 1 of 2 of x")


# What it cannot tell


def test_donated_arguments_are_said_to_be_gone():
    step = jax.jit(lambda params, x: {"w": jnp.log(params["w"] * x)}, donate_argnums=0)
    report = report_of(step, {"w": X + 0.0}, X)
    assert "the call donated params['w']" in report.note and "donate_argnums" in report.note
    assert report.result[0].n_inf == 1 and report.line is None


def test_callbacks_that_do_something_are_not_called_twice():
    calls = []

    def fun(x):
        jax.debug.callback(lambda: calls.append("printed"))
        y = jax.experimental.io_callback(lambda v: calls.append("wrote") or v, x, x)
        return jnp.log(y)

    report = report_of(fun, X)
    assert "it calls io_callback at" in report.note and calls.count("wrote") == 1

    def prints(x):
        jax.debug.print("x {}", x)
        return jnp.log(jax.pure_callback(lambda v: np.asarray(v), x, x))

    assert report_of(prints, X).operation == "log"


def test_a_function_that_cannot_be_traced_still_has_its_result_described():
    def decides(x):
        return jnp.log(x) if x.min() < 1 else x

    report = report_of(decides, X)
    assert report.result[0].index == (1, 1) and "Running it again failed" in report.note


def test_what_only_a_compiled_program_makes_is_said():
    runs = iter([jnp.array(jnp.nan)])
    report = report_of(lambda x: next(runs, x), X)
    assert "everything is finite" in report.note and report.line is None


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
def test_inside_of_a_transformation_it_is_refused(transform):
    with pytest.raises(TypeError, match="it stands outermost; got a call inside"):
        transform(fg.detect_anomaly(jnp.sin))(X)


def test_static_arguments_and_keywords_go_through():
    @jax.jit
    def fun(x, *, power):
        return x / x**power

    def by_name(x, kind, n=2):
        return jnp.log(x) * n if kind == "log" else x

    assert report_of(by_name, X, "log").operation == "log"
    with pytest.raises(fg.AnomalyError) as caught:
        fg.detect_anomaly(fun)(X, power=np.float32(1.0))
    assert caught.value.report.operation == "div"
    assert fg.detect_anomaly(fun).__name__ == "fun"


def test_torch_names_the_operation_whose_gradient_is_nan_and_here_its_cause_is_named(torch):
    a = torch.tensor([1.0, -1.0], requires_grad=True)
    with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning, match="Sqrt"):
        with pytest.raises(RuntimeError, match="SqrtBackward0.*nan"):
            torch.where(a > 0, a.sqrt(), 0.0).sum().backward()
    report = report_of(jax.grad(lambda a: jnp.where(a > 0, jnp.sqrt(a), 0.0).sum()), X[0] - 1.0)
    # In a lambda no variable can be set, so that it stands in its place.
    assert "jnp.where(a > 0, jnp.sqrt(jnp.where(a > 0, a, 1.0)), 0.0)" in report.repair
