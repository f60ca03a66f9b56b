"""Four operations that are each other's duals: copy and reduce, split and gather.

JAX has the first pair under types only.  For the second it has a cheap dual of ``gather`` there,
while a slice goes back as a sum of padded parts, and without types neither is right.
"""

import math
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from funcgrad._compat import is_transposing_shard_map, make_varying


def _copy(x: Any, names: Any, axis: int, typed: bool) -> Any:
    return x


def _reduce(x: Any, names: Any, axis: int, typed: bool) -> Any:
    return lax.psum(x, names)


def _split(x: Any, names: Any, axis: int, typed: bool) -> Any:
    size = x.shape[axis] // lax.axis_size(names)
    x = make_varying(x, frozenset(names)) if typed else x
    return lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, axis)


def _gather(x: Any, names: Any, axis: int, typed: bool) -> Any:
    return lax.all_gather(x, names, axis=axis, tiled=True, to="invarying" if typed else "varying")


_RUN = {"copy": _copy, "reduce": _reduce, "split": _split, "gather": _gather}
_DUAL = {"copy": "reduce", "reduce": "copy", "split": "gather", "gather": "split"}
_PRIMITIVE: dict[str, Any] = {kind: jex.Primitive(f"collective_{kind}") for kind in _RUN}


def bind(kind: str, x: Any, names: tuple[str, ...], axis: int = 0, typed: bool = False) -> Any:
    """One of the four on one array; ``typed`` where types say what differs between devices."""
    return _PRIMITIVE[kind].bind(x, names=names, axis=axis, typed=typed)


def _define(kind: str, primitive: Any) -> None:
    run = _RUN[kind]

    def types(x: Any, **params: Any) -> Any:
        return jax.make_jaxpr(lambda x: run(x, **params))(x).out_avals[0]

    def transpose(cotangent: Any, x: Any, *, names: Any, axis: int, typed: bool) -> Any:
        if not typed and math.prod(map(lax.axis_size, names)) > 1 and is_transposing_shard_map():
            raise ValueError(
                f"{kind}: under shard_map(check_vma=False) gradients are taken inside of it, since "
                "around it JAX divides that of a result by the number of devices; got a gradient "
                "taken around it. Use check_vma=True, or call jax.grad inside."
            )
        return [bind(_DUAL[kind], cotangent, names, axis, typed)]

    def batch(args: Any, axes: Any, *, names: Any, axis: int, typed: bool) -> Any:
        (x,), (at,) = args, axes
        x = jax.numpy.moveaxis(x, at, 0)
        return bind(kind, x, names, axis + 1, typed), 0

    primitive.def_impl(run)
    primitive.def_abstract_eval(types)
    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))


for _kind, _primitive in _PRIMITIVE.items():
    _define(_kind, _primitive)
