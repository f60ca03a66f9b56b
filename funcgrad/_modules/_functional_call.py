"""A Flax module called with variables from outside."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._modules._attributes import attributes, refuse_held, refuse_refs, same
from funcgrad._modules._names import (
    is_linen_module,
    is_nnx_module,
    named,
    nested,
    refuse_names,
    refuse_shapes,
)

CALL = "functional_call"


class Called(NamedTuple):
    """What a call gave: the module's output, and its state after the call."""

    output: Any
    state: Any
    """All variables but the parameters: batch statistics, counters and keys of dropout.  It can
    be given to the next call as it is; empty for a module without state."""


def functional_call(module: Any, variables: Any, /, *args: Any, **kwargs: Any) -> Called:
    """Call a Flax module, Linen or NNX, with parameters and state from outside.

    A function of all that goes into it: the module is not changed, and what the call changes
    comes back as ``state``.  Works under ``jit``, ``grad``, ``vmap`` and ``scan``.
    PyTorch: ``torch.func.functional_call(module, params, args)``, which writes new buffers
    into the dict that it was given.

    ================  =====================================================================
    parameters        all of them, none left out, none unknown, each in its shape; any dtype
    state             NNX: what is not given is the module's own.  Linen: all of it
    weights tied      an NNX ``Param`` used in two places has one value, given under either
                      name; two values are refused (torch: ``tie_weights=True``)
    names             nested, as Flax has them, or dotted: ``{"layers.0.kernel": ...}``
    random numbers    NNX: keys and counts are state.  Linen: ``rngs={"dropout": key}``
    values sown       do not come back; see ``fg.capture``.  Of a Linen collection that ``init``
                      returns: as state, of the last call alone
    ================  =====================================================================

    Args:
      module: A Linen module, or an NNX module with its values.
      variables: Parameters, or a tuple ``(params, state)``, such as ``stack_modules`` returns;
        or all in one tree: the variables of a Linen ``init``, an ``nnx.state``.
      args: What the module is called with.
      kwargs: Likewise; of Linen's ``apply`` also ``rngs`` and ``method``.

    Returns:
      ``Called(output, state)``, whether there is state or not.

    Raises:
      ValueError: A name is missing, unexpected or given twice, or a shape differs.  An NNX call
        changes a parameter, or an attribute that is no variable; or an attribute is a function
        that holds the module, whose own values it would use; or a variable is a ``jax.Ref``.
      TypeError: ``module`` is no Flax module; ``variables`` have no names; ``mutable`` is given.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> params = {"kernel": jnp.array([[2.0], [3.0]]), "bias": jnp.array([1.0])}
      >>> fg.functional_call(model, params, jnp.ones(2)).output
      Array([6.], dtype=float32)
      >>> loss = lambda params, x: fg.functional_call(model, params, x).output.sum()
      >>> jax.grad(loss)(params, jnp.array([5.0, 7.0]))["kernel"]
      Array([[5.],
             [7.]], dtype=float32)
      >>> fg.functional_call(model, {"kernal": jnp.ones((2, 1))}, jnp.ones(2))
      Traceback (most recent call last):
      ...
      ValueError: functional_call: every variable of the module has a value, and every value a
      place; got missing 'bias'; missing 'kernel'; unexpected 'kernal' (near names: kernel).

    References:
      torch.func.functional_call.
    """
    if is_linen_module(module):
        return _call_linen(module, variables, args, kwargs)
    if is_nnx_module(module):
        return _call_nnx(module, variables, args, kwargs)
    raise TypeError(
        f"{CALL}: the module is one of Flax, Linen or NNX; got {type(module).__name__}. A module "
        "that is a tree of its own parameters, as Equinox has them, is called as it is."
    )


def _call_nnx(module: Any, variables: Any, args: tuple[Any, ...], kwargs: Any) -> Called:
    from flax import nnx

    refuse_refs(CALL, module)
    refuse_held(CALL, module)
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    wanted, state = named(params, CALL), named(rest, CALL)
    trees = variables if isinstance(variables, tuple) else (variables,)
    given = _arrays(_untied(module, _together(trees)))
    known = {**wanted, **state}
    refuse_names(CALL, wanted.keys() - given.keys(), given.keys() - known.keys(), known)
    refuse_shapes(CALL, given, known)
    put = _filled(params, given), _filled(rest, {**state, **given})
    model = nnx.merge(graph, *put, copy=True)
    made_with = attributes(model)
    output = model(*args, **kwargs)
    now = attributes(model)
    for name in made_with.keys() & now.keys():
        values = made_with[name], now[name]
        if not (same(*values) or any(isinstance(x, type) for x in values)):
            raise ValueError(
                f"{CALL}: a call changes variables alone, which come back; got {values[1]!r} for "
                f"{values[0]!r} at {name!r}. Make it an nnx.Variable."
            )
    changed = _changed(put[0], nnx.state(model, nnx.Param))
    if changed:
        raise ValueError(
            f"{CALL}: a call leaves the parameters as they are; got a new value of {changed!r}. "
            "Make what a call changes a variable of another kind than nnx.Param."
        )
    # Values sown in the call stand under names of their own.
    before = {path for path, _ in nnx.to_flat_state(rest)}
    after = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Param)))
    return Called(output, nnx.from_flat_state({p: v for p, v in after if p in before}))


def _call_linen(module: Any, variables: Any, args: tuple[Any, ...], kwargs: Any) -> Called:
    import flax.linen as nn

    if "mutable" in kwargs:
        raise TypeError(
            f"{CALL}: all state is mutable, and comes back; got mutable={kwargs['mutable']!r}. "
            "Leave it out, or call module.apply."
        )
    first, *others = variables if isinstance(variables, tuple) else (variables,)
    is_whole = any(name.partition(".")[0] == "params" for name in named(first, CALL))
    given = _arrays(_together((first if is_whole else {"params": first}, *others)))
    like = _linen_variables(module, args, kwargs)
    known = nn.meta.unbox(named(like, CALL))
    refuse_names(CALL, known.keys() - given.keys(), given.keys() - known.keys(), known)
    # How long a cache is follows from the call that made it.
    sized = {name: x for name, x in given.items() if not name.startswith("cache.")}
    refuse_shapes(CALL, nn.meta.unbox(sized), known)
    mutable = [collection for collection in like if collection != "params"]
    before = nested(given, like)
    output, state = module.apply(before, *args, mutable=mutable, **kwargs)
    return Called(output, _last_sown(before, dict(state)))


def _linen_variables(module: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The variables that a Linen module would make for this call, as shapes."""
    rngs, rest = kwargs.get("rngs"), {k: v for k, v in kwargs.items() if k != "rngs"}
    more = rngs if isinstance(rngs, Mapping) else {}
    init = lambda key: module.init({**more, "params": key}, *args, **rest)
    return jax.eval_shape(init, jax.random.key(0))


def _last_sown(before: Any, after: Any) -> Any:
    """State in which a tuple that grew, as by ``sow``, has only what this call put there."""
    if isinstance(after, Mapping) and isinstance(before, Mapping):
        return {key: _last_sown(before.get(key), x) for key, x in after.items()}
    if isinstance(after, tuple) and isinstance(before, tuple) and len(after) > len(before):
        return after[len(before) :]
    return after


def _together(trees: tuple[Any, ...]) -> dict[str, Any]:
    """All leaves of several trees by name."""
    found: dict[str, Any] = {}
    for tree in trees:
        leaves = named(tree, CALL)
        if twice := sorted(found.keys() & leaves.keys()):
            raise ValueError(
                f"{CALL}: each name stands once; got {twice[0]!r} in two trees. Leave one out."
            )
        found.update(leaves)
    return found


def _arrays(leaves: Mapping[str, Any]) -> dict[str, Any]:
    is_number = lambda x: isinstance(x, int | float | complex | np.ndarray | np.generic)
    return {name: jnp.asarray(x) if is_number(x) else x for name, x in leaves.items()}


def _untied(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Each value under the first of the names that its variable, or its module, has."""
    from flax import nnx

    first: dict[tuple[str, ...], tuple[str, ...]] = {}
    for paths in nnx.find_duplicates(module):
        head, *others = (tuple(map(str, path)) for path in paths)
        first.update(dict.fromkeys(others, head))

    def own_path(path: tuple[str, ...]) -> tuple[str, ...]:
        for n in range(len(path), 0, -1):
            if path[:n] in first:
                return own_path((*first[path[:n]], *path[n:]))
        return path

    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in given.items():
        own = ".".join(own_path(tuple(name.split("."))))
        if own in found and found[own] is not value:
            raise ValueError(
                f"{CALL}: a variable in two places has one value; got two, for {names[own]!r} and "
                f"{name!r}. Give one of them."
            )
        found[own], names[own] = value, name
    return found


def _filled(state: Any, values: Mapping[str, Any]) -> Any:
    """An NNX state with the values of these names."""
    from flax import nnx

    filled = {}
    for path, leaf in nnx.to_flat_state(state):
        is_variable = isinstance(leaf, nnx.Variable)  # else an array that is an attribute
        like = leaf.get_raw_value() if is_variable else leaf
        value = nested(values, like, tuple(map(str, path)))
        filled[path] = leaf.replace(value) if is_variable else value
    return nnx.from_flat_state(filled)


def _changed(before: Any, after: Any) -> str | None:
    """The name of the first leaf that is another object."""
    old, new = named(before, CALL), named(after, CALL)
    return next((name for name in old if new.get(name) is not old[name]), None)
