"""The floating-point operations of one equation, by its formula."""

import math
from typing import Any

import jax.numpy as jnp

from funcgrad._compat import JaxprEqn

# These give back numbers that they were given, in another place, shape or type.
MOVES = frozenset(
    "argmax argmin and bitcast_convert_type broadcast_in_dim complex concatenate "
    "convert_element_type copy copy_p device_put dynamic_slice dynamic_update_slice eq expand_dims "
    "gather ge get gt imag iota is_finite le lt masked_load masked_swap name ne not "
    "optimization_barrier or pad pcast program_id pvary random_bits random_fold_in random_seed "
    "random_split random_unwrap random_wrap real reduce_and reduce_or reduce_precision reshape "
    "reshard rev select_n sharding_constraint slice sort split squeeze stop_gradient swap "
    "threefry2x32 top_k transpose xor all_gather all_to_all axis_index ppermute".split()
)


def flops(eqn: JaxprEqn) -> int:
    """Operations of one run of an equation that holds no program.

    2mnk for a matrix product; 2 wherever an entry of a convolution's kernel meets an input, and
    not padding; the textbook's count for a factorization, a triangular solve and a Fourier
    transform; one for each entry of each window; and one for each element otherwise: of the
    inputs where a reduction makes them fewer, of the updates where they are added into an array.
    What only moves, compares or draws counts none, nor does integer arithmetic outside of
    products.  Complex numbers count like real ones.
    """
    name = eqn.primitive.name
    if name in MOVES or (name == "scatter" and eqn.params["update_jaxpr"] is None):
        return 0
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * size(eqn.outvars[0]) * _extent(eqn.invars[0], contracted)
    if name == "ragged_dot_general":
        return _ragged(eqn)
    if name == "conv_general_dilated":
        return _convolution(eqn)
    if name in _OF_MATRIX:
        *batch, m, n = eqn.invars[0].aval.shape
        return math.prod(batch) * round(_OF_MATRIX[name](m, n))
    if name == "triangular_solve":
        return size(eqn.outvars[0]) * eqn.invars[0].aval.shape[-1]
    if name == "fft":
        points = math.prod(eqn.params["fft_lengths"])
        ends = size(eqn.invars[0]), size(eqn.outvars[0])
        real = eqn.params["fft_type"].name in ("RFFT", "IRFFT")  # half of its points are given
        return round(5 * max(ends) * math.log2(max(points, 1)) / (2 if real else 1))
    if not any(map(_is_inexact, (*eqn.invars, *eqn.outvars))):
        return 0
    if "window_dimensions" in eqn.params:
        return _windows(eqn)
    if name.startswith("scatter"):
        return size(eqn.invars[2])
    return max((size(atom) for atom in (*eqn.invars, *eqn.outvars)), default=0)


# Golub and Van Loan, "Matrix Computations", 2013; of the iterative ones an estimate.
_OF_MATRIX = {
    "cholesky": lambda m, n: n**3 / 3,
    "lu": lambda m, n: min(m, n) ** 2 * (max(m, n) - min(m, n) / 3),
    "geqrf": lambda m, n: 2 * min(m, n) ** 2 * (max(m, n) - min(m, n) / 3),
    "householder_product": lambda m, n: 2 * n**2 * (m - n / 3),
    "qr": lambda m, n: 4 * min(m, n) ** 2 * (max(m, n) - min(m, n) / 3),  # both of these
    "eigh": lambda m, n: 9 * n**3,
    "svd": lambda m, n: 4 * m**2 * n + 8 * m * n**2 + 9 * n**3,
    "eig": lambda m, n: 25 * n**3,
    "schur": lambda m, n: 25 * n**3,
}


def _ragged(eqn: JaxprEqn) -> int:
    """Of a product in which each row belongs to one of several matrices."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    count = 2 * size(eqn.outvars[0]) * _extent(eqn.invars[0], contracted)
    if numbers.lhs_ragged_dimensions[0] in contracted:  # each group sums its own rows
        count //= max(eqn.invars[2].aval.shape[-1], 1)
    return count


def _convolution(eqn: JaxprEqn) -> int:
    lhs, kernel, out = (atom.aval.shape for atom in (*eqn.invars, *eqn.outvars))
    lhs_spec, kernel_spec, out_spec = eqn.params["dimension_numbers"]
    count = 2 * out[out_spec[0]] * out[out_spec[1]] * kernel[kernel_spec[1]]
    keys = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    told = zip(*(eqn.params[key] for key in keys), strict=True)
    for i, n, o, how in zip(kernel_spec[2:], lhs_spec[2:], out_spec[2:], told, strict=True):
        count *= _meetings(lhs[n], kernel[i], out[o], *how)
    return count


def _windows(eqn: JaxprEqn) -> int:
    """Of the largest or the sum of each window, and of the way back, as in pooling."""
    ends = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.primitive.name.startswith("select_and_scatter"):
        ends = ends[::-1]
    window, ones = eqn.params["window_dimensions"], (1,) * len(ends[0])
    params = {"base_dilation": ones, "window_dilation": ones} | eqn.params
    keys = ("window_strides", "padding", "base_dilation", "window_dilation")
    told = zip(*(params[key] for key in keys), strict=True)
    axes = zip(ends[0], window, ends[1], told, strict=True)
    return math.prod(_meetings(n, k, out, *how) for n, k, out, how in axes)


def _meetings(
    n: int, kernel: int, out: int, stride: int, pad: tuple[int, int], between: int, dilation: int
) -> int:
    """How often an entry of a kernel meets one of ``n`` inputs, not padding, along one axis.

    The inputs stand ``between`` apart, with zeros in the gaps.
    """
    (few, by), (many, step) = sorted(((kernel, dilation), (out, stride)))
    every, count = between // math.gcd(step, between), 0
    for i in range(few):
        start = i * by - pad[0]
        hits = [t for t in range(every) if (start + t * step) % between == 0]
        low, high = max(0, -(start // step)), min(many - 1, ((n - 1) * between - start) // step)
        if hits and low <= high:
            count += (high - hits[0]) // every + (hits[0] - low) // every + 1
    return count


def _extent(atom: Any, axes: Any) -> int:
    return math.prod(atom.aval.shape[axis] for axis in axes)


def _is_inexact(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def size(atom: Any) -> int:
    """The number of elements of a value; of what has no shape, such as a token, none."""
    shape = getattr(atom.aval, "shape", None)
    return 0 if shape is None else math.prod(shape)
