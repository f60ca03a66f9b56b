"""One call of a module with hooks around it, in PyTorch's order.

Going forward: every ``forward_pre``, the module, every ``forward``.  Coming back: every
``backward_pre`` at the output, the module's own backward, every ``backward`` at the inputs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from funcgrad._hooks._grad_hook import replaced
from funcgrad._hooks._pass_through import pass_through, zeros_like


@dataclasses.dataclass(frozen=True, eq=False)
class ModuleHook:
    """The four hooks that one call of ``module_hooks`` puts on the modules it chooses."""

    where: tuple[Any, ...]
    forward_pre: Callable[[str, Any], Any] | None = None
    forward: Callable[[str, Any, Any], Any] | None = None
    backward_pre: Callable[[str, Any], Any] | None = None
    backward: Callable[[str, Any, Any], Any] | None = None


def run_forward(
    call: Callable[..., Any], hooks: Sequence[ModuleHook], path: str, args: Any, kwargs: Any
) -> Any:
    """The module between its ``forward_pre`` and its ``forward`` hooks."""
    args = _before(hooks, path, args)
    return _after(hooks, path, args, call(*args, **kwargs))


def types_of(output: Any) -> Any:
    """The types of what a module gave, as ``run_module`` wants them."""
    kind = lambda leaf: jax.eval_shape(lambda x: x, leaf) if _moves(leaf) else 0
    return jax.tree.map(kind, output, is_leaf=_is_object)


def run_module(
    call: Callable[..., Any],
    hooks: Sequence[ModuleHook],
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output_type: Callable[[], Any],
) -> Any:
    """The module between all its hooks.

    ``output_type()`` is ``types_of`` what ``run_forward`` returns; it is asked for only where
    there is a ``backward`` hook, which sees the cotangent of the output at the inputs: it is
    carried there in slots, which exist before the output does.
    """
    pre = [hook.backward_pre for hook in hooks if hook.backward_pre is not None]
    after = [hook.backward for hook in hooks if hook.backward is not None]
    args = _before(hooks, path, args)
    in_leaves, in_tree, moving = _flatten(args)
    types, out_tree, out_moving = _flatten(output_type()) if after else ([], None, [])
    slots = [zeros_like(kind) for kind in _chosen(types, out_moving)]
    xs = _chosen(in_leaves, moving)

    def at_inputs(cotangents: Sequence[Any]) -> list[Any]:
        of_inputs, of_output = cotangents[: len(xs)], cotangents[len(xs) :]
        grad_input = _tree(in_tree, moving, of_inputs)
        for hook in after:
            new = hook(path, grad_input, _tree(out_tree, out_moving, of_output))
            new = new if new is None or isinstance(new, tuple) else (new,)
            grad_input = replaced(new, grad_input, f"module_hooks: backward of {path!r}")
        return [*jax.tree.leaves(grad_input), *of_output]

    def at_output(cotangents: Sequence[Any]) -> list[Any]:
        grad_output = _tree(out_tree, out_moving, cotangents)
        for hook in pre:
            new = hook(path, grad_output)
            grad_output = replaced(new, grad_output, f"module_hooks: backward_pre of {path!r}")
        return jax.tree.leaves(grad_output)

    def without_inputs(cotangents: Sequence[Any]) -> list[Any]:
        # No input is differentiated, as in a first layer: the hooks run here, and see None.
        given = at_output(cotangents)
        nothing = jax.tree.unflatten(in_tree, [None] * len(in_leaves))
        for hook in after:
            try:
                hook(path, nothing, _tree(out_tree, out_moving, given))
            except Exception as error:
                error.add_note(
                    f"module_hooks: no input of {path!r} is differentiated here, so that each "
                    "grad_input given to backward is None."
                )
                raise
        return given

    if after and xs:
        passed = pass_through([*xs, *slots], at_inputs)
        xs, slots = passed[: len(xs)], passed[len(xs) :]
        args = jax.tree.unflatten(in_tree, _put(in_leaves, moving, xs))
    output = _after(hooks, path, args, call(*args, **kwargs))
    if not (pre or after):
        return output
    leaves, out_tree, out_moving = _flatten(output)
    ys = _chosen(leaves, out_moving)
    if after:
        both = lambda cotangents: [*(given := at_output(cotangents)), *given]
        ys = pass_through(ys, both, slots, without_inputs)
    else:
        ys = pass_through(ys, at_output)
    return jax.tree.unflatten(out_tree, _put(leaves, out_moving, ys))


def _before(hooks: Sequence[ModuleHook], path: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    for hook in hooks:
        if hook.forward_pre is not None and (new := hook.forward_pre(path, args)) is not None:
            args = new if isinstance(new, tuple) else (new,)
    return args


def _after(hooks: Sequence[ModuleHook], path: str, args: tuple[Any, ...], output: Any) -> Any:
    for hook in hooks:
        if hook.forward is not None and (new := hook.forward(path, args, output)) is not None:
            output = new
    return output


def _flatten(tree: Any) -> tuple[list[Any], Any, list[bool]]:
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_object)
    return leaves, structure, [_moves(leaf) for leaf in leaves]


def _is_object(leaf: Any) -> bool:
    # Taken apart and put together again, it would be another object, with state of its own.
    return isinstance(leaf, nnx.Module | nnx.Rngs | nnx.RngStream | nnx.Variable)


def _moves(leaf: Any) -> bool:
    # A Python number among the arguments is a setting, such as a rate, and stays one.
    arrays = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    return isinstance(leaf, arrays) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _chosen(leaves: Sequence[Any], moving: Sequence[bool]) -> list[Any]:
    return [leaf for leaf, moves in zip(leaves, moving, strict=True) if moves]


def _put(leaves: Sequence[Any], moving: Sequence[bool], new: Sequence[Any]) -> list[Any]:
    rest = iter(new)
    return [next(rest) if moves else leaf for leaf, moves in zip(leaves, moving, strict=True)]


def _tree(tree: Any, moving: Sequence[bool], leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(tree, _put([None] * len(moving), moving, leaves))
