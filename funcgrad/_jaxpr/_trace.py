"""A function of pytrees as a jaxpr with named inputs and outputs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from funcgrad._compat import ClosedJaxpr


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function: its jaxpr, and how its leaves are named and put together.

    ``in_names`` and ``out_names`` are the leaves' paths, such as ``[0]['dense']['bias']``,
    in the order of the jaxpr's inputs and outputs.
    """

    jaxpr: ClosedJaxpr
    in_tree: Any
    out_tree: Any
    in_names: tuple[str, ...]
    out_names: tuple[str, ...]

    def flatten(self, *args: Any) -> list[Any]:
        """The leaves of ``args``, which must have the structure traced."""
        leaves, tree = jax.tree.flatten(args)
        if tree != self.in_tree:
            raise TypeError(
                f"trace: arguments keep the structure they were traced with; got {tree}, "
                f"traced {self.in_tree}. Trace again for another structure."
            )
        return leaves

    def unflatten(self, leaves: list[Any]) -> Any:
        """The output tree with these leaves."""
        return jax.tree.unflatten(self.out_tree, leaves)


def leaf_names(tree: Any) -> tuple[str, ...]:
    """The path of each leaf, as Python would index it."""
    return tuple(
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    )


def trace(fun: Callable[..., Any], *args: Any) -> Traced:
    """Trace ``fun`` at ``args``: arrays or ``ShapeDtypeStruct`` leaves in any pytree."""
    jaxpr, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    return Traced(
        jaxpr=jaxpr,
        in_tree=jax.tree.structure(args),
        out_tree=jax.tree.structure(out_shape),
        in_names=leaf_names(args),
        out_names=leaf_names(out_shape),
    )
