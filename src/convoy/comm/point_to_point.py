"""Tensors from every rank to every other over gloo, each on its own way.

gloo's all-to-all offers a rank's tensor to a neighbour before it says that it is ready for the neighbour's. On the one
connection between them that word then waits behind the whole tensor, unless both ranks begin in the same instant, and
the two directions of the link take turns. Receives that are posted first use both at once: twice as fast for two hosts,
1.5 times for four (docs/benchmarks/directions.md).
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


def start_all_to_all(
    sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Begin to send `sends[q]` to rank q and to fill `receives[q]` from it, for every other rank q of a gloo group; all
    that is returned must be waited for. Tensors are contiguous and on the CPU; None, or a tensor without elements,
    stands for nothing. All ranks call it in the same order with sizes that fit together."""
    ranks, rank = group.size(), group.rank()
    works: list[dist.Work] = []
    for distance in range(1, ranks):
        sender = (rank - distance) % ranks
        buffer = receives[sender]
        if buffer is not None and buffer.numel():
            works.append(_posted(dist.irecv(buffer, group=group, group_src=sender)))
    for distance in range(1, ranks):
        receiver = (rank + distance) % ranks
        tensor = sends[receiver]
        if tensor is not None and tensor.numel():
            works.append(_posted(dist.isend(tensor, group=group, group_dst=receiver)))
    return works


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work
