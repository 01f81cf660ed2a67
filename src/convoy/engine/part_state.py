"""`net.state_dict()` of a divided network gives this rank's parts, marked as such; others are not loaded in silence.

The tensors are the live ones, as in any module, so that averages and copies kept of them stay what they were. Beside
them stands an empty tensor whose name says whose parts they are: a plain network, another rank or another plan that is
given them names it, where shapes that happen to agree would have been loaded in silence.
"""

from typing import Any

import torch
from torch import Tensor, nn

from convoy.engine.network import Network, network_of
from convoy.engine.shards import part_name, same_part
from convoy.errors import ConvoyError

_MARK = "convoy: "


def mark_state(model: nn.Module) -> None:
    """Mark the states that a network gives from now on, and look at those that it is given, if it is divided."""
    if any(layout.splits for layout in network_of(model).layouts.values()):
        model.register_state_dict_post_hook(_mark)
        model.register_load_state_dict_pre_hook(_take)


def own_state(model: nn.Module) -> dict[str, Tensor]:
    """This rank's parameters and buffers, the live ones, by serial name."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(_MARK)}


def _mark(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[prefix + _name(network_of(model))] = torch.empty(0)


def _name(network: Network) -> str:
    """It ends as if it were the name of a module's attribute: `torch.distributed.checkpoint`, which would take one
    rank's parts for all, looks for that module, and names it in its error."""
    text = part_name(network.layouts, network.shapes, network.groups, network.plan)
    return f"{_MARK}{text.replace('.', '·')}: save whole tensors by convoy.save"


def _take(
    model: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Take the same parts, or cut them out of whole tensors; refuse all else."""
    network = network_of(model)
    marks = [name for name in state if name.startswith(prefix + _MARK)]
    for mark in marks:
        del state[mark]
        theirs, own = _text(mark, prefix), _text(prefix + _name(network), prefix)
        if not same_part(theirs, own):
            raise ConvoyError(
                f"this state is {theirs}, and the network has {own}: save with convoy.save, or what convoy.state_dict "
                "gives, and load with convoy.load or convoy.load_state_dict"
            )
    if marks:
        return
    held = own_state(network.model)
    for name in [name for name in state if name.startswith(prefix)]:
        tensor, key = state[name], name.removeprefix(prefix)
        if not isinstance(tensor, Tensor) or key not in held:
            continue
        shape, layout = network.entry(key)
        if layout.splits and tuple(tensor.shape) == shape:
            state[name] = network.part(key, tensor)
        elif layout.splits and tensor.shape == held[key].shape:
            raise ConvoyError(
                f"{key} has the shape of one rank's part and does not say of which: load whole tensors, as "
                "convoy.state_dict gives them, or a state as net.state_dict() gave it on this rank"
            )


def _text(mark: str, prefix: str) -> str:
    return mark.removeprefix(prefix + _MARK).partition(": save")[0].replace("·", ".")
