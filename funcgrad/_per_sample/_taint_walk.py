"""Follow the samples through a jaxpr and its nested bodies.

The program is read at two batch sizes at once, ``SAMPLES`` and its double (the "twin"), so
that a number that stands for the batch size is told from one that the user wrote.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from funcgrad._compat import Jaxpr, JaxprEqn, Literal, is_body, open_jaxpr, primitives
from funcgrad._jaxpr import Body, bodies
from funcgrad._jaxpr._bodies import loop_sizes
from funcgrad._per_sample import _masks
from funcgrad._per_sample._taint import (
    Blame,
    Known,
    Taint,
    earliest,
    free,
    gravest,
    growth_of_known,
    join,
    mixes,
)
from funcgrad._per_sample._taint_numbers import known_of
from funcgrad._per_sample._taint_rules import masks_of, shape_of
from funcgrad._per_sample._taint_scale import growth_of, total_of

_UNROLL = 64


def _nests(eqn: JaxprEqn) -> bool:
    return any(
        is_body(nested)
        for param in eqn.params.values()
        for nested in (param if isinstance(param, tuple | list) else (param,))
    )


def same_program(jaxpr: Jaxpr, twin: Jaxpr) -> bool:
    """Whether two traces have the same equations, whatever the sizes in them."""
    return len(jaxpr.eqns) == len(twin.eqns) and all(map(_same_equation, jaxpr.eqns, twin.eqns))


def _same_equation(a: JaxprEqn, b: JaxprEqn) -> bool:
    literals = [[isinstance(v, Literal) for v in eqn.invars] for eqn in (a, b)]
    if a.primitive is not b.primitive or literals[0] != literals[1]:
        return False
    if not _nests(a):
        return True
    inner, other = bodies(a), bodies(b)
    return len(inner) == len(other) and all(
        same_program(x.jaxpr, y.jaxpr) for x, y in zip(inner, other, strict=True)
    )


def _numbers(x: Any) -> Known | None:
    if isinstance(x, jax.core.Tracer) or getattr(x, "size", 1) > 4096:
        return None
    if jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended):
        return None  # random keys
    x = np.asarray(x)
    return Known(_masks.compact(x), np.ones((1,) * x.ndim, bool))


def _settled(
    taint: Taint,
    known: Known | None,
    twin: Known | None,
    at: Any,
    other: Any,
    *,
    judge: bool = True,
) -> Taint:
    """``taint`` with its numbers, from which the growth follows where all are known."""
    if known is None or twin is None:
        return taint
    taint = dataclasses.replace(taint, known=known, twin=twin)
    if not (judge and known.whole and twin.whole):
        return taint
    growth = growth_of_known(known, twin, shape_of(at), shape_of(other))
    return dataclasses.replace(taint, growth=growth, odd=None if growth is not None else taint.odd)


class Walker:
    """One pass over a program; ``order`` numbers the equations as they are met."""

    def __init__(self) -> None:
        self._order = itertools.count()
        self._outer: tuple[JaxprEqn, ...] = ()
        self._sample_loops = 0

    def run(
        self,
        jaxpr: Jaxpr,
        twin: Jaxpr,
        consts: Sequence[Taint],
        inputs: Sequence[Taint],
    ) -> list[Taint]:
        """The taints of the outputs of ``jaxpr``."""
        env: dict[Any, Taint] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        for eqn, other in zip(jaxpr.eqns, twin.eqns, strict=True):
            taints = [self._read(env, *pair) for pair in zip(eqn.invars, other.invars, strict=True)]
            env.update(zip(eqn.outvars, self._equation(eqn, other, taints), strict=True))
        outs = zip(jaxpr.outvars, twin.outvars, strict=True)
        return [self._read(env, *pair) for pair in outs]

    def _read(self, env: dict[Any, Taint], atom: Any, other: Any) -> Taint:
        if isinstance(atom, Literal):
            other = other if isinstance(other, Literal) else atom
            return self.constant(atom.val, other.val, atom, other)
        return env[atom]

    def constant(self, value: Any, twin: Any, var: Any, other: Any) -> Taint:
        """A number or an array that the program holds, in the place of ``var``."""
        known, twin = _numbers(value), _numbers(twin)
        # Sizes and indices come as integers, and differ from a part of the batch to another.
        number = known is not None and known.value.size == 1
        recipe = 0
        if not number:
            recipe = hash(("array", id(value)))
        elif known is not None and known.value.dtype.kind in "fc":
            recipe = hash(repr(known.value.item()))  # a NaN equals itself so
        return _settled(free(len(shape_of(var)), recipe=recipe), known, twin, var, other)

    def held(
        self, jaxpr: Any, twin: Any, values: Sequence[Any], others: Sequence[Any]
    ) -> list[Taint]:
        """The constants of a body."""
        return [
            self.constant(*four)
            for four in zip(values, others, jaxpr.constvars, twin.constvars, strict=True)
        ]

    def _equation(self, eqn: JaxprEqn, twin: JaxprEqn, taints: list[Taint]) -> list[Taint]:
        if _nests(eqn):
            nested = [*zip(bodies(eqn), bodies(twin), strict=True)]
            self._outer = (*self._outer, eqn)
            outs = self._nested(eqn, twin, nested, taints)
            self._outer = self._outer[:-1]
            if outs is not None:
                return outs
        return self._primitive(eqn, twin, taints)

    # Equations with bodies.

    def _body(self, body: Body, twin: Body, inputs: Sequence[Taint]) -> list[Taint]:
        consts = self.held(body.jaxpr, twin.jaxpr, body.consts, twin.consts)
        return self.run(body.jaxpr, twin.jaxpr, consts, inputs)

    def _nested(
        self,
        eqn: JaxprEqn,
        twin: JaxprEqn,
        nested: list[tuple[Body, Body]],
        taints: list[Taint],
    ) -> list[Taint] | None:
        """The outputs, or ``None`` where the primitive has no rule for its bodies."""
        prim = eqn.primitive
        if prim is primitives.scan_p:
            return self._scan(eqn, twin, nested[0], taints)
        if prim is primitives.while_p:
            return self._while(eqn, nested, taints)
        if prim is primitives.cond_p:
            return self._cond(eqn, nested, taints)
        if prim is primitives.linear_solve_p:
            return self._solve(eqn, twin, taints)
        if len(nested) == 1 and nested[0][0].role in ("call", "rule") and prim.name != "shard_map":
            return self._body(*nested[0], taints)
        return None

    def _cond(
        self, eqn: JaxprEqn, nested: list[tuple[Body, Body]], taints: list[Taint]
    ) -> list[Taint]:
        which, *operands = taints
        results = [self._body(a, b, operands) for a, b in nested]
        if which.known is not None and which.known.whole and which.growth == 1:
            chosen = min(max(int(which.known.value), 0), len(results) - 1)
            return results[chosen]
        joined = [
            functools.reduce(lambda a, b: join(a, b, self._place(eqn)), outs)
            for outs in zip(*results, strict=True)
        ]
        return [self._under(eqn, which, out) for out in joined]

    def _under(self, eqn: JaxprEqn, predicate: Taint, out: Taint) -> Taint:
        """``out`` where a predicate decided about it."""
        if predicate.free and predicate.growth is not None:
            return out
        mask = _masks.compact(out.mask | predicate.mask)
        mixed = mixes(mask)
        growth = out.growth if predicate.growth is not None else None
        odd = origin = None
        if growth is None:
            odd = gravest([predicate.odd, out.odd]) or self._blame(eqn, "size")
        if mixed:
            origin = earliest([predicate.origin, out.origin]) or self._blame(eqn, "mix")
        return Taint(mask, growth, odd, origin, recipe=hash((predicate.recipe, out.recipe)))

    def _while(
        self, eqn: JaxprEqn, nested: list[tuple[Body, Body]], taints: list[Taint]
    ) -> list[Taint]:
        (test, test_twin), (step, step_twin) = nested
        n_test, n_step = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test_consts = taints[:n_test]
        step_consts, carry = taints[n_test : n_test + n_step], taints[n_test + n_step :]

        def once(carry: list[Taint]) -> list[Taint]:
            go_on = self._body(test, test_twin, [*test_consts, *carry])[0]
            outs = self._body(step, step_twin, [*step_consts, *carry])
            return [self._under(eqn, go_on, out) for out in outs]

        return self._fixed_point(eqn, once, carry)

    def _fixed_point(
        self, eqn: JaxprEqn, once: Callable[[list[Taint]], list[Taint]], carry: list[Taint]
    ) -> list[Taint]:
        place = self._place(eqn)
        while True:
            after = once(carry)
            new = [join(a, b, place) for a, b in zip(carry, after, strict=True)]
            if all(a.same(b) for a, b in zip(carry, new, strict=True)):
                return new
            carry = new

    def _scan(
        self, eqn: JaxprEqn, twin: JaxprEqn, nested: tuple[Body, Body], taints: list[Taint]
    ) -> list[Taint]:
        n_consts, n_carry = loop_sizes(eqn)
        consts, carry = taints[:n_consts], taints[n_consts : n_consts + n_carry]
        xs = taints[n_consts + n_carry :]
        length = eqn.params["length"]
        over_samples = length != twin.params["length"]
        if length <= _UNROLL and (over_samples or any(x.mask.shape[0] > 1 for x in xs)):
            return self._unrolled(eqn, nested, consts, carry, xs, over_samples)
        slices = [_row(x, None) for x in xs]
        ys: list[Taint] = []

        def once(carry: list[Taint]) -> list[Taint]:
            outs = self._body(*nested, [*consts, *carry, *slices])
            ys[:] = outs[n_carry:]
            return outs[:n_carry]

        carry = self._fixed_point(eqn, once, list(carry))
        return [*carry, *map(_as_row, ys)]

    def _unrolled(
        self,
        eqn: JaxprEqn,
        nested: tuple[Body, Body],
        consts: list[Taint],
        carry: list[Taint],
        xs: list[Taint],
        over_samples: bool,
    ) -> list[Taint]:
        steps, n = range(eqn.params["length"]), len(carry)
        order = steps[::-1] if eqn.params["reverse"] else steps

        def once(carry: list[Taint], i: int) -> list[Taint]:
            return self._body(*nested, [*consts, *carry, *(_row(x, i) for x in xs)])

        self._sample_loops += over_samples
        counters = [False] * n
        if over_samples:
            counters = list(map(_counts, carry, once(carry, order[0])))
        rows = []
        for i in order:
            carry = [
                dataclasses.replace(c, growth=None, odd=c.odd or self._blame(eqn, "position"))
                if counts
                else c
                for c, counts in zip(carry, counters, strict=True)
            ]
            outs = once(carry, i)
            carry = outs[:n]
            rows.append(outs[n:])
        self._sample_loops -= over_samples
        if eqn.params["reverse"]:
            rows.reverse()
        return [*carry, *(_stacked(column) for column in zip(*rows, strict=True))]

    def _solve(self, eqn: JaxprEqn, twin: JaxprEqn, taints: list[Taint]) -> list[Taint] | None:
        lengths, nested = eqn.params["const_lengths"], eqn.params["jaxprs"]
        solve = getattr(nested, "solve", None)
        if solve is None:
            return None
        before = lengths.matvec + lengths.vecmat
        consts = taints[before : before + lengths.solve]
        right = taints[lengths.matvec + lengths.vecmat + lengths.solve + lengths.transpose_solve :]
        jaxpr, values = open_jaxpr(solve)
        other, other_values = open_jaxpr(twin.params["jaxprs"].solve)
        held = self.held(jaxpr, other, values, other_values)
        return self.run(jaxpr, other, held, [*consts, *right])

    # Equations without.

    def _place(self, eqn: JaxprEqn) -> tuple[int, ...]:
        """Tells two calls of one cached body apart."""
        return (*map(id, self._outer), id(eqn))

    def _blame(self, eqn: JaxprEqn, kind: str) -> Blame:
        return Blame(next(self._order), (*self._outer, eqn), kind)

    def _primitive(self, eqn: JaxprEqn, twin: JaxprEqn, taints: list[Taint]) -> list[Taint]:
        place, looping = self._place(eqn), self._sample_loops > 0
        masks = masks_of(eqn, taints)
        kind = "mix"
        if masks is None:
            kind = "unknown"
            everything = _masks.union_all([t.mask for t in taints])
            masks = [_masks.ranked(everything, len(shape_of(v))) for v in eqn.outvars]
        growth, odd = growth_of(eqn, twin, taints, functools.partial(self._blame, eqn), looping)
        recipe = _recipe(eqn, twin, taints)
        knowns = known_of(eqn, [t.known for t in taints])
        twins = known_of(twin, [t.twin for t in taints]) if any(knowns) else knowns
        outs = []
        for i, mask in enumerate(masks):
            mixed = mixes(mask)
            total = None
            if kind == "mix" and (mixed or looping):
                total = total_of(eqn, twin, taints, i, place, looping)
            origin = self._origin(eqn, taints, kind, lost=total is None) if mixed else None
            if total is not None and mixed:  # which says itself how its terms grow
                taint = Taint(mask, 1.0, None, origin, total, recipe=recipe)
            else:
                taint = Taint(mask, growth, odd, origin, total, recipe=recipe)
            # What follows from the counter of a loop over samples is the place in the batch.
            judge = not looping or growth is not None
            at, other = eqn.outvars[i], twin.outvars[i]
            taint = _settled(taint, knowns[i], twins[i], at, other, judge=judge)
            if taint.growth is None and taint.odd is None:
                taint = dataclasses.replace(taint, odd=self._blame(eqn, "position"))
            outs.append(taint)
        return outs

    def _origin(self, eqn: JaxprEqn, taints: list[Taint], kind: str, *, lost: bool) -> Blame:
        name = eqn.primitive.name
        guilty = taints
        if name == "div" and lost and taints[1].origin:
            guilty = taints[1:]  # a sum may be divided, but not by what depends on samples
        found = earliest(t.origin for t in guilty)
        if found is None:
            return self._blame(eqn, kind)
        if lost and not found.use and any(t.total is not None for t in taints):
            return dataclasses.replace(found, use=(*self._outer, eqn))
        return found


# Where the samples of a part of the batch are put, and how many they are.
_PLACING = frozenset(
    """reshape squeeze expand_dims broadcast_in_dim split copy copy_p dynamic_slice concatenate
    optimization_barrier stop_gradient name""".split()
)
_SIZES = frozenset("shape slice_sizes sharding out_sharding jaxpr".split())


def _recipe(eqn: JaxprEqn, twin: JaxprEqn, taints: Sequence[Taint]) -> int:
    """The same for two parts of a batch that are made in the same way."""
    name = eqn.primitive.name
    recipes = [t.recipe for t in taints]
    if name in _PLACING:
        recipes = [recipe for recipe in recipes if recipe]
        return recipes[0] if len(set(recipes)) == 1 else hash((name, *recipes)) if recipes else 0
    if name == "slice":
        sizes = zip(shape_of(eqn.invars[0]), shape_of(twin.invars[0]), strict=True)
        within = [d for d, (n, m) in enumerate(sizes) if n == m]
        bounds = [
            (d, eqn.params["start_indices"][d], eqn.params["limit_indices"][d])
            for d in within
            if shape_of(eqn.outvars[0])[d] != shape_of(eqn.invars[0])[d]
        ]
        return hash((name, *map(repr, bounds), *recipes)) if bounds else recipes[0]
    params = sorted((key, repr(p)) for key, p in eqn.params.items() if key not in _SIZES)
    return hash((name, *params, *recipes))


def _row(x: Taint, i: int | None) -> Taint:
    """One step's slice of a scanned input; of any step where ``i`` is ``None``."""
    mask = x.mask
    if i is None:
        mask = _masks.union(mask, [0])

    row = mask[0 if mask.shape[0] == 1 else i or 0, ...]
    known, twin = _known_row(x.known, i), _known_row(x.twin, i)
    mixed = mixes(row)
    return Taint(
        _masks.compact(row),
        x.growth,
        x.odd,
        x.origin if mixed else None,
        x.total if mixed else None,
        known if twin is not None else None,
        twin if known is not None else None,
        x.recipe,
    )


def _known_row(known: Known | None, i: int | None) -> Known | None:
    if known is None:
        return None
    value, sure = known.value, known.sure
    if i is None and not len(value) == len(sure) == 1:
        return None
    return Known(value[min(i or 0, len(value) - 1), ...], sure[min(i or 0, len(sure) - 1), ...])


def _counts(before: Taint, after: Taint) -> bool:
    """Whether a carry that depends on no sample changes from one step to the next."""
    if not (before.free and after.free) or before is after:
        return False
    a, b = before.known, after.known
    return a is None or b is None or not _masks.same(a.value, b.value)


def _as_row(y: Taint) -> Taint:
    return dataclasses.replace(y, mask=y.mask[None], known=None, twin=None)


def _stacked(column: Sequence[Taint]) -> Taint:
    shape = np.broadcast_shapes(*(y.mask.shape for y in column))
    mask = _masks.compact(np.stack([np.broadcast_to(y.mask, shape) for y in column]))
    growths = {y.growth for y in column}
    growth = growths.pop() if len(growths) == 1 else None
    odd = gravest(y.odd for y in column) if growth is None else None
    recipes = {y.recipe for y in column}
    recipe = recipes.pop() if len(recipes) == 1 else hash(("steps", *(y.recipe for y in column)))
    return Taint(mask, growth, odd, earliest(y.origin for y in column), recipe=recipe)
