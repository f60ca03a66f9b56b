"""The models in PyTorch: modules of batches, made of the layers that its libraries know."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from funcgrad.bench._models import HEADS, Task


@dataclasses.dataclass(frozen=True)
class _Weight:
    parameter: Any
    axes: tuple[int, ...] | None = None
    """Of the task's leaf, in the order in which the parameter has them."""


@dataclasses.dataclass(frozen=True)
class Module:
    """A task as a module, and the ways between its parameters and the task's tree."""

    layers: Any
    """The ``nn.Module``."""
    losses: Callable[..., Any]
    """Of what the module returns and the batch: a loss for each sample."""
    weights: Any
    """A tree like the task's parameters."""

    @staticmethod
    def of(task: Task, *, steps: bool = False) -> "Module":
        """A task as a module; with ``steps``, a recurrent one takes them one by one in Python."""
        import torch

        if task.family == "lstm":
            module = _lstm(task, steps)
        else:
            module = _MODULES[task.family](task)
        with torch.no_grad():
            for weight, leaf in module._pairs(jax.tree.leaves(task.params)):
                axes = weight.axes or range(leaf.ndim)
                weight.parameter.copy_(torch.from_numpy(np.array(leaf.transpose(axes))))
        return module

    @property
    def parameters(self) -> list[Any]:
        """In the order of ``jax.tree.leaves`` of the task's."""
        return [weight.parameter for weight in jax.tree.leaves(self.weights)]

    def leaves(self, values: Sequence[Any]) -> list[np.ndarray]:
        """An array for each parameter, as the task has it."""
        pairs = self._pairs([value.detach().numpy() for value in values])
        return [x.transpose(np.argsort(w.axes)) if w.axes else x for w, x in pairs]

    def _pairs(self, leaves: Sequence[Any]) -> list[tuple[_Weight, Any]]:
        return list(zip(jax.tree.leaves(self.weights), leaves, strict=True))


def tensors(batch: Sequence[Any]) -> list[Any]:
    """A batch as PyTorch lays it out: channels before rows, integers of 64 bits."""
    import torch

    out = [torch.from_numpy(np.array(x)) for x in batch]
    out = [x if x.is_floating_point() else x.long() for x in out]
    return [x.movedim(-1, 1).contiguous() if x.ndim == 4 else x for x in out]


def _linear(layer: Any) -> _Weight:
    return _Weight(layer.weight, (1, 0))


def _classes(logits: Any, x: Any, y: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(logits, y, reduction="none")


def _next_tokens(logits: Any, tokens: Any) -> Any:
    from torch.nn import functional

    logits = logits[:, :-1].transpose(1, 2)
    return functional.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)


def _chain(task: Task) -> Module:
    """Convolutions and dense layers, one after another."""
    from torch import nn

    class ChannelsLast(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.movedim(1, -1)

    layers, weights = [], {}
    for name, p in task.params.items():
        kernel, layer = p["kernel"], None
        if kernel.ndim == 4:
            layer = nn.Conv2d(kernel.shape[2], kernel.shape[3], 3, stride=2, padding=1)
            weight = _Weight(layer.weight, (3, 2, 0, 1))
        else:
            if layers and isinstance(layers[-2], nn.Conv2d):
                layers += [ChannelsLast(), nn.Flatten()]
            layer = nn.Linear(*kernel.shape)
            weight = _linear(layer)
        weights[name] = {"bias": _Weight(layer.bias), "kernel": weight}
        layers += [layer, nn.ReLU()]
    return Module(nn.Sequential(*layers[:-1]), _classes, weights)


def _transformer(task: Task) -> Module:
    """A language model, whose head is tied to its embedding."""
    import torch
    from torch import nn

    (vocabulary, width), params = task.params["embedding"].shape, task.params
    length = len(params["position"])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            self.position = nn.Embedding(length, width)
            self.blocks = nn.ModuleList(_block(width) for _ in params["layers"])
            self.norm = nn.RMSNorm(width, eps=1e-6)
            self.head = nn.Linear(width, vocabulary, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Any) -> Any:
            places = torch.arange(length).expand(len(tokens), length)
            h = math.sqrt(width) * self.embedding(tokens) + self.position(places)
            for block in self.blocks:
                h = block(h)
            return self.head(self.norm(h))

    model = Model()
    weights = {
        "embedding": _Weight(model.embedding.weight),
        "position": _Weight(model.position.weight),
        "norm": _Weight(model.norm.weight),
        "layers": [
            {
                **{name: _linear(getattr(block, name)) for name in ("qkv", "out", "up", "down")},
                **{name: _Weight(getattr(block, name).weight) for name in ("norm1", "norm2")},
            }
            for block in model.blocks
        ],
    }
    return Module(model, _next_tokens, weights)


def _block(width: int, dense: Callable[..., Any] | None = None, scales: bool = True) -> Any:
    """Causal attention and two dense layers, each on a normalized input."""
    from torch import nn
    from torch.nn import functional

    make = dense or (lambda name, m, n: nn.Linear(m, n, bias=False))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.RMSNorm(width, eps=1e-6, elementwise_affine=scales)
            self.qkv = make("qkv", width, 3 * width)
            self.out = make("out", width, width)
            self.norm2 = nn.RMSNorm(width, eps=1e-6, elementwise_affine=scales)
            self.up = make("up", width, 4 * width)
            self.down = make("down", 4 * width, width)

        def forward(self, h: Any) -> Any:
            n, length, _ = h.shape
            qkv = self.qkv(self.norm1(h)).reshape(n, length, 3, HEADS, width // HEADS)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + self.out(mixed.transpose(1, 2).reshape(n, length, width))
            return h + self.down(functional.gelu(self.up(self.norm2(h)), approximate="tanh"))

    return Block()


def _lora(task: Task) -> Module:
    """Frozen layers with adapters that learn."""
    import torch
    from torch import nn

    frozen, params = task.frozen, task.params
    vocabulary, width = frozen["embedding"].shape
    rank = len(params[0]["qkv"]["up"])

    def constant(layer: Any, weight: np.ndarray) -> Any:
        layer.weight = nn.Parameter(torch.from_numpy(np.array(weight)), requires_grad=False)
        return layer

    class Adapted(nn.Module):
        def __init__(self, weight: np.ndarray) -> None:
            super().__init__()
            m, n = weight.shape
            self.frozen = constant(nn.Linear(m, n, bias=False), weight.T)
            self.down = nn.Linear(m, rank, bias=False)
            self.up = nn.Linear(rank, n, bias=False)

        def forward(self, x: Any) -> Any:
            return self.frozen(x) + self.up(self.down(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = constant(nn.Embedding(vocabulary, width), frozen["embedding"])
            self.blocks = nn.ModuleList(
                _block(width, lambda name, m, n, w=w: Adapted(w[name]), scales=False)
                for w in frozen["layers"]
            )
            self.norm = nn.RMSNorm(width, eps=1e-6, elementwise_affine=False)
            self.head = constant(nn.Linear(width, vocabulary, bias=False), frozen["embedding"])

        def forward(self, tokens: Any) -> Any:
            h = math.sqrt(width) * self.embedding(tokens)
            for block in self.blocks:
                h = block(h)
            return self.head(self.norm(h))

    model = Model()
    weights = [
        {
            name: {"down": _linear(dense.down), "up": _linear(dense.up)}
            for name in p
            for dense in [getattr(block, name)]
        }
        for block, p in zip(model.blocks, params, strict=True)
    ]
    return Module(model, _next_tokens, weights)


def _lstm(task: Task, steps: bool) -> Module:
    """A recurrent classifier; its steps in Python are those of Opacus's ``DPLSTM``."""
    from torch import nn

    layer: Any = nn.LSTM
    if steps:
        from opacus.layers import DPLSTM  # pyright: ignore[reportMissingImports]

        layer = DPLSTM
    n_inputs, width = len(task.params["input"]), len(task.params["hidden"])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = layer(n_inputs, width, batch_first=True)
            self.out = nn.Linear(width, task.params["out"].shape[1], bias=False)

        def forward(self, xs: Any) -> Any:
            return self.out(self.lstm(xs)[0][:, -1])

    model = Model()
    names = dict(model.lstm.named_parameters())
    # It has two biases, which are added; the task has one.
    nn.init.zeros_(names["bias_hh_l0"].requires_grad_(False))
    weights = {
        "input": _Weight(names["weight_ih_l0"], (1, 0)),
        "hidden": _Weight(names["weight_hh_l0"], (1, 0)),
        "bias": _Weight(names["bias_ih_l0"]),
        "out": _linear(model.out),
    }
    return Module(model, _classes, weights)


def _embedding(task: Task) -> Module:
    """The mean of some rows of a table, and a product with it."""
    from torch import nn
    from torch.nn import functional

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(*task.params["table"].shape)
            self.out = nn.Linear(task.params["table"].shape[1], 1, bias=False)

        def forward(self, ids: Any) -> Any:
            return self.out(self.table(ids).mean(1))[:, 0]

    def losses(scores: Any, ids: Any, y: Any) -> Any:
        return functional.softplus(scores) - y * scores

    model = Model()
    weights = {"table": _Weight(model.table.weight), "out": _linear(model.out)}
    return Module(model, losses, weights)


_MODULES: Mapping[str, Callable[[Task], Module]] = {
    "mlp": _chain,
    "cnn": _chain,
    "transformer": _transformer,
    "lora": _lora,
    "embedding": _embedding,
}
FAMILIES = (*_MODULES, "lstm")
