"""The graph of a function: what it holds, what it is asked, and how it is shown."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import get_args

from funcgrad._graph._data import Edge, Node, Part, Saved
from funcgrad._graph._page import page
from funcgrad._graph._scene import Scene, scene
from funcgrad._graph._svg import svg
from funcgrad._graph._text import text


@dataclasses.dataclass(frozen=True, repr=False)
class Graph:
    """A function's forward and backward pass as data; prints as text, draws as SVG and HTML.

    Attributes:
      nodes: All operations and ends, forward ones first, each part in the order it runs.
      edges: What reads what. Values of loops, branches and calls lead to and from the
        operations inside, so a node that holds nested programs has an edge only for what it
        reads itself, such as the index of a ``cond``.  Reading a mutable array
        (``jax.new_ref``) leads from where it was made, not from what was written into it.
      saved: What is kept for the backward pass, as ``fg.saved_tensors`` lists it.
      no_backward: Why there is no backward part, or ``""``.
      title: The function's name.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    saved: tuple[Saved, ...] = ()
    no_backward: str = ""
    title: str = ""

    @property
    def forward(self) -> tuple[Node, ...]:
        """The nodes of the forward pass."""
        return tuple(node for node in self.nodes if node.part == "forward")

    @property
    def backward(self) -> tuple[Node, ...]:
        """The nodes of the backward pass."""
        return tuple(node for node in self.nodes if node.part == "backward")

    @property
    def saved_bytes(self) -> int:
        """Size of what is kept for the backward pass."""
        return sum(saved.bytes for saved in self.saved)

    def flops(self, part: Part) -> int:
        """Floating-point operations of a part, loops counted in full.

        A ``cond`` counts its dearest branch and a ``while`` one round: more is not known.
        Inside ``shard_map`` they are those of one device.

        Args:
          part: ``"forward"`` or ``"backward"``.

        Raises:
          ValueError: another part.
        """
        if part not in get_args(Part):
            raise ValueError(f"Graph.flops: a part is one of {get_args(Part)}; got {part!r}.")
        return sum(n.flops for n in self.nodes if n.part == part and n.parent is None)

    def readers(self, node: Node) -> tuple[Node, ...]:
        """The nodes that read what ``node`` makes: in the backward part, ``next_functions``.

        Args:
          node: One of ``nodes``.
        """
        return self._at({edge.target for edge in self._out.get(node.id, ())})

    def sources(self, node: Node) -> tuple[Node, ...]:
        """The nodes that make what ``node`` reads.

        Args:
          node: One of ``nodes``.
        """
        return self._at({edge.source for edge in self._into.get(node.id, ())})

    def _at(self, ids: set[int]) -> tuple[Node, ...]:
        return tuple(self.nodes[i] for i in sorted(ids))

    @functools.cached_property
    def _scene(self) -> Scene:
        return scene(self.nodes, self.edges, self.saved, self.title, self.no_backward)

    @functools.cached_property
    def _out(self) -> dict[int, list[Edge]]:
        return _by(self.edges, lambda edge: edge.source)

    @functools.cached_property
    def _into(self) -> dict[int, list[Edge]]:
        return _by(self.edges, lambda edge: edge.target)

    def __str__(self) -> str:
        return text(self._scene)

    def __repr__(self) -> str:
        counts = f"{len(self.nodes)} nodes, {len(self.edges)} edges"
        return f"Graph({self.title!r}: {counts}, {self.saved_bytes} bytes saved for backward)"

    def svg(self) -> str:
        """A drawing, the text of an SVG file, in which large groups are closed."""
        return svg(self._scene)

    def _repr_svg_(self) -> str:
        return self.svg()

    def html(self) -> str:
        """A page, complete in itself, to zoom, search and open groups in."""
        return page(self._scene)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page, the drawing or the text to a file.

        Args:
          path: Ends in ``.html``, ``.svg`` or ``.txt``.

        Raises:
          ValueError: another ending.
        """
        formats = {".html": self.html, ".svg": self.svg, ".txt": lambda: f"{self}\n"}
        ending = os.path.splitext(os.fspath(path))[1].lower()
        if ending not in formats:
            raise ValueError(
                f"Graph.save: the path ends in {', '.join(formats)}; got {os.fspath(path)!r}."
            )
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(formats[ending]())


def _by(edges: Sequence[Edge], end: Callable[[Edge], int]) -> dict[int, list[Edge]]:
    found: dict[int, list[Edge]] = {}
    for edge in edges:
        found.setdefault(end(edge), []).append(edge)
    return found
