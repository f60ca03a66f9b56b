"""Which modules of a model a hook is put on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from funcgrad._hooks._sites import matches, near

Where: TypeAlias = str | type | Callable[[str, Any], bool] | Sequence[str | type]


def choices(where: Where, call: str) -> tuple[Any, ...]:
    """The single patterns, types or predicates in ``where``."""
    if isinstance(where, str | type) or callable(where):
        return (where,)
    found = tuple(where)
    if not found or not all(isinstance(choice, str | type) for choice in found):
        raise TypeError(
            f"{call}: where is a pattern over paths, a type, several of these, or a function of "
            f"(path, module); got {where!r}."
        )
    return found


def chooses(choice: Any, path: str, module: Any) -> bool:
    """Whether one choice is this module."""
    if isinstance(choice, str):
        return matches(path, choice)
    return isinstance(module, choice) if isinstance(choice, type) else bool(choice(path, module))


def no_module(choice: Any, modules: Mapping[str, str], call: str, hint: str) -> ValueError:
    """The error for a choice that is none of ``modules``, class names by path."""
    if isinstance(choice, type):
        choice, names = choice.__name__, list(dict.fromkeys(modules.values()))
    else:
        choice = choice if isinstance(choice, str) else getattr(choice, "__name__", repr(choice))
        names = list(modules)
    return ValueError(
        f"{call}: each choice is a module that is called; got {choice!r}, which is none. "
        f"Near names: {near(choice, names)}. {hint}"
    )
