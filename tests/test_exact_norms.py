"""Norms of samples whose numbers are of any size, by every road, beside float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import funcgrad as fg
from conftest import DEEP
from funcgrad._per_sample._sums import norm_over, norm_slack, scaled_norm

N, T, D, VOCAB = 64, 3, 5, 7
LARGEST = float(np.finfo(np.float32).max)
SHAPES = {
    "product": (D, D),
    "bias": (D,),
    "long": (600,),
    "terms": (D, D),
    "kernel": (2, D, D),
    "rows": (VOCAB, D),
    "stack": (4, D, D),
    "computed": (D,),
}


def loss(p, x, y, ids):
    """Linear in what it is given, so that no number but the gradients is large."""

    def layer(total, both):
        weight, left, right = both
        return total + jnp.vdot(left @ weight, right), None

    convolved = lax.conv_general_dilated(
        x["kernel"][None], p["kernel"], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return (
        jnp.vdot(x["product"] @ p["product"], y["product"])
        + jnp.vdot(p["bias"], y["bias"])
        + jnp.vdot(p["long"], y["long"])
        + jnp.vdot(x["terms"] @ p["terms"], y["terms"])
        + jnp.vdot(convolved, y["kernel"])
        + jnp.vdot(p["rows"][ids], y["rows"])
        + lax.scan(layer, jnp.zeros(()), (p["stack"], x["stack"], y["stack"]))[0]
        + jnp.vdot(jnp.tanh(p["computed"]), y["computed"])
    )


X = {"product": (D,), "terms": (T, D), "kernel": (T, D), "stack": (4, D)}
Y = {**X, "bias": (D,), "long": (600,), "kernel": (1, T - 1, D), "rows": (T, D), "computed": (D,)}


def inputs(rng):
    """Each sample has a size for each of its arrays; some numbers are not finite."""

    def of(shape):
        size = 10.0 ** rng.uniform(-24, 24, size=(N, *[1] * len(shape)))
        size[rng.random(N) < 0.5] = 1
        size[rng.random(N) < 0.1] = 0
        array = size * rng.normal(size=(N, *shape))
        if rng.random() < 0.3:
            where = rng.integers(N), *(rng.integers(n) for n in shape)
            array[where] = rng.choice([np.nan, np.inf, -np.inf])
        return array.astype(np.float32)

    ids = rng.integers(0, VOCAB, size=(N, T)).astype(np.int32)
    return {k: of(s) for k, s in X.items()}, {k: of(s) for k, s in Y.items()}, ids


PARAMS = {
    k: np.random.default_rng(i).normal(size=s).astype(np.float32)
    for i, (k, s) in enumerate(SHAPES.items())
}


@jax.jit
def rows_of(params, *batch):
    """One sample after the other: a mapped convolution lets a NaN into other samples."""
    return lax.map(lambda sample: jax.grad(loss)(params, *sample), batch)


@pytest.mark.parametrize("road", ["auto", "gram", "direct", "materialize"])
@pytest.mark.parametrize("groups", ["one", "each"])
def test_norms_and_what_is_finite_are_those_of_float64(road, groups):
    bounds = 1.0 if groups == "one" else dict.fromkeys(SHAPES, 1.0)
    run = jax.jit(fg.clipped_grad(loss, max_norm=bounds, road=road))
    for seed in range(200 if DEEP else 20):
        batch = inputs(np.random.default_rng(seed))
        out = run(PARAMS, *batch)
        with jax.enable_x64(True), np.errstate(invalid="ignore", over="ignore"):
            wide = lambda x: x.astype(np.float64) if x.dtype.kind == "f" else x
            rows = jax.tree.map(np.asarray, rows_of(*jax.tree.map(wide, (PARAMS, *batch))))
            norms = {k: np.linalg.norm(g.reshape(N, -1), axis=1) for k, g in rows.items()}
            whole = np.linalg.norm(list(norms.values()), axis=0)
        finite = whole < LARGEST
        assert out.nonfinite == np.sum(~finite)
        found = {"all": out.norms} if groups == "one" else out.norms
        expected = {"all": whole} if groups == "one" else norms
        for k, right in expected.items():
            got = np.asarray(found[k], np.float64)[finite]
            np.testing.assert_allclose(got, right[finite], rtol=2e-6, atol=1e-36)
        for k, grad in out.grads.items():
            norm = norms[k] if groups == "each" else whole
            # The weight of a sample whose norm is above this is subnormal: it is left out.
            counts = finite & (norm < 8e37)
            weight = 1 / np.maximum(norm[counts], 1)
            right = np.einsum("n,n...->...", weight, rows[k][counts])
            near = np.any(finite & ~counts)
            np.testing.assert_allclose(grad, right, rtol=1e-4, atol=1 if near else 1e-4)


def test_many_leaves_add_up_without_losing_digits():
    rng = np.random.default_rng(0)
    alike = rng.uniform(0.5, 1, size=(1000, 4))
    leaves = np.concatenate([alike, alike * 1e-25, alike * 1e30], 1).astype(np.float32)
    found = jax.jit(norm_over)([[leaf[:, None]] for leaf in leaves])
    np.testing.assert_allclose(found, np.linalg.norm(leaves.astype(np.float64), axis=0), rtol=5e-7)


@pytest.mark.parametrize("n", [1000, 40_000, 1_000_003])
def test_a_norm_of_many_entries_alike_keeps_to_its_slack(n):
    """Added one after another a million equal squares would lose half a percent."""
    for value in (0.1, 0.3, 1e-30):
        row = np.full(n, value, np.float32)
        for norm in (scaled_norm, lambda leaves: jax.vmap(scaled_norm)([x[None] for x in leaves])):
            unit, ratio = jax.jit(norm)([row])
            found = np.float64(unit.squeeze()) * np.float64(ratio.squeeze())
            expected = np.linalg.norm(row.astype(np.float64))
            assert abs(found / expected - 1) <= norm_slack(n) * 2.0**-24


@pytest.mark.parametrize("road", ["auto", "gram", "direct", "materialize"])
def test_a_gradient_that_the_compiler_knows_has_the_norm_that_it_has(road):
    """It squares a constant apart from its scale, where the one overflows or the other."""
    for size in (1e-30, 1e30):
        known = np.arange(1, 7, dtype=np.float32) * np.float32(size)
        loss = lambda p, x, known=known: jnp.vdot(p["a"], known) + jnp.vdot(p["b"], x)
        run = jax.jit(fg.clipped_grad(loss, max_norm=size, road=road))
        out = run({"a": jnp.ones(6), "b": jnp.ones(3)}, jnp.zeros((4, 3)))
        norm = np.linalg.norm(known.astype(np.float64))
        np.testing.assert_allclose(out.norms, norm, rtol=1e-6)
        np.testing.assert_allclose(out.grads["a"] / known, 4 * size / norm, rtol=1e-5)
