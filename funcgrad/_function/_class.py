"""``Function``, the class that users subclass."""

from typing import Any

import jax
import jax.numpy as jnp

from funcgrad._function._arguments import split
from funcgrad._function._primitive import bind
from funcgrad._function._trace import traced


class Function:
    """A function with a derivative rule of its own; subclass it and call ``apply``.

    PyTorch: ``torch.autograd.Function``, with the same static methods.  Here the rule holds in
    reverse **and** forward mode, ``jax.linearize``, at any order, under ``jit``, ``vmap``,
    ``scan``, ``cond``, ``checkpoint`` and ``shard_map``, and costs what ``jax.custom_vjp`` does.

    - ``forward(*inputs)`` with ``setup_context(ctx, inputs, output)``, or the classic
      ``forward(ctx, *inputs)``.  Inputs are pytrees; leaves that are no arrays (numbers,
      strings, functions, ``None``) are static and arrive as they are.  A tuple is several
      outputs, anything else one.
    - ``backward(ctx, *grads)`` is given one gradient for each output and returns one for each
      input, in order, with the input's tree, shapes and dtypes, and ``None`` where there is
      none: for integer and static inputs always (that of a number is dropped).  Complex
      gradients follow JAX.
    - ``ctx.save_for_backward`` takes arrays, trees of them and ``None``; exactly these become
      residuals, back as ``ctx.saved_tensors``.  Attributes of ``ctx`` are static.
    - ``ctx.needs_input_grad``, ``ctx.set_materialize_grads(False)``,
      ``ctx.mark_non_differentiable`` and ``once_differentiable`` mean what they mean in torch,
      and are known when the program is traced.  ``ctx.mark_dirty`` is refused.
    - ``jvp(ctx, *tangents)``, where it is given, is forward mode; otherwise ``backward`` is
      transposed, for which it must be linear in the gradients.  A class with ``jvp`` alone is
      transposed for reverse mode, and must be linear in the tangents.
    - ``vmap(info, in_dims, *inputs)``, where it is given, returns the outputs and their axes;
      otherwise the rule is mapped, with ``generate_vmap_rule`` set or not.

    At higher orders ``backward`` is differentiated.  A saved input then counts as the input, a
    saved output as what ``apply`` gave, with this rule, and any other saved value as the code
    that made it.  Arrays that ``backward`` closes over are differentiated there; a derivative
    with respect to one that ``forward`` closes over is refused.

    The methods are run once for each set of shapes, dtypes and static arguments, as by
    ``jax.jit``, and again when an attribute of the class, or a name that a method itself refers
    to, is bound to something else.  A container or object changed in place is not seen: pass
    what changes as an argument.

    A checkpoint policy is asked about the operations that made the outputs and the saved
    values, and about their names; inside ``forward`` nothing else is seen.

    Example:
      >>> class Exp(fg.Function):
      ...     @staticmethod
      ...     def forward(x):
      ...         return jnp.exp(x)
      ...
      ...     @staticmethod
      ...     def setup_context(ctx, inputs, output):
      ...         ctx.save_for_backward(output)
      ...
      ...     @staticmethod
      ...     def backward(ctx, g):
      ...         (y,) = ctx.saved_tensors
      ...         return g * y
      >>> float(jax.grad(jax.jacfwd(Exp.apply))(1.0))
      2.7182818

    References:
      The PyTorch manual, "Extending torch.autograd".
    """

    forward: Any = None
    setup_context: Any = None
    backward: Any = None
    jvp: Any = None
    vmap: Any = None
    generate_vmap_rule: bool = False

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward``, with the derivative that the class gives.

        PyTorch: ``torch.autograd.Function.apply``, which takes no keywords.

        Args:
          *args: The inputs of ``forward``, without ``ctx``.
          **kwargs: More of them by name.

        Returns:
          What ``forward`` returns.

        Raises:
          TypeError: The arguments are not those of ``forward``; an array is set as an attribute
            of ``ctx``; ``ctx.mark_dirty``.  When differentiated: with respect to a value that
            ``forward`` closes over; forward mode with a ``backward`` that is not linear, or
            reverse mode with a ``jvp`` that is not; twice, if marked ``once_differentiable``.
          ValueError: When differentiated: gradients of another number, tree, shape or dtype than
            the inputs; names the class, the input and both.
          NotImplementedError: When differentiated without ``backward`` and ``jvp``.

        Example:
          >>> class Reverse(fg.Function):
          ...     @staticmethod
          ...     def forward(ctx, x, strength):
          ...         ctx.strength = strength
          ...         return x
          ...
          ...     @staticmethod
          ...     def backward(ctx, g):
          ...         return -ctx.strength * g, None
          >>> float(jax.grad(lambda x: Reverse.apply(x, strength=2.0) ** 2)(3.0))
          -12.0
        """
        if cls.forward is None:
            raise NotImplementedError(
                f"{cls.__name__}.apply: the class has a static forward; got none. Write "
                "forward(*inputs) with setup_context, or forward(ctx, *inputs)."
            )
        classic = cls.setup_context is None
        if cls.vmap is not None and (classic or cls.generate_vmap_rule):
            got = "forward with ctx" if classic else "generate_vmap_rule too"
            raise TypeError(
                f"{cls.__name__}: a static vmap goes with setup_context, and without "
                f"generate_vmap_rule; got {got}. Change one of the two."
            )
        call, arrays = split(cls.__name__, cls.forward, classic, args, kwargs)
        avals = tuple(jax.typeof(x) for x in arrays)
        needs = tuple(bool(jnp.issubdtype(aval.dtype, jnp.inexact)) for aval in avals)
        made = traced(cls, call, avals, needs)
        outputs = bind(made.rule, [*made.closed, *arrays])
        return made.forward.output.unflatten(outputs)
