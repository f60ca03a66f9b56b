"""Hooks on the modules that a function calls through Flax Linen.

Linen's interceptors see each call.  For ``backward`` hooks the function is traced twice: first
for the types of what the modules give, in ``eval_shape``, then with the hooks in place.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from funcgrad._hooks._module_call import ModuleHook, run_forward, run_module, types_of
from funcgrad._hooks._where import chooses, no_module

# Part of the key of every cache of traced functions: what was traced without hooks, or with
# others, is not taken for this one (`nn.jit` keeps its traces between calls).
_run_of = jax.make_user_context(None)


def hook_function(fun: Callable[..., Any], hook: ModuleHook, call: str) -> Callable[..., Any]:
    """``fun`` with one more hook on the Linen modules that it calls."""
    before = fun.hooks if isinstance(fun, _Hooked) else ()
    fun = fun.fun if isinstance(fun, _Hooked) else fun
    return functools.wraps(fun, updated=())(_Hooked(fun, (*before, hook), call))


class _Hooked:
    """A function, and the hooks on the modules that it calls, in order of registration."""

    def __init__(self, fun: Callable[..., Any], hooks: tuple[ModuleHook, ...], call: str) -> None:
        self.fun, self.hooks, self.call = fun, hooks, call
        self._looks_ahead = any(hook.backward is not None for hook in hooks)
        self._runs = object(), object()
        # Over all calls, since a module inside a cached function is met in the first one only.
        self._seen: dict[str, str] = {}
        self._found: set[Any] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        types: list[Any] = []
        try:
            if self._looks_ahead:
                with _run_of(self._runs[0]), nn.intercept_methods(self._recorder(types)):
                    jax.eval_shape(lambda: (self.fun(*args, **kwargs), None)[1])
            with _run_of(self._runs[1]), nn.intercept_methods(self._runner(types)):
                out = self.fun(*args, **kwargs)
        except BaseException:
            self._runs = object(), object()  # what was cached half way is not used again
            raise
        for choice in (choice for hook in self.hooks for choice in hook.where):
            if choice not in self._found:
                hint = "Give an NNX model itself, and of a Linen model its apply."
                raise no_module(choice, self._seen, self.call, hint)
        return out

    def _recorder(self, types: list[Any]) -> Callable[..., Any]:
        def record(call: Any, hooks: Any, path: str, args: Any, kwargs: Any) -> Any:
            index = len(types)
            types.append(None)
            output = run_forward(call, hooks, path, args, kwargs)
            types[index] = path, types_of(output)
            return output

        return self._interceptor(record)

    def _runner(self, types: list[Any]) -> Callable[..., Any]:
        rest = iter(types)

        def run(call: Any, hooks: Any, path: str, args: Any, kwargs: Any) -> Any:
            recorded = next(rest, None) if self._looks_ahead else (path, None)
            if recorded is None or recorded[0] != path:
                raise RuntimeError(
                    f"{self.call}: the function calls the same modules each time that it is "
                    f"traced; got {path!r}, the first time {recorded and recorded[0]!r}. "
                    "Make what it calls depend on its arguments alone."
                )
            return run_module(call, hooks, path, args, kwargs, lambda: recorded[1])

        return self._interceptor(run)

    def _interceptor(self, run: Callable[..., Any]) -> Callable[..., Any]:
        running: list[Any] = []

        def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            path = "/".join(module.path if module.scope is not None else ()) or "."
            # A lifted module, or one that calls its parent class, comes by twice in one call.
            key = path, type(module)
            if context.method_name != "__call__" or key in running:
                return call(*args, **kwargs)
            hooks = self._hooks_on(path, module)
            if not hooks:
                return call(*args, **kwargs)
            running.append(key)
            try:
                return run(call, hooks, path, args, kwargs)
            finally:
                running.pop()

        return intercept

    def _hooks_on(self, path: str, module: Any) -> list[ModuleHook]:
        self._seen[path] = type(module).__name__
        hooks = []
        for hook in self.hooks:
            chosen = [choice for choice in hook.where if chooses(choice, path, module)]
            self._found.update(chosen)
            if chosen:
                hooks.append(hook)
        return hooks
