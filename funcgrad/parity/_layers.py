"""Where the values of one torch layer stand in its Flax counterpart, by layer type.

A rule takes a torch module, its values as NumPy arrays by torch name, and the shapes of the Flax
layer as nested dicts; it yields a Flax path, the array in Flax's layout, and the torch names used.
Linen and NNX differ only in recurrent cells, which are told apart by the Flax names.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

Values: TypeAlias = dict[str, np.ndarray]
Placed: TypeAlias = tuple[tuple[str, ...], np.ndarray, tuple[str, ...]]
# (torch module, values, Flax shapes, whether the values are gradients)
Rule: TypeAlias = Callable[[Any, Values, dict[str, Any], bool], Iterator[Placed]]

# How the names of a known layer's own values begin; a subclass may add others.
LAYER_NAMES = ("weight", "bias", "running_", "in_proj_", "out_proj.", "q_proj", "k_proj", "v_proj")

_NORM = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
_GATES = {"LSTM": ("i", "f", "g", "o"), "GRU": ("r", "z", "n"), "RNN": ("",)}


def rule_of(module: Any) -> Rule | None:
    """The rule for a torch module, also for a subclass of a known layer."""
    for cls in type(module).__mro__:
        if cls.__module__.startswith("torch.nn.") and cls.__name__ in _RULES:
            return _RULES[cls.__name__]
    return None


def epsilon_of(module: Any) -> float | None:
    """The epsilon of a torch normalisation layer; None for other layers."""
    if rule_of(module) is not _norm:
        return None
    if module.eps is None:  # RMSNorm takes the machine epsilon
        dtype = str(module.weight.dtype).removeprefix("torch.")
        return {"float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 2.0**-23)
    return module.eps


def _linear(module: Any, values: Values, shapes: dict[str, Any], grads: bool) -> Iterator[Placed]:
    if "weight" in values:
        kernel = values["weight"].T
        yield ("kernel",), _split(kernel, shapes.get("kernel"), kernel.shape[0]), ("weight",)
    if "bias" in values:
        yield ("bias",), _split(values["bias"], shapes.get("bias"), 1), ("bias",)


def _split(array: np.ndarray, shape: Any, rows: int) -> np.ndarray:
    """Split the two axes of a dense kernel as DenseGeneral and LinearGeneral have them."""
    if isinstance(shape, tuple) and math.prod(shape) == array.size:
        heads = [math.prod(shape[:k]) for k in range(len(shape) + 1)]
        if rows in heads:
            return array.reshape(shape)
    return array


def _conv(module: Any, values: Values, shapes: dict[str, Any], grads: bool) -> Iterator[Placed]:
    if "weight" in values:
        # (out, in/groups, *window) to (*window, in/groups, out)
        weight = values["weight"]
        axes = (*range(2, weight.ndim), 1, 0)
        yield ("kernel",), weight.transpose(axes), ("weight",)
    if "bias" in values:
        yield ("bias",), values["bias"], ("bias",)


def _conv_transpose(
    module: Any, values: Values, shapes: dict[str, Any], grads: bool
) -> Iterator[Placed]:
    if module.groups != 1:
        raise ValueError(
            f"flax_params: Flax's ConvTranspose has no groups; got groups={module.groups}. "
            "Split the layer into one per group."
        )
    if "weight" in values:
        # (in, out, *window) to (*window, in, out); Flax correlates where torch convolves
        weight = values["weight"]
        window = tuple(range(2, weight.ndim))
        yield ("kernel",), np.flip(weight, window).transpose(*window, 0, 1), ("weight",)
    if "bias" in values:
        yield ("bias",), values["bias"], ("bias",)


def _embedding(
    module: Any, values: Values, shapes: dict[str, Any], grads: bool
) -> Iterator[Placed]:
    if module.max_norm is not None:
        raise ValueError(
            f"flax_params: an embedding must not rescale its rows; got max_norm={module.max_norm}, "
            "which changes them in every call. Rescale them in the loss and set max_norm=None."
        )
    if "weight" in values:
        yield ("embedding",), values["weight"], ("weight",)


def _norm(module: Any, values: Values, shapes: dict[str, Any], grads: bool) -> Iterator[Placed]:
    for name, value in values.items():
        if name in _NORM:
            yield (_NORM[name],), value, (name,)


def _attention(
    module: Any, values: Values, shapes: dict[str, Any], grads: bool
) -> Iterator[Placed]:
    if module.add_zero_attn:
        raise ValueError(
            "flax_params: Flax's attention adds no zero key; got add_zero_attn=True. "
            "Append the zero key and value to the inputs."
        )
    heads = (module.num_heads, module.head_dim)
    for n, (letter, name) in enumerate((("q", "query"), ("k", "key"), ("v", "value"))):
        part = slice(n * module.embed_dim, (n + 1) * module.embed_dim)
        for torch_name in ("in_proj_weight", f"{letter}_proj_weight"):
            if torch_name in values:
                kernel = values[torch_name]
                kernel = (kernel[part] if torch_name == "in_proj_weight" else kernel).T
                yield (name, "kernel"), kernel.reshape(-1, *heads), (torch_name,)
        if "in_proj_bias" in values:
            bias = values["in_proj_bias"][part].reshape(heads)
            yield (name, "bias"), bias, ("in_proj_bias",)
    if "out_proj.weight" in values:
        kernel = values["out_proj.weight"].T.reshape(*heads, -1)
        yield ("out", "kernel"), kernel, ("out_proj.weight",)
    if "out_proj.bias" in values:
        yield ("out", "bias"), values["out_proj.bias"], ("out_proj.bias",)


def _cell(module: Any, values: Values, shapes: dict[str, Any], grads: bool) -> Iterator[Placed]:
    """One layer and direction of a recurrent network."""
    name = next(name for name in _GATES if any(name in c.__name__ for c in type(module).__mro__))
    gates = _GATES[name]
    fused = "dense_i" in shapes  # NNX keeps all gates in one matrix, Linen one each

    def block(side, gate):
        if fused:
            return f"dense_{side}"
        return side + gate if side + gate in shapes else f"{side}{gate}_"  # NNX: if_

    def per_gate(torch_name):
        return np.split(values[torch_name], len(gates)) if torch_name in values else None

    found: dict[tuple[str, str], list[np.ndarray]] = {}
    used: dict[tuple[str, str], set[str]] = {}

    def put(path, array, names):
        found.setdefault(path, []).append(array)
        used.setdefault(path, set()).update(names)

    for side in "ih":
        for gate, kernel in zip(gates, per_gate(f"weight_{side}h") or (), strict=False):
            put((block(side, gate), "kernel"), kernel.T, (f"weight_{side}h",))

    biases = {side: per_gate(f"bias_{side}h") for side in "ih"}
    both = ("bias_ih", "bias_hh")
    for k, gate in enumerate(gates):
        has = [side for side in "ih" if "bias" in shapes.get(block(side, gate), {})]
        bias_ih, bias_hh = biases["i"], biases["h"]
        if bias_ih is None or bias_hh is None:
            if not grads and bias_ih is bias_hh:  # Flax's cells always have one
                for side in has:
                    zeros = np.zeros(values["weight_ih"].shape[0] // len(gates))
                    put((block(side, gate), "bias"), zeros.astype(values["weight_ih"].dtype), ())
            continue
        if len(has) == 1:
            bias = _merge(name, gate, has[0], bias_ih[k], bias_hh[k], grads)
            put((block(has[0], gate), "bias"), bias, both)
        else:
            put((block("i", gate), "bias"), bias_ih[k], ("bias_ih",))
            put((block("h", gate), "bias"), bias_hh[k], ("bias_hh",))

    for path, arrays in found.items():
        yield path, np.concatenate(arrays, axis=-1), tuple(used[path])


def _merge(
    name: str, gate: str, side: str, bias_ih: np.ndarray, bias_hh: np.ndarray, grads: bool
) -> np.ndarray:
    """One bias for two that are added; the gradient of the sum is the gradient of either."""
    if grads:
        return bias_ih if side == "i" else bias_hh
    if name == "GRU" and gate == "n":
        # n = tanh(W x + b_ih + r * (U h + b_hh)): here the two do not add.
        kept, lost = (bias_ih, bias_hh) if side == "i" else (bias_hh, bias_ih)
        if np.any(lost):
            raise ValueError(
                "flax_params: this GRU cell has one bias where torch has two inside different "
                "terms of the gate n; got a second one that is not zero. Give the cell both: "
                "cell.dense_h = nnx.Linear(hidden, 3 * hidden, rngs=rngs)."
            )
        return kept
    return bias_ih + bias_hh


_RULES: dict[str, Rule] = {
    "Linear": _linear,
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), _conv),
    **dict.fromkeys(("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"), _conv_transpose),
    "Embedding": _embedding,
    **dict.fromkeys(("LayerNorm", "RMSNorm", "GroupNorm"), _norm),
    **dict.fromkeys(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"), _norm),
    **dict.fromkeys(("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"), _norm),
    "MultiheadAttention": _attention,
    **dict.fromkeys(("RNN", "GRU", "LSTM", "RNNCell", "GRUCell", "LSTMCell"), _cell),
}
