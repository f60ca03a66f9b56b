"""Hooks on the modules of a Flax NNX model: a copy of it whose chosen modules know their hooks.

The class of a chosen module is replaced by a subclass that calls it between its hooks.  Class
and hooks are static parts of the model, so that ``nnx.split``, ``merge``, ``jit``, ``scan`` and
``remat`` keep them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from funcgrad._hooks._module_call import ModuleHook, run_forward, run_module, types_of
from funcgrad._hooks._where import chooses, no_module

# Inside the search for a module's output type, the modules below have nothing to do going back.
# It is part of the key of every cache of traced functions: a `jit` or `remat` inside the model
# that was traced there, without those hooks, is not taken for the model's own.
_only_forward = jax.make_user_context(False)


@dataclasses.dataclass(frozen=True, eq=False)
class _Place:
    """The hooks on one module, and its path in the model."""

    path: str
    hooks: tuple[ModuleHook, ...]


def hook_model(model: nnx.Module, hook: ModuleHook, call: str) -> nnx.Module:
    """A copy of ``model`` with one more hook on the modules that it chooses."""
    hooked: Any = nnx.clone(model)
    modules: list[tuple[str, Any]] = [
        ("/".join(map(str, path)) or ".", module)
        for path, module in nnx.iter_modules(hooked)
        if any("__call__" in vars(base) for base in type(module).__mro__)
    ]
    for choice in hook.where:
        if not any(chooses(choice, path, module) for path, module in modules):
            names = {path: type(module).__name__ for path, module in modules}
            raise no_module(choice, names, call, "Paths are those of nnx.iter_modules.")
    for path, module in modules:
        if any(chooses(choice, path, module) for choice in hook.where):
            before = getattr(module, "_funcgrad_place", _Place(path, ())).hooks
            module.__class__ = _hooked_class(_plain_class(module))
            module._funcgrad_place = _Place(path, (*before, hook))
    return hooked


def _plain_class(module: nnx.Module) -> type:
    return getattr(type(module), "_funcgrad_plain", type(module))


@functools.cache
def _hooked_class(plain: Any) -> type:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        place: _Place = self._funcgrad_place
        run = functools.partial(plain.__call__, self)
        if _only_forward.value:
            return run_forward(run, place.hooks, place.path, args, kwargs)

        def output_type() -> Any:
            ahead, _ = on_copies(self, args, kwargs)
            with _only_forward(True):
                return _traced(lambda: types_of(ahead()[0]))

        return run_module(run, place.hooks, place.path, args, kwargs, output_type)

    members = {
        "__call__": functools.wraps(plain.__call__)(__call__),
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_funcgrad_plain": plain,
    }
    return type(plain)(plain.__name__, (plain,), members)


def on_copies(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """``fun(*args, **kwargs)`` as a function of nothing that can be traced anywhere.

    NNX refuses objects of another trace: ``fun``, where it is one or a method of one, and those
    among its arguments are copied inside.  The second function takes what the first returns,
    writes the state that has changed back, and gives what ``fun`` returned.
    """
    has_state = lambda x: isinstance(x, nnx.Pytree | nnx.Variable)
    owner = fun if has_state(fun) else getattr(fun, "__self__", None)
    method: Any = type(fun).__call__ if has_state(fun) else getattr(fun, "__func__", None)
    held = (owner if has_state(owner) else None, args, kwargs)
    modules = [x for x in jax.tree.leaves(held, is_leaf=has_state) if has_state(x)]
    if not modules:
        return lambda: (fun(*args, **kwargs), None), lambda found: found[0]
    graph, state = nnx.split(modules)

    def traced() -> Any:
        copies = nnx.merge(graph, state, copy=True)
        rest = iter(copies)
        put = lambda x: next(rest) if has_state(x) else x
        model, new_args, new_kwargs = jax.tree.map(put, held, is_leaf=has_state)
        run = fun if model is None else functools.partial(method, model)
        return run(*new_args, **new_kwargs), nnx.state(copies)

    def written_back(found: Any) -> Any:
        value, new = found
        same = jax.tree.structure(new) == jax.tree.structure(state)
        pairs = zip(*map(jax.tree.leaves, (new, state)), strict=True) if same else ()
        if not same or any(a is not b for a, b in pairs):
            nnx.update(modules, new)
        return value

    return traced, written_back


def _traced(fun: Any) -> Any:
    # What is asked for is static: it is taken out of the trace, whose values are let go.
    found: list[Any] = []
    jax.eval_shape(lambda: found.append(fun()))
    return found[0]
