"""Sums of powers, and norms made of them, that no finite entry overflows or underflows.

The sum of powers is known at several scales, each a power of two, which is exact.  The finest
that stays finite is the right one: what it may have lost is too small to count.  All scales
together are one short vector, so that devices reduce once, with no look at the largest entry
before.  A plain sum that is neither huge nor tiny says what they all are; only where it is not
are the entries read again, once for each scale.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# A sum may have 2**40 terms.
_TERMS = 40


def norm_dtype(leaves: list[Any]) -> Any:
    """The real dtype of the norm of ``leaves``: float32 or wider."""
    real = {np.dtype(jnp.finfo(leaf.dtype).dtype) for leaf in leaves}
    return functools.reduce(np.promote_types, real, np.dtype(np.float32))


@jax.custom_jvp
@jax.jit
def whole(ratio: Any, unit: Any) -> Any:
    """The norm itself, infinite where its dtype does not reach."""
    info = jnp.finfo(ratio.dtype)
    # A subnormal number, which backends flush to zero, is made of its bits: an integer.
    down = info.nmant - info.minexp
    factors = _opaque([2.0 ** (down // 2), 2.0 ** (down - down // 2)], ratio.dtype)
    steps = ratio * factors[0] * (jnp.minimum(unit, 1) * factors[1])
    is_small = (steps < 2.0**info.nmant) & (unit <= 1)
    bits = jnp.round(jnp.where(is_small, steps, 0)).astype(f"uint{info.bits}")
    small = lax.bitcast_convert_type(bits, ratio.dtype)
    return jnp.where(is_small, small, ratio * unit)


@whole.defjvp
def _whole_jvp(primals: Any, tangents: Any) -> Any:
    (ratio, unit), (dot, _) = primals, tangents
    return whole(ratio, unit), dot * unit


def modulus_bits(x: Any) -> Any:
    """The bits of the moduli: integers in their order, a NaN above all."""
    info = jnp.finfo(x.dtype)
    word = lax.bitcast_convert_type(x, f"uint{info.bits}")
    return word & ((1 << (info.bits - 1)) - 1)


@jax.custom_jvp
@jax.jit
def modulus(parts: Any) -> Any:
    """The moduli of complex numbers given as (real, imaginary); their derivative at 0 is 0."""
    _, size, unit = _sized(parts)
    return whole(size, unit)


@modulus.defjvp
def _modulus_jvp(primals: Any, tangents: Any) -> Any:
    (parts,), (dots,) = primals, tangents
    near, size, _ = _sized(parts)
    return modulus(parts), (near / jnp.where(size > 0, size, 1) * dots).sum(0)


def _sized(parts: Any) -> tuple[Any, Any, Any]:
    """The parts over a power of two that keeps their squares in range, the modulus, the power.

    A division by the larger part would not do: one over a number near the largest is subnormal.
    """
    info, bits = jnp.finfo(parts.dtype), modulus_bits(parts)
    power = bits.max(0).astype("int32" if info.bits == 32 else "int64") >> info.nmant
    middle, shift = info.maxexp - 1, round(0.7 * info.maxexp)
    is_small = power < middle - info.maxexp // 4
    is_large = power > middle + info.maxexp // 4
    choose = lambda small, large: jnp.where(
        is_small, small, jnp.where(is_large, large, 1.0)
    ).astype(parts.dtype)
    near = parts * choose(2.0**shift, 2.0**-shift)
    steps = bits.astype(parts.dtype) * 2.0 ** (info.minexp - info.nmant + shift)
    steps = jnp.where(jnp.signbit(parts), -steps, steps)
    near = jnp.where(is_small & (bits < (1 << info.nmant)), steps, near)
    square = jnp.square(near).sum(0)
    moves = square > 0
    size = jnp.where(moves, jnp.sqrt(jnp.where(moves, square, 1)), square)
    return near, size, choose(2.0**-shift, 2.0**shift)


def largest(leaves: list[Any]) -> Any:
    """The bits of the largest modulus, or of a NaN."""
    return jnp.stack([jnp.max(modulus_bits(leaf)) for leaf in leaves if leaf.size]).max()


def least(leaves: list[Any]) -> Any:
    """The bits of the smallest modulus, and 0 if there is a NaN, otherwise 1."""
    bits = [jnp.min(modulus_bits(leaf)) for leaf in leaves if leaf.size]
    nans = [jnp.isnan(leaf).any() for leaf in leaves]
    no_nan = 1 - jnp.stack(nans).any().astype(bits[0].dtype)
    return jnp.stack([jnp.stack(bits).min(), no_nan])


def shifts(dtype: Any, order: float) -> tuple[int, ...]:
    """The exponents of the scales, even, ascending: the first is the finest.

    At the first, no power of an entry underflows, at the last no sum of them overflows.  If
    the sum overflows at one and not at the next, underflow has lost less than a rounding there.
    """
    info = jnp.finfo(dtype)
    smallest = info.minexp - info.nmant
    first = min(smallest - (info.minexp + 2) / order, -info.nmant - 1)
    last = max(info.maxexp - (info.maxexp - 1 - _TERMS) / order, _TERMS / order + 1)
    gap = (info.maxexp - info.minexp - info.nmant - 4 - _TERMS) / order - 2
    n_gaps = max(0, math.ceil((last - first) / gap))
    ends = info.maxexp - 4  # so that a scale and its inverse are normal numbers
    exponents = [last - (last - first) * i / max(1, n_gaps) for i in range(n_gaps, -1, -1)]
    evens = [2 * math.floor(e / 2) for e in exponents[:-1]] + [2 * math.ceil(exponents[-1] / 2)]
    return tuple(dict.fromkeys(min(max(e, -ends), ends) for e in evens))


def power_sum(x: Any, order: float) -> Any:
    """The sum of the powers as they are; for an order of 0, of the entries not zero."""
    if order == 0:
        return jnp.sum(modulus_bits(x) != 0).astype(x.dtype)
    return jnp.sum(_power(x if order % 2 == 0 else jnp.abs(x), order))


def trusted(plain: Any, n: int, order: float) -> Any:
    """Whether a plain sum of ``n`` powers has neither overflowed nor lost more than a rounding."""
    info = jnp.finfo(plain.dtype)
    # The most that an entry, or its power, that is taken for zero may have been.
    lost = n * 2.0 ** (info.minexp * min(1.0, order))
    return (plain >= lost * 2.0 ** (info.nmant + 2)) & (plain < math.inf)


def at_scales(plain: Any, order: float) -> Any:
    """The sums at each scale, of a plain sum that can be trusted."""
    return _times(plain, _opaque(_factors(plain.dtype, order, 0.0), plain.dtype))


class Scales(NamedTuple):
    """For each scale, as the compiler cannot see them."""

    multipliers: Any
    """What an entry is multiplied by."""
    steps: Any
    """What the bits of a subnormal entry are multiplied by."""
    limits: Any
    """The bits of the largest entry whose powers may be summed at that scale."""
    factors: Any
    """What make the sum at that scale one at each of them, multiplied one after the other."""


def scales(dtype: Any, order: float) -> Scales:
    """All that is known of the scales of ``shifts``."""
    info, exponents = jnp.finfo(dtype), np.array(shifts(dtype, order), float)
    steps = info.minexp - info.nmant - exponents
    limits = np.minimum(exponents + (info.maxexp - 1 - _TERMS) / order, info.maxexp - 1)
    word = np.dtype(f"uint{info.bits}")
    bits = np.exp2(limits).astype(dtype).view(word)
    bits[-1] = np.iinfo(word).max  # a NaN, too, belongs somewhere
    return Scales(
        _opaque(np.exp2(-exponents), dtype),
        _opaque(np.where(steps < info.minexp, 0, np.exp2(steps)), dtype),
        _opaque(bits, word),
        _opaque(np.stack([_factors(dtype, order, e) for e in exponents]), dtype),
    )


def exact_sums(leaves: list[Any], order: float, scales: Scales, add: Any) -> Any:
    """The sums at each scale from that at one which suits the largest entry.

    ``add`` maps a function over leaves and adds up what it returns.
    """
    chosen = jnp.sum(largest(leaves) > scales.limits)
    multiplier, step, _, factors = (lax.dynamic_index_in_dim(x, chosen, 0, False) for x in scales)

    def of_leaf(x: Any) -> Any:
        # A subnormal entry is read from its bits: a backend's arithmetic may take it for zero.
        bits = modulus_bits(x)
        is_small = bits < (1 << jnp.finfo(x.dtype).nmant)
        size = jnp.where(is_small, bits.astype(x.dtype) * step, jnp.abs(x) * multiplier)
        return jnp.sum(_power(size, order))

    return _times(add(of_leaf, leaves), factors)


def _factors(dtype: Any, order: float, exponent: float) -> Any:
    """What makes a sum at the scale 2**exponent one at each scale: (factors, scales).

    One power of two would be out of range, so that there are several.
    """
    ends = shifts(dtype, order)
    n = math.ceil(order * (ends[-1] - min(ends[0], 0)) / (jnp.finfo(dtype).maxexp - 4))
    exponents = order * (exponent - np.array(ends))
    most = np.trunc(exponents / n)
    return np.exp2(np.stack([most] * (n - 1) + [exponents - most * (n - 1)]))


def _times(x: Any, factors: Any) -> Any:
    for factor in factors:
        x = x * factor
    return x


def finest(sums: Any, order: float) -> tuple[Any, Any]:
    """The norm from the finest sum that is in range; from the last if none is."""
    units = np.exp2(np.array(shifts(sums.dtype, order))).astype(sums.dtype)
    roots = _power(sums, 1 / order)
    if order not in (0.5, 1, 2):  # a power of a fraction is good to some roundings only
        again = _power(roots, order)
        sound = jnp.isfinite(sums) & jnp.isfinite(again) & (again > 0)
        roots *= 1 + jnp.where(sound, sums / jnp.where(sound, again, 1) - 1, 0) / order
    # Far enough below the largest number for one over it to be a normal number.
    usable = (roots < 2.0 ** (jnp.finfo(sums.dtype).maxexp - 28)).at[-1].set(True)
    chosen = usable & (jnp.cumsum(usable) == 1)
    pick = lambda of: jnp.sum(jnp.where(chosen, of, 0))
    return pick(roots), pick(units)


def scaled(value: Any) -> tuple[Any, Any]:
    """One number as a pair."""
    apply = lambda fun, leaves: fun(*leaves)
    return finest(exact_sums([value], 1.0, scales(value.dtype, 1.0), apply), 1.0)


def _power(x: Any, order: float) -> Any:
    if order == 1:
        return x
    if order == 0.5:
        return jnp.sqrt(x)
    if order == int(order):
        return lax.integer_pow(x, int(order))
    if 2 * order == int(2 * order):
        return lax.integer_pow(x, int(order)) * jnp.sqrt(x)
    return x ** jnp.array(order, x.dtype)


def _opaque(values: Any, dtype: Any) -> Any:
    """Powers of two that the compiler does not multiply together: that leaves the range."""
    return lax.optimization_barrier(jnp.array(values, dtype))
