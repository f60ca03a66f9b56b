"""The ``ctx`` of a rule: what forward leaves for the derivative, and nothing else."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from funcgrad._trees import keystr

# A number is what an array is when apply is called with one and nothing traces it.
_ARRAYS = jax.Array | np.ndarray | np.generic | bool | int | float | complex


@dataclasses.dataclass
class Kept:
    """What one trace of a rule has been told through ``ctx``."""

    name: str
    needs: tuple[bool, ...]
    asked: bool = False
    backward: tuple[Any, ...] = ()
    forward: tuple[Any, ...] | None = None
    non_differentiable: tuple[Any, ...] = ()
    materialize: bool = True


class Context:
    """What ``forward`` or ``setup_context`` leaves for ``backward`` and ``jvp``.

    Arrays are handed over by ``save_for_backward`` and become residuals; what is set as an
    attribute is static.  PyTorch: ``torch.autograd.function.FunctionCtx``.
    """

    _kept: Kept
    _saved: tuple[Any, ...] | None

    def __init__(self, kept: Kept, of: "Context | None" = None, saved: Any = None):
        # In backward: the attributes of the ctx ``of`` forward, and what was saved.
        self.__dict__.update({} if of is None else of.__dict__, _kept=kept, _saved=saved)

    def __setattr__(self, attribute: str, value: Any) -> None:
        name = self._kept.name
        if attribute in ("_kept", "_saved") or hasattr(type(self), attribute):
            raise AttributeError(
                f"{name}: ctx.{attribute} is part of ctx and read only; got an assignment. "
                "Choose another name."
            )
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"{name}: attributes of ctx are static; got an array for ctx.{attribute}. "
                "Call ctx.save_for_backward with it, and read it from ctx.saved_tensors."
            )
        super().__setattr__(attribute, value)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """For each input of ``forward`` whether its gradient is asked for: static."""
        self._kept.asked = True
        return self._kept.needs

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What was saved, in ``backward`` and ``jvp``."""
        if self._saved is None:
            raise RuntimeError(
                f"{self._kept.name}: ctx.saved_tensors is there in backward and jvp; got a read in "
                "forward. Use the values themselves."
            )
        return self._saved

    def save_for_backward(self, *values: Any) -> None:
        """Keep arrays, trees of them, or ``None`` for ``backward``; once, all together."""
        self._kept.backward = self._checked(values, "save_for_backward")

    def save_for_forward(self, *values: Any) -> None:
        """Keep other values for ``jvp`` than for ``backward``."""
        self._kept.forward = self._checked(values, "save_for_forward")

    def mark_non_differentiable(self, *outputs: Any) -> None:
        """Outputs through which no gradient passes; ``backward`` is given zeros for them."""
        self._kept.non_differentiable = tuple(jax.tree.leaves(outputs))

    def set_materialize_grads(self, value: bool) -> None:
        """Whether ``backward`` is given zeros, or ``None``, for an output that nobody used.

        Zeros all the same where it closes over a value that is being transformed.
        """
        self._kept.materialize = bool(value)

    def mark_dirty(self, *inputs: Any) -> None:
        """Refused: there is nothing to change in place."""
        raise TypeError(
            f"{self._kept.name}: arrays are never changed in place; got ctx.mark_dirty. Return the "
            "new value from forward as an output, and use that from there on."
        )

    def _checked(self, values: tuple[Any, ...], call: str) -> tuple[Any, ...]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(values):
            if not isinstance(leaf, _ARRAYS):
                raise TypeError(
                    f"{self._kept.name}: ctx.{call} takes arrays, trees of arrays and None; got "
                    f"{type(leaf).__name__} at {keystr(path)}. Set it as an attribute of ctx."
                )
        return values


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a ``backward`` that must not be differentiated itself.

    A second derivative raises instead of being wrong.  PyTorch:
    ``torch.autograd.function.once_differentiable``.

    Args:
      backward: The static method ``backward(ctx, *grads)`` of a ``Function``.

    Returns:
      The same function, marked.

    Raises:
      TypeError: When differentiated twice.

    Example:
      >>> class Square(fg.Function):
      ...     @staticmethod
      ...     def forward(ctx, x):
      ...         ctx.save_for_backward(x)
      ...         return x * x
      ...
      ...     @staticmethod
      ...     @fg.once_differentiable
      ...     def backward(ctx, g):
      ...         return 2 * g * ctx.saved_tensors[0]
      >>> float(jax.grad(Square.apply)(3.0))
      6.0
      >>> jax.grad(jax.grad(Square.apply))(3.0)
      Traceback (most recent call last):
      TypeError: Square: backward is marked once_differentiable; got ...
    """
    marked: Any = backward.__func__ if isinstance(backward, staticmethod) else backward
    marked._once_differentiable = True
    return backward
