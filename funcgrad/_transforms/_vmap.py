"""``jax.vmap`` in chunks, with a word about random keys: ``vmap``."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from funcgrad._compat import gathered
from funcgrad._transforms._chunks import check_chunk_size, cut
from funcgrad._transforms._row import Row
from funcgrad._trees import broadcast_prefix, keystr


def vmap(
    fun: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    *,
    chunk_size: int | None = None,
    randomness: str = "error",
) -> Callable[..., Any]:
    """Map ``fun`` over an axis of its arguments, a chunk of rows at a time.

    What ``jax.vmap`` does, and two things more.  With ``chunk_size`` no more rows than that are
    computed at once.  And a random key that all rows share, which gives each of them the same
    numbers, is an error unless it is asked for:

    ================  ==========================================================
    ``randomness``    a draw from a key that is not mapped
    ================  ==========================================================
    ``"error"``       raises, with the line that draws
    ``"same"``        is the same in every row, as in ``jax.vmap``
    ``"different"``   in row ``i`` is from ``jax.random.fold_in(key, i)``, whatever the chunks
    ================  ==========================================================

    Keys are arguments with ``in_axes`` of ``None`` and closed-over ones, typed or raw.  Mapped
    keys are left alone.  A key of implementation ``rbg`` draws other numbers under ``vmap`` than
    alone, so that there the chunks may show.  What a ``custom_vjp`` draws only on the way back, for
    a gradient taken around the map, is not seen.

    Under ``jax.grad`` all chunks keep what their backward passes need; map
    ``jax.checkpoint(fun)`` to hold one chunk's only.
    PyTorch: ``torch.vmap(fun, in_dims, out_dims, randomness, chunk_size=...)``.

    Args:
      fun: Function of rows.
      in_axes: The mapped axis of each argument, or a tuple of pytrees of them that may stop
        early; ``None`` for what all rows share.  Keyword arguments are mapped over axis 0.
      out_axes: Where the mapped axis stands in the outputs; ``None`` for what does not depend
        on the row.
      axis_name: A name for collectives, which see the whole axis and thus need it in one chunk.
      axis_size: The number of rows; needed where nothing is mapped.
      spmd_axis_name: As in ``jax.vmap``.
      chunk_size: The largest number of rows computed at once, all for ``None``; a little less
        where that divides their number.  The last chunk may be smaller: nothing is filled up.
        An axis that is spread over devices by an explicit sharding is gathered first.
      randomness: See the table.  ``"error"`` and ``"different"`` read the program, so that
        ``fun`` is traced as under ``jax.jit``.

    Returns:
      A function like ``fun`` with the axis more.

    Raises:
      ValueError: A draw is shared under ``"error"``, or under ``"different"`` from a key that
        ``fun`` makes itself; a collective over ``axis_name`` meets ``chunk_size``; axes do not
        fit the arguments, names the leaf; or an option is not possible.

    Example:
      >>> fg.vmap(lambda x: x**2, chunk_size=2)(jnp.arange(5.0))
      Array([ 0.,  1.,  4.,  9., 16.], dtype=float32)
      >>> noisy = lambda key, x: x + jax.random.normal(key)
      >>> fg.vmap(noisy, (None, 0))(jax.random.key(0), jnp.zeros(3))
      Traceback (most recent call last):
      ValueError: vmap: every row draws from its own key; got one that is not mapped, drawn ...
    """
    check_chunk_size("vmap", chunk_size)
    if randomness not in ("error", "same", "different"):
        raise ValueError(
            f"vmap: randomness is 'error', 'same' or 'different'; got {randomness!r}. "
            "Leave it out for 'error'."
        )
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    refused = None if chunk_size is None else axis_name

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        axes = broadcast_prefix(in_axes, args, "vmap: in_axes")
        axes += [0] * (len(leaves) - len(axes))
        n = _count_rows(args, kwargs, axes, axis_size)
        row = Row(fun, leaves, tree, [axis is not None for axis in axes], randomness, refused)
        batch = [x for x, axis in zip(leaves, axes, strict=True) if axis is not None]
        axes = [axis for axis in axes if axis is not None]
        names: dict[str, Any] = {"axis_name": axis_name, "spmd_axis_name": spmd_axis_name}
        if chunk_size is None or chunk_size >= n:
            whole = jax.vmap(row, (0, axes), out_axes, axis_size=n, **names)
            return whole(jnp.arange(n), batch)
        batch = gathered(batch, axes)
        batch = [jnp.moveaxis(x, axis, 0) for x, axis in zip(batch, axes, strict=True)]
        return _in_chunks(row, (jnp.arange(n), batch), out_axes, n, chunk_size, names)

    return mapped


def _in_chunks(
    row: Row, batch: Any, out_axes: Any, n: int, chunk_size: int, names: dict[str, Any]
) -> Any:
    out_tree, axes = None, []

    def parted(index: Any, rows: list[Any]) -> tuple[list[Any], list[Any]]:
        """The outputs that are mapped, and those that are not."""
        nonlocal out_tree, axes
        out = row(index, rows)
        outputs, out_tree = jax.tree.flatten(out)
        axes = broadcast_prefix(out_axes, out, "vmap: out_axes")
        pairs = list(zip(outputs, axes, strict=True))
        return [x for x, a in pairs if a is not None], [x for x, a in pairs if a is None]

    def run(chunk: Any) -> tuple[list[Any], list[Any]]:
        return jax.vmap(parted, out_axes=(0, None), axis_size=len(chunk[0]), **names)(*chunk)

    # Rows are scanned over, not looked up in a loop: the way back through a lookup would add a
    # whole batch of zeros for each chunk.
    size, count, rest = cut(n, chunk_size)
    part = lambda start, stop: jax.tree.map(lambda x: x[start:stop], batch)
    chunks = jax.tree.map(lambda x: x.reshape(count, size, *x.shape[1:]), part(0, n - rest))
    stacked = lax.map(lambda chunk: run(chunk)[0], chunks)
    results = [y.reshape(count * size, *y.shape[2:]) for y in stacked]
    if rest:
        last = run(part(n - rest, n))[0]
        results = [jnp.concatenate(pair) for pair in zip(results, last, strict=True)]
    shared = iter(run(part(0, size))[1] if None in axes else ())
    moved = iter(results)
    outputs = [
        next(shared) if axis is None else jnp.moveaxis(next(moved), 0, axis) for axis in axes
    ]
    return jax.tree.unflatten(out_tree, outputs)


def _count_rows(args: Any, kwargs: Any, axes: list[Any], axis_size: int | None) -> int:
    named = [
        *((f"args{keystr(path)}", x) for path, x in jax.tree_util.tree_leaves_with_path(args)),
        *((f"kwargs{keystr(path)}", x) for path, x in jax.tree_util.tree_leaves_with_path(kwargs)),
    ]
    sizes = {} if axis_size is None else {"axis_size": axis_size}
    for (name, leaf), axis in zip(named, axes, strict=True):
        if axis is None:
            continue
        shape = jnp.shape(leaf)
        if type(axis) is not int or not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"vmap: in_axes are axes of the arguments; got {axis} for {name} with shape "
                f"{shape}. Pass None for what all rows share."
            )
        sizes[name] = shape[axis]
    if not sizes:
        raise ValueError(
            "vmap: something is mapped; got in_axes of None for all arguments. Pass axis_size."
        )
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ValueError(
            f"vmap: all mapped arguments have the same number of rows; got {found}. "
            "Pass None in in_axes for what all rows share."
        )
    return next(iter(sizes.values()))
