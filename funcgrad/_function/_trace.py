"""From a class and the types of its arguments to a traced rule."""

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import linear_util
from jax.extend.core import DebugInfo
from jax.interpreters import ad

from funcgrad._compat import Tracer, open_jaxpr
from funcgrad._function._arguments import Call
from funcgrad._function._bindings import Same, bindings, holds_tracer
from funcgrad._function._checks import checked_gradients, checked_tangents
from funcgrad._function._context import Context, Kept
from funcgrad._function._forward import Forward, trace_forward
from funcgrad._function._primitive import once_p
from funcgrad._function._rule import Linear, Rule, run, trace_open
from funcgrad._function._vmap import VmapRule


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A rule, the values that it closes over, and how its output is put together."""

    rule: Rule
    closed: tuple[Any, ...]
    forward: Forward

    @property
    def closes_over_tracers(self) -> bool:
        """Whether it belongs to the transformation in which it was made."""
        return any(isinstance(x, Tracer) for x in self.closed)


@dataclasses.dataclass(frozen=True)
class Request:
    """What a rule is traced for."""

    call: Call
    avals: tuple[Any, ...]
    needs: tuple[bool, ...]
    bound: tuple[Same, ...]


class _Unkept(Exception):
    """Hands over a rule that must not outlive the call."""


_MOST = 256  # the traces of one class that are kept, or MiB of values that they close over
_kept: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
_running = threading.local()


def traced(cls: Any, call: Call, avals: tuple[Any, ...], needs: tuple[bool, ...]) -> Traced:
    """The rule for these types and static arguments, traced once under one setting of JAX.

    As by ``jax.jit``, and again when an attribute of the class, or a name that a method refers
    to, is bound to something else.
    """
    request = Request(call, avals, needs, bindings(cls))
    try:
        hash(request)
    except TypeError:  # a static argument that cannot be a key
        return _trace(cls, request)
    debug_info = DebugInfo("Function.apply", call.name, (), None)
    try:
        return _cached(linear_util.wrap_init(cls, debug_info=debug_info), request)
    except _Unkept as unkept:
        return unkept.args[0]


@linear_util.cache
def _cached(fun: Any, request: Request) -> Traced:
    cls, made = fun.f, _trace(fun.f, request)
    values = [leaf.value for leaf in request.call.static if leaf is not None]
    if made.closes_over_tracers or holds_tracer([values, [x.value() for x in request.bound]]):
        raise _Unkept(made)
    size = 1 + sum(x.nbytes for x in made.closed if isinstance(x, jax.Array)) // 2**20
    if _kept.get(cls, 0) and _kept[cls] + size > _MOST:
        _kept.pop(cls)
        evict: Any = _cached
        evict.evict_function(cls)
    else:
        _kept[cls] = _kept.get(cls, 0) + size
    return made


def _trace(cls: Any, request: Request) -> Traced:
    # A backward that calls its own class: the inner one is traced when it is differentiated.
    running = vars(_running).setdefault("requests", [])
    again = any(other is cls and earlier == request for other, earlier in running)
    running.append((cls, request))
    try:
        return _build(cls, request, deferred=again)
    finally:
        running.pop()


def _build(cls: Any, request: Request, *, deferred: bool) -> Traced:
    call, avals, needs = request.call, request.avals, request.needs
    ctx = Context(Kept(call.name, _by_input(call, needs)))
    forward, *groups = trace_forward(cls, call, avals, ctx)
    backward = _Backward(cls, call, avals, ctx, forward, deferred=deferred)
    jvp, jvp_closed = None, []
    if cls.jvp is not None:
        jvp, jvp_closed = _trace_jvp(cls, call, avals, ctx, forward)

    groups += [backward.release(), jvp_closed]
    closed = tuple(x for group in groups for x in group)
    starts = np.cumsum([0, *map(len, groups)]).tolist()
    # What outlives this call holds numbers of the values closed over, never those values.
    n_closed, n_args, out_avals = len(closed), len(avals), forward.out_avals
    place = {"closed": 0, "saved_closed": starts[1], "arg": n_closed}
    sources = [
        ("operand", place[kind] + index) if kind in place else (kind, index)
        for kind, index in forward.sources
    ]
    sources += [("operand", i) for i in range(starts[2], starts[4])]
    n_saved, n_backward = len(forward.sources), len(groups[2])

    def program(fun: Callable[..., Any]) -> Any:
        return jax.make_jaxpr(fun)(*map(jax.typeof, closed), *avals)

    def parts(operands: Sequence[Any]) -> tuple[Any, Any, Any]:
        return operands[: starts[1]], operands[starts[1] : starts[2]], operands[n_closed:]

    primal = program(lambda *operands: forward.primal(*parts(operands)))
    kept = primal
    if any(kind == "extra" for kind, _ in sources):
        kept = program(lambda *operands: forward.kept(*parts(operands)))

    def pull(used: tuple[bool, ...], residuals: Sequence[Any], cotangents: Any) -> list[Any]:
        grads = backward.run(
            residuals[:n_saved], residuals[n_saved : n_saved + n_backward], cotangents
        )
        return [grad for grad, use in zip(grads, used, strict=True) if use]

    def push(used: tuple[bool, ...], residuals: Sequence[Any], tangents: Any) -> list[Any]:
        assert jvp is not None
        moving = iter(tangents)
        full = [next(moving) if use else None for use in used]
        return jvp.run(residuals[:n_saved], residuals[n_saved + n_backward :], full)

    outputs = tuple(
        aval.to_tangent_aval()
        for aval, differentiable in zip(out_avals, forward.differentiable, strict=True)
        if differentiable
    )

    def linear(active: tuple[bool, ...]) -> tuple[Linear, tuple[bool, ...]]:
        gives = backward.gives(active) if backward.defined or jvp is None else active
        used = tuple(a and g for a, g in zip(active, gives, strict=True))
        derivative = Linear(
            name=call.name,
            tangents=tuple(a.to_tangent_aval() for a, use in zip(avals, used, strict=True) if use),
            outputs=outputs,
            pull=functools.partial(pull, used),
            given_push=None if jvp is None else functools.partial(push, used),
            effects=backward.effects if jvp is None else backward.effects | jvp.effects,
            is_high=backward.is_high or (jvp is not None and jvp.is_high),
        )
        return derivative if backward.defined else derivative.turned(), used

    owner, closes = weakref.ref(cls), any(isinstance(x, Tracer) for x in closed)

    def specialise(active: tuple[bool, ...]) -> tuple[Rule, tuple[Any, ...]] | None:
        if not ctx._kept.asked or closes or active == needs or owner() is None:
            return None
        other = traced(owner(), call, avals, active)
        return None if other.closes_over_tracers else (other.rule, other.closed)

    rule = Rule(
        name=call.name,
        primal=primal,
        kept=kept,
        n_closed=starts[1],
        n_args=n_args,
        n_outputs=len(out_avals),
        differentiable=forward.differentiable,
        sources=tuple(sources),
        extras=lambda operands, outputs: forward.extras(*parts(operands), outputs),
        linear=linear,
        specialise=specialise,
        vmap=None if cls.vmap is None else VmapRule(owner, call, forward.output),
    )
    return Traced(rule, closed, forward)


def _by_input(call: Call, needs: tuple[bool, ...]) -> tuple[bool, ...]:
    inputs = call.inputs(needs)
    arrays = jax.tree.unflatten(call.tree, [leaf is None for leaf in call.static])
    return tuple(
        any(
            need and array
            for need, array in zip(jax.tree.leaves(x), jax.tree.leaves(a), strict=True)
        )
        for x, a in zip(inputs, arrays, strict=True)
    )


class _Backward:
    """The user's ``backward`` as programs: one for all cotangents, others when one is ``None``."""

    def __init__(
        self, cls: Any, call: Call, avals: Any, ctx: Context, forward: Forward, *, deferred: bool
    ):
        self.owner, self.call, self.avals, self.ctx = weakref.ref(cls), call, avals, ctx
        self.forward = forward
        self.defined = cls.backward is not None
        self.variants: dict[tuple[bool, ...], Any] = {}
        self.all = (True,) * sum(forward.differentiable)
        self.closed: list[Any] = []
        self.effects: Any = frozenset()
        self.is_high = self.closes_over_tracers = False
        if self.defined and not deferred:
            # Now, while what it may close over is there.  An error is that of who needs it.
            try:
                _, self.closed, _ = self._variant(self.all)
            except Exception:
                return
            self.closes_over_tracers = any(isinstance(x, Tracer) for x in self.closed)

    def release(self) -> list[Any]:
        """What it closes over, which is held no longer."""
        closed, self.closed = self.closed, []
        if self.all in self.variants:
            program, _, gives = self.variants[self.all]
            self.variants[self.all] = program, None, gives
        return closed

    def gives(self, active: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which array leaves of the arguments it gives a gradient for; ``active`` are asked for."""
        found = self._variant(self.all)[2]
        for gradient, asked in zip(found, active, strict=True):
            if asked and isinstance(gradient, str):
                raise ValueError(gradient)
        return tuple(gradient is True for gradient in found)

    def run(self, saved: Any, closed: Any, cotangents: Sequence[Any]) -> list[Any]:
        """A gradient, or ``None``, for each array leaf of the arguments."""
        given = tuple(c is not None for c in cotangents)
        if self.ctx._kept.materialize or self.closes_over_tracers:
            given = self.all
            cotangents = [
                ad.instantiate_zeros(ad.Zero(aval)) if c is None else c
                for c, aval in zip(cotangents, self._types(), strict=True)
            ]
        program, own, gives = self._variant(given)
        held = map(self._marked, closed if own is None else own)
        inputs = [*saved, *(c for c in cotangents if c is not None)]
        grads = iter(run(program, *held, *inputs))
        return [next(grads) if give is True else None for give in gives]

    def _types(self) -> list[Any]:
        pairs = zip(self.forward.out_avals, self.forward.differentiable, strict=True)
        return [aval.to_ct_aval() for aval, differentiable in pairs if differentiable]

    def _marked(self, x: Any) -> Any:
        backward = getattr(self.owner(), "backward", None)
        once = getattr(backward, "_once_differentiable", False)
        floating = jnp.issubdtype(x.dtype, jnp.inexact)
        return once_p.bind(x, name=self.call.name) if once and floating else x

    def _variant(self, given: tuple[bool, ...]) -> Any:
        if given not in self.variants:
            self.variants[given] = self._trace(given)
            jaxpr, _ = open_jaxpr(self.variants[given][0])
            self.effects |= jaxpr.effects
            self.is_high |= jaxpr.is_high
        return self.variants[given]

    def _trace(self, given: tuple[bool, ...]) -> Any:
        cls, forward, gives = self.owner(), self.forward, []
        if cls is None or cls.backward is None:
            raise NotImplementedError(
                f"{self.call.name}: a gradient needs a static backward; got a class without one. "
                "Write backward(ctx, *grads), or jvp(ctx, *tangents)."
            )
        materialize = self.ctx._kept.materialize

        def run_backward(saved: list[Any], cotangents: list[Any]) -> list[Any]:
            kept = forward.unflatten_saved([*map(self._marked, saved)])[0]
            present, values = iter(given), map(self._marked, cotangents)
            full = []
            for aval, differentiable in zip(forward.out_avals, forward.differentiable, strict=True):
                if differentiable and next(present):
                    full.append(next(values))
                else:
                    numeric = jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == jnp.bool_
                    zeros = materialize and numeric
                    full.append(jnp.zeros(aval.shape, aval.dtype) if zeros else None)
            ctx = Context(self.ctx._kept, self.ctx, kept)
            grads = cls.backward(ctx, *forward.output.members(full))
            flat = checked_gradients(self.call, self.avals, grads)
            gives[:] = [x if isinstance(x, str) else x is not None for x in flat]
            return [x for x, give in zip(flat, gives, strict=True) if give is True]

        types = [aval for aval, present in zip(self._types(), given, strict=True) if present]
        program, closed, _ = trace_open(run_backward, list(forward.saved_avals), types)
        return program, closed, tuple(gives)


@dataclasses.dataclass(frozen=True, eq=False)
class _Jvp:
    """The user's ``jvp`` as a program of all tangents."""

    program: Any
    types: list[Any]
    moves: list[bool]

    @property
    def effects(self) -> Any:
        return open_jaxpr(self.program)[0].effects

    @property
    def is_high(self) -> bool:
        return open_jaxpr(self.program)[0].is_high

    def run(self, saved: Any, closed: Any, tangents: Sequence[Any]) -> list[Any]:
        """The tangents of the differentiable outputs."""
        full = [
            ad.instantiate_zeros(ad.Zero(aval)) if t is None else t
            for t, aval, moves in zip(tangents, self.types, self.moves, strict=True)
            if moves
        ]
        return run(self.program, *closed, *saved, *full)


def _trace_jvp(
    cls: Any, call: Call, avals: Any, ctx: Context, forward: Forward
) -> tuple[_Jvp, list[Any]]:
    types = [aval.to_tangent_aval() for aval in avals]
    moves = [bool(jnp.issubdtype(aval.dtype, jnp.inexact)) for aval in avals]

    def run_jvp(saved: list[Any], tangents: list[Any]) -> list[Any]:
        backward, own = forward.unflatten_saved(saved)
        values = iter(tangents)
        inputs = call.gradients([next(values) if each else None for each in moves])
        kept = Context(ctx._kept, ctx, backward if own is None else own)
        return checked_tangents(call, forward, cls.jvp(kept, *inputs))

    moving = [aval for aval, each in zip(types, moves, strict=True) if each]
    program, closed, _ = trace_open(run_jvp, list(forward.saved_avals), moving)
    return _Jvp(program, types, moves), closed
