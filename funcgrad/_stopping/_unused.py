"""Leaves that provably get no gradient, and where their path was cut: ``unused_grads``."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax

from funcgrad import _jaxpr
from funcgrad._compat import Jaxpr, JaxprEqn, open_jaxpr
from funcgrad._jaxpr import SourceLine
from funcgrad._stopping._marks import Cut, Follower, Mark, Rank
from funcgrad._trees import is_float, slashed


@dataclasses.dataclass(frozen=True)
class UnusedLeaf:
    """A leaf without gradient: which, in which sense, and why."""

    path: str
    """As patterns name it, ``dense/kernel``; after the argument's number where there are several.
    """
    gradient: Literal["none", "zero"]
    """"none" where nothing leads from the leaf to the result that could be differentiated
    (``None`` in torch); "zero" where something does, and its derivative is zero everywhere."""
    cuts: tuple[Cut, ...]
    """Each place where its path ends, in the order of the program."""

    def __str__(self) -> str:
        return f"{self.path or '(the argument)'}: {self.gradient}, {_words(self.cuts)}"


@dataclasses.dataclass(frozen=True)
class UnusedGrads:
    """The leaves without gradient; its length is their number, and it prints as a table."""

    leaves: tuple[UnusedLeaf, ...]
    n_leaves: int
    """The number of leaves looked at."""

    def __len__(self) -> int:
        return len(self.leaves)

    def __iter__(self) -> Iterator[UnusedLeaf]:
        return iter(self.leaves)

    def __str__(self) -> str:
        rows = [(f.path or "(the argument)", f.gradient, _words(f.cuts)) for f in self.leaves]
        rows = [("leaf", "gradient", "because"), *rows] if rows else []
        widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
        lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows]
        return "\n".join([*lines, f"{len(self)} of {self.n_leaves} leaves get no gradient"])


def unused_grads(
    fun: Callable[..., Any], *, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., UnusedGrads]:
    """Find the leaves that provably get no gradient, and where their path was cut.

    ``fun`` is traced, not run.  A leaf that is listed has a gradient of exactly zero whatever
    the numbers are, as long as they are finite; a leaf that is not listed may still have one.
    PyTorch: the ``None`` of ``autograd.grad(..., allow_unused=True)``, without a reason.

    =======================================  ============  ============
    the leaf reaches the result only         ``gradient``  torch gives
    =======================================  ============  ============
    not at all                               none          ``None``
    through ``stop_gradient``, ``no_grad``   none          ``None``
    as integers or booleans: ``argmax``,     none          ``None``
    a comparison, a cast
    through a ``custom_vjp`` whose rule      none          ``None``, or
    gives it nothing or zeros                              the zeros
    through ``round``, ``floor``, ``sign``   zero          zeros
    multiplied by the number 0               zero          zeros
    =======================================  ============  ============

    Loops are followed iteration by iteration, branches joined; what takes values no
    derivative is defined for, such as a callback, counts as used.

    Args:
      fun: Any function that could be differentiated; its result is any pytree.
      argnums: Which argument's leaves to look at, or which arguments'.
      has_aux: Whether ``fun`` returns a pair whose second part is not differentiated.

    Returns:
      A function of the arguments of ``fun`` to ``UnusedGrads``.  Leaves may be
      ``jax.ShapeDtypeStruct``.

    Raises:
      TypeError: A mutable reference takes part, which is not followed.
      ValueError: There is no such positional argument.

    Example:
      >>> def loss(p, x):
      ...     return (jax.lax.stop_gradient(p["a"]) * jnp.round(p["b"]) * x).sum()
      >>> params = {"a": jnp.ones(3), "b": jnp.ones(3), "c": jnp.ones(3)}
      >>> print(fg.unused_grads(loss)(params, jnp.ones(3)))
      leaf  gradient  because
      a     none      stop_gradient at ...
      b     zero      round at ...
      c     none      never used
      3 of 3 leaves get no gradient
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def unused(*args: Any, **kwargs: Any) -> UnusedGrads:
        if not all(-len(args) <= number < len(args) for number in numbers):
            raise ValueError(
                f"unused_grads: argnums are places of positional arguments; got {argnums} for "
                f"{len(args)} of them. Pass what is differentiated by position."
            )
        chosen = {number % len(args) for number in numbers}
        named: list[tuple[str | None, Any]] = []
        for number, arg in enumerate(args):
            for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
                prefix = f"{number}/" if len(numbers) > 1 else ""
                named.append((prefix + slashed(path) if number in chosen else None, leaf))
        named += [(None, leaf) for leaf in jax.tree.leaves(kwargs)]

        # Other arguments keep their values, so that Python may decide by them.
        traced = [
            isinstance(leaf, jax.ShapeDtypeStruct) or (path is not None and _is_array(leaf))
            for path, leaf in named
        ]
        tree = jax.tree.structure((args, kwargs))

        def flat(*values: Any) -> Any:
            given = iter(values)
            leaves = [
                next(given) if t else leaf for t, (_, leaf) in zip(traced, named, strict=True)
            ]
            args, kwargs = jax.tree.unflatten(tree, leaves)
            out = fun(*args, **kwargs)
            return out[0] if has_aux else out

        inputs = [pair for pair, t in zip(named, traced, strict=True) if t]
        jaxpr, _ = open_jaxpr(jax.make_jaxpr(flat)(*(leaf for _, leaf in inputs)))
        return _verdicts(jaxpr, [path for path, _ in inputs])

    return unused


def _verdicts(jaxpr: Jaxpr, paths: list[str | None]) -> UnusedGrads:
    marks: list[dict[int, Mark]] = []
    for i, (path, var) in enumerate(zip(paths, jaxpr.invars, strict=True)):
        cut = Cut(f"it is of {var.aval.dtype}", None)
        whole = Mark(Rank.LIVE) if is_float(var.aval) else Mark(Rank.NONE, frozenset([cut]))
        marks.append({} if path is None else {i: whole})
    follower = Follower()
    reached: dict[int, Mark] = {}
    for out in follower.run(jaxpr, marks, ()):
        for leaf, mark in out.items():
            reached[leaf] = mark | reached[leaf] if leaf in reached else mark

    unused = []
    for i, path in enumerate(paths):
        if path is None:
            continue
        mark = reached.get(i)
        if mark is None:
            line = _first_use(jaxpr, jaxpr.invars[i], ())
            reason = "never used" if line is None else "the result does not depend on it; used"
            unused.append(UnusedLeaf(path, "none", (Cut(reason, line),)))
        elif mark.rank is not Rank.LIVE:
            gradient = "zero" if mark.rank is Rank.ZERO else "none"
            unused.append(UnusedLeaf(path, gradient, follower.in_order(mark.cuts)))
    return UnusedGrads(tuple(unused), sum(path is not None for path in paths))


def _first_use(jaxpr: Jaxpr, var: Any, parents: tuple[JaxprEqn, ...]) -> SourceLine | None:
    """The line of the first equation that computes something from ``var``."""
    for eqn in jaxpr.eqns:
        places = [i for i, atom in enumerate(eqn.invars) if atom is var]
        nested = _jaxpr.bodies(eqn)
        if not places:
            continue
        if not nested or any(body.role == "opaque" for body in nested):
            return _jaxpr.source_line(eqn, parents)
        for body in nested:
            for operand, inner in zip(body.operands, body.jaxpr.invars, strict=True):
                if operand in places:
                    line = _first_use(body.jaxpr, inner, (*parents, eqn))
                    if line is not None:
                        return line
    return None


def _words(cuts: Sequence[Cut]) -> str:
    return "; ".join(map(str, cuts))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)
