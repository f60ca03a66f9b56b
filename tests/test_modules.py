"""Flax modules as functions of their variables, and ensembles of them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import funcgrad as fg


class Net(nnx.Module):
    """Linear, norm, dropout: parameters, statistics and random numbers."""

    def __init__(self, seed=0, width=3, activation=nnx.relu):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(2, width, rngs=rngs)])
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.activation = activation
        self.scaled = lambda x: 2 * x  # made anew for each model

    def __call__(self, x):
        return self.scaled(self.drop(self.norm(self.activation(self.layers[0](x)))))


class LinenNet(nn.Module):
    """The same in Linen."""

    @nn.compact
    def __call__(self, x, train=True):
        h = nn.BatchNorm(use_running_average=not train)(nn.relu(nn.Dense(3)(x)))
        h = nn.Dropout(0.5, deterministic=not train)(h)
        self.sow("intermediates", "h", h)
        return nn.Dense(1)(h)


class Tied(nnx.Module):
    """One weight under two names."""

    def __init__(self, value=1.0, tied=True):
        self.foo = nnx.Param(jnp.array(value))
        self.bar = self.foo if tied else nnx.Param(jnp.array(value))

    def __call__(self, x):
        return x + self.foo[...] + self.bar[...]


X = jnp.arange(8.0).reshape(4, 2)


def equal(a, b):
    leaves = lambda tree: [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]
    return all(np.array_equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


@pytest.fixture(scope="module")
def linen():
    net = LinenNet()
    return net, net.init(jax.random.key(0), X, train=False)


# NNX


def test_call_of_nnx_module_equals_the_module_and_leaves_it_alone():
    model = Net()
    before = nnx.state(nnx.clone(model))
    called = fg.functional_call(model, nnx.state(model, nnx.Param), X)
    assert equal(nnx.state(model), before)
    np.testing.assert_array_equal(called.output, model(X))
    assert equal(called.state, nnx.state(model, nnx.Not(nnx.Param)))


def test_returned_state_is_what_the_next_call_takes():
    model = Net()
    params = nnx.state(model, nnx.Param)
    first = fg.functional_call(model, params, X)
    second = fg.functional_call(model, (params, first.state), X)
    model(X)
    np.testing.assert_array_equal(second.output, model(X))
    assert not np.array_equal(first.output, second.output)  # another mask


@pytest.mark.parametrize("form", ["state", "pure", "dotted", "all"])
def test_every_form_of_the_parameters_gives_the_same(form):
    model = Net()
    params = nnx.state(model, nnx.Param)
    pure = nnx.to_pure_dict(params)
    given = {
        "state": params,
        "pure": pure,
        "dotted": {
            "layers.0.kernel": pure["layers"][0]["kernel"],
            "layers.0.bias": pure["layers"][0]["bias"],
            "norm": pure["norm"],
        },
        "all": nnx.state(model),
    }[form]
    np.testing.assert_array_equal(fg.functional_call(model, given, X).output, nnx.clone(model)(X))


def test_gradient_of_a_scan_over_calls_equals_that_of_the_module():
    model = Net()
    params, rest = nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))

    def loss(params):
        def step(state, x):
            called = fg.functional_call(model, (params, state), x)
            return called.state, (called.output**2).sum()

        state, losses = jax.lax.scan(step, rest, jnp.stack([X, X + 1]))
        return losses.sum(), state

    grads, state = jax.jit(jax.grad(loss, has_aux=True))(params)

    def by_hand(model):
        return (model(X) ** 2).sum() + (model(X + 1) ** 2).sum()

    expected = nnx.jit(nnx.grad(by_hand))(model)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(
        jax.tree.leaves(state["norm"]),
        jax.tree.leaves(nnx.state(model, nnx.BatchStat)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert state["drop"]["rngs"]["count"].get_value() == 2


def test_tied_weight_has_one_value_under_either_name():
    for name in ("foo", "bar"):
        assert fg.functional_call(Tied(), {name: jnp.array(5.0)}, 0.0).output == 10
    untied = {"foo": jnp.array(5.0), "bar": jnp.array(6.0)}
    assert fg.functional_call(Tied(tied=False), untied, 0.0).output == 11
    same = jnp.array(5.0)
    assert fg.functional_call(Tied(), {"foo": same, "bar": same}, 0.0).output == 10
    grad = jax.grad(lambda w: fg.functional_call(Tied(), {"foo": w}, 0.0).output)(5.0)
    assert grad == 2
    with pytest.raises(ValueError, match=r"one value; got two, for 'foo' and 'bar'"):
        fg.functional_call(Tied(), untied, 0.0)


@pytest.mark.torch
def test_tied_weights_as_in_torch(torch):
    class Module(torch.nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.foo = torch.nn.Parameter(torch.tensor(1.0))
            self.bar = self.foo if tied else torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return x + self.foo + self.bar

    call, five, six = torch.func.functional_call, torch.tensor(5.0), torch.tensor(6.0)
    for name in ("foo", "bar"):
        theirs = call(Module(True), {name: five}, (torch.tensor(0.0),))
        assert float(theirs) == fg.functional_call(Tied(), {name: 5.0}, 0.0).output
    theirs = call(Module(False), {"foo": five, "bar": six}, (torch.tensor(0.0),))
    ours = fg.functional_call(Tied(tied=False), {"foo": 5.0, "bar": 6.0}, 0.0).output
    assert float(theirs) == ours == 11
    with pytest.raises(ValueError, match="multiple values"):
        call(Module(True), {"foo": five, "bar": six}, (torch.tensor(0.0),))


def test_names_inside_a_module_used_twice_lead_to_its_one_weight():
    class Twice(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
            self.b = self.a

        def __call__(self, x):
            return self.b(self.a(x))

    for name in ("a.kernel", "b.kernel"):
        out = fg.functional_call(Twice(), {name: jnp.array([[3.0]])}, jnp.ones(1)).output
        assert out == 9


def test_sown_values_do_not_come_back():
    class Sows(nnx.Module):
        def __init__(self):
            self.count = nnx.BatchStat(jnp.array(0))

        def __call__(self, x):
            self.count[...] += 1
            self.h = nnx.Intermediate(x)
            return x

    called = fg.functional_call(Sows(), {}, 1.0)
    assert nnx.to_pure_dict(called.state) == {"count": 1}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda p: {**p, "norm": {"scale": p["norm"]["scale"]}}, "got missing 'norm.bias'"),
        (
            lambda p: {**p, "norm": {"scale": p["norm"]["scale"], "bais": p["norm"]["bias"]}},
            r"missing 'norm.bias'; unexpected 'norm.bais' \(near names: norm.bias\)",
        ),
        (
            lambda p: {**p, "norm": {"scale": jnp.ones(4), "bias": jnp.ones(3)}},
            r"shape of the module's own, \[3\] for 'norm.scale'; got \[4\]",
        ),
        (lambda p: (p, p), "stands once; got '.*' in two trees"),
        (lambda p: {**p, "norm.bias": jnp.ones(3)}, "stands once; got 'norm.bias' twice"),
    ],
)
def test_names_and_shapes_are_strict(change, words):
    model = Net()
    with pytest.raises(ValueError, match=words):
        fg.functional_call(model, change(nnx.to_pure_dict(nnx.state(model, nnx.Param))), X)


def test_call_that_changes_a_parameter_is_refused():
    class Writes(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            self.w[...] *= 2
            return x

    with pytest.raises(ValueError, match="leaves the parameters as they are; got a new .* 'w'"):
        fg.functional_call(Writes(), {"w": jnp.ones(2)}, 1.0)


class Holds(nnx.Module):
    """A module with a function among its attributes."""

    def __init__(self, function):
        self.w = nnx.Param(jnp.array(2.0))
        self.function = function(self)

    def scaled(self, x):
        return self.w[...] * x

    def __call__(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "function, what",
    [
        (lambda self: lambda x: self.w[...] * x, "the module"),
        (lambda self: self.scaled, "the module"),
        (lambda self: functools.partial(Holds.scaled, self), "the module"),
        (lambda self: jax.jit(lambda x, w=self.w: w[...] * x), "the own 'w'"),
        (lambda self: [(lambda f: lambda x: f(x))(self.scaled)], "the module"),
    ],
)
def test_function_that_would_use_the_modules_own_values_is_refused(function, what):
    model = Holds(lambda self: nnx.static(function(self)))
    for call in (
        lambda: fg.functional_call(model, {"w": 5.0}, 1.0),
        lambda: fg.stack_modules([model, model]),
    ):
        with pytest.raises(ValueError, match=f"got 'function.*', which holds {what} and would"):
            call()


def test_variables_that_are_mutable_arrays_are_refused():
    with nnx.var_defaults(ref=True):
        model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    for call, run in (
        ("functional_call", lambda: fg.functional_call(model, nnx.state(model), X)),
        ("stack_modules", lambda: fg.stack_modules([model, model])),
    ):
        with pytest.raises(ValueError, match=f"{call}: .* hold arrays.* got a jax.Ref for 'bias'"):
            run()


def test_attribute_changed_by_a_call_is_refused():
    class Counts(nnx.Module):
        def __init__(self):
            self.n = 0

        def __call__(self, x):
            self.n += 1
            return self.n * x

    with pytest.raises(ValueError, match="a call changes variables alone.* got 1 for 0 at 'n'"):
        fg.functional_call(Counts(), {}, 1.0)


class Doubled(nnx.Param):
    """A parameter that reads as twice what it holds."""

    def get_value(self, **kwargs):
        return 2 * super().get_value(**kwargs)


class Plain(nnx.Module):
    """An array that is an attribute, and a parameter with another reading."""

    def __init__(self, value=3.0):
        self.w = Doubled(jnp.array(2.0))
        self.total = jnp.array(value)

    def __call__(self, x):
        self.total = self.total + 1
        return self.w.get_value() * self.total * x


def test_array_that_is_an_attribute_is_state_and_values_are_what_variables_hold():
    model = Plain()
    first = fg.functional_call(model, nnx.state(model, nnx.Param), 1.0)
    assert first.output == 16 and first.state["total"] == 4
    assert fg.functional_call(model, ({"w": 3.0}, first.state), 1.0).output == 30
    stacked = fg.stack_modules([Plain(), Plain(5.0)])
    called = jax.vmap(lambda variables: fg.functional_call(model, variables, 1.0))(stacked)
    np.testing.assert_array_equal(called.output, [16, 24])


def test_what_is_no_flax_module_or_has_no_names_is_refused():
    with pytest.raises(TypeError, match="Linen or NNX; got function"):
        fg.functional_call(lambda x: x, {}, 1.0)
    with pytest.raises(TypeError, match="variables stand under their names, .* got Tied"):
        fg.functional_call(Tied(), Tied(), 1.0)


# Linen


@pytest.mark.parametrize("form", ["whole", "pair", "dotted"])
def test_call_of_linen_module_equals_apply(linen, form):
    net, variables = linen
    rngs = {"dropout": jax.random.key(1)}
    names = jax.tree_util.tree_leaves_with_path(variables)
    given = {
        "whole": variables,
        "pair": (variables["params"], {"batch_stats": variables["batch_stats"]}),
        "dotted": {".".join(key.key for key in path): leaf for path, leaf in names},
    }[form]
    called = fg.functional_call(net, given, X, rngs=rngs)
    output, state = net.apply(variables, X, rngs=rngs, mutable=["batch_stats"])
    np.testing.assert_array_equal(called.output, output)
    assert called.state.keys() == {"batch_stats"} and equal(called.state, state)


def test_state_of_a_linen_module_is_given_with_the_parameters(linen):
    net, variables = linen
    with pytest.raises(ValueError, match=r"missing 'batch_stats.BatchNorm_0.mean'"):
        fg.functional_call(net, variables["params"], X, train=False)
    evaluated = fg.functional_call(net, variables, X, train=False)
    assert equal(evaluated.state, {"batch_stats": variables["batch_stats"]})


def test_unknown_name_that_linen_would_pass_over_is_refused(linen):
    net, variables = linen
    params = {**variables["params"], "Dense_2": variables["params"]["Dense_1"]}
    net.apply({**variables, "params": params}, X, train=False)
    with pytest.raises(ValueError, match=r"unexpected 'params.Dense_2.bias' \(near names: params"):
        fg.functional_call(net, {**variables, "params": params}, X, train=False)


def test_other_method_and_boxed_parameters_of_a_linen_module():
    class Boxed(nn.Module):
        def setup(self):
            init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
            self.dense = nn.Dense(3, kernel_init=init)

        def __call__(self, x):
            return self.dense(x)

        def twice(self, x):
            return 2 * self.dense(x)

    net = Boxed()
    variables = net.init(jax.random.key(0), X)
    out = fg.functional_call(net, variables, X, method="twice").output
    np.testing.assert_array_equal(out, 2 * net.apply(variables, X))


def test_gradient_under_jit_of_a_linen_module(linen):
    net, variables = linen
    state = {"batch_stats": variables["batch_stats"]}

    @jax.jit
    def both(params):
        ours = lambda p: fg.functional_call(net, (p, state), X, train=False).output
        theirs = lambda p: net.apply({"params": p, **state}, X, train=False)
        return [
            jax.grad(lambda p, call=call: (call(p) ** 2).sum())(params) for call in (ours, theirs)
        ]

    found, expected = both(variables["params"])
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_state_sown_by_a_linen_module_is_that_of_the_last_call():
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("losses", "size", x.sum())
            return nn.Dense(1)(x)

    net = Sows()
    variables = net.init(jax.random.key(0), X)
    state = {"losses": variables["losses"]}
    for scale in (2.0, 3.0):
        state = fg.functional_call(net, (variables["params"], state), scale * X).state
        assert state == {"losses": {"size": (scale * X.sum(),)}}


def test_mutable_is_refused(linen):
    net, variables = linen
    with pytest.raises(TypeError, match="all state is mutable, and comes back; got mutable="):
        fg.functional_call(net, variables, X, mutable=["batch_stats"])


# Ensembles


def test_ensemble_equals_the_loop_with_each_member_its_own_dropout():
    models = [Net(seed) for seed in range(2)]
    stacked = fg.stack_modules(models)
    call = lambda variables, x: fg.functional_call(models[0], variables, x)
    called = jax.jit(jax.vmap(call, (0, None)))(stacked, X)
    for i, model in enumerate(models):
        np.testing.assert_allclose(called.output[i], model(X), atol=1e-5)
        member = jax.tree.map(lambda leaf, i=i: leaf[i], called.state)
        mean = member["norm"]["mean"].get_value()
        np.testing.assert_allclose(mean, model.norm.mean.get_value(), atol=1e-5)
    keys = jax.random.key_data(stacked.state["drop"]["rngs"]["key"].get_value())
    assert len({tuple(key.tolist()) for key in keys}) == 2


def test_ensemble_of_linen_variables_equals_the_loop(linen):
    net, variables = linen
    members = [jax.tree.map(lambda leaf, i=i: leaf + i, variables) for i in range(2)]
    stacked = fg.stack_modules(members)
    call = lambda variables: fg.functional_call(net, variables, X, train=False).output
    outputs = jax.vmap(call)(stacked)
    for output, member in zip(outputs, members, strict=True):
        np.testing.assert_allclose(output, net.apply(member, X, train=False), atol=1e-6)
    assert fg.stack_modules([{"w": X}, {"w": X}]).params["w"].shape == (2, 4, 2)
    boxed = nn.Partitioned(X, (None, "model"))
    assert fg.stack_modules([{"w": boxed}, {"w": boxed}]).params["w"].value.shape == (2, 4, 2)


def test_gradient_of_an_ensemble_has_its_members_gradients():
    models = [Tied(value) for value in (1.0, 2.0, 3.0)]
    stacked = fg.stack_modules(models)
    call = lambda params: fg.functional_call(models[0], params, 0.0).output ** 2
    grads = jax.grad(lambda params: jax.vmap(call)(params).sum())(stacked.params)
    np.testing.assert_array_equal(grads["bar"].get_value(), [8.0, 16.0, 24.0])


@pytest.mark.parametrize(
    "other, words",
    [
        (lambda: Net(1, activation=nnx.tanh), r"got tanh at 'activation' in models\[1\], and relu"),
        (lambda: Net(1, width=4), r"at '.*' in models\[1\]"),
        (lambda: Tied(), r"got Tied at '' in models\[1\], and Net"),
    ],
)
def test_models_of_another_structure_are_refused_by_path(other, words):
    with pytest.raises(ValueError, match=words):
        fg.stack_modules([Net(0), other()])


def test_tied_and_untied_models_do_not_stack():
    with pytest.raises(ValueError, match=r"got Param at 'foo' in models\[1\], and tied to bar in"):
        fg.stack_modules([Tied(), Tied(tied=False)])


def test_shapes_dtypes_and_names_of_variables_are_one_for_all():
    with pytest.raises(ValueError, match=r"got float32\[\] at 'bar' in models\[1\], and bfloat16"):
        fg.stack_modules([Tied(jnp.bfloat16(1)), Tied(1.0)])
    with pytest.raises(ValueError, match=r"got nothing at 'params.b' in models\[1\]"):
        fg.stack_modules([{"params": {"a": X, "b": X}}, {"params": {"a": X}}])


def test_attributes_that_are_the_same_are_known_to_be():
    def recursive(_):
        def down(x):
            return x if x < 1 else down(x - 1)

        return down

    class Config:
        def __init__(self):
            self.limits = np.array([1.0, np.nan])

    for make in (recursive, lambda _: float("nan"), lambda _: functools.partial(len, Config())):
        assert fg.stack_modules([Holds(make), Holds(make)]).params["w"].shape == (2,)
    with pytest.raises(ValueError, match="got 2.0 at 'function'"):
        fg.stack_modules([Holds(lambda _: np.float32(1)), Holds(lambda _: 2.0)])


def test_nothing_and_other_things_do_not_stack():
    with pytest.raises(ValueError, match="there is a model to stack; got none"):
        fg.stack_modules([])
    with pytest.raises(TypeError, match="got function"):
        fg.stack_modules([lambda x: x])
