"""A rank's share of the state, copied to the memory of the host: training goes on while the copy is written."""

from collections.abc import Iterable

import torch
from torch import Tensor


def snapshot(tensors: Iterable[tuple[str, Tensor]], number: int | None, num_shards: int) -> dict[str, Tensor]:
    """Copy the tensors that are this rank's to write. All ranks call it with the same names in the same order.

    Each tensor goes whole to the shard that has the fewest bytes so far: for n shards none is larger than an even
    share and the largest tensor (Graham, 1966: list scheduling). A tensor may be made only as it is asked for, so that
    no rank ever has to have all of them.

    Args:
        tensors: whole, by serial names.
        number: of this rank's shard; None where it writes none.
        num_shards: how many there are.

    Returns:
        Copies on the CPU, which nobody else changes.
    """
    sizes = [0] * num_shards
    mine: dict[str, Tensor] = {}
    devices: set[torch.device] = set()
    for name, tensor in tensors:
        shard = sizes.index(min(sizes))
        sizes[shard] += tensor.nbytes
        if shard == number:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            mine[name] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            devices |= {tensor.device} if tensor.is_cuda else set()
    for device in devices:
        torch.cuda.synchronize(device)
    return mine
