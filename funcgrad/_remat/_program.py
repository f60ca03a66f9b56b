"""A jaxpr as a list of operations with calls inlined, which the planner reads and runs in parts."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from jax.extend import source_info_util

from funcgrad._compat import JaxprEqn, Literal, is_plain_jit, open_jaxpr, primitives
from funcgrad._jaxpr import SourceLine, bind, bodies, loop_sizes, source_line

_INLINED = (primitives.jit_p, primitives.closed_call_p, primitives.call_p)
# Not worth lifting out of a loop by themselves.
_MOVES = frozenset("reshape squeeze expand_dims transpose rev slice name copy convert".split())
_GROWS = frozenset(["iota", "broadcast_in_dim"])
_RULES = frozenset("custom_jvp_call custom_vjp_call custom_lin linear_solve".split())
_PLAIN = frozenset(
    primitive
    for name, primitive in vars(primitives).items()
    if name.endswith("_p") and primitive.name not in _RULES
)


@dataclasses.dataclass(frozen=True)
class Const:
    """An array that programs close over: a place in the pool, a list given when they run."""

    index: int


Atom: TypeAlias = int | Const | Literal


@dataclasses.dataclass(eq=False)
class Op:
    """One operation: what it reads and writes, by number; the calls around it."""

    eqn: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    parents: tuple[JaxprEqn, ...] = ()
    loop: "Loop | None" = None

    @property
    def reads(self) -> tuple[Atom, ...]:
        """All that it reads, whether it runs as it stands or is planned inside."""
        return (*self.inputs, *self.loop.inputs) if self.loop else self.inputs

    @property
    def line(self) -> SourceLine | None:
        """The user's source line."""
        return source_line(self.eqn, self.parents)


@dataclasses.dataclass(eq=False)
class Program:
    """Operations in order; values are numbered, and ``avals`` has their types."""

    inputs: list[int]
    ops: list[Op]
    outputs: list[Atom]
    avals: list[Any]
    producer: dict[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Index the operations by what they write."""
        for place, op in enumerate(self.ops):
            self.producer.update(dict.fromkeys(op.outputs, place))

    def needed(self, wanted: Iterable[Atom]) -> set[int]:
        """The places of the operations that ``wanted`` come from, and of those with effects."""
        alive = {atom for atom in wanted if isinstance(atom, int)}
        places = set()
        for place in reversed(range(len(self.ops))):
            op = self.ops[place]
            if op.eqn.effects or not alive.isdisjoint(op.outputs):
                places.add(place)
                alive.update(atom for atom in op.reads if isinstance(atom, int))
        return places


@dataclasses.dataclass(eq=False)
class Loop:
    """A scan that may be planned inside; what does not change in its body is lifted out of it.

    ``inputs`` are the constants, the lifted values, the first carry and the scanned arrays.
    """

    body: Program
    inputs: tuple[Atom, ...]
    n_consts: int
    n_carry: int
    length: int


def flatten(
    closed: Any, pool: list[Any], *, open_loops: bool = False, consts_first: bool = False
) -> Program:
    """Inline the calls of a jaxpr; its constants join the ``pool``, or become first inputs."""
    return _Flattener(pool, open_loops).program(closed, consts_first=consts_first)


class _Flattener:
    def __init__(self, pool: list[Any], open_loops: bool) -> None:
        self.pool, self.open_loops = pool, open_loops
        self.ops: list[Op] = []
        self.avals: list[Any] = []

    def program(
        self, closed: Any, parents: tuple[JaxprEqn, ...] = (), consts_first: bool = False
    ) -> Program:
        jaxpr, consts = open_jaxpr(closed)
        first = [self.new(var.aval) for var in jaxpr.constvars] if consts_first else []
        inputs = [self.new(var.aval) for var in jaxpr.invars]
        outputs = self.inline(jaxpr, first or self.pooled(consts), inputs, parents)
        return Program([*first, *inputs], self.ops, outputs, self.avals)

    def new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def pooled(self, consts: Sequence[Any]) -> list[Atom]:
        first = len(self.pool)
        self.pool.extend(consts)
        return [Const(first + i) for i in range(len(consts))]

    def inline(self, jaxpr: Any, consts: Any, inputs: Any, parents: Any) -> list[Atom]:
        env: dict[Any, Atom] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            values = tuple(map(read, eqn.invars))
            if eqn.primitive in _INLINED and is_plain_jit(eqn):
                (body,) = bodies(eqn)
                consts = self.pooled(body.consts)
                outs = self.inline(body.jaxpr, consts, values, (*parents, eqn))
            else:
                loop = None
                if self.open_loops and eqn.primitive is primitives.scan_p:
                    loop = self.loop(eqn, values, parents)
                outs = [self.new(var.aval) for var in eqn.outvars]
                self.ops.append(Op(eqn, values, tuple(outs), parents, loop))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def loop(self, eqn: JaxprEqn, values: tuple[Atom, ...], parents: Any) -> Loop:
        n_consts, n_carry = loop_sizes(eqn)
        body = _Flattener(self.pool, True).program(eqn.params["jaxpr"], (*parents, eqn))
        # What never runs may not run outside either: no infinity may meet its zero cotangent.
        length = eqn.params["length"]
        lifted = _unchanging(body, set(body.inputs[:n_consts])) if length else []
        outer: dict[int, Atom] = dict(zip(body.inputs, values, strict=True))
        for place in lifted:
            op = body.ops[place]
            outs = tuple(self.new(body.avals[out]) for out in op.outputs)
            reads = tuple(outer[a] if isinstance(a, int) else a for a in op.inputs)
            self.ops.append(Op(op.eqn, reads, outs, op.parents))
            outer.update(zip(op.outputs, outs, strict=True))
        kept = [op for place, op in enumerate(body.ops) if place not in lifted]
        made = {out for place in lifted for out in body.ops[place].outputs}
        read = [*body.outputs, *(a for op in kept for a in op.reads)]
        extra = sorted(made.intersection(a for a in read if isinstance(a, int)))
        order = [*body.inputs[:n_consts], *extra, *body.inputs[n_consts:]]
        return Loop(
            Program(order, kept, body.outputs, body.avals),
            tuple(outer[i] for i in order),
            n_consts + len(extra),
            n_carry,
            length,
        )


def _unchanging(body: Program, consts: set[int]) -> list[int]:
    """The places of operations that read constants of a loop only, and are worth lifting."""
    known, still = set(consts), set()
    for place, op in enumerate(body.ops):
        reads = [a for a in op.inputs if isinstance(a, int)]
        if not reads or op.eqn.effects or op.loop or op.eqn.primitive.name in _GROWS:
            continue
        if is_random(op.eqn) or not known.issuperset(reads) or not _sums(op.eqn):
            continue
        known.update(op.outputs)
        still.add(place)
    wanted: set[int] = set()
    for place in sorted(still, reverse=True):
        op = body.ops[place]
        if op.eqn.primitive.name not in _MOVES or not wanted.isdisjoint(op.outputs):
            wanted.update(a for a in op.inputs if isinstance(a, int))
            wanted.update(op.outputs)
    return [place for place in sorted(still) if not wanted.isdisjoint(body.ops[place].outputs)]


def _sums(eqn: JaxprEqn) -> bool:
    """Whether a sum of cotangents goes back through ``eqn`` as each of them does.

    A rule that somebody has written need not be linear: it may clip.
    """
    inner = (eqn for body in bodies(eqn) for eqn in body.jaxpr.eqns)
    return eqn.primitive in _PLAIN and all(map(_sums, inner))


def is_random(eqn: JaxprEqn) -> bool:
    """Whether a second run gives other numbers, here or in a body."""
    if eqn.primitive.name in ("rng_uniform", "io_callback"):
        return True
    return any(is_random(inner) for body in bodies(eqn) for inner in body.jaxpr.eqns)


def run(
    program: Program,
    args: Sequence[Any],
    pool: Sequence[Any],
    *,
    places: Iterable[int] | None = None,
    special: Callable[[int, Op, Callable[[Atom], Any]], Sequence[Any] | None] = lambda *_: None,
) -> dict[int, Any]:
    """Run operations, all unless ``places`` says which; the values by number.

    ``special(place, op, read)`` may run one in another way.
    """
    env: dict[int, Any] = dict(zip(program.inputs, args, strict=True))
    read = reader(env, pool)
    for place in range(len(program.ops)) if places is None else places:
        op = program.ops[place]
        with context(op):
            outs = special(place, op, read)
            if outs is None:
                outs = bind(op.eqn, *map(read, op.inputs))
        env.update(zip(op.outputs, outs, strict=True))
    return env


def reader(env: dict[int, Any], pool: Sequence[Any]) -> Callable[[Atom], Any]:
    """The value of an atom."""

    def read(atom: Atom) -> Any:
        if isinstance(atom, Const):
            return pool[atom.index]
        return atom.val if isinstance(atom, Literal) else env[atom]

    return read


def context(op: Op) -> Any:
    """A block in which what is traced bears the source line and the names of ``op``."""
    names = source_info_util.current_name_stack()
    for eqn in (*op.parents, op.eqn):
        names = names + eqn.source_info.name_stack
    return _Contexts(
        source_info_util.user_context(op.eqn.source_info.traceback, name_stack=names),
        op.eqn.ctx.manager,
    )


class _Contexts:
    def __init__(self, *managers: Any) -> None:
        self.managers = managers

    def __enter__(self) -> None:
        for manager in self.managers:
            manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        for manager in reversed(self.managers):
            manager.__exit__(*error)
