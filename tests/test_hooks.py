"""Gradient hooks: what they see, what they change, in every mode and under every transformation."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from conftest import PROGRAMS
from funcgrad import _jaxpr
from programs import Program, programs


class Log(list):
    """Host values that hooks have seen, in order of arrival."""

    def hook(self, name="", ordered=False):
        def see(cotangent):
            put = lambda *leaves: self.append((name, *(np.asarray(x).tolist() for x in leaves)))
            jax.debug.callback(put, *jax.tree.leaves(cotangent), ordered=ordered)

        return see

    def taken(self):
        jax.effects_barrier()
        taken = list(self)
        self.clear()
        return taken


def scaled(x, factor):
    """The value of x, whose cotangent is multiplied by factor: what a scaling hook must equal."""
    return factor * x + lax.stop_gradient(x - factor * x)


def mesh(n=4):
    return jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))


def test_hooks_run_in_the_order_given_and_a_return_value_replaces():
    log = Log()

    def loss(a):
        return fg.grad_hook(3 * a, log.hook("a"), lambda g: 2 * g, log.hook("b"), lambda g: g + 1)

    assert jax.jit(jax.grad(loss))(1.0) == 9
    assert sorted(log.taken()) == [("a", 1.0), ("b", 2.0)]
    assert jax.grad(lambda a: fg.grad_hook(3 * a, lambda g: g + 1))(1.0) == 6
    nested = lambda a: fg.grad_hook(fg.grad_hook(3 * a, lambda g: g + 1), lambda g: 2 * g)
    assert jax.grad(nested)(1.0) == 9


@pytest.mark.torch
def test_first_and_second_passes_see_what_torch_shows(torch):
    x = torch.tensor(1.0, requires_grad=True)
    theirs, y = [], 3 * x
    y.register_hook(lambda g: theirs.append(g.item()))
    y.register_hook(lambda g: 2 * g)
    (first,) = torch.autograd.grad(y**3, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)

    log = Log()
    fun = lambda x: fg.grad_hook(3 * x, log.hook(), lambda g: 2 * g) ** 3
    assert jax.grad(fun)(1.0) == first.item() == 162
    assert log.taken() == [("", theirs[0])]
    assert jax.grad(jax.grad(fun))(1.0) == second.item() == 648


def test_all_uses_are_summed_before_the_one_call():
    log = Log()

    def loss(a):
        b = fg.grad_hook(2 * a, log.hook())
        return jnp.sin(b) + b * 5.0

    assert jnp.isclose(jax.grad(loss)(0.5), 2 * (jnp.cos(1.0) + 5))
    ((_, seen),) = log.taken()
    assert np.isclose(seen, np.cos(1.0) + 5)


def test_a_tree_keeps_its_structure_and_shows_none_where_nothing_moves():
    tree = {"f": jnp.ones(2), "i": jnp.arange(3), "key": jax.random.key(0), "none": None, "z": 1j}
    seen = []

    def hook(g):
        seen.append(jax.tree.map(lambda x: x, g, is_leaf=lambda x: x is None))
        return {**g, "f": 3 * g["f"]}

    out = fg.grad_hook(tree, hook)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert seen[0]["i"] is None
    assert seen[0]["key"] is None
    assert seen[0]["z"].dtype == jnp.complex64
    grads = jax.grad(lambda f: fg.grad_hook({**tree, "f": f}, hook)["f"].sum())(tree["f"])
    np.testing.assert_array_equal(grads, [3, 3])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64"])
def test_dtypes_and_weak_types_pass(dtype, x64):
    x = jnp.ones((2, 0, 3), dtype), jnp.ones(2, dtype)
    out, pull = jax.vjp(lambda x: fg.grad_hook(x, lambda g: jax.tree.map(jnp.negative, g)), x)
    assert [leaf.dtype for leaf in out] == [dtype, dtype]
    (back,) = pull(x)
    assert [leaf.dtype for leaf in back] == [dtype, dtype]
    np.testing.assert_array_equal(np.asarray(back[1], complex), -1)
    assert fg.grad_hook(1.0, lambda g: g).weak_type


def test_forward_mode_passes_and_its_transpose_calls_the_hook():
    fun = lambda x: jnp.sin(fg.grad_hook(x, lambda g: 10 * g))
    expected = jnp.cos(0.3)
    assert jax.jvp(fun, (0.3,), (1.0,))[1] == expected
    _, linear = jax.linearize(fun, 0.3)
    assert linear(1.0) == expected
    assert jax.linear_transpose(linear, 1.0)(1.0)[0] == 10 * expected
    np.testing.assert_allclose(jax.jacfwd(fun)(0.3), expected)


def test_a_hook_that_only_looks_leaves_all_derivatives_alone():
    plain = lambda x: (jnp.sin(x) * x[::-1]).sum() ** 3
    hooked = lambda x: plain(fg.grad_hook(x, lambda g: None, lambda g: g))
    modes = jax.jacfwd, jax.jacrev

    @jax.jit
    def derivatives(x):
        orders = [outer(inner(hooked))(x) for outer in modes for inner in modes]
        third = lambda fun: jax.jacrev(jax.jacfwd(jax.grad(fun)))(x)
        return orders, jax.hessian(plain)(x), third(hooked), third(plain)

    orders, hessian, third, plain_third = derivatives(jnp.array([0.3, 0.7]))
    for found in orders:
        np.testing.assert_allclose(found, hessian, rtol=1e-5)
    np.testing.assert_allclose(third, plain_third, rtol=1e-5)


def test_the_hook_itself_is_differentiated():
    # d/dx of g² where g = 3x² is the cotangent's square: 36 x³.
    squared = jax.grad(lambda x: fg.grad_hook(x, lambda g: g * g) ** 3)
    assert jnp.isclose(jax.jvp(squared, (2.0,), (1.0,))[1], 36 * 8)


WRAPS = {
    "jit-checkpoint-jit": lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
    "scan-checkpoint": lambda f: (
        lambda x: lax.scan(jax.checkpoint(lambda c, _: (f(c), c.sum())), x, length=3)[0]
    ),
    "cond": lambda f: lambda x: lax.cond(x.sum() > 0, f, jnp.cos, x),
    "vmap-fori": lambda f: jax.vmap(lambda x: lax.fori_loop(0, 2, lambda _, c: f(c), x)),
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "custom_vjp": lambda f: _in_custom_vjp(f),
}


def _in_custom_vjp(f):
    @jax.custom_vjp
    def fun(x):
        return f(x)

    fun.defvjp(lambda x: jax.vjp(f, x), lambda pull, g: pull(g))
    return fun


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_hook_works_inside(wrap):
    def grads(place):
        fun = WRAPS[wrap](lambda v: jnp.sin(place(v, 3.0 + 0 * v)))
        grad = jax.grad(lambda x: (fun(x) ** 2).sum())
        return jax.jit(lambda x: (grad(x), jax.vmap(grad)(jnp.stack([x, x - 0.1]))))

    x = jnp.array([[0.3, 0.7], [0.2, 1.1]])
    hooked = grads(lambda v, s: fg.grad_hook(v, lambda g: s * g))(x)
    for got, expected in zip(hooked, grads(scaled)(x), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_going_back_through_forward_mode_calls_the_hook_for_values_and_tangents():
    tangent = lambda place: lambda x, t: jax.jvp(lambda v: jnp.sin(place(v)), (x,), (t,))[1]
    plain = jax.grad(tangent(lambda v: v), (0, 1))(0.3, 2.0)
    hooked = jax.grad(tangent(lambda v: fg.grad_hook(v, lambda g: 3 * g)), (0, 1))(0.3, 2.0)
    np.testing.assert_allclose(hooked, 3 * np.array(plain), rtol=1e-6)


def sprinkled(fun, seed, place):
    """``fun`` with ``place`` on the outputs of about a third of its floating equations."""

    def rule(eqn):
        if _jaxpr.bodies(eqn) or not all(_is_float(v.aval) for v in eqn.outvars):
            return None
        # The same equation always has the same fate: a rule is asked more than once.
        if zlib.crc32(f"{seed}{eqn.primitive.name}{eqn.outvars[0].aval}".encode()) % 3:
            return None
        return lambda *inputs: [place(out) for out in _jaxpr.bind(eqn, *inputs)]

    return _jaxpr.rewrite(fun, rule)


def _is_float(aval):
    return jnp.issubdtype(aval.dtype, jnp.floating)


@settings(max_examples=max(3, PROGRAMS // 20))
@given(programs(max_size=4), st.integers(0, 99))
def test_hooks_anywhere_in_a_program_change_what_they_say(program: Program, seed):
    with jax.enable_x64(True):
        args = (program.params(np.float64), *program.inputs(np.float64))
        hooked = sprinkled(program.loss, seed, lambda v: fg.grad_hook(v, lambda g: 0.7 * g))
        oracle = sprinkled(program.loss, seed, lambda v: scaled(v, 0.7))
        both = lambda *args: [jax.value_and_grad(fun)(*args) for fun in (hooked, oracle)]
        found, expected = jax.jit(both)(*args)
        same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12)
        jax.tree.map(same, found, expected)


def test_vmap_shows_one_sample_and_shared_values_their_sum():
    x = jnp.array([[3.0, 4.0], [6.0, 8.0]])
    unit = lambda g: g / jnp.linalg.norm(g)
    rows = lambda x: jax.vmap(lambda row: fg.grad_hook(row, unit) @ row)(x).sum()
    expected = x + x / jnp.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(jax.grad(rows)(x), expected, rtol=1e-6)
    inside = jax.vmap(jax.grad(lambda row: fg.grad_hook(row, unit) @ jnp.array([3.0, 4.0])))
    np.testing.assert_allclose(inside(x), [[0.6, 0.8]] * 2, rtol=1e-6)
    shared = lambda w: jax.vmap(lambda row: fg.grad_hook(w, unit) @ row)(x).sum()
    np.testing.assert_allclose(jax.grad(shared)(jnp.ones(2)), [0.6, 0.8], rtol=1e-6)


def test_hooks_see_the_axis_of_vmap_by_its_name():
    total = lambda g: lax.psum(g, "i")
    rows = jax.vmap(lambda x: fg.grad_hook(x, total) ** 2, axis_name="i")
    np.testing.assert_array_equal(jax.grad(lambda x: rows(x).sum())(jnp.arange(3.0)), [6, 6, 6])


def test_hooks_close_over_tracers_of_all_transformations():
    def loss(x, s):
        return (fg.grad_hook(x, lambda g: g * s) ** 2).sum()

    x = jnp.arange(3.0)
    np.testing.assert_array_equal(jax.grad(jax.jit(loss))(x, 2.0), 4 * x)
    np.testing.assert_array_equal(jax.vmap(jax.grad(loss), (None, 0))(x, x)[2], 4 * x)
    # The value does not depend on s, but the gradient does.
    assert jax.grad(loss, 1)(x, 2.0) == 0
    assert jax.grad(lambda s: jax.grad(jax.jit(loss))(x, s).sum())(2.0) == 6
    # Each row has its own factor, so that the sum over rows comes after the hook.
    rows = lambda x: jax.vmap(loss, (None, 0))(x, jnp.arange(3.0)).sum()
    np.testing.assert_array_equal(jax.grad(rows)(x), 2 * x * 3)

    def scanned(x):
        return lax.scan(lambda c, a: (fg.grad_hook(c, lambda g: g * a), None), 1.0 * x, 1 + x)[0]

    assert jax.jit(jax.grad(lambda x: scanned(x).sum()))(x).tolist() == [6, 6, 6]


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_checkpoint_calls_once_in_each_backward_pass(policy):
    log = Log()
    block = lambda x: jnp.sin(fg.grad_hook(jnp.sin(x), log.hook()))
    jax.jit(jax.grad(jax.checkpoint(block, policy=policy)))(0.5)
    assert len(log.taken()) == 1
    _, pull = jax.vjp(jax.checkpoint(block, policy=policy), 0.5)
    pull(1.0), pull(2.0)
    assert len(log.taken()) == 2


def test_ordered_callbacks_keep_the_order_of_the_backward_pass():
    log = Log()

    def chain(x):
        for i in range(4):
            x = jnp.sin(fg.grad_hook(x, log.hook(i, ordered=True)))
        return x

    jax.jit(jax.grad(chain))(0.5)
    assert [name for name, _ in log.taken()] == [3, 2, 1, 0]

    def step(c, i):
        return jnp.sin(fg.grad_hook(c, lambda g: log.hook(ordered=True)((i, g)))), None

    scan = jax.checkpoint(lambda x: lax.scan(step, x, jnp.arange(3))[0])
    jax.jit(jax.grad(scan))(0.5)
    assert [i for _, i, _ in log.taken()] == [2, 1, 0]


def test_a_pass_that_does_not_reach_the_value_does_not_call():
    log = Log()

    def loss(x):
        y = fg.grad_hook(2 * x, log.hook())
        return x + lax.stop_gradient(y)

    jax.grad(loss)(1.0)
    jax.grad(lambda x: x + fg.grad_hook(2.0, log.hook()))(1.0)
    assert log.taken() == []


def test_a_nan_is_found_under_jit():
    found = Log()

    def check(g):
        jax.debug.callback(lambda bad: bad and found.append(("nan",)), jnp.isnan(g).any())

    loss = lambda x: jnp.sqrt(fg.grad_hook(x, check)).sum() * 0.0
    jax.jit(jax.grad(loss))(jnp.array([0.0, 1.0]))
    assert found.taken() == [("nan",)]


def test_the_forward_pass_is_compiled_as_without_the_hook():
    plain = lambda x: jnp.sin(x * 2).sum()
    hooked = lambda x: jnp.sin(fg.grad_hook(x * 2, lambda g: 2 * g)).sum()
    hooked.__name__ = plain.__name__
    x = jnp.ones(8)
    assert jax.jit(hooked).lower(x).as_text() == jax.jit(plain).lower(x).as_text()
    looked = lambda x: jnp.sin(fg.grad_hook(x * 2, lambda g: None)).sum()
    cost = lambda f: jax.jit(jax.grad(f)).lower(x).compile().cost_analysis()
    assert cost(looked)["flops"] == cost(plain)["flops"]
    residuals = lambda f: jax.tree.leaves(jax.eval_shape(lambda: jax.vjp(f, x)[1]))
    assert [r.shape for r in residuals(hooked)] == [r.shape for r in residuals(plain)]


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (lambda g: (g, g), "returns the structure"),
        (lambda g: {"w": g["w"], "b": None}, "returns the structure"),
        (lambda g: {**g, "w": g["w"][0]}, r"shape and dtype of the cotangent at \['w'\]; got"),
        (lambda g: {**g, "w": g["w"].astype(jnp.bfloat16)}, r"got bfloat16\[2\], given float32"),
    ],
)
def test_what_a_hook_returns_is_checked_when_it_is_put_on(hook, words):
    with pytest.raises(ValueError, match=words):
        fg.grad_hook({"w": jnp.ones(2), "b": jnp.ones(())}, hook)


def test_a_value_without_gradient_takes_no_hook():
    with pytest.raises(TypeError, match="x has a floating leaf.*got int32"):
        fg.grad_hook(jnp.arange(3), lambda g: g)
    with pytest.raises(TypeError, match="at least one function"):
        fg.grad_hook(jnp.ones(3))


def test_hooks_on_chosen_parameters_know_their_paths():
    params = {"a": {"kernel": jnp.ones(2), "bias": jnp.ones(1)}, "step": jnp.arange(2)}
    loss = lambda p: sum(x.sum() for x in jax.tree.leaves(p["a"]))

    def grads(**options):
        hook = lambda path, g: g * len(path)
        hooked = lambda a: loss(fg.grad_hooks({**params, "a": a}, hook, **options))
        return jax.tree.map(lambda g: g[0].item(), jax.grad(hooked)(params["a"]))

    assert grads() == {"kernel": 8, "bias": 6}
    assert grads(leaves="*/kernel") == {"kernel": 8, "bias": 1}
    assert grads(leaves=lambda path, leaf: leaf.size == 1) == {"kernel": 1, "bias": 6}
    with pytest.raises(ValueError, match="got 'a/kernl', which names none. Near names: a/kernel"):
        fg.grad_hooks(params, lambda path, g: g, leaves="a/kernl")
    with pytest.raises(ValueError, match="chooses a floating leaf; got 'step'"):
        fg.grad_hooks(params, lambda path, g: g, leaves="step")


def buckets_net(params, x, hook=lambda group: group):
    """Two layers, each reduced as one bucket where it is used."""
    first, second = hook((params["w1"], params["b1"])), None
    x = jnp.tanh(x @ first[0] + first[1])
    (second,) = hook((params["w2"],))
    return ((x @ second) ** 2).sum()


def test_buckets_are_reduced_inside_the_backward_pass_where_each_is_born():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {"w1": draw(3, 4), "b1": draw(4), "w2": draw(4, 2)}
    x = draw(8, 3)
    reduced = lambda group: fg.grad_hook(group, lambda g: lax.psum(g, "data"))
    local = jax.grad(lambda p, x: buckets_net(p, x, reduced))
    sharded = jax.shard_map(
        local, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    compiled = jax.jit(sharded).lower(params, x).compile()
    grads = compiled(params, x)
    for name, expected in jax.jit(jax.grad(buckets_net))(params, x).items():
        np.testing.assert_allclose(grads[name], expected, rtol=1e-5)

    order = [v.eqn.primitive.name for v in _jaxpr.walk(jax.make_jaxpr(sharded)(params, x))]
    reductions = [i for i, name in enumerate(order) if name == "psum"]
    assert len(reductions) == 3  # one a leaf; the two of a bucket stand together
    assert reductions[2] == reductions[1] + 1
    # Between the buckets the backward pass of the first layer goes on.
    assert "dot_general" in order[reductions[0] : reductions[1]]
    assert compiled.as_text().count("all-reduce(") <= 2


def test_under_vma_types_a_reduction_that_jax_makes_already_is_refused():
    def local(w, x):
        w = lax.pcast(w, ("data",), to="varying")
        w = fg.grad_hook(w, lambda g: lax.psum(g, "data"))
        return (x @ w).sum()

    sharded = jax.shard_map(jax.grad(local), mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"axes over which the cotangent varies; got \[\]"):
        jax.eval_shape(sharded, jnp.ones(3), jnp.ones((8, 3)))


def test_weak_types_keep_what_they_say_of_the_mesh():
    def local(x):
        weak = 1.0 * lax.axis_index("data")
        count = lambda g: g * lax.psum(0 * g + 1, "data")
        hooked = lambda s: (fg.grad_hook(s, count, lambda g: None) * x).sum()
        return jax.grad(hooked)(weak)[None]

    sharded = jax.shard_map(local, mesh=mesh(), in_specs=P("data"), out_specs=P("data"))
    assert jax.jit(sharded)(jnp.arange(4.0)).tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("check_vma", [True, False])
def test_hooks_under_shard_map_see_their_own_shard(check_vma):
    mine = lambda g: g * (1.0 + lax.axis_index("data"))
    local = jax.grad(lambda x: fg.grad_hook(x, mine).sum())
    sharded = jax.shard_map(
        local, mesh=mesh(), in_specs=P("data"), out_specs=P("data"), check_vma=check_vma
    )
    assert sharded(jnp.ones(4)).tolist() == [1, 2, 3, 4]
    assert jax.jit(sharded)(jnp.ones(4)).tolist() == [1, 2, 3, 4]


def test_explicit_shardings_stay():
    explicit = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit):
        x = jax.device_put(jnp.ones((8, 3)), jax.NamedSharding(explicit, P("data")))
        grad = jax.jit(jax.grad(lambda x: jnp.sin(fg.grad_hook(x, lambda g: 2 * g)).sum()))
        assert jax.typeof(grad(x)).sharding.spec == P("data", None)


def _squared_rule(x):
    @jax.custom_vjp
    def rule(x):
        return x

    rule.defvjp(lambda x: (x, None), lambda _, g: (g * g,))
    return rule(x)


class _Squared(fg.Function):
    @staticmethod
    def forward(ctx, x):
        return 1 * x

    @staticmethod
    def backward(ctx, g):
        return g * g


# What is squared on its way back is not linear: that of a sum is not the sum.
SQUARES = {
    "hook": lambda x: fg.grad_hook(x, lambda g: g * g),
    "custom_vjp": _squared_rule,
    "Function": _Squared.apply,
}


def test_per_sample_gradients_take_each_sample_back_alone():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    params, xs = {"w": draw(3, 4), "u": draw(4, 4), "v": draw(4)}, draw(5, 3)

    def loss(params, x, a="hook", b="custom_vjp", c="Function"):
        w = jax.jit(lambda w: SQUARES[a](2 * w))(params["w"])
        step = lambda h, _: (jnp.tanh(h @ SQUARES[b](params["u"])), None)
        h, _ = lax.scan(step, jnp.tanh(SQUARES[a](x @ w)), None, length=2)
        return h @ SQUARES[c](params["v"])

    rows = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, xs)
    norms = jnp.sqrt(sum((g**2).reshape(5, -1).sum(1) for g in jax.tree.leaves(rows)))
    bound = float(jnp.median(norms))
    expected = jax.tree.map(lambda g: jnp.tensordot(jnp.minimum(1, bound / norms), g, 1), rows)
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    clipped = jax.jit(fg.clipped_grad(loss, max_norm=bound, road="gram"))(params, xs)
    jax.tree.map(same, clipped.grads, expected)
    same(clipped.norms, norms)


@pytest.mark.parametrize("kind", SQUARES)
def test_two_passes_refuse_what_need_not_scale_with_the_loss(kind):
    loss = lambda w, x: jax.jit(SQUARES[kind])(w @ x).sum()
    with pytest.raises(ValueError, match=r"two_pass.*need not scale with it.*test_hooks\.py"):
        fg.clipped_grad(loss, max_norm=1.0, road="two_pass")(jnp.ones((2, 3)), jnp.ones((4, 3)))


def test_a_hook_that_closes_over_what_is_transposed_is_refused():
    with pytest.raises(TypeError, match="the value that it is linear in. Use jax.vjp"):
        jax.linear_transpose(lambda x: fg.grad_hook(2 * x, lambda g: g * x), 1.0)(1.0)
