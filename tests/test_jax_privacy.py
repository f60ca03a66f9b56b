"""``clipped_grad`` in the place of jax_privacy's: what that library's pipeline asks of one.

The pipeline calls its ``BoundedSensitivityCallable`` as ``fun(params, batch,
is_padding_example=...)``, expects the sum and what is per example with the fields ``values``,
``grad_norms`` and ``aux``, calibrates noise to ``sensitivity(relation)``, and hands the sum to a
privatizer that maps over its tree.  ``bounded`` is the adapter, in which nothing is computed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import NeighboringRelation as Relation

import funcgrad as fg
from test_per_sample import assert_equal, draw


class Aux(NamedTuple):
    """The fields of jax_privacy's own."""

    values: Any
    grad_norms: Any
    aux: Any


@dataclasses.dataclass(frozen=True)
class StandIn:
    """The members of ``jax_privacy.clipping.BoundedSensitivityCallable`` (release 2.0)."""

    fun: Callable[..., Any]
    l2_norm_bound: float
    has_aux: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fun(*args, **kwargs)


def bounded(clip: fg.ClippedGrad, make: Any = StandIn) -> Any:
    """A ``ClippedGrad`` as the callable that jax_privacy's pipeline takes."""

    def fun(params: Any, *batch: Any, is_padding_example: Any = None) -> Any:
        mask = None if is_padding_example is None else ~is_padding_example
        out = clip(params, *batch, mask=mask)
        return out.grads, Aux(out.values, out.norms, out.aux)

    return make(fun, clip.sensitivity(), True)


def loss(params, x, y):
    h = jnp.tanh(x @ params["w"]) @ params["v"]
    return optax.squared_error(h, y), {"prediction": h}


def inputs(n=6):
    params = {"w": draw(0, 4, 5, dtype=jnp.float32), "v": draw(1, 5, dtype=jnp.float32)}
    return params, draw(2, n, 4, dtype=jnp.float32), draw(3, n, dtype=jnp.float32)


def of_loop(params, x, y, max_norm):
    grad = jax.jit(jax.grad(lambda params, x, y: loss(params, x, y)[0]))
    rows = [grad(params, *sample) for sample in zip(np.asarray(x), np.asarray(y), strict=True)]
    norms = np.array([optax.tree.norm(row) for row in rows])
    scales = np.minimum(1, max_norm / norms)
    return jax.tree.map(lambda *g: sum(s * a for s, a in zip(scales, g, strict=True)), *rows), norms


def test_the_sum_leaves_padding_out_and_aux_is_per_example():
    params, x, y = inputs()
    padding = jnp.array([False, False, True, False, True, False])
    x = jnp.where(padding[:, None], jnp.nan, x)
    grad_fn = bounded(fg.clipped_grad(loss, max_norm=0.5, has_aux=True))
    total, aux = jax.jit(grad_fn)(params, x, y, is_padding_example=padding)
    kept = ~np.asarray(padding)
    expected, norms = of_loop(params, x[kept], y[kept], 0.5)
    assert_equal(total, expected, 1e-4)
    np.testing.assert_allclose(aux.grad_norms[kept], norms, rtol=1e-5)
    assert aux.aux["prediction"].shape == aux.values.shape == (6,)
    assert_equal(jax.jit(grad_fn)(params, x[kept], y[kept])[0], expected, 1e-4)


def test_noise_that_is_calibrated_to_the_sensitivity_covers_a_neighbour():
    clip = fg.clipped_grad(loss, max_norm=0.5, mean_over=6, has_aux=True)
    params, x, y = inputs()
    x = x.at[0].multiply(1e3)
    grad_fn = jax.jit(bounded(clip))
    everyone, _ = grad_fn(params, x, y, is_padding_example=jnp.zeros(6, bool))
    without, _ = grad_fn(params, x, y, is_padding_example=jnp.arange(6) == 0)
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, everyone, without))
    for relation, most in (
        (Relation.ADD_OR_REMOVE_ONE, 0.5 / 6),
        (Relation.REPLACE_SPECIAL, 0.5 / 6),
        (Relation.REPLACE_ONE, 1 / 6),
    ):
        assert clip.sensitivity(relation) == pytest.approx(most)
        assert moved <= clip.sensitivity(relation)


def test_the_sum_has_the_tree_that_a_privatizer_maps_over():
    def updates(params, x, y):
        total, _ = bounded(fg.clipped_grad(loss, max_norm=0.5, has_aux=True))(params, x, y)
        noise = optax.tree.random_like(jax.random.key(0), total, jax.random.normal)
        noisy = jax.tree.map(lambda g, n: g + 0.5 * n, total, noise)
        return optax.sgd(0.1).update(noisy, optax.sgd(0.1).init(params), params)[0]

    params, *batch = inputs()
    assert jax.tree.structure(jax.eval_shape(updates, params, *batch)) == jax.tree.structure(params)


@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")  # in their code
def test_in_the_place_of_the_librarys_own():
    clipping = pytest.importorskip("jax_privacy.clipping")
    noise_addition = pytest.importorskip("jax_privacy.noise_addition")
    params, x, y = inputs()
    padding = jnp.arange(6) == 4
    theirs = clipping.clipped_grad(
        loss, has_aux=True, l2_clip_norm=0.5, normalize_by=6, batch_argnums=(1, 2),
        keep_batch_dim=False, return_values=True, return_grad_norms=True,
    )  # fmt: skip
    clip = fg.clipped_grad(loss, max_norm=0.5, mean_over=6, has_aux=True)
    ours = bounded(clip, clipping.BoundedSensitivityCallable)
    total, aux = jax.jit(theirs)(params, x, y, is_padding_example=padding)
    got, mine = jax.jit(ours)(params, x, y, is_padding_example=padding)
    assert_equal(got, total, 1e-5)
    assert aux._fields == mine._fields
    np.testing.assert_allclose(mine.values, aux.values, rtol=1e-5)
    np.testing.assert_allclose(mine.grad_norms, aux.grad_norms, rtol=1e-5)
    np.testing.assert_allclose(mine.aux["prediction"], aux.aux["prediction"], rtol=1e-5)
    for relation in Relation:
        if relation.name in ("ADD_OR_REMOVE_ONE", "REPLACE_ONE", "REPLACE_SPECIAL"):
            assert ours.sensitivity(relation) == pytest.approx(theirs.sensitivity(relation))
            assert clip.sensitivity(relation) == pytest.approx(theirs.sensitivity(relation))
    privatizer = noise_addition.gaussian_privatizer(
        stddev=ours.sensitivity(), prng_key=jax.random.key(0)
    )
    state = privatizer.init(params)
    noisy, _ = privatizer.update(got, state)
    expected, _ = privatizer.update(total, state)
    assert_equal(noisy, expected, 1e-5)
