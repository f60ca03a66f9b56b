"""The two factors of a per-sample gradient, laid out as matrices, and norms from them.

A record becomes ``left`` (blocks, terms, rows) and ``right`` (blocks, terms, columns) for
each sample: the gradient of the weight is ``left^T right`` in each block.  Terms are what
the gradient sums over (tokens, positions in the image, steps of a loop).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad._per_sample._forms import by_form
from funcgrad._per_sample._plan import Site
from funcgrad._per_sample._sums import norm_over, total_of_squares, wide


@dataclasses.dataclass(frozen=True)
class Factors:
    """A batch of factors; ``key`` tells which leaf axes are blocks, rows and columns.

    At a gather ``left`` holds the row numbers (batch, terms), -1 for a row that is none.
    ``key`` is ``None`` where the axes are not known.
    """

    left: Any
    right: Any
    key: tuple[Any, Any, Any] | None
    is_rows: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Blocks, terms, rows and columns; no rows at a gather."""
        if self.is_rows:
            return 1, self.left.shape[-1], 0, self.right.shape[-1]
        blocks, terms, rows = self.left.shape[-3:]
        return blocks, terms, rows, self.right.shape[-1]

    @property
    def gram_is_cheaper(self) -> bool:
        """Whether products between terms cost less, in time and memory, than the gradient."""
        _, terms, rows, columns = self.sizes
        return self.is_rows or terms * (rows + columns) < rows * columns

    def widened(self) -> "Factors":
        """The same in float32 or wider."""
        right = self.right.astype(wide(self.right.dtype))
        left = self.left if self.is_rows else self.left.astype(right.dtype)
        return Factors(left, right, self.key, self.is_rows)


def factors(site: Site, operands: Any, cotangents: Any) -> Factors | None:
    """The factors of a site from its records (batch, *loops, ...); ``None`` if it has none."""
    if site.kind == "dense":
        return _dense(site, operands, cotangents)
    if site.kind == "conv":
        return _conv(site, operands, cotangents)
    if site.kind == "gather":
        return _gather(site, operands, cotangents)
    return None


def _blocks(x: Any, n_loops: int, stacked: Any, groups: list[list[int]]) -> Any:
    """Arrange (batch, *loops, ...) as (batch, blocks, terms, rest) by axes of the site."""
    block, term, rest = groups
    loops = range(1, 1 + n_loops)
    first = [d for d, s in zip(loops, stacked, strict=True) if s]
    steps = [d for d, s in zip(loops, stacked, strict=True) if not s]
    shifted = [[1 + n_loops + d for d in group] for group in (block, term, rest)]
    order = [[0], first + shifted[0], steps + shifted[1], shifted[2]]
    shape = [math.prod(x.shape[d] for d in group) for group in order]
    return x.transpose([d for group in order for d in group]).reshape(shape)


@dataclasses.dataclass(frozen=True)
class DenseAxes:
    """The axes of a dot_general by their role: contracted, batch, free.

    The operand is ``z``, the weight ``u``, the output ``y``.
    """

    z_c: list[int]
    z_b: list[int]
    z_f: list[int]
    u_c: list[int]
    u_b: list[int]
    u_f: list[int]
    y_b: list[int]
    y_z: list[int]
    y_u: list[int]


def dense_axes(site: Site) -> DenseAxes:
    """The roles of the axes at a dense site."""
    assert site.eqn is not None
    (lhs_c, rhs_c), (lhs_b, rhs_b) = site.eqn.params["dimension_numbers"]
    on_right = site.position == 1
    z_c, z_b, u_c, u_b = (lhs_c, lhs_b, rhs_c, rhs_b) if on_right else (rhs_c, rhs_b, lhs_c, lhs_b)
    z_f = [d for d in range(len(site.operand.shape)) if d not in (*z_c, *z_b)]
    u_f = [d for d in range(len(site.var.aval.shape)) if d not in (*u_c, *u_b)]
    # The output's axes: batch, then what is free on the left, then on the right.
    n_b, n_left = len(z_b), len(z_f) if on_right else len(u_f)
    left = list(range(n_b, n_b + n_left))
    right = list(range(n_b + n_left, n_b + len(z_f) + len(u_f)))
    y_z, y_u = (left, right) if on_right else (right, left)
    return DenseAxes(
        list(z_c), list(z_b), z_f, list(u_c), list(u_b), u_f, list(range(n_b)), y_z, y_u
    )  # fmt: skip


def _dense(site: Site, operands: Any, cotangents: Any) -> Factors:
    d = dense_axes(site)
    z_c, z_b, z_f, y_b, y_z, y_u = d.z_c, d.z_b, d.z_f, d.y_b, d.y_z, d.y_u
    axes = site.layout.axes if site.layout else None
    scanned = site.layout.scanned if site.layout else ()
    key = None
    if axes is not None and None not in scanned and len(scanned) == sum(site.stacked):

        def rank(pair: Any) -> Any:
            return -1 if axes[pair[0]] is None else axes[pair[0]]

        contracted = sorted(zip(d.u_c, d.z_c, strict=True), key=rank)
        batched = sorted(zip(d.u_b, d.z_b, d.y_b, strict=True), key=rank)
        freed = sorted(zip(d.u_f, d.y_u, strict=True), key=rank)
        z_c, z_b = [z for _, z in contracted], [z for _, z, _ in batched]
        y_b, y_u = [y for _, _, y in batched], [y for _, y in freed]
        named = [
            tuple(axes[u] for u, *_ in group if axes[u] is not None)
            for group in (batched, contracted, freed)
        ]
        key = ((*scanned, *named[0]), named[1], named[2])
    n = len(site.lengths)
    left = _blocks(operands, n, site.stacked, [z_b, z_f, z_c])
    right = _blocks(cotangents, n, site.stacked, [y_b, y_z, y_u])
    return Factors(left, right, key)


def _conv(site: Site, operands: Any, cotangents: Any) -> Factors:
    assert site.eqn is not None
    params, n = site.eqn.params, len(site.lengths)
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    window = [site.var.aval.shape[d] for d in numbers.rhs_spec[2:]]
    lead = operands.shape[: 1 + n]

    def features_last(x: Any, spec: Any) -> Any:
        first, features, *spatial = (1 + d for d in spec)
        return x.reshape(-1, *x.shape[1 + n :]).transpose(0, first, *spatial, features)

    def by_group(x: Any, features: int) -> Any:
        """(lead * n, positions, taps * features) as blocks, terms, columns."""
        if groups > 1:
            x = x.reshape(math.prod(lead), terms, -1, groups, features).transpose(0, 3, 1, 2, 4)
        return x.reshape(*lead, groups, terms, -1)

    g = features_last(cotangents, numbers.out_spec)
    x = features_last(operands, numbers.lhs_spec)
    terms = math.prod(g.shape[1:-1])
    patches = _patches(x, window, g.shape[2:-1], params)
    left, right = by_group(patches, x.shape[-1] // groups), by_group(g, g.shape[-1] // groups)
    groups_3 = [[0], [1], [2]]
    return Factors(
        _blocks(left, n, site.stacked, groups_3), _blocks(right, n, site.stacked, groups_3), None
    )


@by_form
def formed_gradient(site: Site, operands: Any, cotangents: Any) -> Any:
    """One sample's gradient of a filter, from its patches (*loops, ...).

    The axes of loops that scan over the filter stay in front.
    """
    assert site.eqn is not None
    f = _conv(site, operands[None], cotangents[None]).widened()
    gradient = jnp.einsum("btk,btj->bkj", f.left[0], f.right[0], precision=EXACT)
    spec, groups = (
        site.eqn.params["dimension_numbers"].rhs_spec,
        site.eqn.params["feature_group_count"],
    )
    out, features, *window = (site.var.aval.shape[d] for d in spec)
    lead = [n for n, stacked in zip(site.lengths, site.stacked, strict=True) if stacked]
    gradient = gradient.reshape(-1, groups, *window, features, out // groups)
    # (loops, groups, *window, features, out / groups), to (loops, out, features, *window), to
    # its own order.
    n = len(window)
    gradient = gradient.transpose(0, 1, n + 3, n + 2, *range(2, n + 2))
    gradient = gradient.reshape(*lead, out, features, *window)
    own = [len(lead) + spec.index(d) for d in range(len(spec))]
    return gradient.transpose(*range(len(lead)), *own)


def _patches(x: Any, window: list[int], out: Any, params: dict[str, Any]) -> Any:
    """The input under the filter at each position: (lead * n, positions, taps * features).

    A lookup of rows of features, zeros for one that is not there: a convolution would multiply,
    and slices, one for each tap, take ten times as long to compile.
    """
    sizes, features, n = x.shape[2:-1], x.shape[-1], len(window)
    x = x.reshape(math.prod(x.shape[:2]), math.prod(sizes), features)
    names = ("window_strides", "rhs_dilation", "lhs_dilation", "padding")
    axes = zip(sizes, out, window, *[params[name] for name in names], strict=True)
    rows, inside = np.zeros([1] * 2 * n, int), np.ones([1] * 2 * n, bool)
    for axis, (size, positions, taps, stride, dilation, spread, (low, _)) in enumerate(axes):
        place = np.add.outer(stride * np.arange(positions), dilation * np.arange(taps)) - low
        # All positions, then all taps.
        place = np.expand_dims(place, [d for d in range(2 * n) if d not in (axis, n + axis)])
        inside = inside & (place % spread == 0) & (place >= 0) & (place < spread * size)
        rows = rows * size + place // spread
    if not x.size:
        return jnp.zeros((len(x), math.prod(out), math.prod(window) * features), x.dtype)
    rows = np.where(inside, rows, x.shape[1]).ravel()
    found = x.at[:, rows.astype(np.int32)].get(mode="fill", fill_value=0)
    return found.reshape(len(x), math.prod(out), -1)


def _gather(site: Site, operands: Any, cotangents: Any) -> Factors | None:
    assert site.eqn is not None
    params, n = site.eqn.params, len(site.lengths)
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    shape = site.var.aval.shape
    picked = numbers.start_index_map
    if (
        any(site.stacked)
        or numbers.operand_batching_dims
        or sorted(picked) != sorted(numbers.collapsed_slice_dims)
        or any(sizes[d] != shape[d] for d in range(len(shape)) if d not in picked)
        or not math.prod(shape)
    ):
        return None
    indices = operands.reshape(operands.shape[0], -1, operands.shape[-1])
    # In the dtype of the indices, which may not reach the last row.
    most = np.iinfo(indices.dtype).max
    last = np.array([min(shape[d] - 1, most) for d in picked], indices.dtype)[None, None]
    inside = ((indices >= 0) & (indices <= last)).all(-1)
    wide = np.int64 if indices.dtype.itemsize == 8 else np.int32
    clamped = jnp.clip(indices, 0, last).astype(wide)
    ids = jnp.zeros(clamped.shape[:-1], clamped.dtype)
    for k, d in enumerate(picked):
        ids = ids * shape[d] + clamped[..., k]
    if "CLIP" not in str(params["mode"]).upper():
        ids = jnp.where(inside, ids, -1)
    offsets = [1 + n + d for d in numbers.offset_dims]
    others = [d for d in range(1, cotangents.ndim) if d not in offsets]
    right = cotangents.transpose(0, *others, *offsets)
    right = right.reshape(right.shape[0], ids.shape[1], -1)
    whole = site.layout is not None and site.layout.axes == tuple(range(len(shape)))
    rest = tuple(d for d in range(len(shape)) if d not in picked)
    key = ((), tuple(picked), rest) if whole else None
    return Factors(ids, right, key, is_rows=True)


EXACT = lax.Precision.HIGHEST


def _grams(f: Factors) -> tuple[Any, Any]:
    """The products between the terms of each sample: of ``left`` and of ``right``."""
    right = _gram(f.right)
    if f.is_rows:
        same = (f.left[..., :, None] == f.left[..., None, :]) & (f.left[..., :, None] >= 0)
        return same.astype(right.dtype), right
    return _gram(f.left), right


def _gram(x: Any) -> Any:
    terms, columns = x.shape[-2:]
    if 4 <= terms < 8 and 4 <= columns < 8:
        # On CPU the compiler multiplies matrices of such sizes ten times as slowly as of 8.
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 8 - columns)])
    return jnp.einsum("...tj,...sj->...ts", x, x, precision=EXACT)


class Squares(NamedTuple):
    """Squared norms of samples, and what they may be off by."""

    value: Any
    mass: Any
    """The sum of the squared norms of the terms, which cancelled to make the norm: rounding is
    about the working precision times it, so a norm much below it has lost its digits."""
    flushed: Any
    """The most that underflow may have left out: squares of small entries are 0."""


def squared_norms(f: Factors, gram: bool) -> Squares:
    """The squared norm of each sample's gradient."""
    f = f.widened()
    blocks, terms, n_rows, n_columns = f.sizes
    tiny = float(jnp.finfo(f.right.dtype).tiny)
    if terms == 1 and not gram:
        # In the shape in which the norm of a bias beside it is taken, to be one with it.
        flat = lambda x: jnp.square(x.squeeze([d for d in range(1, x.ndim - 1) if x.shape[d] == 1]))
        right_sq = flat(f.right).sum(-1)
        left_sq = (f.left[:, 0] >= 0).astype(right_sq.dtype) if f.is_rows else flat(f.left).sum(-1)
        value = _totals(left_sq * right_sq)
        flushed = tiny * _totals(n_rows * right_sq + n_columns * left_sq + 1)
        return Squares(value, jnp.zeros_like(value), flushed)
    if gram or f.is_rows:
        a, b = _grams(f)
        # By a slice, which the compiler puts in the reductions; a diagonal would be a lookup.
        of_a, of_b = (x.reshape(*x.shape[:-2], terms**2)[..., :: terms + 1] for x in (a, b))
        # An entry of a Gram matrix is at most the root of its two on the diagonal.
        flushed = terms * tiny * _totals(n_rows * of_b + n_columns * of_a + terms)
        return Squares(_totals(a * b), _totals(of_a * of_b), flushed)
    return squares_of(product(f))


def product_norms(f: Factors) -> Any:
    """The norm of each sample's gradient where it is one outer product in each block.

    Whatever the size of the numbers.
    """
    f = f.widened()
    if f.sizes[0] == 1:
        # In the shape in which the norm of a bias beside it is taken, to be one with it.
        return norm_over([[f.left[:, 0, 0]]]) * norm_over([[f.right[:, 0, 0]]])
    return norm_over([[norm_over([[f.left[:, :, 0]]]) * norm_over([[f.right[:, :, 0]]])]])


def product(f: Factors) -> Any:
    """Each sample's gradient, (batch, blocks, rows, columns), where ``left`` is no lookup."""
    return jnp.einsum("...ti,...tj->...ij", f.left, f.right, precision=EXACT)


def squares_of(*gradients: Any) -> Squares:
    """The squared norm of each gradient in memory, (batch, ...), of some of one shape together."""
    real = [jnp.abs(x) if jnp.iscomplexobj(x) else x for x in gradients]
    value = total_of_squares(real, real[0].ndim - 1)
    tiny = float(jnp.finfo(value.dtype).tiny) * sum(math.prod(x.shape[1:]) for x in real)
    return Squares(value, jnp.zeros_like(value), jnp.full_like(value, tiny))


def _totals(x: Any) -> Any:
    return x.sum(tuple(range(1, x.ndim)))


def join(first: Factors, second: Factors) -> Factors | None:
    """Two uses of one weight as one with the terms of both; ``None`` if they do not match."""
    if first.key is None or second.key is None or first.is_rows != second.is_rows:
        return None
    if first.is_rows:
        left = jnp.concatenate([first.left, second.left], -1)
        right = jnp.concatenate([first.right, second.right], -2)
        return Factors(left, right, first.key, True) if first.key == second.key else None
    if second.key == (first.key[0], first.key[2], first.key[1]) and second.key != first.key:
        second = Factors(second.right, second.left, first.key)
    if first.key != second.key:
        return None
    return Factors(
        jnp.concatenate([first.left, second.left], -2),
        jnp.concatenate([first.right, second.right], -2),
        first.key,
    )


def rows_times_dense(rows: Factors, dense: Factors) -> Any:
    """The inner product of one sample's gradient at a gather with that at a dot_general.

    A tied embedding: rows looked up on the way in, all rows multiplied on the way out.
    """
    assert rows.key is not None
    assert dense.key is not None
    by_rows = dense.key[1] == rows.key[1]
    rows, dense = rows.widened(), dense.widened()
    over_rows, over_columns = (dense.left, dense.right) if by_rows else (dense.right, dense.left)
    picked = jnp.take(over_rows[0], jnp.maximum(rows.left, 0), axis=1)  # (terms, looked up)
    picked = jnp.where(rows.left >= 0, picked, 0)
    products = jnp.einsum("sj,tj->st", over_columns[0], rows.right, precision=EXACT)
    return jnp.sum(picked * products)


def is_tied(rows: Factors, dense: Factors) -> bool:
    """Whether ``rows_times_dense`` knows how the two lie in their leaf."""
    if rows.key is None or dense.key is None or not rows.is_rows or dense.is_rows:
        return False
    mine = (rows.key[1], rows.key[2])
    return rows.key[0] == dense.key[0] == () and mine in (
        (dense.key[1], dense.key[2]),
        (dense.key[2], dense.key[1]),
    )


jax.tree_util.register_dataclass(Factors, ["left", "right"], ["key", "is_rows"])
