"""The arguments of a function, of which some are differentiated."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad._trees import is_float, is_key, keystr


@dataclasses.dataclass(frozen=True)
class Point:
    """Where a derivative is taken: the chosen arguments' leaves, and all the rest as it is."""

    call: str
    args: tuple[Any, ...]
    places: tuple[int, ...]
    is_single: bool
    names: tuple[str, ...]
    leaves: list[Any]
    tree: Any

    @staticmethod
    def of(call: str, args: tuple[Any, ...], argnums: int | Sequence[int]) -> "Point":
        """Take ``args`` apart; what is differentiated has floating or complex leaves."""
        is_single = not isinstance(argnums, Sequence)
        given: Any = (argnums,) if is_single else argnums
        if not given or not all(_is_integer(i) and -len(args) <= i < len(args) for i in given):
            raise ValueError(
                f"{call}: argnums are places of positional arguments; got {argnums} for "
                f"{len(args)} of them. Pass what is differentiated by position."
            )
        places = tuple(i % len(args) for i in given)
        if len(set(places)) < len(places):
            raise ValueError(
                f"{call}: argnums name each argument once; got {argnums}. Leave out what is double."
            )
        chosen = args[places[0]] if is_single else tuple(args[i] for i in places)
        names = []
        for i in places:
            for path, leaf in jax.tree_util.tree_leaves_with_path(args[i]):
                names.append(f"args[{i}]{keystr(path)}")
                kind = _kind(leaf)
                if kind is not None:
                    raise TypeError(
                        f"{call}: what is differentiated is floating or complex; got {kind} in "
                        f"{names[-1]}. Choose other argnums, or pass it as another argument."
                    )
        leaves, tree = jax.tree.flatten(chosen)
        return Point(call, args, places, is_single, tuple(names), leaves, tree)

    def bind(
        self, fun: Callable[..., Any], kwargs: Mapping[str, Any] | None = None
    ) -> Callable[[list[Any]], Any]:
        """``fun`` as a function of the chosen leaves."""

        def bound(leaves: list[Any]) -> Any:
            chosen = jax.tree.unflatten(self.tree, leaves)
            args = list(self.args)
            for place, arg in zip(
                self.places, (chosen,) if self.is_single else chosen, strict=True
            ):
                args[place] = arg
            return fun(*args, **(kwargs or {}))

        return bound

    def directions(self, tree: Any, name: str) -> list[Any]:
        """The leaves of ``tree``, which is like the chosen arguments in all but its numbers."""
        leaves, structure = jax.tree.flatten(tree)
        if structure != self.tree:
            raise ValueError(
                f"{self.call}: {name} has the structure of what is differentiated; got "
                f"{structure} for {self.tree}. Pass a tree like it, or say argnums."
            )
        for x, v, leaf_name in zip(self.leaves, leaves, self.names, strict=True):
            want = (jnp.shape(x), jnp.result_type(x))
            got = (jnp.shape(v), jnp.result_type(v))
            if want != got:
                show = lambda pair: f"{pair[1]}{list(pair[0])}"
                raise ValueError(
                    f"{self.call}: {name} has the shapes and dtypes of what is differentiated; "
                    f"got {show(got)} for {leaf_name}, which is {show(want)}. Convert it."
                )
        return leaves

    def like(self, leaves: Sequence[Any]) -> Any:
        """A tree like the chosen arguments."""
        return jax.tree.unflatten(self.tree, leaves)


def _kind(leaf: Any) -> str | None:
    """What a leaf is, if it has no derivative."""
    if is_key(leaf):
        return "random keys"
    if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
        return f"a {type(leaf).__name__}"
    return None if is_float(leaf) else str(jnp.result_type(leaf))


def _is_integer(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def wide(dtype: Any) -> Any:
    """The dtype for sums: float32 for narrower ones, itself for others."""
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def scalar(call: str, fun: Callable[..., Any], name: str = "fun") -> Callable[..., Any]:
    """``fun``, which the user calls ``name`` and whose result is one floating or complex number."""

    def checked(*args: Any) -> Any:
        out = fun(*args)
        shown = jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", out)
        if not jax.tree_util.all_leaves([out]):
            raise TypeError(
                f"{call}: {name} returns one number; got {shown}. "
                "Return the loss alone, without auxiliary results."
            )
        if jnp.shape(out) or not is_float(out):
            raise TypeError(
                f"{call}: {name} returns one floating number; got {shown}. "
                "Sum it, or take the Hessian of each entry with fg.hessian."
            )
        return out

    return checked
