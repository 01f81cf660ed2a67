"""Fake tensors in the places of a module's parameters and buffers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from convoy.graph.errors import CaptureError

Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]


def stand_ins(tensors: Mapping[str, Tensor], shapes: Shapes, device: torch.device) -> dict[str, Tensor]:
    """One tensor for each name, of the shape and type in `shapes` or else of the tensor itself.

    To be called under the fake mode. Tensors on the meta device, which fakes know not, are taken to `device`.
    """
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        shape, dtype = shapes.get(name) or (tensor.shape, tensor.dtype)
        fake = torch.empty(tuple(shape), dtype=dtype, device=device if tensor.is_meta else tensor.device)
        made[name] = nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake
    return made


@contextmanager
def swapped(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    fakes: Mapping[str, Tensor],
    constant: Callable[[Tensor], bool],
) -> Iterator[None]:
    """Within it the modules hold `fakes` for `tensors`, wherever they are held, also by several modules at once.

    Raises CaptureError where the model puts another tensor in the place of one of them, unless that is `constant`:
    then it is a table made at first use.
    """
    places = {id(tensor): fakes[name] for name, tensor in tensors.items()}
    names = {id(fake): name for name, fake in fakes.items()}
    held = [
        (vars(module), kind, vars(module)[kind]) for module in model.modules() for kind in ("_parameters", "_buffers")
    ]
    expected = []
    for attributes, kind, own in held:
        attributes[kind] = {name: places.get(id(tensor), tensor) for name, tensor in own.items()}
        expected.append(dict(attributes[kind]))
    try:
        yield
        for (attributes, kind, _), before in zip(held, expected, strict=True):
            for name, tensor in before.items():
                now = attributes[kind].get(name)
                if now is not tensor and not (now is not None and constant(now)) and name != "num_batches_tracked":
                    raise CaptureError(f"it replaces {names.get(id(tensor), name)} in its forward pass")
    finally:
        for attributes, kind, own in held:
            attributes[kind] = own
