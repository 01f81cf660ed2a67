"""A backend that waits as NCCL does: `wait` returns at once, and the device stands still for a rank that does not come.

    def body():
        stuck.join(limit_s=6)
        all_reduce(x, Groups(MESH).of((0,)))
        stuck.synchronize()          # as torch.cuda.synchronize

Nothing is added up. What was enqueued is done once all ranks of the group have enqueued as many; to abort a group ends
all that it waits for, without an error, as kernels do. Whoever synchronizes gets one after the limit.
"""

import os
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

NAME = "stuck"
_limit_s = 0.0
_groups: "weakref.WeakSet[Stuck]" = weakref.WeakSet()


class StuckWork(dist._Work):
    """What was enqueued as one of many."""

    def __init__(self, group: "Stuck", number: int) -> None:
        super().__init__()
        self.group, self.number = group, number

    def is_completed(self) -> bool:
        return self.group.done(self.number)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class Stuck(dist.ProcessGroup):
    """Counts, in the store, what each rank has enqueued."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store, self.enqueued, self.aborted, self.name = store.clone(), 0, False, "unnamed"
        self.options = SimpleNamespace(_timeout=timeout)
        _groups.add(self)

    def done(self, number: int) -> bool:
        keys = [f"{number}/{rank}" for rank in range(self.size())]
        return self.aborted or all(self.store.check([key]) for key in keys)

    def _enqueue(self, *args: Any, **kwargs: Any) -> StuckWork:
        if self.aborted:
            raise RuntimeError("the communicator was aborted")
        self.enqueued += 1
        self.store.set(f"{self.enqueued}/{self.rank()}", "")
        return StuckWork(self, self.enqueued)

    allreduce = allgather_into_tensor_coalesced = _allgather_base = alltoall_base = alltoall = _enqueue
    broadcast = _reduce_scatter_base = barrier = _enqueue

    @property
    def group_name(self) -> str:
        self.name = dist.distributed_c10d._world.pg_names.get(self, self.name)
        return self.name

    def get_group_store(self) -> dist.Store:
        return self.store

    def is_busy(self) -> bool:
        return self.enqueued > 0 and not self.done(self.enqueued)

    def abort(self) -> None:
        """It takes until the device has come to an end with the other groups too, as NCCL's may."""
        self.aborted = True
        until = time.monotonic() + _limit_s
        while any(group.is_busy() for group in list(_groups)) and time.monotonic() < until:
            time.sleep(0.01)

    def shutdown(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        """Until all is done that was enqueued here."""
        until = time.monotonic() + _limit_s
        while self.is_busy():
            if time.monotonic() > until:
                raise RuntimeError(f"a collective took longer than {_limit_s} s")
            time.sleep(0.01)

    def _get_backend(self, device: torch.device) -> "Stuck":
        return self

    def getBackendName(self) -> str:  # noqa: N802 (torch asks for it)
        return NAME


def synchronize() -> None:
    """Wait for the device."""
    for group in list(_groups):
        group.synchronize()


def groups() -> list[Stuck]:
    """Those that this process has made."""
    return list(_groups)


def join(limit_s: float) -> None:
    """Join the ranks of `run_ranks(…, join=False)`; all that is not asked to go through gloo goes through this."""
    global _limit_s
    _limit_s = limit_s
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, Stuck, devices=["cpu"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(NAME, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
