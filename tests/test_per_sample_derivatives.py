"""A derivative through per-sample gradients: right, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.flatten_util import ravel_pytree

import funcgrad as fg
from conftest import DEEP, PROGRAMS
from programs import SHAPES, Program, programs
from test_per_sample import assert_equal, draw, two_layer_inputs, two_layers

# What comes of the samples, and the same from gradients in memory.
KEY = jax.random.key(0)


def scalar(tree):
    """One number of a tree, whose derivative meets every entry."""
    leaves = jax.tree.leaves(tree)
    return sum(
        jnp.sum(jnp.sin(leaf + jnp.arange(leaf.size).reshape(leaf.shape))) for leaf in leaves
    )


def of_samples(samples, params, name):
    return {
        "norms": lambda: samples.norms(),
        "leaf_norms": lambda: samples.leaf_norms(),
        "clipped_sum": lambda: samples.clipped_sum(0.5),
        "dots": lambda: samples.dots(params),
        "gram": lambda: samples.gram(),
        "variance": lambda: samples.variance(),
        "project": lambda: samples.project(KEY, 8),
        "materialize": lambda: samples.materialize(),
    }[name]()


def of_rows(rows, params, name):
    n = len(jax.tree.leaves(rows)[0])
    flat = jnp.concatenate([g.reshape(n, -1) for g in jax.tree.leaves(rows)], 1)
    norm = lambda g: jnp.sqrt(jnp.sum(jnp.square(g.reshape(n, -1)), 1))
    given = lambda p, r: sum(jax.tree.leaves(jax.tree.map(jnp.vdot, p, r)))
    scales = jnp.minimum(1, 0.5 / norm(flat))
    return {
        "norms": lambda: norm(flat),
        "leaf_norms": lambda: jax.tree.map(norm, rows),
        "clipped_sum": lambda: jax.tree.map(lambda g: jnp.tensordot(scales, g, 1), rows),
        "dots": lambda: flat @ jnp.concatenate([p.ravel() for p in jax.tree.leaves(params)]),
        "gram": lambda: flat @ flat.T,
        "variance": lambda: jax.tree.map(lambda g: jnp.var(g, 0, ddof=1), rows),
        "project": lambda: (
            flat
            @ fg.per_sample(given)(
                params, jax.vmap(ravel_pytree(params)[1])(jnp.eye(flat.shape[1]))
            ).project(KEY, 8)
        ),
        "materialize": lambda: rows,
    }[name]()


NAMES = ("norms", "leaf_norms", "clipped_sum", "dots", "gram", "variance", "project", "materialize")


@pytest.mark.parametrize("road", ["gram", "direct"])
def test_by_what_all_samples_share_it_is_right_for_every_method(x64, road):
    params, x = two_layer_inputs()

    def loss(p, x, c):
        return two_layers({"w": p["w"] * c[0], "b": p["b"] + c[1], "v": jnp.sin(p["v"] * c[2])}, x)

    def ours(c):
        samples = fg.per_sample(lambda p, x: loss(p, x, c), road=road)(params, x)
        return jnp.stack([scalar(of_samples(samples, params, name)) for name in NAMES])

    def theirs(c):
        rows = jax.vmap(jax.grad(loss), (None, 0, None))(params, x, c)
        return jnp.stack([scalar(of_rows(rows, params, name)) for name in NAMES])

    c = jnp.array([1.3, 0.2, 0.7])
    # In every run the derivative of one sum of all, each with a factor of its own.
    factors = jnp.eye(len(NAMES)) if DEEP else 1 + draw(0, 1, len(NAMES)) ** 2

    def both(c):
        grads = [jax.vjp(f, c)[1] for f in (ours, theirs)]
        return [jnp.stack([grad(factor)[0] for factor in factors]) for grad in grads]

    got, expected = jax.jit(both)(c)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=PROGRAMS // 4 if DEEP else 2)
@given(program=programs(max_size=4))
def test_generated_programs_by_a_scale_of_their_parameters(program: Program):
    with jax.enable_x64(True):
        params, batch = program.params(np.float64), program.inputs(np.float64, batch=2)
        scales = dict(zip(SHAPES, 1 + 0.1 * draw(0, len(SHAPES)), strict=True))
        loss = lambda c: lambda p, *s: program.loss({k: p[k] * c[k] for k in p}, *s)
        names = ("norms", "clipped_sum", "dots")

        def ours(c):
            samples = fg.per_sample(loss(c), road="gram")(params, *batch)
            # A norm of 0 has no derivative.
            return {k: of_samples(samples, params, k) for k in names} | {
                "norms": samples.norms() ** 2
            }

        def theirs(c):
            rows = jax.vmap(jax.grad(loss(c)), (None, 0, 0))(params, *batch)
            norms = of_rows(rows, params, "norms")
            return {k: of_rows(rows, params, k) for k in names} | {"norms": norms**2}

        def both(c):
            found, expected = (jax.grad(lambda c, f=f: scalar(f(c)))(c) for f in (ours, theirs))
            return found, expected, theirs(c)["norms"]

        try:
            got, expected, squares = jax.jit(both)(scales)
        except NotImplementedError:
            return  # a loop of unknown length, or a rule that refuses
        if np.min(squares) > 1e-12:
            assert_equal(got, expected, 1e-7)


# The pass over the samples is what refuses, so that one method stands for all.
@pytest.mark.parametrize("name", NAMES if DEEP else ["norms"])
def test_by_the_parameters_and_the_batch_it_is_refused_for_every_method(name):
    params, x = two_layer_inputs(dtype=jnp.float32)
    run = fg.per_sample(two_layers, road="gram")
    for wrt in (0, 1):
        with pytest.raises(NotImplementedError, match=r"not differentiable.*per_sample_grads"):
            jax.grad(lambda p, x: scalar(of_samples(run(p, x), params, name)), wrt)(params, x)


def test_by_parameters_that_come_in_beside_it_is_refused_or_right(x64):
    # Through a closure, JAX differentiates the loss itself; nothing may be lost on the way.
    params, x = two_layer_inputs()

    def ours(v):
        samples = fg.per_sample(lambda p, x: two_layers({**p, "v": v}, x))
        return samples({"w": params["w"], "b": params["b"]}, x).norms().sum()

    def theirs(v):
        loss = lambda p, x: two_layers({**p, "v": v}, x)
        rows = jax.vmap(jax.grad(loss), (None, 0))({"w": params["w"], "b": params["b"]}, x)
        return of_rows(rows, params, "norms").sum()

    got, expected = jax.jit(lambda v: (jax.grad(ours)(v), jax.grad(theirs)(v)))(params["v"])
    assert_equal(got, expected, 1e-9)


def test_by_weights_bounds_and_directions_it_is_right(x64):
    params, x = two_layer_inputs()
    samples = fg.per_sample(two_layers, road="gram")(params, x)
    rows = jax.vmap(jax.grad(two_layers), (None, 0))(params, x)
    total = lambda w: scalar(samples.weighted_sum(w))
    expected = lambda w: scalar(jax.tree.map(lambda g: jnp.tensordot(w, g, 1), rows))
    w = jnp.array([0.5, -1.0, 2.0])
    got = jax.jit(lambda w, d: (jax.grad(total)(w), jax.grad(lambda d: samples.dots(d)[1])(d)))
    second = jax.tree.map(lambda g: g[1], rows)
    assert_equal(got(w, params), (jax.jit(jax.grad(expected))(w), second), 1e-10)


def test_in_a_loop_that_is_differentiated_it_is_refused(x64):
    params, x = two_layer_inputs()

    def train(params):
        def step(p, _):
            mean = fg.per_sample(two_layers)(p, x).clipped_sum(1.0)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, mean), None

        return scalar(lax.scan(step, params, length=2)[0])

    with pytest.raises(NotImplementedError, match="not differentiable"):
        jax.grad(train)(params)
