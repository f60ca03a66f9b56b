"""What a function keeps for its backward pass: complete, and traced to where it was made."""

import re
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from conftest import PROGRAMS
from programs import programs


def closure_bytes(fun, *args):
    """The oracle: the leaves of the function that jax.vjp returns."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def layers(ws, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0].sum()


@jax.custom_vjp
def cubed(x):
    return x**3


cubed.defvjp(lambda x: (x**3, (x, 3 * x**2)), lambda res, g: (g * res[1],))

WS, X = jnp.ones((5, 3, 3)), jnp.ones((2, 3))
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

FORMS = {
    "plain": lambda w, x: jnp.exp(jnp.tanh(x @ w[0])).sum(),
    "jit in jit": lambda w, x: jax.jit(lambda h: jax.jit(jnp.sin)(h) * h)(x @ w[0]).sum(),
    "scan": layers,
    "scan with checkpoint": lambda w, x: lax.scan(
        jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, w
    )[0].sum(),
    "scan in scan": lambda w, x: lax.scan(
        lambda h, w: lax.scan(lambda h, _: (jnp.sin(h @ w), None), h, length=2), x, w
    )[0].sum(),
    "fori_loop": lambda w, x: lax.fori_loop(0, 3, lambda _, h: jnp.sin(h @ w[0]), x).sum(),
    "while before": lambda w, x: (
        lax.while_loop(lambda c: c < 3.0, lambda c: c * 2, 1.0) * jnp.sin(x @ w[0])
    ).sum(),
    "cond": lambda w, x: lax.cond(x.sum() > 0, lambda h: jnp.sin(h), lambda h: h**3, x).sum(),
    "checkpoint": lambda w, x: jax.checkpoint(lambda h: jnp.sin(jnp.sin(h @ w[0])))(x).sum(),
    "named": lambda w, x: jax.checkpoint(
        lambda h: jnp.sin(checkpoint_name(jnp.sin(h), "kept")),
        policy=jax.checkpoint_policies.save_only_these_names("kept"),
    )(x).sum(),
    "custom_vjp": lambda w, x: cubed(x @ w[0]).sum(),
    "constants": lambda w, x: (x * np.arange(3.0, dtype=np.float32) * 2.0).sum(),
    "vmap of jit": lambda w, x: jax.vmap(jax.jit(lambda r: jnp.sin(r @ w[0])))(x).sum(),
    "dropout": lambda w, x: (
        jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x @ w[0], 0.0) ** 2
    ).sum(),
    "shard_map": lambda w, x: jax.shard_map(
        lambda w, x: jnp.sin(x @ w[0]), mesh=mesh, in_specs=(P(), P(None)), out_specs=P(None)
    )(w, x).sum(),
    "float16 and integers": lambda w, x: (x.astype(jnp.float16)[jnp.array([0, 1])] ** 2).sum(),
    "empty": lambda w, x: jnp.sin(x[:0]).sum() + w.sum(),
    "gradient": lambda w, x: (jax.grad(lambda x: jnp.sin(x @ w[0]).sum())(x) ** 2).sum(),
    "key kept": lambda w, x: jax.checkpoint(
        lambda h, k: jax.random.normal(k, h.shape) * jnp.sin(h)
    )(x, jax.random.split(jax.random.key(1))[0]).sum(),
}


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_of_the_pullbacks_leaves(form):
    saved = fg.saved_tensors(FORMS[form])(WS, X)
    assert saved.bytes == closure_bytes(FORMS[form], WS, X)
    assert all(t.line for t in saved if t.kind == "computed")


@given(programs())
@settings(max_examples=PROGRAMS // 4)
def test_bytes_of_generated_programs(program):
    args = program.params(), program.inputs()[0]
    loss = lambda params, x: program.loss(params, x, program.inputs()[1])
    saved = fg.saved_tensors(loss)(*args)
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(loss, *args)[1], *args))
    assert [t.shape for t in saved] == [leaf.shape for leaf in leaves]
    assert [t.dtype for t in saved] == [leaf.dtype for leaf in leaves]


@pytest.mark.parametrize("form", ["plain", "scan", "cond", "custom_vjp", "named", "dropout"])
def test_shapes_are_those_of_jaxs_own_report(form, capsys):
    jax.ad_checkpoint.print_saved_residuals(FORMS[form], WS, X)
    theirs = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    saved = fg.saved_tensors(FORMS[form])(WS, X)
    short = {"float32": "f32", "bool": "bool", "int32": "i32"}
    ours = [f"{short[str(t.dtype)]}[{','.join(map(str, t.shape))}]" for t in saved]
    assert sorted(ours) == sorted(theirs)


def test_each_is_traced_to_its_operation_line_name_and_scope():
    def fun(w, x):
        with jax.named_scope("first"):
            h = jnp.tanh(x @ w)  # the line of tanh
        with jax.named_scope("second"), jax.named_scope("inner"):
            return jax.jit(lambda h: jnp.cos(checkpoint_name(h * h, "square")))(h).sum()

    saved = {t.operation or t.argument: t for t in fg.saved_tensors(fun)(WS[0], X)}
    assert {"w", "x", "tanh"} < set(saved)
    assert saved["w"].kind == "argument"
    assert saved["tanh"].line.code.endswith("# the line of tanh")
    assert saved["tanh"].path == "first"
    by_name = [t for t in fg.saved_tensors(jax.checkpoint(fun))(WS[0], X) if t.kind != "argument"]
    assert by_name == []
    kept = jax.checkpoint(fun, policy=jax.checkpoint_policies.save_only_these_names("square"))
    (square,) = [t for t in fg.saved_tensors(kept)(WS[0], X) if t.kind == "computed"]
    assert (square.operation, square.name) == ("mul", "square")
    assert square.path.endswith("second/inner")


def test_loops_count_their_iterations():
    def fun(w, x):
        def step(h, _):
            h = lax.scan(lambda h, _: (jnp.sin(h @ w), None), h, length=2)[0]
            return jnp.exp(h), None

        return lax.scan(step, x, length=4)[0].sum()

    saved = fg.saved_tensors(fun)(WS[0], X)
    trips = {t.operation: (t.trips, t.bytes_per_trip, t.bytes) for t in saved}
    assert trips["cos"] == (8, 24, 192)
    assert trips["exp"] == (4, 24, 96)


def test_the_carry_of_a_loop_is_traced_to_the_step_before():
    saved = fg.saved_tensors(lambda w, x: layers(w, x))(WS, X)
    stacked = [t for t in saved if t.trips == 5]
    assert {t.operation for t in stacked} <= {"tanh", "sub", "one_minus_square"}


def test_an_argument_is_named_as_the_function_names_it():
    def fun(params, *, scale):
        return (params["dense"]["kernel"] ** 2 * scale).sum()

    saved = fg.saved_tensors(fun)({"dense": {"kernel": X}}, scale=X + 1)
    names = {t.argument for t in saved if t.kind == "argument"}
    assert names == {"scale"}  # the derivative of the square is computed, not the kernel kept
    saved = fg.saved_tensors(lambda *args: args[0]["w"] * args[1])({"w": X}, X)
    assert {t.argument for t in saved} == {"args[0]['w']", "args[1]"}


def test_only_what_the_chosen_arguments_need_is_kept():
    fun = lambda w, x: (x @ w).sum()
    assert fg.saved_tensors(fun)(WS[0], X).bytes == 36 + 24
    assert [t.argument for t in fg.saved_tensors(fun, argnums=0)(WS[0], X)] == ["x"]
    assert [t.argument for t in fg.saved_tensors(fun, argnums=-1)(WS[0], X)] == ["w"]
    with pytest.raises(ValueError, match="positions among the 2 arguments given; got 2"):
        fg.saved_tensors(fun, argnums=2)(WS[0], X)


def test_flags_and_auxiliary_outputs_are_left_alone():
    def fun(x, train, *, mode):
        y = jnp.sin(x) if train else x
        return y.sum(), jnp.exp(x) if mode == "aux" else x

    saved = fg.saved_tensors(fun, argnums=0, has_aux=True)(X, True, mode="aux")
    assert [t.operation for t in saved] == ["cos"]
    assert len(fg.saved_tensors(lambda x: x.sum())(jnp.arange(3))) == 0
    assert len(fg.saved_tensors(lambda: jnp.ones(3))()) == 0
    assert (
        fg.saved_tensors(lambda x, y: x * 2)(1.0, None).bytes
        == fg.saved_tensors(lambda x: x * 2)(1.0).bytes
    )


def test_shapes_are_enough():
    shape = jax.ShapeDtypeStruct((10**6, 10**3), jnp.bfloat16)  # 2 GB, nowhere allocated
    assert fg.saved_tensors(lambda x: jnp.sin(x).sum())(shape).bytes == 2 * 10**9


def test_linen_modules_give_the_path():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.tanh(nn.Dense(4, name="first")(x)).sum()

    params = Net().init(jax.random.key(0), X)
    saved = fg.saved_tensors(Net().apply, argnums=0)(params, X)
    assert "Net" in {t.path for t in saved}
    assert saved.bytes == closure_bytes(lambda p: Net().apply(p, X), params)


def test_nnx_models_with_random_numbers():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(3, 3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(jnp.tanh(self.dense(x))).sum()

    model = Net(nnx.Rngs(0))
    saved = fg.saved_tensors(lambda model, x: model(x), argnums=0)(model, X)
    operations = {t.operation for t in saved}
    assert operations & {"tanh", "one_minus_square"}  # newer JAX keeps 1 - tanh² alone
    assert model.dropout.rngs.count[...] == 0  # the trace has drawn nothing


def test_a_function_with_its_own_rule_shows_what_it_saves():
    saved = fg.saved_tensors(lambda x: cubed(jnp.sin(x)))(X)
    # x and 3x² of the rule, and cos.
    assert sorted(t.operation for t in saved) == ["cos", "mul", "sin"]


@pytest.mark.torch
def test_total_equals_torchs_where_both_keep_the_same(torch):
    """Matrix products, sigmoid and products: each keeps inputs or outputs, as torch does."""
    w, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    kept = {}

    def pack(t):
        kept[t.data_ptr(), t.shape] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        h = x @ w
        h = h.exp()
        y = h * (x @ w)
        y.sum()

    def ours(w, x):
        h = jnp.exp(x @ w)
        return (h * (x @ w)).sum()

    saved = fg.saved_tensors(ours)(WS[0], X)
    assert saved.bytes == closure_bytes(ours, WS[0], X)
    # torch packs w, x, exp and the second product; so does JAX.
    assert saved.bytes == sum(kept.values()) == 36 + 3 * 24


def test_the_table_has_every_byte_and_the_totals():
    saved = fg.saved_tensors(layers)(WS, X)
    text = str(saved)
    rows = text.splitlines()[1:-1]
    assert sum(int(row.split()[0].replace(",", "")) for row in rows) == saved.bytes
    assert text.splitlines()[-1].startswith(f"{saved.bytes:,} bytes in {len(saved)} values")
    assert "of 5 trips" in text


def test_the_treemap_is_proportional_and_the_same_every_time():
    saved = fg.saved_tensors(layers)(WS, X)
    picture = saved.treemap(width=800, height=400, title="a < b")
    assert picture == fg.saved_tensors(layers)(WS, X).treemap(width=800, height=400, title="a < b")
    root = ElementTree.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    boxes = [r for r in root.iter(f"{space}rect") if r.find(f"{space}title") is not None]
    assert len(boxes) == len([t for t in saved if t.bytes])
    stacked = [
        float(r.get("width")) * float(r.get("height"))
        for r in boxes
        if "5 trips" in r.find(f"{space}title").text
    ]
    np.testing.assert_allclose(stacked, stacked[0], rtol=0.02)
    for rect in boxes:
        assert float(rect.get("x")) >= 0
        assert float(rect.get("x")) + float(rect.get("width")) <= 800.5
        assert float(rect.get("y")) + float(rect.get("height")) <= 400.5
    assert not re.search("nan|inf", picture)


def test_a_treemap_is_valid_xml_whatever_the_names():
    name = "a\x00\x1b<&>\"']]>\ud800\ufffe\n"

    def fun(x):
        with jax.named_scope("s<\x02"):
            return jnp.sin(checkpoint_name(jnp.sin(x), name)).sum()

    kept = fg.checkpoint(fun, policy=fg.policies.save_names(name))
    saved = fg.saved_tensors(kept)(X)
    picture = saved.treemap(title="t\x0b<")
    root = ElementTree.fromstring(picture.encode())
    assert any("a\ufffd\ufffd<&>" in (title.text or "") for title in root.iter() if title.text)


def test_an_empty_treemap_and_one_of_many_values():
    assert "0 B saved" in fg.SavedTensors(()).treemap()
    one = fg.saved_tensors(lambda x: jnp.sin(x))(X).tensors[0]
    many = fg.SavedTensors((one,) * 3000).treemap()
    assert many.count("<rect") < 500
