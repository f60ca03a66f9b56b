"""Run a planned loss so that its backward pass hands back the factors at each site.

Each site gets a *slot*, an input of zeros that changes nothing: its cotangent is the record
of the site, the other operand and the output's cotangent.  Slots enter loops as scanned
inputs, so that records come out stacked.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util

from funcgrad import _jaxpr
from funcgrad._compat import JaxprEqn, Literal, primitives
from funcgrad._per_sample._plan import Level, Site, picked_axes
from funcgrad._per_sample._roads import NormSlot, site_norm

Slots = dict[Site, Any]


def make_slots(sites: Sequence[Site]) -> Slots:
    """Zeros for one sample's records."""

    def zeros(site: Site, aval: Any, dtype: Any) -> Any:
        return jnp.zeros((*site.lengths, *aval.shape), dtype)

    return {
        site: zeros(site, site.output, site.output.dtype)
        if site.kind == "value"
        else (
            zeros(site, site.operand, _record_dtype(site.operand.dtype)),
            zeros(site, site.output, site.output.dtype),
        )
        for site in sites
    }


def operand_of(site: Site, record: Any) -> Any:
    """The other operand from its record: indices travel as the bits of floats."""
    return record if record.dtype == site.operand.dtype else _to_bits(record, site.operand.dtype)


def _record_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return jnp.dtype(f"float{jnp.iinfo(dtype).bits}")


def _to_bits(x: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(x, dtype)


def run(level: Level, args: Sequence[Any], slots: Slots) -> list[Any]:
    """Run one level at ``args``, the inputs of its program."""
    env: dict[Any, Any] = dict(zip(level.jaxpr.constvars, level.consts, strict=True))
    env.update(zip(level.jaxpr.invars, args, strict=True))
    preamble = {id(eqn) for eqn in level.preamble}

    def bare(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    def read(atom: Any) -> Any:
        if isinstance(atom, Literal) or atom not in level.values:
            return bare(atom)
        return env[atom] + slots[level.values[atom]]

    for index, eqn in enumerate(level.jaxpr.eqns):
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=names),
            eqn.ctx.manager,
        ):
            if index in level.sites:
                site = level.sites[index]
                if eqn.primitive is primitives.dynamic_slice_p:
                    operand = jnp.stack([read(eqn.invars[1 + d]) for d in picked_axes(eqn)])
                else:
                    operand = read(eqn.invars[1 - site.position])
                made = _site(site, operand, bare(eqn.invars[site.position]), slots[site])
                out: Any = [made.reshape(eqn.outvars[0].aval.shape)]
            elif index in level.entered:
                inputs = [
                    bare(atom) if _enters_as_weight(level, index, i) else read(atom)
                    for i, atom in enumerate(eqn.invars)
                ]
                out = _ENTER[eqn.primitive](eqn, level.entered[index], inputs, slots)
            else:
                take = bare if id(eqn) in preamble else read
                out = _jaxpr.bind(eqn, *map(take, eqn.invars))
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(atom) for atom in level.jaxpr.outvars]


def _enters_as_weight(level: Level, index: int, position: int) -> bool:
    eqn = level.jaxpr.eqns[index]
    shift = 1 if eqn.primitive is primitives.cond_p else 0
    return position >= shift and any(
        sub.jaxpr.invars[position - shift] in sub.weights for sub in level.entered[index]
    )


def _site(site: Site, operand: Any, weight: Any, slot: Any) -> Any:
    # The rules close over what is static in the slot, never over its value.
    norm_only = (slot.gram, slot.value.dtype) if isinstance(slot, NormSlot) else None

    @jax.custom_vjp
    def call(operand: Any, weight: Any, slot: Any) -> Any:
        return site.bind(operand, weight)

    def forward(operand: Any, weight: Any, slot: Any) -> Any:
        return site.bind(operand, weight), (operand, weight)

    def backward(kept: Any, cotangent: Any) -> Any:
        operand, weight = kept
        if norm_only is not None:
            gram, dtype = norm_only
            norm = site_norm(site, operand, cotangent, gram).astype(dtype)
            back = _operand_cotangent(site, operand, weight, cotangent)
            return back, None, NormSlot(norm, gram)
        if not jnp.issubdtype(operand.dtype, jnp.inexact):
            return None, None, (_to_bits(operand, _record_dtype(operand.dtype)), cotangent)
        back = _operand_cotangent(site, operand, weight, cotangent)
        return back, None, (operand, cotangent)

    call.defvjp(forward, backward)
    return call(operand, weight, slot)


def _operand_cotangent(site: Site, operand: Any, weight: Any, cotangent: Any) -> Any:
    if not jnp.issubdtype(operand.dtype, jnp.inexact):
        return None
    (back,) = jax.linear_transpose(lambda z: site.bind(z, weight), operand)(cotangent)
    return back


def _call(eqn: JaxprEqn, levels: list[Level], inputs: list[Any], slots: Slots) -> list[Any]:
    return run(levels[0], inputs, slots)


def _remat(eqn: JaxprEqn, levels: list[Level], inputs: list[Any], slots: Slots) -> list[Any]:
    sites = levels[0].all_sites()

    def body(inputs: list[Any], records: list[Any]) -> list[Any]:
        return run(levels[0], inputs, dict(zip(sites, records, strict=True)))

    again = jax.checkpoint(body, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return again(inputs, [slots[site] for site in sites])


def _scan(eqn: JaxprEqn, levels: list[Level], inputs: list[Any], slots: Slots) -> list[Any]:
    (level,) = levels
    sites = level.all_sites()
    n_consts, n_carry = _jaxpr.loop_sizes(eqn)
    consts, carry = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]

    def step(carry: Any, scanned: Any) -> Any:
        xs, records = scanned
        out = run(level, [*consts, *carry, *xs], dict(zip(sites, records, strict=True)))
        return out[:n_carry], out[n_carry:]

    carry, ys = lax.scan(
        step,
        carry,
        (inputs[n_consts + n_carry :], [slots[site] for site in sites]),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys]


def _cond(eqn: JaxprEqn, levels: list[Level], inputs: list[Any], slots: Slots) -> list[Any]:
    # Each branch is given all records: those of the branches not taken stay zero.
    sites = [site for level in levels for site in level.all_sites()]

    def branch(level: Level) -> Any:
        return lambda inputs, records: run(level, inputs, dict(zip(sites, records, strict=True)))

    return lax.switch(
        inputs[0], [branch(level) for level in levels], inputs[1:], [slots[s] for s in sites]
    )


_ENTER: dict[Any, Any] = {
    primitives.jit_p: _call,
    primitives.closed_call_p: _call,
    primitives.remat_p: _remat,
    primitives.scan_p: _scan,
    primitives.cond_p: _cond,
}
