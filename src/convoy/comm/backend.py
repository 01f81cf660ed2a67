"""Which backend carries the ranks' tensors: NCCL where every rank has a GPU of its own, else gloo.

All ranks must choose alike, or they wait for each other for ever. So each tells the GPU that it uses by its UUID, and
rank 0 decides: what launchers say of local ranks differs (a Slurm task may see one GPU or all of its host's), and ranks
that see another number of GPUs than their neighbors would decide otherwise by themselves.
"""

import json
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

GLOO = "gloo"
NCCL = "cpu:gloo,cuda:nccl"


class Seen(NamedTuple):
    """What a rank has: the name of its host, and the UUID of its GPU; empty without one."""

    host: str
    gpu: str


class Choice(NamedTuple):
    """`torch.distributed`'s name of the backend, and what people should know of it; empty for nothing."""

    backend: str
    note: str = ""


def own(device: torch.device) -> Seen:
    """What this rank has."""
    if device.type != "cuda":
        return Seen(socket.gethostname(), "")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return Seen(socket.gethostname(), str(uuid or f"{socket.gethostname()}/{visible}/{device.index}"))


def agreed(store: Store, rank: int, num_ranks: int, seen: Seen) -> Choice:
    """The choice of rank 0, on all ranks.

    Args:
        store: of these ranks alone.
        rank: this one.
        num_ranks: of all, which call this.
        seen: what this rank has.
    """
    store.set(f"device/{rank}", json.dumps(seen))
    if rank == 0:
        told = [Seen(*json.loads(store.get(f"device/{other}"))) for other in range(num_ranks)]
        store.set("backend", json.dumps(choose(told)))
    return Choice(*json.loads(store.get("backend")))


def choose(ranks: Sequence[Seen]) -> Choice:
    """The backend for ranks that have these GPUs.

    >>> choose([Seen("a", "GPU-1"), Seen("a", "GPU-2")]).backend
    'cpu:gloo,cuda:nccl'
    >>> choose([Seen("a", "GPU-1"), Seen("a", "GPU-1")]).note
    "ranks 0, 1 share a GPU of host a, and NCCL refuses that: gloo carries all messages, by way of the CPU; ..."
    """
    by_gpu: dict[Seen, list[int]] = defaultdict(list)
    for rank, seen in enumerate(ranks):
        by_gpu[Seen("", seen.gpu) if seen.gpu else seen].append(rank)
    without = [rank for rank, seen in enumerate(ranks) if not seen.gpu]
    if len(without) == len(ranks):
        return Choice(GLOO)
    slowly = "gloo carries all messages, by way of the CPU"
    if without:
        first = without[0]
        some = f"rank {first} on host {ranks[first].host} has" if len(without) == 1 else f"{_text(without)} have"
        return Choice(GLOO, f"{some} no GPU: {slowly}; start ranks where there are GPUs, or all with --device cpu")
    for shared in by_gpu.values():
        if len(shared) > 1:
            where = f"{_text(shared)} share a GPU of host {ranks[shared[0]].host}, and NCCL refuses that"
            return Choice(GLOO, f"{where}: {slowly}; start one rank for each GPU")
    return Choice(NCCL)


def _text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown}{', …' if len(ranks) > 4 else ''}"
