"""Every method of ``Samples`` where arrays are spread over devices, and for one sample."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from conftest import DEEP
from test_per_sample import assert_equal, draw
from test_per_sample_cases import ALL, bumpy

EVERY = {**ALL, "noise_scale": lambda s, p, n: s.noise_scale(), "top": lambda s, p, n: s.top(n)[0]}
# Those left out are made from one of the others.
LEFT_OUT = set() if DEEP else {"norms", "sum", "mean", "second_moment", "top"}
USES = {name: use for name, use in EVERY.items() if name not in LEFT_OUT}


def model():
    """A tied embedding and a layer, eight samples."""

    def loss(p, x, t):
        return bumpy(jnp.tanh((p["e"][t] * x) @ p["w"]) @ p["e"].T)

    params = {"e": draw(0, 7, 4, dtype=jnp.float32), "w": draw(1, 4, 4, dtype=jnp.float32)}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 7, (8, 3)))
    return loss, params, draw(2, 8, 4, dtype=jnp.float32), tokens


def use_all(samples, params, names=tuple(USES)):
    return {name: USES[name](samples, params, len(samples)) for name in names}


def on(mesh, tree, spec):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), tree)


def test_batch_and_parameters_spread_under_jit_give_what_one_device_gives():
    loss, params, x, t = model()
    run = lambda p, x, t: use_all(fg.per_sample(loss, road="gram")(p, x, t), p)
    expected = jax.device_get(jax.jit(run)(params, x, t))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    columns = lambda w: P(None, "model")
    rows = lambda x: P("data")
    spread = on(mesh, params, columns)
    assert not any(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(spread))
    assert_equal(jax.jit(run)(spread, *on(mesh, (x, t), rows)), expected, 2e-5)


def test_inside_shard_map_every_method_gives_what_the_devices_samples_give():
    loss, params, x, t = model()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    names = [name for name in USES if name not in ("norms", "leaf_norms")]

    def local(p, x, t):
        found = use_all(fg.per_sample(loss, road="gram")(p, x, t), p, names)
        return jax.tree.map(lambda y: y[None], found)

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P("data"))
    got = jax.jit(run)(params, x, t)
    one = jax.jit(lambda p, x, t: use_all(fg.per_sample(loss, road="gram")(p, x, t), p, names))
    halves = [jax.device_get(one(params, x[i : i + 4], t[i : i + 4])) for i in (0, 4)]
    assert_equal(got, jax.tree.map(lambda *a: np.stack(a), *halves), 2e-5)


def test_shard_map_around_samples_made_outside():
    loss, params, x, t = model()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    samples = jax.jit(fg.per_sample(loss, road="gram"))(params, x, t)
    # Their arrays are cut, their number is not: refused rather than counted wrong.
    norms = lambda s: s.norms()
    run = jax.jit(jax.shard_map(norms, mesh=mesh, in_specs=P(), out_specs=P()))
    np.testing.assert_allclose(run(samples), jax.jit(norms)(samples), rtol=1e-5)
    cut = lambda s: jax.tree.map(lambda y: P("data") if y.shape[:1] == (8,) else P(), s)
    with pytest.raises(ValueError, match="one batch of 8 samples"):
        jax.jit(jax.shard_map(norms, mesh=mesh, in_specs=(cut(samples),), out_specs=P("data")))(
            samples
        )


@pytest.mark.parametrize("road", ["gram", "auto"] if DEEP else ["gram"])
def test_one_sample_is_a_batch_for_every_method(x64, road):
    params = {"w": draw(0, 4, 5), "b": draw(1, 5)}
    loss = lambda p, x: bumpy(jnp.tanh(x @ p["w"] + p["b"]) @ p["w"].T)
    x = draw(2, 1, 2, 4)
    names = [name for name in USES if name not in ("noise_scale", "top", "project")]
    got = jax.jit(lambda p, x: use_all(fg.per_sample(loss, road=road)(p, x), p, names))(params, x)
    row = jax.grad(loss)(params, x[0])
    flat = np.concatenate([np.ravel(g) for g in jax.tree.leaves(row)])
    norm = np.linalg.norm(flat)
    zeros = jax.tree.map(np.zeros_like, row)
    expected = {
        "norms": np.array([norm]),
        "leaf_norms": jax.tree.map(lambda g: np.linalg.norm(g)[None], row),
        "weighted_sum": row,
        "sum": row,
        "mean": row,
        "second_moment": jax.tree.map(np.square, row),
        "variance": zeros,
        "dots": np.array([sum(np.vdot(p, g) for p, g in zip(params.values(), [row["w"], row["b"]], strict=True))]),  # noqa: E501
        "gram": np.array([[norm**2]]),
        "materialize": jax.tree.map(lambda g: g[None], row),
    }  # fmt: skip
    known = [name for name in names if name in expected]
    assert_equal({k: got[k] for k in known}, {k: expected[k] for k in known}, 1e-10)
