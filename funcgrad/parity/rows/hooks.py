"""Rows of section 5: seeing and changing values and gradients on their way."""

from typing import Any

import jax.numpy as jnp

from funcgrad.parity._table import Row, agree, row

tensor_hook = Row(
    "hooks.register_hook",
    "tensor.register_hook",
    "t.register_hook(fn)",
    "fg.grad_hook(t, fn)",
    needs=("grad_hook",),
    note="A return value replaces the gradient, None keeps it; in order of registration.",
)
two_consumers = Row(
    "hooks.summed_cotangent",
    "a hook on a tensor used twice",
    "t.register_hook(fn)",
    "t = fg.grad_hook(t, fn)",
    needs=("grad_hook",),
    note="One call, with the sum.",
)
full_backward_hook = Row(
    "hooks.full_backward_hook",
    "register_full_backward_hook and _pre_hook",
    "module.register_full_backward_hook(fn)",
    "fg.module_hooks(module, backward=fn)",
    needs=("module_hooks",),
    note="Flax Linen and NNX modules, by path or type, without editing the model.",
)
forward_hook = Row(
    "hooks.forward_hook",
    "register_forward_hook and _pre_hook",
    "module.register_forward_hook(fn)",
    "fg.module_hooks(module, forward=fn)",
    needs=("module_hooks",),
    note="Linen and NNX with one spelling.",
)


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


post_accumulate = Row(
    "hooks.post_accumulate_grad",
    "post_accumulate_grad_hook",
    "p.register_post_accumulate_grad_hook(fn)",
    "fg.grad_hook(params, fn)",
    needs=("grad_hook",),
    note="On a parameter the summed cotangent is the whole gradient.",
)
buckets = Row(
    "hooks.ddp_overlap",
    "DDP overlap, buckets",
    "DistributedDataParallel(model, bucket_cap_mb=...)",
    "fg.grad_hook(params, psum) under shard_map",
    needs=("grad_hook",),
    note="The reduction is emitted where each gradient is born, once per bucket.",
)
remove = Row(
    "hooks.remove",
    "handle.remove()",
    "handle = t.register_hook(fn); handle.remove()",
    "t  # a hook is a value: leave it out",
    needs=("grad_hook",),
)
capture = Row(
    "hooks.capture",
    "reading activations and gradients",
    "for m in model.modules(): m.register_forward_hook(fn)",
    "fg.capture(fun)(x)",
    needs=("capture",),
    note="Values and cotangents of named intermediates, through scan and checkpoint.",
)


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


nan_check = Row(
    "hooks.nan_check",
    "a NaN check in a hook",
    "t.register_hook(check_nan)",
    "fg.grad_hook(t, check_nan)",
    needs=("grad_hook", "detect_anomaly"),
    note="Runs under jit.",
)
