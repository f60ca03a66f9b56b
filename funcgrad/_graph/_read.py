"""Reading the graph of a function."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._graph._graph import Graph
from funcgrad._graph._wires import Builder
from funcgrad._jaxpr import Differentiable, differentiable, trace


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
        reason = _nothing_to_differentiate(call)
        if not reason:
            try:
                return _both_parts(call, title)
            except Exception as error:  # whatever the rules of derivatives in it may raise
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        builder = Builder()
        traced = trace(call.value, call.arrays)
        inputs = _arguments(builder, call)
        outputs = builder.run(traced.jaxpr.jaxpr, inputs)
        for wire, var, name in zip(
            outputs, traced.jaxpr.jaxpr.outvars, traced.out_names, strict=True
        ):
            builder.finish("output", wire, var.aval, name)
        return Graph(*builder.graph(), no_backward=reason, title=title)

    return read


def _arguments(builder: Builder, call: Differentiable) -> list[Any]:
    made = []
    for x, name in zip(call.arrays, call.names, strict=True):
        kind = jax.ShapeDtypeStruct((), jnp.result_type(x)) if isinstance(x, float | complex) else x
        made.append(builder.end("argument", kind, name))
    return made


def _nothing_to_differentiate(call: Differentiable) -> str:
    kinds = [jnp.result_type(x) for x in jax.tree.leaves(call.chosen(call.arrays))]
    if any(jnp.issubdtype(kind, jnp.inexact) for kind in kinds):
        return ""
    return "no argument that is differentiated is floating"


def _both_parts(call: Differentiable, title: str) -> Graph:
    ways: dict[str, Any] = {}

    def forward(arrays: list[Any]) -> Any:
        value, pull, *aux = call.vjp(arrays)
        ways["value"] = jax.tree.structure(value)
        residuals, ways["pull"] = jax.tree.flatten(pull)
        return (value, *aux), residuals

    traced = trace(forward, call.arrays)
    jaxpr = traced.jaxpr.jaxpr
    n_values = ways["value"].num_leaves
    n_kept = ways["pull"].num_leaves
    values = [var.aval for var in jaxpr.outvars[:n_values]]
    kept = jaxpr.outvars[len(jaxpr.outvars) - n_kept :]
    moving = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in values]
    if not any(moving):
        raise TypeError("no output is floating")

    def backward(residuals: list[Any], seeds: list[Any]) -> list[Any]:
        pull = jax.tree.unflatten(ways["pull"], residuals)
        given = iter(seeds)
        full = [
            next(given) if moves else np.zeros(aval.shape, jax.dtypes.float0)
            for aval, moves in zip(values, moving, strict=True)
        ]
        grads = pull(jax.tree.unflatten(ways["value"], full))
        return [g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0]

    seeds = [aval for aval, moves in zip(values, moving, strict=True) if moves]
    back = trace(backward, [var.aval for var in kept], seeds)

    builder = Builder()
    wires = builder.run(jaxpr, _arguments(builder, call))
    out_names = [_output_name(name, call.has_aux) for name in traced.out_names]
    n_outputs = len(wires) - n_kept
    for wire, var, name in zip(wires[:n_outputs], jaxpr.outvars, out_names, strict=False):
        builder.finish("output", wire, var.aval, name)
    saved = [builder.keep(w, v.aval) for w, v in zip(wires[n_outputs:], kept, strict=True)]

    builder.part = "backward"
    names = [name for name, moves in zip(out_names, moving, strict=False) if moves]
    given = [builder.end("seed", aval, name) for aval, name in zip(seeds, names, strict=True)]
    grads = builder.run(back.jaxpr.jaxpr, [*saved, *given])
    for wire, var, name in zip(grads, back.jaxpr.jaxpr.outvars, _moved(call), strict=True):
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
