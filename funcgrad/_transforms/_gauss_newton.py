"""The Gauss-Newton matrix times a vector: ``gnvp``."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad._transforms._hvp import arguments
from funcgrad._transforms._point import Point, scalar
from funcgrad._trees import is_float, keystr


def gnvp(
    model: Callable[..., Any],
    loss: Callable[[Any], Any],
    primals: Any,
    direction: Any,
    *,
    argnums: int | Sequence[int] = 0,
) -> Any:
    """Multiply the generalised Gauss-Newton matrix of ``loss(model(*primals))`` by ``direction``.

    The matrix is ``Jᵀ H J``, with ``J`` the Jacobian of the model and ``H`` the Hessian of the
    loss in the model's outputs: the Hessian without the model's own curvature.  It has no
    negative eigenvalue where the loss is convex in the outputs, and for a loss such as softmax
    cross-entropy it is the Fisher information.  The model is linearised once, and its linear
    map used in both directions.  PyTorch: ``jvp`` and ``vjp`` by hand.

    Args:
      model: From the arguments to any pytree of floating outputs.
      loss: From these outputs to one number; targets are closed over.
      primals: The arguments of ``model``: a tuple of them, or the only one, as in ``hvp``.
      direction: Like the argument to differentiate in structure, shapes and dtypes, or a tuple
        of such for several.
      argnums: Which argument to differentiate, or which several.

    Returns:
      A tree like ``direction``.

    Raises:
      TypeError: A leaf to differentiate, or an output of ``model``, is not floating, names it;
        or ``loss`` does not return one number; or, from JAX, ``model`` holds a ``custom_vjp``,
        which has no forward mode (``fg.Function`` has).
      ValueError: ``direction`` does not match, names the leaf; or ``argnums`` is not possible.

    Example:
      >>> model = lambda w: jnp.stack([w[0] * w[1], w[1]])
      >>> fg.gnvp(model, lambda out: (out**2).sum() / 2, jnp.array([2.0, 3.0]), jnp.ones(2))
      Array([15., 11.], dtype=float32)

    References:
      Schraudolph, "Fast curvature matrix-vector products for second-order gradient descent",
      2002.
    """
    point = Point.of("gnvp", arguments(primals), argnums)
    vector = point.directions(direction, "direction")
    outputs, push = jax.linearize(point.bind(model), point.leaves)
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        if not is_float(leaf):
            raise TypeError(
                f"gnvp: outputs of model are floating; got {jnp.result_type(leaf)} in "
                f"output{keystr(path)}. Return only what the loss is differentiated in."
            )
    grad = jax.grad(scalar("gnvp", loss, "loss"))
    curved = jax.jvp(grad, (outputs,), (push(vector),))[1]
    return point.like(jax.linear_transpose(push, point.leaves)(curved)[0])
