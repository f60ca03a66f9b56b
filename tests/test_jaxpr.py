"""The jaxpr core: reading, walking, rewriting and running again."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from conftest import PROGRAMS
from funcgrad import _jaxpr
from funcgrad._compat import open_jaxpr, primitives
from programs import Program, odd_tanh, programs


def enter_everything(eqn):
    """Replace each plain equation by itself, so that every body is rebuilt."""
    if _jaxpr.bodies(eqn):
        return None
    return lambda *inputs: _jaxpr.bind(eqn, *inputs)


def sin_becomes_cos(eqn):
    if eqn.primitive is primitives.sin_p:
        return lambda x: [jnp.cos(x)]
    return None


def assert_same_bits(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_same_program(fun, other, *args):
    """Both give the same bits: they are one program for the compiler, or both are run."""
    same_name = [lambda *args, f=f: f(*args) for f in (fun, other)]
    one, two = (jax.jit(f).lower(*args) for f in same_name)
    if one.as_text() == two.as_text():
        assert jax.tree.structure(one.out_info) == jax.tree.structure(two.out_info)
    else:
        assert_same_bits(jax.jit(fun)(*args), jax.jit(other)(*args))


def kinds(jaxpr):
    return {visit.eqn.primitive.name for visit in _jaxpr.walk(jaxpr)}


def nested(x):
    """One of each body that JAX has."""
    x = jax.jit(jnp.sin)(x)
    x = lax.scan(lambda c, a: (jnp.sin(c) + a, c.sum()), x, jnp.arange(3.0))[0]
    x = lax.while_loop(lambda c: c.sum() < 9.0, lambda c: jnp.sin(c) * 0.1 + c + 1.0, x)
    x = lax.cond(x.sum() > 0, lambda v: jnp.sin(v), lambda v: -v, x)
    x = jax.checkpoint(lambda v: jnp.sin(v) * 2)(x)
    x = odd_tanh(x)
    return lax.custom_linear_solve(
        lambda v: 2.0 * v, x, lambda matvec, b: jnp.sin(b) / 2.0, symmetric=True
    )


@settings(max_examples=PROGRAMS)
@given(programs())
def test_running_a_program_again_gives_the_same_bits(program: Program):
    args = (program.params(), *program.inputs())
    again = _jaxpr.rewrite(program.loss, enter_everything)
    assert_same_program(jax.value_and_grad(again), jax.value_and_grad(program.loss), *args)


@settings(max_examples=max(5, PROGRAMS // 10))
@given(programs())
def test_running_again_commutes_with_vmap_and_forward_mode(program: Program):
    assume("odd_tanh" not in str(program.steps))  # which has no forward mode
    params = program.params()
    batch = program.inputs(batch=2)
    again = _jaxpr.rewrite(program.loss, enter_everything)

    def both(loss, batch):
        rows = jax.vmap(lambda x, t: loss(params, x, t))
        primals, tangents = (batch[0],), (jnp.cos(batch[0]),)
        return jax.jvp(lambda x: rows(x, batch[1]), primals, tangents)

    assert_same_program(lambda batch: both(again, batch), lambda b: both(program.loss, b), batch)


def test_running_nested_bodies_again_gives_the_same_bits():
    x = jnp.linspace(0.1, 1.0, 3)
    assert_same_bits(jax.jit(_jaxpr.rewrite(nested, enter_everything))(x), jax.jit(nested)(x))
    assert_same_bits(_jaxpr.rewrite(nested, enter_everything)(x), nested(x))


def test_walk_enters_every_kind_of_body():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    jaxpr = _jaxpr.trace(lambda x: mapped(nested(x)), jnp.ones(3)).jaxpr
    paths = {visit.path[-1] for visit in _jaxpr.walk(jaxpr) if visit.path}
    assert {
        "jit.jaxpr",
        "scan.body",
        "while.cond",
        "while.body",
        "cond.branches[0]",
        "cond.branches[1]",
        "shard_map.jaxpr",
        "custom_vjp_call.primal",
    } <= paths
    assert any("linear_solve" in path for path in paths)
    assert any(path.startswith(("remat", "checkpoint")) for path in paths)


def test_walk_counts_the_trips_of_nested_scans_and_not_those_of_while():
    def fun(x):
        inner = lambda c, _: (lax.scan(lambda d, _: (jnp.sin(d), None), c, length=4)[0], None)
        x = lax.scan(inner, x, length=5)[0]
        return lax.while_loop(lambda c: c < 1, jnp.cos, x)

    trips = {v.eqn.primitive.name: v.trips for v in _jaxpr.walk(_jaxpr.trace(fun, 1.0).jaxpr)}
    assert trips["sin"] == 20
    assert trips["cos"] is None


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        jax.vmap,
        lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=1)[0],
        lambda f: lambda x: lax.cond(True, f, lambda v: v, x),
        lambda f: lambda x: lax.fori_loop(0, 1, lambda _, c: f(c), x),
        lambda f: lambda x: jax.jit(jax.checkpoint(jax.jit(f)))(x),
    ],
    ids=["jit", "checkpoint", "vmap", "scan", "cond", "fori", "jit-checkpoint-jit"],
)
def test_a_replacement_reaches_into_every_body(wrap):
    x = jnp.linspace(0.0, 1.0, 4)
    fun = _jaxpr.rewrite(wrap(lambda v: jnp.sin(v)), sin_becomes_cos)
    np.testing.assert_array_equal(fun(x), jnp.cos(x))
    np.testing.assert_allclose(jax.jacobian(fun)(x), np.diag(-np.sin(x)), atol=1e-6)


def test_a_custom_derivative_rule_is_kept_whole():
    fun = _jaxpr.rewrite(lambda x: odd_tanh(jnp.sin(x)), sin_becomes_cos)
    expected = jax.grad(lambda x: odd_tanh(jnp.cos(x)))(0.3)
    np.testing.assert_array_equal(jax.grad(fun)(0.3), expected)


def test_bodies_without_a_replacement_are_bound_as_they_stand():
    traced = _jaxpr.trace(nested, jnp.ones(3)).jaxpr
    rerun = _jaxpr.trace(_jaxpr.rewrite(nested, lambda eqn: None), jnp.ones(3)).jaxpr
    assert str(rerun) == str(traced)


def test_backward_programs_run_again_with_the_same_bits():
    def loss(w):
        layer = jax.checkpoint(lambda c: jnp.tanh(w @ c))
        return lax.scan(lambda c, _: (layer(c), None), jnp.ones(3), length=3)[0].sum()

    w = jax.random.normal(jax.random.key(0), (3, 3))
    again = _jaxpr.rewrite(jax.grad(loss), enter_everything)
    assert_same_bits(jax.jit(again)(w), jax.jit(jax.grad(loss))(w))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_is_rebuilt_with_its_specs_and_its_gradient(check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def local(w, x):
        return lax.psum(jnp.sin(w * x).sum(), "data")

    def fun(w, x):
        return jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
        )(w, x)

    args = jnp.float32(0.7), jnp.arange(8.0)
    again = _jaxpr.rewrite(fun, enter_everything)
    assert_same_bits(
        jax.jit(jax.value_and_grad(again))(*args), jax.jit(jax.value_and_grad(fun))(*args)
    )
    changed = _jaxpr.rewrite(fun, sin_becomes_cos)
    np.testing.assert_allclose(changed(*args), jnp.cos(0.7 * args[1]).sum(), rtol=1e-6)


def test_shardings_stated_inside_stay():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))

    def fun(x):
        x = jax.jit(jnp.sin, in_shardings=rows, out_shardings=rows)(x)
        return lax.with_sharding_constraint(jnp.sin(x), rows)

    again = jax.jit(_jaxpr.rewrite(fun, enter_everything))
    assert again(jnp.ones((8, 2))).sharding.is_equivalent_to(rows, 2)
    inner = [
        v.eqn
        for v in _jaxpr.walk(_jaxpr.trace(again, jnp.ones((8, 2))).jaxpr)
        if v.eqn.params.get("name") == "sin"
    ]
    assert inner[0].params["in_shardings"] == (rows,)


def test_names_and_source_lines_stay():
    def fun(x):
        with jax.named_scope("block"):
            return jax.jit(lambda v: jnp.sin(v))(x) * 2

    again = _jaxpr.trace(_jaxpr.rewrite(fun, enter_everything), 1.0).jaxpr
    plain = _jaxpr.trace(fun, 1.0).jaxpr
    for a, b in zip(_jaxpr.walk(again), _jaxpr.walk(plain), strict=True):
        assert a.eqn.primitive is b.eqn.primitive
        assert str(a.eqn.source_info.name_stack) == str(b.eqn.source_info.name_stack)
        assert _jaxpr.source_line(a.eqn) == _jaxpr.source_line(b.eqn)
    assert any("block" in str(v.eqn.source_info.name_stack) for v in _jaxpr.walk(again))


def test_the_source_line_is_the_users_own():
    def model(x):
        return nn.LayerNorm().apply({"params": {"scale": jnp.ones(3), "bias": jnp.ones(3)}}, x)

    line = inspect.getsourcelines(model)[1] + 1
    for visit in _jaxpr.walk(_jaxpr.trace(jax.jit(model), jnp.ones(3)).jaxpr):
        found = _jaxpr.source_line(visit.eqn)
        if visit.eqn.primitive is primitives.jit_p and visit.depth == 0:
            continue
        assert found is not None
        assert (found.file, found.line) == (__file__, line)
        assert "LayerNorm" in found.code
        assert str(found).endswith("model)")


def test_leaves_have_the_names_python_would_index_them_by():
    traced = _jaxpr.trace(
        lambda p, x: {"out": p["a"][0] * x}, {"a": [jnp.ones(2), 1.0]}, np.ones(2)
    )
    assert traced.in_names == ("[0]['a'][0]", "[0]['a'][1]", "[1]")
    assert traced.out_names == ("['out']",)
    with pytest.raises(TypeError, match="keep the structure"):
        traced.flatten(1.0)


def test_shapes_alone_are_enough_to_trace():
    shape = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    traced = _jaxpr.trace(lambda x: x.T @ x, shape)
    assert open_jaxpr(traced.jaxpr)[0].outvars[0].aval.shape == (3, 3)
