"""The Hessian times a vector, from either side: ``hvp`` and ``vhp``."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from funcgrad import _jaxpr
from funcgrad._transforms._point import Point, scalar


def hvp(
    fun: Callable[..., Any],
    primals: Any,
    direction: Any,
    *,
    argnums: int | Sequence[int] = 0,
    holomorphic: bool = False,
) -> Any:
    """Multiply the Hessian of ``fun`` at ``primals`` by ``direction``.

    Forward over reverse: the derivative of ``jax.grad(fun)`` along the direction, which costs
    about two gradients and never forms the Hessian; under ``jit`` the products of the gradient
    are first written so that their derivatives need no transposes.  For many directions at one
    point keep the gradient's linear map, ``product = jax.linearize(jax.grad(fun), *primals)[1]``,
    which does not compute the gradient again.
    PyTorch: ``torch.autograd.functional.hvp(fun, inputs, v)``.

    Args:
      fun: Function that returns one number.
      primals: Its arguments: a tuple of them, or the only one.  An only argument that is a
        tuple itself stands in another, ``(params,)``.
      direction: Like the argument to differentiate in structure, shapes and dtypes, or a tuple
        of such for several.
      argnums: Which argument to differentiate, or which several.
      holomorphic: Whether ``fun`` is complex and complex-differentiable.

    Returns:
      A tree like ``direction``.  For complex arguments of a real ``fun``, the change of
      ``jax.grad(fun)``, which is the conjugate of torch's.

    Raises:
      TypeError: A leaf to differentiate is not floating, names it; or ``fun`` does not return
        one number.
      ValueError: ``direction`` does not match, names the leaf; or ``argnums`` is not possible.

    Example:
      >>> fg.hvp(lambda a: (a**3).sum(), jnp.array([1.0, 2.0]), jnp.ones(2))
      Array([ 6., 12.], dtype=float32)

    References:
      Pearlmutter, "Fast exact multiplication by the Hessian", 1994.
    """
    point = Point.of("hvp", arguments(primals), argnums)
    vector = point.directions(direction, "direction")
    grad = jax.grad(scalar("hvp", point.bind(fun)), holomorphic=holomorphic)
    grad = _jaxpr.fold_transposes(grad)
    return point.like(jax.jvp(grad, (point.leaves,), (vector,))[1])


def vhp(
    fun: Callable[..., Any],
    primals: Any,
    covector: Any,
    *,
    argnums: int | Sequence[int] = 0,
    holomorphic: bool = False,
) -> Any:
    """Multiply ``covector`` by the Hessian of ``fun`` at ``primals``, from the left.

    Reverse over reverse.  The Hessian is symmetric, so that this is ``hvp`` in other
    arithmetic, slower as a rule; it is for what has no forward mode, such as a backward pass
    that holds a ``custom_vjp`` itself, and for gradients that are none (a rule that is not the
    derivative of its function), whose Jacobian is not symmetric.
    PyTorch: ``torch.autograd.functional.vhp(fun, inputs, v)``.

    Args:
      fun: Function that returns one number.
      primals: Its arguments: a tuple of them, or the only one, as in ``hvp``.
      covector: Like the argument to differentiate in structure, shapes and dtypes, or a tuple
        of such for several.
      argnums: Which argument to differentiate, or which several.
      holomorphic: Whether ``fun`` is complex and complex-differentiable.

    Returns:
      A tree like ``covector``.

    Raises:
      TypeError: As ``hvp``.
      ValueError: As ``hvp``.

    Example:
      >>> fg.vhp(lambda a: (a**3).sum(), jnp.array([1.0, 2.0]), jnp.ones(2))
      Array([ 6., 12.], dtype=float32)
    """
    point = Point.of("vhp", arguments(primals), argnums)
    vector = point.directions(covector, "covector")
    grad = jax.grad(scalar("vhp", point.bind(fun)), holomorphic=holomorphic)
    return point.like(jax.vjp(grad, point.leaves)[1](vector)[0])


def arguments(primals: Any) -> tuple[Any, ...]:
    # A named tuple is a pytree of one's own making, not a list of arguments.
    return primals if type(primals) is tuple else (primals,)
