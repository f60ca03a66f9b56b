"""Pytrees: leaf names, leaves chosen by a specification, prefixes."""

import difflib
import fnmatch
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

LeafSpec: TypeAlias = None | str | Sequence[str] | Callable[[str, Any], bool] | Any


def keystr(path: Any) -> str:
    """A leaf's path as Python would index it, ``['dense']['kernel']``."""
    return jax.tree_util.keystr(path)


def slashed(path: Any) -> str:
    """A leaf's path for patterns, ``dense/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_float(leaf: Any) -> bool:
    """Whether a leaf is floating or complex, the kinds that have a gradient."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def choose_leaves(spec: LeafSpec, tree: Any, call: str) -> list[bool]:
    """One boolean per leaf of ``tree``, in order: whether ``spec`` names it.

    ``spec`` is ``None`` (no leaf), a glob pattern or several over paths such as
    ``embed/*``, a predicate of (path, leaf), or a tree of booleans that may stop early.
    """
    paths = [(slashed(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    if spec is None:
        return [False] * len(paths)
    # An Equinox module of booleans is callable, too, and is not a predicate.
    if callable(spec) and jax.tree_util.all_leaves([spec]):
        return [bool(spec(path, leaf)) for path, leaf in paths]
    if isinstance(spec, str):
        spec = [spec]
    if isinstance(spec, Sequence) and all(isinstance(pattern, str) for pattern in spec):
        for pattern in spec:
            if not any(_matches(path, pattern) for path, _ in paths):
                names = [path for path, _ in paths]
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:5]
                raise ValueError(
                    f"{call}: each pattern names a leaf; got {pattern!r}, which names none. "
                    f"Near names: {', '.join(near)}."
                )
        return [any(_matches(path, pattern) for pattern in spec) for path, _ in paths]
    return [bool(chosen) for chosen in broadcast_prefix(spec, tree, call)]


def _matches(path: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern + "/*")


_NOTHING = object()


def broadcast_prefix(prefix: Any, tree: Any, call: str) -> list[Any]:
    """The leaf of ``prefix`` that stands over each leaf of ``tree``; ``None`` may be one."""
    is_none = lambda leaf: leaf is None
    marked = jax.tree.map(lambda x: _NOTHING if x is None else x, prefix, is_leaf=is_none)
    try:
        full = jax.tree.broadcast(marked, tree)
    except ValueError as error:
        raise ValueError(
            f"{call}: a prefix has the structure of the tree it stands for, as far as it goes; "
            f"got {jax.tree.structure(prefix)} for {jax.tree.structure(tree)}."
        ) from error
    return [None if leaf is _NOTHING else leaf for leaf in jax.tree.leaves(full)]
