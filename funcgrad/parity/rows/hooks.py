"""Rows of section 5: seeing and changing values and gradients on their way."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import funcgrad as fg
from funcgrad.parity._table import agree, row


@row(
    "hooks.register_hook",
    concept="tensor.register_hook",
    torch="t.register_hook(fn)",
    here="t = fg.grad_hook(t, fn)",
    needs=("grad_hook",),
    note="A return value replaces the gradient, None keeps it; in order of registration.",
)
def tensor_hook():
    """Times two, then plus one, on 3a: they see 1 and 2, and the gradient of a is 9."""
    import torch

    seen = []
    a = torch.tensor(1.0, requires_grad=True)
    t = 3 * a
    t.register_hook(lambda g: seen.append(g) or 2 * g)
    t.register_hook(lambda g: seen.append(g) or g + 1)
    t.backward()

    log = []
    see = lambda g: jax.debug.callback(log.append, g, ordered=True)
    grad = jax.jit(
        jax.grad(lambda a: fg.grad_hook(3 * a, see, lambda g: 2 * g, see, lambda g: g + 1))
    )(1.0)
    jax.effects_barrier()

    return agree(grad=(a.grad, grad, 9), seen=(seen, log, [1, 2]))


@row(
    "hooks.summed_cotangent",
    concept="a hook on a tensor used twice",
    torch="t.register_hook(fn)",
    here="t = fg.grad_hook(t, fn)",
    needs=("grad_hook",),
    note="One call, with the sum.",
)
def two_consumers():
    """t² + 5t at 3: one call, with 6 + 5."""
    import torch

    seen = []
    t = torch.tensor(3.0, requires_grad=True)
    t.register_hook(seen.append)
    (t**2 + 5 * t).backward()

    log = []
    see = lambda g: jax.debug.callback(log.append, g)

    def fun(t):
        t = fg.grad_hook(t, see)
        return t**2 + 5 * t

    jax.grad(fun)(3.0)
    jax.effects_barrier()

    return agree(seen=(seen, log, [11]))


@row(
    "hooks.full_backward_hook",
    concept="register_full_backward_hook and _pre_hook",
    torch="module.register_full_backward_hook(fn)",
    here="fg.module_hooks(model, where, backward=fn)",
    needs=("module_hooks",),
    note="Flax Linen and NNX modules, by path or type, without editing the model.",
)
def full_backward_hook():
    """Times ten on a layer 2x at 3: after it dx alone is 20; before it dW is 30, too."""
    import torch
    from flax import nnx

    theirs, here = [], []
    for register, fn in (
        ("register_full_backward_hook", lambda module, gi, go: (10 * gi[0],)),
        ("register_full_backward_pre_hook", lambda module, go: (10 * go[0],)),
    ):
        linear, x = torch.nn.Linear(1, 1, bias=False), torch.tensor([3.0], requires_grad=True)
        torch.nn.init.constant_(linear.weight, 2.0)
        getattr(linear, register)(fn)
        linear(x).backward()
        theirs.append([x.grad.item(), linear.weight.grad.item()])

    model = nnx.Linear(1, 1, use_bias=False, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    model.kernel.set_value(jnp.array([[2.0]]))
    for hooks in (
        {"backward": lambda path, gi, go: (10 * gi[0],)},
        {"backward_pre": lambda path, go: 10 * go},
    ):
        hooked = fg.module_hooks(model, nnx.Linear, **hooks)
        of_model: Any
        of_model, of_x = jax.grad(lambda m, x: m(x)[0], (0, 1))(hooked, jnp.array([3.0]))
        here.append([of_x[0], of_model.kernel.get_value()[0, 0]])

    return agree(dx_dw=(theirs, here, [[20, 3], [20, 30]]))


@row(
    "hooks.forward_hook",
    concept="register_forward_hook and _pre_hook",
    torch="module.register_forward_hook(fn)",
    here="fg.module_hooks(model, where, forward=fn)",
    needs=("module_hooks",),
    note="Linen and NNX with one spelling; the order of all four hooks is torch's.",
)
def forward_hook():
    """Input times ten, output plus one is 61; and four hooks on two modules, in torch's order."""
    import torch
    from flax import nnx

    linear = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(linear.weight, 2.0)
    net, calls = torch.nn.Sequential(linear), []
    for name, module in (("net", net), ("layer", linear)):
        log = lambda kind, name=name: lambda *_: calls.append(f"{kind} {name}")
        module.register_forward_pre_hook(log("pre"))
        module.register_forward_hook(log("forward"))
        module.register_full_backward_pre_hook(log("backward_pre"))
        module.register_full_backward_hook(log("backward"))
    linear.register_forward_pre_hook(lambda module, args: (args[0] * 10,))
    linear.register_forward_hook(lambda module, args, output: output + 1)
    theirs = net(torch.tensor([3.0], requires_grad=True))
    theirs.backward()

    layer = nnx.Linear(1, 1, use_bias=False, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.array([[2.0]]))
    model = nnx.Sequential(layer)
    names, seen = {".": "net", "layers/0": "layer"}, []

    def say(kind):
        def hook(path, *_):
            jax.debug.callback(lambda: seen.append(f"{kind} {names[path]}"), ordered=True)

        return hook

    hooked = fg.module_hooks(
        model,
        tuple(names),
        forward_pre=say("pre"),
        forward=say("forward"),
        backward_pre=say("backward_pre"),
        backward=say("backward"),
    )
    hooked = fg.module_hooks(
        hooked,
        nnx.Linear,
        forward_pre=lambda path, args: args[0] * 10,
        forward=lambda path, args, output: output + 1,
    )
    ours, _ = jax.jit(jax.value_and_grad(lambda x: hooked(x)[0]))(jnp.array([3.0]))
    jax.effects_barrier()
    if seen != calls:
        raise AssertionError(f"torch calls {calls}, here {seen}")

    return agree(output=(theirs[0], ours, 61), said={"calls": calls})


@row(
    "hooks.forward_hook_linen",
    concept="forward hooks on a Flax Linen module",
    torch="register_forward_pre_hook, register_forward_hook",
    here="with nn.intercept_methods(fn): model.apply(...)",
    note="Linen's own interceptor sees each call with its inputs and result.",
)
def forward_hook_linen():
    """Input times ten, output plus one: 2·30 + 1 = 61."""
    import flax.linen as nn
    import torch

    linear = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(linear.weight, 2.0)
    linear.register_forward_pre_hook(lambda module, args: (args[0] * 10,))
    add: Any = lambda module, args, output: output + 1
    linear.register_forward_hook(add)
    theirs = linear(torch.tensor([3.0]))

    def hook(call, args, kwargs, context):
        return call(args[0] * 10, **kwargs) + 1

    with nn.intercept_methods(hook):
        ours = nn.Dense(1, use_bias=False).apply(
            {"params": {"kernel": jnp.array([[2.0]])}}, jnp.array([3.0])
        )

    return agree(output=(theirs, ours, [61]))


@row(
    "hooks.post_accumulate_grad",
    concept="post_accumulate_grad_hook",
    torch="p.register_post_accumulate_grad_hook(fn)",
    here="fg.grad_hook(p, fn)",
    needs=("grad_hook",),
    note="On a parameter the summed cotangent is the whole gradient; the hook returns the result.",
)
def post_accumulate():
    """An optimiser step inside the backward pass: p - g, then times four, in this order."""
    import torch

    weights = [1.0, 2.0, 3.0]
    p = torch.tensor([0.5, 0.75, 1.0], requires_grad=True)
    p.register_post_accumulate_grad_hook(lambda p: [p.data.sub_(p.grad)] and None)
    p.register_post_accumulate_grad_hook(lambda p: [p.data.mul_(4)] and None)
    (p * torch.tensor(weights)).sum().backward()

    def loss(p):
        hooked = fg.grad_hook(p, lambda g: p - g, lambda stepped: 4 * stepped)
        return (hooked * jnp.array(weights)).sum()

    stepped = jax.grad(loss)(jnp.array([0.5, 0.75, 1.0]))

    return agree(p=(p, stepped, [-2, -5, -8]))


@row(
    "hooks.ddp_overlap",
    concept="DDP overlap, buckets",
    torch="DistributedDataParallel(model, bucket_cap_mb=...)",
    here="fg.grad_hook(bucket, lambda g: lax.psum(g, 'data'))",
    needs=("grad_hook",),
    note="The reduction is emitted where each gradient is born, once per bucket; check_vma=False.",
)
def buckets():
    """Three layers in two buckets under shard_map: two reductions among the backward products."""
    import torch
    from jax.flatten_util import ravel_pytree
    from jax.sharding import AxisType
    from jax.sharding import PartitionSpec as P

    x = np.random.default_rng(0).normal(size=(8, 3))
    weights = np.random.default_rng(1).normal(size=(3, 3, 3))
    theirs = [torch.tensor(w, requires_grad=True) for w in weights]
    h = torch.tensor(x)
    for w in theirs:
        h = torch.tanh(h @ w)
    (h**2).sum().backward()

    def all_reduce(bucket):
        flat, unravel = ravel_pytree(bucket)
        return unravel(jax.lax.psum(flat, "data"))

    def loss(params, x):
        for bucket in (params[:1], params[1:]):
            for w in fg.grad_hook(bucket, all_reduce):
                x = jnp.tanh(x @ w)
        return (x**2).sum()

    mesh = jax.make_mesh((min(4, jax.device_count()),), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    args = list(map(jnp.asarray, weights)), jnp.asarray(x)
    (mapped,) = jax.make_jaxpr(sharded)(*args).eqns
    body = [eqn.primitive.name for eqn in mapped.params["jaxpr"].eqns]
    reductions = [i for i, name in enumerate(body) if name == "psum"]
    between = body[reductions[0] : reductions[-1]].count("dot_general")

    return agree(
        grads=([w.grad for w in theirs], jax.jit(sharded)(*args)),
        reductions=(2, len(reductions)),
        products_of_the_first_layer_after_the_first_reduction=(1, between),
    )


@row(
    "hooks.remove",
    concept="handle.remove()",
    torch="handle = t.register_hook(fn); handle.remove()",
    here="t  # a hook is a value: leave it out",
    needs=("grad_hook",),
)
def remove():
    """With the hook the gradient of 1 becomes 2, without it 1 again."""
    import torch

    t = torch.tensor(1.0, requires_grad=True)
    handle = t.register_hook(lambda g: 2 * g)
    theirs = [torch.autograd.grad(t.clone(), t)[0]]
    handle.remove()
    theirs.append(torch.autograd.grad(t.clone(), t)[0])

    here = [jax.grad(lambda t: fg.grad_hook(t, lambda g: 2 * g))(1.0), jax.grad(lambda t: t)(1.0)]

    return agree(grads=(theirs, here, [2, 1]))


@row(
    "hooks.capture",
    concept="reading activations and gradients",
    torch="for m in model.modules(): m.register_forward_hook(fn)",
    here="fg.capture_grads(fun)(params)",
    needs=("capture", "capture_grads", "name_outputs"),
    note="Values and cotangents of named intermediates, through scan and checkpoint.",
)
def capture():
    """What each module of a net gives, and the gradient there, with checkpoint on our side."""
    import torch
    from flax import nnx

    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    kept = {}

    def keep(module, args, output):
        output.retain_grad()
        kept[module] = output

    for module in (net[0], net[2]):
        module.register_forward_hook(keep)
    (net(torch.tensor([[1.0, 2.0]])) ** 2).sum().backward()

    layers = [
        nnx.Linear(n, m, param_dtype=jnp.float64, rngs=nnx.Rngs(0)) for n, m in ((2, 3), (3, 1))
    ]
    for ours, layer in zip(layers, (net[0], net[2]), strict=True):
        ours.kernel.set_value(jnp.asarray(layer.weight.detach().numpy().T))
        ours.bias.set_value(jnp.asarray(layer.bias.detach().numpy()))
    model = fg.name_outputs(nnx.Sequential(layers[0], jnp.tanh, layers[1]), nnx.Linear)
    loss = jax.checkpoint(lambda model, x: (model(x) ** 2).sum())
    found = fg.capture_grads(loss)(model, jnp.array([[1.0, 2.0]]))

    first, second = "layers/0", "layers/2"
    return agree(
        values=([*kept[net[0]][0], *kept[net[2]][0]],
                [*found.values[first][0], *found.values[second][0]]),
        grads=([*kept[net[0]].grad[0], *kept[net[2]].grad[0]],
               [*found.cotangents[first][0], *found.cotangents[second][0]]),
        weight=(net[0].weight.grad.T, found.grads.layers[0].kernel.get_value()),
    )  # fmt: skip


@row(
    "hooks.activations_linen",
    concept="reading activations of a Flax Linen model",
    torch="register_forward_hook(store)",
    here="model.apply(params, x, capture_intermediates=True)",
    note="Linen returns what every module gave, without a hook.",
)
def activations_linen():
    """The output of the first of two layers, read without editing the model."""
    import flax.linen as nn
    import torch

    seen = []
    first, second = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
    first.register_forward_hook(lambda module, args, output: seen.append(output))
    torch.nn.Sequential(first, torch.nn.Tanh(), second)(torch.tensor([1.0, 2.0]))

    params = {
        f"layers_{i}": {
            "kernel": jnp.asarray(layer.weight.detach().numpy().T),
            "bias": jnp.asarray(layer.bias.detach().numpy()),
        }
        for i, layer in ((0, first), (2, second))
    }
    model = nn.Sequential([nn.Dense(3), nn.tanh, nn.Dense(1)])
    _, state = model.apply(
        {"params": params},
        jnp.array([1.0, 2.0]),
        capture_intermediates=True,
        mutable="intermediates",
    )

    return agree(first=(seen[0], state["intermediates"]["layers_0"]["__call__"][0]))


@row(
    "hooks.nan_check",
    concept="a NaN check in a hook",
    torch="t.register_hook(check_nan)",
    here="t = fg.grad_hook(t, check_nan)",
    needs=("grad_hook",),
    note="Runs under jit, through jax.debug.callback; fg.detect_anomaly names the line.",
)
def nan_check():
    """The gradient of 0·sqrt(x) is NaN at 0: the hooks of both report it."""
    import torch

    theirs, here = [], []
    t = torch.tensor([0.0, 1.0], requires_grad=True)
    t.register_hook(lambda g: theirs.append(torch.isnan(g).any().item()))
    (torch.sqrt(t) * 0.0).sum().backward()

    check_nan = lambda g: jax.debug.callback(here.append, jnp.isnan(g).any())
    loss = lambda t: (jnp.sqrt(fg.grad_hook(t, check_nan)) * 0.0).sum()
    jax.jit(jax.grad(loss))(jnp.array([0.0, 1.0]))
    jax.effects_barrier()

    return agree(found=(theirs, here, [True]))
