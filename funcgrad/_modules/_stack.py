"""Models of one structure, their variables stacked for ``vmap``."""

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from funcgrad._modules._attributes import attributes, refuse_held, refuse_refs, same
from funcgrad._modules._names import is_nnx_module, named

CALL = "stack_modules"


class Stacked(NamedTuple):
    """The variables of several models, each leaf with the models as its first axis.

    ``functional_call(model, stacked, ...)`` takes it under ``vmap`` as it is.
    """

    params: Any
    state: Any


def stack_modules(models: Sequence[Any], /) -> Stacked:
    """Stack the variables of models of the same structure, to run them all by ``vmap``.

    PyTorch: ``torch.func.stack_module_state``.  Each member keeps its own state: statistics,
    and the keys of dropout, which differ as far as the models were made with different seeds.

    Args:
      models: NNX modules; or of a Linen module the variables of several ``init``.

    Returns:
      ``Stacked(params, state)``: of NNX modules two ``nnx.State``; of Linen variables the
      collection ``params`` and a dict of the others.

    Raises:
      ValueError: No model, or one that differs from the first: in a module's class, an
        attribute, a tied weight, a name, a shape or a dtype; names the path.  Or a model has
        a function that holds the model, or a ``jax.Ref``, as ``functional_call`` refuses it.
      TypeError: A model is neither an NNX module nor Linen variables.

    Example:
      >>> from flax import nnx
      >>> models = [nnx.Linear(2, 1, rngs=nnx.Rngs(seed)) for seed in range(3)]
      >>> stacked = fg.stack_modules(models)
      >>> call = lambda variables, x: fg.functional_call(models[0], variables, x).output
      >>> x = jnp.ones((5, 2))
      >>> outputs = jax.vmap(call, (0, None))(stacked, x)
      >>> outputs.shape
      (3, 5, 1)
      >>> bool(jnp.allclose(outputs[1], models[1](x)))
      True

    References:
      torch.func.stack_module_state.
    """
    models = list(models)
    if not models:
        raise ValueError(f"{CALL}: there is a model to stack; got none.")
    if all(map(is_nnx_module, models)):
        return _stack_nnx(models)
    if all(isinstance(model, Mapping) for model in models):
        return _stack_linen(models)
    kinds = sorted({type(model).__name__ for model in models})
    raise TypeError(
        f"{CALL}: models are NNX modules, or variables of a Linen module; got "
        f"{', '.join(kinds)}. Other trees are stacked by jax.tree.map."
    )


def _stack_nnx(models: list[Any]) -> Stacked:
    from flax import nnx

    for model in models:
        refuse_refs(CALL, model)
        refuse_held(CALL, model)
    parts = [attributes(model) for model in models]
    for i, other in enumerate(parts[1:], 1):
        for path in sorted({*parts[0], *other}, key=_depth):
            ours, theirs = parts[0].get(path, _NOTHING), other.get(path, _NOTHING)
            if not same(ours, theirs):
                _refuse(i, path, _word(theirs), _word(ours))
    split = [nnx.split(model, nnx.Param, ...)[1:] for model in models]
    return Stacked(*map(_stack, zip(*split, strict=True)))


def _stack_linen(models: list[Any]) -> Stacked:
    whole = [model if "params" in model else {"params": model} for model in models]
    stacked = _stack([{k: _plain(v) for k, v in model.items()} for model in whole])
    return Stacked(stacked["params"], {k: v for k, v in stacked.items() if k != "params"})


def _stack(trees: Sequence[Any]) -> Any:
    first = named(trees[0], CALL)
    for i, tree in enumerate(trees[1:], 1):
        leaves = named(tree, CALL)
        for name in dict.fromkeys([*first, *leaves]):
            ours, theirs = (_leaf_word(x.get(name)) for x in (first, leaves))
            if ours != theirs:
                _refuse(i, name, theirs, ours)
    columns = zip(*map(jax.tree.leaves, trees), strict=True)
    return jax.tree.unflatten(jax.tree.structure(trees[0]), map(jnp.stack, columns))


def _refuse(index: int, path: str, got: str, wanted: str) -> None:
    raise ValueError(
        f"{CALL}: models have one structure; got {got} at {path!r} in models[{index}], and "
        f"{wanted} in models[0]. Models that differ are called one by one."
    )


_NOTHING = types.SimpleNamespace()


def _depth(path: str) -> tuple[int, str]:
    """Order of paths that names a module before what is in it."""
    return (len(path.split(".")) if path else 0), path


def _word(part: Any) -> str:
    if part is _NOTHING:
        return "nothing"
    if callable(part):
        return f"{getattr(part, '__name__', type(part).__name__)}"
    return part if isinstance(part, str) else repr(part)


def _leaf_word(leaf: Any) -> str:
    avals = map(jax.typeof, jax.tree.leaves(leaf))  # of Flax's boxes: what is in them
    return ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in avals) or "nothing"


def _plain(tree: Any) -> Any:
    return {k: _plain(v) for k, v in tree.items()} if isinstance(tree, Mapping) else tree
