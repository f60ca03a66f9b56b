"""Per-sample gradients in factored form, against a loop over the samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

import funcgrad as fg
from conftest import DEEP, PROGRAMS
from programs import Program, programs


def draw(seed, *shape, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def loop(loss, params, *batch):
    """The gradients of the samples one by one, stacked: what everything is compared with."""
    one, n = jax.jit(jax.grad(loss)), len(jax.tree.leaves(batch)[0])
    # Cut in NumPy, which has nothing to compile; keys have no other form.
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    batch = jax.tree.map(lambda leaf: leaf if is_key(leaf) else np.asarray(leaf), batch)
    rows = [
        jax.device_get(one(params, *jax.tree.map(lambda leaf, i=i: leaf[i], batch)))
        for i in range(n)
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def from_rows(rows, weights, direction):
    """What ``Samples`` computes, from materialised gradients; in NumPy."""
    n, weights = len(weights), np.asarray(weights)
    rows = jax.tree.map(lambda g: g.astype(np.promote_types(g.dtype, np.float32)), rows)
    flat = np.concatenate([g.reshape(n, -1) for g in jax.tree.leaves(rows)], 1)
    straight = np.concatenate([np.asarray(d).ravel() for d in jax.tree.leaves(direction)])
    return {
        "norms": np.linalg.norm(flat, axis=1),
        "leaf_norms": jax.tree.map(lambda g: np.linalg.norm(g.reshape(n, -1), axis=1), rows),
        "weighted_sum": jax.tree.map(lambda g: np.tensordot(weights, g, 1), rows),
        "dots": np.real(flat @ straight),
        "gram": np.real(flat.conj() @ flat.T),
        "variance": jax.tree.map(
            lambda g: np.sum(np.abs(g - g.mean(0)) ** 2, 0) / max(1, n - 1), rows
        ),
    }


def from_samples(samples, weights, direction, everything=True):
    found = {
        "leaf_norms": samples.leaf_norms(),
        "weighted_sum": samples.weighted_sum(weights),
        "dots": samples.dots(direction),
    }
    if everything:
        found["norms"] = samples.norms()
        found |= {"gram": samples.gram(), "variance": samples.variance()}
    return found


def assert_equal(got, expected, rtol):
    """Equal up to ``rtol`` of the largest number of each array, or of 1."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    paths = jax.tree_util.tree_leaves_with_path(jax.device_get(expected))
    for (path, b), a in zip(paths, jax.tree.leaves(jax.device_get(got)), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=rtol * max(1, np.max(np.abs(b), initial=0)),
            err_msg=jax.tree_util.keystr(path),
        )  # fmt: skip


def check(
    loss, params, *batch, road="gram", takes=None, rtol=1e-10, rows=None, everything=False,
    **options,
):  # fmt: skip
    """What comes of ``Samples`` equals the loop; ``takes`` is the road of each leaf, or of all.

    Norms of leaves, a weighted sum and products with a direction; ``everything`` adds the norms
    over all leaves, the products between samples and the variance.  Returns the road of each leaf.
    """
    rows = loop(loss, params, *batch) if rows is None else jax.device_get(rows)
    n = len(jax.tree.leaves(rows)[0])
    weights = draw(1, n, dtype=jnp.result_type(float))
    direction = jax.tree.map(lambda g: draw(2, *g.shape[1:], dtype=g.dtype), rows)
    taken = {}

    def ours(params, *batch):
        samples = fg.per_sample(loss, road=road, **options)(params, *batch)
        taken.update({leaf.name.removeprefix("params"): leaf.road for leaf in samples.explain()})
        return from_samples(samples, weights, direction, everything)

    got, expected = jax.jit(ours)(params, *batch), from_rows(rows, weights, direction)
    assert_equal(got, {name: expected[name] for name in got}, rtol)
    if isinstance(takes, str):
        assert set(taken.values()) == {takes}, taken
    elif takes is not None:
        assert {name: taken[f"['{name}']"] for name in takes} == takes
    return taken


ROADS = ("gram", "direct", "materialize", "auto")


# Each costs a compilation of about a second; in parts, which workers share.
@pytest.mark.parametrize("part", range(8 if DEEP else 1))
@settings(max_examples=PROGRAMS // 4 if DEEP else PROGRAMS // 3)
@given(program=programs())
def test_generated_programs_equal_the_loop(program: Program, part: int):
    with jax.enable_x64(True):
        params, batch = program.params(np.float64), program.inputs(np.float64, batch=3)
        road = ROADS[program.seed % len(ROADS)]
        check(program.loss, params, *batch, road=road, everything=True)


def two_layers(p, x):
    return jnp.sum(jnp.sin(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]))


def two_layer_inputs(n=3, dtype=jnp.float64):
    params = {"w": draw(0, 4, 5, dtype=dtype), "b": draw(1, 5, dtype=dtype)}
    return {**params, "v": draw(2, 5, 3, dtype=dtype)}, draw(3, n, 2, 4, dtype=dtype)


@pytest.mark.parametrize(
    ("road", "takes"),
    [
        ("gram", {"w": "gram", "v": "gram", "b": "value"}),
        ("direct", {"w": "direct", "v": "direct", "b": "value"}),
        ("materialize", {"w": "materialize", "v": "materialize", "b": "materialize"}),
        ("auto", {"b": "value"}),
    ],
)
def test_every_road_gives_the_same_and_is_taken_when_asked_for(x64, road, takes):
    check(two_layers, *two_layer_inputs(), road=road, takes=takes, everything=True)


def test_float32_results_are_float32_to_its_rounding():
    params, x = two_layer_inputs(dtype=jnp.float32)
    check(two_layers, params, x, rtol=1e-5, everything=True)
    samples = fg.per_sample(two_layers, road="gram")(params, x)
    assert {leaf.dtype for leaf in jax.tree.leaves((samples.norms(), samples.mean()))} == {
        jnp.dtype(jnp.float32)
    }


def test_automatic_roads_follow_the_shapes():
    # Above 4,096 numbers a factored road pays: Gram while terms are few, else direct.
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]))
    roads = {}
    for terms in (1, 4, 256):
        run = lambda w, x: fg.per_sample(loss)({"w": w}, x).explain()
        trace = lambda terms=terms, run=run: run(jnp.zeros((80, 80)), jnp.zeros((2, terms, 80)))
        roads[terms] = trace()[0].road
    assert roads == {1: "product", 4: "gram", 256: "direct"}


def test_sums_means_moments_and_noise_scale_come_from_the_rows(x64):
    params, x = two_layer_inputs(n=4)
    rows = loop(two_layers, params, x)
    flat = np.concatenate([np.reshape(g, (4, -1)) for g in jax.tree.leaves(rows)], 1)

    @jax.jit
    def ours(params, x):
        s = fg.per_sample(two_layers, road="gram")(params, x)
        return s.sum(), s.mean(), s.second_moment(), s.noise_scale(), s.top(2), s.materialize(["w"])

    total, mean, second, noise, (top, which), chosen = ours(params, x)
    assert_equal(total, jax.tree.map(lambda g: g.sum(0), rows), 1e-10)
    assert_equal(mean, jax.tree.map(lambda g: g.mean(0), rows), 1e-10)
    assert_equal(second, jax.tree.map(lambda g: (g**2).mean(0), rows), 1e-10)
    trace = flat.var(axis=0, ddof=1).sum()
    np.testing.assert_allclose(noise.noise, trace, rtol=1e-10)
    np.testing.assert_allclose(noise.signal, (flat.mean(0) ** 2).sum() - trace / 4, rtol=1e-8)
    np.testing.assert_allclose(noise.scale, noise.noise / noise.signal, rtol=1e-10)
    norms = np.linalg.norm(flat, axis=1)
    np.testing.assert_array_equal(which, np.argsort(-norms)[:2])
    np.testing.assert_allclose(top, np.sort(norms)[::-1][:2], rtol=1e-10)
    assert chosen["v"] is None
    assert_equal(chosen["w"], rows["w"], 1e-10)


def test_norms_of_groups_are_over_the_leaves_of_each(x64):
    params, x = two_layer_inputs()
    samples = fg.per_sample(two_layers, road="gram")(params, x)
    leaf = samples.leaf_norms()
    groups = samples.norms({"w": 0, "b": 0, "v": 0})
    assert_equal(groups, leaf, 1e-12)
    nested = lambda p, x: two_layers({**p["a"], **p["z"]}, x)
    split = {"a": {"w": params["w"], "b": params["b"]}, "z": {"v": params["v"]}}
    groups = fg.per_sample(nested, road="gram")(split, x).norms({"a": 0, "z": 0})
    np.testing.assert_allclose(groups["a"], jnp.hypot(leaf["w"], leaf["b"]), rtol=1e-12)
    np.testing.assert_allclose(groups["z"], leaf["v"], rtol=1e-12)


def test_clipped_sum_scales_long_gradients_and_keeps_short_ones(x64):
    params, x = two_layer_inputs(n=4)
    rows = loop(two_layers, params, x)
    norms = from_rows(rows, jnp.ones(4), params)["norms"]
    bound = float(jnp.median(norms))
    got = jax.jit(lambda p, x: fg.per_sample(two_layers, road="gram")(p, x).clipped_sum(bound))(
        params, x
    )
    factors = jnp.minimum(1, bound / norms)
    assert 0 < int((factors < 1).sum()) < 4
    assert_equal(got, jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), rows), 1e-10)


def test_gram_between_two_batches_is_the_product_of_their_rows(x64):
    params, x = two_layer_inputs(n=3)
    other = draw(7, 2, 2, 4)
    flat = lambda x: np.concatenate(
        [g.reshape(len(x), -1) for g in jax.tree.leaves(loop(two_layers, params, x))], 1
    )

    @jax.jit
    def ours(params, x, other):
        run = fg.per_sample(two_layers, road="gram")
        return run(params, x).gram(run(params, other))

    assert_equal(ours(params, x, other), flat(x) @ flat(other).T, 1e-10)


def test_projections_keep_inner_products_on_average_and_agree_between_batches(x64):
    params, x = two_layer_inputs(n=3)
    dim, key = 4000, jax.random.key(0)

    @jax.jit
    def ours(params, x):
        samples = fg.per_sample(two_layers)(params, x)
        return samples.project(key, dim), samples.gram()

    projected, gram = ours(params, x)
    again, _ = ours(params, x[::-1])
    assert projected.shape == (3, dim)
    np.testing.assert_allclose(again, projected[::-1], rtol=1e-10)
    # Products of 4,000 normal numbers: a standard deviation of about 2%.
    bound = 0.1 * float(jnp.max(jnp.abs(gram)))
    np.testing.assert_allclose(projected @ projected.T, gram, atol=bound)


def test_the_weights_of_a_sum_and_max_norm_may_be_traced_and_directions_are_linear(x64):
    params, x = two_layer_inputs()
    run = jax.jit(lambda p, x, w, c: (
        fg.per_sample(two_layers, road="gram")(p, x).weighted_sum(w),
        fg.per_sample(two_layers, road="gram")(p, x).clipped_sum(c),
    ))  # fmt: skip
    once, clipped = run(params, x, jnp.ones(3), 0.5)
    twice, more = run(params, x, 2 * jnp.ones(3), 1e9)
    assert_equal(twice, jax.tree.map(lambda g: 2 * g, once), 1e-12)
    assert_equal(more, once, 1e-12)
    samples = fg.per_sample(two_layers, road="gram")(params, x)
    assert_equal(samples.clipped_sum(0.5), clipped, 1e-12)
    assert_equal(
        samples.dots(jax.tree.map(lambda p: 3 * p, params)), 3 * samples.dots(params), 1e-12
    )


def test_samples_leave_one_jit_and_enter_another_without_compiling_again(x64):
    params, x = two_layer_inputs()
    make = jax.jit(lambda p, x, c: fg.per_sample(
        lambda p, x: two_layers(p, x @ jax.jit(lambda a: a * c)(jnp.eye(4))), road="gram"
    )(p, x))  # fmt: skip
    use = jax.jit(lambda samples: (samples.norms(), samples.mean()))
    for scale in (1.0, 2.0):
        norms, mean = use(make(params, x, scale))
        rows = loop(two_layers, params, scale * x)
        np.testing.assert_allclose(norms, from_rows(rows, jnp.ones(3), params)["norms"], rtol=1e-10)
        assert_equal(mean, jax.tree.map(lambda g: g.mean(0), rows), 1e-10)
    assert use._cache_size() == 1


def test_no_tracer_is_kept(x64):
    params, x = two_layer_inputs()
    with jax.checking_leaks():
        jax.jit(lambda p, x: fg.per_sample(two_layers, road="gram")(p, x).norms())(params, x)


def test_under_vmap_over_parameters_and_batches_every_member_is_its_own(x64):
    params, x = two_layer_inputs()
    both = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    xs = jnp.stack([x, draw(9, *x.shape)])

    @jax.jit
    def ours(both, xs):
        run = fg.per_sample(two_layers, road="gram")
        return jax.vmap(lambda p, x: (run(p, x).norms(), run(p, x).clipped_sum(0.5)))(both, xs)

    norms, sums = ours(both, xs)
    for i in range(2):
        rows = loop(two_layers, jax.tree.map(lambda p, i=i: p[i], both), xs[i])
        expected = from_rows(rows, jnp.ones(3), params)["norms"]
        np.testing.assert_allclose(norms[i], expected, rtol=1e-10)
        clipped = jax.tree.map(
            lambda g, e=expected: jnp.tensordot(jnp.minimum(1, 0.5 / e), g, 1), rows
        )
        assert_equal(jax.tree.map(lambda s, i=i: s[i], sums), clipped, 1e-10)


@pytest.mark.parametrize("road", ["gram", "auto"])
def test_samples_stacked_by_vmap_are_refused_outside_of_it(x64, road):
    # With as many members as samples, shapes alone do not tell; with every leaf a "value",
    # nothing else does.
    loss = lambda p, x: jnp.sum(jnp.sin(x * p["b"])) if road == "auto" else two_layers(p, x)
    params, x = two_layer_inputs()
    params = {"b": params["b"][:4]} if road == "auto" else params
    stacked = jax.tree.map(lambda p: jnp.stack([p, 2 * p, 3 * p]), params)
    samples = jax.vmap(fg.per_sample(loss, road=road), in_axes=(0, None))(stacked, x)
    for use in (lambda s: s.norms(), lambda s: s.sum(), lambda s: s.dots(params)):
        with pytest.raises(ValueError, match="vmap"):
            use(samples)
    np.testing.assert_allclose(
        jax.vmap(lambda s: s.norms())(samples)[1],
        fg.per_sample(loss, road=road)(jax.tree.map(lambda p: 2 * p, params), x).norms(),
        rtol=1e-10,
    )


def test_inside_scan_each_step_has_its_own_samples(x64):
    params, x = two_layer_inputs()

    @jax.jit
    def train(params, xs):
        def step(p, x):
            samples = fg.per_sample(two_layers, road="gram")(p, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, samples.mean()), samples.norms()

        return lax.scan(step, params, xs)

    _, norms = train(params, jnp.stack([x, x]))
    mean = jax.tree.map(lambda g: g.mean(0), loop(two_layers, params, x))
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, mean)
    for p, got in zip((params, moved), norms, strict=True):
        rows = loop(two_layers, p, x)
        np.testing.assert_allclose(got, from_rows(rows, jnp.ones(3), p)["norms"], rtol=1e-10)


def test_a_gradient_or_tangent_through_it_is_refused():
    params, x = two_layer_inputs(dtype=jnp.float32)
    run = fg.per_sample(two_layers, road="gram")
    words = "per_sample: its result is not differentiable.*per_sample_grads"
    with pytest.raises(NotImplementedError, match=words):
        jax.grad(lambda p: run(p, x).norms().sum())(params)
    with pytest.raises(NotImplementedError, match=words):
        jax.jit(jax.grad(lambda x: run(params, x).clipped_sum(1.0)["b"].sum()))(x)
    with pytest.raises(NotImplementedError, match=words):
        jax.jvp(lambda p: run(p, x).values, (params,), (params,))


def test_a_gradient_with_respect_to_what_all_samples_share_is_right_or_refused(x64):
    params, x = two_layer_inputs()
    loss = lambda p, x, c: two_layers(p, jnp.tanh(x) * c)
    ours = lambda c: fg.per_sample(loss, in_axes=(0, None), road="gram")(params, x, c).norms().sum()

    def theirs(c):
        rows = jax.vmap(jax.grad(loss), (None, 0, None))(params, x, c)
        flat = [g.reshape(3, -1) for g in jax.tree.leaves(rows)]
        return jnp.linalg.norm(jnp.concatenate(flat, 1), axis=1).sum()

    c = draw(5, 4)
    try:
        got = jax.jit(jax.grad(ours))(c)
    except NotImplementedError:
        return
    assert_equal(got, jax.jit(jax.grad(theirs))(c), 1e-9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.weighted_sum(jnp.ones(2)), r"one weight per sample; got shape \(2,\) for 3"),
        (lambda s: s.dots({"w": jnp.ones(2)}), "dots: direction has the structure of params"),
        (
            lambda s: s.dots({"w": jnp.ones(2), "b": jnp.ones(5), "v": jnp.ones((5, 3))}),
            r"has the shapes of params; got \(2,\) for \(4, 5\)|got \(5,\)",
        ),
        (lambda s: s.clipped_sum(-1.0), r"max_norm is above 0; got -1.0"),
        (lambda s: s.norms({"w": 0}), "norms: groups"),
        (lambda s: s.materialize(["nothing"]), "materialize: leaves.*names none"),
    ],
    ids=["weights", "structure", "shapes", "max_norm", "groups", "leaves"],
)
def test_arguments_that_do_not_fit_are_refused_by_name(call, words):
    params, x = two_layer_inputs(dtype=jnp.float32)
    with pytest.raises(ValueError, match=words):
        call(fg.per_sample(two_layers)(params, x))


def test_a_misspelt_road_is_refused():
    # Under the tests' type checking by the annotation, elsewhere by the function.
    with pytest.raises((ValueError, TypeError), match="materialise"):
        fg.per_sample(two_layers, road="materialise")


def test_explain_names_the_leaf_its_uses_with_their_lines_and_why():
    params, x = two_layer_inputs(dtype=jnp.float32)
    by_name = {
        leaf.name: leaf for leaf in fg.per_sample(two_layers, road="gram")(params, x).explain()
    }
    leaf = by_name["params['w']"]
    assert leaf.shape == (4, 5)
    assert leaf.road == "gram"
    (site,) = leaf.sites
    assert site.startswith("dense at ")
    assert f"{__file__}:{two_layers.__code__.co_firstlineno + 1}" in site
    assert "two_layers" in site
    assert str(leaf).startswith("params['w'][4, 5]: gram (asked for); used at dense at ")
    many_terms = jnp.ones((3, 50, 4))
    small = fg.per_sample(two_layers)(params, many_terms).explain()[1]
    assert small.why == "it is small"


def test_explain_and_noise_scale_give_the_public_classes():
    samples = fg.per_sample(lambda w, x: jnp.tanh(x @ w).sum())(jnp.ones((2, 3)), jnp.eye(2))
    (road,) = samples.explain()
    assert isinstance(road, fg.LeafRoad)
    assert "params" in str(road)
    noise = samples.noise_scale()
    assert isinstance(noise, fg.NoiseScale)
    assert noise.scale == noise.noise / noise.signal
