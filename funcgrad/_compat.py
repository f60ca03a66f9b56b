"""The only module that knows JAX versions.

Oldest supported: 0.10.2.  Newest tried: 0.12.0.  Everything here is public API
(``jax``, ``jax.core``, ``jax.extend``); what differs is the form of the data.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.core
import jax.extend.core as jex

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

enable_x64 = jax.enable_x64
eval_jaxpr = jax.core.eval_jaxpr


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


def gathered(tree: Any) -> Any:
    """Leaves whose first axis may be scanned over: an explicit sharding of it is undone."""

    def whole(x: Any) -> Any:
        if not is_split(x, 0):
            return x
        sharding = jax.typeof(x).sharding
        rest = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))][1:]
        return jax.sharding.reshard(
            x, sharding.update(spec=jax.sharding.PartitionSpec(None, *rest))
        )

    return jax.tree.map(whole, tree)


def replicated_like(*arrays: Any) -> Any:
    """The sharding of a result that all devices of an explicit mesh share; ``None`` without."""
    for x in arrays:
        if any(is_split(x, axis) for axis in range(x.ndim)):
            return jax.typeof(x).sharding.update(spec=jax.sharding.PartitionSpec())
    return None
