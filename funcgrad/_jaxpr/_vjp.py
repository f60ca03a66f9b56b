"""A function and its pullback, ready to be traced as one program."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Differentiable:
    """A call ``fun(*args, **kwargs)`` as functions of the flat list of its ``arrays``.

    ``names`` are their paths, with the parameters' own names where these are known.
    """

    fun: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: Any
    places: tuple[int, ...]  # positions of the arguments that are differentiated
    traced_at: tuple[int, ...]
    has_aux: bool
    names: tuple[str, ...]

    @property
    def arrays(self) -> list[Any]:
        """The leaves that a trace takes as inputs."""
        return [self.leaves[i] for i in self.traced_at]

    def value(self, arrays: Sequence[Any]) -> Any:
        """What ``fun`` returns."""
        args, kwargs = self._filled(arrays)
        return self.fun(*args, **kwargs)

    def chosen(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments that are differentiated."""
        args, _ = self._filled(arrays)
        return tuple(args[place] for place in self.places)

    def vjp(self, arrays: Sequence[Any]) -> Any:
        """What ``jax.vjp`` returns."""
        args, kwargs = self._filled(arrays)

        def of_chosen(*some: Any) -> Any:
            full = list(args)
            for place, arg in zip(self.places, some, strict=True):
                full[place] = arg
            return self.fun(*full, **kwargs)

        return jax.vjp(of_chosen, *(args[i] for i in self.places), has_aux=self.has_aux)

    def _filled(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = list(self.leaves)
        for i, array in zip(self.traced_at, arrays, strict=True):
            filled[i] = array
        return jax.tree.unflatten(self.tree, filled)


def differentiable(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: int | Sequence[int] | None,
    has_aux: bool,
    call: str,
) -> Differentiable:
    """The call of ``fun``, differentiated with respect to ``argnums``, all when ``None``."""
    places = _places(argnums, len(args), call)
    names = argument_names(fun, args, kwargs)
    leaves, tree = jax.tree.flatten((args, kwargs))
    # A plain number that is not differentiated may be a flag that the function branches on.
    numbers = (float, complex) if places is None else ()
    traced_at = tuple(
        i for i, leaf in enumerate(leaves) if _is_array(leaf) or isinstance(leaf, numbers)
    )
    return Differentiable(
        fun,
        tuple(leaves),
        tree,
        tuple(range(len(args)) if places is None else places),
        traced_at,
        has_aux,
        tuple(names[i] for i in traced_at),
    )


def _places(argnums: int | Sequence[int] | None, count: int, call: str) -> list[int] | None:
    if argnums is None:
        return None
    places = [argnums] if isinstance(argnums, int) else list(argnums)
    for place in places:
        if not -count <= place < count:
            raise ValueError(
                f"{call}: argnums are positions among the {count} arguments given; got {place}."
            )
    return [place % count for place in places]


def argument_names(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """The path of each leaf of (args, kwargs), with the parameters' own names if known."""
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs)
        given = list(bound.arguments.items())
    except (TypeError, ValueError):
        given = []
    names = []
    for place, arg in enumerate(args):
        name = f"args[{place}]"
        if place < len(given) and given[place][1] is arg:
            name = given[place][0]
        names += [name + jax.tree_util.keystr(path) for path, _ in _leaves(arg)]
    for path, _ in _leaves(kwargs):
        names.append(f"{getattr(path[0], 'key', '')}{jax.tree_util.keystr(path[1:])}")
    return names


def _is_array(leaf: Any) -> bool:
    """An array, or a shape that stands for one; not ``jnp.float32``."""
    return hasattr(leaf, "dtype") and not isinstance(leaf, type)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree_util.tree_leaves_with_path(tree)
