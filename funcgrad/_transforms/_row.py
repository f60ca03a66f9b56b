"""One row of a ``vmap``: its program is read before it runs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad import _jaxpr
from funcgrad._transforms._communication import axes_of
from funcgrad._transforms._draws import raw_keys, shared_draws
from funcgrad._trees import is_key


@dataclasses.dataclass(frozen=True)
class Row:
    """``fun`` at one row; called by ``jax.vmap`` with the row's number and its mapped leaves.

    Called there it is traced, where a value is mapped exactly if it depends on the inputs, and
    where a collective over the mapped axis is still one.
    """

    fun: Callable[..., Any]
    leaves: list[Any]
    tree: Any
    is_mapped: list[bool]
    randomness: str
    refused: Any
    """The axis name over which nothing may communicate."""

    def __call__(self, index: Any, rows: list[Any]) -> Any:
        """The outputs of ``fun``."""
        shared = [x for x, mapped in zip(self.leaves, self.is_mapped, strict=True) if not mapped]
        if self.randomness == "same" and self.refused is None:
            return self._call(rows, shared)

        # All but keys keep their values, by which Python may decide.
        is_shared_key = [is_key(x) or _may_be_raw_key(x) for x in shared]
        keys = [x for x, key in zip(shared, is_shared_key, strict=True) if key]

        def flat(rows: list[Any], keys: list[Any]) -> Any:
            given = iter(keys)
            pairs = zip(shared, is_shared_key, strict=True)
            return self._call(rows, [next(given) if key else x for x, key in pairs])

        try:
            traced = _jaxpr.trace(flat, rows, keys)
        except jax.errors.ConcretizationTypeError as error:
            error.add_note("vmap: randomness='same' does not read the program, and needs no trace.")
            raise
        jaxpr, consts = traced.jaxpr.jaxpr, list(traced.jaxpr.consts)
        if self.refused is not None:
            _refuse_collectives(jaxpr, self.refused)
        inputs = [*rows, *keys]
        if self.randomness == "same":
            return traced.unflatten(_run(jaxpr, consts, inputs))

        folded: set[Any] = set()
        if self.randomness == "different":
            raw, own = raw_keys(jaxpr), jaxpr.invars[len(rows) :]
            given = [*zip(jaxpr.constvars, consts, strict=True), *zip(own, keys, strict=True)]
            folded = {var for var, x in given if var in raw or is_key(x)}
            fold = lambda var, x: _fold(x, index) if var in folded else x
            consts = [fold(var, x) for var, x in zip(jaxpr.constvars, consts, strict=True)]
            inputs = [fold(var, x) for var, x in zip(jaxpr.invars, inputs, strict=True)]
        marked = [True] * len(rows) + [False] * len(keys)
        for draw in shared_draws(jaxpr, marked, folded):
            raise ValueError(_SHARED[self.randomness].format(draw.line or "in a library"))
        return traced.unflatten(_run(jaxpr, consts, inputs))

    def _call(self, rows: list[Any], shared: list[Any]) -> Any:
        moving, staying = iter(rows), iter(shared)
        leaves = [next(moving) if mapped else next(staying) for mapped in self.is_mapped]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return self.fun(*args, **kwargs)


_SHARED = {
    "error": "vmap: every row draws from its own key; got one that is not mapped, drawn from at "
    "{}. Map over keys (jax.random.split), or say randomness='different' or 'same'.",
    "different": "vmap: with randomness='different', keys come from outside of fun; got one made "
    "or picked inside, or closed over by a jit inside, drawn from at {}. Pass the key itself, or "
    "map over keys.",
}


def _run(jaxpr: Any, consts: list[Any], inputs: list[Any]) -> list[Any]:
    return _jaxpr.evaluate(jaxpr, consts, inputs, lambda eqn: None)


def _may_be_raw_key(x: Any) -> bool:
    return getattr(x, "dtype", None) == jnp.uint32 and jnp.ndim(x) > 0


def _fold(key: Any, index: Any) -> Any:
    """The row's own key, or keys."""
    fold = lambda key: jax.random.fold_in(key, index)
    for _ in range(jnp.ndim(key) - (not is_key(key))):
        fold = jax.vmap(fold)
    return fold(key)


def _refuse_collectives(jaxpr: Any, axis_name: Any) -> None:
    for visit in _jaxpr.walk(jaxpr):
        if axis_name in axes_of(visit.eqn):
            raise ValueError(
                f"vmap: a collective sees the whole axis {axis_name!r}, which chunk_size cuts; "
                f"got {visit.eqn.primitive.name} at {visit.line}. Leave out chunk_size, or the "
                "collective."
            )
