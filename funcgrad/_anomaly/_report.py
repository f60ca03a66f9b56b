"""What ``detect_anomaly`` found, as data and as text."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._jaxpr import SourceLine


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array in short.

    Attributes:
      name: Where it stands, such as ``operand 0`` or ``result[1]['w']``.
      type: Its dtype and shape.
      min: The least finite element, ``None`` where there is none.
      max: The greatest.
      n_nan: How many elements are NaN.
      n_inf: How many are infinite.
      index: Where the first NaN or infinity is; ``None`` where all are finite.
      at_fault: The element that meets the first bad element of the result, where the shapes
        tell; else ``None``.
    """

    name: str
    type: str
    min: float | None
    max: float | None
    n_nan: int
    n_inf: int
    index: tuple[int, ...] | None
    at_fault: Any = None

    def __str__(self) -> str:
        said = []
        if self.min is not None:
            said.append(
                f"all {self.min:.6g}"
                if self.min == self.max
                else f"{self.min:.6g} to {self.max:.6g}"
            )
        said += [f"{n:d} {kind}" for n, kind in ((self.n_nan, "NaN"), (self.n_inf, "Inf")) if n]
        if self.index:
            said.append(f"first at {list(self.index)}")
        if self.at_fault is not None:
            said.append(f"here {self.at_fault:.6g}")
        return f"{self.name}: {self.type}" + (", " if said else "") + ", ".join(said)


def is_inexact(x: Any) -> bool:
    """Whether ``x`` is an array or a number that may be NaN or infinite."""
    dtype = getattr(x, "dtype", None)
    return isinstance(x, float | complex) if dtype is None else jnp.issubdtype(dtype, jnp.inexact)


def summarise(name: str, x: Any, at: tuple[int, ...] | None = None) -> Operand:
    """An array in short; ``at`` is the index of the element that is at fault, if known."""
    if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return Operand(name, f"{x.dtype}{list(x.shape)}", None, None, 0, 0, None)
    array, inexact = np.asarray(x), is_inexact(x)
    finite = np.isfinite(array) if inexact else np.ones(array.shape, bool)
    real = np.abs(array) if np.iscomplexobj(array) else array
    kept = real[finite].astype(float)
    bad = ~finite
    n_nan = int(np.isnan(array).sum()) if inexact else 0
    element = None
    if at is not None and array.shape and len(at) == array.ndim:
        # Python's numbers print the extended dtypes, too.
        element = complex(array[at]) if np.iscomplexobj(array) else float(array[at])
    return Operand(
        name=name,
        type=f"{array.dtype}{list(array.shape)}",
        min=float(kept.min()) if kept.size else None,
        max=float(kept.max()) if kept.size else None,
        n_nan=n_nan,
        n_inf=int(bad.sum()) - n_nan,
        index=tuple(int(i) for i in np.argwhere(bad)[0]) if bad.any() else None,
        at_fault=element,
    )


@dataclasses.dataclass(frozen=True)
class Anomaly:
    """The first cause of a result that is not finite; prints as some lines of text.

    Attributes:
      result: The leaves of the result that are not finite.
      kind: "nan" or "inf", what the equation makes first; "" where no equation was found.
      phase: "forward" or "backward".
      operation: The primitive.
      derivative_of: The primitive whose derivative it belongs to, if it is known to.
      line: The user's line; ``.code`` is its text.
      path: The loops, branches and devices it stands in, from the outside in.
      module: The named scopes around it, as of Flax's modules.
      output: What it made.
      operands: Of what.
      reached: The leaves of the result that its bad values reach.
      inputs: Inputs and constants that held NaN or infinities before, and these reach the
        result.
      rows: Which rows of which arguments are at fault, where an experiment shows it.
      n_others: How many other equations make bad values of their own that reach the result.
      repair: What to write instead, where the branch not taken of a ``where`` is at fault.
      note: What else must be known, such as why nothing was found.
    """

    result: tuple[Operand, ...]
    kind: Literal["nan", "inf", ""] = ""
    phase: Literal["forward", "backward"] = "forward"
    operation: str = ""
    derivative_of: str | None = None
    line: SourceLine | None = None
    path: tuple[str, ...] = ()
    module: str = ""
    output: Operand | None = None
    operands: tuple[Operand, ...] = ()
    reached: tuple[str, ...] = ()
    inputs: tuple[Operand, ...] = ()
    rows: str = ""
    n_others: int = 0
    repair: str = ""
    note: str = ""

    def __str__(self) -> str:
        lines = [f"{self.result[0]}{_and_more(self.result[1:])}"]
        lines += [f"already not finite: {operand}" for operand in self.inputs]
        if self.output is not None:
            of = f", in the derivative of {self.derivative_of}" if self.derivative_of else ""
            kind = {"nan": "NaN", "inf": "Inf"}[self.kind]
            at = f", at {self.line}" if self.line else ""
            lines.append(f"first {kind}: {self.operation}, {self.phase}{of}{at}")
            if self.line is not None and self.line.code:
                lines.append(f"    {self.line.code}")
            lines += [f"  {operand}" for operand in (*self.operands, self.output)]
            lines += [f"  in {where}" for where in self.path]
            if self.module:
                lines.append(f"  in module {self.module}")
        if self.rows:
            lines.append(f"  {self.rows}")
        if self.reached:
            lines.append(f"  reaches {self.reached[0]}{_and_more(self.reached[1:])}")
        if self.n_others:
            lines.append(f"other lines that make such values on their own: {self.n_others}")
        return "\n".join([*lines, *filter(None, (self.repair, self.note))])


def _and_more(rest: Sequence[Any]) -> str:
    return f", and {len(rest)} more" if rest else ""
