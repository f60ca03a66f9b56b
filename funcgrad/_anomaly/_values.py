"""Values of a program that is run again, and the origins of what is not finite in them."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from funcgrad._anomaly._report import Operand, is_inexact

Mask: TypeAlias = Any  # a boolean numpy array
# Finite, and no special point of the usual functions, so that it makes nothing bad by itself.
_HARMLESS = 0.7
# How many origins are told apart where they meet.
_APART = 8


class Refused(Exception):
    """Why the program is not run again."""


@dataclasses.dataclass(eq=False)
class Origin:
    """Where bad values begin: an equation with finite operands, an input, or a constant."""

    order: int
    kind: Literal["equation", "input", "constant"]
    eqn: Any = None
    parents: tuple[Any, ...] = ()
    path: tuple[str, ...] = ()
    within: tuple[str, ...] = ()  # the path without the device
    output: Operand | None = None
    operands: tuple[Operand, ...] = ()
    makes: Literal["nan", "inf"] = "nan"
    backward: bool = False
    derivative_of: str | None = None
    infinities: tuple["Origin", ...] = ()  # those given, of which it made a NaN
    bad: Mask | None = None
    trap: Any = None  # the `where` whose zero met its bad values on the way back
    note: str = ""

    @property
    def on_purpose(self) -> bool:
        """Whether its infinities may be meant: nothing computed them."""
        return self.kind != "equation"


@dataclasses.dataclass(eq=False)
class Value:
    """An array, which of its elements are bad by which origin, and a mark of the where trap."""

    array: Any
    origins: dict[Origin, Mask] = dataclasses.field(default_factory=dict)
    mark: Any = None

    def map(self, move: Callable[[Any], Any]) -> "Value":
        """The same moved: ``move`` acts on the array and on the masks."""
        moved = {origin: np.asarray(move(mask)) for origin, mask in self.origins.items()}
        return Value(move(self.array), {o: m for o, m in moved.items() if m.any()}, self.mark)


def nonfinite(x: Any) -> Mask | None:
    """Which elements are NaN or infinite; ``None`` where none is."""
    if not is_inexact(x):
        return None
    # In numpy: nothing to compile, and XLA's own reductions may lose a NaN.
    bad = ~np.isfinite(np.asarray(x))
    return bad if bad.any() else None


def origins_of(values: Sequence[Value]) -> list[Origin]:
    """All origins among ``values``, the earliest first."""
    return sorted({o for value in values for o in value.origins}, key=lambda o: o.order)


def attribute(
    run: Callable[[list[Any]], Sequence[Any]], values: Sequence[Value], outputs: Sequence[Any]
) -> list[tuple[dict[Origin, Mask], Mask | None]]:
    """For each output: which origin makes which elements bad, and what none explains.

    ``run`` is tried with the bad elements of one origin alone, the others replaced by a
    harmless number: what is bad then is of this origin.  A NaN made of infinities that may be
    meant, such as those of a mask, is left unexplained.
    """
    bads = [nonfinite(out) for out in outputs]
    if all(bad is None for bad in bads):
        return [({}, None) for _ in outputs]
    origins = origins_of(values)
    masks: list[dict[Origin, Mask]] = [{} for _ in outputs]
    for place, origin in enumerate(origins):
        alone = outputs
        if len(origins) > 1 and place < _APART:
            alone = run([_only(value, origin) for value in values])
        meant = origin.on_purpose and not any(_has_nan(value, origin) for value in values)
        for found, bad, out, real in zip(masks, bads, alone, outputs, strict=True):
            here = None if bad is None else nonfinite(out)
            if here is not None:
                here = here & bad & ~np.isnan(np.asarray(real)) if meant else here & bad
                if here.any():
                    found[origin] = here
    unexplained = []
    for bad, found in zip(bads, masks, strict=True):
        unexplained.append(None if bad is None else bad & ~_either(found.values(), bad))
    if origins and any(rest is not None and rest.any() for rest in unexplained):
        # What is bad without any of them begins here; the rest takes several of them together.
        without = run([_only(value, None) for value in values])
        for k, (rest, out) in enumerate(zip(unexplained, outputs, strict=True)):
            if rest is None or not rest.any():
                continue
            own = nonfinite(without[k])
            own = np.zeros_like(rest) if own is None else own & rest
            together = rest & ~own
            nan = np.isnan(np.asarray(out))
            blamed = [o for o in origins if not o.on_purpose]
            for origin in blamed or origins:
                theirs = together if blamed else together & ~nan
                if theirs.any():
                    masks[k][origin] = masks[k].get(origin, False) | theirs
            unexplained[k] = own if blamed else own | (together & nan)
    return [
        (found, rest if rest is not None and rest.any() else None)
        for found, rest in zip(masks, unexplained, strict=True)
    ]


def _either(masks: Iterable[Mask], like: Mask) -> Mask:
    return np.logical_or.reduce([np.zeros_like(like), *masks])


def _only(value: Value, origin: Origin | None) -> Any:
    """The array with the bad elements of this origin only, the others harmless."""
    others = [mask for other, mask in value.origins.items() if other is not origin]
    if not others:
        return value.array
    array = np.array(value.array)
    mine = value.origins.get(origin, False) if origin else False
    array[np.logical_or.reduce(others) & ~np.asarray(mine)] = _HARMLESS
    sharding = getattr(value.array, "sharding", None)
    return array if sharding is None else jax.device_put(array, sharding)


def _has_nan(value: Value, origin: Origin) -> bool:
    mine = value.origins.get(origin)
    return mine is not None and bool(np.isnan(np.asarray(value.array)[mine]).any())
