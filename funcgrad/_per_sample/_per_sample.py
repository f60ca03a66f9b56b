"""The one backward pass that gives every sample's gradient in factored form."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp

from funcgrad._compat import make_varying, open_jaxpr, varying_axes
from funcgrad._per_sample import _capture
from funcgrad._per_sample._batch import Randomness
from funcgrad._per_sample._leaf_norms import NormSlot
from funcgrad._per_sample._plan import plan
from funcgrad._per_sample._records import Records, Scheme
from funcgrad._per_sample._reference import Problem, prepare
from funcgrad._per_sample._roads import Road, leaf_roads
from funcgrad._per_sample._samples import Samples
from funcgrad._trees import LeafSpec, keystr

_SMALL = 4096


def per_sample(
    loss: Callable[..., Any],
    *,
    has_aux: bool = False,
    in_axes: Any = 0,
    randomness: Randomness = "different",
    frozen: LeafSpec = None,
    road: Road = "auto",
) -> Callable[..., Samples]:
    """Every sample's gradient, without materialising it.

    One backward pass over the batch keeps, at each use of a parameter, the two factors whose
    product is a sample's gradient: what came in and the cotangent of what went out.  Norms,
    weighted sums, products with directions and the rest are contractions of these.  Any
    function of JAX: parameters may be tied, sliced, scaled, computed from one another, used
    in loops, recomputed; what no rule understands is had exactly by other means, for that
    leaf alone.  PyTorch: Opacus' "ghost clipping", for its registered layers.

    Args:
      loss: ``loss(params, *sample)``, a real floating scalar for one sample; with
        ``has_aux`` a pair of it and a pytree.
      has_aux: Whether ``loss`` returns a pair.
      in_axes: The sample axis of the arguments after ``params``, as in ``jax.vmap``.
      randomness: ``"different"`` gives each sample its own key, ``"same"`` shares one.
      frozen: Leaves without a gradient: patterns, a predicate of (path, leaf), or a tree of
        booleans.
      road: How norms are taken: ``"auto"`` chooses for each leaf; ``"gram"``, ``"direct"``
        and ``"materialize"`` force one where it is possible.

    Returns:
      A function ``(params, *batch) -> Samples``.

    Raises:
      NotImplementedError: The result is differentiated; ``per_sample_grads`` can be.
      TypeError: As ``per_sample_grads``.
      ValueError: As ``per_sample_grads``.

    Example:
      >>> loss = lambda w, x, y: (jnp.tanh(x @ w["in"]) @ w["out"] - y) ** 2
      >>> w = {"in": jnp.ones((3, 5)), "out": jnp.ones(5)}
      >>> samples = jax.jit(fg.per_sample(loss))(w, jnp.eye(3), jnp.zeros(3))
      >>> [round(float(n), 1) for n in samples.norms()]
      [14.8, 14.8, 14.8]

    References:
      Goodfellow, "Efficient Per-Example Gradient Computations", 2015; Rochette, Manoel and
      Tramel, "Efficient Per-Example Gradient Computations in Convolutional Neural
      Networks", 2019; Li et al., "Large Language Models Can Be Strong Differentially
      Private Learners", 2022.
    """
    if road not in get_args(Road):
        raise ValueError(f"per_sample: road is one of {', '.join(get_args(Road))}; got {road!r}.")

    def run(params: Any, *args: Any) -> Samples:
        problem = prepare(
            loss, params, args, has_aux=has_aux, in_axes=in_axes, randomness=randomness,
            frozen=frozen, call="per_sample",
        )  # fmt: skip
        scheme = make_scheme(problem, params, road)
        return backward(problem, scheme, problem.batch.mapped)

    return run


def make_scheme(problem: Problem, params: Any, road: Road, *, keeps: bool = True) -> Scheme:
    """Read a prepared loss: its sites, and the road of each leaf; ``keeps`` as ``kept`` there."""
    jaxpr, n_leaves = problem.traced.jaxpr, len(problem.trainable)
    level = plan(jaxpr, n_leaves, _SMALL if road == "auto" else 0)
    sites = tuple(level.all_sites())
    paths = jax.tree_util.tree_leaves_with_path(params)
    names = [
        f"params{keystr(path)}"
        for (path, _), frozen in zip(paths, problem.is_frozen, strict=True)
        if not frozen
    ]
    avals = [var.aval for var in open_jaxpr(jaxpr)[0].invars[:n_leaves]]
    roads = leaf_roads(sites, avals, names, road)
    if not keeps:
        roads = tuple(dataclasses.replace(road, kept=0) for road in roads)
    return Scheme(
        level=dataclasses.replace(level, consts=()),  # they may be tracers: not for keeping
        sites=sites,
        roads=roads,
        n_samples=problem.batch.size,
        like_params=problem.like_params,
        is_frozen=tuple(problem.is_frozen),
    )


def backward(
    problem: Problem, scheme: Scheme, mapped: Sequence[Any], slots: dict[int, Any] | None = None
) -> Samples:
    """The backward pass over samples; ``slots`` stand in for those of some sites."""
    consts, sites = list(problem.traced.jaxpr.consts), scheme.sites
    level = dataclasses.replace(scheme.level, consts=tuple(consts))
    axes = varying_axes((mapped, problem.batch.shared))
    params = _refuse_derivative(make_varying(problem.trainable, axes))
    floats = [x for x in mapped if jnp.issubdtype(x.dtype, jnp.inexact)]
    floats = iter(_refuse_derivative(floats))
    mapped = [next(floats) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in mapped]
    own = _capture.make_slots(sites, sharing=slots is None)
    zeros = {site: (slots or {}).get(i, own.get(site)) for i, site in enumerate(sites)}
    zeros = {site: zero for site, zero in zeros.items() if zero is not None}

    def one(values: list[Any], mapped: Any) -> Any:
        slots = dict(zip(zeros, values, strict=True))
        out, operands = _capture.run(level, [*params, *mapped], slots)
        value, aux = problem.traced.unflatten(out)
        return value, (aux, [operands.get(site) for site in sites])

    n = mapped[0].shape[0]
    if n == 0:
        _, values, aux = problem.empty()
        kinds = [None if isinstance(zeros.get(s), NormSlot) else s.operand for s in sites]
        operands = [
            None if kind is None else jnp.zeros((*site.lengths, 0, *kind.shape), kind.dtype)
            for site, kind in zip(sites, kinds, strict=True)
        ]
        back = [
            jax.tree.map(functools.partial(_empty_axis, axis=len(site.lengths)), zero)
            for site, zero in zeros.items()
        ]
    else:
        # Inside shard_map the cotangent of a value that all devices share is summed over them.
        start = make_varying(list(zeros.values()), varying_axes((mapped, params)))
        run = jax.value_and_grad(one, has_aux=True)
        # Behind the axes of the loops, where the pass leaves it.
        depths = [len(site.lengths) for site in sites]
        out_axes = ((0, (0, depths)), [len(site.lengths) for site in zeros])
        (values, (aux, operands)), back = jax.vmap(run, (None, 0), out_axes)(start, mapped)
    found = dict(zip(zeros, back, strict=True))
    cotangents = [found[s.shares if s.shares and s not in found else s] for s in sites]
    scheme = dataclasses.replace(scheme, n_samples=n)
    held = Records(params, consts, operands, cotangents, scheme)
    return Samples(values, aux, held)


def _empty_axis(x: Any, axis: int) -> Any:
    return jnp.zeros((*x.shape[:axis], 0, *x.shape[axis:]), x.dtype)


@jax.custom_jvp
def _refuse_derivative(xs: list[Any]) -> list[Any]:
    return xs


@_refuse_derivative.defjvp
def _(primals: Any, tangents: Any) -> Any:
    # The records carry no derivative with respect to the parameters of earlier layers:
    # without this, a gradient of a norm would be wrong in silence.
    raise NotImplementedError(
        "per_sample: its result is not differentiable; got a gradient or tangent through it. "
        "Use per_sample_grads, whose result is."
    )
