"""Why two leaves differ, where that can be proved rather than guessed."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from funcgrad.parity._conventions import MEANING, flipped
from funcgrad.parity._differences import Difference, Tolerance, close, scale_of

_KINKS = (
    "abs|sign|max|min|clamp|reduce_max|reduce_min|argmax|argmin|cummax|cummin|sort|top_k|"
    "pow|integer_pow|sqrt|rsqrt|cbrt|log|log1p|div|atan2|select_n|custom_jvp_call|round|floor|ceil"
)


@dataclasses.dataclass(frozen=True)
class Hint:
    """A proved reason.

    Attributes:
      convention: ``gelu``, ``ddof``, ``epsilon``, ``padding_idx``, ``special_point``,
        ``conjugate``, ``transpose``, ``sign``, ``sum_or_mean`` or ``precision``.
      leaves: Kind and path of the leaves that it explains.
      message: What is so on either side, and what to do.
    """

    convention: str
    leaves: tuple[tuple[str, str], ...]
    message: str

    def __str__(self) -> str:
        kind, path = self.leaves[0]
        more = f" and {len(self.leaves) - 1} more" if len(self.leaves) > 1 else ""
        return f"{kind} of {path}{more}: {self.message}"


class _Case:
    """The leaves that differ, with their numbers."""

    def __init__(self, problem: Any, found: dict, leaves: list[Difference], tolerance: Tolerance):
        self.problem = problem
        self.tolerance = tolerance
        self.values_agree = all(leaf.ok for leaf in leaves if leaf.kind == "value")
        self.pairs = {
            (d.kind, d.path): (found[d.kind][0][d.path], found[d.kind][1][d.path])
            for d in leaves
            if not d.ok and d.jax_shape is not None and d.torch_shape is not None
        }

    def kinds(self, left: Iterable[tuple[str, str]]) -> list[str]:
        return list(dict.fromkeys(kind for kind, _ in left))


def find_hints(
    problem: Any, found: dict, leaves: list[Difference], tolerance: Tolerance
) -> list[Hint]:
    """The reasons for the leaves that differ; a leaf is explained at most once."""
    case = _Case(problem, found, leaves, tolerance)
    left = dict(case.pairs)
    hints: dict[str, Hint] = {}
    for search in (_by_convention, _by_special_point, _by_numbers, _by_precision):
        if not left:
            break
        for convention, keys, message in search(case, left):
            keys = [key for key in keys if key in left]
            if keys:
                known = hints.get(convention, Hint(convention, (), message))
                hints[convention] = dataclasses.replace(known, leaves=(*known.leaves, *keys))
        explained = {key for hint in hints.values() for key in hint.leaves}
        left = {key: pair for key, pair in left.items() if key not in explained}
    return list(hints.values())


def _by_convention(case: _Case, left: dict) -> Iterator[tuple[str, list, str]]:
    """Torch again with a convention the other way round; two at once if one is not enough."""
    met = []
    for name in MEANING:
        cured = _cured(case, left, (name,))
        if cured is not None:
            met.append(name)
            yield name, cured, MEANING[name]
            left = {key: pair for key, pair in left.items() if key not in cured}
    for together in itertools.combinations(met, 2):
        cured = _cured(case, left, together) or []
        for name in together:
            yield name, cured, MEANING[name]
        left = {key: pair for key, pair in left.items() if key not in cured}


def _cured(case: _Case, left: dict, names: tuple[str, ...]) -> list | None:
    """The leaves that then agree; None if the program never meets the convention."""
    mode = flipped(*names)
    cured = []
    for kind in case.kinds(left):
        try:
            with mode:
                theirs = case.problem.run_torch(kind)
        except Exception:  # a function that refuses the change proves nothing
            return None
        cured += [
            key
            for key, (ours, _) in left.items()
            if key[0] == kind
            and close(ours, theirs[key[1]], case.tolerance, scale_of({"": ours}, theirs))
        ]
    return cured if mode.hits else None


def _by_special_point(case: _Case, left: dict) -> Iterator[tuple[str, list, str]]:
    """Derivatives that differ here and agree a small step away, in some direction."""
    derivatives = [
        key
        for key, (ours, theirs) in left.items()
        # a kink makes a large difference; what is small has another reason
        if key[0] != "value"
        and not close(ours, theirs, Tolerance(np.dtype(np.float32), None, None))
    ]
    if not derivatives or not case.values_agree:
        return
    rng = np.random.default_rng(case.problem.seed)
    for sign in (0.0, 1.0, -1.0):

        def step(x, sign=sign):
            x = np.where(np.isfinite(x), x, rng.normal(size=x.shape)).astype(x.dtype)
            signs = rng.choice([-1.0, 1.0], x.shape) if sign == 0 else sign
            size = rng.uniform(5e-4, 1e-3, x.shape) * np.maximum(np.abs(x), 1.0)
            return np.asarray(x + (signs * size).astype(x.dtype))

        near = case.problem.moved(step)
        agree = {}
        for kind in case.kinds(derivatives):
            try:
                ours, theirs = near.run(kind)
            except Exception:  # outside the domain
                return
            agree[kind] = {
                path
                for path in ours
                if np.isfinite(_wide(ours[path])).all()
                and path in theirs
                and close(ours[path], theirs[path], case.tolerance, scale_of(ours, theirs))
            }
        cured = [key for key in derivatives if key[1] in agree[key[0]]]
        if cured:
            yield "special_point", cured, _point_message(case)
            return


def _point_message(case: _Case) -> str:
    arrays = [x for x in jax.tree.leaves(case.problem.inputs) if isinstance(x, np.ndarray)]
    zeros = sum(int((x == 0).sum() + (~np.isfinite(_wide(x))).sum()) for x in arrays)
    ties = sum(int(x.size - np.unique(x).size) for x in arrays)
    names = sorted(set(re.findall(rf"\b({_KINKS})\b", case.problem.jaxpr())))
    return (
        "both agree a small step away, so this point is special: a tie, a kink or a singularity, "
        "where each library picks its own derivative "
        f"(inputs with {zeros} zeros, infinities or NaN and {ties} repeated entries; "
        f"candidates in the JAX program: {', '.join(names) or 'not known'})"
    )


def _by_numbers(case: _Case, left: dict) -> Iterator[tuple[str, list, str]]:
    """What the two arrays themselves show."""
    tolerance = case.tolerance
    for key, (ours, theirs) in left.items():
        a, b = _wide(ours), _wide(theirs)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            continue
        if a.dtype.kind == "c" and close(np.asarray(a.conj()), b, tolerance):
            yield (
                "conjugate",
                [key],
                "one is the conjugate of the other; torch's gradients of "
                "complex numbers are JAX's conjugated, and compare has already converted them",
            )
        elif any(close(a.transpose(axes), b, tolerance) for axes in _swaps(a.ndim)):
            yield "transpose", [key], "one is the transpose of the other"
        elif (ratio := _ratio(a, b, tolerance)) is not None:
            yield from _by_ratio(case, key, ratio)


def _swaps(ndim: int) -> set[tuple[int, ...]]:
    """Axes reversed, and each pair of neighbours swapped."""
    axes = tuple(range(ndim))
    swaps = {axes[::-1]} if ndim > 1 else set()
    return swaps | {(*axes[:n], n + 1, n, *axes[n + 2 :]) for n in range(ndim - 1)}


def _ratio(a: np.ndarray, b: np.ndarray, tolerance: Tolerance) -> float | None:
    """The one real number c with a = c b, if there is one."""
    if a.shape != b.shape or not a.size or not b.any() or not a.any():
        return None
    at = np.unravel_index(np.argmax(np.abs(b)), b.shape)
    ratio = a[at] / b[at]
    if abs(ratio.imag) > tolerance.rtol * abs(ratio) or not close(
        a, np.asarray(ratio * b), tolerance
    ):
        return None
    return float(ratio.real)


def _by_ratio(case: _Case, key: tuple[str, str], ratio: float) -> Iterator[tuple[str, list, str]]:
    same = lambda x, y: abs(x - y) <= case.tolerance.rtol * abs(y)
    if same(ratio, -1.0):
        yield "sign", [key], "one is the negative of the other"
    counts = _counts(case)
    for n, name in counts.items():
        if same(ratio, n) or same(ratio, 1 / n):
            yield (
                "sum_or_mean",
                [key],
                f"jax = {ratio:.6g} torch, exactly {'' if ratio > 1 else '1/'}{n}, {name}: "
                "a sum on one side and a mean on the other?",
            )
            return
    for n, name in counts.items():
        for power in (1.0, 0.5, 2.0):
            if any(same(ratio, (n / (n - 1)) ** p) for p in (power, -power)):
                yield (
                    "ddof",
                    [key],
                    f"jax = {ratio:.6g} torch, a power of n / (n - 1) for n = {n}, {name}: "
                    "a variance by n on one side and by n - 1 on the other?",
                )
                return


def _counts(case: _Case) -> dict[int, str]:
    """Sizes over which a mean may have been taken."""
    counts: dict[int, str] = {}
    flat, _ = jax.tree_util.tree_flatten_with_path(case.problem.inputs)
    for path, x in flat:
        if isinstance(x, np.ndarray):
            where = f"inputs{jax.tree_util.keystr(path)}"
            for axis, n in enumerate(x.shape):
                counts.setdefault(n, f"the size of axis {axis} of {where}")
            for first, last in itertools.combinations(range(x.ndim + 1), 2):
                counts.setdefault(
                    int(np.prod(x.shape[first:last])), f"a product of axes of {where}"
                )
    return {n: name for n, name in counts.items() if n > 1}


def _by_precision(case: _Case, left: dict) -> Iterator[tuple[str, list, str]]:
    """A side that computes, or returns, less than was asked for."""
    wanted = case.problem.dtype
    narrow = {8: ("float32", "bfloat16", "float16"), 4: ("bfloat16", "float16")}
    names = narrow.get(wanted.itemsize, ())
    if not names:
        return
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
    used = [n for n in names if re.search(rf"\b{short[n]}\[", case.problem.jaxpr())]
    for key, (ours, theirs) in left.items():
        sides = [
            side for side, x in (("jax_fun", ours), ("torch_fun", theirs)) if x.dtype.name in names
        ]
        if sides and ours.dtype != theirs.dtype:
            yield "precision", [key], f"{sides[0]} returns less than {wanted}"
        elif used and close(ours, theirs, Tolerance(np.dtype(np.float32), None, None)):
            yield (
                "precision",
                [key],
                f"they agree in {used[0]}, and the JAX program computes partly in {used[0]} "
                "(a closed-over constant, or a layer that forces it)",
            )


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
