"""Run a planned loss so that its backward pass hands back the factors at each site.

The other operand of a site is a second output of the forward pass, stacked by the loops on
its way.  The output's cotangent comes back by a *slot*, an input of zeros that changes
nothing: the cotangent of the slot is that of the site's output.  Slots enter loops as
scanned inputs, so that what comes back is stacked.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util

from funcgrad import _jaxpr
from funcgrad._compat import JaxprEqn, Literal, make_varying, primitives, varying_axes
from funcgrad._per_sample._factors import formed_gradient
from funcgrad._per_sample._forms import by_form
from funcgrad._per_sample._leaf_norms import NormSlot, site_norm
from funcgrad._per_sample._plan import Level, Site, picked_axes
from funcgrad._per_sample._sums import wide

Slots = dict[Site, Any]
Operands = dict[Site, Any]


def make_slots(sites: Sequence[Site], sharing: bool = True) -> Slots:
    """Zeros for one sample's cotangents; none at a site that shares another's."""
    # One array for all of a shape, of which a network has few.
    zeros = functools.cache(jnp.zeros)
    return {
        # A gradient that is formed is not rounded to what the model computes in.
        site: zeros(
            (*site.lengths, *site.output.shape),
            wide(site.output.dtype) if site.formed else site.output.dtype,
        )
        for site in sites
        if site.shares is None or not sharing
    }


def run(level: Level, args: Sequence[Any], slots: Slots) -> tuple[list[Any], Operands]:
    """Run one level at ``args``, the inputs of its program; also the operands at its sites."""
    operands: Operands = {}
    env: dict[Any, Any] = dict(zip(level.jaxpr.constvars, level.consts, strict=True))
    env.update(zip(level.jaxpr.invars, args, strict=True))
    preamble = {id(eqn) for eqn in level.preamble}

    def bare(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    def read(atom: Any) -> Any:
        if isinstance(atom, Literal) or atom not in level.values:
            return bare(atom)
        return env[atom] + slots[level.values[atom]]

    index = 0
    while index < len(level.jaxpr.eqns):
        eqn, again = level.jaxpr.eqns[index], level.recurring.get(index)
        made = eqn.outvars if again is None else again.outputs
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=names),
            eqn.ctx.manager,
        ):
            if again is not None:
                out: Any = again.fun(*map(read, again.inputs))
            elif index in level.sites:
                site = level.sites[index]
                if eqn.primitive is primitives.dynamic_slice_p:
                    operand = jnp.stack([read(eqn.invars[1 + d]) for d in picked_axes(eqn)])
                else:
                    operand = read(eqn.invars[1 - (site.formed or site).position])
                weight = bare(eqn.invars[(site.formed or site).position])
                there = _site(site, operand, weight, slots.get(site))
                if site.kind != "value" and not isinstance(slots.get(site), NormSlot):
                    operands[site] = operand
                out = [there.reshape(eqn.outvars[0].aval.shape)]
            elif index in level.entered:
                inputs = [
                    bare(atom) if _enters_as_weight(level, index, i) else read(atom)
                    for i, atom in enumerate(eqn.invars)
                ]
                out, found = _ENTER[eqn.primitive](eqn, level.entered[index], inputs, slots)
                operands |= found
            else:
                take = bare if id(eqn) in preamble else read
                out = _jaxpr.bind(eqn, *map(take, eqn.invars))
        env.update(zip(made, out, strict=True))
        index += 1 if again is None else again.length
    return [read(atom) for atom in level.jaxpr.outvars], operands


def _enters_as_weight(level: Level, index: int, position: int) -> bool:
    eqn = level.jaxpr.eqns[index]
    shift = 1 if eqn.primitive is primitives.cond_p else 0
    return position >= shift and any(
        sub.jaxpr.invars[position - shift] in sub.weights for sub in level.entered[index]
    )


def _site(site: Site, operand: Any, weight: Any, slot: Any) -> Any:
    # The rules close over what is static, never over a value.
    norm_only = (slot.gram, slot.value.dtype) if isinstance(slot, NormSlot) else None
    kind, use, has_slot = jax.typeof(operand), site.formed or site, slot is not None
    is_kept = norm_only is not None or use is not site

    @jax.custom_vjp
    def call(operand: Any, weight: Any, slot: Any) -> Any:
        return use.bind(operand, weight)

    def forward(operand: Any, weight: Any, slot: Any) -> Any:
        return use.bind(operand, weight), (operand if is_kept else None, weight)

    def backward(kept: Any, cotangent: Any) -> Any:
        operand, weight = kept
        back = _operand_cotangent(use, weight, cotangent, kind=kind)
        if use is not site:
            return back, None, formed_gradient(use, operand, cotangent).astype(wide(weight.dtype))
        if norm_only is not None:
            gram, dtype = norm_only
            norm = site_norm(site, operand, cotangent, gram=gram).astype(dtype)
            return back, None, NormSlot(norm, gram)
        return back, None, cotangent if has_slot else None

    call.defvjp(forward, backward)
    return call(operand, weight, slot)


@by_form
def _operand_cotangent(site: Site, weight: Any, cotangent: Any, *, kind: Any) -> Any:
    if not jnp.issubdtype(kind.dtype, jnp.inexact):
        return None
    (back,) = jax.linear_transpose(lambda z: site.bind(z, weight), kind)(cotangent)
    return back


Outcome = tuple[list[Any], Operands]


def _call(eqn: JaxprEqn, levels: list[Level], inputs: list[Any], slots: Slots) -> Outcome:
    return run(levels[0], inputs, slots)


def _remat(eqn: JaxprEqn, levels: list[Level], inputs: list[Any], slots: Slots) -> Outcome:
    mine = _inside(levels, slots)

    def body(inputs: list[Any], values: list[Any]) -> Any:
        return _listed(run(levels[0], inputs, dict(zip(mine, values, strict=True))), levels)

    again = jax.checkpoint(body, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return _named(again(inputs, list(mine.values())), levels)


def _scan(eqn: JaxprEqn, levels: list[Level], inputs: list[Any], slots: Slots) -> Outcome:
    mine = _inside(levels, slots)
    n_consts, n_carry = _jaxpr.loop_sizes(eqn)
    consts, carry = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]

    def step(carry: Any, scanned: Any) -> Any:
        xs, values = scanned
        made = run(levels[0], [*consts, *carry, *xs], dict(zip(mine, values, strict=True)))
        out, operands = _listed(made, levels)
        return out[:n_carry], (out[n_carry:], operands)

    carry, (ys, operands) = lax.scan(
        step,
        carry,
        (inputs[n_consts + n_carry :], list(mine.values())),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return _named(([*carry, *ys], operands), levels)


def _cond(eqn: JaxprEqn, levels: list[Level], inputs: list[Any], slots: Slots) -> Outcome:
    # Each branch is given all slots, and gives all operands: those of the branches not taken
    # stay zero.
    mine, axes = _inside(levels, slots), varying_axes(inputs)

    def branch(level: Level) -> Any:
        def taken(inputs: list[Any], values: list[Any]) -> Any:
            out, operands = run(level, inputs, dict(zip(mine, values, strict=True)))
            others = {
                site: jnp.zeros((*_loops(site, mine), *site.operand.shape), site.operand.dtype)
                for site in _sites(levels)
                if site.operand is not None and not isinstance(mine.get(site), NormSlot)
            }
            operands = {**others, **operands}
            return out, [make_varying(operands.get(site), axes) for site in _sites(levels)]

        return taken

    made = lax.switch(inputs[0], [branch(lv) for lv in levels], inputs[1:], list(mine.values()))
    return _named(made, levels)


def _sites(levels: list[Level]) -> list[Site]:
    return [site for level in levels for site in level.all_sites()]


def _inside(levels: list[Level], slots: Slots) -> Slots:
    return {site: slots[site] for site in _sites(levels) if site in slots}


def _loops(site: Site, slots: Slots) -> tuple[int, ...]:
    """The loops around a site that are not yet entered, as its slot has them in front."""
    holder = site if site in slots or site.shares is None else site.shares
    return slots[holder].shape[: slots[holder].ndim - len(holder.output.shape)]


def _listed(made: Outcome, levels: list[Level]) -> Any:
    """Operands by the order of the sites, as a transformation of JAX can return them."""
    return made[0], [made[1].get(site) for site in _sites(levels)]


def _named(made: Any, levels: list[Level]) -> Outcome:
    out, operands = made
    named = zip(_sites(levels), operands, strict=True)
    return list(out), {site: z for site, z in named if z is not None}


_ENTER: dict[Any, Any] = {
    primitives.jit_p: _call,
    primitives.closed_call_p: _call,
    primitives.remat_p: _remat,
    primitives.scan_p: _scan,
    primitives.cond_p: _cond,
}
