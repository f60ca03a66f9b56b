"""Steps of the task ``checkpointing``: what a gradient takes in memory, against its time."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import funcgrad as fg
from funcgrad._compat import enable_x64
from funcgrad.bench import _problem
from funcgrad.bench._checkpointing_models import (
    QUICK,
    Around,
    Size,
    draw_input,
    draw_params,
    scanned,
    unrolled,
)
from funcgrad.bench._options import Options, Progress
from funcgrad.bench._problem import Contender, Problem, Right
from funcgrad.bench._race import race
from funcgrad.bench._race_tables import LEGEND, contenders, scaled
from funcgrad.bench._tables import Column, Plot, Row, Table

BACKEND = "aot_eager_decomp_partition"
NOTES = (
    *LEGEND,
    "Steps: the gradient of one transformer in all its parameters. jax.checkpoint and torch's "
    "checkpoint stand around each block; a budget is a fraction of what is kept without one.",
    "AOT partition: torch.compile with an activation_memory_budget and the backend "
    f"{BACKEND}, which cuts the graph in two and leaves it to torch's own operations; its first "
    "call is its compilation.",
    "Peak: that of the process, libraries and compiler included, as torch counts no temporaries.",
)


class Step(Problem):
    """The gradient of a transformer, its layers scanned or unrolled; in torch always unrolled."""

    baselines = {"jax": ("plain",), "torch": ("torch: plain",)}

    def __init__(self, written: str, quick: bool) -> None:
        self.size = QUICK if quick else Size()
        self.scanned = written == "scanned"
        self.args = (draw_params(self.size), draw_input(self.size))
        self.contenders = CONTENDERS if self.scanned else IN_JAX
        self.title = f"Step, layers {written}"

    def loss(self, around: Around = lambda block: block) -> Callable[..., Any]:
        """Of the parameters and the input, ``around`` around each block."""
        return (scanned if self.scanned else unrolled)(self.size, around)

    def reference(self) -> Right:
        """The gradient without checkpoints and with scanned layers, in float64."""
        with enable_x64(True):
            grads = jax.jit(jax.grad(scanned(self.size)))(*_problem.float64(self.args))
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]
        return {"plain": leaves, "checkpointed": leaves}

    def about(self, right: Right) -> dict[str, Any]:
        """The transformer's size."""
        return {"size": dataclasses.asdict(self.size)}


def _plain(step: Step) -> Callable[..., Any]:
    return jax.grad(step.loss())


def _by_policy(policy: Any) -> Callable[[Step], Callable[..., Any]]:
    def make(step: Step) -> Callable[..., Any]:
        # Within a scan nothing is merged anyhow, says its documentation.
        options = {"policy": policy, "prevent_cse": not step.scanned}
        return jax.grad(step.loss(functools.partial(jax.checkpoint, **options)))

    return make


def _within(budget: float) -> Callable[[Step], Callable[..., Any]]:
    return lambda step: jax.grad(fg.checkpoint(step.loss(), budget=budget))


def _torch_loss(size: Size, around: Around) -> Callable[..., Any]:
    """The loss of the leaves by name and the input."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    width = (size.width,)

    def block(x: Any, p: Any) -> Any:
        heads = lambda h: h.reshape(*h.shape[:2], size.heads, -1).transpose(1, 2)
        normed = layer_norm(x, width, p["scale1"], p["shift1"])
        q, k, v = map(heads, (normed @ p["qkv"]).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * (size.width // size.heads) ** -0.5
        past = torch.ones(size.time, size.time, dtype=torch.bool).tril()
        mixed = torch.where(past, scores, -1e30).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).reshape(x.shape) @ p["out"]
        normed = layer_norm(x, width, p["scale2"], p["shift2"])
        return x + gelu(normed @ p["up"], approximate="tanh") @ p["down"]

    block = around(block)

    def loss(params: Any, x: Any) -> Any:
        layers = {name: leaf.unbind(0) for name, leaf in params.items()}
        for i in range(size.layers):
            x = block(x, {name: of[i] for name, of in layers.items()})
        return x.square().mean()

    return loss


def _in_torch(
    around: Around = lambda block: block, backend: str | None = None, budget: float = 1.0
) -> Callable[[Step], Callable[..., Any]]:
    def make(step: Step) -> Callable[..., Any]:
        import torch
        from torch._functorch import config

        loss = _torch_loss(step.size, around)
        loss = torch.compile(loss, backend=backend) if backend else loss

        def run(params: Any, x: Any) -> Any:
            leaves = {k: torch.from_numpy(params[k]).requires_grad_() for k in sorted(params)}
            with config.patch(activation_memory_budget=budget):
                value = loss(leaves, torch.from_numpy(x))
            return [g.numpy() for g in torch.autograd.grad(value, list(leaves.values()))]

        return run

    return make


def _torch_blocks(block: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    return functools.partial(checkpoint, block, use_reentrant=False)


def _torch_but_products(block: Callable[..., Any]) -> Callable[..., Any]:
    import torch
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = [aten.mm.default, aten.bmm.default, aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    return functools.partial(checkpoint, block, use_reentrant=False, context_fn=contexts)


def _compiled(budget: float) -> Contender:
    make = _in_torch(backend=BACKEND, budget=budget)
    return Contender(make, "checkpointed" if budget < 1 else "plain", "torch", compiles=True)


IN_JAX = {
    "plain": Contender(_plain, "plain"),
    **{
        f"jax.checkpoint, {words}": Contender(_by_policy(policy), "checkpointed")
        for words, policy in {
            "nothing saveable": jax.checkpoint_policies.nothing_saveable,
            "dots": jax.checkpoint_policies.dots_saveable,
            "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        }.items()
    },
    **{
        f"fg.checkpoint, budget {budget:g}": Contender(_within(budget), "checkpointed")
        for budget in (0.1, 0.2, 0.5)
    },
}
CONTENDERS = {
    **IN_JAX,
    "torch: plain": Contender(_in_torch(), "plain", "torch"),
    "torch: checkpoint, blocks": Contender(_in_torch(_torch_blocks), "checkpointed", "torch"),
    "torch: checkpoint, dots": Contender(_in_torch(_torch_but_products), "checkpointed", "torch"),
    **{f"torch: AOT partition, budget {budget:g}": _compiled(budget) for budget in (1.0, 0.5, 0.2)},
}
NAMES = ("step-scanned", "step-unrolled")


def measure(name: str, options: Options, progress: Progress) -> dict[str, Any]:
    """Race all contenders on one step."""
    make = functools.partial(Step, name.removeprefix("step-"), options.quick)
    return race(make, turns=options.turns, progress=progress)


def tables(of: Mapping[str, Any]) -> list[Table]:
    """A step's contenders, and their time against both measures of memory."""
    notes = (", ".join(f"{k} {v}" for k, v in of["size"].items()) + ".",)
    table = contenders(of, notes=notes, why=_why(of["contenders"]))
    return [table, _against(of, "temporaries"), _against(of, "peak")]


def _why(of: Mapping[str, Any]) -> str:
    """Why budgets are behind, where they are."""
    words = (
        "Memory: a budget of 0.1 was asked for and is used, to run less again; keeping nothing, "
        "around each block, was not asked for."
    )
    jax_plain, torch_plain = (of.get(name, {}) for name in ("plain", "torch: plain"))
    if "median_seconds" in jax_plain and "median_seconds" in torch_plain:
        times = jax_plain["median_seconds"] / torch_plain["median_seconds"]
        if times > 1:
            words += f" Time: torch's plain gradient itself is {times:.1f} times as fast as XLA's."
    return words


def _against(of: Mapping[str, Any], memory: str) -> Table:
    rows = []
    for name, way in of["contenders"].items():
        # The family of a contender, before the comma; its points are drawn alike.
        group, ours = name.partition(",")[0], name.startswith("fg.")
        if "reason" in way:
            continue
        n_bytes = way["temp_bytes" if memory == "temporaries" else "peak_bytes"]
        if n_bytes is not None:
            values = (scaled(n_bytes, 2.0**20), 1e3 * way["median_seconds"])
            wrong = not way["error"] <= of["tolerance"]
            rows.append(Row(name, values, group, ours, wrong=wrong))
    columns = (Column(memory, "MiB", "lower", ".0f"), Column("time", "ms", "lower"))
    title = f"{of['title']}: time against {memory}"
    plot = Plot(("time",), x=memory, log=False)
    return Table(title, "contender", columns, tuple(rows), plot=plot, summary=True)
