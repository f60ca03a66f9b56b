"""A call of a function: what it was given, and what came back, leaf by leaf with names."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from funcgrad._anomaly._report import is_inexact
from funcgrad._trees import choose_leaves, keystr

_JITTED: Any = type(jax.jit(lambda: None))


class Call:
    """A function and its arguments, as they were before the call.

    Arrays stay as they are; NNX objects, which a call may change, are taken apart.
    """

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.fun = fun
        owner = fun if _has_state(fun) else getattr(fun, "__self__", None)
        self._method: Any = (
            type(fun).__call__ if _has_state(fun) else getattr(fun, "__func__", None)
        )
        self._held = (owner if _has_state(owner) else None, args, kwargs)
        found, self._tree = jax.tree_util.tree_flatten_with_path(self._held, is_leaf=_has_state)
        self._leaves = found
        self._modules = [(path, x) for path, x in found if _has_state(x)]
        if self._modules:
            self._graph, state = nnx.split([x for _, x in self._modules])
            self._state, self._state_tree = jax.tree_util.tree_flatten_with_path(state)

    @functools.cached_property
    def inputs(self) -> list[tuple[str, Any]]:
        """The arrays that go in, by name."""
        named = [(self._argument(path), x) for path, x in self._leaves if _is_array(x)]
        if self._modules:
            named += [(self._state_name(path), x) for path, x in self._state]
        return named

    def run(self, arrays: Sequence[Any], *, opened: bool = False) -> Any:
        """The result with these arrays in place of ``inputs``, and the state afterwards.

        ``opened``: without a ``jit`` around all, whose options JAX refuses inside of a trace.
        """
        fun: Any = self.fun
        if opened and isinstance(fun, _JITTED):
            fun = fun.__wrapped__
        given = iter(arrays)
        held: Any = self._tree.unflatten(
            [next(given) if _is_array(x) else x for _, x in self._leaves]
        )
        if not self._modules:
            _, args, kwargs = held
            return fun(*args, **kwargs), None
        state = self._state_tree.unflatten(list(given))
        copies = nnx.merge(self._graph, state, copy=True)
        rest = iter(copies)
        put = lambda x: next(rest) if _has_state(x) else x
        model, args, kwargs = jax.tree.map(put, held, is_leaf=_has_state)
        run = fun if model is None else functools.partial(self._method, model)
        return run(*args, **kwargs), nnx.state(copies)

    def results(self, result: Any, ignore: Any = None, after: Any = None) -> list[tuple[str, Any]]:
        """The floating leaves of a result, and of the state after it, by name.

        Without those that ``ignore`` names, which become ``None``.
        """
        found = jax.tree_util.tree_leaves_with_path(result)
        ignored = choose_leaves(ignore, result, "detect_anomaly")
        named = [
            ("result" + keystr(path), None if skip else x)
            for (path, x), skip in zip(found, ignored, strict=True)
        ]
        if self._modules:
            state = nnx.state([x for _, x in self._modules]) if after is None else after
            named += [
                (self._state_name(path) + " afterwards", x)
                for path, x in jax.tree_util.tree_leaves_with_path(state)
            ]
        return named

    def _argument(self, path: Any) -> str:
        """``params['w']`` for a path in (owner, args, kwargs)."""
        if path[0].idx == 0:
            return "self" + keystr(path[1:])
        if path[0].idx == 2:
            return path[1].key + keystr(path[2:])
        return self._parameter(path[1].idx) + keystr(path[2:])

    def _state_name(self, path: Any) -> str:
        module, _ = self._modules[path[0].key]
        keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path[1:]]
        return ".".join([self._argument(module), *(key for key in keys if key != "value")])

    def _parameter(self, place: int) -> str:
        try:
            parameters = list(inspect.signature(self.fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        for i, parameter in enumerate(parameters[: place + 1]):
            if parameter.kind is parameter.VAR_POSITIONAL:
                return f"{parameter.name}[{place - i}]"
        return parameters[place].name if place < len(parameters) else f"args[{place}]"


def all_finite(leaves: list[Any]) -> bool:
    """Whether all floating arrays are finite: one program for those on the same devices."""
    groups: dict[Any, list[Any]] = {}
    for x in filter(is_inexact, leaves):
        if not isinstance(x, jax.Array):
            if not np.isfinite(x).all():
                return False
        elif x.size:
            groups.setdefault(frozenset(x.devices()), []).append(x)
    return all(bool(_finite(group)) for group in groups.values())


@jax.jit
def _finite(leaves: list[Any]) -> Any:
    return jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()


def _has_state(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _is_array(x: Any) -> bool:
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind not in "OUSMm"  # what JAX takes
    return isinstance(x, jax.Array)
