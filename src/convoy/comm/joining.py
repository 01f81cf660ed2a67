"""Joining the other ranks, and leaving them: addresses and networks, backend, process group, the wait at the end.

Before they have a process group the ranks meet in a key-value store: on one host a file, which only its user can open
where a port has no password, on several hosts a server that listens on one address alone. The store is the same for all
restarts of a job, so that ranks would read addresses of processes that are gone; and they cannot ask how often ranks
were restarted, as each host counts for itself. So every generation of ranks uses keys of its own (`generation_store`).

NCCL carries the tensors where every rank has a GPU of its own, else gloo. All ranks must choose the same, or they wait
for each other for ever. So each rank tells the UUID of its GPU and rank 0 decides: what launchers say of local ranks
differs (a Slurm task may see one GPU or all of its host's), and ranks that see different numbers of GPUs would decide
differently by themselves.
"""

import atexit
import contextlib
import functools
import hmac
import json
import os
import secrets
import socket
import sys
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from convoy import interfaces, slurm
from convoy.comm.position import lack_of_memory, ledger
from convoy.errors import ConvoyError, MachineError, MeetingError
from convoy.failure import say_uncaught
from convoy.interfaces import number_of
from convoy.resources import check_threads

GLOO = "gloo"
NCCL = "cpu:gloo,cuda:nccl"


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


def identify(device: torch.device) -> RankDevice:
    """The device of this rank."""
    if device.type != "cuda":
        return RankDevice(socket.gethostname(), "")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return RankDevice(socket.gethostname(), str(uuid or f"{socket.gethostname()}/{visible}/{device.index}"))


def agreed_backend(store: Store, rank: int, num_ranks: int, device: RankDevice) -> Choice:
    """The choice of rank 0, on all ranks: each calls it with its own device, and a store that only they use."""
    store.set(f"device/{rank}", json.dumps(device))
    if rank == 0:
        devices = [RankDevice(*json.loads(store.get(f"device/{other}"))) for other in range(num_ranks)]
        store.set("backend", json.dumps(choose_backend(devices)))
    return Choice(*json.loads(store.get("backend")))


def choose_backend(ranks: Sequence[RankDevice]) -> Choice:
    """The backend for ranks that have these GPUs.

    >>> choose_backend([RankDevice("a", "GPU-1"), RankDevice("a", "GPU-2")]).backend
    'cpu:gloo,cuda:nccl'
    >>> choose_backend([RankDevice("a", "GPU-1"), RankDevice("a", "GPU-1")]).note
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
        some = f"rank {first} on host {ranks[first].host} has" if len(without) == 1 else f"{_ranks_text(without)} have"
        return Choice(GLOO, f"{some} no GPU: {slowly}; start ranks where there are GPUs, or all with --device cpu")
    for shared in by_gpu.values():
        if len(shared) > 1:
            where = f"{_ranks_text(shared)} share a GPU of host {ranks[shared[0]].host}"
            return Choice(GLOO, f"{where}: {turns}; one rank for each GPU is faster")
    return Choice(NCCL)


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown}{', …' if len(ranks) > 4 else ''}"


_key = b""  # the secret that the ranks of this run share, and nobody else who reaches them


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
        f"NCCL cannot connect the GPUs of {_ranks_text(ranks)} ({reason}): see whether NCCL_SOCKET_IFNAME ({named}) is "
        "the interface between hosts, whether GPUs reach others (try NCCL_P2P_DISABLE=1), and whether the driver is "
        "the same on all; NCCL_DEBUG=INFO says more"
    )


def open_store(rank: int, num_ranks: int, timeout: timedelta) -> Store:
    """The file of `CONVOY_STORE`, where the ranks of one host meet, or else the store at MASTER_ADDR:MASTER_PORT.
    torchrun's agent keeps that one where it says so; otherwise rank 0 does, and listens on the address of MASTER_ADDR
    alone, where torch would listen on all interfaces."""
    meeting: Store
    if (file := _file()) is not None:
        if not file.parent.is_dir():
            raise MeetingError(f"{file.parent}, where the ranks of this host meet, is gone: start them again")
        meeting = FileStore(str(file))
        meeting.set_timeout(timeout)
        return meeting
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank > 0 or _agent_keeps():
        meeting = TCPStore(host, port, num_ranks, is_master=False, timeout=timeout)
        interfaces.give_up_after(timeout.total_seconds(), port)
        return meeting
    address = interfaces.meeting_address(host, alone=num_ranks <= num_local(num_ranks))
    try:
        listening = interfaces.listen(address, port)
    except OSError as error:
        raise MeetingError(f"rank 0 {error.strerror}: set MASTER_PORT to a free port") from error
    port = listening.getsockname()[1]
    return TCPStore(address, port, num_ranks, is_master=True, timeout=timeout, master_listen_fd=listening.detach())


def _agent_keeps() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _file() -> Path | None:
    """The file in which the ranks meet; a torchrun that is started in a run has its own store."""
    name = os.environ.get(interfaces.STORE)
    return Path(name) if name and not _agent_keeps() else None


class Files:
    """Values that ranks of one host overwrite again and again: `FileStore` keeps all that was ever written."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        temporary = self._folder / f"{key}.tmp"
        temporary.write_text(value)
        temporary.replace(self._folder / key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [(self._folder / key).read_bytes() for key in keys]


def board(store: Store, name: str, timeout: timedelta, patience_s: float) -> Files | Store:
    """The part of the ranks' meeting store for values that are overwritten again and again, from any thread. An answer
    may take `timeout`; a network that is away for `patience_s` is lost for good."""
    if (file := _file()) is not None:
        return Files(file.with_name(name))
    part = PrefixStore(name, store.clone())  # type: ignore[attr-defined]
    part.set_timeout(timeout)
    interfaces.give_up_after(patience_s, int(os.environ.get("MASTER_PORT", 0)))
    return part


def choose_interface(num_ranks: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo and NCCL talk on the network on which the ranks meet, unless an interface was chosen. By itself gloo
    takes the one that this host's name belongs to, which others may not reach."""
    name, names = environment.get(interfaces.VARIABLES[0]) or None, interfaces.names()
    if name is not None:
        if not set(name.split(",")) & set(names):
            raise ConvoyError(f"{interfaces.VARIABLES[0]} names {name}: unset it, or name one of {', '.join(names)}")
        return
    host = environment.get("MASTER_ADDR", "127.0.0.1")
    address = interfaces.towards(host)
    alone = interfaces.says_local(host) or num_ranks <= num_local(num_ranks, environment)
    if address is None or (interfaces.is_loopback(address) and not alone):
        return
    name = interfaces.interface_with(address)
    if name is not None:
        gloo, nccl = interfaces.VARIABLES
        environment[gloo] = name
        environment.setdefault(nccl, f"={name}")  # without the sign NCCL takes all that begin so: eth1, eth10


def num_local(num_ranks: int, environment: MutableMapping[str, str] = os.environ) -> int:
    """Ranks of this host, as the launcher says; all where it does not."""
    text = environment.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and 0 < int(text) <= num_ranks else num_ranks


_POLL_S = 0.01
_PATIENCE_S = 0.5


def generation_store(store: Store, rank: int, num_ranks: int, timeout: timedelta) -> Store:
    """The part of a store that only the ranks which call this now use. Rank 0 names a generation, the others answer
    with a word of their own, and it confirms the words that it has read: so nobody takes a past generation for the
    present one."""
    word = uuid.uuid4().hex
    if rank == 0:
        store.set("generation", word)
        names = [f"{word}/{other}" for other in range(1, num_ranks)]
        if names:
            store.wait(names, timeout)
        store.set(f"{word}/all", json.dumps([store.get(name).decode() for name in names]))
        return PrefixStore(word, store)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        store.wait(["generation"], timeout)
        generation = store.get("generation").decode()
        store.set(f"{generation}/{rank}", word)
        retry_at = time.monotonic() + _PATIENCE_S
        while time.monotonic() < retry_at:
            if store.check([f"{generation}/all"]) and word in json.loads(store.get(f"{generation}/all")):
                return PrefixStore(generation, store)
            if store.get("generation").decode() != generation:
                break
            time.sleep(_POLL_S)
    raise RuntimeError(f"rank {rank} has waited {timeout.total_seconds():g} s for rank 0 to see all {num_ranks} ranks")


_store: Store | None = None
_has_joined = False
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join(timeout: float = 600.0, device: str | None = None) -> torch.device:
    """Join the process group that torchrun's or Slurm's variables describe, unless some group is joined already; the
    device of this rank.

    CPU tensors go through gloo. Where every rank has a GPU of its own, CUDA tensors go through NCCL; where ranks share
    one, or have none, all goes through gloo, and rank 0 says so. Without the variables nothing is joined: one device.

    Ranks wait `timeout` seconds for each other, here and in every collective. The device, which becomes the current
    one, is by `LOCAL_RANK` where there is CUDA and `device` does not ask for the CPU.
    """
    if "SLURM_PROCID" in os.environ and not dist.is_initialized():
        slurm.translate()
    devices = 0 if device is not None and device.startswith("cpu") else gpus().number
    local_rank = number_of(os.environ, "LOCAL_RANK", 0)
    rank_device = torch.device("cuda", local_rank % devices) if devices else torch.device("cpu")
    if not dist.is_initialized() and ("RANK" in os.environ or "WORLD_SIZE" in os.environ):
        say_uncaught(_first_to_say)
        _check_variables(os.environ)
        check_threads()
        if devices:
            torch.cuda.set_device(rank_device)
        rank, world = number_of(os.environ, "RANK", 0), number_of(os.environ, "WORLD_SIZE", 1)
        choose_interface(world)
        try:
            limit = timedelta(seconds=timeout)
            global _store, _key, _has_joined
            _store = generation_store(open_store(rank, world, limit), rank, world, limit)
            if rank == 0 and _agent_keeps() and interfaces.STORE not in os.environ:
                _say_who_else_is_here()
            if rank == 0:
                _store.set("key", uuid.uuid4().hex)
            _key = interfaces.secret() + _store.get("key")
            choice = agreed_backend(_store, rank, world, identify(rank_device))
            # NCCL is to write its last collectives to a file where one reaches its time limit; under the old name too
            if choice.backend == NCCL and "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
                os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
            dist.init_process_group(choice.backend, store=_store, rank=rank, world_size=world, timeout=limit)
            _has_joined = True
            if dist.group.WORLD is not None:
                connect(dist.group.WORLD)
            if choice.note and rank == 0:
                print(f"convoy: {choice.note}", file=sys.stderr, flush=True)
        except (dist.DistError, RuntimeError) as error:
            if (needed := lack_of_memory(error)) is not None:
                raise MachineError(
                    f"rank {rank} ran out of memory when it joined the others{needed}: see what else runs on its device"
                ) from error
            port = "{MASTER_ADDR}:{MASTER_PORT} (MASTER_ADDR:MASTER_PORT)"
            where = _file() or port.format_map(os.environ)
            raise MeetingError(f"Rank {rank} cannot join the other ranks at {where}: {error}") from error
    # torch, too, takes exceptions when it joins, and would hold them back until all is said
    say_uncaught(_first_to_say)
    return rank_device


def _first_to_say() -> bool:
    """Whether no other rank has said why it failed."""
    if _store is None:
        return True
    try:
        _store.set_timeout(timedelta(seconds=2))
        return bool(_store.add("convoy/failed", 1) == 1)
    except RuntimeError:  # who keeps the store has ended
        return True


def meeting_store() -> Store | None:
    """The key-value store by which the ranks have met in `join`; None where they have not."""
    return _store


def leave() -> None:
    """Leave the process group, if one is joined."""
    global _store, _key
    _store, _key = None, b""  # others who meet may know another key, or none
    ledger.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _let_threads_end() -> None:
    """At the end of a process that has joined others, whether it has left them, or a loop of one's own has not.

    gloo's threads release the tensors of the last messages some time later, and need Python's lock for that. Where
    Python ends meanwhile the process is aborted: "terminate called without an active exception" (torch 2.13,
    pytorch#190489), in a tenth to a third of short scripts. To destroy the group would not help where a network still
    refers to it, and might wait for other ranks for ever.
    """
    if _has_joined or dist.is_initialized():
        time.sleep(_THREADS_END_S)


_THREADS_END_S = 0.1
atexit.register(_let_threads_end)


def num_ranks() -> int:
    """How many ranks have joined; without a process group this one alone."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _say_who_else_is_here() -> None:
    """Warn of what other people with processes on this host, as far as it shows them, can do to a run of torchrun's.
    Accounts of people begin at 1,000; in between are those that systemd makes up for services, and nobody's."""
    users = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            users.add(process.stat().st_uid)
    num_others = len([user for user in users - {os.getuid()} if user >= 1000 and not 61_184 <= user < 65_536])
    if num_others:
        who = f"{num_others} other user{'s have' if num_others > 1 else ' has'} processes"
        print(
            f"convoy: here {who}, and the ports of torchrun take anybody's word, with its c10d rendezvous anybody's "
            "code: start it with --rdzv-backend=convoy (docs/safety.md)",
            file=sys.stderr,
            flush=True,
        )


def _check_variables(environment: Mapping[str, str]) -> None:
    needed = _VARIABLES[:2] if _file() is not None else _VARIABLES
    absent_names = [name for name in needed if not environment.get(name)]
    if absent_names:
        present = [name for name in needed if environment.get(name)]
        raise ConvoyError(
            f"{' and '.join(present)} set but not {' and '.join(absent_names)}: start the ranks with torchrun, "
            "which sets all of them, or unset them to run on one device"
        )
    rank, world = number_of(os.environ, "RANK", 0), number_of(os.environ, "WORLD_SIZE", 1)
    if rank >= world:
        raise ConvoyError(f"RANK={rank} must be below WORLD_SIZE={world}")
    number_of(os.environ, "MASTER_PORT", 0)
