import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from conftest import DEEP, PROGRAMS
from programs import programs

KEY = jax.random.key(0)
CHUNKS = [1, 2, 3, 4, 7, 10, 1000]


def close(a, b, tolerance=1e-5):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.shape(x) == jnp.shape(y) and jnp.result_type(x) == jnp.result_type(y)
        assert np.allclose(np.asarray(x), np.asarray(y), tolerance, tolerance, equal_nan=True)


def cost(fun, *args):
    compiled = jax.jit(fun).lower(*args).compile()
    figures, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return figures["flops"], figures["bytes accessed"], memory.temp_size_in_bytes


PARAMS = {"w": jnp.arange(6.0).reshape(2, 3) / 5, "b": (jnp.float32(0.3), jnp.zeros(0))}


def model(p, x):
    h = jnp.tanh(p["w"] @ x) * p["b"][0]
    return {"h": h, "s": jnp.sin(p["w"]).sum(0), "n": (h @ h) * x.sum()}


X = jnp.array([0.5, -1.0, 2.0])

# Jacobians.


@pytest.mark.parametrize("name", ["jacrev", "jacfwd"])
def test_every_chunk_size_gives_the_jacobian_of_trees(name):
    ours, theirs = getattr(fg, name), getattr(jax, name)(model, (0, 1))
    chunks = (None, *CHUNKS) if DEEP else (1, 4, 1000)
    run = lambda *args: (
        [ours(model, (0, 1), chunk_size=c)(*args) for c in chunks],
        theirs(*args),
    )
    found, expected = jax.jit(run)(PARAMS, X)
    for jac in found:
        close(jac, expected)


@pytest.mark.parametrize("jac", [fg.jacrev, fg.jacfwd])
def test_one_argument_negative_argnums_keywords_and_aux(jac):
    fun = lambda x, y, *, z: (x * y * z, {"sum": x.sum()})
    run = lambda x, y: (
        jac(fun, -1, has_aux=True, chunk_size=2)(x, y, z=3.0),
        jac(lambda x: x**2, (0,))(x),
    )
    (found, aux), (only,) = jax.jit(run)(X, 2 * np.asarray(X))
    close(found, np.diag(3 * np.asarray(X)))
    assert aux["sum"] == np.asarray(X).sum()
    close(only, np.diag(2 * np.asarray(X)))


@pytest.mark.parametrize("jac", [fg.jacrev, fg.jacfwd, lambda f: lambda x: fg.jacobian(f)(x)])
def test_shapes_without_entries_or_axes(jac):
    value = lambda found: getattr(found, "jacobian", found)
    cases = [
        (lambda x: x, np.float32(5), np.float32(1)),
        (lambda x: x, np.ones(1, np.float32), np.ones((1, 1), np.float32)),
        (lambda x: x[:0], X, np.zeros((0, 3), np.float32)),
        (lambda x: X * x.sum(), np.zeros((2, 0), np.float32), np.zeros((3, 2, 0), np.float32)),
        (lambda p: {"a": X}, {"p": None}, {"a": {"p": None}}),
        (lambda x: {"a": None}, X, {"a": None}),
    ]
    run = lambda xs: [value(jac(f)(x)) for (f, *_), x in zip(cases, xs, strict=True)]
    close(jax.jit(run)([x for _, x, _ in cases]), [expected for *_, expected in cases])


@pytest.mark.parametrize("name", ["jacrev", "jacfwd"])
def test_dtypes_are_those_of_jax(name):
    z = jnp.array([1 + 2j, 0.5 - 1j, 3j])
    narrow = lambda dtype: lambda x: (x.astype(dtype) ** 2, x.sum().astype(jnp.float32))
    cases = [
        (lambda z: jnp.stack([z[0] * z[1], z[2] ** 2]), z, {"holomorphic": True}),
        (narrow(jnp.bfloat16), X, {}),
        (narrow(jnp.float16), X.astype(jnp.bfloat16), {}),
        # A real function of complex numbers has rows, a complex one of real numbers columns.
        (lambda z: jnp.abs(z) ** 2, z, {}) if name == "jacrev" else (lambda x: x * z, X, {}),
    ]

    def run():
        return [
            (getattr(fg, name)(f, **o, chunk_size=2)(x), getattr(jax, name)(f, **o)(x))
            for f, x, o in cases
        ]

    for ours, theirs in jax.jit(run)():
        close(ours, theirs)


@settings(max_examples=PROGRAMS // 10)
@given(programs(depth=1, max_size=3))
def test_second_derivatives_of_programs(program):
    params, (x, t) = program.params(), program.inputs()
    # Few enough entries; without jit, each operation on them would be one more program.
    chosen = {"b": np.asarray(params["b"]), "K": np.asarray(params["K"])[:, :, :1]}
    join = lambda q: params | {"b": q["b"], "K": params["K"].at[:, :, :1].set(q["K"])}
    fun = lambda q: program.loss(join(q), x, t)
    direction = jax.tree.map(np.cos, chosen)
    in_order = lambda tree: np.concatenate([np.ravel(tree["K"]), np.ravel(tree["b"])])

    def run(q, v):
        flat, unravel = ravel_pytree(q)
        # Rows of the reverse mode of the gradient, whose rules need not be derivatives.
        grad = jax.grad(lambda f: fun(unravel(f)))
        whole = jax.vmap(jax.vjp(grad, flat)[1])(jnp.eye(flat.size))[0]
        return (
            whole,
            fg.hvp(fun, (q,), v),
            fg.vhp(fun, (q,), v),
            fg.hessian(fun, chunk_size=5)(q),
            fg.hessian_diagonal(fun, chunk_size=5)(q),
            fg.hessian_trace(fun)(q),
        )

    matrix, right, left, blocks, diagonal, trace = jax.device_get(jax.jit(run)(chosen, direction))
    matrix, v = matrix.astype(np.float64), in_order(direction)
    near = functools.partial(np.allclose, rtol=1e-3, atol=1e-4 * max(1, np.abs(matrix).max()))
    assert near(in_order(right), matrix @ v)
    assert near(in_order(left), v @ matrix)
    size = {k: leaf.size for k, leaf in chosen.items()}
    rows = [[blocks[k][j].reshape(size[k], size[j]) for j in ("K", "b")] for k in ("K", "b")]
    assert near(np.block(rows), matrix)
    assert near(in_order(diagonal), np.diag(matrix)) and near(trace, np.trace(matrix))


# Memory and work.

WIDE = jnp.asarray(np.random.default_rng(0).normal(size=(16, 512)), jnp.float32)


def test_work_and_memory_without_chunks_are_those_of_jax():
    rows, columns = (lambda x: jnp.tanh(x @ WIDE)), (lambda x: jnp.tanh(WIDE @ x))
    for theirs, ours, fun, n in (
        (jax.jacrev, fg.jacrev, rows, 16),
        (jax.jacfwd, fg.jacfwd, columns, 512),
    ):
        x = jnp.ones(n)
        base = cost(theirs(fun), x)
        for size in (None, 512):
            ratios = np.divide(cost(ours(fun, chunk_size=size), x), base)
            assert ratios.max() <= 1.1


# Without and with a remainder.
@pytest.mark.parametrize("jac, size", [(fg.jacrev, 30), (fg.jacfwd, 32)])
def test_temporaries_do_not_grow_with_the_jacobian(jac, size):
    def temporaries(n, size):
        fun = lambda x: jnp.tanh(x @ WIDE[:, :n] if jac is fg.jacrev else WIDE[:, :n] @ x)
        return cost(jac(fun, chunk_size=size), jnp.ones(16 if jac is fg.jacrev else n))[2]

    # Of a chunk each row of a seed has as many entries as there are rows: what grows is linear.
    large = temporaries(512, size)
    assert large <= 1.1 * 4 * temporaries(128, size)
    assert large < 0.15 * temporaries(512, None)


def primitives(fun, *args):
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    return [(v.eqn.primitive.name, v.trips) for v in fg._jaxpr.walk(jaxpr)]


def test_the_forward_pass_runs_once_and_one_row_at_a_time_maps_nothing():
    fun = lambda x: jnp.tanh(x) * 2
    assert [n for n, _ in primitives(fg.jacrev(fun, chunk_size=2), jnp.ones(8))].count("tanh") == 1

    def unmappable(x):
        out = jax.ShapeDtypeStruct((3,), jnp.float32)
        return jax.pure_callback(lambda x: np.asarray(x) * 2, out, x, vmap_method=None)

    double = jax.custom_jvp(unmappable)
    double.defjvp(lambda primals, tangents: (unmappable(*primals), unmappable(*tangents)))
    close(jax.jit(fg.jacfwd(double, chunk_size=1))(X), 2 * np.eye(3, dtype=np.float32))
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.jit(fg.jacfwd(double, chunk_size=2))(X)


def _models():
    rng = np.random.default_rng(0)
    mats = [jnp.asarray(rng.normal(size=(16, 16)) / 4, jnp.float32) for _ in range(4)]
    xs = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)
    layer = lambda h, w: jnp.tanh(h @ w)

    def attention(p):
        q, k, v = (xs @ w for w in p[:3])
        return jnp.mean((jax.nn.softmax(q @ k.T) @ v @ p[3]) ** 2)

    return {
        "mlp": (lambda p: jnp.mean(functools.reduce(layer, p, xs) ** 2), mats),
        "scan": (
            lambda p: jnp.mean(lax.scan(lambda h, w: (layer(h, w), None), xs, p)[0] ** 2),
            jnp.stack(mats),
        ),
        "attention": (attention, mats),
    }


@pytest.mark.parametrize("name", ["mlp", "scan", "attention"] if DEEP else ["scan"])
def test_hvp_costs_no_more_than_the_best_order_by_hand(name):
    fun, p = _models()[name]
    dot = lambda a, b: sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)))
    grad = jax.grad(fun)
    by_hand = [
        lambda p, v: jax.jvp(grad, (p,), (v,))[1],
        jax.grad(lambda p, v: jax.jvp(fun, (p,), (v,))[1]),
        jax.grad(lambda p, v: dot(grad(p), v)),
    ]
    ours = cost(lambda p, v: fg.hvp(fun, (p,), v), p, p)
    best = np.min([cost(f, p, p) for f in by_hand], axis=0)
    # Operations, bytes moved and temporaries; of the bytes another order may move a little less.
    assert np.divide(ours, best).max() <= 1.1


# The choice of the mode.


def test_jacobian_says_value_aux_and_mode():
    tall, wide = (lambda x: (jnp.tile(x, 2), x.sum())), (lambda x: (x[:1] * x[1:2], x.sum()))
    both = [fg.jacobian(fun, has_aux=True, chunk_size=2) for fun in (tall, wide)]
    forward, reverse = jax.jit(lambda x: [jac(x) for jac in both])(X)
    assert (forward.mode, reverse.mode) == ("forward", "reverse")
    for found, fun, jac in (
        (forward, tall, np.tile(np.eye(3, dtype=np.float32), (2, 1))),
        (reverse, wide, np.array([[-1, 0.5, 0]], np.float32)),
    ):
        close((found.value, found.aux), fun(X))
        close(found.jacobian, jac)
    assert fg.jacobian(lambda x: x)(X).aux is None


def test_jacobian_takes_the_mode_that_the_program_allows():
    loop = lambda x: lax.while_loop(lambda x: x[0] < 9, lambda x: 2 * x, x)[:1]
    assert fg.jacobian(loop)(X).mode == "forward"
    close(fg.jacobian(loop)(X).jacobian, jnp.array([[32.0, 0, 0]]))
    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * 7,))
    found = fg.jacobian(lambda x: jnp.tile(rule(x), 2))(X)
    assert found.mode == "reverse"
    close(found.jacobian, 7 * jnp.tile(jnp.eye(3), (2, 1)))


# Products.

CUBE, A, ONES = (lambda a: (a**3).sum()), jnp.array([1.0, 2.0]), jnp.ones(2)


def test_products_on_trees_and_argnums_equal_the_matrix():
    loss = lambda p, x: sum(leaf.sum() for leaf in jax.tree.leaves(model(p, x)))
    at = (PARAMS, X)
    v = jax.tree.map(lambda x: jnp.cos(x + 1), at)

    def run(at, v):
        flat, unravel = ravel_pytree(at)
        matrix = jax.hessian(lambda f: loss(*unravel(f)))(flat)
        both = [product(loss, at, v, argnums=(0, 1)) for product in (fg.hvp, fg.vhp)]
        one = [product(loss, at, v[1], argnums=-1) for product in (fg.hvp, fg.vhp)]
        return both, unravel(matrix @ ravel_pytree(v)[0]), one, matrix[-3:, -3:] @ v[1]

    both, expected, one, alone = jax.jit(run)(at, v)
    close(both, [expected] * 2)
    close(one, [alone] * 2)


def test_products_compose_with_every_transform():
    fun = lambda a: (jnp.sin(a) * a[0]).sum()
    matrix = jax.hessian(fun)
    product = lambda a, v: fg.hvp(fun, a, v)
    rows = jnp.stack([A, 2 * A, -A])
    by_matrix = lambda a: ONES @ matrix(a) @ ONES
    by_product = lambda a: product(a, ONES) @ ONES

    def run():
        many = jax.linearize(jax.grad(fun), A)[1]  # as the docstring says
        matrices = jax.vmap(matrix)(rows)
        return [
            (jax.vmap(product)(rows, rows), jnp.einsum("nij,nj->ni", matrices, rows)),
            (lax.scan(lambda c, a: (c, product(a, c)), ONES, rows)[1], matrices @ ONES),
            (jax.grad(by_product)(A), jax.grad(by_matrix)(A)),
            (fg.hessian(by_product, chunk_size=1)(A), jax.hessian(by_matrix)(A)),
            (jax.checkpoint(product)(A, ONES), matrices[0] @ ONES),
            (many(ONES), matrices[0] @ ONES),
        ]

    for found, expected in jax.jit(run)():
        close(found, expected)


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((2,), ("x",))
    with jax.set_mesh(mesh):
        yield mesh


def spread(mesh, x, *spec):
    return jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))


def test_each_device_differentiates_a_function_of_its_own(mesh):
    fun = lambda a: (jnp.sin(a) * a[0]).sum()

    def local(a, v):
        return (
            fg.hvp(fun, a, v),
            fg.vhp(fun, a, v),
            fg.hessian(fun, chunk_size=2)(a),
            fg.jacrev(jnp.sin, chunk_size=2)(a),
            fg.hessian_diagonal(fun, chunk_size=2)(a),
            fg.gnvp(jnp.sin, lambda y: (y**2).sum(), a, v),
        )

    at, v = np.arange(6.0, dtype=np.float32), np.cos(np.arange(6.0, dtype=np.float32))
    sharded = jax.jit(jax.shard_map(local, in_specs=P("x"), out_specs=P("x")))
    found = sharded(spread(mesh, at, "x"), spread(mesh, v, "x"))

    def by_hand(a, v):
        matrix, slope = np.diag(-a[0] * np.sin(a)), np.cos(a)
        matrix[0] += slope
        matrix[:, 0] += slope
        return matrix @ v, v @ matrix, matrix, np.diag(slope), np.diag(matrix), 2 * slope**2 * v

    halves = [by_hand(at[i : i + 3], v[i : i + 3]) for i in (0, 3)]
    for got, *parts in zip(found, *halves, strict=True):
        assert np.allclose(np.asarray(got), np.concatenate(parts), atol=1e-5)


def test_arrays_spread_over_devices_by_explicit_shardings(mesh):
    at = np.arange(8.0, dtype=np.float32).reshape(2, 4)
    fun = lambda a: jnp.sin(a).sum() ** 2

    def run(a):
        jacs = [jac(jnp.sin, chunk_size=3)(a) for jac in (fg.jacrev, fg.jacfwd)]
        return *jacs, fg.hessian(fun)(a), fg.hessian_diagonal(fun, chunk_size=3)(a)

    sine, slope = np.sin(at).ravel(), np.cos(at).ravel()
    jac = np.diag(slope)
    hessian = 2 * np.outer(slope, slope) - 2 * sine.sum() * np.diag(sine)
    expected = [x.reshape(2, 4, 2, 4) for x in (jac, jac, hessian)]
    expected.append(np.diag(hessian).reshape(2, 4))
    for spec in (("x",), (None, "x")):
        found = jax.jit(run)(spread(mesh, at, *spec))
        for a, b in zip(found, expected, strict=True):
            assert np.allclose(np.asarray(a), b, atol=1e-5)


def on_devices(fun, args, in_specs, out_specs, **options):
    return jax.jit(jax.shard_map(fun, in_specs=in_specs, out_specs=out_specs, **options))(*args)


COUPLED = lambda a: lax.psum(a.sum(), "x") ** 2 / 2


@pytest.mark.parametrize(
    "derivative, words",
    [
        (lambda a: fg.jacfwd(COUPLED)(a), "jacfwd: .*psum.* over 'x' at .*test_transforms"),
        (lambda a: fg.hessian(COUPLED)(a), "jac(fwd|rev): inside shard_map"),
        (lambda a: fg.hessian_diagonal(COUPLED)(a), "hessian_diagonal: inside shard_map"),
        (lambda a: fg.jacrev(lambda a: a - lax.pmean(a, "x"))(a), "jacrev: inside shard_map"),
    ],
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives_that_devices_would_mix_are_refused(mesh, derivative, words, check_vma):
    a = spread(mesh, jnp.arange(4.0), "x")
    with pytest.raises(ValueError, match=words):
        on_devices(derivative, (a,), P("x"), P("x"), check_vma=check_vma)


def test_rows_of_several_devices_are_not_summed(mesh):
    # JAX gives each device the sum in reverse mode, and its own rows in forward mode.
    w, x = jnp.ones(2), spread(mesh, jnp.array([3.0, 5.0]), "x")
    specs = (P(), P("x")), P("x")
    fun = lambda w, x: w * x
    with pytest.raises(ValueError, match="jacrev: .*pvary over 'x'.*pcast"):
        on_devices(fg.jacrev(fun), (w, x), *specs)
    own = lambda w, x: fg.jacrev(fun)(lax.pcast(w, "x", to="varying"), x)
    expected = np.concatenate([3 * np.eye(2), 5 * np.eye(2)])
    for jac in (own, fg.jacfwd(fun)):
        assert np.array_equal(on_devices(jac, (w, x), *specs), expected)
    mean = fg.hessian(lambda w, x: lax.pmean((w * x).sum() ** 2, "x"))
    assert np.array_equal(on_devices(mean, (w, x), specs[0], P()), np.full((2, 2), 34))


def test_random_signs_differ_between_devices(mesh):
    # Equal ones would add the entries between devices to the diagonal, without any spread.
    estimate = lambda a: fg.hutchinson(COUPLED, n_samples=64, chunk_size=64)(KEY, a)[2:]
    a = spread(mesh, jnp.ones(2), "x")
    diagonal, error = map(np.asarray, on_devices(estimate, (a,), P("x"), P("x")))
    assert (abs(diagonal - 1) < 4 * error).all() and (0 < error).all() and (error < 0.2).all()


def test_both_sides_agree_on_complex_arguments():
    z, v = jnp.array([1 + 2j, 0.5 - 1j]), jnp.array([1j, 2.0 + 1j])
    real = lambda z: (jnp.abs(z[0] * z[1]) ** 2 + jnp.abs(z) ** 4).sum()
    analytic = lambda z: (z**3).sum() * z[0]

    def run():
        grad, step = jax.grad(real), 1e-2
        slope = (grad(z + step * v) - grad(z - step * v)) / (2 * step)
        matrix = jax.hessian(analytic, holomorphic=True)(z)
        products = [f(analytic, z, v, holomorphic=True) for f in (fg.hvp, fg.vhp)]
        diagonal = fg.hessian_diagonal(analytic, holomorphic=True)(z)
        both = [f(real, z, v) for f in (fg.hvp, fg.vhp)]
        return (both, [slope] * 2), (products, [matrix @ v] * 2), (diagonal, jnp.diag(matrix))

    by_steps, *exact = jax.jit(run)()
    close(*by_steps, 1e-2)  # of finite differences in float32
    for found, expected in exact:
        close(found, expected)


def test_left_and_right_differ_where_a_rule_is_no_derivative():
    rule = jax.custom_vjp(lambda x: x**2)
    rule.defvjp(lambda x: (x**2, x), lambda x, g: (g * x[::-1] ** 2,))
    fun = lambda x: (rule(x) * jnp.array([1.0, 3.0])).sum()
    products = lambda a: (fg.hvp(fun, a, a), fg.vhp(fun, a, a), jax.jacrev(jax.grad(fun))(a))
    right, left, grad_matrix = jax.jit(products)(A)
    close(right, grad_matrix @ A)
    close(left, A @ grad_matrix)


def test_gauss_newton_is_the_hessian_without_the_curvature_of_the_model():
    loss = lambda out: jnp.log(1 + (out["h"] ** 2).sum()) + out["n"] ** 2 + out["s"].sum()
    v = jax.tree.map(jnp.cos, PARAMS)

    def run(p, v):
        flat, unravel = ravel_pytree(p)
        out, join = ravel_pytree(model(p, X))
        jac = jax.jacrev(lambda f: ravel_pytree(model(unravel(f), X))[0])(flat)
        curved = jax.hessian(lambda out: loss(join(out)))(out)
        expected = unravel(jac.T @ (curved @ (jac @ ravel_pytree(v)[0])))
        linear = lambda p: {"h": p["w"][0], "s": p["w"][1], "n": p["b"][0]}
        return (
            (fg.gnvp(model, loss, (p, X), v), expected),
            (fg.gnvp(linear, loss, p, v), fg.hvp(lambda p: loss(linear(p)), p, v)),
        )

    for ours, expected in jax.jit(run)(PARAMS, v):
        close(ours, expected)


def test_gauss_newton_runs_a_looping_model_once():
    def deep(p):
        return lax.scan(lambda h, w: (jnp.tanh(h * w), None), X, p)[0]

    p = jnp.ones((5, 3))
    counts = primitives(lambda p: fg.gnvp(deep, lambda y: (y**2).sum(), p, p), p)
    assert counts.count(("tanh", 5)) == 1


# Diagonal and trace.


def test_diagonal_and_trace_equal_those_of_the_matrix():
    fun = lambda p: model(p, X)["n"] ** 2 + jnp.sin(p["w"]).sum() ** 2

    def run(p):
        flat, unravel = ravel_pytree(p)
        matrix = jax.hessian(lambda f: fun(unravel(f)))(flat)
        ours = [fg.hessian_diagonal(fun, chunk_size=size)(p) for size in (None, 1, 3)]
        return ours, fg.hessian_trace(fun)(p), unravel(jnp.diag(matrix)), jnp.trace(matrix)

    ours, trace, diagonal, expected = jax.jit(run)(PARAMS)
    for found in ours:
        close(found, diagonal)
    close(trace, expected)


def test_a_nan_stays_in_its_entry():
    fun = lambda a: jnp.sqrt(a[0]) + a[1] ** 3
    found = jax.jit(fg.hessian_diagonal(fun))(jnp.array([-1.0, 2.0]))
    assert jnp.isnan(found[0]) and found[1] == 12


def test_the_diagonal_keeps_dtypes_and_the_trace_is_wide():
    p = {"a": A.astype(jnp.bfloat16), "b": A.astype(jnp.float16), "c": A}
    fun = lambda p: sum(CUBE(leaf) for leaf in p.values())
    found = jax.jit(fg.hessian_diagonal(fun, chunk_size=4))(p)
    close(found, jax.tree.map(lambda x: 6 * x, p))
    assert jax.eval_shape(fg.hessian_trace(CUBE), p["a"]).dtype == jnp.float32


def test_random_signs_are_right_on_average_and_know_their_error():
    matrix = np.random.default_rng(0).normal(size=(6, 6))
    matrix += matrix.T
    fun = lambda p: (
        jnp.concatenate([p["a"], p["b"]]) @ matrix @ jnp.concatenate([p["a"], p["b"]]) / 2
    )
    p = {"a": jnp.ones(2), "b": jnp.ones(4)}
    n = 397  # with a remainder
    estimates = [fg.hutchinson(fun, n_samples=n, chunk_size=size) for size in (64, 1000)]
    found, whole = jax.jit(lambda p: [estimate(KEY, p) for estimate in estimates])(p)
    close(found, whole)
    assert abs(found.trace - np.trace(matrix)) < 4 * found.trace_error
    off = matrix - np.diag(np.diag(matrix))
    # The variance of one sample is twice the sum of the squares beside the diagonal.
    assert np.isclose(found.trace_error, np.sqrt(2 * (off**2).sum() / n), rtol=0.15)
    errors = np.concatenate([found.diagonal_error["a"], found.diagonal_error["b"]])
    assert np.allclose(errors, np.sqrt((off**2).sum(1) / n), rtol=0.15)


# What is refused.

INTS = {"w": jnp.ones(2), "n": jnp.arange(3)}


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (
            lambda: fg.hvp(lambda a: a**2, A, ONES),
            TypeError,
            r"one floating number; got float32\[2\]",
        ),
        (lambda: fg.vhp(lambda a: (a.sum(), a), A, ONES), TypeError, "without auxiliary"),
        (lambda: fg.hvp(lambda a: a.sum().astype(int), A, ONES), TypeError, "got int32"),
        (lambda: fg.hvp(CUBE, INTS, INTS), TypeError, r"got int32 in args\[0\]\['n'\]"),
        (lambda: fg.hvp(CUBE, (A, KEY), KEY, argnums=1), TypeError, r"random keys in args\[1\]"),
        (lambda: fg.hvp(CUBE, A, jnp.ones(3)), ValueError, r"float32\[3\] for args\[0\], which is"),
        (lambda: fg.vhp(CUBE, A, ONES.astype(jnp.bfloat16)), ValueError, r"got bfloat16\[2\]"),
        (lambda: fg.hvp(CUBE, A, (ONES,)), ValueError, "direction has the structure"),
        (lambda: fg.hvp(CUBE, A, A, argnums=1), ValueError, "got 1 for 1 of them"),
        (lambda: fg.hvp(CUBE, A, A, argnums=()), ValueError, "argnums are places"),
        (lambda: fg.hvp(CUBE, A, (A, A), argnums=(0, -1)), ValueError, "each argument once"),
        (lambda: fg.hvp(CUBE, {"f": jnp.sin}, A), TypeError, r"a .*Function in args\[0\]\['f'\]"),
        (lambda: fg.hvp(CUBE, {"f": "float32"}, A), TypeError, r"got a str in args\[0\]\['f'\]"),
        (lambda: fg.jacrev(lambda p: p["w"])(INTS), TypeError, r"jacrev: .*args\[0\]\['n'\]"),
        (
            lambda: fg.jacfwd(lambda a: {"i": jnp.argmax(a)})(A),
            TypeError,
            r"int32 in output\['i'\]",
        ),
        (lambda: fg.jacrev(lambda a: a * 1j)(A), TypeError, "complex64 in output. Pass holomor"),
        (lambda: fg.jacfwd(lambda a: a)(A * 1j), TypeError, "seeded side is real"),
        (lambda: fg.jacrev(lambda a: a, holomorphic=True)(A), TypeError, "arguments are complex"),
        (lambda: fg.jacfwd(jnp.abs, holomorphic=True)(A * 1j), TypeError, "outputs are complex"),
        (lambda: fg.jacfwd(CUBE, chunk_size=-1), ValueError, "jacfwd: chunk_size is a positive"),
        (lambda: fg.hessian(CUBE, chunk_size=True), ValueError, "got True"),
        (lambda: fg.hessian_trace(jnp.abs)(A * 1j), TypeError, "hessian_trace: arguments are comp"),
        (lambda: fg.hutchinson(CUBE, n_samples=1), ValueError, "n_samples is 2 or more"),
        (lambda: fg.hutchinson(CUBE, n_samples=2)(KEY, A * 1j), TypeError, "arguments are real"),
        (lambda: fg.gnvp(jnp.argmax, CUBE, A, A), TypeError, "gnvp: outputs of model are floating"),
        (lambda: fg.gnvp(jnp.sin, jnp.cos, A, A), TypeError, "gnvp: loss returns one floating"),
    ],
)
def test_what_cannot_be_is_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()
