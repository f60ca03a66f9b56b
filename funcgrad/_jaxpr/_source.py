"""The user's source line of an equation."""

import dataclasses
import functools
import importlib.util
import linecache
import pathlib
import re
from collections.abc import Sequence

from jax.extend import source_info_util

from funcgrad._compat import JaxprEqn

_PACKAGE = str(pathlib.Path(__file__).parent.parent)
# A layer's own lines say little: the user's line is the one that called the library.
_LIBRARIES = tuple(
    str(pathlib.Path(spec.origin).parent)
    for spec in map(
        importlib.util.find_spec,
        ("flax", "optax", "equinox", "haiku", "jaxtyping", "beartype"),
    )
    if spec and spec.origin
)
# These rooms use the rest of the package as anyone would: their lines are a user's lines.
_USERS = tuple(f"{_PACKAGE}/{room}/" for room in ("parity", "bench", "_demo"))
_COLUMN = re.compile(r":\d+ \(")
_FRAME = re.compile(r"^(?P<file>.*?):(?P<line>\d+)(?::\d+)? \((?P<function>.*)\)$")


@dataclasses.dataclass(frozen=True)
class SourceLine:
    """A place in a source file; prints as ``file:line (function)``."""

    file: str
    line: int
    function: str

    @property
    def code(self) -> str:
        """The text of the line, empty where the source cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def is_library(self) -> bool:
        """Whether it is a library's, of layers or of types, or this package's."""
        return _is_passed_over(self.file, (_PACKAGE, *_LIBRARIES))

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


def source_line(eqn: JaxprEqn, parents: Sequence[JaxprEqn] = ()) -> SourceLine | None:
    """The innermost line of the user's own code that made ``eqn``.

    Frames of JAX, Flax, Optax and of this package are passed over; where nothing else is
    left (code of a library traced by itself) the innermost of those.  JAX keeps no user's
    line inside its own jitted functions: there the line of the innermost of ``parents``,
    the equations around it from the outside in, that has one.  ``None`` when none has.
    """
    for skipped in ((_PACKAGE, *_LIBRARIES), (_PACKAGE,), ()):
        for candidate in (eqn, *reversed(parents)):
            if line := _first(_frames(candidate.source_info), skipped):
                return line
    return None


def calling_line() -> SourceLine | None:
    """The innermost line of the user's own code among the calls that are running.

    JAX cuts what it tells at a ``jit``: ``None`` where nothing of the user's is traced in it.
    """
    return _first(_frames(source_info_util.current()), (_PACKAGE, *_LIBRARIES))


def _first(frames: Sequence[SourceLine], skipped: tuple[str, ...]) -> SourceLine | None:
    for frame in frames:
        if not _is_passed_over(frame.file, skipped):
            return frame
    return None


def _is_passed_over(file: str, skipped: tuple[str, ...]) -> bool:
    return file.startswith(skipped) and not file.startswith(_USERS)


@functools.lru_cache(maxsize=64)  # of an equation several things are asked, one after another
def _frames(info: source_info_util.SourceInfo) -> tuple[SourceLine, ...]:
    """The frames of a traceback, innermost first."""
    frames = []
    for text in source_info_util.summarize(info, num_frames=1000).splitlines():
        if match := _FRAME.match(text):
            frames.append(SourceLine(match["file"], int(match["line"]), match["function"]))
    return tuple(frames[::-1])


def call_stack(eqn: JaxprEqn) -> list[SourceLine]:
    """The calls that led to ``eqn``, outermost first, JAX's own left out."""
    return list(_frames(eqn.source_info)[::-1])


def calling_lines(eqn: JaxprEqn) -> str:
    """The lines that led to ``eqn``, without columns: to be compared, at little cost."""
    frames = source_info_util.summarize(eqn.source_info, num_frames=1000)
    return _COLUMN.sub(" (", frames)
