"""The user's forward, in either form, as programs; and what it saves, by where it comes from."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from funcgrad._compat import Jaxpr, Literal, open_jaxpr
from funcgrad._function._arguments import Call
from funcgrad._function._context import Context
from funcgrad._function._rule import trace_open
from funcgrad._jaxpr import bind


class Output:
    """The tree that ``forward`` returned: which leaves are arrays, and what else it holds."""

    def __init__(self, output: Any):
        leaves, self.tree = jax.tree.flatten(output)
        leaves = [jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x for x in leaves]
        self.is_tuple = isinstance(output, tuple)
        self.static = [None if isinstance(x, jax.Array) else (x,) for x in leaves]
        self._arrays = [x for x in leaves if isinstance(x, jax.Array)]

    def release(self) -> list[Any]:
        """The arrays, which are held no longer."""
        arrays, self._arrays = self._arrays, []
        return arrays

    def unflatten(self, arrays: Sequence[Any], *, static: bool = True) -> Any:
        """The tree with these arrays; its other leaves as they were, or ``None``."""
        values = iter(arrays)
        leaves = [
            next(values) if kept is None else kept[0] if static else None for kept in self.static
        ]
        return jax.tree.unflatten(self.tree, leaves)

    def members(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """One tree for each output, as ``backward`` takes their gradients."""
        tree = self.unflatten(arrays, static=False)
        return tuple(tree) if self.is_tuple else (tree,)


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """Forward as programs of (closed over, closed over by setup_context, arguments).

    ``primal`` gives the outputs, ``kept`` those and the extras, ``extras`` takes the outputs
    too.  ``sources`` are ("arg", "closed", "saved_closed", "output" or "extra", index).
    """

    output: Output
    out_avals: tuple[Any, ...]
    differentiable: tuple[bool, ...]
    primal: Callable[..., list[Any]]
    kept: Callable[..., list[Any]]
    extras: Callable[..., list[Any]]
    sources: tuple[tuple[str, int], ...]
    saved_avals: tuple[Any, ...]
    saved_tree: Any

    def unflatten_saved(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """What was saved for backward, and for jvp."""
        return jax.tree.unflatten(self.saved_tree, leaves)


def trace_forward(
    cls: Any, call: Call, avals: tuple[Any, ...], ctx: Context
) -> tuple[Forward, list[Any], list[Any]]:
    """Trace ``forward``, and ``setup_context`` where there is one; and what each closes over."""
    made: dict[str, Any] = {}

    def settle(outputs: list[Any]) -> list[Any]:
        """Take what ctx was given out of it, so that it holds no value of this trace."""
        kept = ctx._kept
        found = [_places(ctx, leaf, outputs) for leaf in kept.non_differentiable]
        made["marked"] = {i for places in found for i in places}
        saved, made["tree"] = jax.tree.flatten((kept.backward, kept.forward))
        kept.backward, kept.forward, kept.non_differentiable = (), None, ()
        return [jnp.asarray(x) for x in saved]

    def run_forward(*arrays: Any) -> Any:
        first = (ctx,) if cls.setup_context is None else ()
        made["output"] = output = Output(call.run(cls.forward, call.inputs(arrays), *first))
        outputs = output.release()
        return outputs, [] if cls.setup_context is not None else settle(outputs)

    def run_setup(arrays: list[Any], outputs: list[Any]) -> list[Any]:
        cls.setup_context(ctx, call.inputs(arrays), made["output"].unflatten(outputs))
        return settle(outputs)

    program, closed, (shapes, _) = trace_open(run_forward, *avals)
    jaxpr, n_out, n_closed = open_jaxpr(program)[0], len(shapes), len(closed)
    out_avals = tuple(v.aval for v in jaxpr.outvars[:n_out])
    modern = cls.setup_context is not None
    if modern:
        program, saved_closed, _ = trace_open(run_setup, list(avals), list(out_avals))
        saving, n_held = open_jaxpr(program)[0], len(saved_closed)
        outs, saved = saving.invars[n_held + len(avals) :], saving.outvars
    else:
        saving, saved_closed, n_held = jaxpr, [], n_closed
        outs, saved = jaxpr.outvars[:n_out], jaxpr.outvars[n_out:]
    inputs = saving.invars[: n_held + len(avals)]
    named = [
        ("saved_closed" if modern else "closed", inputs[:n_held]),
        ("arg", inputs[n_held:]),
        ("output", outs),
    ]

    places: dict[Any, tuple[str, int]] = {}
    for kind, variables in named:
        for i, v in enumerate(variables):
            if not isinstance(v, Literal):
                places.setdefault(v, (kind, i))
    extra: list[Any] = []
    sources = []
    for v in saved:
        if isinstance(v, Literal) or v not in places:
            extra.append(v)
            sources.append(("extra", len(extra) - 1))
            if not isinstance(v, Literal):
                places[v] = sources[-1]
        else:
            sources.append(places[v])

    def primal(closed: Any, _: Any, args: Any) -> list[Any]:
        env = dict(zip(jaxpr.invars, [*closed, *args], strict=True))
        return _needed(jaxpr, env, jaxpr.outvars[:n_out], effects=True)

    def extras(closed: Any, saved_closed: Any, args: Any, outputs: Any) -> list[Any]:
        env = dict(zip(inputs, [*(saved_closed if modern else closed), *args], strict=True))
        # Given: an output is not computed again, and is differentiated by the rule.
        for v, x in zip(outs, outputs, strict=True):
            if not isinstance(v, Literal):
                env.setdefault(v, x)
        return _needed(saving, env, extra, effects=False)

    def kept(closed: Any, saved_closed: Any, args: Any) -> list[Any]:
        if modern:
            outputs = primal(closed, saved_closed, args)
            return [*outputs, *extras(closed, saved_closed, args, outputs)]
        env = dict(zip(jaxpr.invars, [*closed, *args], strict=True))
        return _needed(jaxpr, env, [*jaxpr.outvars[:n_out], *extra], effects=True)

    forward = Forward(
        output=made["output"],
        out_avals=out_avals,
        differentiable=tuple(
            jnp.issubdtype(aval.dtype, jnp.inexact) and i not in made["marked"]
            for i, aval in enumerate(out_avals)
        ),
        primal=primal,
        kept=kept,
        extras=extras,
        sources=tuple(sources),
        saved_avals=tuple(v.aval for v in saved),
        saved_tree=made["tree"],
    )
    return forward, closed, saved_closed


def _places(ctx: Context, leaf: Any, outputs: list[Any]) -> list[int]:
    found = [i for i, output in enumerate(outputs) if output is leaf]
    if not found:
        raise ValueError(
            f"{ctx._kept.name}: ctx.mark_non_differentiable takes outputs of forward; got a "
            f"{type(leaf).__name__} that is none. Pass the very value that is returned."
        )
    return found


def _needed(jaxpr: Jaxpr, env: dict[Any, Any], wanted: Sequence[Any], *, effects: bool) -> Any:
    """Run the equations that ``wanted`` needs, from the values in ``env``."""
    needed = {v for v in wanted if not isinstance(v, Literal) and v not in env}
    chosen = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars) or (effects and eqn.effects):
            chosen.append(eqn)
            needed |= {a for a in eqn.invars if not isinstance(a, Literal) and a not in env}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in reversed(chosen):
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=names),
            eqn.ctx.manager,
        ):
            for v, x in zip(eqn.outvars, bind(eqn, *map(read, eqn.invars)), strict=True):
                env.setdefault(v, x)
    return [read(v) for v in wanted]
