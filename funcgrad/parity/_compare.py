"""One function written twice, in JAX and in torch: the same numbers, or where they part and why."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad.parity._differences import Difference, Tolerance, difference, scale_of
from funcgrad.parity._engines import Arrays
from funcgrad.parity._hints import Hint, find_hints
from funcgrad.parity._problem import Problem, prepare

KINDS = ("value", "grad", "jvp", "hvp", "per_sample")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found; prints as a table.

    Attributes:
      leaves: One `Difference` per kind and leaf, in the order of computation.
      hints: Why leaves differ, where that could be established.
      skipped: Kinds not computed because the outputs have other shapes.
      rtol: Relative tolerance.
      atol: Absolute tolerance; None stands for the default of `compare`.
    """

    leaves: tuple[Difference, ...]
    hints: tuple[Hint, ...]
    skipped: tuple[str, ...]
    rtol: float
    atol: float | None

    @property
    def ok(self) -> bool:
        """Whether every leaf agrees and every kind was computed."""
        return all(leaf.ok for leaf in self.leaves) and not self.skipped

    @property
    def first_difference(self) -> Difference | None:
        """The first leaf that differs, or None."""
        return next((leaf for leaf in self.leaves if not leaf.ok), None)

    @property
    def max_abs(self) -> float:
        """The largest absolute difference of all leaves."""
        return max((leaf.max_abs for leaf in self.leaves), default=0.0)

    @property
    def max_rel(self) -> float:
        """The largest relative difference of all leaves."""
        return max((leaf.max_rel for leaf in self.leaves), default=0.0)

    def raise_if_different(self) -> "Comparison":
        """Return self, or raise an AssertionError that holds the table and the hints."""
        if not self.ok:
            raise AssertionError(f"compare: jax_fun and torch_fun differ.\n{self}")
        return self

    def _rows(self) -> list[tuple[str, ...]]:
        return [leaf.row() for leaf in self.leaves]

    def _remarks(self) -> list[str]:
        first = self.first_difference
        verdict = f"{len(self.leaves)} leaves agree; largest difference {self.max_abs:.2g}"
        if first:
            verdict = f"First difference: {first.kind} of {first.path}, {first.max_abs:.2g}"
        skipped = f"Not computed: {', '.join(self.skipped)}" if self.skipped else ""
        return [s for s in (verdict, skipped, *(f"Hint: {hint}" for hint in self.hints)) if s]

    def __str__(self) -> str:
        rows = [_HEADER, *self._rows()]
        widths = [max(len(row[n]) for row in rows) for n in range(len(_HEADER))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
        return "\n".join([*(line.rstrip() for line in lines), *self._remarks()])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        table = Table(*_HEADER)
        for leaf, row in zip(self.leaves, self._rows(), strict=True):
            table.add_row(*map(escape, row), style=None if leaf.ok else "red")
        return Group(table, *map(escape, self._remarks()))


_HEADER = ("kind", "leaf", "jax", "torch", "abs", "rel", "")


def compare(
    jax_fun: Callable[..., Any],
    torch_fun: Callable[..., Any],
    inputs: Any,
    *,
    what: Sequence[str] = ("value", "grad"),
    dtype: Any = np.float64,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> Comparison:
    r"""Run a function written in JAX and in torch, and say leaf by leaf how they differ.

    Both get the same numbers in ``dtype``, and return trees with the same
    paths.  The kinds, with fixed random cotangents :math:`c` (1 for a single
    real scalar) and tangents :math:`v` over all floating and complex leaves:

    - ``value``: :math:`f(x)`
    - ``grad``: :math:`\nabla_x \langle c, f(x) \rangle`, complex ones in JAX's
      convention (the conjugate of torch's)
    - ``jvp``: :math:`\partial f(x)\, v`
    - ``hvp``: :math:`\nabla^2_x \langle c, f(x) \rangle\, v`, forward over reverse in
      JAX, backward twice in torch
    - ``per_sample``: the gradient with respect to ``inputs[0]`` for each row of
      the arrays in the other inputs; here the functions are those of one
      sample.  ``vmap`` in JAX, a loop in torch

    ``x64`` is switched on around JAX for a 64-bit ``dtype`` and nothing global
    changes.  A hint is given when it could be proved: a torch convention (gelu,
    ddof, epsilon, padding_idx) by running torch again with the other one; a
    special point (a tie, a kink, a singularity) when both agree a small step
    away; a conjugate, a transpose, a sign, sum against mean when the numbers say so.

    Args:
      jax_fun: Function of ``*inputs`` in JAX; called eagerly.
      torch_fun: The same in torch.
      inputs: Tuple of trees of NumPy, JAX or torch arrays.  Integers and booleans are
        passed on (as int64 in torch); what is no array, such as a Python
        number, is passed as it is.
      what: The kinds to compare.
      dtype: Floating type of the computation; complex leaves get the complex
        type of that precision.
      rtol: Relative tolerance; by default 1e-10 for float64, 1e-5 for float32,
        1e-2 for float16, 5e-2 for bfloat16.
      atol: Absolute tolerance; by default ``rtol`` times the leaf's largest
        entry, at most ``rtol``; plus, for the noise where an exact zero is due,
        a hundredth of ``rtol`` (8 machine epsilons if that is more) times the kind's
        largest entry, at most 1000; plus 8 machine epsilons.  Integers and booleans
        must be equal.
      seed: Of the cotangents and tangents.

    Returns:
      A `Comparison`.  NaN equals NaN; a floating leaf must also have the same
      dtype on both sides.

    Raises:
      TypeError: ``inputs`` is no tuple, or ``what`` no sequence of names.
      ValueError: An unknown kind, no floating leaf to differentiate, a batch of
        unequal sizes, or outputs of one sample that differ in shape.

    Example:
      >>> import torch
      >>> result = compare(
      ...     lambda x: jnp.tanh(x).sum(),
      ...     lambda x: torch.tanh(x).sum(),
      ...     (np.array([0.5, -1.0]),),
      ...     what=("value", "grad", "hvp"),
      ... )
      >>> result.ok
      True
      >>> different = compare(jnp.var, torch.var, (np.array([1.0, 2.0, 4.0]),))
      >>> different.first_difference.kind, different.hints[0].convention
      ('value', 'ddof')
    """
    dtype = np.dtype(dtype)
    kinds = _check_arguments(inputs, what, dtype)
    tolerance = Tolerance(dtype, rtol, atol)
    problem = Problem(jax_fun, torch_fun, prepare(inputs, dtype), dtype, seed)

    found: dict[str, tuple[Arrays, Arrays]] = {}
    skipped: list[str] = []
    if set(kinds) - {"per_sample"}:
        found["value"] = problem.run("value")
        if not _same_shapes(*found["value"]):
            skipped = [kind for kind in kinds if kind not in ("value", "per_sample")]
    for kind in kinds:
        if kind not in found and kind not in skipped:
            found[kind] = problem.run(kind)
    if "value" not in kinds and not skipped:
        found.pop("value", None)

    leaves = [
        difference(kind, path, ours.get(path), theirs.get(path), tolerance, scale)
        for kind, (ours, theirs) in found.items()
        for scale in [scale_of(ours, theirs)]
        for path in {**ours, **theirs}
    ]
    hints = find_hints(problem, found, leaves, tolerance)
    return Comparison(tuple(leaves), tuple(hints), tuple(skipped), tolerance.rtol, tolerance.atol)


def _check_arguments(inputs: Any, what: Any, dtype: np.dtype) -> tuple[str, ...]:
    if not isinstance(inputs, tuple):
        raise TypeError(
            f"compare: inputs is the tuple of arguments; got {type(inputs).__name__}. "
            "Write (x,) for one."
        )
    if isinstance(what, str):
        raise TypeError(f"compare: what is a sequence of kinds; got {what!r}. Write ({what!r},).")
    kinds = tuple(dict.fromkeys(what))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"compare: what holds kinds; got {unknown}. Choose from {KINDS}.")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"compare: dtype is a floating type; got {dtype}. Complex leaves follow by themselves."
        )
    leaves = [x for x in jax.tree.leaves(inputs) if hasattr(x, "dtype")]
    if set(kinds) - {"value"} and not any(_floating(x) for x in leaves):
        raise ValueError(
            f"compare: {kinds} needs a floating or complex array to differentiate; got none in "
            "inputs. Compare the value alone, or pass arrays instead of Python numbers."
        )
    if "per_sample" in kinds:
        _check_batch(inputs)
    return kinds


def _check_batch(inputs: tuple[Any, ...]) -> None:
    if not any(_floating(x) for x in jax.tree.leaves(inputs[0]) if hasattr(x, "dtype")):
        raise ValueError(
            "compare: per_sample differentiates inputs[0]; got no floating array there. "
            "Put the parameters first."
        )
    flat, _ = jax.tree_util.tree_flatten_with_path(inputs)
    shapes = {
        f"inputs{jax.tree_util.keystr(path)}": tuple(x.shape)
        for path, x in flat
        if path[0] != jax.tree_util.SequenceKey(0) and hasattr(x, "dtype")
    }
    if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
        raise ValueError(
            "compare: per_sample needs arrays after inputs[0] with one common first axis; got "
            f"{shapes}. Pass what is shared as part of inputs[0]."
        )


def _floating(leaf: Any) -> bool:
    name = str(leaf.dtype)
    return "float" in name or "complex" in name


def _same_shapes(ours: Arrays, theirs: Arrays) -> bool:
    return {p: x.shape for p, x in ours.items()} == {p: x.shape for p, x in theirs.items()}
