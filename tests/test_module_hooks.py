"""Hooks on modules: PyTorch's order and numbers, on Flax models that know nothing of it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcgrad as fg

X = np.array([[0.3, -0.7], [1.0, 2.0]])


class LinenNet(nn.Module):
    def setup(self):
        self.a = nn.Dense(3)
        self.b = nn.Sequential([nn.Dense(3), jnp.tanh, nn.Dense(1)])

    def __call__(self, x, *, scale=1.0):
        return self.b(jnp.tanh(self.a(x))) * scale


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(2, 3, rngs=rngs)
        self.b = nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), jnp.tanh, nnx.Linear(3, 1, rngs=rngs))

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


def linen_params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    layer = lambda n, m: {
        "kernel": jnp.asarray(rng.normal(size=(n, m)), dtype),
        "bias": jnp.asarray(rng.normal(size=m), dtype),
    }
    return {"params": {"a": layer(2, 3), "b": {"layers_0": layer(3, 3), "layers_2": layer(3, 1)}}}


def linen(params, hook):
    """The hooked loss of parameters and input, and the parameters."""
    apply = hook(LinenNet().apply)
    return (lambda params, x: (apply(params, x) ** 2).sum()), params


def nnx_(params, hook):
    net, params = NnxNet(), params["params"]
    layers = params["a"], params["b"]["layers_0"], params["b"]["layers_2"]
    for module, layer in zip((net.a, net.b.layers[0], net.b.layers[2]), layers, strict=True):
        module.kernel.set_value(layer["kernel"])
        module.bias.set_value(layer["bias"])
    graph, state = nnx.split(hook(net))
    return (lambda state, x: (nnx.merge(graph, state)(x) ** 2).sum()), state


def torch_net(torch, params):
    linear = torch.nn.Linear
    net = torch.nn.Sequential()
    net.add_module("a", linear(2, 3))
    net.add_module("tanh", torch.nn.Tanh())
    net.add_module("b", torch.nn.Sequential(linear(3, 3), torch.nn.Tanh(), linear(3, 1)))
    params = params["params"]
    layers = params["a"], params["b"]["layers_0"], params["b"]["layers_2"]
    for module, layer in zip((net.a, net.b[0], net.b[2]), layers, strict=True):
        module.weight.data = torch.tensor(np.asarray(layer["kernel"]).T)
        module.bias.data = torch.tensor(np.asarray(layer["bias"]))
    return net


class Calls(list):
    """What all four hooks of each module have seen, in order: kind, path, sums."""

    def __call__(self, kind, path, *values):
        sums = [jnp.nan if value is None else value.sum() for value in values]
        put = lambda *sums: self.append((kind, path, *map(float, sums)))
        jax.debug.callback(put, *sums, ordered=True)

    def hooks(self):
        return {
            "forward_pre": lambda path, args: self("pre", path, *args),
            "forward": lambda path, args, output: self("forward", path, *args, output),
            "backward_pre": lambda path, g: self("backward_pre", path, g),
            "backward": lambda path, gi, go: self("backward", path, *gi, go),
        }

    def taken(self):
        jax.effects_barrier()
        taken = list(self)
        self.clear()
        return taken


def torch_calls(torch, net, x):
    seen = []

    def put(kind, path, *values):
        path = path.replace(".0", "/0").replace(".2", "/2")
        seen.append((kind, path, *(np.nan if v is None else v.sum().item() for v in values)))

    for name, module in net.named_modules():
        if isinstance(module, torch.nn.Tanh):
            continue
        path = name or "."
        module.register_forward_pre_hook(lambda m, a, path=path: put("pre", path, *a))
        module.register_forward_hook(lambda m, a, o, path=path: put("forward", path, *a, o))
        module.register_full_backward_pre_hook(
            lambda m, go, path=path: put("backward_pre", path, *go)
        )
        module.register_full_backward_hook(
            lambda m, gi, go, path=path: put("backward", path, *gi, *go)
        )
    (net(x) ** 2).sum().backward()
    return seen


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("through_input", [True, False], ids=["input moves", "input stands"])
@pytest.mark.parametrize("kind", [linen, nnx_])
def test_calls_come_in_torchs_order_and_see_torchs_numbers(kind, through_input, torch, x64):
    params = linen_params(jnp.float64)
    x = torch.tensor(X, requires_grad=through_input)
    theirs = torch_calls(torch, torch_net(torch, params), x)

    calls = Calls()
    loss, params = kind(params, lambda model: fg.module_hooks(model, "*", **calls.hooks()))
    jax.jit(jax.grad(loss, (0, 1) if through_input else 0))(params, jnp.asarray(X))
    ours = [
        (k, path.replace("layers_", "").replace("layers/", ""), *s) for k, path, *s in calls.taken()
    ]
    assert [call[:2] for call in ours] == [call[:2] for call in theirs]
    for mine, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine[2:], their[2:], rtol=1e-10)


@pytest.mark.parametrize("kind", [linen, nnx_])
def test_hooks_that_only_look_change_nothing(kind):
    params = linen_params()
    hooks = Calls().hooks()
    plain, at = kind(params, lambda model: model)
    hooked, hooked_at = kind(params, lambda model: fg.module_hooks(model, "*", **hooks))
    x = jnp.asarray(X, jnp.float32)

    def derivatives(fun, at):
        of_x = lambda x: fun(at, x)
        return jax.jvp(of_x, (x,), (jnp.ones((2, 2)),)), jax.jacfwd(jax.grad(of_x))(x)

    found, expected = jax.jit(lambda: (derivatives(hooked, hooked_at), derivatives(plain, at)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


@pytest.mark.torch
def test_ten_times_at_the_input_and_at_the_output_as_in_torch(torch):
    def theirs(**register):
        net, x = torch.nn.Linear(1, 1, bias=False), torch.tensor([3.0], requires_grad=True)
        torch.nn.init.constant_(net.weight, 2.0)
        for name, hook in register.items():
            getattr(net, name)(hook)
        out = net(x)
        out.backward()
        return out.item(), x.grad.item(), net.weight.grad.item()

    def ours(**hooks):
        apply = fg.module_hooks(nn.Dense(1, use_bias=False).apply, nn.Dense, **hooks)
        fun = lambda kernel, x: apply({"params": {"kernel": kernel}}, x)[0]
        args = jnp.array([[2.0]]), jnp.array([3.0])
        grads = jax.grad(fun, (0, 1))(*args)
        return fun(*args).item(), grads[1].item(), grads[0].item()

    found = ours(backward=lambda path, gi, go: (10 * gi[0],))
    assert found == (6, 20, 3) == ours(backward=lambda path, gi, go: 10 * gi[0])
    assert found == theirs(register_full_backward_hook=lambda m, gi, go: (10 * gi[0],))
    found = ours(backward_pre=lambda path, go: 10 * go)
    assert found == (6, 20, 30)
    assert found == theirs(register_full_backward_pre_hook=lambda m, go: (10 * go[0],))
    found = ours(
        forward_pre=lambda path, args: 10 * args[0], forward=lambda path, args, out: out + 1
    )
    assert found[0] == 61
    assert found == theirs(
        register_forward_pre_hook=lambda m, args: (10 * args[0],),
        register_forward_hook=lambda m, args, out: out + 1,
    )


@pytest.mark.parametrize("kind", [linen, nnx_])
def test_hooks_on_one_module_run_in_the_order_they_were_put_on(kind):
    put = lambda model, factor: fg.module_hooks(
        model, "a", backward_pre=lambda path, g: factor * g + (factor - 2)
    )
    loss, params = kind(linen_params(), lambda model: put(put(model, 2), 3))
    both, at = kind(
        linen_params(),
        lambda model: fg.module_hooks(model, "a", backward_pre=lambda path, g: 3 * (2 * g) + 1),
    )
    x = jnp.asarray(X)
    grads = jax.jit(lambda: (jax.grad(loss, 1)(params, x), jax.grad(both, 1)(at, x)))()
    np.testing.assert_allclose(*grads, rtol=1e-5)


def test_the_model_given_and_flax_itself_are_left_as_they_were():
    net, x = NnxNet(), jnp.asarray(X)
    hooked = fg.module_hooks(net, "*", forward=lambda path, args, out: out + 1)
    assert type(net.a) is nnx.Linear
    assert isinstance(hooked.a, nnx.Linear)
    assert type(hooked).__name__ == "NnxNet"
    assert "__call__" in vars(nnx.Linear)
    assert not np.allclose(hooked(x), net(x))
    assert jax.tree.structure(nnx.state(hooked)) == jax.tree.structure(nnx.state(net))

    def boom(path, args, output):
        raise ZeroDivisionError

    params, apply = linen_params(), LinenNet().apply
    before = apply(params, x)
    for hooks in ({"forward": boom}, {"forward": boom, "backward_pre": lambda path, g: g}):
        with pytest.raises(ZeroDivisionError):
            fg.module_hooks(apply, "b", **hooks)(params, x)
        with pytest.raises(ZeroDivisionError):
            fg.module_hooks(net, "b", **hooks)(x)
    np.testing.assert_array_equal(apply(params, x), before)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return jnp.tanh(nn.Dense(3, name="dense")(x)), None


LIFTS = {
    "scan of remat": nn.scan(
        nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    ),
    "jit": nn.jit(Block),
    "vmap": nn.vmap(Block, variable_axes={"params": None}, split_rngs={"params": False}),
}


@pytest.mark.parametrize("lift", LIFTS)
def test_modules_inside_lifted_linen_modules_are_hooked_and_nothing_is_cached(lift):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return LIFTS[lift](name="block")(x, *([None] if "scan" in lift else []))[0]

    net, x = Net(), jnp.linspace(-1, 1, 6).reshape(2, 3)
    params = jax.jit(net.init)(jax.random.key(0), x)
    seen = Calls()
    loss = lambda apply: lambda params: apply(params, x).sum()
    plain = jax.jit(jax.grad(loss(net.apply)))(params)
    look = lambda path, gi, go: jax.debug.callback(lambda: seen.append(path))
    hooked = fg.module_hooks(net.apply, "block/*", backward=look)
    for _ in range(2):
        again = jax.jit(jax.grad(loss(hooked)))(params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), again, plain)
        assert seen.taken() == ["block/dense"] * (3 if "scan" in lift else 1)
    if "scan" not in lift:
        ten = fg.module_hooks(net.apply, nn.Dense, backward_pre=lambda path, g: 10 * g)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, 10 * b, rtol=1e-6),
            jax.jit(jax.grad(loss(jax.jit(ten))))(params),
            plain,
        )
    # The trace that nn.jit keeps is the plain one again.
    after = jax.jit(jax.grad(loss(net.apply)))(params)
    jax.tree.map(np.testing.assert_array_equal, after, plain)
    assert seen.taken() == []


class NnxStack(nnx.Module):
    def __init__(self):
        make = nnx.vmap(lambda key: nnx.Linear(3, 3, rngs=nnx.Rngs(key)))
        self.layers = make(jax.random.split(jax.random.key(0), 4))
        self.last = nnx.Linear(3, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        step = nnx.scan(lambda c, layer: jnp.tanh(layer(c)), in_axes=(nnx.Carry, 0),
                        out_axes=nnx.Carry)  # fmt: skip
        return nnx.remat(lambda last, x: last(x))(self.last, step(x, self.layers))


def test_modules_inside_nnx_transforms_are_hooked():
    net, x = NnxStack(), jnp.linspace(-1, 1, 6).reshape(2, 3)
    seen = Calls()
    look = lambda path, gi, go: seen("back", path)
    hooked = fg.module_hooks(net, ("layers", "last"), backward=look)
    loss = lambda net: (net(x) ** 2).sum()
    expected = nnx.to_pure_dict(nnx.state(nnx.jit(nnx.grad(loss))(net)))
    for grad in (nnx.jit(nnx.grad(loss)), jax.jit(jax.grad(loss))):
        found = nnx.to_pure_dict(nnx.state(grad(hooked)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
        assert seen.taken() == [("back", "last"), *[("back", "layers")] * 4]


@functools.partial(jax.jit, static_argnums=0)
def _in_jit(graph, state, x):
    return nnx.merge(graph, state)(x)


INSIDE = {
    "jit": lambda layer, x: _in_jit(*nnx.split(layer), x),
    "nnx.jit": nnx.jit(lambda layer, x: layer(x)),
    "nnx.remat": nnx.remat(lambda layer, x: layer(x)),
}


@pytest.mark.parametrize("inside", INSIDE)
def test_what_the_model_caches_while_a_hook_looks_ahead_has_its_hooks_all_the_same(inside):
    class Net(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return INSIDE[inside](self.layer, x)

    grad = nnx.grad(lambda net, x: net(x).sum(), argnums=1)
    hooked = fg.module_hooks(Net(), "*", backward=lambda path, gi, go: 10 * gi[0])
    x = jnp.ones((2, 3))
    np.testing.assert_allclose(grad(hooked, x), 100 * grad(Net(), x), rtol=1e-5)


class Stateful(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(x))


def _bits(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def test_state_changes_once_though_backward_hooks_look_ahead():
    net, x = Stateful(), jnp.asarray(X)
    expected = net(x)
    hooked = fg.module_hooks(Stateful(), "*", backward=lambda path, gi, go: None)
    np.testing.assert_array_equal(hooked(x), expected)
    same = lambda a, b: np.testing.assert_array_equal(_bits(a), _bits(b))
    jax.tree.map(same, nnx.to_pure_dict(nnx.state(hooked)), nnx.to_pure_dict(nnx.state(net)))


def test_capture_writes_back_the_state_of_models_methods_and_variables():
    class Counts(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.array(0))

        def __len__(self):
            return 0  # false, though it is there

        def __call__(self, x):
            self.count[...] += 1
            return x

    net, seen = fg.name_outputs(Counts()), nnx.Variable(jnp.array(0))

    def both(net, seen, x):
        seen[...] += 1
        return net(x)

    for fun, args in ((net, ()), (net.__call__, ()), (both, (net, seen))):
        assert fg.capture(fun)(*args, 2.0).values == {".": 2}
    assert net.count.get_value() == 3
    assert seen.get_value() == 1


def test_a_callable_object_is_hooked_whatever_its_attributes_are_called():
    class Apply:
        def __init__(self):
            self.fun, self.hooks, self.call, self._seen = "mine", "mine", "mine", "mine"

        def __call__(self, params, x):
            return LinenNet().apply(params, x)

    params, x = linen_params(), jnp.asarray(X)
    hooked = fg.module_hooks(Apply(), ".", forward=lambda path, args, out: out + 1)
    np.testing.assert_allclose(hooked(params, x), 1 + Apply()(params, x))


def test_objects_among_the_arguments_stay_the_same_objects():
    class Noisy(nnx.Module):
        def __call__(self, x, rngs):
            return x + rngs.noise.normal(x.shape), {"rngs": rngs}

    rngs = nnx.Rngs(noise=0)
    hooked = fg.module_hooks(Noisy(), "*", backward=lambda path, gi, go: None)
    _, out = hooked(jnp.ones(2), rngs)
    assert out["rngs"] is rngs
    assert rngs.noise.count.get_value() == 1


def test_linen_collections_random_keys_keywords_and_init_go_through():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, t, *, train):
            x = nn.Embed(4, 3)(t)
            x = nn.BatchNorm(use_running_average=not train)(x)
            return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))

    net, t = Net(), jnp.array([0, 1, 1])
    seen = Calls()
    put = lambda fun: fg.module_hooks(fun, "*", backward=lambda path, gi, go: seen("b", path, *gi))
    variables = jax.jit(lambda: net.init(jax.random.key(0), t, train=False))()
    again = jax.jit(lambda: put(net.init)(jax.random.key(0), t, train=False))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), again, variables)

    def loss(apply):
        def fun(params):
            out, state = apply(
                {**variables, "params": params}, t, train=True, mutable=["batch_stats"],
                rngs={"dropout": jax.random.key(1)},
            )  # fmt: skip
            return (out**2).sum(), state

        return jax.jit(jax.grad(fun, has_aux=True))(variables["params"])

    found, expected = loss(put(net.apply)), loss(net.apply)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
    paths = [path for _, path, _ in seen.taken()]
    assert sorted(paths) == sorted([".", "Embed_0", "BatchNorm_0", "Dropout_0", "Dense_0"])


def test_under_vmap_a_backward_hook_sees_one_sample():
    kernel = jnp.array([[3.0], [4.0]])
    unit = lambda path, gi, go: (gi[0] / jnp.linalg.norm(gi[0]),)
    apply = fg.module_hooks(nn.Dense(1, use_bias=False).apply, "*", backward=unit)
    out = lambda x: apply({"params": {"kernel": kernel}}, x).sum() * 7
    x = jnp.ones((3, 2))
    expected = np.tile([0.6, 0.8], (3, 1))
    rows = lambda x: jax.vmap(out)(x).sum()
    for grad in (jax.vmap(jax.grad(out)), jax.grad(rows)):
        np.testing.assert_allclose(jax.jit(grad)(x), expected, rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map(check_vma):
    apply = fg.module_hooks(LinenNet().apply, "a", backward_pre=lambda path, g: 3 * g)
    loss = lambda params, x: (apply(params, x) ** 2).sum()
    params, x = linen_params(), jnp.tile(jnp.asarray(X, jnp.float32), (2, 1))

    def local(params, x):
        grads = jax.grad(loss)(params, x)
        return grads if check_vma else jax.lax.psum(grads, "data")

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4)
    jax.tree.map(near, jax.jit(sharded)(params, x), jax.jit(jax.grad(loss))(params, x))


def test_a_hook_that_needs_the_inputs_gradient_says_when_there_is_none():
    ten = lambda path, gi, go: (10 * gi[0],)
    apply = fg.module_hooks(LinenNet().apply, "a", backward=ten)
    loss = lambda params, x: apply(params, x).sum()
    args = linen_params(), jnp.asarray(X, jnp.float32)
    jax.make_jaxpr(jax.grad(loss, 1))(*args)
    with pytest.raises(TypeError) as error:
        jax.make_jaxpr(jax.grad(loss))(*args)
    assert "no input of 'a' is differentiated here" in "".join(error.value.__notes__)


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        (
            {"backward": lambda path, gi, go: (gi[0],) * 2},
            "backward of 'a': a hook returns the structure",
        ),
        ({"backward_pre": lambda path, go: go[0]}, "backward_pre of 'a': a hook keeps the shape"),
    ],
)
def test_what_backward_hooks_return_is_checked(hooks, words):
    with pytest.raises(ValueError, match=words):
        fg.module_hooks(LinenNet().apply, "a", **hooks)(linen_params(), jnp.asarray(X))
    with pytest.raises(ValueError, match=words):
        fg.module_hooks(NnxNet(), "a", **hooks)(jnp.asarray(X))


def test_a_choice_that_is_no_module_is_an_error_that_lists_near_ones():
    hooks, x = {"forward": lambda *_: None}, jnp.asarray(X)
    with pytest.raises(
        ValueError, match="got 'b/layer/0', which is none. Near names: 'b/layers/0'"
    ):
        fg.module_hooks(NnxNet(), ("a", "b/layer/0"), **hooks)
    with pytest.raises(ValueError, match="got 'Conv', which is none. Near names: 'Linear'"):
        fg.module_hooks(NnxNet(), (nnx.Linear, nnx.Conv), **hooks)
    apply = fg.module_hooks(LinenNet().apply, ["a", "layers_0"], **hooks)
    with pytest.raises(ValueError, match="got 'layers_0'.*Near names: 'b/layers_0'"):
        apply(linen_params(), x)
    with pytest.raises(ValueError, match="got 'a', which is none. Near names: none. Give an NNX"):
        fg.module_hooks(NnxNet().__call__, "a", **hooks)(x)
    chosen = []
    by_path = lambda path, module: path == "a" and not chosen.append(type(module).__name__)
    fg.module_hooks(LinenNet().apply, by_path, **hooks)(linen_params(), x)
    assert chosen == ["Dense"]


def test_what_cannot_be_hooked_is_refused():
    hooks = {"forward": lambda *_: None}
    with pytest.raises(TypeError, match="got the module LinenNet. Give model.apply"):
        fg.module_hooks(LinenNet(), "*", **hooks)
    with pytest.raises(TypeError, match="at least one hook; got none"):
        fg.module_hooks(NnxNet(), "*")
    with pytest.raises(TypeError, match="where is a pattern.*got ()"):
        fg.module_hooks(NnxNet(), (), **hooks)
    with pytest.raises(TypeError, match="an NNX module or a function.*got int"):
        fg.name_outputs(3)


@pytest.mark.torch
@pytest.mark.parametrize("kind", [linen, nnx_])
def test_captured_outputs_of_modules_are_those_of_torchs_hooks(kind, torch, x64):
    params = linen_params(jnp.float64)
    net, kept = torch_net(torch, params), {}

    def keep(path):
        def hook(module, args, output):
            output.retain_grad()
            kept[path] = output

        return hook

    for name, module in net.named_modules():
        if name and "tanh" not in name and name != "b.1":
            module.register_forward_hook(keep(name.replace("b.", "b/layers/")))
    (net(torch.tensor(X)) ** 2).sum().backward()

    loss, params = kind(params, lambda model: fg.name_outputs(model, ("a", "b*")))
    found = jax.jit(fg.capture_grads(loss))(params, jnp.asarray(X))
    ours = lambda part: {k.replace("layers_", "layers/"): v for k, v in part.items()}
    assert set(ours(found.values)) == set(kept)
    for path, output in kept.items():
        np.testing.assert_allclose(ours(found.values)[path], output.detach(), rtol=1e-10)
        np.testing.assert_allclose(ours(found.cotangents)[path], output.grad, rtol=1e-10)


def test_names_of_modules_serve_checkpoint_policies():
    named = fg.name_outputs(LinenNet().apply, "b/layers_0")
    params, x = linen_params(), jnp.ones((5, 2))
    policy = jax.checkpoint_policies.save_only_these_names("b/layers_0")
    pull = lambda policy: lambda x: jax.vjp(jax.checkpoint(named, policy=policy), params, x)[1]
    kept = lambda policy: [r.shape for r in jax.tree.leaves(jax.eval_shape(pull(policy), x))]
    assert (5, 3) in kept(policy)
    assert (5, 3) not in kept(None)


def test_outputs_in_scans_are_stacked_and_samples_in_vmap_come_first():
    x = jnp.linspace(-1, 1, 6).reshape(2, 3)
    found = fg.capture(fg.name_outputs(NnxStack(), "layers"))(x)
    assert found.values["layers"].shape == (4, 2, 3)

    class Rows(nn.Module):
        @nn.compact
        def __call__(self, x):
            last = lambda kernel, x: kernel.T @ x  # JAX leaves the batch behind
            return nn.Dense(4, dot_general=lambda x, k, *_, **__: last(k, x), use_bias=False)(x)

    rows = nn.vmap(Rows, variable_axes={"params": None}, split_rngs={"params": False})()
    params = jax.jit(rows.init)(jax.random.key(0), x)
    named = fg.capture(fg.name_outputs(rows.apply, "Dense_0"))(params, x)
    assert named.values["Dense_0"].shape == (2, 4)
    np.testing.assert_allclose(named.values["Dense_0"], named.value, rtol=1e-6)


def test_a_module_called_twice_gives_both_outputs_in_order():
    class Twice(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.same = self.layer

        def __call__(self, x):
            return self.same(self.layer(x))

    net, x = Twice(), jnp.asarray(X, jnp.float32)
    first, second = fg.capture(fg.name_outputs(net, "layer"))(x).values["layer"]
    np.testing.assert_allclose(first, net.layer(x))
    np.testing.assert_allclose(second, net(x))
