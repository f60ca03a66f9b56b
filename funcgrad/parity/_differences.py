"""How far two arrays are apart, and whether that is close enough."""

import dataclasses

import jax.numpy as jnp
import numpy as np

_RTOL = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
_MOST_NOISE = 1e3  # beyond it a small entry beside a huge one would pass whatever it is


@dataclasses.dataclass(frozen=True)
class Difference:
    """One leaf of one kind on both sides.

    Attributes:
      kind: ``value``, ``grad``, ``jvp``, ``hvp`` or ``per_sample``.
      path: The output or input leaf, as ``inputs[0]['w']``.
      max_abs: Largest absolute difference; infinite where shapes differ.
      max_rel: Largest difference relative to the larger of the two numbers.
      jax_shape: Shape in JAX, None if the leaf does not exist there.
      torch_shape: Shape in torch.
      jax_dtype: Dtype in JAX.
      torch_dtype: Dtype in torch.
      ok: Whether they agree within the tolerance, in shape and in floating dtype.
    """

    kind: str
    path: str
    max_abs: float
    max_rel: float
    jax_shape: tuple[int, ...] | None
    torch_shape: tuple[int, ...] | None
    jax_dtype: str | None
    torch_dtype: str | None
    ok: bool

    def row(self) -> tuple[str, ...]:
        """The cells of a table."""
        sides = [
            "missing" if shape is None else f"{dtype}[{','.join(map(str, shape))}]"
            for shape, dtype in (
                (self.jax_shape, self.jax_dtype),
                (self.torch_shape, self.torch_dtype),
            )
        ]
        numbers = (f"{self.max_abs:.2g}", f"{self.max_rel:.2g}")
        return self.kind, self.path, *sides, *numbers, "ok" if self.ok else "DIFFERENT"


class Tolerance:
    """When two numbers count as equal."""

    def __init__(self, dtype: np.dtype, rtol: float | None, atol: float | None):
        self.rtol = _RTOL.get(dtype.name, 5e-2) if rtol is None else rtol
        self.atol = atol
        self._epsilon = float(jnp.finfo(dtype).eps)

    def within(self, distance: np.ndarray, size: np.ndarray, scale: float) -> bool:
        """Whether all distances are small against the numbers they are between.

        ``scale`` is the largest number of the whole computation.
        """
        atol = self.atol
        if atol is None:
            # A small leaf is held to its own scale.  Where an exact zero is due both sides have
            # noise, which goes by the numbers that cancelled.
            noise = max(8 * self._epsilon, self.rtol / 100) * min(scale, _MOST_NOISE)
            atol = self.rtol * min(1.0, _largest(size)) + noise + 8 * self._epsilon
        bound = atol + self.rtol * np.where(np.isfinite(size), size, 0.0)
        return bool(np.all(distance <= bound))


def scale_of(*sides: dict[str, np.ndarray]) -> float:
    """The largest finite magnitude of a computation, over all leaves of both sides."""
    return max(
        (_largest(np.asarray(np.abs(_wide(x)))) for side in sides for x in side.values()),
        default=0.0,
    )


def close(
    ours: np.ndarray, theirs: np.ndarray, tolerance: Tolerance, scale: float | None = None
) -> bool:
    """Whether two arrays have one shape and equal numbers."""
    if ours.shape != theirs.shape:
        return False
    scale = scale_of({"": ours}, {"": theirs}) if scale is None else scale
    distance, size = _distance(ours, theirs)
    if any(jnp.issubdtype(x.dtype, jnp.inexact) for x in (ours, theirs)):
        return tolerance.within(distance, size, scale)
    return not distance.any()  # integers and booleans are exact


def difference(
    kind: str,
    path: str,
    ours: np.ndarray | None,
    theirs: np.ndarray | None,
    tolerance: Tolerance,
    scale: float,
) -> Difference:
    """Compare one leaf; a side that lacks it is None."""
    max_abs = max_rel = float("inf")
    ok = False
    if ours is not None and theirs is not None and ours.shape == theirs.shape:
        distance, size = _distance(ours, theirs)
        with np.errstate(invalid="ignore", divide="ignore"):
            relative = np.where(distance == 0, 0.0, distance / size)
        relative = np.where(np.isnan(relative), np.inf, relative)
        max_abs, max_rel = (float(x.max(initial=0.0)) for x in (distance, relative))
        ok = close(ours, theirs, tolerance, scale) and _same_type(ours.dtype, theirs.dtype)
    shape = lambda x: None if x is None else tuple(x.shape)
    name = lambda x: None if x is None else x.dtype.name
    return Difference(
        kind, path, max_abs, max_rel, shape(ours), shape(theirs), name(ours), name(theirs), ok
    )


def _distance(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distances, zero where both are the same infinity or NaN, and the larger magnitudes."""
    equal = ours == theirs  # in their own types: 64-bit integers are exact
    a, b = _wide(ours), _wide(theirs)
    equal = equal | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(equal, 0.0, np.abs(a - b))
        size = np.maximum(np.abs(a), np.abs(b))
    distance = np.where(np.isnan(distance), np.inf, distance)
    # Integers that differ by less than float64 can tell still differ.
    distance = np.where(~equal & (distance == 0), 1.0, distance)
    return distance, np.asarray(np.nan_to_num(size, posinf=np.inf))


def _largest(size: np.ndarray) -> float:
    return float(size[np.isfinite(size)].max(initial=0.0))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _same_type(ours: np.dtype, theirs: np.dtype) -> bool:
    if jnp.issubdtype(ours, jnp.inexact) or jnp.issubdtype(theirs, jnp.inexact):
        return ours == theirs
    return (ours.kind == "b") == (theirs.kind == "b")
