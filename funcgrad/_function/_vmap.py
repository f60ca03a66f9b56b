"""A class's own rule for ``vmap``, with torch's signature."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from funcgrad._function._arguments import Call
from funcgrad._function._forward import Output
from funcgrad._trees import broadcast_prefix


class VmapInfo(NamedTuple):
    """What the static ``vmap`` is told: the number of samples; randomness is always by key."""

    batch_size: int
    randomness: str = "error"


@dataclasses.dataclass(frozen=True, eq=False)
class VmapRule:
    """Calls ``vmap(info, in_dims, *inputs)``, which returns the outputs and their axes."""

    owner: Callable[[], Any]
    call: Call
    output: Output

    def __call__(self, axis: Any, operands: Sequence[Any], axes: Sequence[Any]) -> list[Any]:
        """The outputs, samples first."""
        cls, call = self.owner(), self.call
        if cls is None:
            raise RuntimeError(
                f"{call.name}.vmap: the class is alive; got one that is collected. Keep it."
            )
        n_args = sum(leaf is None for leaf in call.static)
        inputs = call.inputs(operands[len(operands) - n_args :])
        in_dims = call.gradients(axes[len(axes) - n_args :])
        try:
            output, out_dims = call.run(cls.vmap, inputs, VmapInfo(axis.size), in_dims)
        except ValueError as error:
            if "unpack" not in str(error):
                raise
            raise self._refusal("another value") from error
        made = Output(output)
        if made.tree != self.output.tree:
            raise self._refusal(f"{made.tree} for {self.output.tree}")
        leaves = jax.tree.leaves(output)
        dims = broadcast_prefix(out_dims, output, f"{call.name}.vmap")
        return [
            jnp.broadcast_to(x, (axis.size, *jnp.shape(x))) if d is None else jnp.moveaxis(x, d, 0)
            for x, d, static in zip(leaves, dims, self.output.static, strict=True)
            if static is None
        ]

    def _refusal(self, got: str) -> ValueError:
        return ValueError(
            f"{self.call.name}.vmap: returns (output, out_dims), the output a tree as that of "
            f"forward; got {got}. Return an axis, or None, for each output."
        )
