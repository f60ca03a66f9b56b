"""Why a derivative is off: what the function does on either side of the point."""

import numpy as np

from funcgrad._gradcheck._compare import Found
from funcgrad._gradcheck._jacobians import Derivatives
from funcgrad._gradcheck._problem import narrowed
from funcgrad._gradcheck._report import number
from funcgrad._gradcheck._space import Probes

_STEPS = np.array([1.0, 0.5, 0.25])
# Points so near to each other that second differences of the function are its noise.
_NEAR = np.array([1.0, 0.95, 0.9, 0.85, 0.8])
_SEEN = np.concatenate([[0.0], _STEPS, -_STEPS, _NEAR, -_NEAR])


def explain(
    found: Found,
    derivatives: Derivatives,
    probes: tuple[Probes, Probes],
    tolerances: tuple[float, float],
) -> str:
    """Words for what is seen along the entry's direction: rounding, a kink, a jump, curvature."""
    along, onto = probes
    if words := _rounding(found, derivatives, probes):
        return words
    for direction in found.directions:
        offset = derivatives.eps * along.rows(direction, direction + 1)
        values = derivatives.values(_SEEN[:, None] * offset)
        for functional in found.functionals:
            seen = (onto.matrix[functional : functional + 1] @ values.T)[0]
            unit = float(np.finfo(derivatives.at.dtype).eps)
            if words := _words(seen, derivatives.eps, unit, tolerances):
                return words
    if not np.isfinite(found.analytical):
        return "the rule gives no finite number, the function does"
    return found.hint


def _rounding(found: Found, derivatives: Derivatives, probes: tuple[Probes, Probes]) -> str:
    """Words where a number rounded to few bits hides the slope, and a longer step shows it."""
    rounded = narrowed(derivatives.problem)
    if rounded is None or not np.isfinite([found.numerical, found.analytical]).all():
        return ""
    # Over this step rounding and curvature disturb a difference alike, by about its square.
    step = float(rounded.unit) ** (1 / 3)
    wide = _difference(found, derivatives, probes, step)
    allowed = 10 * step**2 * max(1.0, abs(wide))
    numerical, analytical = abs(found.numerical - wide), abs(found.analytical - wide)
    if not np.isfinite(wide) or numerical <= min(analytical, allowed):
        return ""
    if analytical <= allowed:
        return "rounding, see the note"
    return f"rounding, and more: the difference over {2 * step:.2g} is {number(wide)}"


def _difference(
    found: Found, derivatives: Derivatives, probes: tuple[Probes, Probes], step: float
) -> complex:
    """The numerical derivative over another step."""
    along, onto = probes
    rows = step * np.concatenate([along.rows(d, d + 1) for d in found.directions])
    ahead, behind = np.split(derivatives.values(np.concatenate([rows, -rows])), 2)
    parts = (onto.matrix[list(found.functionals)] @ ((ahead - behind) / (2 * step)).T).ravel()
    unit = -1j if found.mode == "reverse" else 1j
    return complex(parts[0] if len(parts) == 1 else parts[0] + unit * parts[1])


def _words(values: np.ndarray, eps: float, unit: float, tolerances: tuple[float, float]) -> str:
    here, right, left, *near = np.split(values, [1, 4, 7, 12])
    here = here[0]
    if not np.isfinite(here):
        return f"the value itself is {here:g}"
    for side, sign in ((right, "+"), (left, "-")):
        if not np.isfinite(side).all():
            return f"the value at x {sign} {eps:g} is {side[~np.isfinite(side)][0]:g}"
    slopes = (right - here) / (_STEPS * eps), (here - left) / (_STEPS * eps)
    gaps, means = slopes[1] - slopes[0], (slopes[0] + slopes[1]) / 2
    gap = np.abs(gaps[0])
    roughness = min(np.abs(np.diff(side, 2)).max() for side in near)
    noise = (8 * unit * np.abs(values).max() + 4 * roughness) / (_STEPS * eps)
    atol, rtol = tolerances
    if gap > atol + rtol * max(np.abs(slopes[0][0]), np.abs(slopes[1][0])) + noise[0]:
        # At a kink one side at least is straight; noise and curvature bend both.
        is_straight = lambda side: np.all(np.abs(side - side[0]) <= 0.01 * gap + noise)
        a_side_is = any(map(is_straight, slopes))
        apart, within = np.abs(right[-1] - left[-1]), max(np.ptp(right), np.ptp(left))
        is_torn = np.abs(gaps).max() > 1.5 * gap
        if is_torn and (a_side_is or within < 0.25 * apart):
            return f"jump: the value is {left[0]:g} on the left, {right[0]:g} on the right"
        if a_side_is and not is_torn:
            return f"kink: slope {slopes[1][0]:.4g} on the left, {slopes[0][0]:.4g} on the right"
    changes = np.abs(np.diff(means))
    is_off = changes.sum() > atol + rtol * np.abs(means[-1]) + noise[-1]
    if is_off and changes[1] < 0.5 * changes[0] and np.all(np.diff(np.abs(gaps)) <= noise[1:]):
        return "curved within the step: a smaller eps gives another difference"
    return ""
