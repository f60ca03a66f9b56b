"""Named values and their cotangents: right in every body, and free where nothing is asked."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from conftest import PROGRAMS
from funcgrad import _jaxpr
from funcgrad._compat import Literal, checkpoint_of, primitives, value_name
from programs import Program, programs


def named(fun, seed):
    """``fun`` with names on the outputs of about a third of its equations, at any depth."""

    def rule(eqn):
        if _jaxpr.bodies(eqn) or checkpoint_of(eqn):
            return None
        name = f"{eqn.primitive.name} {eqn.outvars[0].aval}"
        if zlib.crc32(f"{seed}{name}".encode()) % 3:
            return None
        return lambda *inputs: [checkpoint_name(out, name) for out in _jaxpr.bind(eqn, *inputs)]

    return _jaxpr.rewrite(fun, rule)


class Slow:
    """The oracle: a plain loop over the equations, loops unrolled, a zero added at each name.

    ``met`` holds (place of the name in the program, iteration) and the value, in the order of
    execution; ``add`` the zeros by the same key.
    """

    def __init__(self, add=None):
        self.add, self.met = add or {}, {}

    def __call__(self, fun, *args):
        traced = _jaxpr.trace(fun, *args)
        closed = traced.jaxpr
        out = self.run(closed.jaxpr, closed.consts, traced.flatten(*args), (), ())
        return traced.unflatten(out)

    def run(self, jaxpr, consts, args, place, trip):
        env = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for i, eqn in enumerate(jaxpr.eqns):
            ins = [a.val if isinstance(a, Literal) else env[a] for a in eqn.invars]
            env.update(zip(eqn.outvars, self.eqn(eqn, ins, (*place, i), trip), strict=True))
        return [a.val if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]

    def eqn(self, eqn, ins, place, trip):
        held, bodies = checkpoint_of(eqn), _jaxpr.bodies(eqn)
        if held:
            return self.run(held.jaxpr, held.consts, ins, place, trip)
        if eqn.primitive is primitives.cond_p:
            taken = int(ins[0])
            body = bodies[taken]
            return self.run(body.jaxpr, body.consts, ins[1:], (*place, taken), trip)
        if eqn.primitive is primitives.scan_p:
            return self.scan(eqn, bodies[0], ins, place, trip)
        if eqn.primitive is primitives.jit_p:
            return self.run(bodies[0].jaxpr, bodies[0].consts, ins, place, trip)
        out = list(_jaxpr.bind(eqn, *ins))
        if (name := value_name(eqn)) is not None:
            self.met[name, place, trip] = out[0]
            if (name, place, trip) in self.add:
                out[0] = out[0] + self.add[name, place, trip]
        return out

    def scan(self, eqn, body, ins, place, trip):
        n_consts, n_carry = _jaxpr.loop_sizes(eqn)
        length = eqn.params["length"]
        consts, carry = ins[:n_consts], ins[n_consts : n_consts + n_carry]
        rows = [None] * length
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            xs = [x[i] for x in ins[n_consts + n_carry :]]
            out = self.run(body.jaxpr, body.consts, [*consts, *carry, *xs], place, (*trip, i))
            carry, rows[i] = out[:n_carry], out[n_carry:]
        return [*carry, *map(jnp.stack, zip(*rows, strict=True))]


def slow_capture(fun, params, *rest):
    """Values and cotangents by (name, place, trip)."""
    first = Slow()
    first(fun, params, *rest)
    moving = {k: v for k, v in first.met.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    zeros = [jnp.zeros_like(v) for v in moving.values()]

    def loss(params, zeros):
        return Slow(dict(zip(moving, zeros, strict=True)))(fun, params, *rest)

    grads, cotangents = jax.grad(loss, (0, 1))(params, zeros)
    return grads, first.met, dict(zip(moving, cotangents, strict=True))


def assert_same(found, expected, ran):
    """What ``capture`` gives for each name against the oracle's entries."""
    by_name = {}
    for (name, place, trip), value in expected.items():
        by_name.setdefault(name, {}).setdefault(place, {})[trip] = value
    for name, leaves in found.items():
        leaves, flags = (x if isinstance(x, tuple) else (x,) for x in (leaves, ran[name]))
        places = dict(sorted(by_name.pop(name, {}).items()))
        # A place that never ran is not known to the oracle.
        computed = [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag.any()]
        assert len(computed) == len(places)
        for leaf, entries in zip(computed, places.values(), strict=True):
            for trip, value in entries.items():
                np.testing.assert_allclose(leaf[trip], value, rtol=1e-8, atol=1e-11)
        for leaf, flag in zip(leaves, flags, strict=True):
            assert not np.any(np.asarray(leaf)[~np.asarray(flag)])
    assert not by_name


@settings(max_examples=max(3, PROGRAMS // 20))
@given(programs(max_size=3), st.integers(0, 99))
def test_values_and_cotangents_are_those_of_zeros_added_in_a_slow_loop(program: Program, seed):
    with jax.enable_x64(True):
        fun = named(program.loss, seed)
        args = (program.params(np.float64), *program.inputs(np.float64))
        try:
            found = jax.jit(fg.capture_grads(fun))(*args)
        except ValueError as error:
            assert "Near names: none" in str(error)
            return
        grads, values, cotangents = slow_capture(fun, *args)
        for name in grads:
            np.testing.assert_allclose(found.grads[name], grads[name], rtol=1e-8, atol=1e-11)
        assert_same(found.values, values, found.ran)
        moving = {name: ct for name, ct in found.cotangents.items() if jax.tree.leaves(ct)}
        assert_same(moving, cotangents, found.ran)


def test_gradients_of_intermediates_as_torch_gives_them():
    loss = lambda a: (checkpoint_name(2 * a, "b") ** 2).sum()
    found = fg.capture_grads(loss)(jnp.array([1.0, 2.0, 3.0]))
    assert found.grads.tolist() == [8, 16, 24]
    assert found.cotangents["b"].tolist() == [4, 8, 12]
    assert found.values["b"].tolist() == [2, 4, 6]
    assert found.value == 56


def deep(w, x):
    """Names in a checkpointed scan, in both branches, in jit; one branch loops again."""

    @jax.checkpoint
    def step(c, _):
        c = checkpoint_name(jnp.tanh(w @ c), "hidden")
        return c, checkpoint_name(c.sum(), "sum")

    def looped(c):
        inner = lambda c, _: (checkpoint_name(jnp.sin(c), "negative"), None)
        return lax.scan(inner, c, None, length=3)[0].sum()

    c, ys = lax.scan(step, x, None, length=4)
    out = lax.cond(c.sum() > 0, lambda c: checkpoint_name(2 * c, "positive").sum(), looped, c)
    return out + jax.jit(lambda y: checkpoint_name(3 * y, "in jit"))(out) + ys.sum()


def test_under_vmap_each_sample_has_its_own():
    w, xs = 0.5 * jnp.eye(2), jnp.array([[1.0, 0.5], [-1.0, -2.0]])
    one = jax.jit(fg.capture_grads(deep))
    together = jax.jit(jax.vmap(fg.capture_grads(deep), (None, 0)))(w, xs)
    alone = [one(w, x) for x in xs]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)
    for got, expected in zip(*map(jax.tree.leaves, (together, stacked)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert together.ran["positive"].tolist() == [True, False]
    assert together.ran["negative"].shape == (2, 3)
    assert together.values["hidden"].shape == (2, 4, 2)
    assert not together.cotangents["negative"][0].any()


def test_checkpoint_changes_no_bit():
    plain = lambda w, x: lax.scan(lambda c, _: (step(w, c), None), x, None, length=3)[0].sum()
    step = lambda w, c: jnp.sin(checkpoint_name(jnp.tanh(w @ c), "h"))
    args = jnp.eye(2) + 0.1, jnp.ones(2)
    found = jax.jit(fg.capture_grads(plain))(*args)
    inner = step
    for policy in (None, jax.checkpoint_policies.save_only_these_names("h")):
        step = jax.checkpoint(inner, policy=policy)
        again = jax.jit(fg.capture_grads(plain))(*args)
        for a, b in zip(*map(jax.tree.leaves, (again, found)), strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(found.grads, jax.jit(jax.grad(plain))(*args))


def test_asking_for_nothing_adds_nothing():
    args = jnp.eye(2), jnp.ones(2)
    plain = jax.make_jaxpr(deep)(*args)
    nothing = jax.make_jaxpr(lambda *args: fg.capture(deep, ())(*args).value)(*args)
    assert str(nothing) == str(plain)
    grads = jax.make_jaxpr(jax.grad(deep))(*args)
    nothing = jax.make_jaxpr(lambda *args: fg.capture_grads(deep, ())(*args).grads)(*args)
    assert str(nothing) == str(grads)
    nothing = jax.eval_shape(lambda *args: fg.capture_grads(deep, ())(*args).cotangents, *args)
    assert nothing == {}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_norms_alone_add_no_buffer_of_the_size_of_an_activation(wrap):
    layer = wrap(lambda c, w: (checkpoint_name(jnp.tanh(c @ w), "h"), None))
    loss = lambda ws, x: (lax.scan(layer, x, ws)[0] ** 2).sum()
    shapes = (
        jax.ShapeDtypeStruct((8, 32, 32), jnp.float32),
        jax.ShapeDtypeStruct((256, 32), jnp.float32),
    )
    activation = 256 * 32 * 4

    def memory(fun):
        found = jax.jit(fun).lower(*shapes).compile().memory_analysis()
        return found.temp_size_in_bytes, found.output_size_in_bytes

    plain = memory(jax.value_and_grad(loss))
    norms = memory(fg.capture_grads(loss, reduce=jnp.linalg.norm))
    whole = memory(fg.capture_grads(loss))
    assert norms[0] - plain[0] < activation / 8
    assert norms[1] - plain[1] < activation / 8
    assert whole[1] - plain[1] >= 2 * 8 * activation


def test_reduce_gives_what_reducing_afterwards_gives():
    args = jnp.array([[0.3, 0.1], [0.2, 0.5]]), jnp.ones(2)
    both = lambda v: {"norm": jnp.linalg.norm(v), "largest": jnp.abs(v).max()}
    reduced = jax.jit(fg.capture_grads(deep, "hidden", reduce=both))(*args)
    whole = jax.jit(fg.capture_grads(deep, "hidden"))(*args)
    for part in ("values", "cotangents"):
        got, expected = getattr(reduced, part)["hidden"], getattr(whole, part)["hidden"]
        np.testing.assert_allclose(got["norm"], jnp.linalg.norm(expected, axis=1), rtol=1e-6)
        np.testing.assert_allclose(got["largest"], jnp.abs(expected).max(1), rtol=1e-6)
    np.testing.assert_allclose(reduced.grads, whole.grads, rtol=1e-6)
    bad = lambda v: jnp.isnan(v).any()
    found = jax.jit(fg.capture(deep, "hidden", reduce=bad))(*args)
    assert found.values["hidden"].tolist() == [False] * 4
    with pytest.raises(TypeError, match="reduce returns floating arrays.*got bool for 'hidden'"):
        fg.capture_grads(deep, "hidden", reduce=bad)(*args)


@pytest.mark.parametrize("call", [fg.capture, fg.capture_grads])
def test_a_name_that_is_none_is_an_error_that_lists_near_ones(call):
    args = jnp.eye(2), jnp.ones(2)
    with pytest.raises(ValueError, match="got 'hiden', which is none. Near names: 'hidden'"):
        call(deep, ["sum", "hiden"])(*args)
    with pytest.raises(ValueError, match=r"got 'x\*', which is none. Near names: 'hidden', 'sum'"):
        call(deep, "x*")(*args)
    with pytest.raises(ValueError, match="Near names: none. Name a value with jax.ad_checkpoint"):
        call(jnp.sin)(1.0)


def test_where_no_value_can_be_taken_out_the_error_says_the_line():
    name = lambda x: checkpoint_name(x * 2, "here")

    @jax.custom_vjp
    def rule(x):
        return name(x)

    rule.defvjp(lambda x: (name(x), None), lambda _, g: (g,))
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    for fun, where, advice in (
        (lambda x: lax.while_loop(lambda x: x < 9, name, x), "a while_loop", "use lax.scan"),
        (rule, "a custom derivative", "name what goes in or comes out"),
        (jax.shard_map(name, mesh=mesh, in_specs=P(), out_specs=P()), "shard_map", "Call capture"),
    ):
        with pytest.raises(NotImplementedError, match=f"'here' inside.*{where}") as error:
            fg.capture(lambda x, fun=fun: lax.cond(x > 0, jax.jit(fun), jnp.sin, x))(1.0)
        assert "test_capture.py:" in str(error.value)
        assert advice in str(error.value)
    # A name that is not asked for is in nobody's way.
    both = lambda x: rule(checkpoint_name(x, "outside"))
    assert fg.capture(both, "outside")(1.0).values == {"outside": 1.0}


def test_one_name_on_several_values_gives_them_in_program_order():
    def fun(x):
        for i in range(3):
            x = checkpoint_name(x * (i + 1), "x")
        tree = checkpoint_name({"a": x, "b": (x > 0, x + 1)}, "tree")
        return tree["b"][1]

    found = fg.capture_grads(fun)(1.0)
    assert found.values["x"] == (1, 2, 6)
    assert found.cotangents["x"] == (6, 3, 1)
    assert found.values["tree"] == (6, True, 7)
    assert found.cotangents["tree"][1] is None


def test_constants_come_out_as_arrays_of_their_types():
    def fun(x):
        small = checkpoint_name(jnp.int8(3), "small"), checkpoint_name(2.0, "weak")
        return checkpoint_name(x, "x"), jnp.bfloat16(2), np.arange(3, dtype=np.int16), small

    found, expected = fg.capture(fun)(1.0), jax.jit(fun)(1.0)
    assert jax.tree.map(jax.typeof, found.value) == jax.tree.map(jax.typeof, expected)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))


def test_arguments_are_those_of_the_function():
    def fun(a, tree, *, power=1, flag=False):
        out = checkpoint_name(a * tree["w"] ** power, "out") if flag else a
        return out.sum(), {"shape": out * 1}

    tree = {"w": jnp.array([2.0, 3.0]), "i": 3}
    got = fg.capture_grads(fun, argnums=(0, -1), has_aux=True)(
        1.0, {"w": tree["w"]}, power=2, flag=True
    )
    expected, aux = jax.grad(fun, (0, 1), has_aux=True)(1.0, {"w": tree["w"]}, power=2, flag=True)
    assert jax.tree.structure(got.grads) == jax.tree.structure(expected)
    np.testing.assert_array_equal(got.grads[1]["w"], expected[1]["w"])
    np.testing.assert_array_equal(got.aux["shape"], aux["shape"])
    assert fg.capture(fun)(1.0, tree, flag=True).values["out"].tolist() == [2, 3]
    with pytest.raises(ValueError, match="argnums are positions of the arguments; got 2 for 1"):
        fg.capture_grads(fun, argnums=2)(1.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "complex64"])
def test_dtypes_stay(dtype, x64):
    fun = lambda x: jnp.abs(checkpoint_name(jnp.sin(x), "h")).sum().astype(jnp.float32)
    found = jax.jit(fg.capture_grads(fun))(jnp.ones((2, 3), dtype))
    assert found.values["h"].dtype == found.cotangents["h"].dtype == found.grads.dtype == dtype
    empty = fg.capture_grads(fun)(jnp.ones((0, 3), dtype))
    assert empty.cotangents["h"].shape == (0, 3)


def test_what_is_captured_is_differentiated_again():
    inner = fg.capture_grads(lambda a: (checkpoint_name(jnp.sin(a), "b") ** 3).sum())
    penalty = lambda a: inner(a).cotangents["b"]
    expected = 6 * np.sin(0.7) * np.cos(0.7)
    np.testing.assert_allclose(jax.grad(penalty)(0.7), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jacfwd(penalty)(0.7), expected, rtol=1e-6)
    cotangents = lambda w: fg.capture_grads(deep, "hidden")(w, jnp.ones(2)).cotangents["hidden"]
    scanned = jax.jit(lambda w: cotangents(w).sum())
    w, eps = jnp.array([[0.4, 0.1], [0.2, 0.3]]), 1e-2
    numeric = (scanned(w.at[0, 1].add(eps)) - scanned(w.at[0, 1].add(-eps))) / (2 * eps)
    np.testing.assert_allclose(jax.jit(jax.grad(scanned))(w)[0, 1], numeric, rtol=1e-2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_each_device_has_its_own(check_vma):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def local(w, x):
        found = jax.vmap(fg.capture_grads(deep, "hidden"), (None, 0))(w, x)
        return found.values["hidden"], found.cotangents["hidden"]

    w, x = 0.5 * jnp.eye(2), jnp.array([[1.0, 0.5], [0.3, 2.0], [1.0, 1.0], [0.2, 0.1]])
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=(P("data"), P("data")),
        check_vma=check_vma,
    )
    for got, expected in zip(jax.jit(sharded)(w, x), jax.jit(local)(w, x), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_explicit_shardings_stay():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    step = lambda w: lambda c, _: (checkpoint_name(jnp.tanh(c @ w), "h"), None)
    loss = lambda w, x: (lax.scan(step(w), x, None, length=2)[0] ** 2).sum()
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 3)), jax.NamedSharding(mesh, P("data")))
        w = jax.device_put(jnp.eye(3), jax.NamedSharding(mesh, P()))
        found = jax.jit(fg.capture_grads(loss))(w, x)
        for part in (found.values, found.cotangents):
            assert jax.typeof(part["h"]).sharding.spec == P(None, "data", None)


@pytest.mark.torch
def test_values_and_cotangents_are_those_of_torchs_hooks(torch, x64):
    rng = np.random.default_rng(0)
    w1, w2, x = rng.normal(size=(3, 4)), rng.normal(size=(4, 2)), rng.normal(size=(5, 3))
    kept = {}

    def keep(name, tensor):
        tensor.retain_grad()
        kept[name] = tensor
        return tensor

    a, b = (torch.tensor(w, requires_grad=True) for w in (w1, w2))
    hidden = keep("hidden", torch.tanh(torch.tensor(x) @ a))
    keep("out", torch.softmax(hidden @ b + hidden[:, :2], 1)).square().sum().backward()

    def loss(params):
        hidden = checkpoint_name(jnp.tanh(x @ params[0]), "hidden")
        out = jax.nn.softmax(hidden @ params[1] + hidden[:, :2], axis=1)
        return (checkpoint_name(out, "out") ** 2).sum()

    found = jax.jit(fg.capture_grads(loss))((jnp.asarray(w1), jnp.asarray(w2)))
    for name, tensor in kept.items():
        np.testing.assert_allclose(found.values[name], tensor.detach(), rtol=1e-10)
        np.testing.assert_allclose(found.cotangents[name], tensor.grad, rtol=1e-10)
    np.testing.assert_allclose(found.grads[0], a.grad, rtol=1e-10)
