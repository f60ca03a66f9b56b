"""Whole torch modules into Flax trees: find each layer by its name, fill it by its rule.

The template, Linen parameters or an NNX module, says what is wanted; the torch module says what
there is.  Every name on either side must find its partner.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from funcgrad.parity._bridge import dtype_in_jax, tensor_to_numpy
from funcgrad.parity._flax_paths import Leaf, at, find, read_template, shapes_below
from funcgrad.parity._layers import LAYER_NAMES, epsilon_of
from funcgrad.parity._torch_layers import Layer, split_name, torch_layers, torch_values

_STATISTICS = ("mean", "var")


def flax_params(template: Any, module: Any, *, rename: Mapping[str, str] | None = None) -> Any:
    """Fill a Flax parameter tree with the weights of a torch module.

    Knows ``Linear`` (also into ``DenseGeneral``), ``Conv1d/2d/3d``,
    ``ConvTranspose1d/2d/3d`` (for ``transpose_kernel=False``), ``Embedding``,
    ``LayerNorm``, ``RMSNorm``, ``GroupNorm``, ``BatchNorm``, ``InstanceNorm``,
    ``RNN``, ``GRU``, ``LSTM`` and their cells, ``MultiheadAttention``, and
    modules made of these.  A parameter that stands directly on any other
    module goes unchanged to the leaf of its name.

    Names match as they are; a number also matches a list (``blocks.0`` finds
    ``blocks_0``, ``blocks/0``) and a Sequential (``net.2`` finds
    ``net/layers_2``, ``net/layers/2``).  A cell may stand below ``cell``.
    Layer ``k`` of a recurrent network of several layers is called ``<name>.k``, and
    the directions of a bidirectional one ``forward_rnn`` and ``backward_rnn``.

    What parameters do not say stays with you: Flax normalises with epsilon
    1e-6 (torch: 1e-5; an NNX module is checked), ``flax.linen.gelu`` is the tanh
    form, momentum of BatchNorm counts the other way round, ``padding=1`` is
    ``((1, 1),)``, padding p of a transposed convolution is
    ``dilation * (window - 1) - p`` on either side, a padding index is not
    masked, attention in NNX takes its softmax in float32, and Flax is
    channels-last and batch-first.

    Args:
      template: What to fill: variables or parameters of a Linen module (from
        ``init``, or shapes from ``jax.eval_shape``), an NNX module, or its
        ``nnx.state``.  Not changed.
      module: The ``torch.nn.Module``.
      rename: From torch names to Flax paths, both dotted, for a module with all
        below it or for one parameter: ``{'fc': 'Dense_0', 'net.body': 'encoder'}``.  The
        longest name wins, and ``''`` is the root on either side.

    Returns:
      A tree like ``template`` with the template's dtypes; the ``nnx.State`` of
      parameters and batch statistics for an NNX module, for
      ``nnx.update(model, state)``.

    Raises:
      ValueError: A torch name has no place, a Flax leaf no value, shapes differ, a
        value would be rounded, an epsilon differs, a renamed module does not exist,
        or Flax cannot express the layer.  All names are listed at once.

    Example:
      >>> import flax.linen as nn
      >>> import torch
      >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
      >>> model = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
      >>> template = jax.eval_shape(model.init, jax.random.key(0), jnp.ones(3))
      >>> params = flax_params(template, net)
      >>> out = model.apply(params, jnp.ones(3))
      >>> bool(jnp.allclose(out, net(torch.ones(3)).detach().numpy(), atol=1e-6))
      True

    References:
      Flax, "Convert PyTorch models to Flax",
      https://flax-linen.readthedocs.io/en/latest/guides/converting_and_upgrading/convert_pytorch_to_flax.html
    """
    return _fill("flax_params", template, module, rename, grads=False)


def flax_grads(template: Any, module: Any, *, rename: Mapping[str, str] | None = None) -> Any:
    """Fill a Flax parameter tree with the gradients that torch left in ``.grad``.

    The layout of `flax_params`, with two differences: complex gradients are
    conjugated (see `grads_to_jax`), and where two torch biases make one Flax
    bias its gradient is that of either, not their sum.

    Args:
      template: As for `flax_params`, parameters only.
      module: The ``torch.nn.Module`` after ``loss.backward()``.  A parameter
        without ``.grad`` gets zeros, as an unused one has in JAX.
      rename: As for `flax_params`.

    Returns:
      A tree like ``template``; the ``nnx.State`` of parameters for an NNX module.

    Raises:
      ValueError: As `flax_params`; also when no parameter has a gradient, and
        when one torch parameter stands for two Flax leaves, whose gradients
        torch has already added.

    Example:
      >>> import torch
      >>> net = torch.nn.Linear(2, 1)
      >>> net(torch.tensor([1.0, 3.0])).sum().backward()
      >>> flax_grads({"kernel": jnp.ones((2, 1)), "bias": jnp.ones(1)}, net)
      {'bias': Array([1.], dtype=float32), 'kernel': Array([[1.], [3.]], dtype=float32)}

    References:
      `flax_params`.
    """
    return _fill("flax_grads", template, module, rename, grads=True)


@dataclasses.dataclass(frozen=True)
class _Filling:
    """What is known while layer after layer finds its place."""

    call: str
    template: Any
    nested: dict[str, Any]
    renames: dict[tuple[str, ...], tuple[str, ...]]
    values: dict[str, Any]
    grads: bool
    filled: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    places: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    wrong: list[str] = dataclasses.field(default_factory=list)
    homeless: list[str] = dataclasses.field(default_factory=list)
    renamed: set[tuple[str, ...]] = dataclasses.field(default_factory=set)

    def place(self, layer: Layer) -> None:
        """Put the values of one layer where they belong, or on the lists of what is wrong."""
        arrays = {own: self.array(name) for own, name in layer.names.items()}
        path = self.find(layer.segments)
        node = None if path is None else at(self.nested, path)
        done: set[str] = set()
        if layer.rule is not None and path is not None and isinstance(node, dict):
            if "cell" in node and hasattr(layer.module, "hidden_size"):
                path, node = (*path, "cell"), node["cell"]
            _check_model(self.call, self.template, path, layer)
            for own_path, array, used in layer.rule(
                layer.module, arrays, shapes_below(node), self.grads
            ):
                if isinstance(leaf := at(node, own_path), Leaf):
                    self.put(leaf, array, [layer.names[own] for own in used])
                    done.update(used)
        for own, name in layer.names.items():
            if own not in done:  # what no rule knows goes to the leaf of its name
                path = self.find((*layer.segments, *own.split(".")))
                leaf = None if path is None else at(self.nested, path)
                extra = layer.rule is None or not own.startswith(LAYER_NAMES)
                if isinstance(leaf, Leaf) and extra:
                    self.put(leaf, arrays[own], [name])
                else:
                    self.homeless.append(name)

    def put(self, leaf: Leaf, array: np.ndarray, names: list[str]) -> None:
        for name in names:
            self.places.setdefault(name, set()).add(leaf.index)
        self.filled[leaf.index] = array
        source = " + ".join(names) or "zeros"
        if array.shape != leaf.shape:
            self.wrong.append(f"{source} of shape {array.shape} for {leaf.where} {leaf.shape}")
        elif not _keeps_values(array, self.dtype(leaf)):
            self.wrong.append(f"{source} of {array.dtype} for {leaf.where} {leaf.dtype}")

    def dtype(self, leaf: Leaf) -> np.dtype:
        # Flax makes `mean` and `var` float32 whatever the parameters are: torch says.
        statistic = leaf.path[-1] in _STATISTICS and leaf.index in self.filled
        return self.filled[leaf.index].dtype if statistic else np.dtype(leaf.dtype)

    def array(self, name: str) -> np.ndarray:
        tensor = self.values[name]
        if not self.grads:
            return tensor_to_numpy(tensor)
        if tensor.grad is None:
            return np.zeros_like(tensor_to_numpy(tensor))
        return np.conj(tensor_to_numpy(tensor.grad))

    def find(self, segments: tuple[str, ...]) -> tuple[str, ...] | None:
        """The Flax path of a torch name, after renaming."""
        fitting = [old for old in self.renames if segments[: len(old)] == old]
        self.renamed.update(fitting)
        if fitting:
            old = max(fitting, key=len)
            segments = self.renames[old] + segments[len(old) :]
        return find(self.nested, segments)

    def check(self, leaves: list[Leaf]) -> None:
        """Raise for all that is left over."""
        if unknown := [".".join(old) for old in self.renames.keys() - self.renamed]:
            raise ValueError(
                f"{self.call}: rename starts from names of the torch module; got "
                f"{sorted(unknown)}. Take them from module.named_modules()."
            )
        tied: dict[int, list[str]] = {}
        for name in self.places:
            tied.setdefault(id(self.values[name]), []).append(name)
        homeless = [name for name in self.homeless if id(self.values[name]) not in tied]
        left = [leaf.where for leaf in leaves if leaf.index not in self.filled]
        if homeless or left:
            raise ValueError(
                f"{self.call}: every torch name needs a place and every Flax leaf a value; got "
                f"torch names without a place {homeless} and Flax leaves without a value {left}. "
                "Rename modules with rename={'torch.name': 'flax.path'}, or build both alike."
            )
        if self.wrong:
            raise ValueError(
                f"{self.call}: shapes must agree and no value may be rounded; got "
                f"{'; '.join(self.wrong)}. Build both alike, in one dtype "
                "(param_dtype and jax.enable_x64 in JAX, module.float() in torch)."
            )
        for names in tied.values():
            if self.grads and len({frozenset(self.places[name]) for name in names}) > 1:
                raise ValueError(
                    f"{self.call}: torch has added the gradients of tied weights; got one for "
                    f"several Flax leaves, {names}. Tie them in Flax too, or untie them in torch."
                )


def _fill(
    call: str, template: Any, module: Any, rename: Mapping[str, str] | None, *, grads: bool
) -> Any:
    tree = template
    if isinstance(template, nnx.Module):
        tree = nnx.state(template, nnx.Param if grads else nnx.Any(nnx.Param, nnx.BatchStat))
    leaves, nested, treedef = read_template(tree)
    renames = {split_name(old): split_name(new) for old, new in (rename or {}).items()}
    values = torch_values(call, module, grads)
    filling = _Filling(call, template, nested, renames, values, grads)
    for layer in torch_layers(module, list(values)):
        filling.place(layer)
    filling.check(leaves)
    arrays = [jnp.array(filling.filled[leaf.index], dtype=filling.dtype(leaf)) for leaf in leaves]
    return jax.tree.unflatten(treedef, arrays)


def _keeps_values(array: np.ndarray, dtype: np.dtype) -> bool:
    if dtype_in_jax(dtype) != dtype:
        return False
    if array.dtype.kind in "iu":
        return bool(np.array_equal(array.astype(dtype), array))
    try:
        return np.promote_types(array.dtype, dtype) == dtype
    except TypeError:  # bfloat16 and float16
        return False


def _check_model(call: str, template: Any, path: tuple[str, ...], layer: Layer) -> None:
    """What an NNX module shows beyond its parameters."""
    if not isinstance(template, nnx.Module):
        return
    here: Any = template
    for key in path:
        here = here[int(key)] if key.isdigit() else getattr(here, key)
    name, where = ".".join(layer.segments), ".".join(path)
    eps = epsilon_of(layer.module)
    if eps is not None and not np.isclose(getattr(here, "epsilon", eps), eps, rtol=1e-3, atol=0):
        raise ValueError(
            f"{call}: a normalisation needs the same epsilon on both sides; got {eps} for "
            f"{name!r} in torch and {here.epsilon} for {where!r} in Flax. "
            f"Build the Flax layer with epsilon={eps}."
        )
    if getattr(here, "transpose_kernel", False):
        raise ValueError(
            f"{call}: a transposed convolution keeps its kernel as (window, in, out); got "
            f"transpose_kernel=True for {where!r}. Build it with transpose_kernel=False."
        )
