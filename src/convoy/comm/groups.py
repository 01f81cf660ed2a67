"""The process groups over the axes of a mesh, and those that last for a while: for what ranks try together.

A rank that fails in a try leaves the others in collectives. Over gloo and shared memory these get an error as soon as
it closes its end. NCCL's kernels wait on until the time limit of their group, and so does the host, in whatever
synchronizes with them. So a rank that fails says so under a key of the store by which the ranks have met, and a thread
of every other rank aborts the groups that were made for the try (`alarm`).
"""

import contextlib
import gc
import itertools
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from convoy.comm.collectives import beside, close, gather_ints, time_limit
from convoy.comm.joining import connect, num_ranks
from convoy.errors import ConvoyError
from convoy.plans.mesh import Axes, Coordinates, Mesh


def everyone() -> dist.ProcessGroup | None:
    """All ranks that have joined, in a group that carries CPU tensors; None for one rank alone. All ranks call it."""
    if num_ranks() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    if not _temporary:
        return world if "cpu:gloo" in dist.get_backend_config().split(",") else beside(world)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=time_limit(world))
    _temporary[-1].add(group)
    connect(group)
    return group


class Temporary:
    """Process groups that end together."""

    def __init__(self) -> None:
        self.failed = False  # once a rank has failed nothing in them is to be waited for
        self._groups: list[dist.ProcessGroup] = []
        self._lock = threading.Lock()

    def add(self, group: dist.ProcessGroup) -> None:
        """Add a group; an error where they were aborted."""
        with self._lock:
            self._groups.append(group)
            if self.failed:
                raise RuntimeError("aborted: a rank has failed")

    def meet(self) -> None:
        """Wait for the other ranks, so that nobody begins to make a group for which one of them does not come."""
        if self._groups:
            gather_ints([0], self._groups[0])

    def abort(self) -> None:
        """End what waits for messages through NCCL, from any thread; all groups at once, as aborting one may take until
        the kernels of the others have ended."""
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
        if self.failed:
            self.abort()
        with self._lock:
            while self._groups:
                group = self._groups.pop()
                close(group)
                if self.failed and not only_gloo(group):  # to destroy it would wait for what was sent
                    dist.distributed_c10d._abort_process_group(group)
                else:
                    dist.destroy_process_group(group)


def only_gloo(group: dist.ProcessGroup | None = None) -> bool:
    """Whether gloo carries all that a group sends; by default that of all ranks."""
    return all(part.rpartition(":")[2] == "gloo" for part in dist.get_backend_config(group).split(","))


_ABORT_S = 10.0
_temporary: list[Temporary] = []  # the groups made within each `temporary` that is entered


@contextmanager
def temporary() -> Iterator[Temporary]:
    """Process groups made within, those of all ranks too, serve only what is done there, and end with it.

    All ranks enter it. One that leaves it with an error takes its groups with it: whoever waits there for its messages
    through gloo or shared memory gets an error too, while the groups outside still serve.
    """
    groups = Temporary()
    _temporary.append(groups)
    try:
        yield groups
    except Exception as error:
        groups.failed = True
        traceback.clear_frames(error.__traceback__)  # as long as anything knows a group, its connections stay
        raise
    finally:
        _temporary.pop()
        groups.end()
        if groups.failed:
            gc.collect()


_POLL_S = 0.1


@contextmanager
def alarm(name: str, groups: Temporary) -> Iterator[None]:
    """While entered, a rank that leaves with an error calls the others out of the groups of a try, whose name no other
    try has. Over gloo alone there is nothing to do: closed connections say the same, and torch cannot abort its
    groups."""
    if not dist.is_initialized() or only_gloo():
        yield
        return
    world: Any = dist.group.WORLD
    store = PrefixStore(name, world.get_group_store().clone())  # the other one serves one thread at a time
    over = threading.Event()

    def listen() -> None:
        with contextlib.suppress(RuntimeError):
            while not over.wait(_POLL_S):
                if store.check(["failed"]):
                    groups.abort()
                    return

    thread = threading.Thread(target=listen, daemon=True, name="convoy-alarm")
    thread.start()
    failed = True
    try:
        yield
        failed = False
    finally:
        over.set()
        thread.join()
        if failed:
            with contextlib.suppress(RuntimeError):  # who keeps the store has ended, and all know it
                store.set("failed", "")


class Groups:
    """The process groups over subsets of a mesh's axes, and this rank's place on the mesh: its number in the process
    group, 0 without one. Of a `rank` that is given the others are not there.

    A group is made when it is first asked for, which all ranks must do in the same order; all are made at once where
    the mesh has stages, and within `temporary`, after which there are none.
    """

    def __init__(self, mesh: Mesh, rank: int | None = None) -> None:
        world, self._is_joined = num_ranks(), rank is None
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
        if _temporary and self._is_joined:
            self._make_all(_temporary[-1].meet)
        elif mesh.stage_axis is not None and self._is_joined:  # ranks of different stages would ask for different ones
            self._make_all(lambda: None)
            self._kept = list(self._made.values())
        # the ranks of the other stages at this place, for what goes back to earlier ones: what NCCL sends through one
        # group is sent in one order, in which each of two ranks would wait for the other
        self.back = self._second((mesh.stage_axis,)) if mesh.stage_axis is not None and self._is_joined else None

    def _make_all(self, meet: Callable[[], None]) -> None:
        # all ranks make all groups before the first is connected: an alarm, or the end of one that has failed, reaches
        # who waits in a group, not who still waits in the store or for a rank's first message to make it
        meet()
        all_axes = [axes for axes in _all_subsets(self.mesh) if self._make(axes)]
        meet()
        for axes in all_axes:
            connect(self._made[axes])

    def of(self, axes: Iterable[int]) -> dist.ProcessGroup | None:
        """The ranks that differ from this one on `axes` only, numbered as `Mesh.index`; None if it is alone."""
        key = tuple(sorted(axis for axis in set(axes) if self.mesh.sizes[axis] > 1))
        if not key or not self._is_joined:
            return None
        if key not in self._made and self._make(key):
            connect(self._made[key])
        return self._made[key]

    @property
    def world(self) -> dist.ProcessGroup | None:
        """All ranks of the mesh."""
        return self.of(self.mesh.axes)

    def _second(self, axes: Axes) -> dist.ProcessGroup | None:
        """Another group of the ranks of that over `axes`; the same one where gloo carries all."""
        forward = self.of(axes)
        if forward is None or only_gloo(forward):
            return forward
        second: dist.ProcessGroup | None = None
        for ranks in self.mesh.groups(axes):
            group = dist.new_group(list(ranks), timeout=time_limit(forward), backend=dist.get_backend_config(forward))
            second = group if self.rank in ranks else second
        assert second is not None
        if _temporary:
            _temporary[-1].add(second)
        connect(second)
        return second

    def _make(self, axes: Axes) -> bool:
        """Make a group; whether it is new, and has yet to be connected."""
        world = dist.group.WORLD
        assert world is not None, "several devices without a process group"
        if self.mesh.size(axes) == self.mesh.num_devices and not _temporary:
            self._made[axes] = world
            return False
        group: dist.ProcessGroup | None = None
        backends = dist.get_backend_config()
        backend = None if "cpu:" in backends else f"cpu:gloo,{backends}"  # as for what a user joined by NCCL alone
        for ranks in self.mesh.groups(axes):
            candidate = dist.new_group(list(ranks), timeout=time_limit(world), backend=backend)
            if self.rank in ranks:
                group = candidate
        assert group is not None
        if _temporary:
            _temporary[-1].add(group)
        self._made[axes] = group
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> "Groups":
        return self


def _all_subsets(mesh: Mesh) -> Iterator[Axes]:
    wide = tuple(axis for axis, size in enumerate(mesh.sizes) if size > 1)
    for count in range(1, len(wide) + 1):
        yield from itertools.combinations(wide, count)
