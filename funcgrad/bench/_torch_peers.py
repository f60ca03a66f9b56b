"""The peers in PyTorch: its own gradients, ``torch.func``, Opacus and BackPACK."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from funcgrad.bench._contenders import PRODUCTS, Contender, Kind
from funcgrad.bench._models import Task
from funcgrad.bench._torch_modules import FAMILIES, Module, tensors

_WHOLE = lambda task: task.size
_CHUNK = lambda task: task.chunk


def _plain(module: Module, task: Task, max_norm: float) -> Callable[..., Any]:
    import torch

    return lambda *batch: torch.autograd.grad(
        module.losses(module.layers(batch[0]), *batch).sum(), module.parameters
    )


def _rows(module: Module) -> Callable[..., Any]:
    """The gradients of all samples, by ``torch.func``."""
    from torch.func import functional_call, grad, vmap
    from torch.nn.attention import SDPBackend, sdpa_kernel

    names = {id(p): name for name, p in module.layers.named_parameters()}
    values = {names[id(p)]: p.detach() for p in module.parameters}

    def loss(values: Any, *sample: Any) -> Any:
        batch = [x[None] for x in sample]
        return module.losses(functional_call(module.layers, values, batch[0]), *batch)[0]

    def rows(*batch: Any) -> list[Any]:
        # Of the kernels for attention the one that vmap does not call for each sample.
        with sdpa_kernel(SDPBackend.MATH):
            grads = vmap(grad(loss), (None, *(0 for _ in batch)))(values, *batch)
        return list(grads.values())

    return rows


def _clip(rows: list[Any], max_norm: float) -> list[Any]:
    import torch

    squares = [row.flatten(1).pow(2).sum(1) for row in rows]
    scales = (max_norm / torch.stack(squares).sum(0).sqrt()).clamp(max=1)
    return [torch.einsum("n,n...->...", scales, row) for row in rows]


def _func(module: Module, task: Task, max_norm: float) -> Callable[..., Any]:
    rows = _rows(module)
    return lambda *batch: _clip(rows(*batch), max_norm)


def _func_chunks(module: Module, task: Task, max_norm: float) -> Callable[..., Any]:
    rows = _rows(module)

    def run(*batch: Any) -> list[Any]:
        chunks = zip(*(x.split(task.chunk) for x in batch), strict=True)
        sums = [_clip(rows(*chunk), max_norm) for chunk in chunks]
        return [sum(leaves[1:], start=leaves[0]) for leaves in zip(*sums, strict=True)]

    return run


def _opacus(**options: Any) -> Callable[[Module, Task, float], Callable[..., Any]]:
    """Gradients of samples that hooks leave at the parameters."""

    def make(module: Module, task: Task, max_norm: float) -> Callable[..., Any]:
        from opacus import GradSampleModule  # pyright: ignore[reportMissingImports]

        hooked = GradSampleModule(module.layers, loss_reduction="sum", **options)

        def run(*batch: Any) -> Any:
            module.losses(hooked(batch[0]), *batch).sum().backward()
            out = _clip([p.grad_sample for p in module.parameters], max_norm)
            hooked.zero_grad()  # which lets go of the samples' gradients too
            return out

        return run

    return make


def _ghost(norms: bool) -> Callable[[Module, Task, float], Callable[..., Any]]:
    """Norms from a first pass; their sum, clipped, from a second."""

    def make(module: Module, task: Task, max_norm: float) -> Callable[..., Any]:
        from opacus.grad_sample import (  # pyright: ignore[reportMissingImports]
            GradSampleModuleFastGradientClipping,
        )

        hooked = GradSampleModuleFastGradientClipping(
            module.layers, loss_reduction="sum", max_grad_norm=max_norm, use_ghost_clipping=True
        )

        def run(*batch: Any) -> Any:
            hooked.zero_grad()
            hooked.enable_hooks()
            losses = module.losses(hooked(batch[0]), *batch)
            losses.sum().backward(retain_graph=not norms)
            if norms:
                return hooked.get_norm_sample()
            scales = hooked.get_clipping_coef()
            hooked.zero_grad()
            hooked.disable_hooks()
            (scales * losses).sum().backward()
            return [p.grad for p in module.parameters]

        return run

    return make


def _backpack(
    extension: str, name: str, finish: Callable[[list[Any], Task, float], Any]
) -> Callable[[Module, Task, float], Callable[..., Any]]:
    """What an extension leaves at the parameters, and what is made of it."""

    def make(module: Module, task: Task, max_norm: float) -> Callable[..., Any]:
        import torch
        from backpack import backpack, extend  # pyright: ignore[reportMissingImports]

        kind = getattr(importlib.import_module("backpack.extensions"), extension)
        layers = extend(module.layers)
        loss = extend(torch.nn.CrossEntropyLoss(reduction="sum"))

        def run(x: Any, y: Any) -> Any:
            with backpack(kind()):
                loss(layers(x), y).backward()
            out = finish([getattr(p, name) for p in module.parameters], task, max_norm)
            layers.zero_grad()
            for p in module.parameters:
                delattr(p, name)
            return out

        return run

    return make


def _total(leaves: list[Any], task: Task, max_norm: float) -> Any:
    return sum(leaves[1:], start=leaves[0])


def _unbiased(leaves: list[Any], task: Task, max_norm: float) -> list[Any]:
    # BackPACK divides by the number of samples.
    return [leaf * task.size / (task.size - 1) for leaf in leaves]


def _of_rows(kind: Kind) -> Callable[[Module, Task, float], Callable[..., Any]]:
    """From all gradients in memory."""

    def make(module: Module, task: Task, max_norm: float) -> Callable[..., Any]:
        rows, direction = _rows(module), [p.detach().ravel() for p in module.parameters]

        def run(*batch: Any) -> Any:
            grads = rows(*batch)
            if kind == "variance":
                return [g.var(0) for g in grads]
            flat = [g.flatten(1) for g in grads]
            if kind == "gram":
                return sum(g @ g.T for g in flat)
            return sum(g @ p for g, p in zip(flat, direction, strict=True))

        return run

    return make


def _contender(
    make: Callable[[Module, Task, float], Callable[..., Any]],
    kind: Kind = "clipped",
    models: tuple[str, ...] = FAMILIES,
    steps: bool = True,
    **options: Any,
) -> Contender:
    def prepare(task: Task, max_norm: float) -> Callable[..., Any]:
        module = Module.of(task, steps=steps)
        run = make(module, task, max_norm)

        def call(params: Any, *batch: Any) -> Any:
            out = run(*tensors(batch))
            return module.leaves(out) if isinstance(out, list | tuple) else out.detach().numpy()

        return call

    return Contender(prepare, kind, "torch", models=models, **options)


_CHAINS = ("mlp", "cnn")
_PLAIN = _contender(_plain, "plain", steps=False)

# The first is what the others' times are compared with.
TORCH_CONTENDERS: Mapping[str, Contender] = {
    "torch: plain": _PLAIN,
    "torch: vmap(grad)": _contender(_func, held=_WHOLE),
    "torch: vmap(grad), microbatches": _contender(_func_chunks, held=_CHUNK),
    "torch: Opacus hooks": _contender(_opacus(), needs="opacus", held=_WHOLE),
    "torch: Opacus functorch": _contender(
        _opacus(force_functorch=True), needs="opacus", held=_WHOLE
    ),
    "torch: Opacus ghost clipping": _contender(_ghost(norms=False), needs="opacus"),
    "torch: Opacus ghost norms": _contender(_ghost(norms=True), "norms", needs="opacus"),
    "torch: BackPACK BatchGrad": _contender(
        _backpack("BatchGrad", "grad_batch", lambda rows, task, max_norm: _clip(rows, max_norm)),
        models=_CHAINS,
        needs="backpack",
        held=_WHOLE,
    ),
    "torch: BackPACK norms": _contender(
        _backpack("BatchL2Grad", "batch_l2", lambda *args: _total(*args).sqrt()),
        "norms",
        _CHAINS,
        needs="backpack",
    ),
}

TORCH_PRODUCTS: Mapping[str, Contender] = {
    "torch: plain": _PLAIN,
    **{
        f"torch: vmap(grad) {kind}": _contender(_of_rows(kind), kind, held=_WHOLE)
        for kind in PRODUCTS
    },
    "torch: BackPACK variance": _contender(
        _backpack("Variance", "variance", _unbiased), "variance", _CHAINS, needs="backpack"
    ),
}
