"""A region that may not be differentiated: ``inference_mode``."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from funcgrad import _jaxpr
from funcgrad._compat import Jaxpr
from funcgrad._stopping._region import enter, plain, region
from funcgrad._trees import is_float

# The identity; it is not there in compiled code.
inference_p: Any = Primitive("inference_mode")
inference_p.def_impl(lambda x, **params: x)
inference_p.def_abstract_eval(lambda x, **params: x)
mlir.register_lowering(inference_p, lambda ctx, x, **params: [x])


def _batched(args: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    return inference_p.bind(*args, **params), axes[0]


def _refused(primals: Sequence[Any], tangents: Sequence[Any], *, where: str) -> Any:
    if isinstance(tangents[0], ad.Zero):
        return inference_p.bind(*primals, where=where), tangents[0]
    raise TypeError(
        f"inference_mode: no value that is being differentiated may enter; got one "
        f"({jax.typeof(primals[0])}) in {where}. Use no_grad where the result is a "
        "constant, or stop_gradient on the argument."
    )


def _where(fun: Callable[..., Any]) -> str:
    if line := _jaxpr.calling_line():
        return f"the call at {line}"
    # A `jit` directly around: later calls find it traced, so that the first call's line would
    # mislead.
    code = getattr(inspect.unwrap(fun), "__code__", None)
    if code is None:
        return f"a call of {fun}"
    return f"a call of {code.co_name}, {code.co_filename}:{code.co_firstlineno}"


batching.primitive_batchers[inference_p] = _batched
ad.primitive_jvps[inference_p] = _refused


def inference_mode(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to differentiate through ``fun``.

    Values stay the same, and compiled code is the same.  A value that is being
    differentiated, in forward or in reverse mode, raises where it enters ``fun`` as an
    argument or closed over, whether or not the result is used.  Differentiating something
    else, or inside ``fun``, works.  PyTorch: ``with torch.inference_mode():``; there the
    results raise when backward would need them, here there is no doubt where it happened.
    (Under the flag ``jax_remat3`` JAX differentiates all that enters a ``jax.checkpoint``, so
    that a call inside of one raises when anything is differentiated.)

    Args:
      fun: Any function, of any arguments; inside a transformation it is traced, as under
        ``jit``.

    Returns:
      A function like ``fun``; ``inference_mode`` may stand above its definition.

    Raises:
      TypeError: When differentiated, naming the line of the call, or of the function where a
        ``jit`` directly around it keeps the call from being seen; or as ``no_grad``.

    Example:
      >>> predict = fg.inference_mode(lambda w, x: w * x)
      >>> float(jax.grad(lambda b: b * predict(2.0, 3.0))(1.0))
      6.0
      >>> jax.grad(lambda w: predict(w, 3.0))(2.0)
      Traceback (most recent call last):
      TypeError: inference_mode: no value that is being differentiated may enter; ...
    """

    def run(jaxpr: Jaxpr, values: list[Any]) -> list[Any]:
        where = _where(fun)

        def barrier(value: Any) -> Any:
            return inference_p.bind(value, where=where) if is_float(value) else value

        return plain(jaxpr, [enter(value, barrier) for value in values])

    return region(fun, run, "inference_mode")
