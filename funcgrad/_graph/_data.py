"""What the graph consists of: nodes, edges, and the types of values."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

from funcgrad._jaxpr import SourceLine

Part: TypeAlias = Literal["forward", "backward"]
# Nodes that are no equation: what comes in and what goes out.
ENDS = frozenset({"argument", "constant", "output", "seed", "gradient"})


@dataclasses.dataclass(frozen=True)
class Value:
    """The type of one array."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def bytes(self) -> int:
        """Its size; of a typed key that of its words."""
        return math.prod(self.shape) * getattr(self.dtype, "itemsize", 0)

    def __str__(self) -> str:
        name = "float0" if self.dtype == jax.dtypes.float0 else str(self.dtype)
        for long, short in _SHORT:
            name = name.replace(long, short)
        return f"{name}[{','.join(map(str, self.shape))}]"


_SHORT = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))


class Call(NamedTuple):
    """A module, named scope or function around an operation, and the line that called it."""

    name: str
    line: int = 0


@dataclasses.dataclass(frozen=True)
class Node:
    """One operation, or one end of the program.

    Attributes:
      id: Its position in ``Graph.nodes``.
      part: ``"forward"`` or ``"backward"``.
      operation: The primitive; or ``"argument"``, ``"constant"``, ``"output"`` in the forward
        and ``"seed"`` (the cotangent of an output), ``"gradient"`` in the backward part.
      outputs: Types of the values that one run makes.
      name: Path of an argument, of an output or of the argument that a gradient is for; what
        ``checkpoint_name`` or ``jit`` calls it; or ``""``.
      detail: What else it is told: literal operands, axes, exponents.
      path: Named scopes around it, ``Encoder/layer_0/Dense_0``: the modules of Flax Linen, and
        every ``jax.named_scope``.
      calls: The same step by step; where there are no scopes, the functions and modules whose
        calls led to it.
      parent: ``id`` of the node whose nested program it stands in (a loop, a branch, a call),
        or ``None``.
      body: Which nested program of the parent, such as ``"branches[1]"``.
      trips: How often it runs; ``None`` inside a ``while``, whose count is not known.
      rounds: Of a loop the number of its rounds, ``None`` of a ``while``; 1 otherwise.
      flops: Floating-point operations of one run, of all runs of what is inside for a node that
        holds nested programs.
      line: The user's line that made it.
      saved: Bytes of its outputs that are kept for the backward pass, all runs together. Where
        each branch of a ``cond`` keeps its own value in one place, it counts in the first.
      for_backward: Whether the forward pass computes it only for the backward pass.
      holds: Whether it holds nested programs, whose nodes have it as their ``parent``.
    """

    id: int
    part: Part
    operation: str
    outputs: tuple[Value, ...] = ()
    name: str = ""
    detail: str = ""
    path: str = ""
    calls: tuple[Call, ...] = ()
    parent: int | None = None
    body: str = ""
    trips: int | None = 1
    rounds: int | None = 1
    flops: int = 0
    line: SourceLine | None = None
    saved: int = 0
    for_backward: bool = False
    holds: bool = False

    @property
    def bytes(self) -> int:
        """Size of the outputs of one run."""
        return sum(value.bytes for value in self.outputs)

    @property
    def is_end(self) -> bool:
        """Whether it is no operation but an end of the program."""
        return self.operation in ENDS

    def __str__(self) -> str:
        words = [self.operation, self.detail, self.name]
        return " ".join(word for word in (*words, *map(str, self.outputs)) if word)


class Edge(NamedTuple):
    """A value that one node makes and another reads.

    ``output`` is its position among the outputs of ``source``, ``operand`` that among the
    inputs of ``target``; ``value`` is its type there: of the stack that a loop has made, read
    after it, more than one run gives.  ``carried`` marks the way from one round of a loop to
    the next.  What a ``cond`` gives leads from each of its branches to every reader, one in a
    later ``cond`` of the same index too.  An edge from the forward to the backward part is a
    value kept for it.
    """

    source: int
    output: int
    target: int
    operand: int
    value: Value
    carried: bool = False


class Saved(NamedTuple):
    """One value kept for the backward pass: its node, which of its outputs, all of its bytes."""

    node: int
    output: int
    value: Value

    @property
    def bytes(self) -> int:
        """Its size, all rounds of a loop together."""
        return self.value.bytes
