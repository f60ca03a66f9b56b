"""A call's arrays apart from the rest of its arguments."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

Rebuild: TypeAlias = Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced: an array, or a shape that stands for one; not ``jnp.float32``."""
    return hasattr(leaf, "dtype") and not isinstance(leaf, type)


def split_arrays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Rebuild]:
    """The arrays among the arguments, and a function from others like them to arguments.

    Everything else (flags, plain numbers, strings) stays what it is, so that a function may
    branch on it, as it may under ``jax.grad``.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def rebuild(arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return jax.tree.unflatten(tree, filled)

    return [leaves[i] for i in places], rebuild


def unchanged(fun: Callable[..., Any], args: Any, kwargs: Any, call: str = "checkpoint") -> Any:
    """Call ``fun`` in a trace; it must leave the leaves of its arguments as they were."""
    before, again = (jax.tree.leaves((args, kwargs)) for _ in range(2))
    out = fun(*args, **kwargs)
    if any(a is not b for a, b in zip(before, again, strict=True)):
        return out  # a node that makes new leaves whenever it is taken apart: nothing to see
    after = jax.tree_util.tree_leaves_with_path((args, kwargs))
    pairs = zip(after, before, strict=False)  # the first that differs, if the numbers do
    changed = [jax.tree_util.keystr(path) for (path, a), b in pairs if a is not b]
    if changed or len(after) != len(before):
        where = f"changes {changed[0]}" if changed else "changes the number of leaves"
        raise ValueError(
            f"{call}: fun leaves its arguments as they are, or the change would be lost; "
            f"got a function that {where} of (args, kwargs). An NNX module with random numbers "
            "or statistics: nnx.split it, nnx.merge(..., copy=True) and return the new state; "
            "nnx.remat carries the change for a checkpoint without a policy."
        )
    return out
