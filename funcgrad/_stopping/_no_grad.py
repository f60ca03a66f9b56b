"""Regions without gradients: ``no_grad`` and ``set_grad_enabled``."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from funcgrad import _jaxpr
from funcgrad._compat import Jaxpr, JaxprEqn, checkpoint_of, scopes
from funcgrad._stopping._region import enter, now, plain, refuse_later, region

# Names in the name stack, by which the region outside and `unused_grads` know the region.
NO_GRAD, _ENABLED = "fg.no_grad", "fg.set_grad_enabled"


def no_grad(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Stop gradients and tangents of all that ``fun`` computes.

    Values stay the same.  Unlike ``stop_gradient`` of the result this reaches what ``fun``
    closes over, too, and nothing inside is differentiated at all: nothing is kept for a
    backward pass, and what has no derivative (``pure_callback``, a ``custom_vjp`` in forward
    mode) may be used.  Gradients taken inside ``fun`` are what they are without it.
    PyTorch: ``with torch.no_grad():``, ``@torch.no_grad()``.

    ==============================  ======================================================
    outside of a transformation     ``fun`` is called as it stands
    inside of one                   it is traced, as under ``jit``; numbers, strings and
                                    arrays with known values stay what they are
    an argument handed back         stopped, too; in torch it keeps its history
    a Flax module                   is applied as ever; parameters that it creates under
                                    ``jit`` and statistics that it changes are refused by
                                    JAX and Flax: ``stop_gradient`` of its result does that
    ``set_grad_enabled(True)``      as in torch, what runs in it has gradients again
    ==============================  ======================================================

    Args:
      fun: Any function, of any arguments; its result is any pytree.

    Returns:
      A function like ``fun``; ``no_grad`` may stand above its definition as a decorator.

    Raises:
      TypeError: ``fun`` is a generator or a coroutine, or returns an iterator, which would
        run outside; or a mutable reference enters it.

    Example:
      >>> f = lambda w: w * fg.no_grad(lambda: w**2)()
      >>> jax.value_and_grad(f)(3.0)
      (Array(27., dtype=float32, weak_type=True), Array(9., dtype=float32, weak_type=True))
    """
    return _stopped(fun, "no_grad")


def set_grad_enabled(enabled: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a decorator that stops gradients, or lets them through.

    With ``False`` it is ``no_grad``.  With ``True`` it changes nothing, except inside
    ``no_grad``: there a value that comes from outside has its gradient again, where it is
    used in the enabled function.  What was computed between the two has none, as in torch.
    PyTorch: ``with torch.set_grad_enabled(enabled):``, ``torch.enable_grad()``.

    Args:
      enabled: Whether gradients pass; a Python boolean, since it decides what is traced.

    Returns:
      A decorator.

    Raises:
      TypeError: ``enabled`` is not a boolean, or as ``no_grad``.

    Example:
      >>> def f(x, train):
      ...     return fg.set_grad_enabled(train)(lambda: x**2)()
      >>> float(jax.grad(f)(3.0, True)), float(jax.grad(f)(3.0, False))
      (6.0, 0.0)
    """
    if not isinstance(enabled, bool):
        raise TypeError(
            f"set_grad_enabled: enabled is True or False; got {enabled!r}. "
            "Write set_grad_enabled(flag)(fun), with a flag that is known before tracing."
        )
    return _let_through if enabled else functools.partial(_stopped, call="set_grad_enabled")


def _stopped(fun: Callable[..., Any], call: str) -> Callable[..., Any]:
    return region(fun, _run_stopped, call)


def _let_through(fun: Callable[..., Any]) -> Callable[..., Any]:
    refuse_later(fun, "set_grad_enabled")

    @functools.wraps(fun)
    def enabled(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(_ENABLED):
            return now(fun(*args, **kwargs), "set_grad_enabled")

    return enabled


def _stop(value: Any) -> Any:
    with jax.named_scope(NO_GRAD):
        return enter(value, lax.stop_gradient)


def _run_stopped(jaxpr: Jaxpr, values: list[Any]) -> list[Any]:
    if not _holds_enabled(jaxpr):
        return plain(jaxpr, [_stop(value) for value in values])
    outputs = _jaxpr.evaluate(jaxpr, values, (), _stop_unless_enabled)
    # What is handed back untouched, at whatever depth, no equation has stopped.
    opened = _jaxpr.follow(jaxpr, [False] * len(jaxpr.invars), _open)
    return [v if is_open else _stop(v) for v, is_open in zip(outputs, opened, strict=True)]


def _open(visit: _jaxpr.Visit, inputs: list[bool]) -> None:
    """Mark what comes from an enabled region."""
    if _is_enabled(visit.eqn) or _holds_enabled_unseen(visit.eqn):
        inputs[:] = [True] * len(inputs)


def _stop_unless_enabled(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
    if _is_enabled(eqn):
        return lambda *inputs: _jaxpr.bind(eqn, *inputs)
    nested = _jaxpr.bodies(eqn)
    if any(_holds_enabled(body.jaxpr) for body in nested):
        # A custom rule, and what is not known, are stopped whole.
        if not any(body.role in ("rule", "opaque") for body in nested):
            return None
    if not nested and _holds_enabled_unseen(eqn):
        return functools.partial(_recomputed, eqn)
    return lambda *inputs: _jaxpr.bind(eqn, *map(_stop, inputs))


def _holds_enabled(jaxpr: Jaxpr) -> bool:
    return any(
        _is_enabled(visit.eqn) or _holds_enabled_unseen(visit.eqn) for visit in _jaxpr.walk(jaxpr)
    )


def _is_enabled(eqn: JaxprEqn) -> bool:
    return _ENABLED in scopes(eqn)


# Under jax_remat3 the body of a checkpoint is not a parameter, and the core does not enter it.


def _holds_enabled_unseen(eqn: JaxprEqn) -> bool:
    held = checkpoint_of(eqn)
    return held is not None and not _jaxpr.bodies(eqn) and _holds_enabled(held.jaxpr)


def _recomputed(eqn: JaxprEqn, *inputs: Any) -> Sequence[Any]:
    held: Any = checkpoint_of(eqn)

    def body(*inputs: Any) -> Sequence[Any]:
        return _jaxpr.evaluate(held.jaxpr, held.consts, inputs, _stop_unless_enabled)

    return jax.checkpoint(body, policy=held.policy)(*inputs)
