"""The floating-point operations of one equation, by its formula."""

import math
from typing import Any

from funcgrad._compat import JaxprEqn

# These give back numbers that they were given, in another place, shape or type.
MOVES = frozenset(
    "argmax argmin and bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy "
    "copy_p device_put dynamic_slice dynamic_update_slice eq expand_dims gather ge get gt iota "
    "is_finite le lt name ne not optimization_barrier or pad pcast program_id pvary "
    "random_bits random_fold_in random_seed random_split random_unwrap random_wrap "
    "reduce_and reduce_or reduce_precision reshape reshard rev scatter select_n "
    "sharding_constraint slice sort split squeeze stop_gradient swap threefry2x32 top_k "
    "transpose xor all_gather all_to_all axis_index ppermute".split()
)


def flops(eqn: JaxprEqn) -> int:
    """Operations of one run of an equation that holds no program.

    2mnk for a matrix product, 2 for each kernel entry and output of a convolution, one for
    each element otherwise: of the inputs where a reduction makes them fewer, of the updates
    where they are added into an array.  What only moves, compares or draws counts none.
    """
    name = eqn.primitive.name
    if name in MOVES:
        return 0
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * size(eqn.outvars[0]) * math.prod(lhs[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, spec = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
        per_output = math.prod(kernel) // max(kernel[spec[0]], 1)  # inputs of one group
        return 2 * size(eqn.outvars[0]) * per_output
    if name.startswith("scatter"):
        return size(eqn.invars[2])
    return max((size(atom) for atom in (*eqn.invars, *eqn.outvars)), default=0)


def size(atom: Any) -> int:
    """The number of elements of a value; of what has no shape, such as a token, none."""
    shape = getattr(atom.aval, "shape", None)
    return 0 if shape is None else math.prod(shape)
