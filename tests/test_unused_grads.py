"""unused_grads: which leaves get no gradient, and at which line their path is cut."""

import inspect

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
from funcgrad._compat import primitives
from funcgrad._stopping import _marks
from programs import Program, programs

stop = lax.stop_gradient
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


def params(*names):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=(4, 4)), jnp.float32) for name in names}


def verdicts(fun, *args, **options):
    return {leaf.path: leaf.gradient for leaf in fg.unused_grads(fun, **options)(*args)}


def reasons(fun, *args):
    return {leaf.path: [cut.reason for cut in leaf.cuts] for leaf in fg.unused_grads(fun)(*args)}


def line_of(fun, word):
    lines, first = inspect.getsourcelines(fun)
    return next(first + i for i, line in enumerate(lines) if word in line)


# Ten nets, in torch and in JAX. Each has parameters a, b, c, (4, 4), and an input (3, 4).


def detached(torch, p, x):
    h = torch.tanh(x @ p["a"].detach())
    return (h @ p["b"] @ p["c"]).sum()


def detached_here(p, x):
    return (jnp.tanh(x @ stop(p["a"])) @ p["b"] @ p["c"]).sum()


def token(torch, p, x):
    chosen = (x @ p["a"]).argmax(-1)
    return (p["b"][chosen] @ p["c"]).sum()


def token_here(p, x):
    return (p["b"][(x @ p["a"]).argmax(-1)] @ p["c"]).sum()


def quantised(torch, p, x):
    weights = torch.round(8 * p["a"]) / 8
    return (torch.floor(x @ weights) @ p["b"]).sum() + torch.sign(p["c"]).sum()


def quantised_here(p, x):
    return (jnp.floor(x @ (jnp.round(8 * p["a"]) / 8)) @ p["b"]).sum() + jnp.sign(p["c"]).sum()


def straight_through(torch, p, x):
    weights = p["a"] + (torch.round(p["a"]) - p["a"]).detach()
    return (x @ weights).sum() + (torch.trunc(p["b"]) * 0.0 * x[0]).sum()


def straight_through_here(p, x):
    weights = p["a"] + stop(jnp.round(p["a"]) - p["a"])
    return (x @ weights).sum() + (jnp.trunc(p["b"]) * 0.0 * x[0]).sum()


def teacher(torch, p, x):
    with torch.no_grad():
        target = torch.tanh(x @ p["a"])
    return ((x @ p["b"] - target) ** 2).sum()


def teacher_here(p, x):
    target = fg.no_grad(lambda: jnp.tanh(x @ p["a"]))()
    return ((x @ p["b"] - target) ** 2).sum()


def dead_head(torch, p, x):
    h = torch.relu(x @ p["a"])
    (h @ p["c"]).logsumexp(-1)  # computed, not returned
    return (h @ p["b"]).sum()


def dead_head_here(p, x):
    h = jax.nn.relu(x @ p["a"])
    jax.nn.logsumexp(h @ p["c"], -1)
    return (h @ p["b"]).sum()


def gated(torch, p, x):
    gate = ((x @ p["a"]) > 0).to(x.dtype)
    index = p["c"][0].abs().long() % 4
    return (gate * (x @ p["b"])).sum() + p["b"][index].sum()


def gated_here(p, x):
    gate = ((x @ p["a"]) > 0).astype(x.dtype)
    index = jnp.abs(p["c"][0]).astype(jnp.int32) % 4
    return (gate * (x @ p["b"])).sum() + p["b"][index].sum()


def ruled(torch, p, x):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(scale)
            return x * scale

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0], None

    return Scaled.apply(x @ p["a"], p["b"][:3]).sum() + p["c"].sum()


def ruled_here(p, x):
    scaled = jax.custom_vjp(lambda x, scale: x * scale)
    scaled.defvjp(lambda x, scale: (x * scale, scale), lambda scale, g: (g * scale, None))
    return scaled(x @ p["a"], p["b"][:3]).sum() + p["c"].sum()


def truncated(torch, p, x):
    h = p["a"][0]  # an initial state, forgotten by the gradient after each step
    for row in x:
        h = torch.tanh(row + h.detach() @ p["b"])
    return h.sum() + (p["c"].max(0).indices.sum() if x.sum() > 9 else p["c"].topk(2).values.sum())


def truncated_here(p, x):
    h, _ = lax.scan(lambda h, row: (jnp.tanh(row + stop(h) @ p["b"]), None), p["a"][0], x)
    best = lambda c: c.argmax(0).sum().astype(c.dtype)
    top = lambda c: lax.top_k(c, 2)[0].sum()
    return h.sum() + lax.cond(x.sum() > 9, best, top, p["c"])


def recomputed(torch, p, x):
    from torch.utils.checkpoint import checkpoint

    def block(a, b, x):
        return torch.where(x @ a > 0, x @ b, (x @ b).detach())

    return checkpoint(block, p["a"], p["b"], x, use_reentrant=False).sum()


def recomputed_here(p, x):
    def block(a, b, x):
        return jnp.where(x @ a > 0, x @ b, stop(x @ b))

    return jax.checkpoint(block)(p["a"], p["b"], x).sum()


NETS = [
    (detached, detached_here),
    (token, token_here),
    (quantised, quantised_here),
    (straight_through, straight_through_here),
    (teacher, teacher_here),
    (dead_head, dead_head_here),
    (gated, gated_here),
    (ruled, ruled_here),
    (truncated, truncated_here),
    (recomputed, recomputed_here),
]


@pytest.mark.torch
@pytest.mark.parametrize("theirs, ours", NETS, ids=[net.__name__ for net, _ in NETS])
def test_verdicts_equal_what_torch_gives_with_allow_unused(theirs, ours, torch):
    p = params("a", "b", "c")
    leaves = {k: torch.tensor(np.asarray(v), requires_grad=True) for k, v in p.items()}
    loss = theirs(torch, leaves, torch.tensor(np.asarray(X)))
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    np.testing.assert_allclose(loss.item(), ours(p, X), rtol=1e-5)
    expected = {
        name: "none" if g is None else "zero"
        for name, g in zip(leaves, grads, strict=True)
        if g is None or not g.any()
    }
    for wrapped in (ours, jax.jit(ours)):
        assert verdicts(wrapped, p, X) == expected


# Soundness on generated programs: parameters replaced by cut versions of themselves.

CUTS = {
    "live": lambda w: w,
    "scaled": lambda w: 2.0 * w,
    "stop": stop,
    "round": lambda w: jnp.round(3 * w),
    "cast": lambda w: (3 * w).astype(jnp.int32).astype(w.dtype),
    "order": lambda w: jnp.argsort(w, axis=0).astype(w.dtype),
    "sign": jnp.sign,
    "zero": lambda w: w * 0.0,
    "region": lambda w: fg.no_grad(jnp.sin)(w),
    "loop": lambda w: lax.scan(lambda c, x: (stop(c) + x, stop(c) * x), w, jnp.ones(2))[0],
    "late": lambda w: lax.scan(
        lambda c, _: ((c[1], c[2], stop(c[2])), None), (0 * w, w, jnp.ones_like(w)), None, length=2
    )[0][0],
    "passing by": lambda w: lax.scan(
        lambda c, _: ((c[1], c[2], 0.5 * c[2]), None), (w, jnp.ones_like(w), w), None, length=2
    )[0][0],
    "branch": lambda w: lax.cond(w.sum() > 0, stop, jnp.round, w),
    "half branch": lambda w: lax.cond(w.sum() > 99, stop, jnp.sin, w),
    "jit": jax.jit(lambda w: stop(jnp.cos(w))),
    "remat": jax.checkpoint(lambda w: jnp.floor(w) + stop(w)),
}
SURELY = {"stop", "round", "cast", "order", "sign", "zero", "region", "loop", "late"}
SURELY |= {"branch", "jit", "remat"}


@settings(max_examples=max(5, PROGRAMS // 8))
@given(programs(depth=1, max_size=4), st.tuples(*[st.sampled_from(sorted(CUTS))] * 5))
def test_a_leaf_declared_unused_has_a_gradient_of_exactly_zero(program: Program, cuts):
    p, (x, t) = program.params(), program.inputs()
    cut = dict(zip(p, cuts, strict=True))
    loss = lambda p: program.loss({k: CUTS[cut[k]](w) for k, w in p.items()}, x, t)
    grads = jax.jit(jax.grad(loss))(p)
    found = verdicts(loss, p)
    for name, grad in grads.items():
        if name in found:
            assert not np.any(np.asarray(grad)), (name, cut[name])
        elif np.isfinite(grad).all():
            # Not listed: it reaches the loss, through no cut that is sure.
            assert cut[name] not in SURELY, (name, cut[name])


@settings(max_examples=max(5, PROGRAMS // 8))
@given(programs(depth=1, max_size=4))
def test_a_leaf_not_declared_unused_has_a_gradient_somewhere(program: Program):
    loss = lambda p, x, t: program.loss(p, x, t)
    p = program.params()
    batch = program.inputs(batch=3)
    grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(p, *batch)
    found = verdicts(loss, p, *program.inputs())
    missed = [name for name, g in grads.items() if name not in found and not np.any(g)]
    # A program may still have a relu or a clip that is flat for all samples.
    text = str(program)
    assert not missed or "relu" in text or "clip" in text


# Bodies


def shard_mapped(f):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=(P(), P()), out_specs=P())


def looped(f):
    return lambda a, b: lax.while_loop(lambda c: c < 9.0, lambda c: c + 10 + f(a, b), a.sum() * 0)


BODIES = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda a, b: lax.scan(lambda c, _: (c + f(a, b), None), 0.0, length=3)[0],
    "scanned over": lambda f: lambda *ab: lax.scan(lambda c, x: (c + f(*x), None), 0.0, ab)[0],
    "while": looped,
    "cond": lambda f: lambda a, b: lax.cond(b[0, 0] > 9, f, lambda a, b: 0.0, a, b),
    "vmap": lambda f: lambda a, b: jax.vmap(f)(a, b).sum(),
    "shard_map": shard_mapped,
    "grad": lambda f: lambda a, b: jax.grad(lambda s: s * f(a, b))(1.0),
    "no_grad of nothing": lambda f: fg.set_grad_enabled(True)(f),
}
BODIES["all"] = lambda f: jax.jit(BODIES["scan"](jax.checkpoint(jax.jit(f))))


@pytest.mark.parametrize("wrap", BODIES.values(), ids=BODIES)
def test_cuts_are_found_in_every_body_with_their_line(wrap):
    def inner(a, b):
        return (stop(a) * b).sum()  # CUT

    fun = lambda p: wrap(inner)(p["a"], p["b"])
    found = {leaf.path: leaf for leaf in fg.unused_grads(fun)(params("a", "b"))}
    if wrap is looped:  # the loop starts from a, times zero
        assert found["a"].gradient == "zero"
        return
    assert set(found) == {"a"}
    (cut,) = found["a"].cuts
    assert cut.reason == "stop_gradient"
    assert (cut.line.file, cut.line.line) == (__file__, line_of(inner, "CUT"))


def test_a_jit_directly_around_a_region_has_the_line_of_its_call():
    def step(carry, _):
        return carry * 2, None

    def fun(p):
        a = jax.jit(fg.no_grad(jnp.sin))(p["a"])  # JIT
        b, _ = lax.scan(fg.no_grad(step), p["b"], length=2)  # SCAN
        return (a + b + jax.checkpoint(fg.inference_mode(jnp.sin))(p["c"])).sum()  # CHECKPOINT

    found = fg.unused_grads(fun)(params("a", "b", "c"))
    for leaf, word in zip(found, ("JIT", "SCAN", "CHECKPOINT"), strict=True):
        assert [(cut.line.file, cut.line.line) for cut in leaf.cuts] == [
            (__file__, line_of(fun, word))
        ]


def test_a_loop_is_followed_iteration_by_iteration():
    def shift(length):
        def fun(p):  # a register: what enters on the right leaves on the left
            start = (p["a"], p["b"], p["c"])
            (out, _, _), _ = lax.scan(
                lambda c, _: ((c[1], c[2], jnp.zeros_like(c[2])), None), start, length=length
            )
            return out

        return verdicts(fun, params("a", "b", "c"))

    assert set(shift(0)) == {"b", "c"}
    assert set(shift(1)) == {"a", "c"}
    assert set(shift(2)) == {"a", "b"}
    assert set(shift(3)) == set(shift(10**6)) == {"a", "b", "c"}

    def turn(length):
        rotate = lambda c, _: ((c[1], c[2], c[0]), c[0][0])
        fun = lambda p: lax.scan(rotate, (p["a"], p["b"], p["c"]), length=length)[0][0]
        return set("abc") - set(verdicts(fun, params("a", "b", "c")))

    assert [turn(n) for n in (0, 1, 2, 3, 10**6 + 1)] == [{"a"}, {"b"}, {"c"}, {"a"}, {"c"}]


def test_several_cuts_are_told_in_the_order_of_the_program():
    def fun(p):
        a = p["a"]
        return (stop(a) + (a > 0) + jnp.argmax(a) + a.astype(jnp.int8)).sum()

    assert reasons(fun, params("a")) == {
        "a": ["stop_gradient", "gt, which gives bool", "argmax, which gives int32", "cast to int8"]
    }
    # A cut that only numbers without a use pass through is not told.
    ignored = lambda p: (stop(p["a"]), jnp.round(p["a"]))[1].sum()
    assert reasons(ignored, params("a")) == {"a": ["round"]}


def test_a_leaf_without_use_says_so():
    def fun(p, q=None):
        unused = jax.jit(lambda a: jnp.sin(a) + 1)(p["a"])  # SIN
        assert unused is not None
        return p["b"].sum()

    a, c = fg.unused_grads(fun)(params("a", "b", "c"))
    assert str(c) == "c: none, never used"
    assert str(a).startswith("a: none, the result does not depend on it; used at ")
    assert a.cuts[0].line.line == line_of(fun, "SIN")


def test_only_what_is_differentiated_counts():
    fun = lambda p: (p["a"].sum(), p["b"].sum())
    assert verdicts(fun, params("a", "b")) == {}
    assert verdicts(fun, params("a", "b"), has_aux=True) == {"b": "none"}
    assert verdicts(lambda p: jnp.argmax(p["a"]), params("a")) == {"a": "none"}


def test_arguments_of_every_kind():
    def fun(p, x, mode, *, flag, key):
        assert isinstance(mode, str) and flag
        noise = jax.random.normal(key, x.shape)
        return ((x + noise) @ p["w"]).sum() if x.shape[0] == 3 else 0.0

    tree = {"w": jnp.ones((4, 4)), "n": jnp.arange(3), "k": jax.random.key(0), "f": len, "s": 1.0}
    key = jax.random.key(1)
    table = fg.unused_grads(fun)(tree, X, "a", flag=True, key=key)
    assert {leaf.path: str(leaf.cuts[0]) for leaf in table} == {
        "k": "never used",
        "n": "never used",
        "s": "never used",
    }
    shapes = jax.eval_shape(lambda: {"w": jnp.ones((4, 4))}), jax.ShapeDtypeStruct((3, 4), X.dtype)
    assert len(fg.unused_grads(fun)(*shapes, "a", flag=True, key=key)) == 0
    both = fg.unused_grads(lambda a, b: stop(a) * b, argnums=(0, -1))(1.0, 2.0)
    assert [str(leaf) for leaf in both] == [f"0/: none, {both.leaves[0].cuts[0]}"]
    used = fg.unused_grads(lambda p: p["n"].sum() * p["w"])({"n": jnp.arange(3), "w": jnp.ones(2)})
    assert [str(leaf) for leaf in used] == ["n: none, it is of int32"]


def test_the_table_prints():
    def fun(p):
        return (stop(p["a"]) * jnp.round(p["b"])).sum()

    lines = str(fg.unused_grads(fun)(params("a", "b"))).splitlines()
    assert lines[0].split() == ["leaf", "gradient", "because"]
    assert lines[1].startswith("a     none      stop_gradient at ")
    assert lines[2].startswith("b     zero      round at ")
    assert lines[3] == "2 of 2 leaves get no gradient"
    assert str(fg.unused_grads(jnp.sum)(X)) == "0 of 1 leaves get no gradient"


# Custom rules


def test_what_a_custom_rule_gives_is_asked_of_the_rule():
    @jax.custom_jvp
    def flat(x, y):
        return x * y

    flat.defjvp(lambda p, t: (p[0] * p[1], p[0] * t[1]))

    @jax.custom_vjp
    def zeros(x, y):
        return x * y, x

    zeros.defvjp(
        lambda x, y: ((x * y, x), y),
        lambda y, g: (g[0] * y, jnp.zeros_like(y)),
    )

    @jax.custom_vjp
    def constant(x):  # its rule ignores the cotangent, and is not zero
        return x

    constant.defvjp(lambda x: (x, None), lambda _, g: (jnp.ones((4, 4)),))

    @jax.custom_vjp
    def product(x):  # its rule needs both cotangents at once
        return x, x

    product.defvjp(lambda x: ((x, x), None), lambda _, g: (g[0] * g[1],))

    p = params("a", "b")
    fun = lambda f: lambda p: jax.tree.leaves(f(p["a"], p["b"]))[0].sum()
    assert verdicts(fun(flat), p) == {"a": "zero"}
    assert verdicts(fun(zeros), p) == {"b": "none"}
    assert reasons(fun(jax.jit(zeros)), p) == {"b": ["custom derivative rule"]}
    second = lambda p: zeros(p["a"], p["b"])[1].sum()  # of which the rule makes nothing
    assert verdicts(second, p) == {"a": "none", "b": "none"}
    assert not np.any(jax.grad(second)(p)["a"])
    assert verdicts(lambda p: constant(p["a"]).sum(), params("a")) == {}
    assert verdicts(lambda p: sum(product(p["a"])).sum(), params("a")) == {}
    straight = lambda p: jax.nn.relu(p["a"]).sum() + jax.nn.silu(p["b"]).sum()
    assert verdicts(straight, p) == {}


def test_inference_mode_is_a_cut_and_a_callback_is_none():
    def fun(p):
        a = fg.inference_mode(jnp.sin)(p["a"])
        shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        return (a * jax.pure_callback(np.sin, shape, p["b"])).sum()

    assert reasons(fun, params("a", "b")) == {"a": ["inference_mode"]}


def test_a_reference_and_a_missing_argument_are_refused():
    def fun(p):
        ref = jax.new_ref(jnp.zeros((4, 4)))
        ref[...] = p["a"]
        return ref[...].sum()

    with pytest.raises(ValueError, match="unused_grads: argnums are places.*got 2 for 1 of them"):
        fg.unused_grads(fun, argnums=2)(params("a"))
    with pytest.raises(TypeError, match=r"unused_grads: .* mutable reference at .*test_unused"):
        fg.unused_grads(fun)(params("a"))


def test_the_primitives_called_flat_are_those_jax_gives_zero():
    for prim in _marks._FLAT:
        params_of = {
            primitives.round_p: {"rounding_method": lax.RoundingMethod.TO_NEAREST_EVEN},
            primitives.bitcast_convert_type_p: {"new_dtype": np.dtype("float32")},
        }.get(prim, {})
        fun = lambda x, prim=prim, params_of=params_of: prim.bind(x, **params_of)
        jaxpr = jax.make_jaxpr(lambda x, g, fun=fun: jax.vjp(fun, x)[1](g))(X, X)
        assert "broadcast_in_dim" in str(jaxpr) and str(jaxpr).count(":f32[3,4] = ") <= 2
        assert not np.any(jax.grad(lambda x, fun=fun: fun(x).sum())(X))
