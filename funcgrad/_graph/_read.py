"""Reading the graph of a function."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._graph._graph import Graph
from funcgrad._graph._wires import Builder
from funcgrad._jaxpr import Differentiable, Traced, differentiable, trace


def graph(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    *,
    has_aux: bool = False,
) -> Callable[..., Graph]:
    """Show the graph of ``fun``: what its forward and backward passes compute, and keep.

    Nothing is run or compiled: the function is traced, so ``jax.ShapeDtypeStruct`` leaves will
    do.  The forward part is what ``jax.vjp`` runs, so it also shows what is computed there for
    the backward pass alone; what nothing reads is left out.  A value with a ``stop_gradient``
    simply has no way back.  A function that cannot be differentiated has a forward part only,
    and ``no_backward`` says why.

    Printed, it is a table by modules and loops.  ``save("graph.html")`` writes a page to zoom
    and search in, complete in itself; ``svg()`` gives the text of a drawing.

    PyTorch: ``loss.grad_fn`` and its ``next_functions``, the backward pass alone; here
    ``graph.readers(node)`` of a node of ``graph.backward``.

    Args:
      fun: Function of pytrees, as for ``jax.vjp``.
      argnums: Positions of the arguments to differentiate, as in ``jax.grad``; all of them
        when ``None``.
      has_aux: Whether ``fun`` returns a pair whose second part is not differentiated.

    Returns:
      A function of the same arguments that returns a ``Graph``.

    Raises:
      ValueError: a position in ``argnums`` is not an argument's.
      TypeError: a size is a symbol of ``jax.export``, not a number.

    Example:
      >>> found = fg.graph(lambda w, x: jnp.sin(x @ w).sum())(jnp.ones((3, 2)), jnp.ones(3))
      >>> [node.operation for node in found.forward]
      ['argument', 'argument', 'dot_general', 'sin', 'cos', 'reduce_sum', 'output']
      >>> found.saved_bytes  # w, x, and the cosine
      44
    """

    def read(*args: Any, **kwargs: Any) -> Graph:
        call = differentiable(fun, args, kwargs, argnums, has_aux, "graph")
        title = getattr(fun, "__qualname__", type(fun).__name__)
        title = title.rpartition("<locals>.")[2].replace("<lambda>", "function")
        _check_sizes(call)
        reason = _nothing_to_differentiate(call)
        if not reason:
            try:
                both = _trace_both(call)
            except Exception as error:  # whatever the rules of derivatives in it may raise
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            else:
                return _both_parts(call, both, title)
        builder = Builder()
        traced = trace(call.value, call.arrays)
        inputs = _arguments(builder, call, traced.jaxpr.jaxpr.invars)
        outputs = builder.run(traced.jaxpr.jaxpr, inputs)
        for wire, var, name in zip(
            outputs, traced.jaxpr.jaxpr.outvars, traced.out_names, strict=True
        ):
            builder.finish("output", wire, var.aval, name)
        return Graph(*builder.graph(), no_backward=reason, title=title)

    return read


def _arguments(builder: Builder, call: Differentiable, variables: Sequence[Any]) -> list[Any]:
    return [
        builder.end("argument", var.aval, name)
        for var, name in zip(variables, call.names, strict=True)
    ]


def _check_sizes(call: Differentiable) -> None:
    for x, name in zip(call.arrays, call.names, strict=True):
        shape = getattr(x, "shape", ())
        if not all(isinstance(n, int | np.integer) for n in shape):
            raise TypeError(f"graph: sizes are numbers; got {name} of shape {shape}. Give numbers.")


def _nothing_to_differentiate(call: Differentiable) -> str:
    leaves = jax.tree.leaves(call.chosen(call.arrays))
    arrays = [x for x in leaves if hasattr(x, "dtype") or isinstance(x, float | complex)]
    if any(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in arrays):
        return ""
    return "no argument that is differentiated is floating"


class _Both(NamedTuple):
    """The forward pass, which gives values, then what is kept; the backward pass of these."""

    forward: Traced
    backward: Traced
    n_values: int
    n_kept: int


def _trace_both(call: Differentiable) -> _Both:
    ways: dict[str, Any] = {}

    def forward(arrays: list[Any]) -> Any:
        value, pull, *aux = call.vjp(arrays)
        ways["value"] = jax.tree.structure(value)
        residuals, ways["pull"] = jax.tree.flatten(pull)
        return (value, *aux), residuals

    there = trace(forward, call.arrays)
    avals = [var.aval for var in there.jaxpr.jaxpr.outvars]
    n_values, n_kept = ways["value"].num_leaves, ways["pull"].num_leaves
    values = avals[:n_values]
    if not any(map(_moves, values)):
        raise TypeError("no output is floating")

    def backward(residuals: list[Any], seeds: list[Any]) -> list[Any]:
        pull = jax.tree.unflatten(ways["pull"], residuals)
        given = iter(seeds)
        full = [
            next(given) if _moves(aval) else np.zeros(aval.shape, jax.dtypes.float0)
            for aval in values
        ]
        grads = pull(jax.tree.unflatten(ways["value"], full))
        return [g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0]

    back = trace(backward, avals[len(avals) - n_kept :], list(filter(_moves, values)))
    return _Both(there, back, n_values, n_kept)


def _moves(aval: Any) -> bool:
    """Whether a value has tangents."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _both_parts(call: Differentiable, both: _Both, title: str) -> Graph:
    there, back = both.forward.jaxpr.jaxpr, both.backward.jaxpr.jaxpr
    builder = Builder()
    wires = builder.run(there, _arguments(builder, call, there.invars))
    names = [_output_name(name, call.has_aux) for name in both.forward.out_names]
    n_outputs = len(wires) - both.n_kept
    for wire, var, name in zip(wires[:n_outputs], there.outvars, names, strict=False):
        builder.finish("output", wire, var.aval, name)
    kept = zip(wires[n_outputs:], there.outvars[n_outputs:], strict=True)
    saved = [builder.keep(wire, atom) for wire, atom in kept]

    builder.part = "backward"
    given = [
        builder.end("seed", var.aval, name)
        for var, name in zip(there.outvars[: both.n_values], names, strict=False)
        if _moves(var.aval)
    ]
    grads = builder.run(back, [*saved, *given])
    for wire, var, name in zip(grads, back.outvars, _moved(call), strict=True):
        builder.finish("gradient", wire, var.aval, name)
    return Graph(*builder.graph(), title=title)


def _output_name(path: str, has_aux: bool) -> str:
    """The path of an output as the caller of ``fun`` would index it."""
    return path.removeprefix("[0]") if has_aux else path.removeprefix("[0][0]")


def _moved(call: Differentiable) -> list[str]:
    """The names of the leaves that get a gradient, in their order."""
    names = dict(zip(call.traced_at, call.names, strict=True))
    args, _ = jax.tree.unflatten(call.tree, range(len(call.leaves)))
    chosen = [i for place in call.places for i in jax.tree.leaves(args[place])]
    return [
        names[i] for i in chosen if jnp.issubdtype(jnp.result_type(call.leaves[i]), jnp.inexact)
    ]
