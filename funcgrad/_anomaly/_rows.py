"""Which rows of an argument are at fault, by experiment."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._anomaly._values import Origin


def rows_at_fault(
    inputs: Sequence[tuple[str, Any]], origin: Origin, is_cured: Callable[[list[Any]], bool | None]
) -> str:
    """In words; empty where no experiment shows it.

    Along an axis of the faulty value that is as long as the first axis of all arrays of an
    argument, the places that are bad are taken for its rows.  They are named if the result is
    finite with a good row in their place, and is not with that row in the place of all others.
    """
    if origin.bad is None or origin.path != origin.within:
        return ""
    for axis, size in enumerate(origin.bad.shape):
        bad = origin.bad.any(axis=tuple(i for i in range(origin.bad.ndim) if i != axis))
        if bad.all():
            continue
        good = int(np.flatnonzero(~bad)[0])

        def replaced(names: Sequence[str], rows: Any, good: int = good) -> list[Any]:
            return [_filled(x, rows, good) if name in names else x for name, x in inputs]

        arguments = _arguments(inputs, size)
        together = [name for names in arguments for name in names]
        for names in [*arguments, together] if arguments[1:] else arguments:
            if is_cured(replaced(names, bad)) and is_cured(replaced(names, ~bad)) is False:
                at_fault = np.flatnonzero(bad)
                which = ", ".join(map(str, at_fault[:8])) + (", ..." if at_fault.size > 8 else "")
                rows = "row" if at_fault.size == 1 else "rows"
                return (
                    f"{rows} {which} of {size} of {', '.join(names)}: with row {good} there "
                    "instead, the result is finite"
                )
    return ""


def _filled(x: Any, rows: Any, good: int) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.at[np.flatnonzero(rows)].set(x[good])
    new = np.array(x)
    new[rows] = new[good]
    # Where nobody has placed it, the program compiled for the call serves again.
    return jnp.asarray(new) if len(x.devices()) == 1 else jax.device_put(new, x.sharding)


def _arguments(inputs: Sequence[tuple[str, Any]], size: int) -> list[list[str]]:
    """The names of the arrays of each argument whose arrays all begin with ``size``."""
    arguments: dict[str, list[tuple[str, Any]]] = {}
    for name, x in inputs:
        arguments.setdefault(name.replace(".", "[").partition("[")[0], []).append((name, x))
    return [
        [name for name, _ in leaves]
        for leaves in arguments.values()
        if all(jnp.shape(x)[:1] == (size,) for _, x in leaves)
    ]
