"""Store what is kept for the backward pass in another form."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad._compat import eval_jaxpr, zeros_of
from funcgrad._jaxpr import Traced, trace
from funcgrad._remat._inputs import split_arrays, unchanged
from funcgrad._remat._saved import argument_names, residuals
from funcgrad._remat._values import SavedTensor


def saved_tensor_hooks(
    fun: Callable[..., Any],
    pack: Callable[[Any], Any],
    unpack: Callable[[Any], Any],
    *,
    where: Callable[[SavedTensor], bool] | None = None,
) -> Callable[..., Any]:
    """Keep ``pack(x)`` in the place of each ``x`` that ``fun`` keeps for its backward pass.

    Ready pairs: ``fg.packs.bfloat16``, ``int8`` and ``host``.  The values of ``fun`` stay
    exact; its gradients are computed from what ``unpack`` gives.  Only floating and complex
    values are packed, and by default only computed ones: an argument is kept by its owner
    anyway, so that a packed copy of it is one more.  PyTorch packs leaves too, which is
    ``where=lambda saved: True`` here.

    Works under ``jit``, ``vmap``, ``scan``, ``checkpoint`` and ``shard_map``.  What a loop
    within ``fun`` keeps is packed when the loop is over; to pack piece by piece wrap the
    loop's body.  A second derivative goes through ``pack`` and ``unpack``, as in
    PyTorch, and is refused where ``pack`` gives integers.
    Forward mode is refused by ``jax.custom_vjp``: it keeps nothing.

    PyTorch: ``torch.autograd.graph.saved_tensors_hooks(pack, unpack)``.

    Args:
      fun: Function of arrays in pytrees; other arguments are passed as they are.
      pack: From an array to a pytree of arrays.
      unpack: From that to an array of the first one's shape, floating or complex as that is;
        it is cast to its dtype.
      where: Of the values that ``fg.saved_tensors`` lists, those to pack: a predicate of a
        ``SavedTensor``.

    Returns:
      A function like ``fun``.

    Raises:
      TypeError: ``unpack`` gives another shape, or integers; or forward mode.
      ValueError: ``fun`` changes an argument in place, as NNX modules that draw random numbers do.
      NotImplementedError: a second derivative through a ``pack`` that gives integers.

    Example:
      >>> cubes = lambda a: jnp.sum(jnp.sin(a) ** 3)
      >>> small = fg.saved_tensor_hooks(cubes, *fg.packs.bfloat16)
      >>> a = jnp.ones((2, 64))
      >>> fg.saved_tensors(cubes)(a).bytes, fg.saved_tensors(small)(a).bytes
      (1024, 512)
      >>> tenfold = fg.saved_tensor_hooks(lambda a: a**2, lambda x: 10 * x, lambda x: x)
      >>> jax.vmap(jax.grad(tenfold))(jnp.array([1.0, 2.0, 3.0]))
      Array([20., 40., 60.], dtype=float32)
    """

    @functools.wraps(fun)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        arrays, rebuild = split_arrays(args, kwargs)

        traced = trace(
            lambda arrays: unchanged(fun, *rebuild(arrays), "saved_tensor_hooks"), arrays
        )
        names = ("",) * len(traced.jaxpr.consts) + argument_names(fun, args, kwargs, arrays)
        flat = functools.partial(_run, traced)
        call = jax.custom_vjp(flat)
        call.defvjp(
            functools.partial(_forward, flat, names, pack, unpack, where or _is_computed),
            lambda saved, cotangents: saved(*cotangents),
            symbolic_zeros=True,
        )
        return traced.unflatten(list(call(*traced.jaxpr.consts, *arrays)))

    return hooked


def _is_computed(saved: SavedTensor) -> bool:
    return saved.kind == "computed"


def _run(traced: Traced, *inputs: Any) -> Any:
    count = len(traced.jaxpr.consts)
    return eval_jaxpr(traced.jaxpr.jaxpr, inputs[:count], *inputs[count:])


def _forward(
    flat: Any, names: tuple[str, ...], pack: Any, unpack: Any, where: Any, *primals: Any
) -> Any:
    """Outputs, and the function from their cotangents to the inputs', over packed arrays."""
    inputs = [primal.value for primal in primals]
    moving = [i for i, p in enumerate(primals) if p.perturbed and _is_float(p.value)]

    def with_pullback(inputs: Sequence[Any]) -> Any:
        def of_moving(*some: Any) -> Any:
            full = list(inputs)
            for place, value in zip(moving, some, strict=True):
                full[place] = value
            return flat(*full)

        return jax.vjp(of_moving, *(inputs[i] for i in moving))

    traced = trace(with_pullback, inputs)
    leaves = eval_jaxpr(traced.jaxpr.jaxpr, traced.jaxpr.consts, *inputs)
    outs, pull_tree = jax.tree.unflatten(traced.out_tree, range(len(leaves)))
    count = len(outs)
    pull_tree = jax.tree.structure(pull_tree)
    outs, kept = leaves[:count], leaves[count:]
    records = residuals(traced, names, start=count)
    chosen = [_is_float(x) and bool(where(r)) for x, r in zip(kept, records, strict=True)]
    boxes = [_packed(pack, x) if yes else x for x, yes in zip(kept, chosen, strict=True)]
    types = [(x.shape, x.dtype) for x in kept]

    def pull(boxes: Sequence[Any], *cotangents: Any) -> tuple[Any, ...]:
        kept = [
            _unpacked(unpack, box, *kind) if yes else box
            for box, yes, kind in zip(boxes, chosen, types, strict=True)
        ]
        grads = jax.tree.unflatten(pull_tree, kept)([zeros_of(ct) for ct in cotangents])
        full: list[Any] = [None] * len(primals)
        for place, grad in zip(moving, grads, strict=True):
            full[place] = grad
        return tuple(full)

    return outs, jax.tree_util.Partial(pull, boxes)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _packed(pack: Callable[[Any], Any], x: Any) -> Any:
    """``pack(x)``, which refuses to be differentiated where that would lose a dependence."""
    traced = trace(lambda x: pack(x), x)  # a new function: traces of the same one are remembered
    lost = [
        aval.dtype for aval in traced.jaxpr.out_avals if not jnp.issubdtype(aval.dtype, jnp.inexact)
    ]
    if lost:
        x = _only_once(x, str(lost[0]))
    return traced.unflatten(eval_jaxpr(traced.jaxpr.jaxpr, traced.jaxpr.consts, x))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _only_once(x: Any, lost: str) -> Any:
    return x


@_only_once.defjvp
def _(lost: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "saved_tensor_hooks: a second derivative goes through pack and unpack; got a "
        f"pack that gives {lost}, which has no derivative. Pack into a floating type, "
        "or take second derivatives of the function without hooks."
    )


def _unpacked(unpack: Callable[[Any], Any], box: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    # Without the barrier a compiler sees unpack(pack(x)) and may keep x.  One for each leaf:
    # what goes through one together varies over the same axes of a shard_map.
    x = unpack(jax.tree.map(lax.optimization_barrier, box))
    if np.shape(x) != shape:
        raise TypeError(
            "saved_tensor_hooks: unpack(pack(x)) has the shape of x; "
            f"got {np.shape(x)} for {shape}."
        )
    kind = jnp.complexfloating if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.floating
    if not jnp.issubdtype(jax.typeof(x).dtype, kind):
        raise TypeError(
            "saved_tensor_hooks: unpack(pack(x)) is of floating type, or complex, as x is; "
            f"got {jax.typeof(x).dtype} for {dtype}. Convert it in unpack."
        )
    return jnp.asarray(x, dtype)
