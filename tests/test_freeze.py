"""Freezing: one specification for gradient, clip norm, weight decay and optimiser state."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from funcgrad import _jaxpr

TOKENS = jnp.array([[0, 1, 2, 1], [3, 3, 0, 4]])


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        h = nn.Embed(5, 4, name="embed")(tokens)
        return nn.Dense(3, name="head")(nn.tanh(nn.Dense(4, name="hidden")(h)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.hidden = nnx.Linear(4, 4, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.drop(self.norm(jnp.tanh(self.hidden(self.embed(tokens))))))


@functools.cache
def linen_params():
    return jax.jit(Linen().init)(jax.random.key(0), TOKENS)["params"]


def linen_loss(params, tokens):
    return (Linen().apply({"params": params}, tokens) ** 2).mean()


def plain_params():
    rng = np.random.default_rng(1)
    embed, *layers = (rng.normal(size=(n, 4)).astype(np.float32) for n in (5, 4, 4))
    embed[0] = -0.0
    return jax.tree.map(jnp.asarray, {"embed": embed, "layers": layers, "steps": np.int32(3)})


def plain_loss(params, tokens):  # the embedding is tied to the output
    h = params["embed"][tokens]
    for layer in params["layers"]:
        h = jnp.tanh(h @ layer)
    return (h @ params["embed"].T).mean()


def leaves(tree):
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}


def assert_same_bits(a, b):
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def train(frozen, params, loss, tx, steps):
    tx = frozen.optimizer(tx)

    @jax.jit
    def step(params, state):
        grads = frozen.grad(loss)(params, TOKENS)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


SPECS = {
    "pattern": "embed",
    "patterns": ["embed/*", "embed"],
    "predicate": lambda path, leaf: path.startswith("embed"),
    "booleans": {"embed": True, "layers": False, "steps": False},
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_form_of_specification_names_the_same_leaves(spec):
    if spec == ["embed/*", "embed"]:
        spec = ["emb*", "steps"]
    trainable, fixed = fg.freeze(spec).split(plain_params())
    assert set(leaves(trainable)) == {"layers/0", "layers/1"}
    assert set(leaves(fixed)) == {"embed", "steps"}


def test_frozen_leaves_keep_every_bit_under_100_steps_of_adamw_with_decay():
    params = plain_params()
    tx = optax.adamw(1e-2, weight_decay=0.1)
    trained, _ = train(fg.freeze("embed"), params, plain_loss, tx, 100)
    before, after = leaves(params), leaves(trained)
    for path in before:
        if path in ("embed", "steps"):
            assert_same_bits(after[path], before[path])  # -0.0 in it stays -0.0
        else:
            assert np.abs(after[path] - before[path]).max() > 0.01


def test_training_with_frozen_leaves_equals_training_the_others_alone():
    params = {k: v for k, v in plain_params().items() if k != "steps"}
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))
    trained, _ = train(fg.freeze("embed"), params, plain_loss, tx, 10)

    rest = {k: v for k, v in params.items() if k != "embed"}
    loss = lambda rest: plain_loss({**rest, "embed": params["embed"]}, TOKENS)

    @jax.jit
    def step(rest, state):
        updates, state = tx.update(jax.grad(loss)(rest), state, rest)
        return optax.apply_updates(rest, updates), state

    state = tx.init(rest)
    for _ in range(10):
        rest, state = step(rest, state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        {k: v for k, v in trained.items() if k != "embed"},
        rest,
    )


def test_optimiser_state_holds_nothing_for_frozen_leaves():
    params = linen_params()
    state = fg.freeze(["embed", "hidden/*"]).optimizer(optax.adamw(1e-3)).init(params)
    assert not [path for path in leaves(state) if "embed" in path or "hidden" in path]
    n_trained = params["head"]["kernel"].size + params["head"]["bias"].size
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 2 * n_trained + 1


def test_the_clip_norm_leaves_frozen_leaves_out():
    params = {"frozen": jnp.ones(2), "w": jnp.ones(2)}
    loss = lambda p: 100 * p["frozen"].sum() + p["w"].sum()
    frozen = fg.freeze("frozen")
    tx = frozen.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    state = tx.init(params)
    for grads in (frozen.grad(loss)(params), jax.grad(loss)(params)):
        updates, _ = tx.update(grads, state, params)
        np.testing.assert_allclose(updates["w"], -0.70711, rtol=1e-4)
        np.testing.assert_array_equal(updates["frozen"], 0)
    # What goes wrong without, and with Optax' own mask.
    clip = optax.clip_by_global_norm(1.0)
    everything, _ = clip.update(jax.grad(loss)(params), clip.init(params))
    np.testing.assert_allclose(everything["w"], 0.00707, rtol=1e-3)
    masked = optax.masked(optax.sgd(1.0), {"frozen": False, "w": True})
    passed_on, _ = masked.update(jax.grad(loss)(params), masked.init(params))
    np.testing.assert_allclose(passed_on["frozen"], 100.0)


def test_a_nan_in_a_frozen_leafs_gradient_reaches_nothing():
    params = {"frozen": jnp.zeros(1), "w": jnp.ones(1)}
    loss = lambda p: jnp.sqrt(p["frozen"]).sum() + p["w"].sum()  # infinite slope at 0
    frozen = fg.freeze("frozen")
    tx = frozen.optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)))
    updates, _ = tx.update(jax.grad(loss)(params), tx.init(params), params)
    assert np.isfinite(updates["w"]).all()
    assert_same_bits(optax.apply_updates(params, updates)["frozen"], params["frozen"])


def test_nothing_is_computed_or_kept_for_frozen_leaves():
    params, x = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}, jnp.ones((32, 8))
    loss = lambda p, x: (jnp.tanh(x @ p["a"]) @ p["b"]).sum()
    frozen = fg.freeze("a")

    def products(fun):
        jaxpr = jax.make_jaxpr(fun)(params, x)
        return sum(v.eqn.primitive.name == "dot_general" for v in _jaxpr.walk(jaxpr))

    # Forward 2; backward into b one more, into a two more.
    assert products(jax.grad(loss)) == 5
    assert products(frozen.grad(loss)) == 3

    trainable, fixed = frozen.split(params)
    pulled = jax.eval_shape(
        lambda t: jax.vjp(lambda t: loss(frozen.merge(t, fixed), x), t)[1], trainable
    )
    # Behind tanh, for b; b itself would only serve a.
    assert sum(leaf.size for leaf in jax.tree.leaves(pulled)) == 32 * 8


def test_a_tied_leaf_is_frozen_in_both_uses_or_trained_by_both():
    params = plain_params()
    grads = fg.freeze("embed").grad(plain_loss)(params, TOKENS)
    assert grads["embed"] is None
    grads = fg.freeze("layers").grad(plain_loss)(params, TOKENS)
    whole = jax.grad(plain_loss, allow_int=True)(params, TOKENS)
    np.testing.assert_allclose(grads["embed"], whole["embed"], rtol=1e-6)
    assert jax.tree.leaves(grads["layers"]) == []


def test_value_and_grad_passes_values_aux_and_keywords():
    frozen = fg.freeze("embed")
    loss = lambda p, t, scale: (scale * plain_loss(p, t), t.shape)
    params = plain_params()
    (value, aux), grads = frozen.value_and_grad(loss, has_aux=True)(params, TOKENS, scale=2.0)
    np.testing.assert_allclose(value, 2 * plain_loss(params, TOKENS), rtol=1e-6)
    assert aux == (2, 4)
    again, aux = frozen.grad(loss, has_aux=True)(params, TOKENS, scale=2.0)
    assert aux == (2, 4)
    jax.tree.map(np.testing.assert_array_equal, grads, again)


def test_split_and_merge_are_inverse_and_compose_with_transformations():
    frozen = fg.freeze("embed")
    params = plain_params()
    merged = frozen.merge(*frozen.split(params))
    jax.tree.map(assert_same_bits, merged, params)

    trainable, fixed = frozen.split(params)
    loss = lambda t, tokens: plain_loss(frozen.merge(t, fixed), tokens)
    rows = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(trainable, TOKENS)
    known = jax.vmap(frozen.grad(plain_loss), (None, 0))(params, TOKENS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), rows, known)
    second = jax.jvp(lambda t: jax.grad(loss)(t, TOKENS), (trainable,), (trainable,))[1]
    assert second["embed"] is None and np.isfinite(second["layers"][0]).all()
    carried, _ = lax.scan(lambda p, _: (frozen.merge(*frozen.split(p)), None), params, length=2)
    jax.tree.map(assert_same_bits, carried, params)


def test_the_same_specification_serves_per_sample_gradients():
    frozen = fg.freeze("embed")
    params, x = {"embed": jnp.ones((2, 3)), "head": jnp.ones((3, 1))}, jnp.eye(4, 2)
    loss = lambda p, x: (x @ p["embed"] @ p["head"]).sum()
    grads = jax.jit(fg.clipped_grad(loss, max_norm=1e3, frozen=frozen.spec))(params, x).grads
    tx = frozen.optimizer(optax.sgd(1.0))
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["head"], -frozen.grad(loss)(params, x)["head"], rtol=1e-5)
    np.testing.assert_array_equal(updates["embed"], 0)


def test_leaves_that_are_no_numbers_and_low_precision():
    params = {
        "w": jnp.ones(2, jnp.bfloat16),
        "z": jnp.ones(2, jnp.complex64),
        "key": jax.random.key(0),
    }
    frozen = fg.freeze("z")
    trainable, fixed = frozen.split(params)
    assert set(leaves(trainable)) == {"w"}
    grads = frozen.grad(lambda p: (p["w"] * abs(p["z"])).sum().astype(jnp.float32))(params)
    assert grads["w"].dtype == jnp.bfloat16 and grads["key"] is None

    tx = frozen.optimizer(optax.sgd(0.1))
    state = tx.init(params)
    with pytest.raises(TypeError, match=r"got params\['key'\], a key"):
        tx.update(grads, state, params)
    scales = {"w": params["w"], "e": jnp.ones(2, jnp.float8_e8m0fnu)}  # to 2**-127, and no zero
    tx = fg.freeze("e").optimizer(optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"got params\['e'\], of float8_e8m0fnu, which has no zero"):
        tx.update(scales, tx.init(scales), scales)


def test_leaves_that_are_no_arrays_of_numbers_are_fixed():
    odd = {"type": jnp.float32, "dtype": np.dtype("float32"), "names": np.array(["a"]), "f": len}
    params = {"w": jnp.ones(2), "n": 3, "flag": True, "x": 0.5, **odd}
    trainable, fixed = fg.freeze([]).split(params)
    assert set(leaves(trainable)) == {"w", "x"}
    assert set(leaves(fixed)) == {"n", "flag", *odd}
    tx = fg.freeze("x").optimizer(optax.sgd(0.1))
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["n"] == 0 and updates["f"] is None and updates["names"] is None


def test_keywords_of_the_loss_may_have_any_name():
    loss = lambda w, *, params, fun, self: w["a"] @ w["b"] * params * fun * self
    tree = {"a": jnp.ones(2), "b": jnp.ones(2)}
    grads = fg.freeze("a").grad(loss)(tree, params=2.0, fun=3.0, self=1.0)
    np.testing.assert_array_equal(grads["b"], 6.0)


def test_a_line_search_may_get_the_gradient_of_the_whole():
    params = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0, 4.0])}
    loss = lambda p: ((p["a"] * p["b"] - 1) ** 2).sum()
    frozen = fg.freeze("a")
    search = optax.scale_by_backtracking_linesearch(30, store_grad=True)
    tx = frozen.optimizer(optax.chain(optax.sgd(1.0), search))
    found = []
    for grad in (frozen.grad(loss), jax.grad(loss)):

        @jax.jit
        def step(params, grad=grad):
            grads = grad(params)
            extra = {"value": loss(params), "grad": grads, "value_fn": loss}
            updates, _ = tx.update(grads, tx.init(params), params, **extra)
            return optax.apply_updates(params, updates)

        found.append(step(params))
    assert_same_bits(found[0]["a"], params["a"])
    assert loss(found[0]) < loss(params)
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_an_ensemble_trains_in_a_scan_under_vmap_as_alone():
    frozen = fg.freeze("a")
    tx = frozen.optimizer(optax.adamw(0.1))
    loss = lambda p: (p["a"] ** 2 * p["b"]).sum()

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(frozen.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda p: lax.scan(step, (p, tx.init(p)), length=3)[0][0])
    params = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0, 4.0]), "n": jnp.int32(2)}
    two = jax.tree.map(lambda x: jnp.stack([x, x + 1]), params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-6), jax.vmap(run)(two), run(params)
    )


def test_equinox_modules_are_trees_like_any_other():
    eqx = pytest.importorskip("equinox")
    net = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    # The tree of booleans that Equinox' own examples make; it is callable, as the module is.
    spec = eqx.tree_at(
        lambda net: (net.layers[0].weight, net.layers[0].bias),
        jax.tree.map(lambda _: False, net),
        (True, True),
    )
    frozen = fg.freeze(spec)
    same = fg.freeze("layers/0").split(net)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, frozen.split(net), same))
    x = jnp.ones(2)
    grads = frozen.grad(lambda net: net(x).sum())(net)
    assert grads.layers[0].weight is None and grads.layers[1].weight.shape == (1, 4)
    tx = frozen.optimizer(optax.adam(0.1))
    updates, _ = tx.update(grads, tx.init(net), net)
    new = eqx.apply_updates(net, updates)
    assert_same_bits(new.layers[0].weight, net.layers[0].weight)
    assert np.abs(new.layers[1].weight - net.layers[1].weight).max() > 0.05
    assert new.activation is net.activation


def test_shardings_stay():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("model"))
    params = jax.device_put({"a": jnp.ones((8, 2)), "b": jnp.ones((8, 2))}, rows)
    frozen = fg.freeze("a")
    tx = frozen.optimizer(optax.adamw(0.1))

    @jax.jit
    def step(params, state):
        grads = frozen.grad(lambda p: (p["a"] * p["b"] ** 2).sum())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    new, _ = step(params, tx.init(params))
    assert new["a"].sharding.is_equivalent_to(rows, 2)
    assert_same_bits(new["a"], params["a"])
    assert new["b"].sharding.is_equivalent_to(rows, 2)


def test_what_cannot_be_frozen_is_refused_by_name():
    params = linen_params()
    with pytest.raises(ValueError, match=r"'embde', which names none. Near names: embed/embedding"):
        fg.freeze("embde").split(params)
    with pytest.raises(ValueError, match="freeze: a prefix has the structure of the tree"):
        fg.freeze({"embed": True}).split(params)
    with pytest.raises(ValueError, match="freezes all 5 leaves"):
        fg.freeze("*").grad(linen_loss)(params, TOKENS)
    tx = fg.freeze("embed").optimizer(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"got None for params\['head'\]\['bias'\]. Use one spec"):
        tx.update(fg.freeze("head").split(params)[0], tx.init(params), params)
    with pytest.raises(ValueError, match="got none in update"):
        tx.update(params, tx.init(params))
    with pytest.raises(TypeError, match="split takes a tree of leaves; got an NNX module"):
        fg.freeze("embed").split(Nnx(nnx.Rngs(0)))


# NNX


def nnx_loss(model, tokens):
    return (model(tokens) ** 2).mean()


def test_an_nnx_module_trains_without_its_frozen_variables():
    model = Nnx(nnx.Rngs(0))
    frozen = fg.freeze("embed")
    wrt = frozen.filter(model)
    for spec in ("embed", lambda path, leaf: path == "embed/embedding", ["embed/embedding"]):
        same = fg.freeze(spec).filter(model)
        assert wrt == same and hash(wrt) == hash(same)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, weight_decay=0.1), wrt=wrt)
    assert not [path for path in leaves(nnx.to_pure_dict(nnx.state(optimizer))) if "embed" in path]

    @nnx.jit
    def step(model, optimizer):
        value, grads = frozen.value_and_grad(nnx_loss)(model, TOKENS)
        optimizer.update(model, grads)
        return value

    before = leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    statistics = np.asarray(model.norm.mean[...])
    count = int(model.drop.rngs.count[...])
    for _ in range(20):
        step(model, optimizer)
    after = leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert_same_bits(after["embed/embedding"], before["embed/embedding"])
    for path in set(before) - {"embed/embedding"}:
        assert np.abs(after[path] - before[path]).max() > 0.01
    # What the forward pass changes in the module is kept.
    assert np.abs(np.asarray(model.norm.mean[...]) - statistics).max() > 0
    assert int(model.drop.rngs.count[...]) == count + 20


def test_an_nnx_state_is_a_plain_tree_and_the_optimizer_may_see_all_of_it():
    model = Nnx(nnx.Rngs(0))
    frozen = fg.freeze("embed")
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    loss = lambda p: nnx_loss(nnx.merge(graph, p, rest, copy=True), TOKENS)
    grads = jax.eval_shape(frozen.grad(loss), params)
    assert not [path for path in leaves(grads) if "embed" in path]
    assert len(leaves(grads)) == 6

    whole = nnx.Optimizer(model, frozen.optimizer(optax.adamw(1e-2)), wrt=nnx.Param)
    before = np.asarray(model.embed.embedding[...])
    step = nnx.jit(lambda model, whole: whole.update(model, nnx.grad(nnx_loss)(model, TOKENS)))
    step(model, whole)
    assert_same_bits(model.embed.embedding[...], before)


def test_an_nnx_variable_that_holds_a_tree_is_frozen_as_a_whole():
    class Pair(nnx.Module):
        def __init__(self):
            self.pair = nnx.Param({"a": jnp.ones(2), "b": (jnp.ones(2),)})
            self.scale = nnx.Param(jnp.full(2, 3.0))

        def __call__(self, x):
            return x * self.pair["a"] * self.scale[...] + self.pair["b"][0]

    loss = lambda model, x, fun=1.0, model_scale=1.0: model(x).sum() * fun
    grads = fg.freeze("scale").grad(loss)(Pair(), jnp.ones(2), fun=2.0)
    np.testing.assert_array_equal(grads["pair"].get_value()["a"], 6.0)
    assert "scale" not in grads
    assert "pair" not in fg.freeze("pair").grad(loss)(Pair(), jnp.ones(2))
    with pytest.raises(ValueError, match="frozen as a whole; got some leaves of pair"):
        fg.freeze("pair/a").filter(Pair())


def test_a_shared_nnx_variable_is_one_leaf_under_its_first_path():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(5, 4, rngs=rngs)
            self.output = self.embed

        def __call__(self, tokens):
            return self.output.attend(jnp.tanh(self.embed(tokens)))

    model = Tied(nnx.Rngs(0))
    with pytest.raises(ValueError, match="'output', which names none. Near names: .*embed"):
        fg.freeze("output").filter(model)
    with pytest.raises(ValueError, match="all"):
        fg.freeze("embed").grad(nnx_loss)(model, TOKENS)


# torch


@pytest.mark.torch
def test_freezing_equals_requires_grad_false(torch):
    params = {k: np.asarray(v) for k, v in plain_params().items() if k != "steps" and k == "embed"}
    params |= {f"layer{i}": np.asarray(w) for i, w in enumerate(plain_params()["layers"])}

    theirs = {k: torch.tensor(v, requires_grad=k != "embed") for k, v in params.items()}
    optimizer = torch.optim.AdamW(
        [p for p in theirs.values() if p.requires_grad], lr=1e-2, weight_decay=0.1
    )
    tokens = torch.tensor(np.asarray(TOKENS)).long()
    for _ in range(5):
        h = theirs["embed"][tokens]
        for i in (0, 1):
            h = torch.tanh(h @ theirs[f"layer{i}"])
        optimizer.zero_grad()
        (h @ theirs["embed"].T).mean().backward()
        torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.1)
        optimizer.step()

    def loss(p, tokens):
        return plain_loss({"embed": p["embed"], "layers": [p["layer0"], p["layer1"]]}, tokens)

    clip = optax.clip_by_global_norm(0.1)
    tx = optax.chain(clip, optax.adamw(1e-2, weight_decay=0.1, eps=1e-8))
    ours, _ = train(fg.freeze("embed"), {k: jnp.asarray(v) for k, v in params.items()}, loss, tx, 5)
    for name in params:
        np.testing.assert_allclose(ours[name], theirs[name].detach(), rtol=1e-4, atol=1e-6)
