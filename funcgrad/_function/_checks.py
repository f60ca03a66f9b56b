"""What ``backward`` and ``jvp`` return: one gradient for each input, of its tree and type."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad._compat import make_varying, varying_axes
from funcgrad._function._arguments import Call
from funcgrad._trees import keystr

_is_none = lambda leaf: leaf is None


class Varying(ValueError):
    """A gradient that differs between devices which share what it belongs to."""


def checked_gradients(call: Call, avals: Sequence[Any], grads: Any) -> list[Any]:
    """The gradient, or ``None``, of each array leaf of the arguments.

    The text of an error, for a gradient that is wrong only if somebody asks for it.
    """
    labels = call.labels
    grads = grads if isinstance(grads, tuple) else (grads,)
    surplus = grads[call.given :]
    if len(grads) < call.given or any(x is not None for x in grads[len(labels) :]):
        raise ValueError(
            f"{call.name}.backward: one gradient for each input of forward, in order; got "
            f"{len(grads)} for {call.given}: {', '.join(labels[: call.given])}. Return a tuple, "
            "with None where there is no gradient."
        )
    grads = [*grads[: call.given], *surplus][: len(labels)]
    grads += [None] * (len(labels) - len(grads))

    types = iter(avals)
    marks = [next(types) if leaf is None else leaf for leaf in call.static]
    found: list[Any] = []
    for label, tree, grad in zip(labels, jax.tree.unflatten(call.tree, marks), grads, strict=True):
        wheres = jax.tree_util.tree_leaves_with_path(tree)
        leaves = _matched(call, label, tree, grad)
        for (path, mark), leaf in zip(wheres, leaves, strict=True):
            where = f"{label}{keystr(path)}"
            if hasattr(mark, "to_ct_aval"):
                try:
                    found.append(_gradient(f"{call.name}.backward", where, mark, leaf))
                except Varying as error:
                    found.append(str(error))
            # Of a number nobody asks for the gradient; traced, it would be an array.
            elif leaf is not None and not isinstance(mark.value, int | float | complex):
                raise ValueError(
                    f"{call.name}.backward: a static input has no gradient; got one for {where}, "
                    f"which is {type(mark.value).__name__}. Return None."
                )
    return found


def _matched(call: Call, label: str, tree: Any, grad: Any) -> list[Any]:
    """The leaves of ``grad`` that stand at those of ``tree``; ``None`` may stand for a subtree."""
    given = dict(jax.tree_util.tree_leaves_with_path(grad, is_leaf=_is_none))
    leaves, used = [], set()
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        prefix = next(
            (
                path[:n]
                for n in range(len(path) + 1)
                if path[:n] in given and (n == len(path) or given[path[:n]] is None)
            ),
            None,
        )
        if prefix is None:
            break
        leaves.append(given[prefix])
        used.add(prefix)
    else:
        # A None more, such as one for an empty subtree, says nothing.
        if all(path in used or leaf is None for path, leaf in given.items()):
            return leaves
    raise ValueError(
        f"{call.name}.backward: the gradient of {label} has its tree; got "
        f"{jax.tree.structure(grad)} for {jax.tree.structure(tree)}. Return the same containers, "
        "with None for what has no gradient."
    )


def _gradient(call: str, where: str, aval: Any, leaf: Any) -> Any:
    expected = aval.to_ct_aval()
    no_type = jax.dtypes.float0
    if leaf is None or getattr(leaf, "dtype", None) == no_type == expected.dtype:
        return None
    if expected.dtype == no_type:
        raise ValueError(
            f"{call}: an input that is not floating has no gradient; got one for {where}, which "
            f"is {aval.str_short()}. Return None."
        )
    return _typed(call, f"the gradient of {where}", expected, leaf)


def _typed(call: str, what: str, expected: Any, leaf: Any) -> Any:
    try:
        value = jnp.asarray(leaf)
    except TypeError:
        got = f"{getattr(leaf, 'dtype', '')} {type(leaf).__name__}".strip()
        raise TypeError(
            f"{call}: {what} is an array; got {got}. Return an array or None."
        ) from None
    got = jax.typeof(value)
    if isinstance(leaf, int | float | complex) and got.shape == expected.shape:
        value = value.astype(expected.dtype)
    elif (got.shape, got.dtype) != (expected.shape, expected.dtype):
        raise ValueError(
            f"{call}: {what} has its shape and dtype, {expected.str_short()}; got "
            f"{got.str_short()}. Sum, reshape or cast it."
        )
    axes, own = varying_axes(value), _axes(expected)
    if axes - own:
        differing = ", ".join(map(repr, sorted(axes - own)))
        raise Varying(
            f"{call}: {what} is the same on all devices of {differing}, as what it belongs to is; "
            "got one that varies over them. Add it up with jax.lax.psum."
        )
    return make_varying(value, own)


def _axes(aval: Any) -> frozenset[str]:
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else manual.varying


def checked_tangents(call: Call, forward: Any, tangents: Any) -> list[Any]:
    """The tangents of the differentiable outputs, from what ``jvp`` returned."""
    name = f"{call.name}.jvp"
    tangents = tangents if forward.output.is_tuple else (tangents,)
    tree = forward.output.unflatten(forward.out_avals, static=False)
    members = tuple(tree) if forward.output.is_tuple else (tree,)
    if not isinstance(tangents, tuple) or len(tangents) != len(members):
        got = len(tangents) if isinstance(tangents, tuple) else type(tangents).__name__
        raise ValueError(
            f"{name}: one tangent for each of the {len(members)} outputs of forward; got {got}. "
            "Return a tuple, with None where there is no tangent."
        )
    flat: list[Any] = []
    for i, (member, tangent) in enumerate(zip(members, tangents, strict=True)):
        leaves = jax.tree.leaves(member)
        if tangent is None:
            flat += [None] * len(leaves)
        elif jax.tree.structure(tangent, is_leaf=_is_none) != jax.tree.structure(
            member, is_leaf=_is_none
        ):
            raise ValueError(
                f"{name}: the tangent of output {i} has its tree; got "
                f"{jax.tree.structure(tangent)} for {jax.tree.structure(member)}. Return the same "
                "containers."
            )
        else:
            pairs = zip(
                jax.tree.leaves(member, is_leaf=_is_none),
                jax.tree.leaves(tangent, is_leaf=_is_none),
                strict=True,
            )
            flat += [tangent for aval, tangent in pairs if aval is not None]
    found = []
    for i, (aval, differentiable, tangent) in enumerate(
        zip(forward.out_avals, forward.differentiable, flat, strict=True)
    ):
        if differentiable:
            expected = aval.to_tangent_aval()
            leaf = jnp.zeros(expected.shape, expected.dtype) if tangent is None else tangent
            found.append(_typed(name, f"the tangent of output leaf {i}", expected, leaf))
    return found
