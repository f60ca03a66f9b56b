"""The branch not taken of a ``where``: its derivative is not finite, and 0 times it is NaN."""

import ast
import dataclasses
import functools
import linecache
from collections.abc import Sequence
from typing import Any

import numpy as np

from funcgrad._jaxpr import SourceLine

# Where the functions whose derivative is infinite at 1 are safe; 1 for all others.
_SAFE = {"acos": "0.0", "asin": "0.0", "atanh": "0.0", "erf_inv": "0.0", "acosh": "2.0"}


@dataclasses.dataclass(frozen=True, eq=False)
class Mark:
    """A cotangent that a ``where`` has set to zero: its line, its branch, the elements.

    ``branch`` is 1 for the second argument of ``where``, 0 for the third.
    """

    line: SourceLine | None
    branch: int
    zeros: Any


def mark_of(eqn: Any, inputs: Sequence[Any], line: SourceLine | None, outputs: Any) -> Mark | None:
    """The mark of the result of an equation of the backward pass."""
    if eqn.primitive.name == "select_n" and len(inputs) == 3:
        chosen, *cases = (np.asarray(value.array) for value in inputs)
        empty = [not case.any() for case in cases]
        if sum(empty) == 1:
            branch = empty.index(False)
            zeros = np.broadcast_to(chosen != branch, cases[branch].shape)
            return Mark(line, branch, zeros) if zeros.any() else None
    for mark in (value.mark for value in inputs if value.mark is not None):
        out = np.asarray(outputs[0] if outputs else None)
        # Only while each element is still its own: elsewhere a zero may come of anything.
        if out.shape == mark.zeros.shape and not out[mark.zeros].any():
            return mark
    return None


def met_by(inputs: Sequence[Any], bad: Any) -> Mark | None:
    """The mark of an operand that is zero where ``bad`` is, so that its NaN is 0 times it."""
    for value in inputs:
        if value.mark is not None and not value.origins and bad.shape == value.mark.zeros.shape:
            if value.mark.zeros[bad].any():
                return value.mark
    return None


def repair(mark: Mark, operation: str, line: SourceLine | None) -> str:
    """What happened, and the two ``where`` to write instead, in the user's own names."""
    text = (
        f"The where at {mark.line} does not take this branch there, so that its gradient is 0; "
        "0 times a derivative that is not finite is NaN.\n"
        "Let the branch see safe values where it is not taken:"
    )
    code = _two_where(mark, _SAFE.get(operation, "1.0"), line) if mark.line else None
    return f"{text}\n    {code or 'jnp.where(mask, fun(jnp.where(mask, x, safe_value)), other)'}"


def _two_where(mark: Mark, fill: str, line: SourceLine | None) -> str | None:
    """The code to write instead: of the ``where``, or of its branch if that has its own line."""
    found = [node for node in _nodes(mark.line, ast.Call) if _is_where(node)]
    if len(found) != 1:
        return None
    (call,) = found
    old, branch = call, call.args[1 if mark.branch == 1 else 2]
    if isinstance(branch, ast.Name):
        named = [
            node
            for node in _nodes(line, ast.Assign)
            if [ast.unparse(target) for target in node.targets] == [branch.id]
        ]
        if len(named) != 1:
            return None
        old, branch = named[0], named[0].value
    elif call not in _nodes(line, ast.Call):  # elsewhere, in a function of the user's
        return None
    variable = _operand(branch)
    if variable is None:
        return None
    condition, x = ast.unparse(call.args[0]), ast.unparse(variable)
    kept = (condition, x, fill) if mark.branch == 1 else (condition, fill, x)
    safe = f"{ast.unparse(call.func)}({', '.join(kept)})"
    return ast.unparse(_Put(variable, ast.parse(safe, mode="eval").body).visit(old))


def _nodes(line: SourceLine | None, kind: Any) -> list[Any]:
    """The parts of this kind of the file that cover a line."""
    if line is None:
        return []
    return [
        node
        for node in _walk(_parsed("".join(linecache.getlines(line.file))))
        if isinstance(node, kind) and node.lineno <= line.line <= (node.end_lineno or 0)
    ]


_walk: Any = ast.walk


@functools.lru_cache(maxsize=1)  # the nodes of two lines of a file are of one tree
def _parsed(source: str) -> Any:
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


def _is_where(call: ast.Call) -> bool:
    return ast.unparse(call.func).split(".")[-1] == "where" and len(call.args) == 3


def _operand(branch: ast.expr) -> ast.expr | None:
    """The one variable of one operation; of anything else it is not known what is safe for it."""
    if isinstance(branch, ast.Call):
        parts = branch.args if not branch.keywords else []
    else:
        parts = [branch.left, branch.right] if isinstance(branch, ast.BinOp) else []
    names = [part for part in parts if isinstance(part, ast.Name)]
    others = [part for part in parts if not isinstance(part, ast.Name | ast.Constant)]
    return names[0] if len(names) == 1 and not others else None


class _Put(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: Any) -> Any:
        return self.new if node is self.old else self.generic_visit(node)
