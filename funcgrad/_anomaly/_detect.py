"""``detect_anomaly``: a result that is not finite is run again, to say where that begins."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad import _jaxpr
from funcgrad._anomaly import _call
from funcgrad._anomaly._call import Call, all_finite
from funcgrad._anomaly._phase import is_backward, module_scopes
from funcgrad._anomaly._report import Anomaly, is_inexact, summarise
from funcgrad._anomaly._rerun import Place, Rerun
from funcgrad._anomaly._rows import rows_at_fault
from funcgrad._anomaly._values import Origin, Refused, nonfinite
from funcgrad._anomaly._where_trap import repair
from funcgrad._compat import is_transforming, open_jaxpr
from funcgrad._trees import LeafSpec


class AnomalyError(RuntimeError):
    """A result is not finite.

    Attributes:
      report: What is known of it, an ``Anomaly``.
    """

    def __init__(self, report: Anomaly) -> None:
        super().__init__(f"detect_anomaly: results are finite; got {report}")
        self.report = report


def detect_anomaly(fun: Callable[..., Any], *, ignore: LeafSpec = None) -> Callable[..., Any]:
    """Raise when the result of ``fun`` is not finite, and say which line made it so.

    After each call the floating leaves of the result are looked at, in one small program of its
    own; that of ``fun`` stays as it is.  Only when some element is NaN or infinite, the program
    is run again at the same arguments, one equation at a time, through ``jit``, ``scan``,
    ``while``, ``cond``, ``checkpoint``, custom rules and ``shard_map``.  Named is the first
    equation that makes something not finite of finite operands, and whose bad elements really
    arrive in the result: what a ``where`` or an ``exp`` turns into finite numbers does not
    count, nor does an infinity written on purpose, as in a mask, until a NaN is made of it.

    The line is that of the user's innermost frame.  Of the backward of a ``jax.custom_vjp`` JAX
    keeps the line of its call only; that of a ``Function`` has its own.

    Put it outermost: around ``jax.grad(loss)``, for the gradient is a result, too; around a
    whole training step; around its ``jit``.  The call waits for the result.

    PyTorch: ``torch.autograd.set_detect_anomaly(True)``, which looks at backward only and names
    the line of the forward operation whose gradient is NaN, not the one that began it.

    Args:
      fun: Any function, jitted or not.  Arguments are kept until it returns; NNX models that it
        changes are looked at afterwards, too.
      ignore: Leaves of the result that need not be finite: a pattern over paths such as
        ``aux/logits``, several, a predicate of (path, leaf), or a tree of booleans.

    Returns:
      A function like ``fun``.

    Raises:
      AnomalyError: The result is not finite; ``.report`` is an ``Anomaly``.  It says so, too,
        when nothing could be found: arguments that the call donated are gone, the compiled
        program may round in another way than its equations alone, and a program that calls
        ``io_callback`` is not run twice.
      TypeError: Called inside of a transformation, where there are no values to look at.

    Example:
      >>> def loss(w):
      ...     return jnp.sum(jnp.sqrt(w) - w)
      >>> try:
      ...     fg.detect_anomaly(jax.grad(loss))(jnp.array([4.0, 0.0]))
      ... except fg.AnomalyError as error:
      ...     found = error.report
      >>> found.operation, found.derivative_of, found.phase, found.operands[1].at_fault
      ('div', 'sqrt', 'backward', 0.0)
      >>> found.line.code
      'return jnp.sum(jnp.sqrt(w) - w)'
      >>> print(found)
      result: float32[2], ...
    """

    @functools.wraps(fun, updated=())
    def checked(*args: Any, **kwargs: Any) -> Any:
        if is_transforming():
            raise TypeError(
                "detect_anomaly: it looks at values, so that it stands outermost; got a call "
                "inside of a transformation. Write detect_anomaly(jax.jit(fun)), "
                "detect_anomaly(jax.grad(fun))."
            )
        call = Call(fun, args, kwargs)
        result = fun(*args, **kwargs)
        named = call.results(result, ignore)
        if not all_finite([x for _, x in named]):
            raise AnomalyError(_explained(call, named, ignore))
        return result

    return checked


def _explained(call: Call, named: list[tuple[str, Any]], ignore: LeafSpec) -> Anomaly:
    bad = tuple(summarise(name, x) for name, x in named if nonfinite(x) is not None)
    gone = [name for name, x in call.inputs if isinstance(x, jax.Array) and x.is_deleted()]
    if gone:
        more = f" and {len(gone) - 1} more" if gone[1:] else ""
        return Anomaly(
            bad,
            note=f"It is not run again: the call donated {gone[0]}{more}, whose values are gone. "
            "Leave donate_argnums out to look for the cause.",
        )
    try:
        return _found(call, bad, ignore)
    except Refused as reason:
        return Anomaly(bad, note=f"It is not run again: {reason}.")
    # Whatever stops the search must not hide that the result is bad.
    except Exception as error:
        first = str(error).partition("\n")[0]
        return Anomaly(bad, note=f"Running it again failed: {type(error).__name__}: {first}")


def _found(call: Call, bad: Any, ignore: LeafSpec) -> Anomaly:
    # As JAX takes them: a number of NumPy may be too large for it.
    inputs = [(name, jnp.asarray(x)) for name, x in call.inputs]
    names: list[str] = []

    def flat(*arrays: Any, opened: bool = False) -> Any:
        result, after = call.run(arrays, opened=opened)
        kept = [(name, x) for name, x in call.results(result, ignore, after) if is_inexact(x)]
        names[:] = [name for name, _ in kept]
        return [x for _, x in kept]

    arrays = [x for _, x in inputs]
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(functools.partial(flat, opened=True))(*arrays))
    rerun = Rerun()
    values = [rerun.given(x, "input", f"input {name}") for name, x in inputs]
    outputs = rerun.run(jaxpr, consts, values, Place())

    reached: dict[Origin, list[str]] = {}
    for name, value in zip(names, outputs, strict=True):
        for origin in value.origins:
            reached.setdefault(origin, []).append(name)
    # What goes wrong in the function itself comes before its derivative.
    made = sorted(
        (o for o in reached if o.kind == "equation"),
        key=lambda o: (o.backward or o.derivative_of is not None, o.order),
    )
    given = {o for o in reached if o.kind != "equation"} | set(made[0].infinities if made else ())
    summaries = [o.output for o in sorted(given, key=lambda o: o.order) if o.output]
    known = tuple({summary.name: summary for summary in summaries}.values())
    if not made:
        note = (
            ""
            if known
            else (
                "Run again one equation at a time, everything is finite: the compiled program "
                "rounds in another way."
            )
        )
        return Anomaly(bad, inputs=known, note=note)

    def is_cured(trial: list[Any]) -> bool | None:
        try:
            return all_finite(flat(*trial))
        except Exception:  # what it checks of its arguments may not hold for others
            return None

    first = made[0]
    line = _jaxpr.source_line(first.eqn, first.parents)
    if line is not None and line.file == _call.__file__:  # nobody else's code made it
        line = None
    operation = first.eqn.primitive.name
    derived = first.derivative_of is not None
    # Reverse mode makes some of a derivative's equations ahead of the backward pass.
    differentiated = any(is_backward(v.eqn, v.parents) for v in _jaxpr.walk(jaxpr))
    trap = first.trap
    return Anomaly(
        bad,
        kind=first.makes,
        phase="backward" if first.backward or (derived and differentiated) else "forward",
        operation=operation,
        derivative_of=first.derivative_of,
        line=line,
        path=first.path,
        module="/".join(module_scopes((*first.parents, first.eqn))),
        output=first.output,
        operands=first.operands,
        reached=tuple(reached[first]),
        inputs=known,
        rows="" if jaxpr.effects else rows_at_fault(inputs, first, is_cured),
        n_others=len({_jaxpr.source_line(o.eqn, o.parents) for o in made} - {line}),
        repair=repair(trap, first.derivative_of or operation, line) if trap else "",
        note=first.note,
    )
