"""A chain of functions, computed again segment by segment."""

from collections.abc import Callable, Sequence
from typing import Any

from funcgrad._remat._checkpoint import checkpoint


def checkpoint_sequential(
    funs: Sequence[Callable[[Any], Any]],
    segments: int,
    *,
    policy: Any = None,
) -> Callable[[Any], Any]:
    """Compose ``funs``, keeping only what goes into each segment of them.

    Each of the ``segments`` has ``len(funs) // segments`` functions, and the last one the
    rest.  All but the last are checkpointed: the backward pass begins with the last, so its
    values are needed at once.  Five functions in two segments run 0 1 2 3 4 and then 0 1
    again.  About ``sqrt(len(funs))`` segments keep the least.

    PyTorch: ``torch.utils.checkpoint.checkpoint_sequential(funs, segments, x,
    use_reentrant=False)``.

    Args:
      funs: Functions of one argument, a pytree of arrays; each takes what the one before it
        returns.
      segments: Number of segments, from 1 to ``len(funs)``.
      policy: What a checkpointed segment keeps within, from ``fg.policies``; nothing when
        ``None``.  Its words must mark a value in each of them.

    Returns:
      A function of the first function's argument.

    Raises:
      ValueError: there are no functions, or fewer than segments; or, at the call, a word of
        the policy marks nothing in a checkpointed segment.

    Example:
      >>> layers = [jnp.sin, jnp.cos, jnp.tanh, jnp.sin]
      >>> jax.grad(fg.checkpoint_sequential(layers, 2))(0.5)
      Array(-0.152, dtype=float32, weak_type=True)

    References:
      Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", 2016.
    """
    if not 1 <= segments <= len(funs):
        raise ValueError(
            f"checkpoint_sequential: each segment has a function; got {segments} segments for "
            f"{len(funs)} functions. Give a number from 1 to {len(funs)}."
        )
    size = len(funs) // segments
    starts = [size * i for i in range(segments)]
    parts = [_chain(funs[start : start + size]) for start in starts[:-1]]
    again = [checkpoint(part, policy=policy) for part in parts]
    return _chain([*again, *funs[starts[-1] :]])


def _chain(funs: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def chained(x: Any) -> Any:
        for fun in funs:
            x = fun(x)
        return x

    return chained
