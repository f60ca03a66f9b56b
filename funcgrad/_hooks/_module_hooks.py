"""Hooks on the modules of a Flax model, without editing it."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from funcgrad._hooks._linen import hook_function
from funcgrad._hooks._module_call import ModuleHook
from funcgrad._hooks._nnx import hook_model
from funcgrad._hooks._pass_through import batch_first
from funcgrad._hooks._where import Where, choices


def module_hooks(
    model: Any,
    where: Where,
    *,
    forward_pre: Callable[[str, Any], Any] | None = None,
    forward: Callable[[str, Any, Any], Any] | None = None,
    backward_pre: Callable[[str, Any], Any] | None = None,
    backward: Callable[[str, Any, Any], Any] | None = None,
) -> Any:
    """Return ``model`` with hooks on the modules that ``where`` chooses.

    An NNX model is given itself, and a copy of it comes back; of a Linen model its ``apply``,
    or any function that calls Linen modules, and a function comes back.  What was given is
    unchanged, and nothing is registered anywhere.  More hooks come by calling ``module_hooks``
    on the result; on one module they run in the order of these calls.

    For each call of a chosen module: ``forward_pre``, the module, ``forward``; and on the way
    back ``backward_pre`` with the cotangent of what ``forward`` returned, the module's
    backward, ``backward`` with the cotangents of what ``forward_pre`` returned.  A hook that
    returns ``None`` changes nothing.

    * ``forward_pre(path, args)`` returns new positional arguments, a tuple or a single one.
    * ``forward(path, args, output)`` returns a new output.
    * ``backward_pre(path, grad_output)`` returns a new cotangent of the output, which the
      module's own backward then starts from: parameters' gradients change with it.
    * ``backward(path, grad_input, grad_output)`` returns new cotangents of the positional
      arguments, a tuple or a single one; those of parameters do not change.

    ``path`` is the module's, such as ``"layers/0"`` or ``"Dense_0"``, ``"."`` for the outermost
    one.  Cotangents have the structure of the arguments and of the output, with ``None`` for
    what is not a floating array; keyword arguments have no hooks.  Where no input is
    differentiated, as in a first layer, ``backward`` is called with ``None`` for each of them.

    Hooks are traced, perhaps more than once: print and log with ``jax.debug.callback``.  With
    ``backward``, the modules are traced as well: what they branch on in Python is no value.
    Modules inside ``scan``, ``remat``, ``vmap`` and ``jit`` are hooked there, once an
    iteration; a module that is itself lifted (``nn.scan(Layer)``) is hooked as one call.

    PyTorch: ``register_forward_pre_hook``, ``register_forward_hook``,
    ``register_full_backward_pre_hook``, ``register_full_backward_hook``.

    Args:
      model: An NNX module, or a function that calls Linen modules.
      where: A pattern over paths, such as ``"layers/*"``, a class of modules, several of
        these, or a function of (path, module).
      forward_pre: Called before the module.
      forward: Called after it.
      backward_pre: Called before its backward.
      backward: Called after its backward.

    Returns:
      A model or a function, used like the one given.

    Raises:
      TypeError: ``model`` is a Linen module, no hook is given, or ``where`` is something else.
      ValueError: ``where`` chooses no module of an NNX model, or none that the function has
        called (raised when it is called); lists the paths most like it.  A backward hook
        returns another structure, shape or dtype than it was given.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(1, 1, kernel_init=nnx.initializers.constant(2), rngs=nnx.Rngs(0))
      >>> hooked = fg.module_hooks(
      ...     model,
      ...     nnx.Linear,
      ...     forward_pre=lambda path, args: 10 * args[0],
      ...     forward=lambda path, args, output: output + 1,
      ... )
      >>> hooked(jnp.array([3.0])), model(jnp.array([3.0]))
      (Array([61.], dtype=float32), Array([6.], dtype=float32))
    """
    if forward_pre is forward is backward_pre is backward is None:
        raise TypeError(
            "module_hooks: at least one hook; got none. Give forward_pre, forward, "
            "backward_pre or backward."
        )
    hook = ModuleHook(choices(where, "module_hooks"), forward_pre, forward, backward_pre, backward)
    return _hooked(model, hook, "module_hooks")


def name_outputs(model: Any, where: Where = "*") -> Any:
    """Return ``model`` with each chosen module's output named by the module's path.

    The names are those of ``jax.ad_checkpoint.checkpoint_name``: ``fg.capture`` returns the
    values that bear them, and checkpoint policies save them.  An output of several arrays bears
    the name on each of them.  Of a module inside ``vmap``, samples come first.

    PyTorch: ``register_forward_hook`` on each module, to store what it gives.

    Args:
      model: An NNX module, or a function that calls Linen modules, as for
        ``fg.module_hooks``.
      where: Which modules, as there; all by default.

    Returns:
      A model or a function, used like the one given.

    Raises:
      TypeError: as ``fg.module_hooks``.
      ValueError: as ``fg.module_hooks``.

    Example:
      >>> import flax.linen as nn
      >>> model = nn.Sequential([nn.Dense(3), nn.tanh, nn.Dense(1)])
      >>> params = model.init(jax.random.key(0), jnp.ones(2))
      >>> found = fg.capture(fg.name_outputs(model.apply))(params, jnp.ones(2))
      >>> jax.tree.map(jnp.shape, found.values)
      {'.': (1,), 'layers_0': (3,), 'layers_2': (1,)}
    """
    # So that the samples of a module inside `vmap` are always found along the same axis.
    name = lambda path, args, output: checkpoint_name(batch_first(output), path)
    hook = ModuleHook(choices(where, "name_outputs"), forward=name)
    return _hooked(model, hook, "name_outputs")


def _hooked(model: Any, hook: ModuleHook, call: str) -> Any:
    if isinstance(model, nnx.Module):
        return hook_model(model, hook, call)
    if isinstance(model, nn.Module):
        raise TypeError(
            f"{call}: a Linen model runs through its apply; got the module "
            f"{type(model).__name__}. Give model.apply."
        )
    if not callable(model):
        raise TypeError(
            f"{call}: model is an NNX module or a function that calls Linen modules; got "
            f"{type(model).__name__}."
        )
    return hook_function(model, hook, call)
