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
    """Begin to send `sends[q]` to rank q and to fill `receives[q]` from it, for every other rank q.

    Args:
        sends: contiguous tensors on the CPU; None, or without elements, for nothing. The own place is left alone.
        receives: likewise; sizes are those of what comes.
        group: the ranks, with gloo as their backend. All must call it in the same order with sizes that fit together.

    Returns:
        What must be waited for, all of it.
    """
    ranks, here = group.size(), group.rank()
    running: list[dist.Work] = []
    for distance in range(1, ranks):
        source = (here - distance) % ranks
        target = receives[source]
        if target is not None and target.numel():
            running.append(_begun(dist.irecv(target, group=group, group_src=source)))
    for distance in range(1, ranks):
        to = (here + distance) % ranks
        given = sends[to]
        if given is not None and given.numel():
            running.append(_begun(dist.isend(given, group=group, group_dst=to)))
    return running


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work
