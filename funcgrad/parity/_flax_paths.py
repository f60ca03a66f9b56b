"""A Flax tree read by module names: its leaves as nested dicts, and torch names found in them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the template."""

    index: int
    where: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any


def read_template(tree: Any) -> tuple[list[Leaf], dict[str, Any], Any]:
    """The leaves of a template, also as nested dicts without collections and boxes."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    variables = isinstance(tree, Mapping) and isinstance(tree.get("params"), Mapping)
    leaves, nested = [], {}
    for index, (keys, leaf) in enumerate(flat):
        path = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in keys]
        if path and path[-1] == "value" and not isinstance(keys[-1], jax.tree_util.DictKey):
            path.pop()  # nnx.Variable, and Linen's boxes with metadata
        path = path[1:] if variables else path
        entry = Leaf(
            index, f"template{jax.tree_util.keystr(keys)}", tuple(path), leaf.shape, leaf.dtype
        )
        leaves.append(entry)
        node = nested
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = entry
    return leaves, nested, treedef


def find(node: Any, segments: tuple[str, ...]) -> tuple[str, ...] | None:
    """Walk down by name; a number is also an element of a list or of a Sequential."""
    if not segments:
        return ()
    if not isinstance(node, dict):
        return None
    head, *rest = segments
    steps = [((head,), rest)]
    if rest and rest[0].isdigit():
        steps.append(((f"{head}_{rest[0]}",), rest[1:]))
    if head.isdigit():
        steps += [((f"layers_{head}",), rest), (("layers", head), rest)]
    for step, remaining in steps:
        below = at(node, step)
        if below is not None and (found := find(below, tuple(remaining))) is not None:
            return (*step, *found)
    return None


def at(node: Any, path: tuple[str, ...]) -> Any:
    """What stands at a path: a leaf, the dict of a module, or None."""
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def shapes_below(node: Any) -> Any:
    """The nested dict of shapes that a rule reads."""
    if isinstance(node, Leaf):
        return node.shape
    return {key: shapes_below(below) for key, below in node.items()}
