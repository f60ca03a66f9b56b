"""A torch module read as a list of layers, each with its own values."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from funcgrad.parity._layers import Rule, rule_of

_IGNORED = "num_batches_tracked"  # torch counts batches, Flax does not


class Layer(NamedTuple):
    """A torch layer that a rule converts at once, or the bare parameters of a module."""

    segments: tuple[str, ...]
    module: Any
    rule: Rule | None
    names: dict[str, str]  # its own names to those of the state dict


def split_name(name: str) -> tuple[str, ...]:
    """A dotted name in its parts; the empty one has none."""
    return tuple(name.split(".")) if name else ()


def torch_values(call: str, module: Any, grads: bool) -> dict[str, Any]:
    """Parameters and buffers by name, as torch holds them: tied ones are one object."""
    state = module.state_dict(keep_vars=True)
    if not grads:
        return {name: tensor for name, tensor in state.items() if not name.endswith(_IGNORED)}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if parameters and all(p.grad is None for p in parameters.values()):
        raise ValueError(
            f"{call}: the torch module must hold gradients; got none on {list(parameters)}. "
            "Call loss.backward() first."
        )
    return parameters


def torch_layers(module: Any, names: list[str]) -> Iterator[Layer]:
    """Who converts which names: the outermost module with a rule, or the module itself."""
    modules = dict(module.named_modules(remove_duplicate=False))
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        segments = split_name(name)
        prefixes = [".".join(segments[:k]) for k in range(len(segments))]
        # Outermost, since attention converts its own output projection.
        ruled = (p for p in prefixes if p in modules and rule_of(modules[p]))
        owner = next(ruled, prefixes[-1])
        groups.setdefault(owner, {})[name.removeprefix(f"{owner}.") if owner else name] = name
    for owner, own_names in groups.items():
        owning = modules.get(owner)
        rule = None if owning is None else rule_of(owning)
        if getattr(owning, "num_layers", 0) and hasattr(owning, "bidirectional"):
            yield from _recurrent_layers(owner, owning, rule, own_names)
        else:
            yield Layer(split_name(owner), owning, rule, own_names)


def _recurrent_layers(
    owner: str, module: Any, rule: Rule | None, names: dict[str, str]
) -> Iterator[Layer]:
    """A network of several layers and directions, as one cell each."""
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for own, name in names.items():
        match = re.fullmatch(r"(\w+?)_l(\d+)(_reverse)?", own)
        base, layer, backward = match.groups() if match else (own, "0", None)
        segments = split_name(owner)
        if module.num_layers > 1:
            segments += (layer,)
        if module.bidirectional:
            segments += ("backward_rnn" if backward else "forward_rnn",)
        cells.setdefault(segments, {})[base] = name
    for segments, cell_names in cells.items():
        yield Layer(segments, module, rule, cell_names)
