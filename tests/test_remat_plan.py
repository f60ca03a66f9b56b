"""Budgets: kept bytes never above them, gradients as without, the least work again."""

import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from conftest import DEEP, PROGRAMS
from funcgrad._compat import unoptimised
from funcgrad._remat import _integer, _solve
from funcgrad._remat._budget import checkpoint_under_budget
from funcgrad._remat._graph import Candidate, Graph, Node, Step
from funcgrad._remat._integer import Problem
from funcgrad._remat._plan import plan
from funcgrad._remat._planner import Flat, Planner
from funcgrad._remat._solve import Infeasible, solve
from programs import programs

quickly = functools.partial(jax.jit, compiler_options=unoptimised())


def kept_bytes(fun, *args):
    """Bytes of the leaves of the vjp's closure that are neither arguments nor constants."""
    closed = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(fun, *args)[1]))(*args)
    jaxpr = getattr(closed, "jaxpr", closed)
    free = {id(v) for v in (*jaxpr.invars, *jaxpr.constvars)}
    made = {id(v): v.aval for v in jaxpr.outvars if not hasattr(v, "val") and id(v) not in free}
    return sum(aval.size * aval.dtype.itemsize for aval in made.values())


def matmuls(fun, *args):
    text = str(jax.make_jaxpr(jax.grad(fun, argnums=tuple(range(len(args)))))(*args))
    return text.count("dot_general[")


def grads(fun, *args):
    both = jax.value_and_grad(fun, argnums=tuple(range(len(args))))
    return quickly(both)(*args)


def assert_equal(a, b, rtol=2e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        scale = float(jnp.abs(jnp.where(jnp.isfinite(y), y, 0)).max(initial=0)) + 1e-30
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * scale)


def net(w, x):
    for i in range(4):
        x = jax.nn.gelu(x @ w[i])
        x = x - x.mean(-1, keepdims=True)
    return jax.nn.softmax(x).var()


def scanned(w, x):
    def body(x, w):
        x = jax.nn.gelu(x @ w)
        return x - x.mean(-1, keepdims=True), x.sum()

    x, sums = lax.scan(body, x, w)
    return (jax.nn.softmax(x) * sums.sum()).var()


def inputs(n=4, rows=8, width=8):
    w, x = jax.random.split(jax.random.key(0))
    return jax.random.normal(w, (n, width, width)) / 2, jax.random.normal(x, (rows, width))


def test_kept_bytes_stay_within_the_budget_and_gradients_are_the_same():
    args, budget = inputs(), 0.35
    planned = checkpoint_under_budget(net, budget)
    assert kept_bytes(planned, *args) <= budget * kept_bytes(net, *args)
    assert_equal(grads(planned, *args), grads(net, *args))


def test_a_loop_is_planned_inside():
    args = inputs()
    planned = checkpoint_under_budget(scanned, 0.4)
    assert kept_bytes(planned, *args) <= 0.4 * kept_bytes(scanned, *args)
    assert_equal(grads(planned, *args), grads(scanned, *args))


def test_everything_kept_computes_nothing_again_and_nothing_kept_each_product_once():
    args = inputs()
    plain = matmuls(net, *args)
    assert matmuls(checkpoint_under_budget(net, 1.0), *args) == plain
    assert matmuls(checkpoint_under_budget(net, 0.0), *args) == plain + 4


def test_bytes_are_bytes():
    args = inputs()
    assert kept_bytes(checkpoint_under_budget(net, 700), *args) <= 700
    curve = plan(net, [700, 0.5])(*args)
    assert curve[0].nbytes <= 700
    assert curve[1].nbytes <= 0.5 * curve.plain_nbytes
    # JAX keeps a scalar more where its own functions are jitted.
    assert abs(curve.plain_nbytes - kept_bytes(net, *args)) <= 16


def test_a_budget_below_what_a_loop_carries_names_the_least_possible():
    args = inputs()
    with pytest.raises(ValueError, match="the least possible is") as error:
        grads(checkpoint_under_budget(scanned, 16), *args)
    least = int(str(error.value).split("budget=")[1].split()[0])
    planned = checkpoint_under_budget(scanned, least)
    assert kept_bytes(planned, *args) == least
    assert_equal(grads(planned, *args), grads(scanned, *args))
    assert plan(scanned, [16])(*args).infeasible == (16,)


@pytest.mark.parametrize(
    ("budget", "kind", "error", "words"),
    [
        (-1, "residuals", ValueError, "0 or more; got -1"),
        (1.5, "residuals", ValueError, "from 0.0 to 1.0; got 1.5"),
        (float("nan"), "residuals", ValueError, "got nan"),
        (True, "residuals", TypeError, "got True"),
        ("1GB", "residuals", TypeError, "got '1GB'"),
        (0.5, "both", ValueError, "got 'both'"),
    ],
)
def test_what_is_no_budget_is_refused(budget, kind, error, words):
    with pytest.raises(error, match=words):
        checkpoint_under_budget(net, budget, kind)
    with pytest.raises(error, match=words):
        plan(net, [budget], budget_kind=kind)


def test_nothing_differentiable_is_left_alone_and_cannot_be_planned():
    fun = lambda n: n * 2 + 1
    assert checkpoint_under_budget(fun, 0.0)(jnp.arange(3)).tolist() == [1, 3, 5]
    with pytest.raises(ValueError, match="got none that is floating"):
        plan(fun, [0.5])(jnp.arange(3))
    constant = checkpoint_under_budget(lambda x: jnp.ones(3).sum(), 0.0)
    assert jax.grad(constant)(2.0) == 0


def test_dtypes_are_kept_and_mix():
    def fun(tree, key):
        h = tree["bf16"] @ tree["f32"].astype(jnp.bfloat16)
        h = jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h, 0)
        z = (jnp.fft.fft(h.astype(jnp.float32)) * tree["c64"]).sum()
        return jnp.tanh(h).astype(jnp.float32).sum() + jnp.abs(z) + tree["n"].sum()

    rng = np.random.default_rng(0)
    tree = {
        "bf16": jnp.asarray(rng.normal(size=(4, 6)), jnp.bfloat16),
        "f32": jnp.asarray(rng.normal(size=(6, 5)), jnp.float32),
        "c64": jnp.asarray(rng.normal(size=5) + 1j * rng.normal(size=5), jnp.complex64),
        "n": jnp.arange(3),
    }
    planned = checkpoint_under_budget(fun, 0.2)
    of = lambda f: quickly(jax.grad(f, allow_int=True))(tree, jax.random.key(1))
    a, b = of(planned), of(fun)
    assert jax.tree.map(lambda x: x.dtype, a) == jax.tree.map(lambda x: x.dtype, b)
    del a["n"], b["n"]
    assert_equal(
        jax.tree.map(lambda x: x.astype(jnp.complex64), a),
        b | {k: v.astype(jnp.complex64) for k, v in b.items()},
        rtol=2e-2,
    )


def test_static_arguments_none_leaves_and_keywords_pass():
    def fun(params, x, name, *, scale=None, n):
        assert name == "name"
        for _ in range(len(n)):
            x = jnp.tanh(x * params["w"])
        return x.sum() if scale is None else scale * x.sum()

    args = {"w": jnp.ones(3), "none": None}, jnp.ones(3), "name"
    planned = checkpoint_under_budget(fun, 0.0)
    assert_equal(jax.grad(planned)(*args, n="abc")["w"], jax.grad(fun)(*args, n="abc")["w"])
    assert planned.__name__ == "fun"


def test_dropout_draws_the_same_mask_again():
    def fun(x, key):
        for k in jax.random.split(key, 3):
            x = jnp.where(jax.random.bernoulli(k, 0.5, x.shape), jnp.sin(x) * 2, 0)
        return x.sum()

    x, key = jnp.linspace(0, 1, 32), jax.random.key(0)
    planned = checkpoint_under_budget(fun, 0.0)
    assert_equal(quickly(jax.grad(planned))(x, key), quickly(jax.grad(fun))(x, key))


def test_random_numbers_without_a_key_are_kept_never_drawn_again():
    from jax.lax import rng_uniform

    def fun(x):
        return (jnp.sin(x) * rng_uniform(0.0, 1.0, (16,))).sum()

    planned = checkpoint_under_budget(fun, 64)
    text = str(jax.make_jaxpr(jax.grad(planned))(jnp.ones(16)))
    assert text.count("rng_uniform") == 1
    with pytest.raises(ValueError, match="the least possible is 64 bytes"):
        jax.grad(checkpoint_under_budget(fun, 0))(jnp.ones(16))


def test_forward_mode_draws_no_other_numbers():
    from jax.lax import rng_uniform

    ref = jax.new_ref(jnp.float32(0))

    def counted(x):
        ref[...] += 1
        return jnp.sin(x) * ref[...]

    for fun in (lambda x: x * rng_uniform(0.0, 1.0, (4,)), counted):
        with pytest.raises(ValueError, match=r"got lax.rng_uniform, .* at .*test_remat_plan.py"):
            jax.jvp(checkpoint_under_budget(fun, 16), (1.0,), (1.0,))


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_effects_run_once_in_each_iteration(transform):
    seen = []

    def step(x, _):
        x = jnp.sin(x)
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return lax.cond(x > -9, jax.jit(jnp.sin), lambda x: x, x), None

    def fun(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return lax.scan(step, x, length=3)[0]

    transform(checkpoint_under_budget(fun, 0.9))(1.0)
    jax.effects_barrier()
    assert len(seen) == len(set(seen)) == 4


def test_an_assigned_argument_is_refused():
    from flax import nnx

    def fun(model, x):
        return model(x).sum()

    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="leaves its arguments as they are"):
        jax.grad(checkpoint_under_budget(fun, 0.5), argnums=1)(model, jnp.ones(8))


@hypothesis.settings(max_examples=300 if DEEP else PROGRAMS // 10)
@hypothesis.given(programs(), hypothesis.strategies.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
def test_generated_programs_keep_their_budget_and_their_gradients(program, fraction):
    x, t = program.inputs()
    args = program.params(), x
    fun = lambda params, x: program.loss(params, x, t)
    plain = kept_bytes(fun, *args)
    budget = fraction
    try:
        kept = kept_bytes(checkpoint_under_budget(fun, budget), *args)
    except ValueError as error:
        assert "the least possible is" in str(error)
        budget = int(str(error).split("budget=")[1].split()[0])
        kept = kept_bytes(checkpoint_under_budget(fun, budget), *args)
        assert budget > fraction * plain
    assert kept <= (budget if isinstance(budget, int) else budget * plain)
    planned = checkpoint_under_budget(fun, budget)
    assert_equal(grads(planned, *args), grads(fun, *args), rtol=2e-4)


def planner_of(fun, *args):
    flat, values = Flat.of(fun, args, {}, "test")
    return Planner(flat, values, [True] * len(values))


def test_the_integer_program_equals_trying_every_choice():
    def fun(x, w):
        h = jnp.sin(x @ w)
        return (h * jnp.exp(h)).sum()

    graph = planner_of(fun, jnp.ones((3, 4)), jnp.ones((4, 5))).graph
    within = sorted(Problem(graph).candidates)
    choices = [graph.closure(kept) for n in range(5) for kept in itertools.combinations(within, n)]
    for budget in range(0, graph.keeping().nbytes + 1, 20):
        best = min(c.cost for c in choices if c is not None and c.nbytes <= budget)
        solution = solve(graph, budget, gap=0.0)
        assert solution.closure.nbytes <= budget
        assert solution.closure.cost == pytest.approx(best)


def test_the_solver_misses_no_budget_by_its_tolerance_and_prints_nothing(capfd):
    def fun(w, x):
        for _ in range(3):
            x = jnp.tanh(x @ w)
            x = x * jnp.exp(jnp.sin(x.mean()))
        return x.sum()

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    args = shape(64, 64), shape(2**22, 64)  # a GiB each, beside scalars
    for plan_ in plan(fun, [0.4, 0.6], argnums=0)(*args):
        (less,) = plan(fun, [plan_.nbytes - 1], argnums=0)(*args)
        assert less.nbytes < plan_.nbytes
    curve = plan(fun, [0], argnums=0)(*args)
    assert curve.least_nbytes == 0
    assert capfd.readouterr() == ("", "")


def test_costs_below_the_solvers_tolerance_count_too():
    # Two products at the same cost, of which one follows from more: that one is kept.
    graph = Graph()
    for reads in ((), (0,), (1,), (), (3,)):
        cost = 1e12 if len(graph.steps) in (2, 4) else 1.0
        graph.nodes.append(Node(len(graph.candidates), len(graph.steps)))
        graph.steps.append(Step(None, 1, cost, reads, True, False))
        graph.candidates.append(Candidate(10, 1, None, None, []))
    graph.needs = [2, 4]
    for first, second in ((2, 4), (4, 2)):
        graph.needs = [first, second]
        assert solve(graph, 10, gap=0.0).closure.kept == {2}


def test_argnums_name_arguments_that_there_are():
    for wrong in (2, -3, (0, 5)):
        with pytest.raises(ValueError, match="of which there are 2; got"):
            plan(net, [1.0], argnums=wrong)(*inputs())
    by_name = plan(lambda w, x: net(w, x), [1.0])(inputs()[0], x=inputs()[1])
    assert by_name.plain_nbytes == plan(net, [1.0], argnums=0)(*inputs()).plain_nbytes


def test_no_policy_runs_less_again_at_its_own_bytes():
    for fun in (net, scanned):
        planner = planner_of(fun, *inputs())
        for name, hand in planner.by_hand.items():
            assert planner.choose(hand.nbytes).closure.cost <= hand.cost, name


def test_prices_stand_in_where_the_solver_is_stopped(monkeypatch):
    graph = planner_of(net, *inputs()).graph
    problem = Problem(graph)
    budget = graph.keeping().nbytes // 3
    exact = solve(graph, budget, gap=0.0).closure
    found, bound = problem.priced(budget)
    assert found is not None
    assert found.nbytes <= budget
    assert bound <= exact.cost * (1 + 1e-6)
    assert exact.cost <= found.cost <= 2 * exact.cost
    monkeypatch.setattr(_solve, "_SOLVED", {})
    monkeypatch.setattr(_integer, "EMERGENCY_SECONDS", 0.0)
    with pytest.warns(UserWarning, match="stopped by the clock"):
        solution = solve(graph, budget)
    assert solution.method == "prices"
    assert solution.closure.nbytes <= budget
    assert solution.closure.cost * (1 - solution.gap) <= exact.cost * (1 + 1e-6)


def test_equal_problems_are_solved_once_and_an_infeasible_one_names_the_least():
    graph, again = (planner_of(scanned, *inputs()).graph for _ in range(2))
    budget = graph.keeping().nbytes // 2
    assert solve(graph, budget) is solve(again, budget)
    assert solve(graph, budget).closure.nbytes > solve(graph, budget - 300).closure.nbytes
    with pytest.raises(Infeasible):
        solve(graph, 16)


def test_views_and_masks_are_not_kept_where_they_cost_nothing():
    def fun(x):
        for _ in range(3):
            x = jax.nn.relu(jnp.broadcast_to(x.T[:, None], (8, 2, 8)).sum(1)) * 0.9
        return x.sum()

    curve = plan(fun, [0.0, 1.0])(jnp.ones((8, 8)))
    assert curve[1].recompute == 0
    names = {value.operation for value in plan(fun, [0.4])(jnp.ones((8, 8)))[0].kept}
    assert not names & {"broadcast_in_dim", "reshape"}


def test_the_explanation_names_lines_and_reasons():
    curve = plan(scanned, [0.5])(*inputs())
    text = curve[0].explain()
    assert "test_remat_plan.py" in text
    assert "cannot run again" in text
    assert "carried f32[8,8] ×4" in text
    assert f"{curve[0].recompute:.1%}" in text
    assert sum(value.nbytes for value in curve[0].kept) == curve[0].nbytes
    assert "integer program" in str(curve)


def test_plans_need_types_only_and_take_argnums():
    w, x = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs())
    of_both = plan(net, [1.0])(w, x)
    of_w = plan(net, [1.0], argnums=0)(w, x)
    assert of_w.plain_nbytes <= of_both.plain_nbytes
    weights, rows = inputs()
    kept = kept_bytes(lambda w: net(w, rows), weights)
    assert abs(of_w.plain_nbytes - kept) <= 16


def test_work_of_unrolled_code_comes_after_the_cotangent():
    def temp_bytes(fun, *args):
        compiled = quickly(jax.grad(fun)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def fun(x):
        for i in range(12):
            x = jnp.sin(x @ jnp.full((64, 64), 0.1 + i))
        return x.sum()

    x = jnp.ones((256, 64))
    planned = temp_bytes(checkpoint_under_budget(fun, 0.3), x)
    assert planned < 0.8 * temp_bytes(fun, x)
