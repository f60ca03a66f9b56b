"""The only module that knows JAX versions.

Oldest supported: 0.10.2.  Newest tried: 0.12.0.  Everything here is public API
(``jax``, ``jax.core``, ``jax.extend``); what differs is the form of the data.
"""

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.extend.core as jex
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

if TYPE_CHECKING:
    # The declared types lack what every value has, such as the shape of a variable.
    ClosedJaxpr: TypeAlias = Any
    Jaxpr: TypeAlias = Any
    JaxprEqn: TypeAlias = Any
    Primitive: TypeAlias = Any
else:
    ClosedJaxpr = jex.ClosedJaxpr
    Jaxpr = jex.Jaxpr
    JaxprEqn = jex.JaxprEqn
    Primitive = jex.Primitive
Literal: TypeAlias = jex.Literal
primitives = jex.primitives

Tracer = jax.core.Tracer
enable_x64 = jax.enable_x64
eval_jaxpr = jax.core.eval_jaxpr


def is_transforming() -> bool:
    """Whether a transformation is running here, so that values may be tracers."""
    now = jex.get_opaque_trace_state()
    with jax.core.eval_context():
        return now != jex.get_opaque_trace_state()


def open_jaxpr(body: Any) -> tuple[Jaxpr, list[Any]]:
    """The equations and the constants of a body, closed or open.

    0.10 has two classes, ``Jaxpr`` and ``ClosedJaxpr``; from 0.12 there is one.
    """
    return body.jaxpr if hasattr(body, "jaxpr") else body, list(getattr(body, "consts", ()))


def is_body(param: Any) -> bool:
    """Whether an equation's parameter is a nested program."""
    return isinstance(param, (jex.Jaxpr, jex.ClosedJaxpr))


def scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """Numbers of constants and of carried values of a ``scan`` equation.

    0.10 states them; 0.12 gives the trees of (constants, carry, scanned inputs).
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def varying_axes(tree: Any) -> frozenset[str]:
    """Mesh axes, inside ``shard_map``, over which some leaf differs between devices."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(tree):
        manual = getattr(jax.typeof(leaf), "manual_axis_type", None)
        if manual is not None:
            axes |= manual.varying
    return axes


def make_varying(tree: Any, axes: frozenset[str]) -> Any:
    """Each leaf as a value that differs over ``axes``: its gradient is then not reduced."""

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree) if axes else tree


def manual_axes() -> tuple[tuple[str, ...], bool]:
    """The mesh axes of the ``shard_map`` around, and whether types say what varies over them."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(mesh.manual_axes)
    places = [jax.lax.axis_index(axis) for axis in axes]
    for axis, place in zip(axes, places, strict=True):
        # No public state says so; inside of jit the size may.
        is_batched = type(place).__name__ == "BatchTracer"
        if is_batched or jax.lax.axis_size(axis) != mesh.shape[axis]:
            raise ValueError(
                f"vmap: its axis_name is not that of a mesh axis of shard_map, of which JAX would "
                f"reduce the one or the other; got {axis!r} for both. Rename one."
            )
    return axes, all(map(varying_axes, places))


def is_transposing_shard_map() -> bool:
    """Whether a ``shard_map`` is being transposed, for a derivative taken around it.

    No public state says so; the name of JAX's rule on the stack does (0.12 has it longer).
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name.startswith("_shard_map_transpose"):
            return True
        frame = frame.f_back
    return False


def unoptimised() -> dict[str, Any] | None:
    """Compiler options where a program is compiled for its figures and never run.

    They leave out what follows after memory is assigned, machine code above all.
    """
    if jax.default_backend() != "cpu":
        return None
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    if jax.__version_info__ < (0, 11):
        options["xla_cpu_use_fusion_emitters"] = False
    return options


def is_split(x: Any, axis: int) -> bool:
    """Whether an axis of ``x`` is spread over a mesh axis of explicit kind."""
    spec = jax.typeof(x).sharding.spec
    return len(spec) > axis and spec[axis] is not None


def reshape_rows(x: Any, n_axes: int, sizes: tuple[int, ...]) -> Any:
    """Reshape the first ``n_axes`` axes to ``sizes``; the first keeps its explicit sharding."""
    shape = (*sizes, *x.shape[n_axes:])
    if not is_split(x, 0):
        return x.reshape(shape)
    sharding = jax.typeof(x).sharding
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    spec = jax.sharding.PartitionSpec(spec[0], *[None] * (len(sizes) - 1), *spec[n_axes:])
    return jax.lax.reshape(x, shape, out_sharding=sharding.update(spec=spec))


def gathered(tree: Any, axes: Any = None) -> Any:
    """Leaves whose first axis may be scanned over: an explicit sharding of it is undone.

    Or another axis of each, by ``axes``, a tree like ``tree``.
    """

    def whole(x: Any, axis: int = 0) -> Any:
        if not is_split(x, axis):
            return x
        sharding = jax.typeof(x).sharding
        spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
        spec[axis] = None
        return jax.sharding.reshard(x, sharding.update(spec=jax.sharding.PartitionSpec(*spec)))

    return jax.tree.map(whole, tree) if axes is None else jax.tree.map(whole, tree, axes)


def replicated(x: Any) -> Any:
    """``x`` without an explicit sharding."""
    sharding = replicated_like(x)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def placed_rows(rows: Any, leaf: Any) -> Any:
    """``rows``, which have the shape of ``leaf`` each, with its explicit sharding."""
    sharding = jax.typeof(leaf).sharding
    if not any(part is not None for part in sharding.spec):
        return rows
    spec = jax.sharding.PartitionSpec(None, *sharding.spec)
    return jax.sharding.reshard(rows, sharding.update(spec=spec))


def replicated_like(*arrays: Any) -> Any:
    """The sharding of a result that all devices of an explicit mesh share; ``None`` without."""
    for x in arrays:
        if any(is_split(x, axis) for axis in range(x.ndim)):
            return jax.typeof(x).sharding.update(spec=jax.sharding.PartitionSpec())
    return None


def value_name(eqn: Any) -> str | None:
    """What ``checkpoint_name`` calls the output of ``eqn``; ``None`` for any other equation.

    Under ``jax_remat3`` the name is a primitive of the new kind, which holds it as a field.
    """
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    held = eqn.params.get("_prim")
    return held.name if type(held).__name__ == "CheckpointName" else None


def scopes(eqn: Any) -> list[str]:
    """The named scopes of ``eqn``, outermost first, without the marks of transformations."""
    stack = eqn.source_info.name_stack.stack
    return [entry.name for entry in stack if type(entry).__name__ == "Scope"]


def remat3_enabled() -> bool:
    """Whether ``jax.checkpoint`` is the new implementation, which knows JAX's policies only."""
    return bool(getattr(jax.config, "jax_remat3", False))


def is_plain_jit(eqn: Any) -> bool:
    """Whether a call states no placement and no compiler options: inlining it loses nothing."""
    stated = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
    placed = any(isinstance(s, jax.sharding.Sharding) for s in stated)
    return not placed and not eqn.params.get("compiler_options_kvs")


class Checkpoint(NamedTuple):
    """What a checkpointed function is made of."""

    jaxpr: Jaxpr
    consts: list[Any]
    policy: Any
    prevent_cse: bool | tuple[bool, ...]


def checkpoint_of(eqn: Any) -> Checkpoint | None:
    """The body of a ``jax.checkpoint`` equation, in the old form and that of ``jax_remat3``."""
    if eqn.primitive is primitives.remat_p:
        params = eqn.params
        jaxpr, consts = open_jaxpr(params["jaxpr"])
        return Checkpoint(jaxpr, consts, params["policy"], params["prevent_cse"])
    held = eqn.params.get("_prim")
    if type(held).__name__ == "RematTraced":
        return Checkpoint(*open_jaxpr(held.jaxpr), held.policy, True)
    return None


def zero_tangent(x: Any) -> Any:
    """The tangent of a value that does not move, as the rule of a primitive may return it."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def zeros_of(cotangent: Any) -> Any:
    """A cotangent as an array, where a ``custom_vjp`` with symbolic zeros may give none."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, aval.dtype)
    return ad.instantiate_zeros(ad.Zero(aval))  # with the axes and the sharding of its type


def is_saved(verdict: Any) -> bool:
    """Whether a checkpoint policy has said to save, on the device."""
    return verdict is True or type(verdict).__name__ == "SaveableType"
