"""Look at a cotangent, or replace it, at one place of a program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad._compat import varying_axes
from funcgrad._hooks._pass_through import pass_through
from funcgrad._trees import LeafSpec, choose_leaves, is_float, keystr, slashed


def grad_hook(x: Any, *hooks: Callable[[Any], Any]) -> Any:
    """Return ``x``, whose cotangent goes through ``hooks`` on its way back.

    A hook is called with the cotangent of the value returned, the sum over all its uses, and
    what it returns takes the cotangent's place; ``None`` keeps it.  Several hooks are called
    in the order given.  Of nested calls, as in ``grad_hook(grad_hook(x, second), first)``,
    the outer one meets the cotangent first.  To remove a hook, leave the call out.

    The value itself is unchanged, and so is the compiled forward pass.  A hook runs once in
    each backward pass that reaches it, under ``checkpoint`` too; inside ``vmap`` it sees one
    sample's cotangent, inside ``scan`` one iteration's.  A pass whose cotangent is known to be
    zero from the program alone, since nothing that is differentiated uses the value, does not
    call it.  Forward mode (``jvp``, ``linearize``) passes tangents unchanged, as in PyTorch;
    transposing what ``linearize`` gave calls the hook.  In second derivatives the hook is
    differentiated, and it is called for the second pass as well, as with ``create_graph``:
    with hooks that change values the result is therefore no longer a derivative of anything.

    A hook is traced when ``grad_hook`` is called, and may close over tracers.  To print or log
    from it, use ``jax.debug.print`` or ``jax.debug.callback``, with ``ordered=True`` to keep
    the order.  Inside ``shard_map`` it may communicate: with ``check_vma=False``, hooks that
    call ``psum`` on the parameters reduce each gradient where it is born.

    PyTorch: ``tensor.register_hook(fn)``; on a parameter also
    ``register_post_accumulate_grad_hook``.

    Args:
      x: An array or a tree of arrays, at least one of them floating or complex.
      *hooks: Functions of a cotangent, which has the structure, shapes and dtypes of ``x``;
        where ``x`` has no gradient (integers, keys) it has ``None``.

    Returns:
      A tree equal to ``x``.

    Raises:
      TypeError: ``x`` has no leaf with a gradient.
      ValueError: a hook returns another structure, shape or dtype than it was given; names
        the leaf.

    Example:
      >>> def loss(a):
      ...     return fg.grad_hook(3 * a, lambda g: 2 * g, lambda g: g + 1)
      >>> jax.grad(loss)(1.0)
      Array(9., dtype=float32)
    """
    if not hooks:
        raise TypeError("grad_hook: at least one function of the cotangent; got none.")
    leaves, tree = jax.tree.flatten(x)
    moving = [is_float(leaf) for leaf in leaves]
    if not any(moving):
        kinds = sorted({str(jnp.result_type(leaf)) for leaf in leaves})
        raise TypeError(
            "grad_hook: x has a floating leaf, since others have no gradient; got "
            f"{', '.join(kinds) or 'no leaf'}. Hook the value it is made of."
        )
    values = pass_through(
        [leaf for leaf, moves in zip(leaves, moving, strict=True) if moves],
        lambda cts: _call(hooks, cts, tree, moving),
    )
    rest = iter(values)
    new = [next(rest) if moves else leaf for leaf, moves in zip(leaves, moving, strict=True)]
    return jax.tree.unflatten(tree, new)


def grad_hooks(params: Any, hook: Callable[[str, Any], Any], *, leaves: LeafSpec = "*") -> Any:
    """Return ``params`` with a hook of its own on each chosen leaf.

    ``hook(path, cotangent)`` is ``grad_hook``'s, called for each leaf by itself as soon as that
    leaf's gradient is complete, where ``grad_hook(params, fn)`` would wait for all.

    PyTorch: ``for name, p in model.named_parameters(): p.register_hook(partial(fn, name))``.

    Args:
      params: A tree of arrays.
      hook: Function of the leaf's path, such as ``"dense/kernel"``, and its cotangent.
      leaves: Which leaves: a pattern over paths or several, a predicate of (path, leaf), or a
        tree of booleans.  Leaves without a gradient (integers, keys) are passed over.

    Returns:
      A tree equal to ``params``.

    Raises:
      ValueError: a pattern names no leaf; ``leaves`` chooses none with a gradient; or as
        ``grad_hook``.

    Example:
      >>> params = {"w": jnp.ones(2), "b": jnp.ones(2)}
      >>> def loss(params):
      ...     params = fg.grad_hooks(params, lambda path, g: 10 * g, leaves="b")
      ...     return (params["w"] + params["b"]).sum()
      >>> jax.grad(loss)(params)
      {'b': Array([10., 10.], dtype=float32), 'w': Array([1., 1.], dtype=float32)}
    """
    chosen = choose_leaves(leaves, params, "grad_hooks")
    flat, tree = jax.tree_util.tree_flatten_with_path(params)
    hooked = [pick and is_float(leaf) for pick, (_, leaf) in zip(chosen, flat, strict=True)]
    if not any(hooked):
        raise ValueError(
            f"grad_hooks: leaves chooses a floating leaf; got {leaves!r}, which chooses none of "
            f"{', '.join(slashed(path) for path, _ in flat[:5]) or 'no leaves'}."
        )

    def one(path: Any, leaf: Any) -> Any:
        return grad_hook(leaf, lambda cotangent: hook(slashed(path), cotangent))

    new = [
        one(path, leaf) if hook_it else leaf
        for hook_it, (path, leaf) in zip(hooked, flat, strict=True)
    ]
    return jax.tree.unflatten(tree, new)


def _call(
    hooks: Sequence[Callable[[Any], Any]], cts: Sequence[Any], tree: Any, moving: Sequence[bool]
) -> list[Any]:
    rest = iter(cts)
    cotangent = jax.tree.unflatten(tree, [next(rest) if moves else None for moves in moving])
    for hook in hooks:
        cotangent = replaced(hook(cotangent), cotangent, "grad_hook")
    return jax.tree.leaves(cotangent)


def replaced(new: Any, old: Any, call: str) -> Any:
    """The cotangent that a hook returned, of the type of the ``old`` one; ``None`` keeps that."""
    if new is None:
        return old
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            f"{call}: a hook returns the structure that it is given; got "
            f"{jax.tree.structure(new)}, given {jax.tree.structure(old)}. "
            "Return None to keep the cotangent."
        )

    def check(path: Any, new: Any, old: Any) -> Any:
        new = jnp.asarray(new)
        where = f" at {keystr(path)}" if path else ""
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"{call}: a hook keeps the shape and dtype of the cotangent{where}; got "
                f"{new.dtype}{list(new.shape)}, given {old.dtype}{list(old.shape)}."
            )
        if varying_axes(new) != varying_axes(old):
            raise ValueError(
                f"{call}: a hook keeps the mesh axes over which the cotangent{where} varies; got "
                f"{sorted(varying_axes(new))}, given {sorted(varying_axes(old))}. Under "
                "check_vma, JAX reduces by itself where a replicated value becomes varying; "
                "to reduce in a hook, use shard_map(..., check_vma=False)."
            )
        return new

    return jax.tree_util.tree_map_with_path(check, new, old)
