"""Which backend carries the ranks' tensors: NCCL where every rank has a GPU of its own, else gloo.

All ranks must choose the same, or they wait for each other for ever. So each rank tells the UUID of its GPU and rank 0
decides: what launchers say of local ranks differs (a Slurm task may see one GPU or all of its host's), and ranks that
see different numbers of GPUs would decide differently by themselves.
"""

import functools
import hmac
import json
import os
import secrets
import socket
import warnings
from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from convoy.comm.memory import lack_of_memory
from convoy.errors import MeetingError

GLOO = "gloo"
NCCL = "cpu:gloo,cuda:nccl"
_RECORDED = "2000"


class Here(NamedTuple):
    """The GPUs that torch can use on this host, and why there are none; empty where there are, or where nothing is
    known."""

    number: int
    why: str = ""
    too_old: bool = False  # there are some, but the driver is too old for this torch's CUDA


@functools.cache
def gpus() -> Here:
    """The GPUs of this host. Of a driver that is too old torch only warns, once in a process, and goes on without a
    GPU."""
    texts = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            number = torch.cuda.device_count() if torch.cuda.is_available() else 0
        except RuntimeError as error:
            number, texts = 0, [f"CUDA: {error}"]
    if number:
        return Here(number)
    texts += [str(warning.message) for warning in warned]
    why = next((text for text in texts if "CUDA" in text or "driver" in text), "").removeprefix("CUDA: ")
    reason = why.removeprefix("CUDA initialization: ").partition(". ")[0].partition("\n")[0].rstrip(".")
    too_old = "driver" in reason and "too old" in reason
    if too_old:
        reason += f" for this torch, which is built for CUDA {torch.version.cuda}: update the driver, or install a "
        reason += "torch that is built for an older CUDA (https://pytorch.org/get-started)"
    return Here(0, reason, too_old)


class RankDevice(NamedTuple):
    """The name of a rank's host, and the UUID of its GPU; empty without one."""

    host: str
    gpu: str


class Choice(NamedTuple):
    """`torch.distributed`'s name of the backend, and what people should know of it; empty for nothing."""

    backend: str
    note: str = ""


def own(device: torch.device) -> RankDevice:
    """The device of this rank."""
    if device.type != "cuda":
        return RankDevice(socket.gethostname(), "")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return RankDevice(socket.gethostname(), str(uuid or f"{socket.gethostname()}/{visible}/{device.index}"))


def agreed(store: Store, rank: int, num_ranks: int, device: RankDevice) -> Choice:
    """The choice of rank 0, on all ranks: each calls it with its own device, and a store that only they use."""
    store.set(f"device/{rank}", json.dumps(device))
    if rank == 0:
        devices = [RankDevice(*json.loads(store.get(f"device/{other}"))) for other in range(num_ranks)]
        store.set("backend", json.dumps(choose(devices)))
    return Choice(*json.loads(store.get("backend")))


def choose(ranks: Sequence[RankDevice]) -> Choice:
    """The backend for ranks that have these GPUs.

    >>> choose([RankDevice("a", "GPU-1"), RankDevice("a", "GPU-2")]).backend
    'cpu:gloo,cuda:nccl'
    >>> choose([RankDevice("a", "GPU-1"), RankDevice("a", "GPU-1")]).note
    "ranks 0, 1 share a GPU of host a: they take turns on it and divide its memory, ..."
    """
    by_gpu: dict[RankDevice, list[int]] = defaultdict(list)
    for rank, device in enumerate(ranks):
        by_gpu[RankDevice("", device.gpu) if device.gpu else device].append(rank)
    without = [rank for rank, device in enumerate(ranks) if not device.gpu]
    if len(without) == len(ranks):
        return Choice(GLOO)
    slowly = "gloo carries all messages, by way of the CPU"
    turns = "they take turns on it and divide its memory, and as NCCL refuses that, " + slowly
    if without:
        first = without[0]
        some = f"rank {first} on host {ranks[first].host} has" if len(without) == 1 else f"{_text(without)} have"
        return Choice(GLOO, f"{some} no GPU: {slowly}; start ranks where there are GPUs, or all with --device cpu")
    for shared in by_gpu.values():
        if len(shared) > 1:
            where = f"{_text(shared)} share a GPU of host {ranks[shared[0]].host}"
            return Choice(GLOO, f"{where}: {turns}; one rank for each GPU is faster")
    return Choice(NCCL)


def _text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown}{', …' if len(ranks) > 4 else ''}"


def record_collectives(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have torch keep the last collectives of NCCL, which it writes to a file where one reaches its time limit, unless
    the user has said otherwise. It has to know before NCCL begins."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environment:  # the old name
        environment.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED)


_key = b""


def know(key: bytes) -> None:
    """Note the secret that the ranks of this run share, and nobody else who reaches them."""
    global _key
    _key = key


def connect(group: dist.ProcessGroup) -> None:
    """Verify the ranks that gloo has connected, and connect the GPUs of a group that NCCL serves."""
    if _key and "cpu:gloo" in dist.get_backend_config(group).split(","):
        _prove(group)
    if "cuda:nccl" in dist.get_backend_config(group):
        warm_up(group, torch.device("cuda", torch.cuda.current_device()))


def _prove(group: dist.ProcessGroup) -> None:
    """Have every two ranks of a group prove themselves to each other: gloo takes whoever comes first for a rank."""
    rank, ranks = group.rank(), range(group.size())

    def exchanged(words: list[bytes]) -> list[bytes]:
        outgoing = torch.frombuffer(bytearray(b"".join(words)), dtype=torch.uint8)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=group)
        return [part.numpy().tobytes() for part in incoming.chunk(len(ranks))]

    def word(sender: int, receiver: int, question: bytes) -> bytes:
        return hmac.digest(_key, f"{group.group_name} {sender} {receiver} ".encode() + question, "sha256")

    # Every pair uses new random numbers. Whoever writes into the store can have the ranks take an old key again, and
    # words of another run, group or pair, or a rank's own sent back, must not fit even then.
    questions = [secrets.token_bytes(32) for _ in ranks]
    answers = [word(rank, peer, question) for peer, question in enumerate(exchanged(questions))]
    expected = [word(peer, rank, question) for peer, question in enumerate(questions)]
    if not hmac.compare_digest(b"".join(exchanged(answers)), b"".join(expected)):
        who = "somebody has connected to a port of this run in the place of a rank, who is none or was given another "
        raise MeetingError(who + "CONVOY_SECRET: see who else reaches these hosts")


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect the GPUs of a group; all its ranks call it. NCCL would do so at its first message: in the middle of
    training, and group by group in whatever order the ranks come to them."""
    ranks = dist.get_process_group_ranks(group)
    try:
        total = torch.ones(1, device=device)
        dist.all_reduce(total, group=group)
        sum_of_ones = int(total.item())
    except RuntimeError as error:
        if lack_of_memory(error) is not None:
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        last = next((line for line in lines if line.startswith("Last error")), "")
        reason = " ".join(filter(None, (lines[0] if lines else type(error).__name__, last, *lines[-1:]))).rstrip(".")
        raise MeetingError(_unconnected(ranks, reason)) from error
    if sum_of_ones != len(ranks):
        raise MeetingError(_unconnected(ranks, f"a sum of {len(ranks)} ones is {sum_of_ones}"))


def _unconnected(ranks: Sequence[int], reason: str) -> str:
    interface = os.environ.get("NCCL_SOCKET_IFNAME")
    named = f"is {interface}" if interface else "is not set"
    return (
        f"NCCL cannot connect the GPUs of {_text(ranks)} ({reason}): see whether NCCL_SOCKET_IFNAME ({named}) is "
        "the interface between hosts, whether GPUs reach others (try NCCL_P2P_DISABLE=1), and whether the driver is "
        "the same on all; NCCL_DEBUG=INFO says more"
    )
