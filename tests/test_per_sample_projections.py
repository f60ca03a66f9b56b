"""Random projections of per-sample gradients: one matrix, whatever road they are made by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.flatten_util import ravel_pytree

import funcgrad as fg
from conftest import DEEP, PROGRAMS
from funcgrad._per_sample import _products, _projections
from programs import Program, programs
from test_per_sample import draw, loop, two_layer_inputs, two_layers
from test_per_sample_cases import bumpy

KEY = jax.random.key(3)
TOKENS = jnp.array([[0, 1, 1, 4], [2, 6, 3, 2], [5, 5, 5, 5]])


def dot(params, rows):
    """A loss whose gradient is ``rows``, conjugated as JAX does where they are complex."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(rows), strict=True)
    return sum(jnp.real(jnp.sum(p * r)) for p, r in pairs)


def of_rows(params, rows, key=KEY, dim=32):
    """The projection of gradients that are given as they are."""
    return fg.per_sample(dot)(params, rows).project(key, dim)


def matrix(params, key=KEY, dim=32):
    """The matrix that projects, (numbers of params, dim), a row for each unit gradient."""
    flat, tree = ravel_pytree(params)
    return of_rows(params, jax.vmap(tree)(jnp.eye(flat.size, dtype=flat.dtype)), key, dim)


def flatten(rows):
    n = len(jax.tree.leaves(rows)[0])
    return np.concatenate([np.reshape(g, (n, -1)) for g in jax.tree.leaves(rows)], 1)


@pytest.fixture
def both_ways(monkeypatch):
    """A function's results with every product of factors formed, and with none."""

    def run(fun, *args):
        for formed in (True, False):
            monkeypatch.setattr(_projections, "_is_formed", lambda f, dim, formed=formed: formed)
            yield fun(*args)

    return run


def convolved(x, k, strides=(2, 1), **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x[None], k, strides, [(1, 1), (0, 1)], dimension_numbers=numbers, **options
    )


def recurrent(p, xs):
    step = lambda h, x: (jnp.tanh(h @ p["h"] + x @ p["i"]), None)
    return bumpy(lax.scan(step, jnp.zeros(4), xs)[0])


def scanned(p, x):
    return bumpy(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p, reverse=True)[0])


def scanned_convolutions(p, x):
    def layer(h, k):
        options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 2}
        return jnp.tanh(lax.conv_general_dilated(h[None], k, (1, 1), "SAME", **options)[0]), None

    return bumpy(lax.scan(layer, x, p)[0])


# A loss, its parameters and a batch: the factors reach the leaf in a different way in each.
CASES = {
    "layers and a bias": lambda: (two_layers, *two_layer_inputs()),
    "a tied embedding": lambda: (
        lambda p, t: bumpy(jnp.tanh(p["e"][t] @ p["w"]) @ p["e"].T),
        {"e": draw(0, 7, 4), "w": draw(1, 4, 4)},
        TOKENS,
    ),
    "a table turned and cut": lambda: (
        lambda p, t: bumpy(jnp.tanh(-2.0 * p[1].T[1:, ::2][t - 1])),
        draw(0, 2, 5, 9),
        TOKENS,
    ),
    "pairs of rows and columns": lambda: (
        lambda p, t: bumpy(jnp.sin(p[t[:3], :, t[1:]])),
        draw(0, 7, 3, 7),
        TOKENS,
    ),
    "one row": lambda: (lambda p, t: bumpy(jnp.sin(p[t[0]])), draw(0, 7, 3, 2), TOKENS),
    "windows, scales and a fixed axis": lambda: (
        lambda p, x: bumpy(jnp.sin(x @ p[1].T / 2) @ -p[0, :, 1:]),
        draw(0, 2, 4, 5),
        draw(1, 3, 2, 5),
    ),
    "heads": lambda: (
        lambda p, x: bumpy(jnp.einsum("thd,hdo->to", jnp.einsum("ti,hid->thd", x, p["a"]), p["b"])),
        {"a": draw(0, 2, 4, 3), "b": draw(1, 2, 3, 5)},
        draw(2, 3, 2, 4),
    ),
    "blocks": lambda: (
        lambda p, x: bumpy(jnp.einsum("tbi,obi->tbo", jnp.tanh(x), p)),
        draw(0, 5, 2, 4),
        draw(1, 3, 3, 2, 4),
    ),
    "a recurrent network": lambda: (
        recurrent,
        {"h": draw(0, 4, 4), "i": draw(1, 3, 4)},
        draw(2, 3, 5, 3),
    ),
    "scanned layers": lambda: (scanned, draw(0, 3, 4, 4), draw(1, 3, 5, 4)),
    "a convolution": lambda: (
        lambda p, x: bumpy(jnp.sin(convolved(x, p, rhs_dilation=(1, 2)))),
        draw(0, 3, 2, 4, 3),
        draw(1, 2, 6, 5, 4),
    ),
    "a grouped convolution with its kernel turned": lambda: (
        lambda p, x: bumpy(jnp.sin(convolved(x, p.transpose(3, 2, 1, 0), feature_group_count=2))),
        draw(0, 6, 2, 2, 3),
        draw(1, 2, 6, 5, 4),
    ),
    "scanned convolutions": lambda: (
        scanned_convolutions,
        draw(0, 2, 3, 3, 2, 4),
        draw(1, 2, 4, 3, 4),
    ),  # fmt: skip
    "what is formed anyway": lambda: (
        lambda p, x: bumpy(x @ (p["w"] * p["m"]) @ p["w"].reshape(5, 4) @ p["u"][::-1]),
        {"w": draw(0, 4, 5), "m": draw(1, 4, 5), "u": draw(2, 4, 4), "none": draw(3, 0, 2)},
        draw(4, 3, 2, 4),
    ),
    "numbers": lambda: (
        lambda p, x: bumpy(jnp.sin(p["a"] * x) + p["b"]),
        {"a": draw(0), "b": draw(1, 2), "unused": draw(2, 3)},
        draw(2, 3, 2),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_projection_is_one_matrix_times_the_gradient_and_products_are_theirs(
    x64, case, both_ways, monkeypatch
):
    loss, params, batch = CASES[case]()
    if case not in ("layers and a bias", "numbers"):
        monkeypatch.setattr(_products, "_BYTES", 1)  # one sample at a time

    def run(params, batch):
        mine, theirs = (
            fg.per_sample(loss, road="gram")(params, x) for x in (batch, batch[::-1][:2])
        )
        projected = list(both_ways(lambda: mine.project(KEY, 32)))
        return projected, matrix(params), mine.gram(), mine.gram(theirs)

    projected, sketch, *products = jax.jit(run)(params, batch)
    rows = flatten(loop(loss, params, batch))
    expected = rows @ sketch
    scale = np.max(np.abs(expected))
    assert scale > 1e-3
    for got in projected:
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12 * scale)
    exact = rows @ rows.T, rows @ rows[::-1][:2].T
    for got, expected in zip(products, exact, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12 * np.max(np.abs(exact[0])))


@pytest.mark.parametrize("road", ["gram", "direct"] if DEEP else ["gram"])
@pytest.mark.parametrize(
    "other",
    [
        lambda p, x: bumpy(jnp.tanh(x @ p)),
        lambda p, x: bumpy(jnp.tanh(x @ p.T)),
        lambda p, x: bumpy(jnp.tanh(x @ (3 * p))),
        lambda p, x: bumpy(jnp.tanh(x @ p)) + bumpy(p[1]),
    ],
    ids=["longer", "turned", "scaled", "used otherwise too"],
)
def test_products_with_gradients_of_another_loss_or_length(x64, road, other):
    loss = lambda p, x: bumpy(jnp.tanh(x @ p))
    p, batch, others = draw(0, 4, 4), draw(1, 3, 1, 4), draw(2, 2, 3, 4)
    others = others if other(p, others[0]) == loss(p, others[0]) else others[:, :1]

    def run(p, x, y):
        mine, theirs = (fg.per_sample(f, road=road)(p, z) for f, z in ((loss, x), (other, y)))
        return mine.gram(theirs), theirs.gram(mine)

    rows, other_rows = flatten(loop(loss, p, batch)), flatten(loop(other, p, others))
    got, turned = jax.jit(run)(p, batch, others)
    np.testing.assert_allclose(got, rows @ other_rows.T, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(turned, got.T, rtol=1e-10, atol=1e-12)


@settings(max_examples=PROGRAMS if DEEP else PROGRAMS // 12)
@given(program=programs())
def test_generated_programs_project_as_their_gradients_do(program: Program):
    with jax.enable_x64(True):
        params, batch = program.params(np.float64), program.inputs(np.float64, batch=3)

        def both(params, *batch):
            samples = fg.per_sample(program.loss, road="gram")(params, *batch)
            rows = fg.per_sample_grads(program.loss)(params, *batch).grads
            given = fg.per_sample(dot)(params, rows)
            return samples.project(KEY, 16), given.project(KEY, 16)

        got, expected = jax.jit(both)(params, *batch)
        scale = max(1, np.max(np.abs(expected)))
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10 * scale)


def test_the_matrix_does_not_depend_on_road_batch_chunks_or_what_is_frozen(x64, monkeypatch):
    params, x = two_layer_inputs(n=5)

    def run(params, x):
        def ours(x, **options):
            return fg.per_sample(two_layers, **options)(params, x).project(KEY, 20)

        whole = [ours(x, road=road) for road in ("auto", "direct", "materialize")]
        cut, frozen = ours(x[3:]), ours(x, frozen=["b"])
        monkeypatch.setattr(_projections, "_CHUNK_BYTES", 5000)
        return [*whole, ours(x, road="gram")], cut, frozen, matrix(params, dim=20)

    # One program, in which XLA draws the matrix once.
    whole, cut, frozen, sketch = jax.jit(run)(params, x)
    rows = loop(two_layers, params, x)
    expected = flatten(rows) @ sketch
    for got in whole:
        np.testing.assert_allclose(got, expected, rtol=1e-10)
    np.testing.assert_allclose(cut, expected[3:], rtol=1e-10)
    rows["b"] = np.zeros_like(rows["b"])
    np.testing.assert_allclose(frozen, flatten(rows) @ sketch, rtol=1e-10)


def test_another_key_is_another_matrix_and_old_keys_do(x64):
    params, x = two_layer_inputs()
    run = jax.jit(lambda key: fg.per_sample(two_layers)(params, x).project(key, 20))
    one, two = (run(jax.random.key(i)) for i in (0, 1))
    assert np.max(np.abs(one - two)) > 0.1
    np.testing.assert_array_equal(run(jax.random.PRNGKey(0)), one)


@pytest.mark.parametrize("alike", [True, False], ids=["rank one", "full rank"])
def test_inner_products_are_kept_on_average_with_the_variance_that_is_stated(x64, alike):
    params = {"w": jnp.zeros((6, 5)), "b": jnp.zeros(4), "k": jnp.zeros((3, 2, 4))}
    x, y = (jax.tree.map(lambda p, i=i: draw(i, *p.shape), params) for i in (0, 1))
    if alike:  # the worst of a leaf: all that collides along one axis does so along the other
        x["w"], y["w"] = (draw(i, 6, 1) @ draw(i + 2, 1, 5) for i in (0, 1))
    rows = jax.tree.map(lambda a, b: jnp.stack([a, b]), x, y)
    dim, n_keys = 16, 3000

    @jax.jit
    def products(keys):
        samples = fg.per_sample(dot)(params, rows)
        projected = jax.vmap(lambda key: samples.project(key, dim))(keys)
        return jnp.einsum("kid,kjd->kij", projected, projected)

    found = np.asarray(products(jax.random.split(jax.random.key(0), n_keys)))
    flat = flatten(rows)
    exact, norms = flat @ flat.T, np.linalg.norm(flat, axis=1)
    stated = (2 + 3**3) / dim * np.outer(norms, norms) ** 2
    assert np.all(found.var(0) < stated)
    assert np.all(np.abs(found.mean(0) - exact) < 5 * found.std(0) / np.sqrt(n_keys))


def test_a_gradient_of_many_terms_has_the_variance_of_normal_directions(x64):
    params, row = {"w": jnp.zeros((40, 40))}, {"w": draw(0, 1, 40, 40)}
    keys = jax.random.split(jax.random.key(0), 1000)
    run = lambda key: jnp.sum(fg.per_sample(dot)(params, row).project(key, 32) ** 2)
    squares = np.asarray(jax.jit(jax.vmap(run))(keys)) / np.sum(np.square(row["w"]))
    assert np.isclose(squares.var(), 2 / 32, rtol=0.25)


def test_any_number_of_dimensions(x64, both_ways):
    params, x = two_layer_inputs()
    dims = (1, 7, 1000)

    def run(params, x):
        samples = fg.per_sample(two_layers, road="gram")(params, x)
        project = lambda: [samples.project(KEY, dim) for dim in dims]
        return list(both_ways(project)), [matrix(params, dim=dim) for dim in dims]

    projected, sketches = jax.jit(run)(params, x)
    rows = flatten(loop(two_layers, params, x))
    for results in projected:
        for dim, got, sketch in zip(dims, results, sketches, strict=True):
            assert got.shape == (3, dim)
            np.testing.assert_allclose(got, rows @ sketch, atol=1e-10)


def test_no_dimensions_are_refused():
    run = lambda p, x: fg.per_sample(two_layers)(p, x).project(KEY, 0)
    with pytest.raises(ValueError, match="project: dim is a positive number; got 0"):
        jax.eval_shape(run, *two_layer_inputs(dtype=jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_low_precision_is_projected_in_float32(dtype, both_ways):
    params, x = two_layer_inputs(dtype=dtype)
    samples = jax.jit(fg.per_sample(two_layers, road="gram"))(params, x)
    to_float32 = lambda tree: jax.tree.map(lambda a: np.asarray(a, np.float32), tree)
    rows, wide = to_float32(jax.jit(lambda s: s.materialize())(samples)), to_float32(params)

    def run(samples, rows):
        return list(both_ways(lambda: samples.project(KEY, 32))), of_rows(wide, rows)

    projected, expected = jax.jit(run)(samples, rows)
    for got in projected:
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, atol=1e-5 * float(jnp.max(jnp.abs(got))))


def test_complex_gradients_keep_the_real_part_of_their_inner_products(x64):
    params = {"z": draw(0, 3, 4) + 1j * draw(1, 3, 4), "w": draw(2, 3)}
    x = draw(3, 2, 3)
    loss = lambda p, x: jnp.sum(jnp.abs(jnp.sin(x * p["w"]) @ p["z"]) ** 2)
    dim, keys = 16, jax.random.split(jax.random.key(0), 2000)

    @jax.jit
    def ours(params, x):
        samples = fg.per_sample(loss)(params, x)
        return jax.vmap(lambda key: samples.project(key, dim))(keys), samples.gram()

    projected, gram = ours(params, x)
    products = np.einsum("kid,kjd->kij", projected, projected)
    assert np.all(np.abs(products.mean(0) - gram) < 5 * products.std(0) / np.sqrt(len(keys)))


def largest(fun, *args):
    """The most numbers that one value of the program holds."""
    sizes = [0]

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            sizes.extend(var.aval.size for var in eqn.outvars)
            for param in jax.tree.leaves(list(eqn.params.values())):
                inner = getattr(param, "jaxpr", param)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jax.make_jaxpr(fun)(*args).jaxpr)
    return max(sizes)


def test_no_direction_is_drawn_and_no_table_is_formed():
    # 128 directions of the table alone were 640 million numbers; its gradients 40 million.
    table = jax.ShapeDtypeStruct((1_000_000, 5), jnp.float32)
    ids = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    loss = lambda w, t: jnp.sum(jnp.sin(w[t]))
    run = lambda w, t: fg.per_sample(loss)(w, t).project(KEY, 128)
    assert largest(run, table, ids) <= 5_000_000


def test_a_wide_layer_goes_by_transforms_and_its_gradient_is_not_formed():
    w, x = jax.ShapeDtypeStruct((2000, 2000), jnp.float32), jnp.zeros((4, 3, 2000))
    run = lambda w, x: fg.per_sample(lambda w, x: jnp.sum(jnp.tanh(x @ w)))(w, x).project(KEY, 64)
    assert largest(run, w, x) == 2000 * 2000  # the parameter
    assert "fft" in str(jax.make_jaxpr(run)(w, x))


def test_nbytes_is_what_the_samples_keep_of_the_pass(x64):
    params, x = two_layer_inputs(n=3)
    # For each term x and the cotangent of x @ w, then those of the second layer; and b's gradient.
    each = 2 * (4 + 5 + 5 + 3) + 5
    for road in ("gram", "materialize"):
        run = fg.per_sample(two_layers, road=road)
        assert jax.jit(run)(params, x).nbytes == 3 * 8 * each
        assert jax.eval_shape(run, params, x).nbytes == 3 * 8 * each
    assert jax.eval_shape(run, params, x[:0]).nbytes == 0
