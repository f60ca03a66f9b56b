"""The Hessian, its diagonal and its trace, exactly."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad import _jaxpr
from funcgrad._transforms._basis import Basis
from funcgrad._transforms._chunks import check_chunk_size, fill
from funcgrad._transforms._communication import refuse_mixing
from funcgrad._transforms._modes import jacfwd, jacrev
from funcgrad._transforms._point import Point, scalar, wide


def hessian(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Compute the Hessian column by column, forward over reverse, a chunk of columns at a time.

    Beside the Hessian itself memory is that of one chunk, ``chunk_size`` gradients and their
    tangents.  PyTorch: ``torch.func.hessian(fun, argnums)``, which has no chunks.

    Args:
      fun: Function of floating leaves; its outputs, one number as a rule, are any pytree.
      argnums: Which argument to differentiate, or which several.
      has_aux: Whether ``fun`` returns a pair whose second part is passed on.
      holomorphic: Whether ``fun`` is complex and complex-differentiable.
      chunk_size: The largest number of columns computed at once, and of outputs in each; all
        for ``None``.

    Returns:
      A function of the arguments of ``fun``: a tree like its outputs, of trees like the argument,
      of such trees, as ``jax.hessian``, with the auxiliary part beside it if ``has_aux``.

    Raises:
      TypeError: As ``jacrev`` and ``jacfwd``.
      ValueError: As ``jacrev`` and ``jacfwd``.

    Example:
      >>> fg.hessian(lambda a: (a**3).sum(), chunk_size=1)(jnp.array([1.0, 2.0]))
      Array([[ 6.,  0.],
             [ 0., 12.]], dtype=float32)
    """
    check_chunk_size("hessian", chunk_size)
    options: Any = {"has_aux": has_aux, "holomorphic": holomorphic, "chunk_size": chunk_size}
    return jacfwd(jacrev(fun, argnums, **options), argnums, **options)


def hessian_diagonal(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    holomorphic: bool = False,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Compute the diagonal of the Hessian exactly, a chunk of entries at a time.

    As many products with the Hessian as there are entries, of each of which one entry is kept.
    Where that is too many ``hutchinson`` estimates it.
    PyTorch: the diagonal of ``torch.func.hessian(fun)``.

    Args:
      fun: Function that returns one number.
      argnums: Which argument to differentiate, or which several.
      holomorphic: Whether ``fun`` is complex and complex-differentiable.
      chunk_size: The largest number of products computed at once; all for ``None``.

    Returns:
      A function of the arguments of ``fun`` to a tree like the argument, or a tuple of such for
      several.

    Raises:
      TypeError: A leaf to differentiate is not floating, or is complex without ``holomorphic``,
        names it; or ``fun`` does not return one number.
      ValueError: ``argnums`` or ``chunk_size`` is not possible; or, inside ``shard_map``, the
        derivatives of several devices would be added up.

    Example:
      >>> fg.hessian_diagonal(lambda a: a[0] ** 3 * a[1])(jnp.array([1.0, 2.0]))
      Array([12.,  0.], dtype=float32)
    """
    check_chunk_size("hessian_diagonal", chunk_size)

    @functools.wraps(fun)
    def diagonal(*args: Any, **kwargs: Any) -> Any:
        point = Point.of("hessian_diagonal", args, argnums)
        return point.like(_diagonal(point, point.bind(fun, kwargs), holomorphic, chunk_size))

    return diagonal


def hessian_trace(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    holomorphic: bool = False,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Compute the trace of the Hessian exactly, the sum of ``hessian_diagonal``.

    Where that is too many products with the Hessian ``hutchinson`` estimates it.
    PyTorch: the trace of ``torch.func.hessian(fun)``.

    Args:
      fun: Function that returns one number.
      argnums: Which argument to differentiate, or which several.
      holomorphic: Whether ``fun`` is complex and complex-differentiable.
      chunk_size: The largest number of products computed at once; all for ``None``.

    Returns:
      A function of the arguments of ``fun`` to one number, over all arguments differentiated;
      float32 or wider.

    Raises:
      TypeError: As ``hessian_diagonal``.
      ValueError: As ``hessian_diagonal``.

    Example:
      >>> fg.hessian_trace(lambda a: (a**3).sum())(jnp.array([1.0, 2.0]))
      Array(18., dtype=float32)
    """
    check_chunk_size("hessian_trace", chunk_size)

    @functools.wraps(fun)
    def trace(*args: Any, **kwargs: Any) -> Any:
        point = Point.of("hessian_trace", args, argnums)
        leaves = _diagonal(point, point.bind(fun, kwargs), holomorphic, chunk_size)
        sums = [jnp.sum(leaf, dtype=wide(leaf.dtype)) for leaf in leaves]
        return sum(sums[1:], sums[0]) if sums else jnp.zeros(())

    return trace


def _diagonal(
    point: Point, fun: Callable[[list[Any]], Any], holomorphic: bool, chunk_size: int | None
) -> list[Any]:
    for name, leaf in zip(point.names, point.leaves, strict=True):
        if jnp.iscomplexobj(leaf) != holomorphic:
            raise TypeError(
                f"{point.call}: arguments are complex with holomorphic, and only then; got "
                f"{jnp.result_type(leaf)} in {name}. The Hessian in real and imaginary parts has "
                "a diagonal of its own."
            )
    basis = Basis(point.leaves)
    if not len(basis):
        return [jnp.zeros_like(leaf) for leaf in point.leaves]
    grad = jax.grad(scalar(point.call, fun), holomorphic=holomorphic)
    refuse_mixing(point.call, grad, point.leaves, point.leaves, "forward")
    grad = _jaxpr.fold_transposes(grad)
    product = lambda seeds: jax.jvp(grad, (point.leaves,), (seeds,))[1]

    def entries(start: Any, size: int) -> list[Any]:
        if size == 1:
            images = [image[None] for image in product(basis.vector(start))]
        else:
            images = jax.vmap(product)(basis.vectors(start, size))
        return [basis.entries(images, start)]

    (found,) = fill(entries, len(basis), chunk_size, axis=0)
    parts = basis.split(found, 0)
    return [part.astype(jnp.result_type(x)) for part, x in zip(parts, point.leaves, strict=True)]
