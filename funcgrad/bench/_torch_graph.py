"""torch's activation budget and our solver on one and the same graph, which is torch's."""

import copy
import dataclasses
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from funcgrad._remat._graph import Candidate, Graph, Node, Step
from funcgrad._remat._solve import solve


@dataclasses.dataclass(frozen=True)
class Budgeted:
    """What torch keeps under a budget and runs again, and what we do at no more bytes.

    Work is what torch's own estimate says (floating-point operations of matrix products, one
    for every other operation) over that of all operations that may run again.
    """

    budget: float
    nbytes: int
    theirs: float
    ours: float


def compare(
    fun: Callable[..., Any], args: Sequence[Any], budgets: Sequence[float]
) -> list[Budgeted]:
    """Partition the joint graph of a loss with torch's ``dp`` solver, and solve it with ours.

    Args:
      fun: A scalar function of tensors.
      args: Tensors; those that require a gradient are the parameters.
      budgets: Fractions from 0.0 to 1.0, as in ``activation_memory_budget``.

    Returns:
      One ``Budgeted`` for each budget.
    """
    from functorch.compile import aot_function, nop

    found: list[Budgeted] = []

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        cut = lambda budget: _cut(joint, inputs, num_fwd_outputs, budget)
        forward, backward = cut(0.0)
        graph, numbers = _graph(backward)
        total = sum(step.cost for step in graph.steps)
        for budget in budgets:
            theirs = graph.closure(
                numbers[name]
                for name in map(_base, _saved(cut(budget)[0], num_fwd_outputs))
                if name in numbers
            )
            assert theirs is not None
            ours = solve(graph, theirs.nbytes, gap=0.0).closure
            found.append(Budgeted(budget, theirs.nbytes, theirs.cost / total, ours.cost / total))
        return forward, backward

    aot_function(fun, fw_compiler=nop, bw_compiler=nop, partition_fn=partition)(*args).backward()
    return found


def transformer(layers: int, width: int, heads: int) -> tuple[Callable[..., Any], list[Any]]:
    """A loss of its parameters, four matrices a layer, and of an input; the parameters."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    def loss(*args: Any) -> Any:
        x = args[-1]
        batch, time, _ = x.shape
        for i in range(0, 4 * layers, 4):
            qkv, out, up, down = args[i : i + 4]
            heads_of = lambda h: h.reshape(batch, time, heads, -1).transpose(1, 2)
            q, k, v = map(heads_of, (layer_norm(x, (width,)) @ qkv).chunk(3, -1))
            weights = (q @ k.transpose(-1, -2) * (width // heads) ** -0.5).softmax(-1)
            x = x + (weights @ v).transpose(1, 2).reshape(x.shape) @ out
            x = x + gelu(layer_norm(x, (width,)) @ up) @ down
        return x.square().mean()

    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    return loss, [torch.randn(s, requires_grad=True) for s in shapes * layers]


def _cut(joint: Any, inputs: Any, num_fwd_outputs: int, budget: float) -> Any:
    from torch._functorch import config, partitioners

    solver = config.patch(activation_memory_budget=budget, activation_memory_budget_solver="dp")
    with solver, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch copies a graph in a way it regrets
        return partitioners.min_cut_rematerialization_partition(
            copy.deepcopy(joint), inputs, num_fwd_outputs=num_fwd_outputs
        )


def _saved(forward: Any, num_fwd_outputs: int) -> list[Any]:
    (outputs,) = (node for node in forward.graph.nodes if node.op == "output")
    return list(outputs.args[0][num_fwd_outputs:])


def _is_view(node: Any) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return any(one.alias_info is not None for one in returns)


def _base(node: Any) -> str:
    """The tensor whose memory a saved one is."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node.name


def _graph(backward: Any) -> tuple[Graph, dict[str, int]]:
    """The graph of a backward pass that runs everything again, and its candidates by name.

    What does not follow from the cotangents may be made in the forward pass and kept.
    """
    from torch._functorch.partitioners import _size_of, estimate_runtime

    graph = Graph()
    numbers: dict[str, int] = {}
    steps: dict[Any, int | None] = {}
    for node in backward.graph.nodes:
        if node.op == "placeholder" and not node.name.startswith("tangents"):
            steps[node] = None
        reads = dict.fromkeys(numbers[n.name] for n in node.all_input_nodes if n.name in numbers)
        if node.op == "placeholder":
            continue
        if node.op == "output" or not all(n in steps for n in node.all_input_nodes):
            graph.needs += [number for number in reads if number not in graph.needs]
            continue
        if node.target is operator.getitem:  # one output of an operation that has several
            steps[node] = steps[node.args[0]]
        else:
            steps[node] = len(graph.steps)
            work = float(estimate_runtime(node))
            graph.steps.append(Step(None, 1, work, tuple(reads), True, _is_view(node)))
        if not isinstance(node.meta["val"], tuple | list):
            numbers[node.name] = len(graph.nodes)
            graph.nodes.append(Node(len(graph.candidates), steps[node]))
            graph.candidates.append(Candidate(_size_of(node), 1, None, None, []))
    return graph, numbers
