"""Compare a program on many devices with itself on one, and say what is off by which factor."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from funcgrad._compat import make_varying, varying_axes
from funcgrad._trees import broadcast_prefix, is_float, is_key, keystr

CALL = "assert_matches_unsharded"
_SAME = P()


def assert_matches_unsharded(
    fun: Callable[..., Any],
    mesh: Mesh,
    in_specs: P | Sequence[Any],
    out_specs: Any = _SAME,
    *,
    argnums: int | Sequence[int] | None = None,
    check_vma: bool = True,
    unsharded: Callable[..., Any] | None = None,
    rtol: float | None = None,
) -> Callable[..., None]:
    """Check that ``fun`` on ``mesh`` has the values and gradients that it has on one device.

    ``fun`` is what ``shard_map`` runs, with its collectives.  On one device it runs in a mesh of
    the same axes, each of size one.  The gradients are taken inside the ``shard_map``, of the
    outputs weighed by the same random numbers on both sides.  What each device holds is compared
    by itself, so that a result that is said to be the same on all is looked at on all.

    A step that takes its own gradients, such as ``pmean(grad(loss))``, is checked as a function
    that returns them: with ``argnums=()``, which compares the outputs alone.

    PyTorch: nothing; there it is done by hand, with ``torch.testing.assert_close``.

    Args:
      fun: Function of arrays or trees as one device has them, which returns such.
      mesh: The devices.
      in_specs: One ``PartitionSpec`` for each argument, or a prefix of a tree of them; or one
        for all arguments.
      out_specs: The same for the result.
      argnums: Arguments to differentiate by; all with floating leaves by default.
      check_vma: As in ``jax.shard_map``.
      unsharded: Another function of the whole arguments to compare with.
      rtol: Largest norm of a difference relative to the norm of the leaf.  The default
        ``eps**0.6`` is 4e-10 in float64, 7e-5 in float32, 0.016 in float16 and 0.054 in bfloat16.

    Returns:
      A function of the whole arguments (not of a device's parts), which returns ``None``.

    Raises:
      AssertionError: Names each leaf that is off, whether the value or the gradient, the factor
        (the number of devices along an axis, one over it, another), or that devices hold terms
        of the sum, and what is likely wrong.
      ValueError: The specs do not fit the arguments; ``unsharded`` returns another tree or other
        dtypes than ``fun``; the program on one device gives an infinity or a NaN.

    Example:
      >>> mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
      >>> def loss(w, x):
      ...     return jax.lax.pmean(jnp.mean((x @ w) ** 2), "data")
      >>> specs = (jax.P(), jax.P("data"))
      >>> w, x = jnp.ones(3), jnp.arange(24.0).reshape(8, 3)
      >>> fg.assert_matches_unsharded(loss, mesh, specs)(w, x)
      >>> fg.assert_matches_unsharded(loss, mesh, specs, check_vma=False)(w, x)
      Traceback (most recent call last):
      ...
      AssertionError: assert_matches_unsharded: 2 of 3 leaves are off...
    """

    def check(*args: Any) -> None:
        ins = (in_specs,) * len(args) if isinstance(in_specs, P) else tuple(in_specs)
        if len(ins) != len(args):
            raise ValueError(
                f"{CALL}: in_specs has an entry for each argument; got {len(ins)} for "
                f"{len(args)}. Write P() for what all devices have."
            )
        on_host = tuple(jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), args))
        numbers = _argnums(argnums, on_host)
        specs = ins, out_specs
        grid = _auto(mesh.devices, mesh)
        if unsharded is None:
            first = np.array(jax.local_devices()[:1]).reshape([1] * mesh.devices.ndim)
            single = _auto(first, mesh)
            weights = _weights(_shapes(fun, single, ins, check_vma, on_host))
            on_one = _on_each_device(fun, numbers, single, specs, check_vma, weights)
            whole = lambda *args: jax.tree.map(lambda x: x[0], on_one(*args))
        else:
            shapes = jax.eval_shape(jax.jit(unsharded), *on_host)
            _check_alike(shapes, _shapes(fun, grid, ins, check_vma, on_host))
            weights = _weights(shapes)
            whole = functools.partial(jax.jit(_with_grads(unsharded, numbers)), weights)
        expected, moved = whole(*on_host), whole(*_nudged(on_host))
        got = _on_each_device(fun, numbers, grid, specs, check_vma, weights)(*on_host)
        leaves = _leaves(expected, moved, got, (out_specs, [ins[i] for i in numbers]), numbers)
        noise = _noise(leaves)
        said = [leaf.report(grid, check_vma, rtol, noise) for leaf in leaves]
        off = [line for line in said if line]
        if off:
            lines = "".join(f"\n  {line}" for line in off)
            raise AssertionError(f"{CALL}: {len(off)} of {len(leaves)} leaves are off.{lines}")

    return check


def _argnums(argnums: Any, args: tuple[Any, ...]) -> list[int]:
    """The arguments to differentiate by, which have floating leaves."""
    have = [any(map(is_float, jax.tree.leaves(arg))) for arg in args]
    if argnums is None:
        return [i for i, floating in enumerate(have) if floating]
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    for i in numbers:
        if not (-len(args) <= i < len(args) and have[i]):
            raise ValueError(
                f"{CALL}: argnums names arguments with floating leaves; got {i}. "
                f"Such are {[i for i, floating in enumerate(have) if floating]}."
            )
    return [i % len(args) for i in numbers]


def _auto(devices: Any, mesh: Mesh) -> Mesh:
    """A mesh of the same axes, left to the compiler outside of ``shard_map``."""
    return Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * devices.ndim)


def _shapes(fun: Any, mesh: Mesh, in_specs: Any, check_vma: bool, args: Any) -> Any:
    """What ``fun`` returns on each device of ``mesh``, as shapes and dtypes."""
    shapes = jax.eval_shape(_stacked(fun, mesh, in_specs, check_vma), *args)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes)


def _check_alike(unsharded: Any, own: Any) -> None:
    """Raise unless both functions return the same tree of the same dtypes."""
    kinds = [jax.tree.map(lambda x: str(x.dtype), shapes) for shapes in (unsharded, own)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{CALL}: unsharded returns what fun returns, of the whole arguments; got {kinds[0]} "
            f"of one and {kinds[1]} of the other."
        )


def _nudged(args: Any) -> Any:
    """Arguments a rounding away, for what rounding does to each result."""
    rng = np.random.default_rng(1)

    def nudge(x: Any) -> Any:
        if is_key(x) or not is_float(x):
            return x
        eps = float(jnp.finfo(jax.dtypes.canonicalize_dtype(x.dtype)).eps)
        return np.asarray(_wide(x) * (1 + eps * rng.choice([-1, 1], x.shape)), x.dtype)

    return jax.tree.map(nudge, args)


def _weights(shapes: Any) -> Any:
    """Weights of the floating outputs, by which gradients are taken: 1 of a scalar."""
    rng = np.random.default_rng(0)

    def weight(x: Any) -> Any:
        if not is_float(x):
            return None
        numbers = rng.normal(size=(2, *x.shape)) if x.shape else np.array([1.0, 0.0])
        whole = numbers[0] + 1j * numbers[1]
        return np.asarray(whole if jnp.iscomplexobj(x) else numbers[0], x.dtype)

    return jax.tree.map(weight, shapes)


def _with_grads(fun: Callable[..., Any], numbers: list[int]) -> Callable[..., Any]:
    """The outputs of ``fun``, and the gradients of the weighed ones by the floating leaves."""

    def run(weights: Any, *args: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten([args[i] for i in numbers])
        moving = [i for i, x in enumerate(leaves) if is_float(x)]

        def moved(floats: list[Any]) -> tuple[list[Any], Any]:
            new = list(leaves)
            for i, x in zip(moving, floats, strict=True):
                new[i] = x
            full = list(args)
            for i, arg in zip(numbers, jax.tree.unflatten(tree, new), strict=True):
                full[i] = arg
            out = jax.tree.map(jnp.asarray, fun(*full))
            return [x for x in jax.tree.leaves(out) if is_float(x)], out

        if not moving:
            return fun(*args), [None] * len(numbers)
        values, pull, out = jax.vjp(moved, [leaves[i] for i in moving], has_aux=True)
        (grads,) = pull(list(map(_of_kind, jax.tree.leaves(weights), values)))
        new = [None] * len(leaves)
        for i, grad in zip(moving, grads, strict=True):
            new[i] = grad
        return out, jax.tree.unflatten(tree, new)

    return run


def _of_kind(weight: Any, value: Any) -> Any:
    """The cotangent as the type of ``value`` wants it."""
    weight = jnp.asarray(weight)
    if weight.shape != value.shape:
        raise AssertionError(
            f"{CALL}: a device's result is a part, by out_specs, of the result on one device; got "
            f"shape {list(value.shape)}, where the part has {list(weight.shape)}."
        )
    more = tuple(sorted(varying_axes(weight) - varying_axes(value)))
    weight = lax.psum(weight, more) if more else weight
    return make_varying(weight, varying_axes(value))


def _on_each_device(
    fun: Any, numbers: list[int], mesh: Mesh, specs: Any, check_vma: bool, weights: Any
) -> Callable[..., Any]:
    """Outputs and gradients with the devices, in the order of the mesh, as their first axis."""
    in_specs, out_specs = specs
    weight_specs = jax.tree.unflatten(
        jax.tree.structure(weights), map(_spec, broadcast_prefix(out_specs, weights, CALL))
    )
    specs = (weight_specs, *in_specs)
    mapped = _stacked(_with_grads(fun, numbers), mesh, specs, check_vma)
    # Each process sees the values of all.
    compiled = jax.jit(mapped, out_shardings=NamedSharding(mesh, P()))

    def run(*args: Any) -> Any:
        flat, tree = jax.tree.flatten((weights, *args))
        each = broadcast_prefix(specs, (weights, *args), CALL)
        placed = [_place(x, spec, mesh) for x, spec in zip(flat, each, strict=True)]
        return compiled(*jax.tree.unflatten(tree, placed))

    return run


def _stacked(fun: Any, mesh: Mesh, in_specs: Any, check_vma: bool) -> Any:
    """``fun`` on each device, its results one behind the other whatever varies over what."""
    every = frozenset(mesh.axis_names)

    def local(*args: Any) -> Any:
        own = jax.tree.map(jnp.asarray, fun(*args))
        return jax.tree.map(lambda x: (make_varying(x, every) if check_vma else x)[None], own)

    return jax.shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=P(mesh.axis_names), check_vma=check_vma
    )


def _spec(spec: Any) -> P:
    return P() if spec is None else spec


def _place(x: Any, spec: Any, mesh: Mesh) -> Any:
    sharding = NamedSharding(mesh, _spec(spec))
    for entry, side in zip(_spec(spec), x.shape, strict=False):
        parts = int(np.prod([mesh.shape[axis] for axis in _axes_of(P(entry))]))
        if side % parts:
            raise ValueError(
                f"{CALL}: a spec divides what it is of; got {spec} for an argument, or a result "
                f"on one device, of shape {list(x.shape)}, and {parts} devices."
            )
    if is_key(x):
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A leaf as it should be, and what each device has in its place."""

    name: str
    is_grad: bool
    spec: P
    whole: np.ndarray
    got: np.ndarray
    rounding: float
    """By how much ``whole`` moves where its arguments are rounded."""

    def report(self, mesh: Mesh, check_vma: bool, rtol: float | None, noise: float) -> str | None:
        """What is off and why, in words; ``None`` if nothing is."""
        index = NamedSharding(mesh, self.spec).devices_indices_map(self.whole.shape)
        parts = np.stack([self.whole[index[device]] for device in mesh.devices.flat])
        if parts.shape != self.got.shape:
            return (
                f"{self.name} has shape {list(self.got.shape[1:])} on a device; a part of "
                f"{list(self.whole.shape)} by {self.spec} has {list(parts.shape[1:])}."
            )
        if not is_float(self.whole):
            same = np.array_equal(parts, self.got)
            return None if same else f"{self.name} differs in {np.sum(parts != self.got)} entries."
        allowed = rtol if rtol is not None else float(jnp.finfo(self.whole.dtype).eps) ** 0.6
        should, have = _wide(parts), _wide(self.got)
        if self.whole.any():  # what is zero says nothing of the terms that it is made of
            noise = min(noise, 64 * self.rounding)
        allowed = allowed * np.linalg.norm(_wide(self.whole)) + noise
        near = lambda a, b: bool(_norms(a - b).max(initial=0.0) <= allowed)
        if near(should, have):
            return None
        return f"{self.name} {self._words(mesh, check_vma, should, have, near)}"

    def _words(self, mesh: Mesh, check_vma: bool, should: Any, have: Any, near: Any) -> str:
        if not np.isfinite(have).all():
            return "is not finite, while on one device it is."
        sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
        axes = [axis for axis in sizes if sizes[axis] > 1]
        square = np.vdot(should, should).real
        factor = np.vdot(should, have) / square if square else 0.0
        if square and near(factor * should, have):
            return _factor(factor, axes, sizes, self.is_grad, check_vma)
        copied = [axis for axis in axes if axis not in _axes_of(self.spec)]
        grid = have.reshape(*mesh.devices.shape, *have.shape[1:])
        for some in _subsets(copied):
            at = tuple(list(sizes).index(axis) for axis in some)
            for kind, join in (("sum", np.sum), ("mean", np.mean)):
                joined = np.broadcast_to(join(grid, axis=at, keepdims=True), grid.shape)
                if near(joined.reshape(have.shape), should):
                    return _terms(kind, some, self.is_grad, check_vma)
        apart = _norms(have - should)
        where = f"device {int(apart.argmax())}" if copied or self.spec else "each device"
        relative = apart.max() / (np.linalg.norm(_wide(self.whole)) or 1.0)
        return f"is off by {relative:.2g} of its norm, most on {where}, and by no common factor."


def _factor(factor: Any, axes: list[str], sizes: Any, is_grad: bool, check_vma: bool) -> str:
    """Words for a leaf that is ``factor`` times what it should be on all devices."""
    if abs(factor) < 1e-3:
        return "is zero. Look for stop_gradient, or a sum of what cancels."
    counts = {some: int(np.prod([sizes[axis] for axis in some])) for some in _subsets(axes)}
    for n in counts.values():
        among = [_list(some) for some, count in counts.items() if count == n]
        along = f"the number of devices along {' or '.join(among)}"
        if abs(factor / n - 1) < 1e-2:
            return f"is {n} times what it should be, {along}. " + (
                "The transpose of psum is psum under check_vma=False: use collectives.reduce for "
                "the loss, or check_vma=True."
                if is_grad and not check_vma
                else "Each device's gradient is that of the sum of all devices' losses: reduce the "
                "loss, by pmean where it is a mean."
                if is_grad
                else "What is the same on all devices is summed again: leave that psum out; "
                "under check_vma=True jax.grad has summed gradients of replicated values, so "
                "that their pmean is the sum, not the mean."
            )
        if abs(factor * n - 1) < 1e-2:
            return f"is 1/{n} of what it should be, {along}. " + (
                "A mean is taken twice, or of terms that are to be summed: use psum "
                "(collectives.reduce) for pmean there."
            )
    shown = f"{factor:.4g}" if np.iscomplexobj(factor) and factor.imag else f"{factor.real:.4g}"
    return f"is {shown} times what it should be, which is no number of devices."


def _terms(kind: str, axes: Sequence[str], is_grad: bool, check_vma: bool) -> str:
    """Words for a leaf of which devices hold values whose sum or mean would be right."""
    along = _list(axes)
    what = f"differs between devices along {along}; the {kind} of their values is right. "
    if is_grad and not check_vma:
        copy = f"Pass it through collectives.copy(…, {along}) before its use"
        loss = (
            ""
            if kind == "sum"
            else ", and reduce the loss by collectives.reduce, over their number"
        )
        return f"{what}{copy}{loss}."
    call = "psum (collectives.reduce)" if kind == "sum" else "pmean"
    return f"{what}It is not reduced: take {call} over {along}."


def _subsets(axes: Sequence[str]) -> list[tuple[str, ...]]:
    sizes = range(1, len(axes) + 1)
    return list(itertools.chain.from_iterable(itertools.combinations(axes, n) for n in sizes))


def _axes_of(spec: P) -> set[str]:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return {axis for entry in entries for axis in entry if isinstance(axis, str)}


def _leaves(expected: Any, moved: Any, got: Any, specs: Any, numbers: list[int]) -> list[_Leaf]:
    plain = lambda x: jax.random.key_data(x) if is_key(x) else x
    expected, moved, got = jax.tree.map(plain, (expected, moved, got))
    leaves = []
    for is_grad, (whole, near, each, spec) in enumerate(
        zip(expected, moved, got, specs, strict=True)
    ):
        paths = jax.tree_util.tree_leaves_with_path(whole)
        near, each = jax.tree.leaves(near), jax.tree.leaves(each)
        spec = broadcast_prefix(spec, whole, CALL)
        for (path, leaf), other, own, at in zip(paths, near, each, spec, strict=True):
            name = f"the value{keystr(path)}"
            if is_grad:
                name = f"the gradient of args[{numbers[path[0].idx]}]{keystr(path[1:])}"
            leaf = np.asarray(leaf)
            if is_float(leaf) and not np.isfinite(_wide(leaf)).all():
                raise ValueError(
                    f"{CALL}: on one device all is finite; got an infinity or a NaN in {name}. "
                    "There is nothing to compare with."
                )
            moves = np.linalg.norm(_wide(leaf) - _wide(np.asarray(other)))
            rounding = float(moves) if np.isfinite(moves) else np.inf
            own = np.asarray(own)
            leaves.append(_Leaf(name, bool(is_grad), _spec(at), leaf, own, rounding))
    return leaves


def _noise(leaves: list[_Leaf]) -> float:
    """What rounding may leave in any leaf: a few units of the largest."""
    floats = [leaf.whole for leaf in leaves if is_float(leaf.whole)]
    units = [float(jnp.finfo(x.dtype).eps) * float(np.linalg.norm(_wide(x))) for x in floats]
    return 4 * max(units, default=0.0)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)


def _norms(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x.reshape(len(x), -1), axis=1)


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
