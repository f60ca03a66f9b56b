"""Visit every equation of a jaxpr, nested bodies included."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from funcgrad._compat import JaxprEqn, open_jaxpr, primitives
from funcgrad._jaxpr._bodies import bodies
from funcgrad._jaxpr._source import SourceLine, source_line


@dataclasses.dataclass(frozen=True)
class Visit:
    """An equation and where it stands.

    ``path`` names the bodies entered, such as ``("scan.body", "cond.branches[1]")``;
    ``trips`` is how often it runs for one run of the program (the product of the
    lengths of the scans around it), ``None`` inside a ``while``, whose count is not known;
    ``parents`` are the equations around it, from the outside in.
    """

    eqn: JaxprEqn
    path: tuple[str, ...] = ()
    trips: int | None = 1
    parents: tuple[JaxprEqn, ...] = ()

    @property
    def depth(self) -> int:
        """The number of bodies entered."""
        return len(self.path)

    @property
    def line(self) -> SourceLine | None:
        """The user's source line, of the equation or of the nearest one around it."""
        return source_line(self.eqn, self.parents)


def walk(jaxpr: Any) -> Iterator[Visit]:
    """Yield a ``Visit`` for each equation, a nested body's after the equation that holds it."""
    yield from _walk(jaxpr, (), 1, ())


def _walk(
    jaxpr: Any, path: tuple[str, ...], trips: int | None, parents: tuple[JaxprEqn, ...]
) -> Iterator[Visit]:
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield Visit(eqn, path, trips, parents)
        for body in bodies(eqn):
            inner = trips
            if eqn.primitive is primitives.scan_p and trips is not None:
                inner = trips * eqn.params["length"]
            elif body.role in ("while_cond", "while_body"):
                inner = None
            name = f"{eqn.primitive.name}.{body.name}"
            yield from _walk(body.jaxpr, (*path, name), inner, (*parents, eqn))
