"""Loops run again: to the first iteration that goes wrong, and through what follows of it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad import _jaxpr
from funcgrad._anomaly._values import (
    Mask,
    Origin,
    Refused,
    Value,
    attribute,
    nonfinite,
    origins_of,
)
from funcgrad._compat import eval_jaxpr, primitives

# So many iterations are run one equation at a time before anything is compiled to pass over
# those in which nothing happens.
_SHORT = 16


def loop(
    rerun: Any, eqn: Any, inputs: list[Value], at: Any, before: Sequence[Any] = ()
) -> list[Value]:
    """The outputs of a ``scan`` or ``while``.

    It runs whole at first; only where that gives something bad it is looked into.  No history
    is held: in a long loop the first iteration whose results are bad is found by a loop that
    stops there, and what follows from it by running the rest with the bad values of one origin
    at a time.
    """
    # Prints are not repeated more often than it takes.
    whole = None if eqn.effects else rerun.execute(eqn, [value.array for value in inputs], at)
    if whole is not None and all(nonfinite(x) is None for x in whole):
        return [Value(x) for x in whole]
    kind = _Scan if eqn.primitive is primitives.scan_p else _While
    steps = kind(rerun, eqn, inputs, at)
    carry, i = steps.carry, 0
    ys: list[tuple[Any, list[Value]]] = []
    may_jump = whole is not None and at.devices is None
    while steps.more(carry, i):
        if may_jump and i >= _SHORT:
            if not any(value.origins for value in carry):
                i, carry = steps.skip(carry, i)
                if not steps.more(carry, i):
                    break
            elif (rest := steps.rest(carry, i)) is not None:
                carry = rest[: len(carry)]
                ys.append((steps.places(i), rest[len(carry) :]))
                break
            else:
                may_jump = False
        outputs = steps.run(carry, i)
        carry = outputs[: len(carry)]
        ys.append((steps.place(i), outputs[len(carry) :]))
        i += 1
    values = carry + steps.stacked(ys, whole)
    if whole is None:
        return values
    for var, value, x in zip(eqn.outvars, values, whole, strict=True):
        value.array = x
        bad = nonfinite(x)
        if bad is None:
            value.origins = {}
        elif not value.origins:
            note = "It is made where the loop runs as one program, and by no equation on its own."
            value.origins = {rerun.born(eqn, var, inputs, x, bad, at, before, note): bad}
    return values


class _Scan:
    def __init__(self, rerun: Any, eqn: Any, inputs: list[Value], at: Any) -> None:
        self.rerun, self.eqn, self.at = rerun, eqn, at
        (self.body,) = _jaxpr.bodies(eqn)
        n_consts, n_carry = _jaxpr.loop_sizes(eqn)
        self.consts, self.carry = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]
        self.xs = inputs[n_consts + n_carry :]
        self.length, self.reverse = eqn.params["length"], eqn.params["reverse"]
        lead = lambda atoms: [0 if at.devices is None else len(at.devices.axes(a)) for a in atoms]
        self.x_axes = lead(self.body.jaxpr.invars[n_consts + n_carry :])
        self.y_axes = lead(self.body.jaxpr.outvars[n_carry:])
        self._until_bad = jax.jit(self._skipping)

    def more(self, carry: list[Value], i: int) -> bool:
        return i < self.length

    def place(self, i: Any) -> Any:
        return self.length - 1 - i if self.reverse else i

    def places(self, i: int) -> slice:
        """Where the iterations from ``i`` on read and write."""
        return slice(0, self.length - i) if self.reverse else slice(i, None)

    def run(self, carry: list[Value], i: int) -> list[Value]:
        place = self.place(i)
        xs = [
            x.map(lambda a, axis=axis: _take(a, place, axis))
            for x, axis in zip(self.xs, self.x_axes, strict=True)
        ]
        words = f"scan{self.at.around(self.eqn)}, iteration {place} of {self.length}"
        inside = self.at.enter(self.eqn, words)
        return self.rerun.run(
            self.body.jaxpr, self.body.consts, [*self.consts, *carry, *xs], inside
        )

    def skip(self, carry: list[Value], i: int) -> tuple[int, list[Value]]:
        """The first iteration from ``i`` on that gives something bad, and what it starts from."""
        arrays = ([v.array for v in values] for values in (self.consts, self.xs, carry))
        i, found = self._until_bad(*arrays, i)
        return int(i), [Value(x) for x in found]

    def _skipping(self, consts: Any, xs: Any, carry: Any, i: Any) -> Any:
        def stop(i: Any, carry: Any) -> Any:
            return i >= self.length

        def step(carry: Any, i: Any) -> Any:
            x = [lax.dynamic_index_in_dim(x, self.place(i), keepdims=False) for x in xs]
            out = eval_jaxpr(self.body.jaxpr, self.body.consts, *consts, *carry, *x)
            return out[: len(carry)], out

        return _until_bad(stop, step, carry, i)

    def rest(self, carry: list[Value], i: int) -> list[Value] | None:
        """The outputs of the iterations from ``i`` on, if what is bad in them comes from before."""
        eqn = self.eqn.replace(params=dict(self.eqn.params, length=self.length - i))
        xs = [x.map(lambda a: a[self.places(i)]) for x in self.xs]
        return _by_origin(self.rerun, eqn, [*self.consts, *carry, *xs], self.at)

    def stacked(self, ys: list[tuple[Any, list[Value]]], whole: Any) -> list[Value]:
        """The results of each iteration together."""
        values = []
        for k, axis in enumerate(self.y_axes):
            if whole is not None:
                array = whole[len(self.carry) + k]
            elif ys:
                ordered = sorted(ys, key=lambda item: item[0])
                array = jnp.stack([made[k].array for _, made in ordered], axis)
            else:
                aval = self.eqn.outvars[len(self.carry) + k].aval
                array = jnp.zeros(aval.shape, aval.dtype)
            masks: dict[Origin, Mask] = {}
            for place, made in ys:
                for origin, mask in made[k].origins.items():
                    full = masks.setdefault(origin, np.zeros(np.shape(array), bool))
                    full[(slice(None),) * axis + (place,)] = mask
            values.append(Value(array, masks))
        return values


class _While:
    def __init__(self, rerun: Any, eqn: Any, inputs: list[Value], at: Any) -> None:
        self.rerun, self.eqn, self.at = rerun, eqn, at
        self.test, self.body = _jaxpr.bodies(eqn)
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        self.test_consts, self.consts = inputs[:n_cond], inputs[n_cond : n_cond + n_body]
        self.carry = inputs[n_cond + n_body :]
        self._until_bad = jax.jit(self._skipping)

    def more(self, carry: list[Value], i: int) -> bool:
        inside = self.at.enter(self.eqn)
        (value,) = self.rerun.run(
            self.test.jaxpr, self.test.consts, [*self.test_consts, *carry], inside
        )
        self.goes_on = np.asarray(value.array)
        if self.at.devices is not None and len(np.unique(self.goes_on)) > 1:
            raise Refused(f"devices leave the loop{self.at.around(self.eqn)} at different times")
        return bool(self.goes_on.any())

    def place(self, i: int) -> int:
        return i

    def places(self, i: int) -> slice:
        return slice(i, None)

    def run(self, carry: list[Value], i: int) -> list[Value]:
        words = f"while{self.at.around(self.eqn)}, iteration {i}"
        inside = self.at.enter(self.eqn, words)
        new = self.rerun.run(self.body.jaxpr, self.body.consts, [*self.consts, *carry], inside)
        if self.goes_on.all():
            return new
        # Under `vmap` the others stay as they are, which no equation says.
        return [_chosen(self.goes_on, a, b) for a, b in zip(new, carry, strict=True)]

    def skip(self, carry: list[Value], i: int) -> tuple[int, list[Value]]:
        arrays = ([v.array for v in vs] for vs in (self.test_consts, self.consts, carry))
        i, found = self._until_bad(*arrays, i)
        return int(i), [Value(x) for x in found]

    def _skipping(self, test_consts: Any, consts: Any, carry: Any, i: Any) -> Any:
        def more(carry: Any) -> Any:
            return eval_jaxpr(self.test.jaxpr, self.test.consts, *test_consts, *carry)[0]

        def stop(i: Any, carry: Any) -> Any:
            return ~more(carry).any()

        def step(carry: Any, i: Any) -> Any:
            new = eval_jaxpr(self.body.jaxpr, self.body.consts, *consts, *carry)
            out = [_where(more(carry), a, b) for a, b in zip(new, carry, strict=True)]
            return out, out

        return _until_bad(stop, step, carry, i)

    def rest(self, carry: list[Value], i: int) -> list[Value] | None:
        return _by_origin(self.rerun, self.eqn, [*self.test_consts, *self.consts, *carry], self.at)

    def stacked(self, ys: Any, whole: Any) -> list[Value]:
        return []


def _chosen(chosen: Any, new: Value, old: Value) -> Value:
    none = np.zeros(np.shape(new.array), bool)
    masks = {
        origin: np.asarray(
            _where(chosen, new.origins.get(origin, none), old.origins.get(origin, none))
        )
        for origin in (*new.origins, *old.origins)
    }
    kept = {origin: mask for origin, mask in masks.items() if mask.any()}
    return Value(_where(chosen, new.array, old.array), kept)


def _where(chosen: Any, new: Any, old: Any) -> Any:
    return jnp.where(chosen.reshape(chosen.shape + (1,) * (jnp.ndim(new) - chosen.ndim)), new, old)


def _until_bad(stop: Any, step: Any, carry: Any, i: Any) -> Any:
    def test(state: Any) -> Any:
        i, carry, bad = state
        return ~bad & ~stop(i, carry)

    def advance(state: Any) -> Any:
        i, carry, _ = state
        new, out = step(carry, i)
        bad = jnp.any(jnp.stack([~jnp.isfinite(x).all() for x in out if _inexact(x)]))
        kept = [jnp.where(bad, a, b) for a, b in zip(carry, new, strict=True)]
        return i + ~bad, kept, bad

    i, carry, _ = lax.while_loop(test, advance, (jnp.asarray(i), list(carry), jnp.asarray(False)))
    return i, carry


def may_not_end(eqn: Any) -> bool:
    """Whether other values than its own may keep ``eqn`` running for ever."""
    inner = (e for body in _jaxpr.bodies(eqn) for e in body.jaxpr.eqns)
    return eqn.primitive is primitives.while_p or any(map(may_not_end, inner))


def _by_origin(rerun: Any, eqn: Any, values: list[Value], at: Any) -> list[Value] | None:
    origins = origins_of(values)
    if may_not_end(eqn) and (len(origins) > 1 or origins[0].on_purpose):
        return None
    run = lambda arrays: rerun.execute(eqn, arrays, at)
    outputs = run([value.array for value in values])
    found = attribute(run, values, outputs)
    if any(unexplained is not None for _, unexplained in found):
        return None
    return [Value(out, masks) for out, (masks, _) in zip(outputs, found, strict=True)]


def _take(x: Any, i: int, axis: int) -> Any:
    if isinstance(x, np.ndarray):
        return np.take(x, i, axis)
    return lax.dynamic_index_in_dim(x, i, axis, keepdims=False)


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
