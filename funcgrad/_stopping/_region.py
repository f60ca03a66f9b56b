"""A call as a region: traced, so that everything that enters it is known."""

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import jax
import jax.core

from funcgrad import _jaxpr
from funcgrad._compat import Jaxpr, is_transforming, open_jaxpr

Run = Callable[[Jaxpr, list[Any]], list[Any]]


def region(fun: Callable[..., Any], run: Run, call: str) -> Callable[..., Any]:
    """A function like ``fun`` whose calls, inside a transformation, go through ``run``.

    ``run(jaxpr, values)`` gets the traced call and the values that enter it, arguments and
    closed-over ones alike, and returns the outputs.  Outside of every transformation there
    is no derivative to stop, and ``fun`` is simply called.
    """
    refuse_later(fun, call)

    @functools.wraps(fun)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not is_transforming():
            return fun(*args, **kwargs)
        tree, others = None, []

        def flat() -> list[Any]:
            nonlocal tree, others
            leaves, tree = jax.tree.flatten(now(fun(*args, **kwargs), call))
            others = [None if _is_tracer(leaf) else leaf for leaf in leaves]
            return [leaf for leaf in leaves if _is_tracer(leaf)]

        # Nothing is passed in: each tracer that is used becomes a constant, wherever it came
        # from, and numbers, strings and arrays known by now stay what they are.
        jaxpr, values = open_jaxpr(jax.make_jaxpr(flat)())
        _refuse_references(values, call)
        outputs = iter(run(jaxpr, values))
        leaves = [next(outputs) if leaf is None else leaf for leaf in others]
        return jax.tree.unflatten(tree, leaves)

    return called


def refuse_later(fun: Callable[..., Any], call: str) -> None:
    """Refuse a function whose code runs behind the region, when its result is used."""
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_kind(fun) for is_kind in kinds):
        raise TypeError(_LATER.format(call, f"a generator or coroutine function ({fun})"))


def now(result: Any, call: str) -> Any:
    """The result of ``fun``, which leaves nothing to be computed later."""
    runs_later = lambda leaf: isinstance(leaf, Iterator | AsyncIterator | Awaitable)
    for leaf in jax.tree.leaves(result, is_leaf=runs_later):
        if runs_later(leaf):
            raise TypeError(_LATER.format(call, f"a {type(leaf).__name__}"))
    return result


_LATER = (
    "{}: fun returns its result when it is called; got {}, which runs later. "
    "Wrap the function that does one step, or return a list."
)


def enter(value: Any, gate: Callable[[Any], Any]) -> Any:
    """``gate(value)`` where a derivative could come along with it, else the value."""
    return gate(value) if _is_tracer(value) else value


def plain(jaxpr: Jaxpr, values: list[Any]) -> list[Any]:
    """Run the traced call as it stands."""
    return _jaxpr.evaluate(jaxpr, values, (), lambda eqn: None)


def _is_tracer(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def _refuse_references(values: list[Any], call: str) -> None:
    for value in values:
        if _is_tracer(value) and hasattr(value.aval, "inner_aval"):
            raise TypeError(
                f"{call}: what enters is a value; got a mutable reference, "
                f"{value.aval}, which may bring a derivative with each read. "
                "Read it before, and pass what it holds."
            )
