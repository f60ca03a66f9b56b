"""Arrays between PyTorch and JAX: trees of values, and of gradients.

A JAX array cannot change and a torch tensor can, so both directions copy unless told otherwise.
Torch is imported inside the functions, and ``import funcgrad`` never reaches it.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

# NumPy has these only through ml_dtypes, which torch does not know: they cross as raw bits.
_BITS_ONLY = ("bfloat16", "float8")


def to_jax(tree: Any, *, copy: bool = True) -> Any:
    """Turn every torch tensor of a tree into a JAX array.

    The arrays are detached.  Dtypes are kept; with 64-bit types off, integers
    of 64 bits become 32 if every value fits (token ids do), while float64 and
    complex128 are refused, since JAX would round them without a word.
    Gradients of complex numbers need `grads_to_jax`.

    Args:
      tree: Pytree of torch tensors, NumPy or JAX arrays and Python numbers;
        JAX arrays, Python numbers and ``None`` stay as they are.
      copy: Give each array its own memory.  With ``False`` a contiguous tensor
        is shared by dlpack where it can be: a later in-place update in torch
        then changes the JAX array under programs that rely on it being
        constant.

    Returns:
      The same tree with JAX arrays.  Tensors of the CPU go to the default
      device, tensors of a GPU stay there if JAX has it.

    Raises:
      TypeError: A leaf is no array, is sparse or has no data; names the leaf.
      ValueError: A leaf would lose precision; names the leaf.

    Example:
      >>> import numpy as np
      >>> to_jax({"w": np.ones(2, np.float32), "bias": None, "steps": 3})
      {'bias': None, 'steps': 3, 'w': Array([1., 1.], dtype=float32)}

    References:
      The dlpack exchange: https://dmlc.github.io/dlpack/latest/
    """
    return _map("to_jax", lambda where, leaf: _leaf_to_jax(where, leaf, copy), tree)


def to_torch(tree: Any, *, copy: bool = True) -> Any:
    """Turn every JAX or NumPy array of a tree into a torch tensor.

    Dtypes are kept, bfloat16 and the 8-bit floats included.  Gradients of
    complex numbers need `grads_to_torch`.

    Args:
      tree: Pytree of JAX or NumPy arrays, torch tensors and Python numbers;
        tensors, Python numbers and ``None`` stay as they are.
      copy: Give each tensor its own memory.  With ``False`` memory is shared by
        dlpack where it can be: an in-place update in torch then changes the
        JAX array, which must not happen.

    Returns:
      The same tree with tensors that do not require gradients.  They are on the
      CPU unless the array is on a GPU that torch can use too.

    Raises:
      TypeError: A leaf is no array, is traced (inside ``jit`` or ``grad``), is
        a PRNG key, or has a dtype that torch lacks; names the leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> to_torch([None, 2.0])  # a tree without arrays, so this needs no torch
      [None, 2.0]

    References:
      The dlpack exchange: https://dmlc.github.io/dlpack/latest/
    """
    return _map("to_torch", lambda where, leaf: _leaf_to_torch(where, leaf, copy), tree)


def grads_to_jax(grads: Any) -> Any:
    """Turn torch gradients into JAX gradients: `to_jax`, and complex leaves conjugated.

    For a real loss of ``z = x + iy`` torch's gradient is ``dx + i dy``, the
    direction of steepest ascent, and JAX's is ``dx - i dy``.  Forward-mode
    derivatives agree and cross by `to_jax`.

    Args:
      grads: Pytree of torch gradients; ``None`` stays.

    Returns:
      The same tree with JAX arrays.

    Raises:
      TypeError: As `to_jax`.
      ValueError: As `to_jax`.

    Example:
      >>> import numpy as np
      >>> grads_to_jax(np.array([2 + 4j], np.complex64))
      Array([2.-4.j], dtype=complex64)

    References:
      Complex autograd, https://docs.pytorch.org/docs/stable/notes/autograd.html, and
      https://docs.jax.dev/en/latest/notebooks/autodiff_cookbook.html.
    """
    return jax.tree.map(_conjugate, to_jax(grads))


def grads_to_torch(grads: Any) -> Any:
    """Turn JAX gradients into torch gradients: `to_torch`, and complex leaves conjugated.

    The inverse of `grads_to_jax`, which states the two conventions.

    Args:
      grads: Pytree of JAX gradients; ``None`` stays.

    Returns:
      The same tree with tensors, ready to be assigned to ``.grad``.

    Raises:
      TypeError: As `to_torch`.

    Example:
      >>> grads_to_torch({"frozen": None})
      {'frozen': None}

    References:
      Complex autograd, https://docs.pytorch.org/docs/stable/notes/autograd.html.
    """
    conjugated = jax.tree.map(_conjugate, grads)
    return to_torch(conjugated)


def tensor_to_numpy(tensor: Any) -> np.ndarray:
    """A NumPy view of a detached tensor on the CPU, of any dtype; it may share memory."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name.startswith(_BITS_ONLY):
        torch = _torch()
        bits = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        tensor = tensor.detach().contiguous()
        return tensor.view(bits).numpy(force=True).view(jnp.dtype(name))
    return tensor.numpy(force=True)


def numpy_to_tensor(array: np.ndarray) -> Any:
    """A tensor with the memory of a C-contiguous, writable array of any dtype torch has."""
    torch = _torch()
    if array.dtype.name.startswith(_BITS_ONLY):
        bits = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
        return torch.from_numpy(array.view(bits)).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def _torch() -> Any:
    import torch

    return torch


def _map(call: str, convert: Any, tree: Any) -> Any:
    def at(path, leaf):
        return convert(f"{call}: tree{jax.tree_util.keystr(path)}", leaf)

    return jax.tree_util.tree_map_with_path(at, tree)


def _conjugate(leaf: Any) -> Any:
    if isinstance(leaf, complex):
        return leaf.conjugate()
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        return leaf.conj() if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else leaf
    return leaf


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic)


def _is_tensor(leaf: Any) -> bool:
    # Without importing torch: if nobody has, the leaf is no tensor.
    return any(c.__module__ == "torch" and c.__name__ == "Tensor" for c in type(leaf).__mro__)


def _leaf_to_jax(where: str, leaf: Any, copy: bool) -> Any:
    if isinstance(leaf, jax.Array) or _is_number(leaf):
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        return _host_to_jax(where, np.asarray(leaf), copy)
    if not _is_tensor(leaf):
        raise _no_array(where, leaf, "a torch tensor")
    if leaf.is_meta or str(leaf.layout) != "torch.strided" or leaf.is_quantized:
        what = "no data (device meta)" if leaf.is_meta else f"layout {leaf.layout}"
        raise TypeError(
            f"{where} must be a dense tensor with data; got {what}. "
            "Use to_empty(), to_dense() or dequantize() first."
        )
    tensor = leaf.detach().resolve_conj().resolve_neg().contiguous()
    dtype = jnp.dtype(str(tensor.dtype).removeprefix("torch."))
    shared = tensor.device.type == jax.default_backend() == "cpu" or _on_shared_gpu(tensor)
    if shared and dtype_in_jax(dtype) == dtype and not (copy and tensor.device.type == "cpu"):
        return jax.dlpack.from_dlpack(tensor.clone() if copy else tensor)
    return _host_to_jax(where, tensor_to_numpy(tensor), copy=True)


def _on_shared_gpu(tensor: Any) -> bool:
    try:
        return tensor.is_cuda and bool(jax.devices("gpu"))
    except RuntimeError:
        return False


def _host_to_jax(where: str, array: np.ndarray, copy: bool) -> jax.Array:
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    too_wide = array.dtype.itemsize > {"f": 8, "c": 16}.get(array.dtype.kind, 8)
    if array.dtype.kind in "OSUMm" or too_wide:
        raise TypeError(f"{where} must hold numbers JAX has; got {array.dtype}. Leave it out.")
    dtype = _width(where, array)
    return jnp.array(array, dtype=dtype) if copy else jnp.asarray(array, dtype=dtype)


def dtype_in_jax(dtype: np.dtype) -> np.dtype:
    """The dtype JAX gives such an array: another one where 64-bit types are off."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _width(where: str, array: np.ndarray) -> np.dtype:
    """The dtype that an array has in JAX, if that keeps its values."""
    kept = dtype_in_jax(array.dtype)
    if kept == array.dtype:
        return kept
    if array.dtype.kind in "iu":
        ends = np.iinfo(kept)
        if not array.size or (array.min() >= ends.min and array.max() <= ends.max):
            return kept
        fix = "Wrap the call in `with jax.enable_x64(True):`."
    else:
        fix = "Wrap the call in `with jax.enable_x64(True):`, or cast the tensor with .float()."
        if array.dtype.kind == "c":
            fix = fix.replace(".float()", ".to(torch.complex64)")
    raise ValueError(f"{where} would be rounded to {kept}; got {array.dtype}. {fix}")


def _leaf_to_torch(where: str, leaf: Any, copy: bool) -> Any:
    if _is_tensor(leaf) or _is_number(leaf):
        return leaf
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(
            f"{where} must be a concrete array; got the tracer {leaf.aval}. "
            "Call outside jit, grad and vmap."
        )
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"{where} must hold numbers; got the PRNG keys {leaf.dtype}. "
                "Torch has no such keys: pass jax.random.key_data(key), or leave it out."
            )
        if _torch_reaches(leaf):
            tensor = _torch().from_dlpack(leaf.block_until_ready())
            return tensor.clone() if copy else tensor
    elif not isinstance(leaf, np.ndarray | np.generic):
        raise _no_array(where, leaf, "a JAX or NumPy array")
    array = np.asarray(leaf)
    flags = array.flags
    share = not copy and flags.writeable and flags.c_contiguous and array.dtype.isnative
    try:
        array = array if share else np.array(array, array.dtype.newbyteorder("="), order="C")
        return numpy_to_tensor(array)
    except TypeError as error:
        raise TypeError(
            f"{where} must have a dtype that torch has; got {array.dtype}. Cast it with .astype()."
        ) from error


def _torch_reaches(array: jax.Array) -> bool:
    if array.dtype.name in ("int4", "uint4", "int2", "uint2", "float4_e2m1fn"):
        return False
    platforms = [device.platform for device in array.devices()]
    return platforms == ["cpu"] or (platforms == ["gpu"] and _torch().cuda.is_available())


def _no_array(where: str, leaf: Any, wanted: str) -> TypeError:
    fix = "Pass module.state_dict()." if hasattr(leaf, "state_dict") else "Leave it out."
    return TypeError(f"{where} must be {wanted}; got {type(leaf).__name__}. {fix}")
