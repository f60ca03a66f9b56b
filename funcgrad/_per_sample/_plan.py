"""Read a per-sample loss: where each parameter is used, and how its gradient factors.

The value of every variable is one of three kinds.  A *weight* is computed from the
parameters and constants alone: it is the same for every sample.  Whatever a sample reaches
is *dependent*; the rest is *constant*.  A *site* is the place where a weight meets
dependent values.  At a dot_general, a convolution or a gather the weight's per-sample
gradient is a product of two small factors, the other operand and the output's cotangent;
anywhere else ("value") it is the cotangent of the weight itself.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from funcgrad import _jaxpr
from funcgrad._compat import JaxprEqn, open_jaxpr, primitives
from funcgrad._compat import Literal as JaxprLiteral
from funcgrad._jaxpr import Body, bodies
from funcgrad._per_sample._forms import Form
from funcgrad._per_sample._layout import Layout, follow_layout, is_enlarged
from funcgrad._per_sample._recurring import Run, recurring

Kind = Literal["dense", "conv", "gather", "value"]

ENTERED = {
    primitives.jit_p,
    primitives.closed_call_p,
    primitives.remat_p,
    primitives.scan_p,
    primitives.cond_p,
}

_SITES: dict[Any, tuple[Kind, tuple[int, ...]]] = {
    primitives.dot_general_p: ("dense", (0, 1)),
    primitives.conv_general_dilated_p: ("conv", (1,)),
    primitives.gather_p: ("gather", (0,)),
}


@dataclasses.dataclass(frozen=True)
class Weight:
    """A value that is the same for every sample: the leaves in it, and its place in one.

    ``layout`` is ``None`` where the value is no plain image of one leaf; ``stacked`` says,
    for each loop entered, whether the value differs between its iterations.
    """

    leaves: frozenset[int]
    layout: Layout | None
    stacked: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """One use of a weight by dependent values.

    ``lengths`` are the trip counts of the loops around it and ``stacked`` says which of them
    scan over the weight; records carry those axes in front.  ``shares`` is an earlier site
    whose output has the same cotangent, as where two products are added.  ``formed`` is the
    use whose factors make the gradient of a value on the way back, if any.  ``in_remat`` says
    whether a ``jax.checkpoint`` is around it.
    """

    kind: Kind
    var: Any
    leaves: frozenset[int]
    layout: Layout | None
    lengths: tuple[int, ...]
    stacked: tuple[bool, ...]
    eqn: JaxprEqn | None
    position: int
    why: str
    line: Any
    shares: "Site | None" = None
    formed: "Site | None" = None
    in_remat: bool = False

    @property
    def operand(self) -> Any:
        """The shape of the other operand; ``None`` at a value."""
        return None if self.eqn is None else self.eqn.invars[1 - self.position].aval

    @property
    def output(self) -> Any:
        """The shape of what the site gives."""
        return self.var.aval if self.eqn is None else self.eqn.outvars[0].aval

    @functools.cached_property
    def form(self) -> Form:
        """What the site computes, wherever it stands."""
        return Form(self)

    def bind(self, operand: Any, weight: Any) -> Any:
        """What the site computes from the other operand and the weight, in their precision."""
        if self.eqn is None:
            return weight
        eqn = self.eqn
        if self.kind != "gather" and weight.dtype != eqn.invars[self.position].aval.dtype:
            eqn = eqn.replace(params=dict(eqn.params, preferred_element_type=weight.dtype))
        inputs = (weight, operand) if self.position == 0 else (operand, weight)
        return _jaxpr.bind(eqn, *inputs)[0]


@dataclasses.dataclass(eq=False)
class Level:
    """One program of the nest: what is computed from weights alone, and the sites in it."""

    jaxpr: Any
    consts: tuple[Any, ...]
    weights: dict[Any, Weight]
    preamble: list[JaxprEqn] = dataclasses.field(default_factory=list)
    sites: dict[int, Site] = dataclasses.field(default_factory=dict)
    values: dict[Any, Site] = dataclasses.field(default_factory=dict)
    entered: dict[int, list["Level"]] = dataclasses.field(default_factory=dict)
    dependent: set[Any] = dataclasses.field(default_factory=set)
    demoted: set[int] = dataclasses.field(default_factory=set)  # inputs used as plain values
    recurring: dict[int, Run] = dataclasses.field(default_factory=dict)

    def all_sites(self) -> list[Site]:
        """The sites here and in the programs entered."""
        nested = [level.all_sites() for levels in self.entered.values() for level in levels]
        return [*self.sites.values(), *self.values.values(), *(s for n in nested for s in n)]

    def has_preamble_of(self, primitive: Any) -> bool:
        """Whether a weight is computed with ``primitive``, at any depth."""
        programs = [body.jaxpr for eqn in self.preamble for body in bodies(eqn)]
        return (
            any(eqn.primitive is primitive for eqn in self.preamble)
            or any(v.eqn.primitive is primitive for p in programs for v in _jaxpr.walk(p))
            or any(n.has_preamble_of(primitive) for ns in self.entered.values() for n in ns)
        )


def plan(jaxpr: Any, n_leaves: int, small: int) -> Level:
    """Read ``jaxpr``, whose first ``n_leaves`` inputs are the parameters.

    Leaves of at most ``small`` numbers, and no more than their factors have, are used as
    plain values: their gradients are small enough to be had directly.
    """
    body, consts = open_jaxpr(jaxpr)
    weights = {
        var: Weight(frozenset([i]), Layout.of_leaf(i, var.aval))
        for i, var in enumerate(body.invars[:n_leaves])
    }
    dependent = set(body.invars[n_leaves:])
    level = Level(body, tuple(consts), weights, dependent=dependent)
    # The first output is the loss; what else comes out has no gradient.
    return _Reader(level, (), (), in_loop=False, small=small).read(n_outputs=1)


@dataclasses.dataclass(eq=False)
class _Reader:
    """Reads one level; ``in_loop`` sends plain uses of a weight out to the level above."""

    level: Level
    lengths: tuple[int, ...]
    parents: tuple[JaxprEqn, ...]
    in_loop: bool
    small: int
    origins: dict[Any, set[int]] = dataclasses.field(default_factory=dict)
    sums: dict[Any, Any] = dataclasses.field(default_factory=dict)
    first: dict[Any, Site] = dataclasses.field(default_factory=dict)

    def read(self, n_outputs: int | None = None) -> Level:
        level = self.level
        inputs = {var: i for i, var in enumerate(level.jaxpr.invars)}
        self.origins = {var: {inputs[var]} for var in level.weights}
        self.sums = _sums(level.jaxpr)
        for index, eqn in enumerate(level.jaxpr.eqns):
            self._equation(index, eqn)
        for atom in level.jaxpr.outvars[:n_outputs]:
            if self._is_weight(atom):
                self._value(atom, "it is an output", None)
        preamble = {id(eqn) for eqn in level.preamble}
        plain = {i for i, eqn in enumerate(level.jaxpr.eqns) if id(eqn) not in preamble}
        level.recurring = recurring(level.jaxpr, plain - {*level.sites, *level.entered})
        return level

    def _is_weight(self, atom: Any) -> bool:
        return not isinstance(atom, JaxprLiteral) and atom in self.level.weights

    def _is_dependent(self, atom: Any) -> bool:
        return not isinstance(atom, JaxprLiteral) and atom in self.level.dependent

    def _equation(self, index: int, eqn: JaxprEqn) -> None:
        weights = [i for i, atom in enumerate(eqn.invars) if self._is_weight(atom)]
        dependent = any(self._is_dependent(atom) for atom in eqn.invars)
        if not weights:
            if dependent:
                self.level.dependent.update(eqn.outvars)
            return
        if eqn.primitive is primitives.stop_gradient_p and not dependent:
            return  # a constant, as far as gradients go
        if self._is_site(eqn, weights):
            self._site(index, eqn, weights[0])
        elif not (dependent or is_enlarged(eqn) or _jaxpr.has_own_backward(eqn)):
            self._preamble(eqn)
            return
        elif eqn.primitive in ENTERED:
            self._enter(index, eqn)
        else:
            for i in weights:
                by_size = eqn.primitive in _SITES and self._is_small(eqn, i)
                why = "it is small" if by_size else f"{eqn.primitive.name} has no rule"
                self._value(eqn.invars[i], why, eqn)
        self.level.dependent.update(eqn.outvars)

    def _is_site(self, eqn: JaxprEqn, weights: list[int]) -> bool:
        if len(weights) != 1:
            return False
        if eqn.primitive is primitives.dynamic_slice_p:
            return weights == [0] and _as_gather(eqn) is not None
        if eqn.primitive not in _SITES:
            return False
        kind, positions = _SITES[eqn.primitive]
        # A convolution's own transpose, mapped over samples, is slow: never a plain value.
        small = kind != "conv" and self._is_small(eqn, weights[0])
        if weights[0] not in positions or small:
            return False
        if not self._has_factors(eqn):
            return False
        if eqn.primitive is primitives.conv_general_dilated_p:
            return eqn.params["batch_group_count"] == 1
        return True

    def _has_factors(self, eqn: JaxprEqn) -> bool:
        # The rules are written for real numbers; integers among the operands are indices.
        inputs = eqn.invars[:1] if eqn.primitive is primitives.gather_p else eqn.invars
        avals = [var.aval for var in (*inputs, *eqn.outvars)]
        return all(jnp.issubdtype(aval.dtype, jnp.floating) and aval.size for aval in avals)

    def _is_small(self, eqn: JaxprEqn, position: int) -> bool:
        """Whether a weight's gradient is no larger than its factors, and not large at all."""
        atom = eqn.invars[position]
        if len(eqn.invars) != 2 or any(self.level.weights[atom].stacked):
            return False
        factors = math.prod(self.lengths) * (
            eqn.invars[1 - position].aval.size + eqn.outvars[0].aval.size
        )
        return atom.aval.size <= min(self.small, factors)

    def _site(self, index: int, eqn: JaxprEqn, position: int) -> None:
        weight = self.level.weights[eqn.invars[position]]
        line, as_gather = _jaxpr.source_line(eqn, self.parents), None
        if eqn.primitive is primitives.dynamic_slice_p:
            as_gather = _as_gather(eqn)
        kind = "gather" if as_gather is not None else _SITES[eqn.primitive][0]
        total = eqn.outvars[0]
        while as_gather is None and total in self.sums:
            total = self.sums[total]
        site = Site(
            kind, eqn.invars[position], weight.leaves, weight.layout, self.lengths,
            weight.stacked, as_gather or eqn, position, "", line, self.first.get(total),
            in_remat=any(outer.primitive is primitives.remat_p for outer in self.parents),
        )  # fmt: skip
        if self._is_formed(site):
            self.level.sites[index] = Site(
                "value", site.var, site.leaves, site.layout, (), (), None, 0,
                "its gradient is smaller than its factors", line, formed=site,
            )  # fmt: skip
            return
        self.level.sites[index] = site
        if as_gather is None:
            self.first.setdefault(total, site)

    def _is_formed(self, site: Site) -> bool:
        """Whether a filter's gradient is small, and its patches no larger than its output."""
        if site.kind != "conv" or site.lengths or site.eqn is None:
            return False
        out = site.eqn.params["dimension_numbers"].rhs_spec[0]
        features, size = site.var.aval.shape[out], site.var.aval.size
        groups = site.eqn.params["feature_group_count"]
        return size <= min(self.small, site.output.size) and groups * size <= features**2

    def _preamble(self, eqn: JaxprEqn) -> None:
        used = [self.level.weights[a] for a in eqn.invars if self._is_weight(a)]
        leaves = frozenset().union(*(w.leaves for w in used))
        stacked = tuple(any(flags) for flags in zip(*(w.stacked for w in used), strict=True))
        origins = set().union(*(self.origins[a] for a in eqn.invars if self._is_weight(a)))
        layout = follow_layout(eqn, [self._layout(a) for a in eqn.invars], len(used))
        self.level.preamble.append(eqn)
        for var in eqn.outvars:
            if jnp.issubdtype(var.aval.dtype, jnp.inexact):
                self.level.weights[var] = Weight(leaves, layout, stacked)
                self.origins[var] = origins

    def _layout(self, atom: Any) -> Layout | None:
        return self.level.weights[atom].layout if self._is_weight(atom) else None

    def _value(self, atom: Any, why: str, eqn: JaxprEqn | None) -> None:
        if self.in_loop:
            self.level.demoted |= self.origins[atom]
            return
        if atom in self.level.values:
            return
        weight = self.level.weights[atom]
        line = None if eqn is None else _jaxpr.source_line(eqn, self.parents)
        self.level.values[atom] = Site(
            "value", atom, weight.leaves, weight.layout, (), (), None, 0, why, line
        )

    def _enter(self, index: int, eqn: JaxprEqn) -> None:
        parents = (*self.parents, eqn)
        if eqn.primitive is primitives.scan_p:
            body = bodies(eqn)[0]
            n_consts, n_carry = _jaxpr.loop_sizes(eqn)
            n_fixed = n_consts + n_carry
            plain = {i for i in range(n_consts, n_fixed) if self._is_weight(eqn.invars[i])}
            lengths = (*self.lengths, eqn.params["length"])
            while True:
                sub = self._sub(body, eqn, plain, lengths, parents, in_loop=True, scan=(n_consts, n_fixed))  # fmt: skip  # noqa: E501
                if sub.demoted <= plain:
                    break
                plain |= sub.demoted
            levels = [sub]
        else:
            plain = set()
            while True:
                levels = [
                    self._sub(body, eqn, plain, self.lengths, parents, self.in_loop, None)
                    for body in bodies(eqn)
                ]
                shift = 1 if eqn.primitive is primitives.cond_p else 0
                demoted = {i + shift for level in levels for i in level.demoted}
                if demoted <= plain:
                    break
                plain |= demoted
            if eqn.primitive is primitives.cond_p and self._is_weight(eqn.invars[0]):
                plain.add(0)
        for i in plain:
            self._value(eqn.invars[i], f"{eqn.primitive.name} uses it without a rule", eqn)
        if any(level.weights for level in levels):
            self.level.entered[index] = levels

    def _sub(
        self, body: Body, eqn: JaxprEqn, plain: set[int], lengths: Any, parents: Any,
        in_loop: bool, scan: tuple[int, int] | None,
    ) -> Level:  # fmt: skip
        weights: dict[Any, Weight] = {}
        dependent: set[Any] = set()
        for var, position in zip(body.jaxpr.invars, body.operands, strict=True):
            assert position is not None
            atom = eqn.invars[position]
            if self._is_weight(atom) and position not in plain:
                weight = self.level.weights[atom]
                if scan is not None:
                    scanned = position >= scan[1]
                    layout = weight.layout
                    if layout is not None:
                        layout = layout.enter_scan() if scanned else layout.enter_constant()
                    weight = Weight(weight.leaves, layout, (*weight.stacked, scanned))
                weights[var] = weight
            elif self._is_weight(atom) or self._is_dependent(atom):
                dependent.add(var)
            elif scan is not None and position >= scan[0]:
                dependent.add(var)  # differs between iterations
        level = Level(body.jaxpr, body.consts, weights, dependent=dependent)
        return _Reader(level, lengths, parents, in_loop, self.small).read()


def _sums(jaxpr: Any) -> dict[Any, Any]:
    """For a variable that is only a term of a sum, that sum: both have the same cotangent."""
    uses: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        for i, atom in enumerate(eqn.invars):
            if not isinstance(atom, JaxprLiteral):
                uses.setdefault(atom, []).append((eqn, i))
    for atom in jaxpr.outvars:
        if not isinstance(atom, JaxprLiteral):
            uses.setdefault(atom, []).append((None, 0))
    found = {}
    for var, ((eqn, i), *more) in uses.items():
        if more or eqn is None or eqn.outvars[0].aval.shape != var.aval.shape:
            continue
        is_sum = eqn.primitive in (primitives.add_p, primitives.add_jaxvals_p)
        if is_sum or (eqn.primitive is primitives.sub_p and i == 0):
            found[var] = eqn.outvars[0]
    return found


def picked_axes(eqn: JaxprEqn) -> list[int]:
    """The axes along which a dynamic_slice takes one of several."""
    sizes, shape = eqn.params["slice_sizes"], eqn.invars[0].aval.shape
    return [d for d, (size, n) in enumerate(zip(sizes, shape, strict=True)) if size != n]


def _as_gather(eqn: JaxprEqn) -> JaxprEqn | None:
    """A dynamic_slice of a whole row as a gather; ``None`` for another window.

    Mapping over samples makes a gather of it anyway.
    """
    picked, sizes = picked_axes(eqn), eqn.params["slice_sizes"]
    if not picked or any(sizes[d] != 1 for d in picked):
        return None
    rest = len(sizes) - len(picked)
    numbers = lax.GatherDimensionNumbers(tuple(range(rest)), tuple(picked), tuple(picked))
    indices = jax.ShapeDtypeStruct((len(picked),), eqn.invars[1].aval.dtype)
    traced = jax.make_jaxpr(
        lambda table, indices: lax.gather(table, indices, numbers, sizes, mode="clip")
    )(jax.ShapeDtypeStruct(eqn.invars[0].aval.shape, eqn.invars[0].aval.dtype), indices)
    (gather,) = [e for e in traced.jaxpr.eqns if e.primitive is primitives.gather_p]
    return gather
