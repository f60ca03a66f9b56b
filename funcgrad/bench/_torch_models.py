"""The transformers and the LSTM in PyTorch, as losses of one sample over the task's own tree."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from funcgrad.bench._models import Task

HEADS = 4


class Functional:
    """A task's loss in torch, and the way from its batch and back to its tree of parameters."""

    def __init__(self, task: Task) -> None:
        import torch

        leaves, self._tree = jax.tree.flatten(task.params)
        self.params = [torch.tensor(leaf, requires_grad=True) for leaf in leaves]
        if task.frozen is not None:
            model = functools.partial(_adapted, jax.tree.map(torch.from_numpy, task.frozen))
        else:
            model = _transformer if "embedding" in task.params else _lstm
        self.loss: Callable[..., Any] = lambda leaves, *sample: model(
            jax.tree.unflatten(self._tree, leaves), *sample
        )

    def inputs(self, *batch: Any) -> list[Any]:
        """The batch as tensors."""
        import torch

        tensors = [torch.from_numpy(np.asarray(x)) for x in batch]
        return [x if x.is_floating_point() else x.long() for x in tensors]

    def leaves(self, grads: list[Any]) -> list[np.ndarray]:
        """The gradients in the order of ``jax.tree.leaves`` of the params."""
        return [grad.numpy() for grad in grads]


def _norm(h: Any, scale: Any) -> Any:
    return h * (h * h).mean(-1, keepdim=True).add(1e-6).rsqrt() * scale


def _attend(qkv: Any) -> Any:
    import torch

    length, width = qkv.shape[0], qkv.shape[1] // 3
    q, k, v = qkv.reshape(length, 3, HEADS, width // HEADS).permute(1, 2, 0, 3)
    logits = q @ k.transpose(-1, -2) / math.sqrt(width // HEADS)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    attended = torch.where(seen, logits, -1e9).softmax(-1) @ v
    return attended.transpose(0, 1).reshape(length, width)


def _transformer(params: Any, tokens: Any) -> Any:
    from torch.nn import functional

    h = math.sqrt(params["position"].shape[1]) * params["embedding"][tokens] + params["position"]
    for p in params["layers"]:
        h = h + _attend(_norm(h, p["norm1"]) @ p["qkv"]) @ p["out"]
        up = functional.gelu(_norm(h, p["norm2"]) @ p["up"], approximate="tanh")
        h = h + up @ p["down"]
    logits = _norm(h, params["norm"]) @ params["embedding"].T
    return functional.cross_entropy(logits[:-1], tokens[1:])


def _adapted(frozen: Any, params: Any, tokens: Any) -> Any:
    from torch.nn import functional

    h = math.sqrt(frozen["embedding"].shape[1]) * frozen["embedding"][tokens]
    for weights, adapters in zip(frozen["layers"], params, strict=True):

        def dense(x: Any, name: str, w: Any = weights, a: Any = adapters) -> Any:
            return x @ w[name] + (x @ a[name]["down"]) @ a[name]["up"]

        h = h + dense(_attend(dense(_norm(h, 1.0), "qkv")), "out")
        up = functional.gelu(dense(_norm(h, 1.0), "up"), approximate="tanh")
        h = h + dense(up, "down")
    logits = _norm(h, 1.0) @ frozen["embedding"].T
    return functional.cross_entropy(logits[:-1], tokens[1:])


def _lstm(params: Any, xs: Any, y: Any) -> Any:
    import torch
    from torch.nn import functional

    h = c = torch.zeros_like(params["bias"][: params["bias"].shape[0] // 4])
    for x in xs:
        gates = x @ params["input"] + h @ params["hidden"] + params["bias"]
        i, f, o, u = gates.chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * u.tanh()
        h = o.sigmoid() * c.tanh()
    return functional.cross_entropy((h @ params["out"])[None], y[None])
