"""The peers in PyTorch: layers its libraries know for MLP and CNN, functions for the others."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from funcgrad.bench._contenders import Contender
from funcgrad.bench._models import Task
from funcgrad.bench._torch_models import Functional

_CHAINS = ("mlp", "cnn-64", "cnn-128")
_FUNCTIONS = ("transformer-t128", "transformer-t256", "transformer-d512", "lstm", "lora")


class Chain:
    """A task's layers as ``nn.Sequential``, and the way back to the task's tree of parameters."""

    def __init__(self, task: Task) -> None:
        import torch
        from torch import nn

        layers, self.kernels = [], [p["kernel"] for p in task.params.values()]
        dense = 0
        for kernel, p in zip(self.kernels, task.params.values(), strict=True):
            layer: Any
            if kernel.ndim == 4:
                layer = nn.Conv2d(kernel.shape[2], kernel.shape[3], 3, stride=2, padding=1)
                weight = kernel.transpose(3, 2, 0, 1)
            else:
                if layers and not dense and len(task.batch[0].shape) == 4:
                    layers.append(nn.Flatten())
                layer, dense = nn.Linear(*kernel.shape), dense + 1
                weight = self._rows(kernel, task).T
            with torch.no_grad():
                layer.weight.copy_(torch.from_numpy(np.ascontiguousarray(weight)))
                layer.bias.copy_(torch.from_numpy(p["bias"]))
            layers += [layer, nn.ReLU()]
        self.module = nn.Sequential(*layers[:-1])
        self.task = task

    def _rows(self, kernel: Any, task: Task, back: bool = False) -> Any:
        """A dense kernel's rows, from (height, width, channel) to torch's order and back."""
        before = [k for k in self.kernels if k.ndim == 4]
        if not before:
            return kernel
        channels = before[-1].shape[3]
        side = round((kernel.shape[0] / channels) ** 0.5)
        if back:
            rows = kernel.reshape(channels, side, side, -1).transpose(1, 2, 0, 3)
        else:
            rows = kernel.reshape(side, side, channels, -1).transpose(2, 0, 1, 3)
        return rows.reshape(kernel.shape)

    def inputs(self, *batch: Any) -> tuple[Any, Any]:
        """The batch as torch lays it out."""
        import torch

        x, y = (torch.from_numpy(np.asarray(leaf)) for leaf in batch)
        x = x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x
        return x, y.long()

    def leaves(self, grads: list[Any]) -> list[np.ndarray]:
        """Weights' and biases' gradients in the order of ``jax.tree.leaves`` of the params."""
        out = []
        for weight, bias in zip(grads[::2], grads[1::2], strict=True):
            w = weight.numpy()
            w = w.transpose(2, 3, 1, 0) if w.ndim == 4 else self._rows(w.T, self.task, back=True)
            out += [bias.numpy(), w]
        return out


def _cross_entropy(logits: Any, y: Any, reduction: str = "sum") -> Any:
    from torch.nn import functional

    return functional.cross_entropy(logits, y, reduction=reduction)


def _plain(chain: Chain | Functional, max_norm: float) -> Callable[..., Any]:
    import torch

    if isinstance(chain, Functional):
        axes = lambda batch: (None, *(0 for _ in batch))
        losses = lambda batch: torch.vmap(chain.loss, axes(batch))(chain.params, *batch)
        return lambda *batch: torch.autograd.grad(losses(batch).sum(), chain.params)
    params = list(chain.module.parameters())
    return lambda x, y: torch.autograd.grad(_cross_entropy(chain.module(x), y), params)


def _clip(grads: list[Any], max_norm: float) -> list[Any]:
    import torch

    squares = [grad.flatten(1).pow(2).sum(1) for grad in grads]
    scales = (max_norm / torch.stack(squares).sum(0).sqrt()).clamp(max=1)
    return [torch.einsum("n,n...->...", scales, grad) for grad in grads]


def _func(chain: Chain | Functional, max_norm: float) -> Callable[..., Any]:
    from torch.func import functional_call, grad, vmap

    if isinstance(chain, Functional):
        leaves = [p.detach() for p in chain.params]
        rows = lambda batch: vmap(grad(chain.loss), (None, *(0 for _ in batch)))(leaves, *batch)
        return lambda *batch: _clip(list(rows(batch)), max_norm)
    params = {name: p.detach() for name, p in chain.module.named_parameters()}

    def loss(params: Any, x: Any, y: Any) -> Any:
        return _cross_entropy(functional_call(chain.module, params, (x[None],)), y[None])

    grads = vmap(grad(loss), (None, 0, 0))
    return lambda x, y: _clip(list(grads(params, x, y).values()), max_norm)


def _opacus(chain: Chain, max_norm: float) -> Callable[..., Any]:
    from opacus.grad_sample import (  # pyright: ignore[reportMissingImports]
        GradSampleModuleFastGradientClipping,
    )

    module = GradSampleModuleFastGradientClipping(
        chain.module, loss_reduction="sum", max_grad_norm=max_norm, use_ghost_clipping=True
    )

    def run(x: Any, y: Any) -> Any:
        module.zero_grad()
        module.enable_hooks()
        losses = _cross_entropy(module(x), y, "none")
        losses.sum().backward(retain_graph=True)
        scales = module.get_clipping_coef()
        module.zero_grad()
        module.disable_hooks()
        (scales * losses).sum().backward()
        return [p.grad for p in chain.module.parameters()]

    return run


def _backpack(chain: Chain, max_norm: float) -> Callable[..., Any]:
    import torch
    from backpack import backpack, extend  # pyright: ignore[reportMissingImports]
    from backpack.extensions import BatchGrad  # pyright: ignore[reportMissingImports]

    module, loss = extend(chain.module), extend(torch.nn.CrossEntropyLoss(reduction="sum"))

    def run(x: Any, y: Any) -> Any:
        with backpack(BatchGrad()):
            loss(module(x), y).backward()
        grads = [p.grad_batch for p in module.parameters()]
        module.zero_grad()
        return _clip(grads, max_norm)

    return run


def _contender(
    make: Callable[[Any, float], Callable[..., Any]],
    kind: Any = "clipped",
    models: tuple[str, ...] = _CHAINS,
    **options: Any,
) -> Contender:
    def prepare(task: Task, max_norm: float) -> Callable[..., Any]:
        chain = Chain(task) if "layer0" in task.params else Functional(task)
        run = make(chain, max_norm)
        return lambda params, *batch: chain.leaves([g.detach() for g in run(*chain.inputs(*batch))])

    return Contender(prepare, kind, "torch", models=models, **options)


# The first is what the others' times are compared with.
TORCH_CONTENDERS: Mapping[str, Contender] = {
    "torch: plain": _contender(_plain, "plain", _CHAINS + _FUNCTIONS),
    "torch: vmap(grad)": _contender(
        _func, models=_CHAINS + _FUNCTIONS, held=lambda task: task.size
    ),
    "torch: Opacus ghost clipping": _contender(_opacus, needs="opacus"),
    "torch: BackPACK BatchGrad": _contender(
        _backpack, needs="backpack", held=lambda task: task.size
    ),
}
