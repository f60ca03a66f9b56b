"""Run a program so that its named values come out, and their cotangents can.

Each site may be given *slots*, zeros that change nothing and receive the site's cotangent.
Slots enter loops as scanned inputs and values leave them as scanned outputs, so that both are
stacked; a branch that is not taken gives zeros.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util

from funcgrad import _jaxpr
from funcgrad._compat import JaxprEqn, Literal, checkpoint_of, primitives
from funcgrad._hooks._pass_through import pass_through, zeros_like
from funcgrad._hooks._sites import Level, Site

Reduce = Callable[[Any], Any]
Slots = dict[Site, Any]
# For each site its reduced value, and whether it was computed at all.
Records = dict[Site, tuple[Any, Any]]


def make_slots(sites: Sequence[Site]) -> Slots:
    """Zeros for the cotangents of the sites that have one."""
    zeros = lambda site: lambda leaf: _stacked(zeros_like(leaf), site.lengths)
    return {site: jax.tree.map(zeros(site), site.type) for site in sites if site.moves}


def run(
    level: Level, args: Sequence[Any], slots: Slots, reduce: Reduce
) -> tuple[list[Any], Records]:
    """The outputs of one level at ``args``, and what its sites held."""
    records: Records = {}
    env: dict[Any, Any] = dict(zip(level.jaxpr.constvars, level.consts, strict=True))
    env.update(zip(level.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for index, eqn in enumerate(level.jaxpr.eqns):
        inputs = [read(atom) for atom in eqn.invars]
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=names),
            eqn.ctx.manager,
        ):
            if index in level.entered:
                out, found = _enter(eqn)(eqn, level.entered[index], inputs, slots, reduce)
                records.update(found)
            else:
                out = _jaxpr.bind(eqn, *inputs)
            if index in level.sites:
                site = level.sites[index]
                records[site] = reduce(out[0]), jnp.ones((), bool)
                if site in slots:
                    out = _tap(out[0], slots[site], reduce)
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(atom) for atom in level.jaxpr.outvars], records


def _tap(value: Any, slots: Any, reduce: Reduce) -> list[Any]:
    def backward(cotangents: Sequence[Any]) -> list[Any]:
        (cotangent,) = cotangents
        return [cotangent, *jax.tree.leaves(reduce(cotangent))]

    return pass_through([value], backward, jax.tree.leaves(slots))


def _enter(eqn: JaxprEqn) -> Callable[..., tuple[Sequence[Any], Records]]:
    if eqn.primitive is primitives.scan_p:
        return _scan
    if eqn.primitive is primitives.cond_p:
        return _cond
    return _checkpoint if checkpoint_of(eqn) else _call


def _call(eqn: Any, levels: Any, inputs: list[Any], slots: Slots, reduce: Reduce) -> Any:
    # The body goes on without its call: what the call said of shardings is said again.
    outputs, records = run(levels[0], _resharded(eqn, "in_shardings", inputs), slots, reduce)
    return _resharded(eqn, "out_shardings", outputs), records


def _resharded(eqn: JaxprEqn, key: str, values: list[Any]) -> list[Any]:
    shardings = eqn.params.get(key, ())
    if len(shardings) != len(values):
        return values
    return [
        lax.with_sharding_constraint(value, sharding)
        if isinstance(sharding, jax.sharding.Sharding)
        else value
        for value, sharding in zip(values, shardings, strict=True)
    ]


def _checkpoint(eqn: Any, levels: Any, inputs: list[Any], slots: Slots, reduce: Reduce) -> Any:
    held = checkpoint_of(eqn)
    assert held is not None
    body = lambda inputs, slots: _listed(levels[0], *run(levels[0], inputs, slots, reduce))
    again = jax.checkpoint(
        lambda inputs, slots: body(inputs, _named(levels, slots)),
        prevent_cse=held.prevent_cse,
        policy=held.policy,
    )
    outputs, records = again(inputs, _slots_of(levels, slots))
    return outputs, dict(zip(levels[0].all_sites(), records, strict=True))


def _scan(eqn: Any, levels: Any, inputs: list[Any], slots: Slots, reduce: Reduce) -> Any:
    (level,) = levels
    n_consts, n_carry = _jaxpr.loop_sizes(eqn)
    consts, carry = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]

    def step(carry: Any, scanned: Any) -> Any:
        xs, mine = scanned
        out, found = run(level, [*consts, *carry, *xs], _named(levels, mine), reduce)
        return out[:n_carry], (out[n_carry:], _listed(level, out, found)[1])

    carry, (ys, records) = lax.scan(
        step,
        carry,
        (inputs[n_consts + n_carry :], _slots_of(levels, slots)),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys], dict(zip(level.all_sites(), records, strict=True))


def _cond(eqn: Any, levels: Any, inputs: list[Any], slots: Slots, reduce: Reduce) -> Any:
    sites = [site for level in levels for site in level.all_sites()]

    def branch(level: Level) -> Any:
        def taken(inputs: list[Any], mine: Any) -> Any:
            out, found = run(level, inputs, _named(levels, mine), reduce)
            return out, [
                found[site] if site in found else _not_run(site, level.depth) for site in sites
            ]

        return taken

    outputs, records = lax.switch(
        inputs[0], [branch(level) for level in levels], inputs[1:], _slots_of(levels, slots)
    )
    return outputs, dict(zip(sites, records, strict=True))


def _not_run(site: Site, depth: int) -> tuple[Any, Any]:
    lengths = site.lengths[depth:]
    zeros = lambda leaf: _stacked(zeros_like(leaf), lengths)
    return jax.tree.map(zeros, site.type), jnp.zeros(lengths, bool)


def _stacked(x: Any, lengths: tuple[int, ...]) -> Any:
    return jnp.broadcast_to(x, (*lengths, *x.shape)) if lengths else x


def _listed(level: Level, outputs: Any, records: Records) -> tuple[Any, list[Any]]:
    return outputs, [records[site] for site in level.all_sites()]


def _slots_of(levels: Sequence[Level], slots: Slots) -> list[Any]:
    return [slots.get(site) for level in levels for site in level.all_sites()]


def _named(levels: Sequence[Level], slots: Sequence[Any]) -> Slots:
    sites = [site for level in levels for site in level.all_sites()]
    return {s: slot for s, slot in zip(sites, slots, strict=True) if slot is not None}
