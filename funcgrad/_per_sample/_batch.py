"""A batch of arguments: which leaves are per sample, whose key is whose, cut into chunks."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from funcgrad import _jaxpr
from funcgrad._compat import open_jaxpr, reshape_rows, varying_axes
from funcgrad._trees import broadcast_prefix, is_key, keystr

Randomness = Literal["different", "same"]

_DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform")


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arguments after ``params``: leaves with the sample axis first, and shared leaves."""

    mapped: tuple[Any, ...]
    shared: tuple[Any, ...]
    is_mapped: tuple[bool, ...]
    tree: Any
    size: int

    def join(self, mapped: Any) -> tuple[Any, ...]:
        """The arguments of one sample, or of a chunk, from its mapped leaves."""
        leaves, shared = iter(mapped), iter(self.shared)
        return jax.tree.unflatten(
            self.tree, [next(leaves) if is_mapped else next(shared) for is_mapped in self.is_mapped]
        )

    def one_sample(self) -> list[Any]:
        """The mapped leaves of one sample, as shapes; the batch itself may be empty."""
        one = [
            leaf  # inside shard_map, for its type
            if varying_axes(leaf) and leaf.shape[0]
            else jax.ShapeDtypeStruct((max(1, leaf.shape[0]), *leaf.shape[1:]), leaf.dtype)
            for leaf in self.mapped
        ]
        return [jax.eval_shape(lambda x: x[0], leaf) for leaf in one]


def split_batch(args: tuple[Any, ...], in_axes: Any, randomness: Randomness, call: str) -> Batch:
    """Put the sample axis first and give each sample its own key.

    One typed key where samples are expected stands for as many keys as there are samples.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(args)
    axes = broadcast_prefix(in_axes, args, f"{call}: in_axes")
    named = [
        (f"batch{keystr(path)}", leaf, axis) for (path, leaf), axis in zip(paths, axes, strict=True)
    ]
    sizes: dict[str, int] = {}
    for name, leaf, axis in named:
        if axis is None or (is_key(leaf) and leaf.ndim == 0):
            continue
        shape = jnp.shape(leaf)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{call}: every batch argument has a sample axis; got {name} with shape {shape} "
                f"and in_axes {axis}. Pass in_axes=None for what all samples share."
            )
        sizes[name] = shape[axis]
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{call}: all batch arguments have the same number of samples; got "
            + ", ".join(f"{name}: {size}" for name, size in sizes.items())
            + ". Pass in_axes=None for what all samples share."
        )
    if not sizes:
        raise ValueError(
            f"{call}: at least one batch argument has a sample axis; got none. "
            "Pass the samples after params."
        )
    size = next(iter(sizes.values()))

    mapped, shared, is_mapped = [], [], []
    for _, leaf, axis in named:
        if is_key(leaf) and leaf.ndim == 0 and axis is not None:
            axis = None if randomness == "same" else 0
            leaf = leaf if randomness == "same" else jax.random.split(leaf, size)
        is_mapped.append(axis is not None)
        if axis is None:
            shared.append(leaf)
        else:
            mapped.append(jnp.moveaxis(leaf, axis, 0) if axis else jnp.asarray(leaf))
    return Batch(tuple(mapped), tuple(shared), tuple(is_mapped), tree, size)


def refuse_shared_draws(traced: _jaxpr.Traced, varies: list[bool], call: str) -> None:
    """Raise where a sample draws from a key that does not differ between samples."""

    def visit(place: _jaxpr.Visit, inputs: list[bool]) -> None:
        if place.eqn.primitive.name in _DRAWS and not any(inputs):
            raise ValueError(
                f"{call}: each sample draws its own random numbers; got one key shared by all "
                f"samples at {place.line}. Pass the key as a batch argument (one key "
                'is split, an array of keys has one per sample), or say randomness="same".'
            )

    _jaxpr.follow(open_jaxpr(traced.jaxpr)[0], varies, visit)


def scan_chunks(
    step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, mapped: Any, chunk_size: int | None
) -> tuple[Any, Any]:
    """Run ``step(carry, chunk)`` over chunks of the sample axis, the last one shorter.

    Returns the last carry, and the per-sample outputs joined along the sample axis.
    """
    size = jax.tree.leaves(mapped)[0].shape[0]
    if chunk_size is None or chunk_size >= size:
        return step(carry, mapped)
    n_chunks = size // chunk_size
    full = n_chunks * chunk_size

    # A chunk takes every n-th sample: where the samples are spread over devices, each device
    # then has its part of every chunk.
    def split(x: Any) -> Any:
        rows = reshape_rows(x[:full], 1, (chunk_size, n_chunks))
        return jnp.swapaxes(rows, 0, 1)

    def join(y: Any) -> Any:
        return reshape_rows(jnp.swapaxes(y, 0, 1), 2, (full,))

    carry, out = lax.scan(step, carry, jax.tree.map(split, mapped))
    out = jax.tree.map(join, out)
    if full < size:
        carry, rest = step(carry, jax.tree.map(lambda x: x[full:], mapped))
        out = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), out, rest)
    return carry, out


def check_chunk_size(chunk_size: int | None, call: str) -> None:
    """Raise unless ``chunk_size`` is ``None`` or a positive number of samples."""
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(
            f"{call}: chunk_size is a positive number of samples; got {chunk_size}. "
            "Pass None for all samples at once."
        )
