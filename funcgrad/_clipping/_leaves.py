"""Which leaves of a tree of gradients count, and over which mesh axes each is spread."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._compat import manual_axes, varying_axes
from funcgrad._trees import LeafSpec, broadcast_prefix, choose_leaves, keystr


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The leaves of a tree that a norm counts, and the mesh axes each is spread over."""

    all: list[Any]
    tree: Any
    is_counted: list[bool]
    is_frozen: list[bool]
    counted: list[Any]
    axes: tuple[frozenset[str], ...]

    def rebuild(self, counted: list[Any]) -> Any:
        """The tree with these counted leaves, zeros for frozen ones, the rest as they came."""
        new = iter(counted)

        def pick(leaf: Any, is_counted: bool, is_frozen: bool) -> Any:
            if is_counted:
                return next(new)
            return jnp.zeros_like(leaf) if is_frozen and has_gradient(leaf) else leaf

        leaves = map(pick, self.all, self.is_counted, self.is_frozen)
        return jax.tree.unflatten(self.tree, list(leaves))


def has_gradient(leaf: Any) -> bool:
    """Whether a leaf is floating or complex: not an integer, a key, or ``float0``."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.inexact)


def choose(grads: Any, frozen: LeafSpec, specs: Any, call: str) -> Leaves:
    """The leaves of ``grads`` to count, and over which mesh axes to add each up."""
    leaves, tree = jax.tree.flatten(grads)
    _check_spec(frozen, call)
    is_frozen = choose_leaves(frozen, grads, call)
    is_counted = [has_gradient(x) and not out for x, out in zip(leaves, is_frozen, strict=True)]
    axes = _spread(grads, is_counted, specs, call)
    counted = [jnp.asarray(x) for x, one in zip(leaves, is_counted, strict=True) if one]
    return Leaves(leaves, tree, is_counted, is_frozen, counted, axes)


def _check_spec(frozen: Any, call: str) -> None:
    """Raise for what ``choose_leaves`` would take for a tree of ``True``."""
    if frozen is None or isinstance(frozen, str) or callable(frozen):
        return
    for leaf in jax.tree.leaves(frozen):
        if not isinstance(leaf, str) and np.asarray(leaf).dtype != np.bool_:
            raise TypeError(
                f"{call}: frozen is patterns, a predicate of (path, leaf) or a tree of booleans; "
                f"got {type(leaf).__name__}. Say which leaves have no gradient."
            )


def _spread(
    grads: Any, is_counted: list[bool], specs: Any, call: str
) -> tuple[frozenset[str], ...]:
    """For each counted leaf, the axes of the ``shard_map`` around that hold parts of it."""
    manual, typed = manual_axes()
    named = jax.tree_util.tree_leaves_with_path(grads)
    kept = [leaf for leaf, counted in zip(named, is_counted, strict=True) if counted]
    if not manual:
        return tuple(frozenset() for _ in kept)
    stated = None
    if specs is not None:
        whole = [
            _axes_of(spec, call) & set(manual) for spec in broadcast_prefix(specs, grads, call)
        ]
        stated = [axes for axes, counted in zip(whole, is_counted, strict=True) if counted]
    if not typed:
        if stated is None:
            raise ValueError(
                f"{call}: under shard_map with check_vma=False nothing says which gradients are "
                "parts and which are copies; got no specs. Pass specs=, the PartitionSpecs of the "
                "gradients, or use check_vma=True."
            )
        return tuple(stated)
    found = [varying_axes(leaf) for _, leaf in kept]
    for (path, _), axes, said in zip(kept, found, stated or found, strict=True):
        if axes != said:
            raise ValueError(
                f"{call}: a gradient differs between devices along the axes of its spec, and "
                f"no others; got grads{keystr(path)} that varies over {_list(axes)} with a spec "
                f"over {_list(said)}. Reduce gradients of replicated parameters first (psum)."
            )
    return tuple(found)


def _axes_of(spec: Any, call: str) -> frozenset[str]:
    if not (spec is None or isinstance(spec, jax.sharding.PartitionSpec)):
        raise TypeError(
            f"{call}: specs are PartitionSpecs, or None for a copy; got {spec!r}. "
            "Pass what shard_map has as in_specs or out_specs for these gradients."
        )
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec or ()]
    axes = frozenset(axis for entry in entries for axis in entry if isinstance(axis, str))
    names = jax.sharding.get_abstract_mesh().axis_names
    if axes - set(names):
        raise ValueError(
            f"{call}: specs name axes of the mesh, {_list(frozenset(names))}; got "
            f"{_list(axes - set(names))}. A part would pass for a copy."
        )
    return axes


def _list(axes: frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(axes))) or "none"
