"""A call's arguments as parameters and micro-batches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad._compat import gathered, reshape_rows
from funcgrad._trees import LeafSpec, broadcast_prefix, choose_leaves, is_float, is_key, keystr

CALL = "accumulate_grads"


def is_integer(x: Any) -> bool:
    """Whether ``x`` is an integer known while tracing, and no boolean."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _traceable(leaf: Any) -> Any:
    """A NumPy array, which a traced index could not look up, as JAX's; all else as it is."""
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments: leaves to differentiate, leaves that stay, and the batch."""

    train: list[Any]
    kept: list[Any]
    is_train: list[bool]
    tree: Any
    argnums: tuple[int, ...]
    is_single: bool
    batch: tuple[Any, ...]

    @staticmethod
    def of(args: tuple[Any, ...], argnums: Any, frozen: LeafSpec) -> "Arguments":
        """Take ``args`` apart."""
        is_single = is_integer(argnums)
        given = (argnums,) if is_single else tuple(argnums)
        for i in given:
            if not is_integer(i) or not -len(args) <= i < len(args):
                raise ValueError(
                    f"{CALL}: argnums are positions of arguments; got {i} for {len(args)} "
                    "arguments. Pass params and batch by position."
                )
        where = tuple(i % len(args) for i in given)
        if not where or len(set(where)) < len(where):
            raise ValueError(
                f"{CALL}: argnums name each argument to differentiate once; got {argnums}. "
                "Pass one position or several different ones."
            )
        params = args[where[0]] if is_single else tuple(args[i] for i in where)
        named, tree = jax.tree_util.tree_flatten_with_path(params)
        is_train = [not out for out in choose_leaves(frozen, params, CALL)]
        for (path, leaf), train in zip(named, is_train, strict=True):
            if train and (is_key(leaf) or not is_float(leaf)):
                raise TypeError(
                    f"{CALL}: what is differentiated is floating; got {jnp.result_type(leaf)} "
                    f"in params{keystr(path)}. Name it in frozen."
                )
        pairs = [(leaf, train) for (_, leaf), train in zip(named, is_train, strict=True)]
        return Arguments(
            [jnp.asarray(leaf) for leaf, train in pairs if train],
            [_traceable(leaf) for leaf, train in pairs if not train],
            is_train,
            tree,
            where,
            is_single,
            tuple(arg for i, arg in enumerate(args) if i not in where),
        )

    def join(self, train: list[Any], batch: tuple[Any, ...]) -> list[Any]:
        """The arguments of ``fun``, in its order."""
        moving, staying = iter(train), iter(self.kept)
        leaves = [next(moving) if t else next(staying) for t in self.is_train]
        params = jax.tree.unflatten(self.tree, leaves)
        args: list[Any] = list(batch)
        each = [params] if self.is_single else params
        for i, param in sorted(zip(self.argnums, each, strict=True), key=lambda pair: pair[0]):
            args.insert(i, param)
        return args

    def grads(self, train: list[Any]) -> Any:
        """A tree like the differentiated arguments, with ``None`` for frozen leaves."""
        moving = iter(train)
        return jax.tree.unflatten(self.tree, [next(moving) if t else None for t in self.is_train])


@dataclasses.dataclass(frozen=True)
class Batch:
    """The batch as rows (samples of a micro-batch, micro-batches); masked where filled up."""

    mapped: list[Any]
    keys: list[Any]
    shared: list[Any]
    kinds: list[str]
    tree: Any
    mask: Any
    n_micro: int
    n_last: int

    @staticmethod
    def of(args: tuple[Any, ...], in_axes: Any, size: int, mask: Any) -> "Batch":
        """Cut ``args`` into micro-batches of ``size``, filled up where it does not divide."""
        named, tree = jax.tree_util.tree_flatten_with_path(args)
        in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
        axes = broadcast_prefix(in_axes, args, f"{CALL}: in_axes")
        mask = np.asarray(mask) if isinstance(mask, list | tuple) else mask
        mapped, keys, shared, kinds, sizes = [], [], [], [], {}
        for (path, leaf), axis in zip(named, axes, strict=True):
            name, shape = f"batch{keystr(path)}", jnp.shape(leaf)
            if axis is None:
                kinds.append("shared")
                shared.append(_traceable(leaf))
            elif is_key(leaf) and not shape:
                kinds.append("key")
                keys.append(leaf)
            elif not is_integer(axis) or not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"{CALL}: every batch argument has a sample axis; got {name} with shape "
                    f"{shape} and in_axes {axis}. Pass in_axes=None for what all share."
                )
            else:
                kinds.append("mapped")
                mapped.append(jnp.moveaxis(leaf, axis, 0) if axis else jnp.asarray(leaf))
                sizes[name] = shape[axis]
        n = next(iter(sizes.values()), 0)
        if len(set(sizes.values())) != 1:
            found = ", ".join(f"{name}: {rows}" for name, rows in sizes.items()) or "none"
            raise ValueError(
                f"{CALL}: all batch arguments have the same number of samples; "
                f"got {found}. Pass in_axes=None for what all share."
            )
        if mask is not None and (jnp.shape(mask) != (n,) or jnp.result_type(mask) != jnp.bool_):
            raise ValueError(
                f"{CALL}: mask is one boolean per sample; got {jnp.result_type(mask)}"
                f"{jnp.shape(mask)} for {n} samples. Pass True for each sample that counts."
            )
        n_micro, size = max(1, -(-n // size)), min(size, n)
        extra = n_micro * size - n
        mask = mask if n else None
        if extra:
            # Copies of a sample, not zeros, at which a loss need not be finite.
            fill = lambda x: jnp.concatenate([x, jnp.broadcast_to(x[:1], (extra, *x.shape[1:]))])
            mapped = [fill(x) for x in gathered(mapped)]
            mask = jnp.ones(n, bool) if mask is None else gathered(jnp.asarray(mask))
            mask = jnp.concatenate([mask, jnp.zeros(extra, bool)])
        keys = [jax.random.split(key, n_micro) for key in keys]
        # A micro-batch takes every n-th sample: where the samples are spread over devices,
        # each device then has its part of every micro-batch.
        rows = lambda x: reshape_rows(x, 1, (size, n_micro))
        mask = None if mask is None else rows(jnp.asarray(mask))
        return Batch(
            [rows(x) for x in mapped], keys, shared, kinds, tree, mask, n_micro, size - extra
        )

    def micro(self, i: Any) -> tuple[tuple[Any, ...], Any]:
        """The arguments of micro-batch ``i``, and which of its samples count."""
        at = lambda x, axis: lax.dynamic_index_in_dim(x, i, axis, keepdims=False)
        mapped, counts = [at(x, 1) for x in self.mapped], None
        if self.mask is not None:
            counts = at(self.mask, 1)
            # A sample that does not count may hold anything: zero times its NaN would be NaN.
            stand_in = jnp.argmax(counts)
            mapped = [
                jnp.where(counts.reshape(-1, *[1] * (x.ndim - 1)), x, gathered(x)[stand_in])
                for x in mapped
            ]
        leaves = {
            "mapped": iter(mapped),
            "key": iter([at(key, 0) for key in self.keys]),
            "shared": iter(self.shared),
        }
        return jax.tree.unflatten(self.tree, [next(leaves[kind]) for kind in self.kinds]), counts
