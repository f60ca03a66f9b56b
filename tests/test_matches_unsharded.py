"""The assertion passes what is right and names what is off, by which factor and why."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from funcgrad import collectives as co


@functools.cache
def make_mesh(shape=(4,), names=("data",), kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


W, X = jnp.array([0.3, -0.2, 0.5]), jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)))
SPECS, ALL = (P(), P("data")), P()


def local_loss(w, x):
    return jnp.mean(jnp.sin(x @ w) ** 2)


def mean_loss(w, x):
    return lax.pmean(local_loss(w, x), "data")


def by_hand(w, x):
    w = co.copy(w, "data")
    return co.reduce(local_loss(w, x), "data") / lax.axis_size("data")


def words(fun, *args, mesh=None, specs=SPECS, out=ALL, **options):
    with pytest.raises(AssertionError) as error:
        fg.assert_matches_unsharded(fun, mesh or make_mesh(), specs, out, **options)(*args)
    return str(error.value)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_is_right_passes(check_vma, kind):
    mesh = make_mesh(kind=kind)
    fg.assert_matches_unsharded(by_hand, mesh, SPECS, check_vma=check_vma)(W, X)
    if check_vma:
        fg.assert_matches_unsharded(mean_loss, mesh, SPECS)(W, X)


def test_a_loss_that_is_not_reduced():
    text = words(local_loss, W, X)
    assert "3 of 3 leaves are off" in text
    assert "the value differs between devices along 'data'; the mean of their values is" in text
    assert "the gradient of args[0] is 4 times what it should be, the number of devices" in text
    assert "reduce the loss, by pmean where it is a mean" in text


def test_a_gradient_averaged_again_is_named_with_the_number_of_devices():
    def step(w, x):  # JAX has summed the gradient of w already
        return {"loss": mean_loss(w, x), "grads": lax.pmean(jax.grad(local_loss)(w, x), "data")}

    text = words(step, W, X, argnums=())
    assert "1 of 2 leaves are off" in text
    assert (
        "the value['grads'] is 4 times what it should be, the number of devices along 'data'"
        in text
    )
    assert "under check_vma=True jax.grad has summed gradients of replicated values" in text


def test_without_types_terms_of_a_sum_and_the_factor_of_psum():
    text = words(mean_loss, W, X, check_vma=False)
    assert "args[0] differs between devices along 'data'; the mean of their values is" in text
    assert "collectives.copy(…, 'data') before its use, and reduce the loss by" in text

    def no_copy(w, x):
        return co.reduce(local_loss(w, x), "data") / 4

    text = words(no_copy, W, X, check_vma=False, unsharded=local_loss)
    assert "1 of 3 leaves" in text
    assert "the sum of their values is right. Pass it through collectives.copy" in text

    def psum(w, x):
        return lax.psum(local_loss(co.copy(w, "data"), x), "data") / 4

    text = words(psum, W, X, check_vma=False, unsharded=local_loss)
    assert "2 of 3 leaves" in text
    assert "args[1] is 4 times what it should be" in text
    assert "The transpose of psum is psum under check_vma=False: use collectives.reduce" in text


def test_a_mean_of_terms_and_a_sum_of_copies():
    text = words(lambda w, x: mean_loss(w, x) / 4, W, X, unsharded=local_loss)
    assert "the value is 1/4 of what it should be" in text
    assert "use psum (collectives.reduce) for pmean there" in text
    text = words(lambda w, x: lax.psum(mean_loss(w, x), "data"), W, X)
    assert "the value is 4 times what it should be" in text
    assert "What is the same on all devices is summed again" in text


def test_other_factors_zero_and_no_factor():
    assert "is 3 times what it should be, which is no number" in words(
        lambda w, x: 3 * mean_loss(w, x), W, X, unsharded=local_loss
    )
    stopped = lambda w, x: mean_loss(lax.stop_gradient(w), x)
    assert "args[0] is zero" in words(stopped, W, X, unsharded=local_loss)
    other = lambda w, x: mean_loss(w**2, x)
    assert "and by no common factor" in words(other, W, X, unsharded=local_loss)
    assert "is not finite" in words(lambda w, x: mean_loss(w, x) / 0.0, W, X, unsharded=local_loss)


def test_a_small_gradient_is_looked_at_beside_a_large_value():
    def loss(w, x):  # the second term, the same on all devices, is summed
        return 1e6 * mean_loss(w["a"], x) + 1e-3 * lax.psum(jnp.sum(w["b"] ** 2), "data")

    def whole(w, x):
        return 1e6 * local_loss(w["a"], x) + 1e-3 * jnp.sum(w["b"] ** 2)

    text = words(loss, {"a": W, "b": W}, X, unsharded=whole)
    assert "1 of 4 leaves" in text
    assert "args[0]['b'] is 4 times what it should be" in text

    # What should be zero, and is what rounding leaves, is no mistake.
    centred = lambda w, x: lax.pmean(jax.nn.softmax(x + w).mean() + 1e-3 * (x @ w).mean(), "data")
    fg.assert_matches_unsharded(centred, make_mesh(), SPECS)(W, X)


def test_layers_trees_two_axes_and_parts_of_every_leaf():
    mesh = make_mesh((2, 2), ("data", "tp"))
    a, b = np.random.default_rng(1).normal(size=(2, 3, 4))
    params = {"a": jnp.asarray(a), "b": jnp.asarray(b.T), "n": jnp.arange(3)}
    specs = ({"a": P(None, "tp"), "b": P("tp"), "n": P()}, P("data"))

    def layer(params, x, again=False):
        h = jnp.tanh(co.copy(x, "tp") @ co.copy(params["a"], "data"))
        y = co.reduce(h @ co.copy(params["b"], "data"), "tp") + params["n"]
        return {"y": lax.psum(y, "tp") if again else y, "count": jnp.int32(3)}

    out = {"y": P("data"), "count": P()}
    for check_vma in (True, False):
        fg.assert_matches_unsharded(layer, mesh, specs, out, check_vma=check_vma)(params, X)

    def forgot(params, x):
        h = jnp.tanh(x @ co.copy(params["a"], "data"))
        return co.reduce(h @ params["b"], "tp")

    text = words(forgot, params, X, mesh=mesh, specs=specs, out=P("data"), check_vma=False)
    assert "2 of 4 leaves are off" in text
    assert "args[0]['b'] differs between devices along 'data'; the sum" in text
    assert "args[1] differs between devices along 'tp'; the sum" in text


def test_what_is_not_floating_is_compared_exactly():
    fun = lambda x: {"i": lax.axis_index("data") + jnp.arange(2), "s": lax.psum(x.sum(), "data")}
    text = words(fun, jnp.arange(8.0), specs=(P("data"),), check_vma=False, argnums=())
    assert "1 of 2 leaves" in text and "the value['i'] differs in 6 entries" in text


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64])
def test_other_dtypes(dtype):
    w, x = W.astype(dtype), X.astype(dtype)
    loss = lambda w, x: lax.pmean(jnp.mean(jnp.abs(x @ w) ** 2), "data")
    fg.assert_matches_unsharded(loss, make_mesh(), SPECS)(w, x)


def test_a_random_key_and_float64(x64):
    def loss(w, x, key):
        keep = jax.random.bernoulli(key, 0.5, w.shape)
        return mean_loss(jnp.where(keep, w, 0), x)

    args = W.astype(float), X.astype(float), jax.random.key(0)
    fg.assert_matches_unsharded(loss, make_mesh(), (*SPECS, P()))(*args)


def test_one_spec_for_all_arguments_and_results_that_are_keys_or_numbers():
    def fun(x, key):
        own = jax.random.fold_in(key[0], 1)
        return jnp.sin(x), own[None], lax.psum(x.sum(), "data"), 2.0, 3

    out = (P("data"), P("data"), P(), P(), P())
    args = X, jax.random.split(jax.random.key(0), 4)
    whole = lambda x, key: (
        jnp.sin(x), jax.vmap(lambda k: jax.random.fold_in(k, 1))(key), x.sum(), 2.0, 3,
    )  # fmt: skip
    check = functools.partial(
        fg.assert_matches_unsharded, mesh=make_mesh(), in_specs=P("data"), out_specs=out
    )
    check(fun, argnums=(), unsharded=whole)(*args)
    wrong = lambda x, key: (lambda y: (y[0], key, *y[2:]))(fun(x, key))
    with pytest.raises(AssertionError, match=r"1 of 5 leaves are off.*\n.*value\[1\] differs"):
        check(wrong, argnums=(), unsharded=whole)(*args)


def test_misuse():
    check = functools.partial(fg.assert_matches_unsharded, mean_loss, make_mesh())
    with pytest.raises(ValueError, match="an entry for each argument; got 1 for 2"):
        check((P(),))(W, X)
    with pytest.raises(ValueError, match="argnums names arguments with floating leaves; got 2"):
        check(SPECS, argnums=2)(W, X)
    with pytest.raises(
        ValueError, match="on one device all is finite; got an infinity or a NaN in"
    ):
        check(SPECS)(W.at[0].set(jnp.nan), X)
    with pytest.raises(ValueError, match=r"a spec divides what it is of; .* of shape \[1, 3\]"):
        fg.assert_matches_unsharded(lambda w, x: x[:1], make_mesh(), SPECS, P("data"))(W, X)
    other = lambda w, x: {"loss": local_loss(w, x)}
    with pytest.raises(ValueError, match="unsharded returns what fun returns, .*; got {'loss': 'f"):
        check(SPECS, unsharded=other)(W, X)
    assert "got shape [2, 3], where the part has [1, 3]" in words(
        lambda w, x: x[:4], W, X, out=P("data")
    )
