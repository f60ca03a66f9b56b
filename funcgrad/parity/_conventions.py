"""Conventions on which PyTorch and JAX differ, as switches inside a torch program.

A difference is laid to a convention by running the torch program again with that convention the
other way round: if the numbers then agree, it is the reason, however deep it sits.
"""

from collections.abc import Callable
from typing import Any

# Where torch takes epsilon, by position.
_EPSILON = {
    "layer_norm": 4,
    "group_norm": 4,
    "rms_norm": 3,
    "batch_norm": 7,
    "instance_norm": 7,
}
_VARIANCES = ("var", "std", "var_mean", "std_mean")

MEANING = {
    "gelu": "gelu: one side uses the tanh form, the other the exact one "
    "(jax.nn.gelu(approximate=False) is torch's default)",
    "ddof": "var or std: one side divides by n - 1, the other by n "
    "(jnp.var(ddof=1) is torch's default)",
    "epsilon": "normalisation: epsilon is 1e-6 on one side and 1e-5 on the other "
    "(flax defaults to 1e-6, torch to 1e-5)",
    "padding_idx": "embedding: torch gives the row padding_idx no gradient, JAX does "
    "(stop_gradient or a mask in JAX, or no padding_idx)",
}


def flipped(*names: str) -> Any:
    """A torch mode, a context manager, under which these conventions are the other way round.

    Its ``hits`` says how many calls it changed.
    """
    from torch.overrides import TorchFunctionMode

    class Flipped(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.hits = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            for name in names:
                changed = _FLIPS[name](getattr(func, "__name__", ""), args, kwargs)
                if changed is not None:
                    self.hits += 1
                    func, args, kwargs = changed[0] or func, changed[1], changed[2]
            return func(*args, **kwargs)

    return Flipped()


def _flip_gelu(name: str, args: tuple, kwargs: dict) -> Any:
    if name != "gelu":
        return None
    other = "none" if kwargs.get("approximate", "none") == "tanh" else "tanh"
    return None, args, {**kwargs, "approximate": other}


def _flip_ddof(name: str, args: tuple, kwargs: dict) -> Any:
    import torch

    if name not in _VARIANCES:
        return None
    # var(x, unbiased), var(x, dim, unbiased, keepdim), var(x, dim, correction=, keepdim=)
    rest, kwargs = list(args[1:]), dict(kwargs)
    if rest and not isinstance(rest[0], bool):
        kwargs.setdefault("dim", rest.pop(0))
    if rest:
        kwargs.setdefault("unbiased", rest.pop(0))
    if rest:
        kwargs.setdefault("keepdim", rest.pop(0))
    unbiased = kwargs.pop("unbiased", True)
    correction = kwargs.pop("correction", None)
    correction = int(unbiased) if correction is None else correction
    kwargs["dim"] = kwargs.pop("axis", kwargs.get("dim"))
    kwargs.setdefault("keepdim", False)
    kwargs["correction"] = 0 if correction else 1
    subject = args[:1] or (kwargs.pop("input"),)
    return getattr(torch, name), subject, kwargs


def _flip_epsilon(name: str, args: tuple, kwargs: dict) -> Any:
    if name not in _EPSILON:
        return None
    at = _EPSILON[name]
    eps = args[at] if len(args) > at else kwargs.get("eps", 1e-5)
    other = 1e-5 if eps is not None and abs(eps - 1e-6) < 1e-9 else 1e-6
    if len(args) > at:
        return None, (*args[:at], other, *args[at + 1 :]), kwargs
    return None, args, {**kwargs, "eps": other}


def _flip_padding(name: str, args: tuple, kwargs: dict) -> Any:
    if name != "embedding":
        return None
    if len(args) > 2:
        return None, (*args[:2], None, *args[3:]), kwargs
    return None, args, {**kwargs, "padding_idx": None}


_FLIPS: dict[str, Callable[[str, tuple, dict], Any]] = {
    "gelu": _flip_gelu,
    "ddof": _flip_ddof,
    "epsilon": _flip_epsilon,
    "padding_idx": _flip_padding,
}
