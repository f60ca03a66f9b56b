"""Sites that compute alike: what is done at one of them is traced once for all.

A network has a site for each of its weights, but few kinds of them, as its layers repeat.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from funcgrad import _jaxpr


class Form:
    """A site as what it computes: equal for sites that differ only in where they stand.

    Its ``site`` knows no leaf, window or line.
    """

    __slots__ = ("_hash", "_key", "site")

    def __init__(self, site: Any) -> None:
        layout = site.layout and dataclasses.replace(site.layout, leaf=-1, window=())
        self.site = dataclasses.replace(
            site, leaves=frozenset(), layout=layout, why="", line=None, shares=None, in_remat=False
        )
        self._key = (
            site.kind,
            layout and _jaxpr.alike((layout.axes, layout.scale, layout.scanned)),
            site.lengths,
            site.stacked,
            site.position,
            site.eqn and _jaxpr.operation(site.eqn),
            site.var.aval,
            site.operand,
            site.output,
            site.formed and site.formed.form,
        )
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


def by_form(fun: Callable[..., Any]) -> Callable[..., Any]:
    """``fun(site, *arrays, **static)``, or of a tuple of sites, traced once for each form."""

    @functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
    def traced(form: Any, static: Any, *arrays: Any) -> Any:
        site = tuple(f.site for f in form) if isinstance(form, tuple) else form.site
        return fun(site, *arrays, **dict(static))

    @functools.wraps(fun)
    def call(site: Any, *arrays: Any, **static: Any) -> Any:
        form = tuple(s.form for s in site) if isinstance(site, tuple) else site.form
        return traced(form, tuple(static.items()), *arrays)

    return call
