"""Jacobians by one mode: ``jacrev`` by rows, ``jacfwd`` by columns."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad._transforms._basis import Basis
from funcgrad._transforms._chunks import check_chunk_size, fill
from funcgrad._transforms._communication import refuse_mixing
from funcgrad._transforms._point import Point
from funcgrad._trees import is_float, keystr


def jacrev(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Compute the Jacobian row by row, in reverse mode, a chunk of rows at a time.

    ``jax.jacrev`` makes a unit vector for every output, all at once, so that its memory grows
    with the square of the number of outputs.  Here those of one chunk are made inside the loop:
    beside the Jacobian, and what the backward pass keeps, memory is that of one chunk.  The
    forward pass runs once.  PyTorch: ``torch.func.jacrev(fun, argnums, chunk_size=...)``.

    Args:
      fun: Function whose outputs are any pytree of floating leaves.
      argnums: Which argument to differentiate, or which several.
      has_aux: Whether ``fun`` returns a pair whose second part is passed on.
      holomorphic: Whether ``fun`` is complex and complex-differentiable.
      chunk_size: The largest number of rows computed at once, all for ``None``; a little less
        where that divides the number of outputs.  With 1 nothing is mapped, so that a function
        without batching rule will do.

    Returns:
      A function of the arguments of ``fun``: a tree like its outputs, of trees like the argument
      (a tuple of these for several), of arrays with the shape of the output and then of the
      argument; as ``jax.jacrev``, with the auxiliary part beside it if ``has_aux``.

    Raises:
      TypeError: A leaf is not floating, names it; or the outputs are complex without
        ``holomorphic``.
      ValueError: ``argnums`` or ``chunk_size`` is not possible; or, inside ``shard_map``, the
        derivatives of several devices would be added up.

    Example:
      >>> fg.jacrev(lambda x: x**2, chunk_size=2)(jnp.array([1.0, 2.0, 3.0]))
      Array([[2., 0., 0.],
             [0., 4., 0.],
             [0., 0., 6.]], dtype=float32)
    """
    check_chunk_size("jacrev", chunk_size)

    @functools.wraps(fun)
    def rows(*args: Any, **kwargs: Any) -> Any:
        point = Point.of("jacrev", args, argnums)
        _, jac, aux = reverse(point, point.bind(fun, kwargs), has_aux, holomorphic, chunk_size)
        return (jac, aux) if has_aux else jac

    return rows


def jacfwd(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Compute the Jacobian column by column, in forward mode, a chunk of columns at a time.

    Nothing is kept for a backward pass: beside the Jacobian memory is that of one chunk of
    tangents.  The function itself is computed again in each chunk.
    PyTorch: ``torch.func.jacfwd(fun, argnums)``, which has no chunks.

    Args:
      fun: Function whose outputs are any pytree of floating leaves.
      argnums: Which argument to differentiate, or which several.
      has_aux: Whether ``fun`` returns a pair whose second part is passed on.
      holomorphic: Whether ``fun`` is complex and complex-differentiable.
      chunk_size: The largest number of columns computed at once, all for ``None``; a little
        less where that divides the number of inputs.  With 1 nothing is mapped.

    Returns:
      A function of the arguments of ``fun``; as ``jax.jacfwd``, in the order that ``jacrev``
      describes, with the auxiliary part beside it if ``has_aux``.

    Raises:
      TypeError: A leaf is not floating, names it; or it is complex without ``holomorphic``.
      ValueError: ``argnums`` or ``chunk_size`` is not possible; or, inside ``shard_map``, the
        derivatives of several devices would be added up.

    Example:
      >>> fg.jacfwd(lambda x: (x**2).sum(), chunk_size=1)(jnp.array([1.0, 2.0, 3.0]))
      Array([2., 4., 6.], dtype=float32)
    """
    check_chunk_size("jacfwd", chunk_size)

    @functools.wraps(fun)
    def columns(*args: Any, **kwargs: Any) -> Any:
        point = Point.of("jacfwd", args, argnums)
        bound = point.bind(fun, kwargs)
        jac = forward(point, bound, has_aux, holomorphic, chunk_size)
        return (jac, bound(point.leaves)[1]) if has_aux else jac

    return columns


def reverse(
    point: Point,
    fun: Callable[[list[Any]], Any],
    has_aux: bool,
    holomorphic: bool,
    chunk_size: int | None,
) -> tuple[Any, Any, Any]:
    """Value, Jacobian and auxiliary part (``None`` without) of ``fun`` of a list of leaves."""
    if holomorphic:
        _require_complex(point.call, point.names, point.leaves, "arguments")
    out: Any = jax.vjp(fun, point.leaves, has_aux=has_aux)
    value, pull, aux = out if has_aux else (*out, None)
    outputs, out_tree, names = _flatten(point.call, value)
    if holomorphic:
        _require_complex(point.call, names, outputs, "outputs")
    else:
        _require_real(point.call, names, outputs)
    refuse_mixing(point.call, fun, point.leaves, outputs, "reverse")
    basis = Basis(outputs)
    back = lambda seeds: pull(jax.tree.unflatten(out_tree, seeds))[0]

    def rows(start: Any, size: int) -> list[Any]:
        if size == 1:
            return [row[None] for row in back(basis.vector(start))]
        return jax.vmap(back, axis_size=size)(basis.vectors(start, size))

    by_argument = fill(rows, len(basis), chunk_size, axis=0)
    blocks = zip(*(basis.split(block, 0) for block in by_argument), strict=True)
    if not by_argument:
        blocks = iter([() for _ in outputs])
    jac = jax.tree.unflatten(out_tree, [point.like(block) for block in blocks])
    return value, jac, aux


def forward(
    point: Point,
    fun: Callable[[list[Any]], Any],
    has_aux: bool,
    holomorphic: bool,
    chunk_size: int | None,
) -> Any:
    """The Jacobian of ``fun`` of a list of leaves."""
    if holomorphic:
        _require_complex(point.call, point.names, point.leaves, "arguments")
    else:
        _require_real(point.call, point.names, point.leaves)
    refuse_mixing(point.call, fun, point.leaves, point.leaves, "forward")
    basis, out_tree = Basis(point.leaves), None

    def outputs(leaves: list[Any]) -> list[Any]:
        nonlocal out_tree
        value = fun(leaves)
        flat, out_tree, names = _flatten(point.call, value[0] if has_aux else value)
        if holomorphic:
            _require_complex(point.call, names, flat, "outputs")
        return flat

    push = lambda seeds: jax.jvp(outputs, (point.leaves,), (seeds,))[1]

    def columns(start: Any, size: int) -> list[Any]:
        if size == 1:
            return [column[..., None] for column in push(basis.vector(start))]
        return jax.vmap(push, out_axes=-1, axis_size=size)(basis.vectors(start, size))

    by_output = fill(columns, len(basis), chunk_size, axis=-1)
    blocks = [point.like(basis.split(block, -1)) for block in by_output]
    return jax.tree.unflatten(out_tree, blocks)


def _flatten(call: str, value: Any) -> tuple[list[Any], Any, list[str]]:
    named, tree = jax.tree_util.tree_flatten_with_path(value)
    names = [f"output{keystr(path)}" for path, _ in named]
    for name, (_, leaf) in zip(names, named, strict=True):
        if not is_float(leaf):
            raise TypeError(
                f"{call}: outputs are floating or complex; got {jnp.result_type(leaf)} in {name}. "
                "Return it as the auxiliary part, with has_aux."
            )
    return [leaf for _, leaf in named], tree, names


def _require_complex(call: str, names: Sequence[str], leaves: Sequence[Any], what: str) -> None:
    for name, leaf in zip(names, leaves, strict=True):
        if not jnp.iscomplexobj(leaf):
            raise TypeError(
                f"{call}: with holomorphic, {what} are complex; got {jnp.result_type(leaf)} in "
                f"{name}. Leave holomorphic out, or convert."
            )


def _require_real(call: str, names: Sequence[str], leaves: Sequence[Any]) -> None:
    for name, leaf in zip(names, leaves, strict=True):
        if jnp.iscomplexobj(leaf):
            raise TypeError(
                f"{call}: without holomorphic the seeded side is real; got "
                f"{jnp.result_type(leaf)} in {name}. Pass holomorphic=True if fun is "
                "complex-differentiable, or take real and imaginary parts."
            )
