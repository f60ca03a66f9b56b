"""The derivative of a problem along directions: by differences, by vjp, by jvp."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad._compat import Literal
from funcgrad._gradcheck._problem import Problem
from funcgrad._gradcheck._space import Probes
from funcgrad._jaxpr import walk
from funcgrad._trees import is_key

_BLOCK = 2**22  # numbers that go into one call, or come out
SUMS = 2


class OverRows:
    """A function of a vector, over the rows of a matrix: one program, compiled once.

    One row after the other and not by ``vmap``: the differences, by which all is judged, must
    not depend on batching rules.
    """

    def __init__(self, fun: Callable[[Any], Any], traceable: bool, widths: tuple[int, int]) -> None:
        self._block = max(2, min(512, _BLOCK // max(1, *widths)))
        self._width, self._fun, self._traceable = widths[1], fun, traceable
        self._run = jax.jit(self._loop)

    def _loop(self, rows: Any, count: Any) -> Any:
        out = jnp.zeros((self._block, self._width), rows.dtype)
        return lax.fori_loop(0, count, lambda i, out: out.at[i].set(self._fun(rows[i])), out)

    def __call__(self, n_rows: int, rows: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """The results, a row each; ``rows(start, stop)`` makes some of the arguments."""
        found = [np.zeros((0, self._width))]
        for start in range(0, n_rows, self._block):
            block = rows(start, min(start + self._block, n_rows))
            if self._traceable:
                full = np.zeros((self._block, block.shape[1]), block.dtype)
                full[: len(block)] = block
                found.append(np.asarray(self._run(full, len(block)))[: len(block)])
            else:
                found.append(np.stack([np.asarray(self._fun(jnp.asarray(row))) for row in block]))
        return np.concatenate(found)


class Derivatives:
    """The programs of one check; results are in float64 whatever the problem's precision."""

    def __init__(self, problem: Problem, eps: float) -> None:
        self.problem, self.eps, self.at = problem, eps, problem.start()
        traceable, n, m = problem.jaxpr is not None, problem.inputs.size, problem.outputs.size
        at, sums = self.at, np.random.default_rng(0).normal(size=(SUMS, m)).astype(self.at.dtype)
        self.sums = sums.astype(np.float64)

        def pulled(cotangent: Any) -> Any:
            value, pull = jax.vjp(problem.flat, jnp.asarray(at))
            return jnp.concatenate([pull(cotangent)[0], sums @ value])

        def pushed(tangent: Any) -> Any:
            value, moved = jax.jvp(problem.flat, (jnp.asarray(at),), (tangent,))
            return jnp.concatenate([moved, sums @ value])

        self._values = OverRows(problem.flat, traceable, (n, m))
        self._pulled = OverRows(pulled, traceable, (m, n + SUMS))
        self._pushed = OverRows(pushed, traceable, (n, m + SUMS))

    def values(self, offsets: np.ndarray) -> np.ndarray:
        """The function at the point plus each row."""
        moved = lambda start, stop: (self.at + offsets[start:stop]).astype(self.at.dtype)
        return self._values(len(offsets), moved).astype(np.float64)

    def numerical(self, along: Probes, onto: Probes) -> np.ndarray:
        """Central differences, a row for each direction, a column for each functional."""
        found = [np.zeros((0, len(onto)))]
        step = max(1, _BLOCK // max(1, self.problem.inputs.size, self.problem.outputs.size))
        for start in range(0, len(along), step):
            offsets = self.eps * along.rows(start, start + step)
            ahead, behind = np.split(self.values(np.concatenate([offsets, -offsets])), 2)
            found.append((onto.matrix @ ((ahead - behind) / (2 * self.eps)).T).T)
        return np.concatenate(found)

    def analytical(self, mode: str, along: Probes, onto: Probes) -> np.ndarray:
        """The same by the vjp or the jvp."""
        if mode == "reverse":
            return along.matrix @ self.run(mode, len(onto), onto.rows)[0].T
        return (onto.matrix @ self.run(mode, len(along), along.rows)[0].T).T

    def run(
        self, mode: str, count: int, rows: Callable[[int, int], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The vjp or the jvp of each row, and each time ``sums`` of the values on the way."""
        cast = lambda start, stop: rows(start, stop).astype(self.at.dtype)
        program = self._pulled if mode == "reverse" else self._pushed
        found = program(count, cast).astype(np.float64)
        return found[:, :-SUMS], found[:, -SUMS:]


def same_trace(fun: Callable[..., Any], *args: Any) -> bool:
    """Whether tracing twice gives the same program, its constants included."""
    first, second = (jax.make_jaxpr(lambda *a: fun(*a))(*args) for _ in range(2))
    pairs = list(zip(_constants(first), _constants(second), strict=False))
    same_text = _text(first) == _text(second)
    return same_text and all(a is b or _equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def _text(jaxpr: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr))  # addresses, of functions


def _constants(jaxpr: Any) -> list[Any]:
    held = [v.val for visit in walk(jaxpr) for v in visit.eqn.invars if isinstance(v, Literal)]
    return [jax.random.key_data(x) if is_key(x) else x for x in (*jaxpr.consts, *held)]


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()
