"""Run a jaxpr again, with chosen equations replaced at any depth."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.extend import source_info_util

from funcgrad._compat import Jaxpr, JaxprEqn, Literal, primitives
from funcgrad._jaxpr._bodies import bodies, loop_sizes
from funcgrad._jaxpr._trace import trace

Replacement: TypeAlias = Callable[..., Sequence[Any]]
Rule: TypeAlias = Callable[[JaxprEqn], Replacement | None]


def bind(eqn: JaxprEqn, *inputs: Any) -> Sequence[Any]:
    """Run one equation as it stands; always a sequence of outputs."""
    params = eqn.primitive.get_bind_params(dict(eqn.params))
    out = eqn.primitive.bind(*inputs, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def rewrite(fun: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    """A function like ``fun`` in which ``rule`` has replaced equations.

    ``rule(eqn)`` decides from the equation alone, and may be asked more than once; it
    returns ``None`` to keep it, or a function from its inputs to the sequence of its
    outputs.  Bodies in which nothing is replaced are run unchanged, the others are built
    again through JAX's own ``scan``, ``cond``, ``while_loop``, ``jit``, ``checkpoint`` and
    ``shard_map``.  Custom derivative rules, and every other primitive that holds programs,
    are kept whole, so that the derivative given is the derivative used.  Source lines, name
    stacks and shardings stay.
    """

    @functools.wraps(fun)
    def rewritten(*args: Any) -> Any:
        traced = trace(fun, *args)
        jaxpr = traced.jaxpr
        return traced.unflatten(evaluate(jaxpr.jaxpr, jaxpr.consts, traced.flatten(*args), rule))

    return rewritten


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], rule: Rule) -> list[Any]:
    """Run ``jaxpr`` at flat ``args`` with the equations chosen by ``rule`` replaced."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=names),
            eqn.ctx.manager,
        ):
            replacement = rule(eqn)
            if replacement is None and _touches(eqn, rule):
                replacement = functools.partial(_REBUILD[eqn.primitive.name], eqn, rule)
            outputs = bind(eqn, *inputs) if replacement is None else replacement(*inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _touches(eqn: JaxprEqn, rule: Rule) -> bool:
    """Whether ``rule`` replaces anything in the bodies of ``eqn`` that can be rebuilt."""
    if eqn.primitive.name not in _REBUILD:
        return False
    within = _within(eqn, rule)
    return any(
        within(inner) is not None or _touches(inner, within)
        for body in bodies(eqn)
        for inner in body.jaxpr.eqns
    )


def _body_fun(eqn: JaxprEqn, rule: Rule, index: int = 0) -> Callable[..., list[Any]]:
    body, within = bodies(eqn)[index], _within(eqn, rule)
    return lambda *args: evaluate(body.jaxpr, body.consts, args, within)


def _within(eqn: JaxprEqn, rule: Rule) -> Rule:
    """The rule for the bodies of ``eqn``: ``rule.enter(eqn)`` where that exists.

    A body that several equations share is one object; a rule with ``enter`` can tell where
    it stands.
    """
    enter = getattr(rule, "enter", None)
    return rule if enter is None else enter(eqn)


def _retrace(eqn: JaxprEqn, rule: Rule, *inputs: Any) -> Sequence[Any]:
    # jit and checkpoint carry parameters (shardings, layouts, names, donation, the mark of
    # an already differentiated body) that the public decorators cannot all state again.
    retraced: Any = trace(_body_fun(eqn, rule), *inputs).jaxpr
    closed = hasattr(eqn.params["jaxpr"], "consts")
    if retraced.consts and not closed:
        raise NotImplementedError(
            f"rewrite: a replacement inside {eqn.primitive.name} closes over arrays; "
            "got constants where none may be. Pass them in as inputs."
        )
    new = retraced if closed else retraced.jaxpr
    return bind(eqn.replace(params=dict(eqn.params, jaxpr=new)), *inputs)


def _scan(eqn: JaxprEqn, rule: Rule, *inputs: Any) -> Sequence[Any]:
    n_consts, n_carry = loop_sizes(eqn)
    run, params = _body_fun(eqn, rule), eqn.params
    consts, carry, xs = (
        inputs[:n_consts],
        inputs[n_consts : n_consts + n_carry],
        inputs[n_consts + n_carry :],
    )

    def step(carry: Any, x: Any) -> Any:
        out = run(*consts, *carry, *x)
        return tuple(out[:n_carry]), tuple(out[n_carry:])

    carry, ys = lax.scan(
        step,
        tuple(carry),
        tuple(xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(eqn: JaxprEqn, rule: Rule, *inputs: Any) -> Sequence[Any]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test, step = _body_fun(eqn, rule, 0), _body_fun(eqn, rule, 1)
    cond_consts, body_consts = inputs[:n_cond], inputs[n_cond : n_cond + n_body]
    return lax.while_loop(
        lambda carry: test(*cond_consts, *carry)[0],
        lambda carry: tuple(step(*body_consts, *carry)),
        tuple(inputs[n_cond + n_body :]),
    )


def _cond(eqn: JaxprEqn, rule: Rule, *inputs: Any) -> Sequence[Any]:
    branches = [_body_fun(eqn, rule, i) for i in range(len(eqn.params["branches"]))]
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return lax.switch(inputs[0], branches, *inputs[1:])
    # Each branch is compiled for its own platforms only: others may have no such operation.
    named = {
        name: run for run, names in zip(branches, platforms, strict=True) for name in names or ()
    }
    default = next(
        (run for run, names in zip(branches, platforms, strict=True) if names is None), None
    )
    return lax.platform_dependent(*inputs[1:], default=default, **named)


def _shard_map(eqn: JaxprEqn, rule: Rule, *inputs: Any) -> Sequence[Any]:
    params = eqn.params
    mapped = jax.shard_map(
        _body_fun(eqn, rule),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return mapped(*inputs)


_REBUILD: dict[str, Callable[..., Sequence[Any]]] = {
    primitives.jit_p.name: _retrace,
    primitives.remat_p.name: _retrace,
    primitives.closed_call_p.name: _retrace,
    primitives.scan_p.name: _scan,
    primitives.while_p.name: _while,
    primitives.cond_p.name: _cond,
    "shard_map": _shard_map,
}
