"""Variables under dotted names, ``layers.0.kernel``, whichever way a tree holds them."""

import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp


def is_nnx_module(x: Any) -> bool:
    """Whether ``x`` is a module of Flax NNX; imports nothing."""
    nnx = sys.modules.get("flax.nnx")  # who holds a module has imported it
    return nnx is not None and isinstance(x, nnx.Module)


def is_linen_module(x: Any) -> bool:
    """Whether ``x`` is a module of Flax Linen; imports nothing."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(x, linen.Module)


def named(tree: Any, call: str) -> dict[str, Any]:
    """The leaves of dicts, lists and NNX states, nested or with dotted keys, by name."""
    found: dict[str, Any] = {}
    for name, leaf in _leaves(tree, ()):
        if not name:
            raise TypeError(
                f"{call}: variables stand under their names, in dicts or in an nnx.State; got "
                f"{type(leaf).__name__}. The variables of an NNX module are its nnx.state."
            )
        if name in found:
            raise ValueError(f"{call}: each name stands once; got {name!r} twice. Leave one out.")
        found[name] = leaf
    return found


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(node, nnx.Variable):
        node = node.get_raw_value()  # hooks belong to the call
    if isinstance(node, Mapping):
        for key, below in node.items():
            yield from _leaves(below, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for i, below in enumerate(node):
            yield from _leaves(below, (*path, str(i)))
    elif node is not None:
        yield ".".join(path), node


def nested(leaves: Mapping[str, Any], like: Any, path: tuple[str, ...] = ()) -> Any:
    """A tree of dicts, lists and tuples such as ``like``, of the leaves of these names."""
    if isinstance(like, Mapping):
        return {key: nested(leaves, below, (*path, str(key))) for key, below in like.items()}
    if isinstance(like, list | tuple):
        return type(like)(nested(leaves, x, (*path, str(i))) for i, x in enumerate(like))
    return None if like is None else leaves[".".join(path)]


def refuse_names(
    call: str, missing: Iterable[str], unexpected: Iterable[str], known: Iterable[str]
) -> None:
    """Raise where a name is missing or unexpected, and list what is near."""
    missing, unexpected, known = sorted(missing), sorted(unexpected), list(known)
    said = [f"missing {name!r}" for name in missing]
    for name in unexpected:
        near = difflib.get_close_matches(name, missing or known, n=3, cutoff=0.4)
        hint = f" (near names: {', '.join(near)})" if near else ""
        said.append(f"unexpected {name!r}{hint}")
    if said:
        shown = "; ".join(said[:8]) + (f"; and {len(said) - 8} more" if len(said) > 8 else "")
        raise ValueError(
            f"{call}: every variable of the module has a value, and every value a place; got "
            f"{shown}."
        )


def refuse_shapes(call: str, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise where a value has not the shape of what it stands for."""
    for name, value in given.items():
        got, shape = jnp.shape(value), tuple(wanted[name].shape)
        if got != shape:
            raise ValueError(
                f"{call}: a value has the shape of the module's own, {list(shape)} for {name!r}; "
                f"got {list(got)}. Map over a leading axis with jax.vmap."
            )
