"""One value of a program: what made it, where, and how large it is."""

import dataclasses
import functools
import math
from typing import Any, Literal, TypeAlias

from funcgrad._compat import Jaxpr, JaxprEqn, primitives, scopes, value_name
from funcgrad._compat import Literal as LiteralAtom
from funcgrad._jaxpr import Body, SourceLine, bodies, loop_sizes, source_line

OWN = "funcgrad."  # names that this package gives to values, which no report shows

Kind: TypeAlias = Literal["argument", "constant", "computed"]


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """One value kept, or that could be kept, for the backward pass.

    Attributes:
      shape: All of it; a value made by a loop has the loop's length in front.
      dtype: A NumPy type, or the type of a key.
      kind: ``"argument"`` of the function, ``"constant"`` that it closes over or that stands
        in its text, or ``"computed"`` by it.
      operation: Primitive that made it, ``""`` for what is not computed.
      argument: Path of the argument, such as ``params['dense']['kernel']``, or ``""``.
      name: What ``checkpoint_name`` calls it, or ``""``.
      path: Named scopes around it, such as ``Encoder/layer_0/Dense_0``: the modules of Flax
        Linen, and every ``jax.named_scope``.
      line: The user's line that made it, ``None`` where there is none.
      trips: Number of loop iterations that each left a piece of it; 1 outside of loops.
    """

    shape: tuple[int, ...]
    dtype: Any
    kind: Kind
    operation: str = ""
    argument: str = ""
    name: str = ""
    path: str = ""
    line: SourceLine | None = None
    trips: int = 1

    @property
    def bytes(self) -> int:
        """Size of all iterations together."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_per_trip(self) -> int:
        """Size of the piece that one iteration leaves."""
        return self.bytes // max(self.trips, 1)

    @property
    def what(self) -> str:
        """What it is, in a word or two: its name, argument or operation."""
        return self.name or self.argument or self.operation or self.kind


@dataclasses.dataclass(frozen=True)
class Scope:
    """A program and the equations around it, so that a value can be traced to its maker."""

    jaxpr: Jaxpr
    outer: "Scope | None" = None
    eqn: JaxprEqn | None = None
    body: Body | None = None

    def parents(self) -> tuple[JaxprEqn, ...]:
        """The equations around this program, from the outside in."""
        if self.outer is None:
            return ()
        return (*self.outer.parents(), self.eqn)

    def inside(self, eqn: JaxprEqn, body: Body) -> "Scope":
        """The scope of one nested program."""
        return Scope(body.jaxpr, self, eqn, body)

    def maker(self, atom: Any) -> JaxprEqn | None:
        """The equation of this program that has ``atom`` among its outputs."""
        return None if isinstance(atom, LiteralAtom) else self._makers.get(atom)

    @functools.cached_property
    def _makers(self) -> dict[Any, JaxprEqn]:
        return {out: eqn for eqn in self.jaxpr.eqns for out in eqn.outvars}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a value comes from: an input's position, or an equation and what is around it."""

    kind: Kind
    position: int | None = None
    scope: Scope | None = None
    eqn: JaxprEqn | None = None
    index: int = 0
    name: str = ""
    trips: int = 1


def origin(scope: Scope, atom: Any, seen: tuple[Any, ...] = ()) -> Origin:
    """Trace ``atom`` back through names, calls and loops to what computed it."""
    if isinstance(atom, LiteralAtom):
        return Origin("constant")
    eqn = scope.maker(atom)
    if eqn is not None:
        return _of_output(scope, eqn, _index(eqn.outvars, atom), seen)
    if _index(scope.jaxpr.constvars, atom) is not None:
        return Origin("constant")
    place = _index(scope.jaxpr.invars, atom)
    if scope.outer is None or scope.eqn is None or scope.body is None:
        return Origin("argument", position=place)
    return _of_input(scope, place, seen)


def _index(atoms: Any, atom: Any) -> Any:
    return next((i for i, other in enumerate(atoms) if other is atom), None)


def _of_output(scope: Scope, eqn: JaxprEqn, index: int, seen: tuple[Any, ...]) -> Origin:
    name = value_name(eqn)
    if name is not None or _is_copy(eqn):
        found = origin(scope, eqn.invars[index], seen)
        shown = "" if name is None or name.startswith(OWN) else name
        return dataclasses.replace(found, name=found.name or shown)
    trips, made = 1, Origin("computed", scope=scope, eqn=eqn, index=index)
    if eqn.primitive is primitives.scan_p and index >= loop_sizes(eqn)[1]:
        trips = eqn.params["length"]
    found = []
    for body in bodies(eqn):
        result = next((i for i, out in enumerate(body.results) if out == index), None)
        if result is not None:
            inner = scope.inside(eqn, body)
            found.append(origin(inner, body.jaxpr.outvars[result], seen))
    # The branches of a cond that do not make the value fill its place with zeros.
    best = max(found, key=_weight, default=made)
    if trips > 1 and best.kind != "computed":
        best = made
    return dataclasses.replace(best, trips=best.trips * trips)


def _weight(found: Origin) -> int:
    if found.kind == "computed":
        filler = found.eqn is not None and found.eqn.primitive.name == "broadcast_in_dim"
        return 1 if filler else 3
    return 2 if found.kind == "argument" else 0


def _of_input(scope: Scope, place: int, seen: tuple[Any, ...]) -> Origin:
    assert scope.body is not None and scope.eqn is not None and scope.outer is not None
    role, eqn = scope.body.role, scope.eqn
    first = last = 0
    if role == "scan":
        first, n_carry = loop_sizes(eqn)
        last = first + n_carry
    elif role == "while_body":
        first, last = eqn.params["body_nconsts"], len(scope.jaxpr.invars)
    if first <= place < last:  # a carried value was made by the iteration before
        carried = scope.jaxpr.outvars[place - first]
        if not any(carried is other for other in seen):
            return origin(scope, carried, (*seen, carried))
    operand = scope.body.operands[place]
    if operand is None:
        return Origin("computed", scope=scope.outer, eqn=eqn)
    return origin(scope.outer, eqn.invars[operand], seen)


def _is_copy(eqn: JaxprEqn) -> bool:
    """Whether an equation gives its inputs back as they are."""
    if eqn.primitive.name == "reduce_precision":  # as JAX marks what a checkpoint saves
        dtype = eqn.invars[0].aval.dtype
        return dtype == eqn.outvars[0].aval.dtype and _is_whole(eqn, dtype)
    return eqn.primitive.name == "optimization_barrier"


def _is_whole(eqn: JaxprEqn, dtype: Any) -> bool:
    bits = 1 + eqn.params["exponent_bits"] + eqn.params["mantissa_bits"]
    return bits == 8 * dtype.itemsize


def describe(aval: Any, found: Origin, arguments: tuple[str, ...] = ()) -> SavedTensor:
    """The record of a value of type ``aval`` that comes from ``found``."""
    shape, dtype = tuple(aval.shape), aval.dtype
    if found.eqn is None or found.scope is None:
        argument = arguments[found.position] if found.position is not None else ""
        return SavedTensor(shape, dtype, found.kind, argument=argument, name=found.name)
    parents = found.scope.parents()
    return SavedTensor(
        shape,
        dtype,
        found.kind,
        operation=found.eqn.primitive.name,
        name=found.name,
        path="/".join(scope for eqn in (*parents, found.eqn) for scope in scopes(eqn)),
        line=source_line(found.eqn, parents),
        trips=found.trips,
    )
