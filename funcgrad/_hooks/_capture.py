"""Named values of a function and their cotangents, returned beside its result."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad import _jaxpr
from funcgrad._compat import open_jaxpr
from funcgrad._hooks._collect import Reduce, make_slots, run
from funcgrad._hooks._nnx import on_copies
from funcgrad._hooks._sites import Level, Site, all_names, find_sites, matches, near

Names = str | Sequence[str]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Captured:
    """What ``fg.capture`` returns.

    Attributes:
      value: What the function returns.
      values: For each name the value that bears it, or, where several do, a tuple of them in
        program order.
      ran: Like ``values``: whether the value was computed, false where a ``cond`` took another
        branch.
    """

    value: Any
    values: dict[str, Any]
    ran: dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CapturedGrads:
    """What ``fg.capture_grads`` returns.

    Attributes:
      value: What the function returns.
      aux: Its auxiliary output with ``has_aux``, else ``None``.
      grads: The gradient, as ``jax.grad`` gives it.
      values: For each name the value that bears it, or, where several do, a tuple of them in
        program order.
      cotangents: Like ``values``: the derivative of the result with respect to each, ``None``
        for values that have none (integers).
      ran: Like ``values``: whether the value was computed, false where a ``cond`` took another
        branch.
    """

    value: Any
    aux: Any
    grads: Any
    values: dict[str, Any]
    cotangents: dict[str, Any]
    ran: dict[str, Any]


def capture(
    fun: Callable[..., Any], names: Names = "*", *, reduce: Reduce | None = None
) -> Callable[..., Captured]:
    """Return ``fun`` with its named intermediate values beside its result.

    Values are named where they are computed, with ``jax.ad_checkpoint.checkpoint_name(x,
    name)``, the names that checkpoint policies use, too; ``fg.name_outputs`` names what the
    modules of a Flax model give, without editing it.  Values inside ``scan`` are stacked along
    its iterations, in the order of the scanned inputs.  A value in a branch of ``cond`` that is
    not taken is zeros, and ``ran`` says so.  A tree that bears one name counts as several
    values, one a leaf.

    For each sample's own values write ``jax.vmap(fg.capture(fun))``.  In ``fun`` itself a value
    named inside ``vmap`` comes as the batched program holds it, with the samples along
    whichever axis JAX has put them, and with the values of both branches of ``cond``.

    With no names, ``fun`` is called as it is and nothing is added.

    PyTorch: ``module.register_forward_hook`` that stores outputs.

    Args:
      fun: Function of any arguments, or an NNX model.  State that NNX models change is written
        back to them.
      names: A name, a pattern such as ``"block/*"``, or several; all names by default.
      reduce: Function of one value, applied where the value is computed, so that only what it
        returns is kept: ``jnp.linalg.norm``, say.

    Returns:
      A function with the arguments of ``fun`` that returns a ``Captured``.

    Raises:
      ValueError: a pattern is no name in ``fun``; lists the names most like it.
      NotImplementedError: a named value stands inside ``while_loop``, a function with a custom
        derivative, or ``shard_map``; names the line.

    Example:
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> def fun(x):
      ...     return jnp.sin(checkpoint_name(2 * x, "double"))
      >>> fg.capture(fun)(1.0).values["double"]
      Array(2., dtype=float32, weak_type=True)
    """
    patterns = _patterns(names)

    @functools.wraps(fun, updated=())
    def captured(*args: Any, **kwargs: Any) -> Captured:
        if not patterns:
            return Captured(fun(*args, **kwargs), {}, {})
        traced, written_back = on_copies(fun, args, kwargs)
        program = _Program.of(traced, (), patterns, reduce, "capture")
        found, records = program.run((), {})
        values, ran = zip(*records, strict=True)
        return Captured(written_back(found), program.by_name(values), program.by_name(ran))

    return captured


def capture_grads(
    fun: Callable[..., Any],
    names: Names = "*",
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    reduce: Reduce | None = None,
) -> Callable[..., CapturedGrads]:
    """Return the gradient of ``fun`` with its named values and their cotangents.

    One backward pass gives all.  Names, stacking, branches and ``reduce`` are as in
    ``fg.capture``; ``reduce`` is applied to cotangents as to values.  The cotangent of a named
    value is that of the value with its name, the sum over all that uses it; where no use
    reaches the result it is zeros.  ``checkpoint`` still recomputes what it did, with the same
    result to the bit.

    PyTorch: ``tensor.retain_grad()``, ``tensor.register_hook``, and hooks that store.

    Args:
      fun: Function whose result, or the first part of it with ``has_aux``, is a real scalar.
        Differentiate the state of an NNX model, from ``nnx.split``, and return as auxiliary
        data what changes in it.
      names: A name, a pattern such as ``"block/*"``, or several; all names by default.
      argnums: The argument or arguments to differentiate, as in ``jax.grad``.
      has_aux: Whether ``fun`` returns a pair, of the result and of auxiliary data.
      reduce: Function of one value or cotangent, whose result, floating arrays in any tree, is
        kept in its place.

    Returns:
      A function with the arguments of ``fun`` that returns a ``CapturedGrads``.

    Raises:
      TypeError: ``reduce`` returns something without a floating dtype; or as ``jax.grad``.
      ValueError: a pattern is no name in ``fun``; lists the names most like it.
      NotImplementedError: as ``fg.capture``.

    Example:
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> def loss(a):
      ...     return (checkpoint_name(2 * a, "b") ** 2).sum()
      >>> found = fg.capture_grads(loss)(jnp.array([1.0, 2.0, 3.0]))
      >>> found.grads, found.cotangents["b"]
      (Array([ 8., 16., 24.], dtype=float32), Array([ 4.,  8., 12.], dtype=float32))
    """
    patterns = _patterns(names)

    @functools.wraps(fun, updated=())
    def captured(*args: Any, **kwargs: Any) -> CapturedGrads:
        if not patterns:
            value, grads = jax.value_and_grad(fun, argnums, has_aux)(*args, **kwargs)
            value, aux = value if has_aux else (value, None)
            return CapturedGrads(value, aux, grads, {}, {}, {})
        nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        nums = tuple(_position(num, len(args)) for num in nums)

        def of_chosen(*chosen: Any) -> Any:
            new = list(args)
            for num, arg in zip(nums, chosen, strict=True):
                new[num] = arg
            return fun(*new, **kwargs)

        # What is traced may depend on the arguments differentiated, so that it is traced here.
        def slotted(chosen: Any, slots: Any) -> Any:
            out, records = program.run(chosen, dict(zip(program.moving, slots, strict=True)))
            value, aux = out if has_aux else (out, None)
            return value, (aux, records)

        chosen = tuple(args[num] for num in nums)
        program = _Program.of(of_chosen, chosen, patterns, reduce, "capture_grads")
        program.check_reduce()
        slots = make_slots(program.moving)
        (value, (aux, records)), (grads, cotangents) = jax.value_and_grad(
            slotted, (0, 1), has_aux=True
        )(chosen, [slots[site] for site in program.moving])
        values, ran = zip(*records, strict=True)
        of_site = dict(zip(program.moving, cotangents, strict=True))
        return CapturedGrads(
            value,
            aux,
            grads[0] if isinstance(argnums, int) else grads,
            program.by_name(values),
            program.by_name([of_site.get(site) for site in program.sites]),
            program.by_name(ran),
        )

    return captured


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """A traced function with its sites."""

    traced: Any
    level: Level
    sites: list[Site]
    reduce: Reduce
    call: str

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        patterns: Sequence[str],
        reduce: Reduce | None,
        call: str,
    ) -> "_Program":
        traced = _jaxpr.trace(fun, *args)
        names = all_names(traced.jaxpr)
        for pattern in patterns:
            if not any(matches(name, pattern) for name in names):
                raise ValueError(
                    f"{call}: each pattern is the name of a value; got {pattern!r}, which is "
                    f"none. Near names: {near(pattern, names)}. Name a value with "
                    "jax.ad_checkpoint.checkpoint_name(value, name)."
                )
        wanted = lambda name: any(matches(name, pattern) for pattern in patterns)
        reduce = reduce or (lambda value: value)
        level = find_sites(*open_jaxpr(traced.jaxpr), wanted, reduce, call)
        return cls(traced, level, list(level.all_sites()), reduce, call)

    @property
    def moving(self) -> list[Site]:
        return [site for site in self.sites if site.moves]

    def run(self, args: tuple[Any, ...], slots: dict[Site, Any]) -> tuple[Any, list[Any]]:
        """What the function returns; and each site's value, and whether it was computed."""
        out, records = run(self.level, self.traced.flatten(*args), slots, self.reduce)
        # A constant of the program comes out as the host's number or array that it is.
        array = lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x)
        out, found = jax.tree.map(array, (out, [records[site] for site in self.sites]))
        return self.traced.unflatten(out), found

    def by_name(self, found: Sequence[Any]) -> dict[str, Any]:
        """One entry of ``found`` for each site, gathered under their names."""
        lists: dict[str, list[Any]] = {}
        for site, entry in zip(self.sites, found, strict=True):
            lists.setdefault(site.name, []).append(entry)
        return {name: tuple(found) if found[1:] else found[0] for name, found in lists.items()}

    def check_reduce(self) -> None:
        for site in self.moving:
            for leaf in jax.tree.leaves(site.type):
                if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                    raise TypeError(
                        f"{self.call}: reduce returns floating arrays, since cotangents are "
                        f"what it is applied to; got {leaf.dtype} for {site.name!r}. Cast it, "
                        "with .astype(jnp.float32)."
                    )


def _patterns(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _position(num: int, n_args: int) -> int:
    if not -n_args <= num < n_args:
        raise ValueError(
            f"capture_grads: argnums are positions of the arguments; got {num} for {n_args}."
        )
    return num % n_args
