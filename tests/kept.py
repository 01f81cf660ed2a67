"""What autograd really keeps of a forward pass."""

import torch
from torch import Tensor, nn


def kept_bytes(model: nn.Module, images: Tensor) -> int:
    """Bytes of the storages that autograd keeps, parameters and buffers not among them."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(images)
    assert output is not None
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for pointer, size in storages.items() if pointer not in own)
