"""The Jacobian with all that came along, by the mode that costs less: ``jacobian``."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from funcgrad import _jaxpr
from funcgrad._compat import primitives
from funcgrad._transforms._chunks import check_chunk_size
from funcgrad._transforms._modes import forward, reverse
from funcgrad._transforms._point import Point


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "jacobian", "aux"],
    meta_fields=["mode"],
)
@dataclasses.dataclass(frozen=True)
class Jacobian:
    """What ``fg.jacobian`` found; a pytree."""

    value: Any
    """The outputs of the function."""
    jacobian: Any
    """As ``fg.jacrev`` and ``fg.jacfwd`` give it."""
    aux: Any
    """The auxiliary part; ``None`` without ``has_aux``."""
    mode: Literal["forward", "reverse"]
    """How it was computed."""


def jacobian(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
    chunk_size: int | None = None,
) -> Callable[..., Jacobian]:
    """Compute value and Jacobian, in the mode that the shapes and the program ask for.

    ==========================================  =========
    the program                                 mode
    ==========================================  =========
    holds a ``custom_vjp``, which has no jvp    reverse
    holds a ``while`` loop                      forward
    has more inputs than outputs                reverse
    otherwise                                   forward
    ==========================================  =========

    PyTorch: ``torch.autograd.functional.jacobian(fun, inputs, strategy=...)``.

    Args:
      fun: Function whose outputs are any pytree of floating leaves.
      argnums: Which argument to differentiate, or which several.
      has_aux: Whether ``fun`` returns a pair whose second part is passed on.
      holomorphic: Whether ``fun`` is complex and complex-differentiable.
      chunk_size: The largest number of rows or columns computed at once; all for ``None``.

    Returns:
      A function of the arguments of ``fun`` to a ``Jacobian``, whose fields are ``value``,
      ``jacobian``, ``aux`` and ``mode``.

    Raises:
      TypeError: As ``jacrev`` and ``jacfwd``.
      ValueError: As ``jacrev`` and ``jacfwd``.

    Example:
      >>> found = fg.jacobian(lambda w: w @ jnp.ones((3, 2)))(jnp.ones(3))
      >>> found.mode, found.jacobian.shape, found.value
      ('reverse', (2, 3), Array([3., 3.], dtype=float32))
    """
    check_chunk_size("jacobian", chunk_size)

    @functools.wraps(fun)
    def found(*args: Any, **kwargs: Any) -> Jacobian:
        point = Point.of("jacobian", args, argnums)
        bound = point.bind(fun, kwargs)
        mode = _choose(point, bound, has_aux)
        if mode == "reverse":
            value, jac, aux = reverse(point, bound, has_aux, holomorphic, chunk_size)
        else:
            jac = forward(point, bound, has_aux, holomorphic, chunk_size)
            out = bound(point.leaves)
            value, aux = out if has_aux else (out, None)
        return Jacobian(value, jac, aux, mode)

    return found


def _choose(
    point: Point, fun: Callable[[list[Any]], Any], has_aux: bool
) -> Literal["forward", "reverse"]:
    differentiated = lambda leaves: fun(leaves)[0] if has_aux else fun(leaves)
    jaxpr = _jaxpr.trace(differentiated, point.leaves).jaxpr
    held = {visit.eqn.primitive for visit in _jaxpr.walk(jaxpr)}
    if primitives.custom_vjp_call_p in held:
        return "reverse"
    if primitives.while_p in held:
        return "forward"
    entries = lambda avals: sum(math.prod(aval.shape) for aval in avals)
    return "reverse" if entries(jaxpr.in_avals) > entries(jaxpr.out_avals) else "forward"
