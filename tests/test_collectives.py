"""Each collective and its dual, against arrays that have an axis for the devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from conftest import DEEP
from funcgrad import collectives as co

N = 4
VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])


@functools.cache
def make_mesh(shape=(N,), kind=AxisType.Auto):
    names = ("tp",) if len(shape) == 1 else ("a", "b")
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def shard(fun, in_specs, out_specs, check_vma=True, mesh=None):
    return jax.shard_map(
        fun,
        mesh=mesh or make_mesh(),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
    )


# The oracle: what the calls mean where the devices are the first axis of an array.


def stacked_copy(s):
    return s


def stacked_reduce(s):
    return jnp.stack([sum(s)] * len(s))


def stacked_split(s, axis=-1):
    return jnp.stack([jnp.split(x, len(s), axis)[i] for i, x in enumerate(s)])


def stacked_gather(s, axis=-1):
    return jnp.stack([jnp.concatenate(list(s), axis)] * len(s))


def stacked_reduce_scatter(s, axis=0):
    return stacked_split(stacked_reduce(s), axis)


def stacked_all_to_all(s, split_axis=0, concat_axis=0):
    parts = [jnp.split(x, len(s), split_axis) for x in s]
    return jnp.stack([jnp.concatenate([p[i] for p in parts], concat_axis) for i in range(len(s))])


def stacked_shift(s, by=1, wrap=True):
    zero = jnp.zeros_like(s[0])
    come = [(i - by, s[(i - by) % len(s)]) for i in range(len(s))]
    return jnp.stack([x if wrap or 0 <= i < len(s) else zero for i, x in come])


class Case:
    def __init__(self, name, takes_same, gives_same, **options):
        self.name, self.takes_same, self.gives_same = name, takes_same, gives_same
        stacked = stacked_gather if name == "all_gather" else globals()[f"stacked_{name}"]
        self.local = lambda x, axis: getattr(co, name)(x, axis, **options)
        self.stacked = functools.partial(stacked, **options)
        self.id = "-".join([name, *[f"{key}={value}" for key, value in options.items()]])


CASES = [
    Case("copy", True, False),
    Case("reduce", False, True),
    Case("split", True, False),
    Case("gather", False, True, axis=0),
    Case("all_gather", False, False, axis=-1),
    Case("reduce_scatter", False, False, axis=1),
    Case("all_to_all", False, False, split_axis=0, concat_axis=1),
    Case("shift", False, False, by=1, wrap=False),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def close(got, expected):
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-6)


def bend(x):
    """No sine or tanh, of which the compiler makes long programs."""
    return x / (1 + x * x)


def nested(op):
    """Rows by vmap, of those rows by scan, each checkpointed and compiled by itself."""
    return jax.vmap(lambda x: lax.map(jax.checkpoint(jax.jit(op)), x), in_axes=1, out_axes=-1)


def losses(case, lift=lambda op: op):
    """The loss of a device, and that of the stack; each device weighs its own entries."""

    def weigh(y, own):
        return bend(y) * (1 + 0.1 * jnp.arange(y.size).reshape(y.shape) + own)

    def local(x):
        y = lift(lambda x: case.local(bend(x), "tp"))(x if case.takes_same else x[0])
        if case.gives_same:
            return weigh(y, 0.0).sum()
        return co.reduce(weigh(y, lax.axis_index("tp").astype(x.dtype)).sum(), "tp")

    def whole(x):
        each = jnp.stack([x] * N) if case.takes_same else x
        ys = bend(each)
        if lift is nested:
            rows = [[case.stacked(ys[:, i, j]) for i in range(2)] for j in range(2)]
            ys = jnp.stack([jnp.stack(row, 1) for row in rows], -1)
        else:
            ys = case.stacked(ys)
        if case.gives_same:
            return weigh(ys[0], 0.0).sum()
        return sum(weigh(y, float(i)).sum() for i, y in enumerate(ys))

    return local, whole


def inputs(case, *rows):
    return random(*rows, 4, 4) if case.takes_same else random(N, *rows, 4, 4)


def spec_of(case):
    return P() if case.takes_same else P("tp")


def derivatives(loss, x):
    (value, grad), tangents = jax.jvp(jax.value_and_grad(loss), (x,), (1 + x,))
    return value, grad, tangents


def together(*funs):
    """What each of the functions gives, in one program: many small ones take longer."""
    return jax.jit(lambda *args: [fun(*args) for fun in funs])


@each_case
def test_value_gradient_tangent_and_second_order_are_those_of_the_whole(case):
    local, whole = losses(case)
    x, spec = inputs(case), spec_of(case)
    fun = functools.partial(derivatives, local)
    inside = [shard(fun, spec, (P(), spec, (P(), spec)), vma) for vma in (True, False)]
    around = jax.grad(shard(local, spec, P()))  # under types
    *found, grad, expected = together(*inside, around, functools.partial(derivatives, whole))(x)
    for got in found:
        close(got, expected)
    close(grad, expected[1])


@each_case
def test_under_vmap_scan_checkpoint_and_jit_together(case):
    if not DEEP and case.name in ("all_gather", "reduce_scatter", "all_to_all"):
        pytest.skip("of the four that are JAX's own, one is enough here")
    local, whole = losses(case, nested)
    x, spec = inputs(case, 2, 2), spec_of(case)

    def both(loss, x):
        return jax.grad(loss)(x), jax.jvp(loss, (x,), (1 + x,))[1]

    fun = functools.partial(both, local)
    inside = [shard(fun, spec, (spec, P()), check_vma) for check_vma in (True, False)]
    *found, expected = together(*inside, functools.partial(both, whole))(x)
    for got in found:
        close(got, expected)


CHAIN = ("copy", "split", "reduce", "gather", "all_gather", "reduce_scatter", "all_to_all", "shift")


def chain_step(kind, same, shape):
    """The sides of the array after a step, and whether it differs; ``None`` where none can be."""
    rows, cols = shape
    if (kind in ("copy", "split")) != same:
        return None
    if kind == "split" and cols % 2 or kind == "reduce_scatter" and rows % 2:
        return None
    if kind == "all_to_all" and rows % 2:
        return None
    new = {
        "split": (rows, cols // 2),
        "gather": (rows, cols * 2),
        "all_gather": (rows * 2, cols),
        "reduce_scatter": (rows // 2, cols),
        "all_to_all": (rows // 2, cols * 2),
    }.get(kind, shape)
    return kind in ("reduce", "gather"), new


@st.composite
def chains(draw):
    """Steps over two mesh axes, each on what the steps before it left."""
    same, shape, steps = {"a": True, "b": True}, (2, 2), []
    for _ in range(draw(st.integers(2, 6))):
        axis = draw(st.sampled_from("ab"))
        able = [k for k in CHAIN if chain_step(k, same[axis], shape)]
        kind = draw(st.sampled_from(able))
        same[axis], shape = chain_step(kind, same[axis], shape)
        steps.append((kind, axis))
    return tuple(steps)


OPTIONS = {"all_to_all": {"split_axis": 0, "concat_axis": 1}}


def run_local(steps, x, weights):
    same = {"a": True, "b": True}
    for i, (kind, axis) in enumerate(steps):
        x = getattr(co, kind)(x, axis, **OPTIONS.get(kind, {}))
        same[axis] = kind in ("reduce", "gather")
        x = bend(x)
        for name in "ab":
            if not same[name]:  # the weight of a device: where all go on alike, none has one
                w, other = weights[name][0, i], "ba"["ab".index(name)]
                x = x * (w if same[other] else co.copy(w, other))
    total = (x * (1 + 0.1 * jnp.arange(x.size).reshape(x.shape))).sum()
    for name in "ab":
        total = total if same[name] else co.reduce(total, name)
    return total


def run_stacked(steps, x, weights):
    same = {"a": True, "b": True}
    grid = jnp.broadcast_to(x, (2, 2, *x.shape))
    for i, (kind, axis) in enumerate(steps):
        op = stacked_gather if kind == "all_gather" else globals()[f"stacked_{kind}"]
        axes = {"all_gather": {"axis": 0}} | OPTIONS
        at = "ab".index(axis)
        per_row = jax.vmap(functools.partial(op, **axes.get(kind, {})), in_axes=1 - at)
        grid = per_row(grid)
        grid = grid.swapaxes(0, 1) if at == 0 else grid
        same[axis] = kind in ("reduce", "gather")
        grid = bend(grid)
        for name in "ab":
            if not same[name]:
                w = weights[name][:, i]
                w = w[:, None] if name == "a" else w[None]
                grid = grid * w[..., None, None]
    total = (grid * (1 + 0.1 * jnp.arange(grid[0, 0].size).reshape(grid[0, 0].shape))).sum((2, 3))
    for at, name in enumerate("ab"):
        total = total[:1] if same[name] and at == 0 else total
        total = total[:, :1] if same[name] and at == 1 else total
    return total.sum()


@settings(max_examples=100 if DEEP else 3)
@given(steps=chains())
def test_random_chains_over_two_axes(steps):
    x, weights = random(2, 2), {"a": random(2, 6, seed=1), "b": random(2, 6, seed=2)}
    specs = (P(), {"a": P("a"), "b": P("b")})
    grads = lambda run: jax.value_and_grad(functools.partial(run, steps), (0, 1))
    mesh = make_mesh((2, 2))
    inside = [shard(grads(run_local), specs, (P(), specs), vma, mesh) for vma in (True, False)]
    *found, expected = together(*inside, grads(run_stacked))(x, weights)
    for got in found:
        close(got, expected)


# What goes over the wire, and back


def communication(fun, *args):
    """What is sent, in the compiled program: how many times each collective is called."""
    text = jax.jit(fun).lower(*args).compile().as_text()
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    return {kind: n for kind in kinds if (n := text.count(f" {kind}("))}


BACK = {
    "copy": {"all-reduce": 1},
    "reduce": {},
    "split": {"all-gather": 1},
    "gather": {},
    "all_gather": {"reduce-scatter": 1},
    "reduce_scatter": {"all-gather": 1},
    "all_to_all": {"all-to-all": 1},
    "shift": {"collective-permute": 1},
}


@VMA
@each_case
def test_backward_sends_once_by_the_dual_and_nothing_else(case, check_vma):
    def local(x, g):
        return jax.vjp(lambda x: case.local(x, "tp"), x)[1](g)[0]

    x_spec, g_spec = spec_of(case), P() if case.gives_same else P("tp")
    x = jax.ShapeDtypeStruct((8, 8) if case.takes_same else (32, 8), jnp.float32)
    out = P() if case.gives_same else P("tp")
    y = jax.eval_shape(shard(lambda x: case.local(x, "tp"), x_spec, out, check_vma=False), x)
    fun = shard(local, (x_spec, g_spec), x_spec, check_vma)
    assert communication(fun, x, y) == BACK[case.name]


# Trees, axes and dtypes


@VMA
def test_trees_pass_leaf_by_leaf_with_other_dtypes_and_none(check_vma):
    tree = {"f": jnp.arange(4.0), "i": jnp.arange(4), "n": None, "h": jnp.ones(4, jnp.bfloat16)}
    out = jax.jit(shard(lambda t: co.split(co.reduce(t, "tp"), "tp"), P("tp"), P("tp"), check_vma))
    four = jax.tree.map(lambda x: jnp.concatenate([x] * 4), tree)
    got = out(four)
    assert got["n"] is None
    assert {k: got[k].dtype for k in "fih"} == {k: tree[k].dtype for k in "fih"}
    np.testing.assert_array_equal(got["i"], 4 * np.arange(4))
    np.testing.assert_array_equal(got["f"], 4 * np.arange(4.0))


@VMA
def test_several_mesh_axes_count_as_one(check_vma):
    x = random(4, 2)
    both = ("a", "b")

    def local(x):
        fun = lambda x: (jnp.sin(co.gather(x, both, axis=0)) * jnp.arange(8.0).reshape(4, 2)).sum()
        whole = co.gather(x, both, axis=0)
        return jax.grad(fun)(x), co.split(whole, both, axis=0), co.shift(x, both)

    specs = P(both)
    grads, again, moved = jax.jit(shard(local, specs, specs, check_vma, make_mesh((2, 2))))(x)
    close(grads, jnp.cos(x) * jnp.arange(8.0).reshape(4, 2))
    np.testing.assert_array_equal(again, x)
    np.testing.assert_array_equal(moved, np.roll(x, 1, 0))


@VMA
def test_several_axes_count_devices_in_the_order_of_their_names(check_vma):
    x, names = random(8, 2), ("b", "a")  # the mesh has them the other way round
    spec = P(names)

    def local(x):
        whole = co.gather(x, names, axis=0)
        rows = (1 + lax.axis_index(names)) * whole  # each device has its own
        send = lambda x: (co.shift(x, names, 3) * (1 + lax.axis_index(names))).sum()
        return (
            whole, co.split(whole, names, axis=0), co.shift(x, names),
            co.shift(x, names, -3, wrap=False), co.all_to_all(rows, names),
            co.reduce_scatter(rows, names), jax.grad(send)(x),
        )  # fmt: skip

    specs = (P(), spec, spec, spec, spec, spec, spec)
    run = jax.jit(shard(local, spec, specs, check_vma, make_mesh((2, 4))))
    whole, own, moved, back, sent, summed, grads = run(x)
    places = 1 + np.arange(8.0)
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(own, x)
    np.testing.assert_array_equal(moved, np.roll(x, 1, 0))
    np.testing.assert_array_equal(back, np.concatenate([x[3:], np.zeros((3, 2))]))
    close(sent, (x[:, None] * places[:, None]).reshape(64, 2))
    close(summed, 36 * x)
    close(grads, np.broadcast_to(np.roll(places, -3)[:, None], (8, 2)))


@VMA
def test_what_is_empty_stays_empty_with_its_type(check_vma):
    def local(xs):
        pairs = [
            jax.vjp(lambda x, c=case: c.local(x, "tp"), x)
            for case, x in zip(CASES, xs, strict=True)
        ]
        return [y for y, _ in pairs], [pull(y)[0] for y, pull in pairs]

    specs, outs = [spec_of(c) for c in CASES], [P() if c.gives_same else P("tp") for c in CASES]
    xs = [jnp.zeros((4 if case.takes_same else 16, 0, 4)) for case in CASES]
    ys, grads = jax.jit(shard(local, (specs,), (outs, specs), check_vma))(xs)
    for case, y, grad, x in zip(CASES, ys, grads, xs, strict=True):
        each = case.stacked(np.zeros((N, 4, 0, 4)))
        assert y.shape == (each[0] if case.gives_same else np.concatenate(each)).shape
        assert grad.shape == x.shape


@VMA
def test_an_axis_that_is_left_to_the_compiler(check_vma):
    mesh, x = make_mesh((2, 2)), random(4, 4)

    def local(x):
        y = co.gather(jnp.sin(co.split(jnp.tanh(co.reduce(x, "a")), "a")), "a")
        return jnp.sin(y).sum()

    whole = lambda x: jnp.sin(jnp.sin(jnp.tanh(x[:2] + x[2:]))).sum()
    inside = jax.shard_map(
        jax.grad(local), mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"},
        check_vma=check_vma,
    )  # fmt: skip
    placed = jax.device_put(x, NamedSharding(mesh, P("a", "b")))
    close(jax.jit(inside)(placed), jax.jit(jax.grad(whole))(x))


@VMA
def test_without_jit_and_with_an_explicit_mesh(check_vma):
    mesh = make_mesh((N,), AxisType.Explicit)
    x, w = random(3), random(3, 4, seed=1)

    def local(x, w):
        return jax.grad(lambda x: jnp.sin(co.reduce(co.copy(x, "tp") @ w, "tp")).sum())(x)

    specs = (P(), P(None, "tp"))
    placed = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip((x, w), specs, strict=True)]
    got = shard(local, specs, P(), check_vma, mesh)(*placed)
    close(got, jax.grad(lambda x: jnp.sin((x @ w).sum()))(x))


@VMA
def test_an_axis_of_one_device_changes_nothing(check_vma):
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,))
    x = random(4, 4)

    def local(x):
        y = co.split(
            co.gather(co.reduce(co.copy(x, "tp"), "tp"), "tp") if not check_vma else x, "tp"
        )
        y = co.reduce_scatter(co.all_gather(y, "tp"), "tp")
        return co.reduce(co.shift(co.all_to_all(y, "tp"), "tp"), "tp")

    np.testing.assert_array_equal(jax.jit(shard(local, P(), P(), check_vma, mesh))(x), x)
    if not check_vma:  # around it nothing is divided by one
        jax.eval_shape(jax.grad(lambda x: shard(local, P(), P(), False, mesh)(x).sum()), x)


# What is refused


def test_outside_of_shard_map_and_over_other_axes():
    with pytest.raises(ValueError, match="the axes here are none"):
        co.copy(jnp.ones(2), "tp")
    with pytest.raises(ValueError, match="got 'dp', and the axes here are 'tp'"):
        shard(lambda x: co.copy(x, "dp"), P(), P())(jnp.ones(2))
    with pytest.raises(ValueError, match="Call it inside jax.shard_map"):
        jax.vmap(lambda x: co.reduce(x, "tp"), axis_name="tp")(jnp.ones(2))
    with pytest.raises(ValueError, match="got 'b'"):  # an axis left to the compiler
        part = lambda x: co.reduce(x, "b")
        jax.shard_map(
            part, mesh=make_mesh((2, 2)), in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
        )(jnp.ones(2))


@VMA
def test_an_axis_named_twice_and_one_hidden_by_vmap_are_refused(check_vma):
    twice = shard(lambda x: co.split(x, ("tp", "tp")), P(), P("tp"), check_vma)
    with pytest.raises(
        ValueError, match=r"split: axis_name names each axis once; got \('tp', 'tp'"
    ):
        jax.eval_shape(twice, jnp.ones((4, 16)))
    for rows in (2, N):  # JAX would move rows of the vmap, not values between devices
        hidden = lambda x: jax.vmap(lambda x: co.shift(x, "tp"), axis_name="tp")(x)
        with pytest.raises(ValueError, match="not that of a mesh axis of shard_map.* got 'tp'"):
            jax.eval_shape(shard(hidden, P("tp"), P("tp"), check_vma), jnp.ones((4 * rows, 2)))


@each_case
def test_under_types_the_wrong_kind_of_value_is_refused(case):
    def wrong(x):
        return case.local({"w": x}, "tp")["w"]

    match = "x is the same on all devices" if case.takes_same else "x differs between devices"
    spec = P("tp") if case.takes_same else P()
    with pytest.raises(ValueError, match=rf"{case.name}: {match} along 'tp'; got x\['w'\]"):
        jax.eval_shape(shard(wrong, spec, P("tp")), jnp.ones((4, 4)))


LIFTS = ["plain", "jit", "checkpoint", "vmap"]


@pytest.mark.parametrize("name", ["copy", "reduce", "split", "gather"])
@pytest.mark.parametrize("lift", [lambda f: f, jax.jit, jax.checkpoint, jax.vmap], ids=LIFTS)
def test_without_types_a_gradient_around_is_refused(name, lift):
    case = next(case for case in CASES if case.name == name)

    def local(x):
        return lift(lambda x: case.local(x, "tp"))(x)

    spec = spec_of(case)
    fun = shard(local, spec, P() if case.gives_same else P("tp"), check_vma=False)
    x = random(4, 4, 4)
    loss = lambda x: fun(x).sum()
    with pytest.raises(ValueError, match=rf"{name}: .*\(check_vma=False\).*call jax.grad inside"):
        jax.eval_shape(jax.grad(loss), x)
    with pytest.raises(ValueError, match="or call jax.grad inside"):
        jax.eval_shape(jax.grad(lambda x: jax.jit(loss)(x)), x)
    jax.eval_shape(lambda x: jax.jvp(loss, (x,), (x,)), x)  # forward mode has one convention


def test_without_types_nor_a_trace_around_it_is_refused_too():
    fun = shard(lambda x: co.reduce(x, "tp"), P("tp"), P(), check_vma=False)
    with pytest.raises(ValueError, match="or call jax.grad inside"):
        jax.grad(lambda x: fun(x).sum())(random(4))


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all", "shift"])
def test_without_types_the_others_have_gradients_around_too(name):
    case = next(case for case in CASES if case.name == name)
    x = random(N, 4, 4)

    def local(x):
        return jnp.sin(case.local(x[0], "tp"))[None]

    fun = shard(local, P("tp"), P("tp"), check_vma=False)
    stacked = lambda x: jnp.sin(case.stacked(x))
    close(*together(*[jax.grad(lambda x, f=f: f(x).sum()) for f in (fun, stacked)])(x))


def test_lengths_that_do_not_divide_and_axes_that_are_not_there():
    for case in (c for c in CASES if c.name in ("split", "reduce_scatter", "all_to_all")):
        with pytest.raises(
            ValueError, match=f"{case.name}: the number of devices divides the axis"
        ):
            fun = shard(lambda x, case=case: case.local(x, "tp"), spec_of(case), P("tp"))
            jax.eval_shape(fun, jnp.ones((12, 3) if case.name != "split" else (4, 3)))
    with pytest.raises(ValueError, match="the axis is one of x; got 2 for a shape of"):
        jax.eval_shape(shard(lambda x: co.gather(x, "tp", axis=2), P("tp"), P()), jnp.ones((4, 3)))
