"""The calls: what they take, checked, and what they give."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad._compat import make_varying, manual_axes, varying_axes
from funcgrad._trees import keystr
from funcgrad.collectives._duals import bind

AxisName: TypeAlias = str | tuple[str, ...]


def copy(x: Any, axis_name: AxisName) -> Any:
    """Let each device use the same value in its own way; the gradients are summed.

    Before a layer whose weights are split by columns, or on replicated parameters before a loss
    of the device's own samples.

    PyTorch: Megatron's *f*, ``copy_to_tensor_model_parallel_region``.

    Args:
      x: An array or a tree, the same on all devices along the axis.
      axis_name: A mesh axis of the ``shard_map`` around, or several.

    Returns:
      A tree equal to ``x``.

    Raises:
      ValueError: No such axis, one named twice, or one whose name a ``vmap`` around has too; ``x``
        is known to differ along it; or, when transposed, the derivative is taken around a
        ``shard_map(check_vma=False)``.

    Example:
      >>> mesh = jax.make_mesh((4,), ("tp",), (jax.sharding.AxisType.Auto,))
      >>> specs = jax.P("tp")
      >>> def local(w):
      ...     return jax.grad(lambda x: (fg.collectives.copy(x, "tp") * w).sum())(jnp.ones(2))
      >>> jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P())(jnp.arange(4.0))
      Array([6., 6.], dtype=float32)

    References:
      Shoeybi et al., "Megatron-LM", 2019, section 3.
    """
    names, typed = _names("copy", axis_name)

    def one(leaf: Any) -> Any:
        return make_varying(leaf, frozenset(names)) if typed else bind("copy", leaf, names)

    return _each("copy", x, names, typed, True, one)


def reduce(x: Any, axis_name: AxisName) -> Any:
    """Add up the devices' values; the gradient of the sum goes to each as it is.

    After a layer whose weights are split by rows, or on the devices' own losses.

    PyTorch: Megatron's *g*, ``reduce_from_tensor_model_parallel_region``.

    Args:
      x: An array or a tree whose values differ between devices: terms of a sum.
      axis_name: A mesh axis of the ``shard_map`` around, or several.

    Returns:
      The sums, the same on all devices.

    Raises:
      ValueError: No such axis; ``x`` is known to be the same along it, so that the sum would be
        ``x`` times their number; or, when transposed, as for ``copy``.

    Example:
      >>> mesh = jax.make_mesh((4,), ("tp",), (jax.sharding.AxisType.Auto,))
      >>> specs = jax.P("tp")
      >>> def local(x):
      ...     return jax.grad(lambda x: fg.collectives.reduce(x**2, "tp").sum())(x)
      >>> jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs)(jnp.arange(4.0))
      Array([0., 2., 4., 6.], dtype=float32)
    """
    names, typed = _names("reduce", axis_name)
    one = lambda leaf: lax.psum(leaf, names) if typed else bind("reduce", leaf, names)
    return _each("reduce", x, names, typed, False, one)


def split(x: Any, axis_name: AxisName, *, axis: int = -1) -> Any:
    """Keep the device's own part of a value that all have; the gradients' parts are joined.

    PyTorch: Megatron's ``scatter_to_tensor_model_parallel_region``, and with ``axis=0``
    ``scatter_to_sequence_parallel_region``.

    Args:
      x: An array or a tree, the same on all devices along the mesh axis.
      axis_name: A mesh axis of the ``shard_map`` around, or several.
      axis: Axis of the array that is split; the mesh axis' size divides its length.

    Returns:
      The parts: device *i* has the *i*-th.

    Raises:
      ValueError: The length is not divisible; or as for ``copy``.

    Example:
      >>> mesh = jax.make_mesh((4,), ("tp",), (jax.sharding.AxisType.Auto,))
      >>> specs = jax.P("tp")
      >>> def local(x):
      ...     return 10 * fg.collectives.split(x, "tp")
      >>> jax.shard_map(local, mesh=mesh, in_specs=jax.P(), out_specs=specs)(jnp.arange(4.0))
      Array([ 0., 10., 20., 30.], dtype=float32)
    """
    names, typed = _names("split", axis_name)

    def one(leaf: Any) -> Any:
        at = _axis("split", leaf, axis, lax.axis_size(names))
        return bind("split", leaf, names, axis=at, typed=typed)

    return _each("split", x, names, typed, True, one)


def gather(x: Any, axis_name: AxisName, *, axis: int = -1) -> Any:
    """Join the devices' parts to a whole that all go on with alike; back goes the own part.

    Where each device uses the whole in its own way, gradients have to be added as well: that is
    ``all_gather``.

    PyTorch: Megatron's ``gather_from_tensor_model_parallel_region``.

    Args:
      x: An array or a tree whose values differ between devices: parts.
      axis_name: A mesh axis of the ``shard_map`` around, or several.
      axis: Axis of the array along which parts are joined.

    Returns:
      The whole, the same on all devices.

    Raises:
      ValueError: As for ``reduce``.

    Example:
      >>> mesh = jax.make_mesh((4,), ("tp",), (jax.sharding.AxisType.Auto,))
      >>> specs = jax.P("tp")
      >>> def local(x):
      ...     return fg.collectives.gather(10 * x, "tp")
      >>> jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P())(jnp.arange(4.0))
      Array([ 0., 10., 20., 30.], dtype=float32)
    """
    names, typed = _names("gather", axis_name)

    def one(leaf: Any) -> Any:
        return bind("gather", leaf, names, axis=_axis("gather", leaf, axis), typed=typed)

    return _each("gather", x, names, typed, False, one)


def all_gather(x: Any, axis_name: AxisName, *, axis: int = 0) -> Any:
    """Join the devices' parts to a whole that each uses in its own way; gradients are summed.

    On parameters in parts before a loss of the device's own samples (fully sharded data
    parallel), or on a sequence in parts before a layer split by columns.

    PyTorch: Megatron's ``gather_from_sequence_parallel_region``.

    Args:
      x: An array or a tree whose values differ between devices: parts.
      axis_name: A mesh axis of the ``shard_map`` around, or several.
      axis: Axis of the array along which parts are joined.

    Returns:
      The whole, on each device; its gradients may differ.

    Raises:
      ValueError: No such axis; ``x`` is known to be the same along it.

    Example:
      >>> mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
      >>> specs = jax.P("data")
      >>> def local(w, x):
      ...     return jax.grad(lambda w: (fg.collectives.all_gather(w, "data") * x).sum())(w)
      >>> step = jax.shard_map(local, mesh=mesh, in_specs=(specs, specs), out_specs=specs)
      >>> step(jnp.zeros(4), jnp.arange(4.0))
      Array([6., 6., 6., 6.], dtype=float32)

    References:
      Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022.
    """
    names, typed = _names("all_gather", axis_name)

    def one(leaf: Any) -> Any:
        at = _axis("all_gather", leaf, axis)
        return lax.all_gather(leaf, names, axis=at, tiled=True)

    return _each("all_gather", x, names, typed, False, one)


def reduce_scatter(x: Any, axis_name: AxisName, *, axis: int = 0) -> Any:
    """Add up the devices' values and keep the own part; the gradients' parts are joined.

    After a layer split by rows, where the sequence goes on in parts.

    PyTorch: Megatron's ``reduce_scatter_to_sequence_parallel_region``.

    Args:
      x: An array or a tree whose values differ between devices: terms of a sum.
      axis_name: A mesh axis of the ``shard_map`` around, or several.
      axis: Axis of the array that is split; the mesh axis' size divides its length.

    Returns:
      The parts of the sum: device *i* has the *i*-th.

    Raises:
      ValueError: The length is not divisible; no such axis; ``x`` is known to be the same along
        it, so that the sum would be ``x`` times their number.

    Example:
      >>> mesh = jax.make_mesh((4,), ("tp",), (jax.sharding.AxisType.Auto,))
      >>> specs = jax.P("tp")
      >>> def local(x):
      ...     return fg.collectives.reduce_scatter(x * jnp.arange(4.0), "tp")
      >>> jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs)(jnp.arange(4.0))
      Array([ 0.,  6., 12., 18.], dtype=float32)
    """
    names, typed = _names("reduce_scatter", axis_name)

    def one(leaf: Any) -> Any:
        at = _axis("reduce_scatter", leaf, axis, lax.axis_size(names))
        return lax.psum_scatter(leaf, names, scatter_dimension=at, tiled=True)

    return _each("reduce_scatter", x, names, typed, False, one)


def all_to_all(x: Any, axis_name: AxisName, *, split_axis: int = 0, concat_axis: int = 0) -> Any:
    """Send the *i*-th part to device *i*, and join what comes; gradients return the same way.

    Tokens to the devices of their experts and back, or a change from a sequence in parts to
    heads in parts.

    PyTorch: ``torch.distributed.nn.functional.all_to_all_single``.

    Args:
      x: An array or a tree whose values differ between devices.
      axis_name: A mesh axis of the ``shard_map`` around, or several.
      split_axis: Axis of the array that is split; the mesh axis' size divides its length.
      concat_axis: Axis along which the parts that come are joined, in the order of devices.

    Returns:
      An array of the same number of entries on each device.

    Raises:
      ValueError: The length is not divisible; no such axis; ``x`` is known to be the same along
        it.

    Example:
      >>> mesh = jax.make_mesh((4,), ("ep",), (jax.sharding.AxisType.Auto,))
      >>> rows, columns = jax.P("ep"), jax.P(None, "ep")
      >>> def local(x):
      ...     return fg.collectives.all_to_all(x, "ep", split_axis=1)
      >>> x = jnp.arange(16.0).reshape(4, 4)
      >>> y = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=columns)(x)
      >>> bool((x == y).all())  # what was in parts by rows is in parts by columns
      True
    """
    names, typed = _names("all_to_all", axis_name)

    def one(leaf: Any) -> Any:
        at = _axis("all_to_all", leaf, split_axis, lax.axis_size(names))
        to = _axis("all_to_all", leaf, concat_axis)
        return lax.all_to_all(leaf, names, at, to, tiled=True)

    return _each("all_to_all", x, names, typed, False, one)


def shift(x: Any, axis_name: AxisName, by: int = 1, *, wrap: bool = True) -> Any:
    """Send the value to the device ``by`` places further on; gradients are sent back.

    Activations to the next stage of a pipeline, keys and values around a ring.

    PyTorch: ``dist.send`` and ``dist.recv`` in a ``torch.autograd.Function``.

    Args:
      x: An array or a tree whose values differ between devices.
      axis_name: A mesh axis of the ``shard_map`` around, or several.
      by: How many places; negative is backwards.
      wrap: Whether the last device sends to the first.  Without it, a device to which nothing
        is sent has zeros.

    Returns:
      The values that came.

    Raises:
      ValueError: No such axis; ``x`` is known to be the same along it.

    Example:
      >>> mesh = jax.make_mesh((4,), ("pp",), (jax.sharding.AxisType.Auto,))
      >>> specs = jax.P("pp")
      >>> def local(x):
      ...     return fg.collectives.shift(x, "pp")
      >>> jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs)(jnp.arange(4.0))
      Array([3., 0., 1., 2.], dtype=float32)
    """
    names, typed = _names("shift", axis_name)
    size = lax.axis_size(names)
    goals = [(i, i + by) for i in range(size)]
    # ppermute counts devices in the order of the mesh, whatever the order of the names.
    ordered = tuple(name for name in manual_axes()[0] if name in names)
    grid = np.arange(size).reshape([lax.axis_size(name) for name in ordered])
    place = grid.transpose([ordered.index(name) for name in names]).ravel().tolist()
    pairs = [(place[i], place[to % size]) for i, to in goals if wrap or 0 <= to < size]
    one = lambda leaf: lax.ppermute(leaf, ordered, pairs)
    return _each("shift", x, names, typed, False, one)


def _names(call: str, axis_name: AxisName) -> tuple[tuple[str, ...], bool]:
    """The mesh axes as a tuple, and whether types say what varies over them."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    manual, typed = manual_axes()
    absent = [name for name in names if name not in manual]
    if absent or not names:
        around = ", ".join(map(repr, manual)) or "none"
        raise ValueError(
            f"{call}: axis_name is a mesh axis of the shard_map around; got {axis_name!r}, and "
            f"the axes here are {around}. Call it inside jax.shard_map, with its axis."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"{call}: axis_name names each axis once; got {axis_name!r}.")
    return names, typed


def _each(
    call: str,
    x: Any,
    names: tuple[str, ...],
    typed: bool,
    takes_same: bool,
    one: Callable[[Any], Any],
) -> Any:
    """``one`` of each leaf, after a look at what the types say of it."""

    def checked(path: Any, leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        differs = [name for name in names if name in varying_axes(leaf)]
        same = [name for name in names if name not in differs]
        if typed and takes_same and differs:
            raise ValueError(
                f"{call}: x is the same on all devices along {_list(names)}; got x{keystr(path)} "
                f"that differs along {_list(differs)}. Leave the call out, or join the values "
                "first (gather, reduce)."
            )
        if typed and not takes_same and same:
            raise ValueError(
                f"{call}: x differs between devices along {_list(names)}; got x{keystr(path)} "
                f"that is the same along {_list(same)}. Leave the call out, or make it the "
                "devices' own first (copy, split)."
            )
        if leaf.size:
            return one(leaf)
        empty = jax.eval_shape(one, leaf)  # nothing to send, which XLA cannot do
        return make_varying(jnp.zeros(empty.shape, empty.dtype), varying_axes(empty))

    return jax.tree_util.tree_map_with_path(checked, x)


def _axis(call: str, x: Any, axis: int, parts: int = 1) -> int:
    """The axis counted from the front; raises unless it exists and divides into ``parts``."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{call}: the axis is one of x; got {axis} for a shape of {list(x.shape)}."
        )
    if x.shape[axis] % parts:
        raise ValueError(
            f"{call}: the number of devices divides the axis; got {parts} for axis {axis} of "
            f"{list(x.shape)}. Pad it."
        )
    return axis % x.ndim


def _list(names: Any) -> str:
    return ", ".join(map(repr, names))
