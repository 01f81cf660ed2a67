"""Joining the other ranks, and the process groups over the axes of a mesh.

Before they have a process group the ranks meet in a key-value store, which listens on one address alone. torch's
elastic launcher keeps one store for all restarts of a job, in which ranks would find the addresses of processes that
are gone; how often ranks were restarted they cannot ask, as each host counts for itself. So every generation of ranks
uses keys of its own (`generation_store`).
"""

import atexit
import gc
import itertools
import json
import os
import sys
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from convoy import interfaces
from convoy.comm import backend
from convoy.comm.collectives import beside, close, gather_ints, time_limit
from convoy.comm.memory import lack_of_memory
from convoy.comm.position import ledger
from convoy.errors import ConvoyError, MachineError, MeetingError
from convoy.failure import say_uncaught
from convoy.plans.mesh import Axes, Coordinates, Mesh


def open_store(rank: int, num_ranks: int, timeout: timedelta) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT.

    torchrun's agent keeps it where it says so. Otherwise rank 0 does, and listens on the address of MASTER_ADDR alone;
    torch would listen on all interfaces.

    Args:
        rank: this one.
        num_ranks: of all.
        timeout: to wait for rank 0.

    Raises:
        ConvoyError: others could not reach rank 0 where they look for it.
        MeetingError: rank 0 cannot listen there.
        RuntimeError: the store is not to be reached.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if rank > 0 or kept:
        return TCPStore(host, port, num_ranks, is_master=False, timeout=timeout)
    address = interfaces.meeting_address(host, alone=num_ranks <= num_local(num_ranks))
    try:
        listening = interfaces.listen(address, port)
    except OSError as error:
        raise MeetingError(f"rank 0 {error.strerror}: set MASTER_PORT to a free port") from error
    port = listening.getsockname()[1]
    return TCPStore(address, port, num_ranks, is_master=True, timeout=timeout, master_listen_fd=listening.detach())


def choose_interface(num_ranks: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo and NCCL talk on the network on which the ranks meet, unless an interface was chosen.

    By itself gloo would take the one that this host's name belongs to, which need not be one that others reach.
    """
    if interfaces.VARIABLES[0] in environment:
        return
    host = environment["MASTER_ADDR"]
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
    """The part of a store that only the ranks which call this now use.

    Rank 0 names a generation, the others answer with a word of their own, and it confirms the words that it has read:
    so nobody takes a generation for the present one that is past.

    Args:
        store: that all of them have.
        rank: this one.
        num_ranks: that call it.
        timeout: for all of it.

    Raises:
        RuntimeError: the others do not come.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("generation", own)
        names = [f"{own}/{other}" for other in range(1, num_ranks)]
        if names:
            store.wait(names, timeout)
        store.set(f"{own}/all", json.dumps([store.get(name).decode() for name in names]))
        return PrefixStore(own, store)
    until = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < until:
        store.wait(["generation"], timeout)
        generation = store.get("generation").decode()
        store.set(f"{generation}/{rank}", own)
        soon = time.monotonic() + _PATIENCE_S
        while time.monotonic() < soon:
            if store.check([f"{generation}/all"]) and own in json.loads(store.get(f"{generation}/all")):
                return PrefixStore(generation, store)
            if store.get("generation").decode() != generation:
                break
            time.sleep(_POLL_S)
    raise RuntimeError(f"rank {rank} has waited {timeout.total_seconds():g} s for rank 0 to see all {num_ranks} ranks")


_store: Store | None = None
_has_joined = False
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join(timeout: float = 600.0, device: str | None = None) -> torch.device:
    """Join the process group that torchrun's variables describe, unless some group is joined already.

    CPU tensors go through gloo. Where every rank has a GPU of its own, CUDA tensors go through NCCL; where ranks share
    one, or have none, all goes through gloo, and rank 0 says so. The rank's device is made the current one. Without the
    variables nothing is joined: one device.

    Args:
        timeout: seconds that ranks wait for each other, here and in every collective.
        device: the one that was asked for, on all ranks; `cpu` leaves GPUs alone.

    Returns:
        The device for this rank: by `LOCAL_RANK` where there is CUDA, else the CPU.

    Raises:
        ConvoyError: only some of the variables are set, or they are no numbers.
        MeetingError: the other ranks are not to be reached.
        MachineError: memory lacks to connect to them.
    """
    devices = 0 if device is not None and device.startswith("cpu") else backend.gpus().number
    own = torch.device("cuda", _number("LOCAL_RANK", 0) % devices) if devices else torch.device("cpu")
    if not dist.is_initialized() and ("RANK" in os.environ or "WORLD_SIZE" in os.environ):
        say_uncaught(_first_to_say)
        _check_variables(os.environ)
        if devices:
            torch.cuda.set_device(own)
        rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
        choose_interface(world)
        try:
            limit = timedelta(seconds=timeout)
            global _store, _has_joined
            _store = generation_store(open_store(rank, world, limit), rank, world, limit)
            choice = backend.agreed(_store, rank, world, backend.own(own))
            if choice.backend == backend.NCCL:
                backend.record_collectives()
            dist.init_process_group(choice.backend, store=_store, rank=rank, world_size=world, timeout=limit)
            _has_joined = True
            if dist.group.WORLD is not None:
                _connect(dist.group.WORLD)
            if choice.note and rank == 0:
                print(f"convoy: {choice.note}", file=sys.stderr, flush=True)
        except (dist.DistError, RuntimeError) as error:
            if (needed := lack_of_memory(error)) is not None:
                raise MachineError(
                    f"rank {rank} ran out of memory when it joined the others{needed}: see what else runs on its device"
                ) from error
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise MeetingError(
                f"Rank {os.environ['RANK']} cannot join the other ranks at {where} (MASTER_ADDR:MASTER_PORT): {error}"
            ) from error
    # torch, too, takes exceptions when it joins, and would hold them back until all is said
    say_uncaught(_first_to_say)
    return own


def _connect(group: dist.ProcessGroup) -> None:
    """Connect the GPUs of a group that NCCL serves."""
    if "cuda:nccl" in dist.get_backend_config(group):
        backend.warm_up(group, torch.device("cuda", torch.cuda.current_device()))


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
    global _store
    _store = None
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


def everyone() -> dist.ProcessGroup | None:
    """All ranks that have joined, in a group that carries tensors on the CPU; None for one alone. All ranks call it."""
    if num_ranks() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    if not _temporary:
        return world if "cpu:gloo" in dist.get_backend_config().split(",") else beside(world)
    own: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=time_limit(world))
    _temporary[-1].add(own)
    return own


class Temporary:
    """Process groups that end together.

    Attributes:
        failed: a rank has failed: nothing in them is to be waited for any more.
    """

    def __init__(self) -> None:
        self.failed = False
        self._groups: list[dist.ProcessGroup] = []
        self._lock = threading.Lock()

    def add(self, group: dist.ProcessGroup) -> None:
        """One more.

        Raises:
            RuntimeError: they were aborted.
        """
        with self._lock:
            self._groups.append(group)
            if self.failed:
                raise RuntimeError("aborted: a rank has failed")

    def meet(self) -> None:
        """Wait for the others, so that nobody begins to make a group for which one of them does not come."""
        if self._groups:
            gather_ints([0], self._groups[0])

    def abort(self) -> None:
        """End what waits for messages through NCCL, from any thread.

        All at once: to abort one of its groups may take until the kernels of the others have ended.
        """
        with self._lock:
            self.failed = True
            ending = [
                threading.Thread(target=group.abort, daemon=True) for group in self._groups if not only_gloo(group)
            ]
            for thread in ending:
                thread.start()
            for thread in ending:
                thread.join(_ABORT_S)

    def end(self) -> None:
        """Leave them."""
        if self.failed:
            self.abort()
        with self._lock:
            while self._groups:
                group = self._groups.pop()
                if not self.failed:
                    _end(group, keep=True)
                    continue
                close(group)
                if only_gloo(group):
                    dist.destroy_process_group(group)
                else:  # to destroy it would wait for what was sent
                    dist.distributed_c10d._abort_process_group(group)


def only_gloo(group: dist.ProcessGroup | None = None) -> bool:
    """Whether gloo carries all that a group sends; by default that of all ranks."""
    return all(part.rpartition(":")[2] == "gloo" for part in dist.get_backend_config(group).split(","))


_ABORT_S = 10.0
_temporary: list[Temporary] = []
"""What was made within each `temporary` that is entered."""


@contextmanager
def temporary() -> Iterator[Temporary]:
    """Groups that are made within are for what is done there alone, those of all ranks too, and end with it.

    All ranks enter it. One that leaves it with an error takes its groups with it: whoever waits there for its messages
    through gloo or shared memory gets an error too, while the groups outside still serve.
    """
    made = Temporary()
    _temporary.append(made)
    try:
        yield made
    except Exception as error:
        made.failed = True
        traceback.clear_frames(error.__traceback__)  # as long as anything knows a group, its connections stay
        raise
    finally:
        _temporary.pop()
        made.end()
        if made.failed:
            gc.collect()


_kept: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] | None = None
"""By the ranks of all groups over some axes, what `reusing` keeps of them; None outside of it."""
_over: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[tuple[int, ...], ...]] = weakref.WeakKeyDictionary()
"""The ranks of all groups over the axes for which each temporary group was made."""


@contextmanager
def reusing() -> Iterator[None]:
    """Groups of one `temporary` are kept for the next ones, which need not connect anew. All ranks enter it."""
    global _kept
    _kept = {}
    try:
        yield
    finally:
        forget()
        _kept = None


def forget() -> None:
    """Keep nothing of what was made so far: a rank has failed. All ranks call it."""
    while _kept:
        _end(_kept.popitem()[1], keep=False)


def _end(group: dist.ProcessGroup, keep: bool) -> None:
    ranks = _over.get(group)
    if keep and _kept is not None and ranks is not None and ranks not in _kept:
        _kept[ranks] = group
        return
    close(group)
    dist.destroy_process_group(group)


def _check_variables(environment: Mapping[str, str]) -> None:
    missing = [name for name in _VARIABLES if not environment.get(name)]
    if missing:
        present = [name for name in _VARIABLES if environment.get(name)]
        raise ConvoyError(
            f"{' and '.join(present)} set but not {' and '.join(missing)}: start the ranks with torchrun, "
            "which sets all of them, or unset them to run on one device"
        )
    rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if rank >= world:
        raise ConvoyError(f"RANK={rank} must be below WORLD_SIZE={world}")
    _number("MASTER_PORT", 0)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConvoyError(f"{name}={text!r} must be a whole number")
    return int(text)


class Groups:
    """The process groups over subsets of a mesh's axes, and this rank's place on the mesh.

    A group is made when it is first asked for, which all ranks must do in the same order; all are made at once where
    the mesh has stages, and within `temporary`, after which there are none.

    Args:
        mesh: its number of devices must be the number of ranks, if a process group is joined.
        rank: this one; by default its number in the process group, 0 without one.
    """

    def __init__(self, mesh: Mesh, rank: int | None = None) -> None:
        world, is_joined = num_ranks(), rank is None
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            if mesh.num_devices != world:
                raise ConvoyError(
                    f"The plan's mesh {mesh} is for {mesh.num_devices} devices, but {world} ranks run: "
                    f"start {mesh.num_devices} ranks or change the sizes of the axes"
                )
        self.mesh = mesh
        self.rank = rank
        self.coordinates: Coordinates = mesh.coordinates(rank)
        self._made: weakref.WeakValueDictionary[Axes, dist.ProcessGroup] = weakref.WeakValueDictionary()
        self._kept: list[dist.ProcessGroup] = []
        if _temporary and is_joined:
            self._make_all(_temporary[-1].meet)
        elif mesh.stage_axis is not None and is_joined:  # ranks of different stages would ask for different ones
            self._make_all(lambda: None)
            self._kept = list(self._made.values())
        self._back: dist.ProcessGroup | None = None
        if mesh.stage_axis is not None and is_joined:
            self._back = self._second((mesh.stage_axis,))

    def _make_all(self, meet: Callable[[], None]) -> None:
        # all ranks make all groups before the first is connected: an alarm, or the end of one that has failed, reaches
        # who waits in a group, not who still waits in the store or for a rank's first message to make it
        meet()
        made = [axes for axes in _all_subsets(self.mesh) if self._make(axes)]
        meet()
        for axes in made:
            _connect(self._made[axes])

    def of(self, axes: Iterable[int]) -> dist.ProcessGroup | None:
        """The ranks that differ from this one on `axes` only, numbered as `Mesh.index`; None if it is alone."""
        wide = tuple(sorted(axis for axis in set(axes) if self.mesh.sizes[axis] > 1))
        if not wide:
            return None
        if wide not in self._made and self._make(wide):
            _connect(self._made[wide])
        return self._made[wide]

    @property
    def back(self) -> dist.ProcessGroup | None:
        """The ranks of the other stages at this place, for what goes back to earlier ones.

        What NCCL sends through one group is sent in one order, in which each of two ranks would wait for the other.
        """
        return self._back

    def _second(self, axes: Axes) -> dist.ProcessGroup | None:
        """Another group of the ranks of that over `axes`; the same one where gloo carries all."""
        first = self.of(axes)
        if first is None or only_gloo(first):
            return first
        found: dist.ProcessGroup | None = None
        for ranks in self.mesh.groups(axes):
            group = dist.new_group(list(ranks), timeout=time_limit(first), backend=dist.get_backend_config(first))
            found = group if self.rank in ranks else found
        assert found is not None
        if _temporary:
            _temporary[-1].add(found)
        _connect(found)
        return found

    def _make(self, axes: Axes) -> bool:
        """Whether the group is new, and has yet to be connected."""
        world = dist.group.WORLD
        assert world is not None, "several devices without a process group"
        if self.mesh.size(axes) == self.mesh.num_devices and not _temporary:
            self._made[axes] = world
            return False
        all_ranks = tuple(tuple(ranks) for ranks in self.mesh.groups(axes))
        mine = _kept.pop(all_ranks, None) if _kept and _temporary else None
        is_new = mine is None
        backends = dist.get_backend_config()
        both = None if "cpu:" in backends else f"cpu:gloo,{backends}"  # as for what a user joined by NCCL alone
        for ranks in all_ranks if is_new else ():
            group = dist.new_group(list(ranks), timeout=time_limit(world), backend=both)
            if self.rank in ranks:
                mine = group
        assert mine is not None
        if _temporary:
            _temporary[-1].add(mine)
            _over[mine] = all_ranks
        self._made[axes] = mine
        return is_new

    def __deepcopy__(self, memo: dict[int, Any]) -> "Groups":
        return self


def _all_subsets(mesh: Mesh) -> Iterator[Axes]:
    wide = tuple(axis for axis, size in enumerate(mesh.sizes) if size > 1)
    for count in range(1, len(wide) + 1):
        yield from itertools.combinations(wide, count)
