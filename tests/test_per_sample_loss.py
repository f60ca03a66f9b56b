"""A batched loss is the loss of one sample, or is refused at the line where samples meet."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from conftest import PROGRAMS
from funcgrad._per_sample._sample_axis import SampleMixingError, per_sample_loss
from programs import ROWS, WIDTH, programs

B = 8
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def linear_inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.normal(size=(6, 5)), dtype),
        "b": jnp.asarray(rng.normal(size=5), dtype),
    }
    x = jnp.asarray(rng.normal(size=(B, 6)), dtype)
    return params, x, jnp.asarray(rng.integers(0, 5, B))


def logits(p, x):
    return x @ p["w"] + p["b"]


def losses(p, x, y):
    return cross_entropy(logits(p, x), y)


def per_sample_values(batch_loss, params, *batch, **options):
    fun = per_sample_loss(batch_loss, **options)
    axes = options.get("in_axes", 0)
    axes = (None, *([axes] * len(batch) if axes == 0 else axes))
    return jax.jit(jax.vmap(fun, axes))(params, *batch)


def check_accepted(batch_loss, params, *batch, rtol=1e-5, **options):
    """The samples' losses average, or sum, or stack, to the batch's."""
    values = per_sample_values(batch_loss, params, *batch, **options)
    assert_represents(values, jax.jit(batch_loss)(params, *batch), rtol)


def assert_represents(values, total, rtol):
    values, total = np.asarray(values), np.asarray(total)
    forms = [values] if total.ndim else [values.mean(), values.sum()]
    assert any(np.allclose(form, total, rtol=rtol, atol=1e-12) for form in forms)


def check_refused(batch_loss, *args, words="", line="", **options):
    with pytest.raises(SampleMixingError) as caught:
        jax.eval_shape(per_sample_loss(batch_loss, **options), *args)
    message = str(caught.value)
    for word in (words, line):
        assert word in message, message
    return message


def here(fun, text):
    """``file:line`` of the line of ``fun`` that contains ``text``."""
    lines, start = inspect.getsourcelines(fun)
    (offset,) = [i for i, line in enumerate(lines) if text in line]
    return f"{__file__}:{start + offset} "


ACCEPTED = {
    "vector": losses,
    "mean": lambda p, x, y: losses(p, x, y).mean(),
    "sum": lambda p, x, y: losses(p, x, y).sum(),
    "fixed size": lambda p, x, y: losses(p, x, y).sum() / 32,
    "weight decay on a mean": lambda p, x, y: losses(p, x, y).mean() + 0.1 * (p["w"] ** 2).sum(),
    "two means": lambda p, x, y: losses(p, x, y).mean() - 0.1 * (logits(p, x) ** 2).mean(),
    "learned scale": lambda p, x, y: losses(p, x, y).mean() * jnp.exp(p["b"][0]),
    "mean over the batch first": lambda p, x, y: jnp.tanh(logits(p, x)).mean(0).sum(),
    "jnp.average": lambda p, x, y: jnp.average(losses(p, x, y)),
    "dot with one over the size": lambda p, x, y: jnp.dot(
        jnp.ones(len(x)) / len(x), losses(p, x, y)
    ),
    "vdot of residuals": lambda p, x, y: jnp.vdot(logits(p, x), logits(p, x)) / len(x),
    "ones summed": lambda p, x, y: (
        (jnp.ones(len(x)) * losses(p, x, y)).sum() / jnp.ones(len(x)).sum()
    ),
    "labels by arange": lambda p, x, y: (
        -jax.nn.log_softmax(logits(p, x))[jnp.arange(len(x)), y].mean()
    ),
    "labels along axis": lambda p, x, y: (
        -jnp.take_along_axis(jax.nn.log_softmax(logits(p, x)), y[:, None], 1).mean()
    ),
    "one-hot labels": lambda p, x, y: (
        -(jax.nn.one_hot(y, 5) * jax.nn.log_softmax(logits(p, x))).sum(-1).mean()
    ),
    "embedding": lambda p, x, y: jnp.tanh(p["w"][y]).sum(-1).mean(),
    "vmap": lambda p, x, y: jax.vmap(functools.partial(losses, p))(x, y).mean(),
    "lax.map": lambda p, x, y: lax.map(lambda s: losses(p, *s), (x, y)).mean(),
    "lax.map in threes": lambda p, x, y: lax.map(
        lambda s: losses(p, *s), (x, y), batch_size=3
    ).mean(),
    "scan that adds up": lambda p, x, y: (
        lax.scan(lambda a, s: (a + losses(p, *s), None), 0.0, (x, y))[0] / len(x)
    ),
    "fori_loop that adds up": lambda p, x, y: (
        lax.fori_loop(0, len(x), lambda i, a: a + losses(p, x[i], y[i]), 0.0) / len(x)
    ),
    "scan over layers": lambda p, x, y: (
        lax.scan(lambda h, _: (jnp.sin(h @ p["w"] @ p["w"].T), None), x, None, length=3)[0]
        .sum(1)
        .mean()
    ),
    "where": lambda p, x, y: jnp.where(y > 2, losses(p, x, y), 0.0).mean(),
    "scatter by arange": lambda p, x, y: (
        jnp.zeros((len(x), 5)).at[jnp.arange(len(x)), y].add(x[:, 0]).max(1).mean()
    ),
    "top_k": lambda p, x, y: lax.top_k(logits(p, x), 2)[0].sum(1).mean(),
    "median over features": lambda p, x, y: jnp.median(logits(p, x), axis=1).mean(),
    "sorted by argsort": lambda p, x, y: (
        jnp.take_along_axis(x, jnp.argsort(x, 1), 1)[:, :3].sum(1).mean()
    ),
    "roll over features": lambda p, x, y: jnp.roll(logits(p, x), 1, 1)[:, :2].sum(1).mean(),
    "fft over features": lambda p, x, y: jnp.abs(jnp.fft.rfft(logits(p, x))).sum(1).mean(),
    "cholesky of each": lambda p, x, y: (
        jnp.linalg.cholesky(x[:, :, None] * x[:, None] + 9 * jnp.eye(6)).sum((1, 2)).mean()
    ),
    "solve of each": lambda p, x, y: (
        jnp.linalg.solve(x[:, :, None] * x[:, None] + 9 * jnp.eye(6), x[..., None])
        .sum((1, 2))
        .mean()
    ),
    "gradient inside": lambda p, x, y: (
        (jax.grad(lambda x: losses(p, x, y).sum())(x) ** 2).sum(1).mean()
    ),
    "fixed random projection": lambda p, x, y: (
        (logits(p, x) @ jax.random.normal(jax.random.key(0), (5, 3))).sum(-1).mean()
    ),
    "mixing that reaches no output": lambda p, x, y: (x.mean(0).std(), losses(p, x, y).mean())[1],
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_loss_whose_samples_do_not_meet_is_accepted(name):
    assert jax.eval_shape(per_sample_loss(ACCEPTED[name]), *one_sample()).shape == ()


def test_the_samples_losses_average_or_sum_or_stack_to_the_batchs():
    @jax.jit  # one program for all, which compiles faster than many
    def both(*args):
        return {
            name: (jax.vmap(per_sample_loss(fun), (None, 0, 0))(*args), fun(*args))
            for name, fun in ACCEPTED.items()
        }

    for values, total in both(*linear_inputs()).values():
        assert_represents(values, total, 1e-5)


REFUSED = {
    "batch statistics": lambda p, x, y: losses(p, x - x.mean(0), y).mean(),
    "statistics behind stop_gradient": lambda p, x, y: losses(
        p, x - lax.stop_gradient(x.mean(0)), y
    ).mean(),
    "clip-style contrast": lambda p, x, y: cross_entropy(
        logits(p, x) @ jnp.tanh(logits(p, x)).T, jnp.arange(len(x))
    ).mean(),
    "roll": lambda p, x, y: losses(p, jnp.roll(x, 1, 0), y).mean(),
    "reversed losses": lambda p, x, y: losses(p, x, y)[::-1],
    "reversed data": lambda p, x, y: losses(p, x[::-1], y).mean(),
    "norm of all": lambda p, x, y: jnp.linalg.norm(logits(p, x)),
    "exp of a mean": lambda p, x, y: jnp.exp(losses(p, x, y).mean()),
    "product of means": lambda p, x, y: losses(p, x, y).mean() * logits(p, x).mean(),
    "ghost batches of 2": lambda p, x, y: (
        (x.reshape(-1, 2, 6) - x.reshape(-1, 2, 6).mean(1, keepdims=True)).sum((1, 2))[y].mean()
    ),
    "only for larger batches": lambda p, x, y: losses(p, x - x.mean(0) if len(x) > 2 else x, y),
    "cumsum": lambda p, x, y: jnp.cumsum(losses(p, x, y)),
    "sort": lambda p, x, y: jnp.sort(losses(p, x, y)),
    "max": lambda p, x, y: losses(p, x, y).max(),
    "first half": lambda p, x, y: losses(p, x, y)[:4].sum(),
    "first sample": lambda p, x, y: losses(p, x, y)[0],
    "segment_sum": lambda p, x, y: jax.ops.segment_sum(losses(p, x, y), y, 5).max(),
    "carry over samples": lambda p, x, y: lax.scan(lambda c, s: (jnp.tanh(c + s.sum()), c), 0.0, x)[
        1
    ],
    "predicate on the batch": lambda p, x, y: lax.cond(
        x.sum() > 0, lambda: losses(p, x, y), lambda: 2 * losses(p, x, y)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_whose_samples_meet_is_refused(name):
    check_refused(REFUSED[name], *one_sample(), words="of a sample depends on that sample alone")


def one_sample():
    params, x, y = linear_inputs()
    return params, x[0], y[0]


def test_the_error_names_the_first_equation_where_samples_meet_and_the_line():
    def batch_loss(p, x, y):
        h = logits(p, x)
        unused = jnp.sort(h, axis=0)  # reaches no output
        mean = h.mean(0)
        h = h - mean
        del unused
        return cross_entropy(h, y).mean()

    message = check_refused(
        batch_loss, *one_sample(), words="`reduce_sum`", line=here(batch_loss, "h.mean(0)")
    )
    assert "mean = h.mean(0)" in message
    assert "used by `sub` at " + here(batch_loss, "h - mean") in message


def test_inside_a_compiled_library_function_the_line_of_the_call_is_named():
    def batch_loss(p, x, y):
        h = jnp.sort(logits(p, x), axis=0)
        return cross_entropy(h, y)

    check_refused(batch_loss, *one_sample(), words="`sort`", line=here(batch_loss, "jnp.sort"))


def test_a_mean_over_the_targets_that_count_is_refused_and_the_fix_is_named():
    def batch_loss(p, x, y):
        each = losses(p, x, y)
        count = (y > 0).astype(each.dtype)
        return (each * count).sum() / count.sum()

    check_refused(
        batch_loss,
        *one_sample(),
        words="Return the vector of per-sample losses, or divide by a fixed size",
        line=here(batch_loss, "count.sum()"),
    )
    # By sequence it is a mean of means, and nobody's denominator depends on others.
    check_accepted(
        lambda p, x, y: ((x > 0) * x * p["w"][:, 0]).sum(1).mean() / 3.0, *linear_inputs()
    )


SCALES = {
    "regulariser on a sum": (
        lambda p, x, y: losses(p, x, y).sum() + (p["w"] ** 2).sum(),
        "plus a term that depends on no sample",
    ),
    "over the size squared": (lambda p, x, y: losses(p, x, y).sum() / len(x) ** 2, "by 0.25"),
    "over the size less one": (lambda p, x, y: losses(p, x, y).sum() / (len(x) - 1), "0.4667"),
    "vector over the size": (lambda p, x, y: losses(p, x, y) / len(x), "by 0.5"),
    "regulariser over the size": (
        lambda p, x, y: losses(p, x, y).mean() + p["b"].sum() / len(x),
        "",
    ),
    "place in the batch": (lambda p, x, y: losses(p, x, y) * jnp.arange(len(x)), "the place"),
    "first ones only": (
        lambda p, x, y: (losses(p, x, y) * (jnp.arange(len(x)) < 4)).sum(),
        "the place",
    ),
    "a weight by the place in a loop": (
        lambda p, x, y: lax.fori_loop(
            0, len(x), lambda i, a: a + (i + 1) * losses(p, x[i], y[i]), 0.0
        ),
        "",
    ),
    "another loss for the first half": (
        lambda p, x, y: jnp.concatenate([losses(p, x[:4], y[:4]), (x[4:] ** 2).sum(1)]).mean(),
        "the place",
    ),
    "sum and mean": (lambda p, x, y: losses(p, x, y).sum() + losses(p, x, y).mean(), "0.5 and 1"),
    "Python loop over samples": (
        lambda p, x, y: jnp.stack([losses(p, x[i], y[i]) for i in range(len(x))]),
        "Use jax.vmap",
    ),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_loss_that_is_neither_the_mean_nor_the_sum_is_refused(name):
    batch_loss, words = SCALES[name]
    check_refused(batch_loss, *one_sample(), words=words)


# Random draws.


def dropout_loss(p, x, y, key):
    def one(x, y, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return losses(p, jnp.where(keep, x, 0), y)

    return jax.vmap(one)(x, y, key).mean()


@pytest.mark.parametrize("kind", ["typed", "raw"])
def test_dropout_with_an_own_key_for_each_sample_is_accepted(kind):
    keys = jax.random.split(jax.random.key(1), B)
    keys = keys if kind == "typed" else jax.vmap(jax.random.key_data)(keys)
    check_accepted(dropout_loss, *linear_inputs(), keys)


def test_a_draw_of_the_batch_shape_from_one_key_is_refused():
    def shared(p, x, y, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return losses(p, jnp.where(keep, x, 0), y)

    def split(p, x, y, key):
        return dropout_loss(p, x, y, jax.random.split(key, len(x)))

    def folded(p, x, y, key):
        return dropout_loss(
            p, x, y, jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(x)))
        )

    def first(p, x, y, key):
        return shared(p, x, y, key[0])

    args = (*one_sample(), jax.random.key(0))
    for fun, line in ((shared, "bernoulli"), (split, "random.split"), (folded, "fold_in")):
        check_refused(fun, *args, in_axes=(0, 0, None), words="its own key", line=here(fun, line))
    check_refused(first, *args, words="depends on that sample alone")


# Auxiliary outputs, axes, shapes.


def test_aux_comes_back_without_the_sample_axis():
    def batch_loss(p, x, y):
        z = logits(p, x)
        aux = {"logits": z, "accuracy": (z.argmax(-1) == y).mean(), "norm": (p["w"] ** 2).sum()}
        return cross_entropy(z, y).mean(), aux

    params, x, y = linear_inputs()
    values, aux = per_sample_values(batch_loss, params, x, y, has_aux=True)
    loss, expected = batch_loss(params, x, y)
    np.testing.assert_allclose(values.mean(), loss, rtol=1e-5)
    np.testing.assert_allclose(aux["logits"], expected["logits"], rtol=1e-5)
    np.testing.assert_allclose(aux["accuracy"].mean(), expected["accuracy"], rtol=1e-5)
    np.testing.assert_allclose(aux["norm"], [expected["norm"]] * B, rtol=1e-5)


def test_aux_that_mixes_samples_is_refused_by_its_name():
    check_refused(
        lambda p, x, y: (losses(p, x, y), {"worst": losses(p, x, y).max()}),
        *one_sample(),
        has_aux=True,
        words="aux['worst'] of a sample",
    )


def test_shared_arguments_and_other_axes_and_trees_are_mapped_as_vmap_maps_them():
    params, x, y = linear_inputs()

    def batch_loss(p, data, ids):
        # Position ids of batch 1 are broadcast over the batch.
        return (jnp.einsum("fb,fc->bc", data["x"], p["w"]) + p["b"][ids])[:, 0] * data["y"]

    axes = ({"x": 1, "y": 0}, None)
    data, ids = {"x": x.T, "y": y}, jnp.array([[1, 0, 2, 3, 4]])
    fun = per_sample_loss(batch_loss, in_axes=axes)
    np.testing.assert_allclose(
        jax.vmap(fun, (None, *axes))(params, data, ids), batch_loss(params, data, ids), rtol=1e-5
    )
    last = per_sample_loss(lambda p, x: (x.T @ p["w"]).sum(1), in_axes=-1)
    np.testing.assert_allclose(
        jax.vmap(last, (None, -1))(params, x.T), (x @ params["w"]).sum(1), rtol=1e-5
    )


def test_wrong_shapes_and_axes_are_named():
    params, x, y = one_sample()
    wrong = {
        "scalar or of shape": lambda p, x, y: logits(p, x),
        "sample axis first": lambda p, x, y: logits(p, x).T,
        "returns one array": lambda p, x, y: (losses(p, x, y), 1.0),
    }
    for words, fun in wrong.items():
        with pytest.raises(ValueError, match=words):
            per_sample_loss(fun)(params, x, y)
    with pytest.raises(ValueError, match=r"returns \(loss, aux\)"):
        per_sample_loss(losses, has_aux=True)(params, x, y)
    with pytest.raises(ValueError, match="keeps it on a batch of one"):
        per_sample_loss(lambda p, x, y: jnp.squeeze(losses(p, x, y)))(params, x, y)
    with pytest.raises(ValueError, match="an entry for each argument"):
        per_sample_loss(losses, in_axes=(0,))(params, x, y)
    with pytest.raises(ValueError, match="Map the data"):
        per_sample_loss(losses, in_axes=None)(params, x, y)


def test_an_error_of_the_loss_itself_says_at_which_batch_it_was_traced():
    with pytest.raises(TypeError) as caught:
        per_sample_loss(lambda p, x, y: losses(p, x.reshape(32, 6), y))(*one_sample())
    assert "batch of 8" in "".join(caught.value.__notes__)


def test_it_composes_with_jit_vmap_grad_scan_and_keeps_dtypes():
    params, x, y = linear_inputs()
    fun = per_sample_loss(ACCEPTED["weight decay on a mean"])
    grads = jax.jit(jax.vmap(jax.grad(fun), (None, 0, 0)))(params, x, y)
    expected = jax.grad(ACCEPTED["weight decay on a mean"])(params, x, y)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got.mean(0), want, rtol=1e-4, atol=1e-6)
    _, scanned = lax.scan(lambda c, s: (c, fun(params, *s)), 0, (x, y))
    np.testing.assert_allclose(scanned, jax.vmap(fun, (None, 0, 0))(params, x, y), rtol=1e-5)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    assert fun(half, x[0].astype(jnp.bfloat16), y[0]).dtype == jnp.bfloat16
    assert jax.vmap(fun, (None, 0, 0))(params, x[:0], y[:0]).shape == (0,)


def test_the_check_runs_once_for_each_kind_of_arguments():
    traced = []

    def batch_loss(p, x, y):
        traced.append(len(x))
        return losses(p, x, y)

    fun = per_sample_loss(batch_loss)
    args = one_sample()
    for _ in range(2):
        fun(*args)
        jax.jit(fun)(*args)
    assert [n for n in traced if n > 1] == [8, 16]


def test_arrays_and_tracers_closed_over_are_shared_by_the_samples():
    params, x, y = linear_inputs()

    def of_scale(scale):
        return per_sample_loss(lambda p, x, y: losses(p, x * scale, y).mean())(params, x[0], y[0])

    assert np.isfinite(jax.jit(jax.grad(of_scale))(2.0))


# Layers.


class ConvNet(nn.Module):
    norm: str = ""
    train: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3))(x)
        if self.norm == "batch":
            x = nn.BatchNorm(use_running_average=not self.train)(x)
        elif self.norm:
            x = {"group": nn.GroupNorm(4), "layer": nn.LayerNorm()}[self.norm](x)
        x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.Conv(8, (3, 3), feature_group_count=4, strides=2)(x)
        x = nn.avg_pool(x, (2, 2))
        return nn.Dense(3)(x.reshape(len(x), -1))


class Transformer(nn.Module):
    dropout: float = 0.0
    layers: int = 1
    width: int = 8

    @nn.compact
    def __call__(self, t):
        h = nn.Embed(11, self.width)(t) + nn.Embed(32, self.width)(jnp.arange(t.shape[1]))
        mask = nn.make_causal_mask(t)
        for _ in range(self.layers):
            attention = nn.MultiHeadDotProductAttention(2)
            h = h + attention(nn.LayerNorm()(h), mask=mask)
            mlp = nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(nn.RMSNorm()(h))))
            h = h + nn.Dropout(self.dropout, deterministic=not self.dropout)(mlp)
        return nn.Dense(11)(h)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, t):
        h = nn.RNN(nn.LSTMCell(8))(nn.Embed(11, 8)(t))
        return nn.Dense(11)(nn.RNN(nn.GRUCell(8), reverse=True, keep_order=True)(h))


IMAGES = jnp.ones((8, 8, 3))
TOKENS = jnp.arange(7)


def module_loss(module, images, *, rngs=None):
    sample = IMAGES if images else TOKENS
    params = jax.eval_shape(module.init, jax.random.key(0), sample[None])
    params = jax.tree.map(lambda p: jnp.ones(p.shape, p.dtype), params)

    def loss(params, x, y):
        mutable = ["batch_stats"] if getattr(module, "train", False) else False
        out = module.apply(params, x, mutable=mutable, rngs=rngs)
        each = cross_entropy(out[0] if mutable else out, y)
        return each.mean()

    return loss, params, sample, jnp.array(1) if images else TOKENS


@pytest.mark.parametrize(
    "module",
    [ConvNet(), ConvNet("group"), ConvNet("layer"), ConvNet("batch"), Transformer(), Recurrent()],
    ids=repr,
)
def test_layers_that_keep_samples_apart_are_accepted(module):
    loss, *args = module_loss(module, isinstance(module, ConvNet))
    assert jax.eval_shape(per_sample_loss(loss), *args).shape == ()


def test_batch_norm_in_training_is_refused_at_the_line_of_the_layer():
    loss, *args = module_loss(ConvNet("batch", train=True), True)
    check_refused(loss, *args, line=here(ConvNet, "nn.BatchNorm"))

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.out = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(self.norm(x).mean((1, 2)))

    net = Net()
    for train in (True, False):
        (net.train if train else net.eval)()
        graph, state = nnx.split(net)

        def nnx_loss(state, x, y, graph=graph):
            return cross_entropy(nnx.merge(graph, state)(x), y).mean()

        if train:
            check_refused(nnx_loss, state, *args[1:], line=here(Net, "self.norm(x)"))
        else:
            jax.eval_shape(per_sample_loss(nnx_loss), state, *args[1:])


def test_a_layer_that_draws_one_mask_for_the_batch_is_refused():
    loss, *args = module_loss(Transformer(dropout=0.5), False, rngs={"dropout": jax.random.key(0)})
    check_refused(loss, *args, words="its own key", line=here(Transformer, "nn.Dropout"))


def test_masks_stay_small_however_large_the_model():
    # Shapes alone: 12 layers 4,096 wide, 12 x 2^27 weights, would not fit in memory.
    def batch_loss(params, x):
        h = lax.scan(lambda h, w: (jnp.tanh(h @ w[0] @ w[1]), None), x, params)[0]
        return (h**2).sum((1, 2)).mean()

    params = jax.ShapeDtypeStruct((12, 2, 1 << 13, 1 << 13), jnp.float32)
    sample = jax.ShapeDtypeStruct((4096, 1 << 13), jnp.float32)
    assert jax.eval_shape(per_sample_loss(batch_loss), params, sample).shape == ()


def test_a_shard_map_inside_the_loss_is_refused_and_one_around_it_is_not():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    spec = P("i")
    params, x, y = linear_inputs()

    def inner(p, x, y):
        def of_shard(x, y):
            return losses(params, x, y)

        return jax.shard_map(of_shard, mesh=mesh, in_specs=(spec, spec), out_specs=spec)(x, y)

    check_refused(inner, *one_sample(), words="`shard_map`")
    mapped = jax.vmap(per_sample_loss(ACCEPTED["mean"]), (None, 0, 0))
    outer = jax.shard_map(mapped, mesh=mesh, in_specs=(P(), spec, spec), out_specs=spec)
    values = jax.jit(outer)(params, x, y)
    np.testing.assert_allclose(values, losses(params, x, y), rtol=1e-5)


def test_a_primitive_without_a_rule_is_refused_and_says_so():
    def batch_loss(p, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        h = jax.pure_callback(np.sin, shape, x)
        return h.sum(1)

    check_refused(batch_loss, 1.0, jnp.ones(3), words="there is no rule")


# Against perturbation, on random programs.


def perturbation_oracle(batch_loss, params, x, t):
    """Whether output ``i`` changes with sample ``j``, by changing one at a time; the outputs."""
    own = jnp.eye(B, dtype=bool)[:, :, None, None]
    xs = jnp.concatenate([x[None], jnp.where(own, 1.3 * x + 0.37, x)])
    ts = jnp.concatenate([t[None], jnp.where(own[..., 0], 4 - t, t)])
    # Compiled once and run nine times, so that equal inputs give equal bits.
    run = jax.jit(lambda x, t: batch_loss(params, x, t))
    base, *moved = (np.asarray(run(x, t)) for x, t in zip(xs, ts, strict=True))
    return np.stack([m != base for m in moved], axis=1), base


def ghost(h):
    pairs = h.reshape(-1, 2, ROWS, WIDTH)
    return (pairs - pairs.mean(1, keepdims=True)).reshape(h.shape)


CROSS = {
    "mean": lambda h: h - h.mean(0),
    "max": lambda h: h / (1 + jnp.abs(h).max(0)),
    "ghost": ghost,
    "roll": lambda h: jnp.roll(h, 1, 0),
    "swap": lambda h: jnp.concatenate([h[1:], h[:1]]),
    "rev": lambda h: h[::-1],
    "softmax": lambda h: jax.nn.softmax(h, axis=0),
    "cumsum": lambda h: jnp.cumsum(h, axis=0),
    "cummax": lambda h: lax.cummax(h, axis=0, reverse=True),
    "sort": lambda h: jnp.sort(h, axis=0),
    "argsort": lambda h: h[jnp.argsort(h[:, 0, 0])],
    "pairwise": lambda h: jnp.einsum("btw,ctw->bc", h, jnp.tanh(h))[:, :1, None] * h,
    "pick": lambda h: h + h[len(h) // 2],
    "dynamic": lambda h: h + lax.dynamic_slice_in_dim(h, 1, 1, 0),
    "update": lambda h: lax.dynamic_update_slice_in_dim(h, h[:1], len(h) - 1, 0),
    "scatter": lambda h: h.at[jnp.arange(len(h)) // 2].add(0.1 * h),
    "set": lambda h: h.at[0].set(h[1]),
    "carry": lambda h: lax.scan(lambda c, r: (jnp.tanh(c + r), c + r), 0 * h[0], h)[1],
    "predicate": lambda h: jnp.where(jnp.sin(99 * h.sum()) > 0, h, -h),
    "cond": lambda h: lax.cond(jnp.sin(99 * h.sum()) > 0, jnp.sin, jnp.cos, h),
    "while": lambda h: lax.while_loop(
        lambda c: (c[0] < 3) & (jnp.sin(99 * h.sum()) > c[0] / 3 - 1),
        lambda c: (c[0] + 1, c[1] / 2),
        (0, h),
    )[1],
    "conv over batch": lambda h: lax.conv_general_dilated(
        h.transpose(1, 0, 2), jnp.ones((2, WIDTH, WIDTH)), (1,), "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    ).transpose(1, 0, 2),
    "fft": lambda h: jnp.fft.fft(h, axis=0).real,
    "window": lambda h: lax.reduce_window(h, 0.0, lax.add, (2, 1, 1), (1, 1, 1), "SAME"),
    "pad": lambda h: jnp.pad(h, ((1, 0), (0, 0), (0, 0)))[:-1],
    "top_k": lambda h: h + lax.top_k(h.reshape(len(h), -1).T, 1)[0].reshape(ROWS, WIDTH),
    "flat": lambda h: h.reshape(ROWS, -1).reshape(ROWS, WIDTH, -1).transpose(2, 0, 1),
    "linear solve": lambda h: jnp.linalg.solve(
        jnp.eye(len(h)) + 0.1 * jnp.outer(h[:, 0, 0], h[:, 0, 0]), h.reshape(len(h), -1)
    ).reshape(h.shape),
    "stop": lambda h: h - lax.stop_gradient(h.mean(0)),
    # These look alike and keep samples apart.
    "apart: flat": lambda h: jnp.tanh(h.reshape(-1, WIDTH)).reshape(h.shape),
    "apart: map": lambda h: lax.map(jnp.sin, h),
    "apart: rev twice": lambda h: jnp.tanh(h[::-1])[::-1],
    "apart: shift and back": lambda h: jnp.roll(jnp.roll(h, 1, 0), -1, 0),
    "apart: transpose": lambda h: jnp.cumsum(h.transpose(2, 1, 0), 0).transpose(2, 1, 0),
    "apart: rows": lambda h: h[jnp.arange(len(h))],
    "apart: conv": lambda h: lax.conv_general_dilated(
        h, jnp.ones((2, 1, WIDTH)), (1,), "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=WIDTH,
    ),
    "apart: split": lambda h: jnp.concatenate(jnp.split(h, [1], axis=0), axis=0),
    "apart: diagonal": lambda h: jnp.einsum("btw,ctw->bct", h, h)[
        jnp.arange(len(h)), jnp.arange(len(h))
    ][..., None] * h,
    "apart: shared": lambda h: h + lax.cond(h.shape[1] > 1, jnp.sin, jnp.cos, h),
}  # fmt: skip


@st.composite
def batched(draw):
    before, after = draw(programs(depth=1, max_size=2)), draw(programs(depth=1, max_size=2))
    names = draw(st.lists(st.sampled_from(sorted(CROSS)), min_size=1, max_size=2))
    return before, names, after


def batched_loss(before, names, after):
    def batch_loss(params, x, t):
        h = jax.vmap(lambda x, t: hidden(before, params, x, t))(x, t)
        for name in names:
            h = CROSS[name](h)
        return jax.vmap(after.loss, (None, 0, 0))(params, h, t)

    return batch_loss


def hidden(program, params, x, t):
    from programs import run_steps

    return jnp.tanh(run_steps(program.steps, params, x, t))


def verdict(batch_loss, *args):
    try:
        jax.eval_shape(per_sample_loss(batch_loss), *args)
    except SampleMixingError:
        return False
    return True


@settings(max_examples=PROGRAMS // 4)
@given(case=batched())
def test_whatever_a_perturbation_shows_to_depend_is_refused(x64, case):
    batch_loss = batched_loss(*case)
    params = case[0].params(np.float64)
    x, t = case[0].inputs(np.float64, batch=B)
    if not verdict(batch_loss, params, x[0], t[0]):
        return
    touched, expected = perturbation_oracle(batch_loss, params, x, t)
    assert not (touched & ~np.eye(B, dtype=bool)).any(), case
    values = per_sample_values(batch_loss, params, x, t)
    np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CROSS)
def test_each_operation_over_the_batch_gets_the_verdict_of_perturbation(x64, name):
    from programs import Program, Step

    program = Program((Step("tanh", (0,)),), 3)
    batch_loss = batched_loss(program, [name], program)
    params, (x, t) = program.params(np.float64), program.inputs(np.float64, batch=B)
    touched, _ = perturbation_oracle(batch_loss, params, x, t)
    apart = not (touched & ~np.eye(B, dtype=bool)).any()
    assert apart == name.startswith("apart"), "the name tells the truth"
    assert verdict(batch_loss, params, x[0], t[0]) == apart


@settings(max_examples=PROGRAMS // 4)
@given(program=programs())
def test_every_vmapped_program_is_accepted(program):
    x, t = program.inputs()
    assert verdict(jax.vmap(program.loss, (None, 0, 0)), program.params(), x, t)


TAILS = {
    "mean": lambda v, p: v.mean(),
    "sum": lambda v, p: v.sum(),
    "/n": lambda v, p: v / B_of(v),
    "*n": lambda v, p: v * B_of(v),
    "*2": lambda v, p: 2 * v,
    "-": lambda v, p: -v,
    "+reg": lambda v, p: v + p,
    "*p": lambda v, p: v * jnp.exp(p),
    "/p": lambda v, p: v / (1 + p**2),
    "sqrt": lambda v, p: jnp.sqrt(1 + v**2),
    "ones": lambda v, p: v * jnp.ones(v.shape),
    "v+mean": lambda v, p: v + v.mean(),
    "dot": lambda v, p: jnp.dot(v, v) if v.ndim else v,
    "halves": lambda v, p: v.reshape(2, -1).sum(0).sum() if v.ndim else v,
    "scan": lambda v, p: lax.scan(lambda a, r: (a + r, None), 0.0, v)[0] if v.ndim else v,
    "scan reg": lambda v, p: lax.scan(lambda a, r: (a + r + p, None), 0.0, v)[0] if v.ndim else v,
    "scan p": lambda v, p: lax.scan(lambda a, r: (a * p + r, None), 0.0, v)[0] if v.ndim else v,
    "scan p2": lambda v, p: lax.scan(lambda a, r: (p * (a + r), None), 0.0, v)[0] if v.ndim else v,
    "scan -": lambda v, p: lax.scan(lambda a, r: (-(a + r), None), 0.0, v)[0] if v.ndim else v,
    "fori": lambda v, p: lax.fori_loop(0, B_of(v), lambda i, a: a + v[i] * p, 0.0) if v.ndim else v,
    "fori set": lambda v, p: (
        lax.fori_loop(0, B_of(v), lambda i, a: a.at[i].set(v[i] * p), 0 * v) if v.ndim else v
    ),
    "fori i": lambda v, p: (
        lax.fori_loop(0, B_of(v), lambda i, a: a + v[i] * (i + 1), 0.0) if v.ndim else v
    ),
    "scan weights": lambda v, p: (
        lax.scan(lambda c, r: ((c[0] + c[1] * r, c[1] * p), None), (0.0, 1.0), v)[0][0]
        if v.ndim
        else v
    ),
    "map": lambda v, p: lax.map(lambda r: jnp.sin(r * p), v, batch_size=3) if v.ndim else v,
    "parts": lambda v, p: jnp.concatenate([v[:2], 2 * v[2:]]) if v.ndim else v,
    "pad": lambda v, p: jnp.pad(v[1:], (1, 0)) if v.ndim else v,
    "set 0": lambda v, p: v.at[0].set(0.5) if v.ndim else v,
    "scan from": lambda v, p: lax.scan(lambda a, r: (a + r, None), p, v)[0] if v.ndim else v,
    "clip": lambda v, p: jnp.clip(v, 0.3, 0.9),
    "cast": lambda v, p: v.astype(jnp.float32).astype(jnp.float64),
    "weights": lambda v, p: (v * jnp.arange(1, 1 + B_of(v))).sum(),
    "two": lambda v, p: v.sum() + v.mean(),
    "concat": lambda v, p: jnp.concatenate([v, jnp.full(2, p)]).mean() if v.ndim else v,
    "stack": lambda v, p: jnp.stack([v, 2 * v]).sum(0),
}


def B_of(v):
    return v.shape[0] if v.ndim else 1


@settings(max_examples=PROGRAMS // 2)
@given(names=st.lists(st.sampled_from(sorted(TAILS)), min_size=1, max_size=4))
def test_an_accepted_reduction_is_the_mean_or_the_sum_of_the_samples_values(x64, names):
    def batch_loss(p, x):
        v = jnp.sin(p * x)
        for name in names:
            v = TAILS[name](v, p)
        return v

    @jax.jit
    def both(p, x):
        return jax.vmap(per_sample_loss(batch_loss), (None, 0))(p, x), batch_loss(p, x)

    try:
        values, total = both(jnp.float64(0.7), jnp.linspace(0.2, 1.9, B))
    except SampleMixingError:
        return
    assert_represents(values, total, 1e-6)
