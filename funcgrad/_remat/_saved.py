"""What a function keeps for its backward pass, as data."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from funcgrad._jaxpr import Traced, differentiable, trace
from funcgrad._jaxpr import argument_names as call_names
from funcgrad._remat._inputs import is_array
from funcgrad._remat._treemap import treemap
from funcgrad._remat._values import SavedTensor, Scope, describe, origin


@dataclasses.dataclass(frozen=True)
class SavedTensors:
    """Everything a function keeps for its backward pass; prints as a table.

    Iterates over ``tensors``, one ``SavedTensor`` for each leaf of the function that
    ``jax.vjp`` returns, in their order.
    """

    tensors: tuple[SavedTensor, ...]

    def __iter__(self) -> Iterator[SavedTensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def bytes(self) -> int:
        """Size of all of them."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def computed_bytes(self) -> int:
        """Size of what is computed: arguments and constants exist anyway."""
        return sum(tensor.bytes for tensor in self.tensors if tensor.kind == "computed")

    def treemap(self, *, width: int = 960, height: int = 540, title: str = "") -> str:
        """A picture as the text of an SVG file: areas are bytes, frames are modules.

        Args:
          width: Width in pixels.
          height: Height in pixels.
          title: Printed above it, before the totals.
        """
        return treemap(self.tensors, width, height, title)

    def _repr_svg_(self) -> str:
        return self.treemap()

    def __str__(self) -> str:
        groups: dict[tuple[str, ...], list[SavedTensor]] = {}
        for tensor in self.tensors:
            groups.setdefault(_row(tensor), []).append(tensor)
        rows: list[tuple[str, ...]] = [
            ("bytes", "count", "value", "from", "name", "module", "line")
        ]
        ordered = sorted(groups.items(), key=lambda item: -sum(t.bytes for t in item[1]))
        for cells, group in ordered:
            total = sum(tensor.bytes for tensor in group)
            rows.append((f"{total:,}", str(len(group)), *cells))
        used = [i for i in range(7) if i < 4 or any(row[i] for row in rows[1:])]
        widths = {i: max(len(row[i]) for row in rows) for i in used}
        lines = [
            "  ".join(
                row[i].rjust(widths[i]) if i < 2 else row[i].ljust(widths[i]) for i in used
            ).rstrip()
            for row in rows
        ]
        computed = sum(tensor.kind == "computed" for tensor in self.tensors)
        lines.append(
            f"{self.bytes:,} bytes in {len(self.tensors)} values; "
            f"{self.computed_bytes:,} bytes in {computed} of them are computed"
        )
        return "\n".join(lines)


def _row(tensor: SavedTensor) -> tuple[str, ...]:
    shape = f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
    if tensor.trips != 1:
        shape += f" of {tensor.trips} trips"
    source = tensor.operation or f"{tensor.kind} {tensor.argument}".strip()
    line = f"{tensor.line.file.rpartition('/')[2]}:{tensor.line.line}" if tensor.line else ""
    return shape, source, tensor.name, tensor.path, line


def saved_tensors(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    *,
    has_aux: bool = False,
) -> Callable[..., SavedTensors]:
    """List what ``fun`` keeps from its forward pass for its backward pass.

    Nothing is run or compiled: the function is traced, so ``jax.ShapeDtypeStruct`` leaves
    will do.  Each entry says where the value was made, through ``jit``, ``scan``,
    ``while_loop``, ``cond``, ``checkpoint``, ``shard_map`` and custom rules.  The sizes
    add up to those of the leaves of ``jax.vjp(fun, *args)[1]``.  A compiled program may use
    less, where the compiler computes a value again rather than keep it.

    PyTorch: ``torch.autograd.graph.saved_tensors_hooks``, which sees the tensors as they
    are packed; here they are read from the program.

    Args:
      fun: Function of pytrees, as for ``jax.vjp``.
      argnums: Positions of the arguments to differentiate, as in ``jax.grad``; all of them
        when ``None``.
      has_aux: Whether ``fun`` returns a pair whose second part is not differentiated.

    Returns:
      A function of the same arguments that returns a ``SavedTensors``.

    Raises:
      ValueError: a position in ``argnums`` is not an argument's.

    Example:
      >>> saved = fg.saved_tensors(lambda x: jnp.sum(jnp.sin(x)))(jnp.ones((2, 3)))
      >>> [(t.operation, t.shape, t.bytes) for t in saved]
      [('cos', (2, 3), 24)]
    """

    def report(*args: Any, **kwargs: Any) -> SavedTensors:
        call = differentiable(fun, args, kwargs, argnums, has_aux, "saved_tensors")
        traced = trace(lambda arrays: call.vjp(arrays)[1], call.arrays)
        return SavedTensors(residuals(traced, call.names))

    return report


def residuals(traced: Traced, names: tuple[str, ...], start: int = 0) -> tuple[SavedTensor, ...]:
    """The records of a traced program's outputs from ``start`` on; ``names`` of its inputs."""
    scope = Scope(traced.jaxpr.jaxpr)
    outs = traced.jaxpr.jaxpr.outvars[start:]
    return tuple(describe(out.aval, origin(scope, out), names) for out in outs)


def argument_names(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], arrays: Sequence[Any]
) -> tuple[str, ...]:
    """The path of each of the ``arrays``, which are those among the arguments."""
    leaves = jax.tree.leaves((args, kwargs))
    names = call_names(fun, args, kwargs)
    found = [name for name, leaf in zip(names, leaves, strict=True) if is_array(leaf)]
    assert len(found) == len(arrays)
    return tuple(found)
