"""The two checks: of first derivatives, and of the vjp's own."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._compat import enable_x64
from funcgrad._gradcheck._compare import Compared, compare
from funcgrad._gradcheck._faults import (
    batch_faults,
    no_mode,
    notes_on,
    rule_faults,
    second_trace,
    value_faults,
)
from funcgrad._gradcheck._jacobians import Derivatives
from funcgrad._gradcheck._kinks import explain
from funcgrad._gradcheck._problem import Problem, gradient_problem, problem_of
from funcgrad._gradcheck._report import GradcheckEntry, GradcheckError, GradcheckReport
from funcgrad._gradcheck._space import Probes

# Step, atol, rtol: torch's own in float64, and in float32 what its rounding leaves.
_DEFAULTS = {"float64": (1e-6, 1e-5, 1e-3), "float32": (1e-2, 1e-3, 1e-2)}


@dataclasses.dataclass(frozen=True)
class _Options:
    eps: float
    tolerances: tuple[float, float]
    raise_exception: bool
    nondet_tol: float
    modes: tuple[str, ...]
    batched: bool
    fast: bool


def gradcheck(
    fun: Callable[..., Any],
    inputs: Any,
    *,
    eps: float | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    raise_exception: bool = True,
    nondet_tol: float = 0.0,
    check_batched_grad: bool = False,
    check_forward_ad: bool = False,
    check_backward_ad: bool = True,
    fast_mode: bool = False,
    dtype: Any = np.float64,
) -> GradcheckReport:
    r"""Compare the derivatives of ``fun`` with central differences, entry by entry.

    .. math:: |a - n| \le \mathrm{atol} + \mathrm{rtol}\,|n|, \qquad
              n = \frac{f(x + \epsilon e) - f(x - \epsilon e)}{2 \epsilon}

    PyTorch: ``torch.autograd.gradcheck``, with its arguments, tolerances and verdicts.
    Computes in float64 by itself and leaves JAX's configuration as it is.

    ===================  ==================================================================
    any function         of pytrees; with ``jit``, ``scan``, own rules, kernels in it; with
                         Python that looks at values (then run without compiling)
    integers, keys       held constant, as is whatever ``fun`` closes over
    complex numbers      checked along the real and the imaginary direction
    a kink, a jump       fails, as in torch, and is called one: ``relu`` at 0; not where the
                         rule gives the mean of both slopes: ``abs`` at 0
    two calls differ     fails, if by more than ``nondet_tol``
    own rules            fail, too, if not linear in the cotangent or tangent, or if the values
                         they give are not the function's
    float32 in ``fun``   rounding hides the slope: a failure's notes name the line
    float32 only         a kernel that knows no other type: ``dtype=jnp.float32``
    sharded inputs       taken whole; a layout that ``fun`` needs it makes by ``jax.reshard``
    memory               the whole Jacobian, twice; ``fast_mode`` without it
    ===================  ==================================================================

    Args:
      fun: Function of ``*inputs`` to a tree with floating or complex leaves.
      inputs: The tuple of its arguments; anything else, a NamedTuple too, is the one argument.
      eps: Step; 1e-6, in float32 1e-2.
      atol: Absolute tolerance; 1e-5, in float32 1e-3.
      rtol: Relative tolerance; 1e-3, in float32 1e-2.
      raise_exception: Whether a failed check raises; else its report is returned.
      nondet_tol: By how much two calls at the same point may differ.
      check_batched_grad: Whether to compare each mode under ``jax.vmap`` with single calls, too.
      check_forward_ad: Whether to check forward mode (``jax.jvp``).
      check_backward_ad: Whether to check reverse mode (``jax.vjp``).
      fast_mode: Compare one random projection for each pair of leaves: a few calls however
        many entries there are, and errors of both signs may cancel.
      dtype: The precision to compute in, float64 or float32.

    Returns:
      A ``GradcheckReport``: true if all is well, and prints as a table.

    Raises:
      GradcheckError: The check failed; its message is the report.
      ValueError: No floating leaf in inputs or outputs, no mode to check, or a step or
        tolerance out of range.
      TypeError: It stands inside of a transformation, ``dtype`` is no such type, or ``fun`` runs
        in the types given and not in float64.

    Example:
      >>> print(fg.gradcheck(jnp.sin, jnp.array([0.5])))
      gradcheck: 1 derivative agrees with differences.
        derivative of  by            numerical  analytical  error    allowed
        output[0]      inputs[0][0]  0.877583   0.877583    ...      0.00089
      >>> fg.gradcheck(jax.nn.relu, jnp.array([0.0, 1.0]))
      Traceback (most recent call last):
      ...
      funcgrad...GradcheckError: gradcheck: 1 of 4 derivatives are off.
        derivative of  by            numerical  analytical  error  allowed  because
        output[0]      inputs[0][0]  0.5        0           0.5    0.00051  kink: slope 0 on ...

    References:
      torch.autograd.gradcheck; in fast mode the tolerance is scaled as there,
      https://github.com/pytorch/pytorch/issues/53876.
    """
    call = "gradcheck"
    kind = _dtype(dtype, call)
    given = (eps, atol, rtol)
    options = _options(
        call, kind, given, raise_exception, nondet_tol, check_batched_grad,
        check_forward_ad, check_backward_ad, fast_mode,
    )  # fmt: skip
    with _precision(kind):
        return _checked(problem_of(fun, inputs, kind, call), options)


def gradgradcheck(
    fun: Callable[..., Any],
    inputs: Any,
    grad_outputs: Any = None,
    *,
    eps: float | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    raise_exception: bool = True,
    nondet_tol: float = 0.0,
    check_batched_grad: bool = False,
    check_fwd_over_rev: bool = False,
    check_rev_over_rev: bool = True,
    fast_mode: bool = False,
    dtype: Any = np.float64,
) -> GradcheckReport:
    """Compare the derivatives of the vjp of ``fun`` with central differences of it.

    The vjp is taken as a function of the inputs and of the cotangents, and ``gradcheck`` done
    on it: this finds a rule whose backward half does not depend on what it should, or cannot be
    differentiated.  It does not look at the first derivatives themselves.
    PyTorch: ``torch.autograd.gradgradcheck``.

    Args:
      fun: As for ``gradcheck``.
      inputs: As for ``gradcheck``.
      grad_outputs: Cotangents, like the floating outputs of ``fun``; random in [-1, 1] by
        default.
      eps: As for ``gradcheck``.
      atol: As for ``gradcheck``.
      rtol: As for ``gradcheck``.
      raise_exception: As for ``gradcheck``.
      nondet_tol: As for ``gradcheck``.
      check_batched_grad: As for ``gradcheck``.
      check_fwd_over_rev: Whether to check the jvp of the vjp.
      check_rev_over_rev: Whether to check the vjp of the vjp.
      fast_mode: As for ``gradcheck``.
      dtype: As for ``gradcheck``.

    Returns:
      A ``GradcheckReport``, of outputs such as ``grad of inputs[0]['w'][1]``.

    Raises:
      GradcheckError: The check failed; its message is the report.
      ValueError: As ``gradcheck``; also ``grad_outputs`` unlike the outputs.
      TypeError: As ``gradcheck``; also ``fun`` has no vjp.

    Example:
      >>> bool(fg.gradgradcheck(lambda x: (x**3).sum(), jnp.array([1.0, 2.0])))
      True
      >>> @jax.custom_vjp
      ... def cube(x):
      ...     return x**3
      >>> cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * jax.lax.stop_gradient(x) ** 2 * g,))
      >>> bool(fg.gradcheck(cube, 2.0))
      True
      >>> fg.gradgradcheck(cube, 2.0)
      Traceback (most recent call last):
      ...
      funcgrad...GradcheckError: gradgradcheck: 1 of 2 derivatives are off.
        derivative of      by         numerical  analytical  error  allowed  because
        grad of inputs[0]  inputs[0]  3.28708    0           3.3    0.0033   no gradient at all: ...

    References:
      torch.autograd.gradgradcheck.
    """
    call = "gradgradcheck"
    kind = _dtype(dtype, call)
    given = (eps, atol, rtol)
    options = _options(
        call, kind, given, raise_exception, nondet_tol, check_batched_grad,
        check_fwd_over_rev, check_rev_over_rev, fast_mode,
    )  # fmt: skip
    with _precision(kind):
        problem = problem_of(fun, inputs, kind, call)
        return _checked(gradient_problem(problem, grad_outputs), options)


def _checked(problem: Problem, options: _Options) -> GradcheckReport:
    derivatives = Derivatives(problem, options.eps)
    anew = second_trace(derivatives, options.modes)
    faults = [*value_faults(derivatives, anew, options.nondet_tol)]
    total, probes_of, cause = Compared(), {}, None
    for mode in () if faults else options.modes:  # differences of values that change say nothing
        probes_of[mode] = along, onto = _probes(problem, mode, options.fast)
        try:
            analytical = derivatives.analytical(mode, along, onto)
        except Exception as error:  # whatever a rule raises; the other mode may be there
            faults.append(no_mode(problem, mode, error))
            cause = error
            continue
        numerical = derivatives.numerical(along, onto)
        spaces = problem.inputs, problem.outputs
        total += compare(mode, numerical, analytical, spaces, (along, onto), options.tolerances)
        faults += rule_faults(derivatives, mode, anew, options.nondet_tol, options.tolerances)
        if options.batched:
            faults += batch_faults(derivatives, mode)
    report = _report(derivatives, total, probes_of, faults, options)
    if options.raise_exception and not report:
        raise GradcheckError(report) from cause
    return report


def _probes(problem: Problem, mode: str, fast: bool) -> tuple[Probes, Probes]:
    """Directions of the inputs, and the functionals by which the outputs are read."""
    rng = np.random.default_rng(0)
    along = problem.inputs.random(rng) if fast else problem.inputs.entries()
    one_number = fast and mode == "reverse"
    return along, problem.outputs.random(rng) if one_number else problem.outputs.entries()


def _report(
    derivatives: Derivatives,
    total: Compared,
    probes_of: dict[str, tuple[Probes, Probes]],
    faults: list[str],
    options: _Options,
) -> GradcheckReport:
    entries = []
    for found in total.worst[: total.off or None]:
        because = ""
        if total.off:
            because = explain(found, derivatives, probes_of[found.mode], options.tolerances)
        entries.append(
            GradcheckEntry(
                found.mode, found.output, found.input, found.numerical, found.analytical,
                found.error, found.allowed, because,
            )
        )  # fmt: skip
    notes = []
    if total.off or faults:
        hides = bool(faults) or any(entry.because.startswith("rounding") for entry in entries)
        notes += notes_on(derivatives, options.tolerances, rounding_hides=hides)
    call = derivatives.problem.call
    return GradcheckReport(
        call, tuple(entries), total.count, total.off, tuple(faults), tuple(notes)
    )


def _options(
    call: str,
    kind: np.dtype,
    given: tuple[float | None, ...],
    raise_exception: bool,
    nondet_tol: float,
    batched: bool,
    forward: bool,
    reverse: bool,
    fast: bool,
) -> _Options:
    if not (forward or reverse):
        raise ValueError(f"{call}: forward or reverse mode is checked; got neither.")
    defaults = _DEFAULTS[kind.name]
    eps, atol, rtol = (d if g is None else g for g, d in zip(given, defaults, strict=True))
    if not (eps > 0 and atol >= 0 and rtol >= 0 and nondet_tol >= 0):
        raise ValueError(
            f"{call}: eps is positive, and no tolerance negative; got {eps=}, {atol=}, {rtol=}, "
            f"{nondet_tol=}."
        )
    modes = ("reverse",) * reverse + ("forward",) * forward
    return _Options(eps, (atol, rtol), raise_exception, nondet_tol, modes, batched, fast)


def _dtype(dtype: Any, call: str) -> np.dtype:
    kind = jnp.dtype(dtype)
    if kind.name not in _DEFAULTS:
        raise TypeError(f"{call}: dtype is float64 or float32; got {kind}.")
    return kind


@contextlib.contextmanager
def _precision(kind: np.dtype) -> Iterator[None]:
    """64-bit types where they are needed; the configuration outside is left as it is."""
    with contextlib.ExitStack() as stack:
        if kind == np.float64:
            stack.enter_context(enable_x64(True))
        # Whatever is not finite is found, and stands in the report.
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        stack.enter_context(np.errstate(all="ignore"))
        yield
