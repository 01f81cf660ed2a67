"""Joining the other ranks, and the process groups over the axes of a mesh."""

import gc
import itertools
import os
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from convoy.engine.collectives import close
from convoy.engine.fresh import fresh
from convoy.engine.meeting_place import choose_interface, open_store
from convoy.errors import ConvoyError, MeetingError
from convoy.failure import say_uncaught
from convoy.plans.mesh import Axes, Coordinates, Mesh

_store: Store | None = None
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join(timeout: float = 600.0) -> torch.device:
    """Join the process group that torchrun's variables describe, unless some group is joined already.

    CPU tensors go through gloo. Where every local rank can have a CUDA device of its own, CUDA tensors go through NCCL;
    where ranks share a device all goes through gloo. The rank's device is made the current one. Without the variables
    nothing is joined: one device.

    Args:
        timeout: seconds that ranks wait for each other, here and in every collective.

    Returns:
        The device for this rank: by `LOCAL_RANK` where there is CUDA, else the CPU.

    Raises:
        ConvoyError: only some of the variables are set, or they are no numbers.
        MeetingError: the other ranks are not to be reached.
    """
    local_rank, local_size = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", local_rank % devices) if devices else torch.device("cpu")
    own_device = devices >= max(local_size, local_rank + 1)
    if not dist.is_initialized() and ("RANK" in os.environ or "WORLD_SIZE" in os.environ):
        say_uncaught(_first_to_say)
        _check_variables(os.environ)
        if devices:
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if own_device else "gloo"
        rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
        choose_interface(world)
        try:
            limit = timedelta(seconds=timeout)
            global _store
            _store = fresh(open_store(rank, world, limit), rank, world, limit)
            dist.init_process_group(backend, store=_store, rank=rank, world_size=world, timeout=limit)
        except (dist.DistError, RuntimeError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise MeetingError(
                f"Rank {os.environ['RANK']} cannot join the other ranks at {where} (MASTER_ADDR:MASTER_PORT): {error}"
            ) from error
    say_uncaught(
        _first_to_say
    )  # torch, too, takes exceptions when it joins, and would hold them back until all is said
    return device


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
    if dist.is_initialized():
        dist.destroy_process_group()


def num_ranks() -> int:
    """How many ranks have joined; without a process group this one alone."""
    return dist.get_world_size() if dist.is_initialized() else 1


def everyone() -> dist.ProcessGroup | None:
    """All ranks that have joined, in a group that carries tensors on the CPU; None for one alone. All ranks call it."""
    if num_ranks() == 1:
        return None
    if not _temporary and "cpu:gloo" in dist.get_backend_config().split(","):
        return dist.group.WORLD
    own: dist.ProcessGroup = dist.new_group(backend="gloo")
    if _temporary:
        _temporary[-1].append(own)
    return own


_temporary: list[list[dist.ProcessGroup]] = []
"""What was made within each `temporary` that is entered."""


@contextmanager
def temporary() -> Iterator[None]:
    """Groups that are made within are for what is done there alone, those of all ranks too, and end with it.

    All ranks enter it. One that leaves it with an error takes its groups with it: whoever waits there for its messages
    gets an error too, while the groups outside still serve. That holds for messages through gloo and shared memory.
    """
    made: list[dist.ProcessGroup] = []
    _temporary.append(made)
    failed = False
    try:
        yield
    except Exception as error:
        failed = True
        traceback.clear_frames(error.__traceback__)  # as long as anything knows a group, its connections stay
        raise
    finally:
        _temporary.pop()
        while made:
            close(made[-1])
            dist.destroy_process_group(made.pop())
        if failed:
            gc.collect()


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

    A group is made when it is first asked for, which all ranks must do in the same order; all are made at once within
    `temporary`, after which there are none.

    Args:
        mesh: its number of devices must be the number of ranks, if a process group is joined.
        rank: this one; by default its number in the process group, 0 without one.
        subsets: axes whose groups are made at once.
    """

    def __init__(self, mesh: Mesh, rank: int | None = None, subsets: Iterable[Axes] = ()) -> None:
        world = num_ranks()
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
        for axes in _all_subsets(mesh) if _temporary else subsets:
            self.of(axes)

    def of(self, axes: Iterable[int]) -> dist.ProcessGroup | None:
        """The ranks that differ from this one on `axes` only, numbered as `Mesh.index`; None if it is alone."""
        wide = tuple(sorted(axis for axis in set(axes) if self.mesh.sizes[axis] > 1))
        if not wide:
            return None
        if wide not in self._made:
            self._made[wide] = self._make(wide)
        return self._made[wide]

    def _make(self, axes: Axes) -> dist.ProcessGroup:
        assert dist.is_initialized(), "several devices without a process group"
        if self.mesh.size(axes) == self.mesh.num_devices and not _temporary:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        mine: dist.ProcessGroup | None = None
        for ranks in self.mesh.groups(axes):
            group = dist.new_group(ranks)
            if self.rank in ranks:
                mine = group
        assert mine is not None
        if _temporary:
            _temporary[-1].append(mine)
        return mine

    def __deepcopy__(self, memo: dict[int, Any]) -> "Groups":
        return self


def _all_subsets(mesh: Mesh) -> Iterator[Axes]:
    wide = tuple(axis for axis, size in enumerate(mesh.sizes) if size > 1)
    for count in range(1, len(wide) + 1):
        yield from itertools.combinations(wide, count)
