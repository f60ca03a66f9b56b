"""A sample's gradient as a linear function of its records.

With ``u`` the weight at a site, a function of the parameters, and ``z`` the recorded
operand, the site gives ``y = site(z, u(params))``.  The sample's gradient is the pull-back
of the recorded cotangent of ``y`` through that function: so sums, products with directions
and single gradients are JAX's own transposes and tangents of it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad import _jaxpr
from funcgrad._compat import JaxprEqn, Literal, primitives, replicated_like
from funcgrad._per_sample._factors import dense_axes, formed_gradient
from funcgrad._per_sample._forms import by_form
from funcgrad._per_sample._layout import PLAIN
from funcgrad._per_sample._plan import Level, Site
from funcgrad._per_sample._sums import wide


def weights(level: Level, args: Sequence[Any]) -> dict[Site, Any]:
    """The weight at each site as a function of the parameters: differentiable, no sample.

    ``args`` are the inputs of the level's program, of which only weights are read; a weight
    that loops scan over has their axes in front.
    """
    env: dict[Any, Any] = dict(zip(level.jaxpr.constvars, level.consts, strict=True))
    env.update(zip(level.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    constants = _constants(level)
    preamble = {id(eqn) for eqn in level.preamble}
    for eqn in level.jaxpr.eqns:
        if id(eqn) in preamble:
            out = _bind_wide(eqn, [read(atom) for atom in eqn.invars])
        elif id(eqn) in constants:
            out = _jaxpr.bind(eqn, *_narrow(eqn, [read(atom) for atom in eqn.invars]))
        else:
            continue
        env.update(zip(eqn.outvars, out, strict=True))
    found = {site: env[site.var] for site in [*level.sites.values(), *level.values.values()]}
    for index, levels in level.entered.items():
        eqn = level.jaxpr.eqns[index]
        inputs = [
            None if not isinstance(a, Literal) and a not in env else read(a) for a in eqn.invars
        ]
        if eqn.primitive is primitives.scan_p:
            found |= _scanned_weights(eqn, levels[0], inputs)
        else:
            shift = 1 if eqn.primitive is primitives.cond_p else 0
            for sub in levels:
                found |= weights(sub, inputs[shift:])
    return found


def _narrow(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    return [
        x.astype(atom.aval.dtype) if jnp.issubdtype(atom.aval.dtype, jnp.inexact) else x
        for x, atom in zip(map(jnp.asarray, inputs), eqn.invars, strict=True)
    ]


def _bind_wide(eqn: JaxprEqn, inputs: list[Any]) -> Any:
    """Run an equation of the preamble without rounding a gradient to bfloat16 on its way.

    A plain image of a parameter stays in the precision that it has: a cast down in the
    forward pass is no reason to round the sum of the gradients.
    """
    if eqn.primitive is primitives.convert_element_type_p and jnp.issubdtype(
        eqn.params["new_dtype"], jnp.floating
    ):
        return [inputs[0].astype(np.promote_types(inputs[0].dtype, eqn.params["new_dtype"]))]
    plain = len(eqn.invars) == 1 and eqn.primitive in PLAIN
    return _jaxpr.bind(eqn, *(inputs if plain else _narrow(eqn, inputs)))


def _constants(level: Level) -> set[int]:
    """The equations that weights are computed with, though no weight reaches them."""
    made = {var: eqn for eqn in level.jaxpr.eqns for var in eqn.outvars}
    needed: set[int] = set()
    entered = [level.jaxpr.eqns[i] for i in level.entered]
    todo = [atom for eqn in [*level.preamble] for atom in eqn.invars]
    for eqn in entered:
        todo += eqn.invars
    while todo:
        atom = todo.pop()
        if isinstance(atom, Literal) or atom in level.weights or atom in level.dependent:
            continue
        eqn = made.get(atom)
        if eqn is not None and id(eqn) not in needed:
            needed.add(id(eqn))
            todo += eqn.invars
    return needed


def _scanned_weights(eqn: JaxprEqn, level: Level, inputs: list[Any]) -> dict[Site, Any]:
    sites = level.all_sites()
    if not sites:
        return {}
    n_fixed = sum(_jaxpr.loop_sizes(eqn))
    axes = [0 if i >= n_fixed and x is not None else None for i, x in enumerate(inputs)]
    loop = len(next(iter(level.weights.values())).stacked) - 1
    out_axes = [0 if site.stacked[loop] else None for site in sites]

    def body(inputs: list[Any]) -> list[Any]:
        found = weights(level, inputs)
        return [found[site] for site in sites]

    if not any(axis == 0 for axis in axes):
        return dict(zip(sites, body(inputs), strict=True))
    mapped = jax.vmap(body, in_axes=(axes,), out_axes=out_axes, axis_size=eqn.params["length"])
    return dict(zip(sites, mapped(inputs), strict=True))


def outputs(site: Site, operands: Any, weight: Any, n: int | None) -> Any:
    """What a site gives, from its recorded operands and its weight; linear in the weight.

    ``n`` is the number of samples, whose axis stands behind those of the loops, or ``None``
    for records of one sample.
    """
    weight = weight.astype(wide(weight.dtype))
    if site.kind == "value":
        return weight if n is None else jnp.broadcast_to(weight, (n, *weight.shape))
    if jnp.issubdtype(operands.dtype, jnp.inexact):
        operands = operands.astype(weight.dtype)
    if site.kind == "gather" and site.eqn is not None:
        # What is looked up outside the weight does not come from it: 0, not the fill value.
        site = dataclasses.replace(
            site, eqn=site.eqn.replace(params=dict(site.eqn.params, fill_value=0))
        )
    fun = site.bind if n is None else jax.vmap(site.bind, in_axes=(0, None))
    for stacked in reversed(site.stacked):
        fun = jax.vmap(fun, in_axes=(0, 0 if stacked else None))
    return fun(operands, weight)


@by_form
def pull_back(site: Site, operands: Any, cotangents: Any, weight: Any, *, n: int | None) -> Any:
    """The gradient of the weight at a site, summed over samples: ``outputs`` transposed."""
    dtype = wide(weight.dtype)
    if site.kind == "value":
        return cotangents.astype(dtype) if n is None else cotangents.astype(dtype).sum(0)
    if site.kind == "dense":
        return _dense_pull_back(site, operands.astype(dtype), cotangents.astype(dtype), n)
    if site.kind == "conv" and n is None:
        # Mapped over samples, its own transpose is a convolution in groups, which the compiler
        # may widen by zeros: zero times the NaN of another sample.
        return formed_gradient(site, operands.astype(dtype), cotangents.astype(dtype))
    transpose = jax.linear_transpose(lambda u: outputs(site, operands, u, n), weight.astype(dtype))
    (gradient,) = transpose(cotangents.astype(dtype))
    return gradient


def _dense_pull_back(site: Site, operands: Any, cotangents: Any, n: int | None) -> Any:
    # One product over loops, samples and terms at once, in the parameter's own layout: what
    # transposing the mapped dot_general gives needs copies.
    d, loops = dense_axes(site), len(site.lengths)
    skip = loops + (n is not None)
    steps = [i for i, stacked in enumerate(site.stacked) if not stacked]
    steps += [loops] if n is not None else []
    blocks = [i for i, stacked in enumerate(site.stacked) if stacked]

    def shifted(axes: list[int]) -> list[int]:
        return [skip + axis for axis in axes]

    z_sum, y_sum = steps + shifted(d.z_f), steps + shifted(d.y_z)
    z_block, y_block = blocks + shifted(d.z_b), blocks + shifted(d.y_b)
    rows, columns = sorted(d.u_c), d.u_f
    # dot_general's output: blocks, the rest of its left, the rest of its right, each in the
    # order of the operand's axes.
    by_z = [u for _, u in sorted(zip(d.z_c, d.u_c, strict=True))]
    by_y = [u for _, u in sorted(zip(d.y_u, d.u_f, strict=True))]
    rows_first = not columns or (bool(rows) and rows[0] < columns[0])
    if rows_first:
        sides, numbers = (operands, cotangents), ((z_sum, y_sum), (z_block, y_block))
        order = d.u_b + by_z + by_y
    else:
        sides, numbers = (cotangents, operands), ((y_sum, z_sum), (y_block, z_block))
        order = d.u_b + by_y + by_z
    precision = site.eqn.params["precision"] if site.eqn is not None else None
    gradient = lax.dot_general(
        *sides, numbers, precision=precision, out_sharding=replicated_like(*sides)
    )
    place = [order.index(axis) for axis in range(len(order))]
    return gradient.transpose(*range(len(blocks)), *(len(blocks) + i for i in place))
