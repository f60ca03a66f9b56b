"""What is checked: a function of floating leaves at a point, each leaf under its name."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from funcgrad import _jaxpr
from funcgrad._compat import ClosedJaxpr, is_transforming
from funcgrad._gradcheck._space import Leaf, Space, moves
from funcgrad._trees import keystr

# Python that asks for a value, such as `if x > 0`: it runs on values, and cannot be traced.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A function of a list of floating values to another, and the point of the check."""

    call: str
    fun: Callable[[list[Any]], list[Any]]
    point: list[np.ndarray]
    inputs: Space
    outputs: Space
    out_tree: Any
    dtype: np.dtype
    jaxpr: ClosedJaxpr | None
    """``None`` where the function is not traced: it asks for values, or has effects."""

    def flat(self, vector: Any) -> Any:
        """The function, from vectors to vectors."""
        return self.outputs.pack(self.fun(self.inputs.unpack(vector)), self.dtype)

    def start(self) -> np.ndarray:
        """The point as a vector."""
        flat = zip(self.inputs.leaves, map(np.ravel, self.point), strict=True)
        parts = [[np.real(x), np.imag(x)] if leaf.is_complex else [x] for leaf, x in flat]
        return np.concatenate([np.zeros(0), *sum(parts, [])]).astype(self.dtype)


def problem_of(fun: Callable[..., Any], inputs: Any, dtype: np.dtype, call: str) -> Problem:
    """``fun`` at ``inputs`` in ``dtype``; run where that is enabled."""
    if is_transforming():
        raise TypeError(
            f"{call}: it looks at values; got a call inside of a transformation. Call it outside "
            "of jit, grad and vmap, which it may well find inside fun."
        )
    args = inputs if type(inputs) is tuple else (inputs,)  # a NamedTuple is a tree
    paths, tree = jax.tree_util.tree_flatten_with_path(args)
    leaves = [leaf for _, leaf in paths]
    moving = [i for i, leaf in enumerate(leaves) if moves(leaf)]
    if not moving:
        raise ValueError(
            f"{call}: some leaf of inputs is floating; got {_kinds(leaves)}. Integers, booleans "
            "and keys are held constant."
        )

    def on_leaves(values: list[Any]) -> Any:
        full = list(leaves)
        for i, value in zip(moving, values, strict=True):
            full[i] = value
        out = fun(*jax.tree.unflatten(tree, full))
        return jax.tree.map(lambda x: _replicated(jnp.asarray(x)) if moves(x) else None, out)

    given = [leaves[i] for i in moving]
    point = [_as(leaf, dtype) for leaf in given]
    shapes, jaxpr = _shapes(on_leaves, point, given, dtype, call)
    out_leaves = jax.tree_util.tree_leaves_with_path(shapes)
    if not out_leaves:
        raise ValueError(
            f"{call}: fun returns a floating leaf; got none. There is nothing to differentiate."
        )
    return Problem(
        call,
        lambda values: jax.tree.leaves(on_leaves(values)),
        point,
        _space([(f"inputs{keystr(paths[i][0])}", x) for i, x in zip(moving, point, strict=True)]),
        _space([(f"output{keystr(path)}", x) for path, x in out_leaves]),
        jax.tree.structure(shapes),
        dtype,
        jaxpr,
    )


def gradient_problem(problem: Problem, grad_outputs: Any) -> Problem:
    """The vjp of a problem's function, as a function of its inputs and of the cotangents."""
    call, n = problem.call, len(problem.point)
    if grad_outputs is None:
        rng = np.random.default_rng(0)
        cotangents = [_random(rng, leaf, problem.dtype) for leaf in problem.outputs.leaves]
    else:
        masked = jax.tree.map(lambda x: x if moves(x) else None, grad_outputs)
        cotangents = [_as(x, problem.dtype) for x in jax.tree.leaves(masked)]
        got = jax.tree.structure(masked), [x.shape for x in cotangents]
        wanted = problem.out_tree, [leaf.shape for leaf in problem.outputs.leaves]
        if got != wanted:
            raise ValueError(
                f"{call}: grad_outputs is like the floating outputs of fun, {wanted[0]} of shapes "
                f"{wanted[1]}; got {got[0]} of shapes {got[1]}."
            )

    def grads(values: list[Any]) -> list[Any]:
        out, pull = jax.vjp(problem.fun, values[:n])
        return pull([g.astype(y.dtype) for g, y in zip(values[n:], out, strict=True)])[0]

    names = [leaf.name.replace("output", "grad_outputs", 1) for leaf in problem.outputs.leaves]
    extra = _space(list(zip(names, cotangents, strict=True)))
    gradients = [
        dataclasses.replace(leaf, name=f"grad of {leaf.name}") for leaf in problem.inputs.leaves
    ]
    point = [*problem.point, *cotangents]
    try:
        if problem.jaxpr is None:
            jaxpr, _ = None, grads(point)
        else:
            jaxpr = _jaxpr.trace(lambda x: grads(x), point).jaxpr
    except Exception as error:  # whatever a rule raises, or JAX where there is none
        raise TypeError(
            f"{call}: it differentiates the vjp of fun, which has one; got {type(error).__name__}: "
            f"{_first_line(error)}. Where there is no reverse mode, gradcheck checks the forward "
            "one: check_forward_ad=True, check_backward_ad=False."
        ) from error
    return dataclasses.replace(
        problem,
        fun=grads,
        point=point,
        inputs=Space((*problem.inputs.leaves, *extra.leaves)),
        outputs=Space(tuple(gradients)),
        out_tree=jax.tree.structure(gradients),
        jaxpr=jaxpr,
    )


def _shapes(
    fun: Callable[..., Any], point: list[Any], given: list[Any], dtype: np.dtype, call: str
) -> tuple[Any, ClosedJaxpr | None]:
    """What ``fun`` returns, and its jaxpr where it has one that runs anywhere."""
    try:
        traced = _jaxpr.trace(lambda values: fun(values), point)
    except _NEEDS_VALUES:
        return fun([jnp.asarray(x) for x in point]), None
    except Exception as error:
        as_given = [np.asarray(x) for x in given]
        same = all(x.dtype == y.dtype for x, y in zip(point, as_given, strict=True))
        if not same and _runs(fun, as_given):
            raise TypeError(
                f"{call}: fun runs in {dtype}, where differences are exact enough; got "
                f"{type(error).__name__} there, while it runs in the types given. Let dtypes in it "
                f"follow its inputs ({_first_line(error)}), or check it in its own precision: "
                "dtype=jnp.float32."
            ) from error
        raise
    out = jax.tree.unflatten(traced.out_tree, traced.jaxpr.out_avals)
    return out, None if traced.jaxpr.effects else traced.jaxpr


def _runs(fun: Callable[..., Any], given: list[Any]) -> bool:
    try:
        jax.eval_shape(lambda values: fun(values), given)
    except Exception:  # whatever it is, the first error says more
        return False
    return True


class Narrowed(NamedTuple):
    """Where numbers are rounded, in words, and to what, relative to their size."""

    where: str
    unit: float


def narrowed(problem: Problem) -> Narrowed | None:
    """Where, and to what, the traced function rounds below the precision of the check."""
    if problem.jaxpr is None:
        return None
    for visit in _jaxpr.walk(problem.jaxpr):
        eqn, line = visit.eqn, visit.line
        wide = max((_bits(v.aval) for v in eqn.invars), default=0)
        narrow = min((_bits(v.aval) for v in eqn.outvars if _bits(v.aval)), default=0)
        # Where a nested body rounds, the equation inside of it says so.
        if 0 < narrow < jnp.finfo(problem.dtype).bits <= wide and not _jaxpr.bodies(eqn):
            kind = next(v.aval.dtype for v in eqn.outvars if _bits(v.aval) == narrow)
            where = f"{kind} at {line}: {line.code}" if line else f"{kind}, by {eqn.primitive.name}"
            return Narrowed(where, float(jnp.finfo(kind).eps))
    return None


def _bits(aval: Any) -> int:
    """Bits of a floating type's real numbers; 0 of any other."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return 0
    return jnp.finfo(dtype).bits


def _space(named: Sequence[tuple[str, Any]]) -> Space:
    return Space(
        tuple(
            Leaf(name, tuple(x.shape), bool(jnp.issubdtype(x.dtype, jnp.complexfloating)))
            for name, x in named
        )
    )


def _as(leaf: Any, dtype: np.dtype) -> np.ndarray:
    leaf = np.asarray(leaf)
    return leaf.astype(np.result_type(dtype, np.complex64) if np.iscomplexobj(leaf) else dtype)


def _random(rng: np.random.Generator, leaf: Leaf, dtype: np.dtype) -> np.ndarray:
    parts = rng.uniform(-1, 1, (2, *leaf.shape))
    return _as(parts[0] + 1j * parts[1] if leaf.is_complex else parts[0], dtype)


def _replicated(x: Any) -> Any:
    """The value whole on each device, where its layout is part of its type."""
    mesh = jax.typeof(x).sharding.mesh
    is_explicit = AxisType.Explicit in mesh.axis_types
    return jax.reshard(x, NamedSharding(mesh, P())) if is_explicit else x


def _kinds(leaves: list[Any]) -> str:
    is_array = lambda x: isinstance(x, np.ndarray | np.generic | jax.Array)
    kinds = {str(x.dtype) if is_array(x) else type(x).__name__ for x in leaves}
    return ", ".join(sorted(kinds)) or "no leaf"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
