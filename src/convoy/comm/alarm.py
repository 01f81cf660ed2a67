"""What ranks try together: how all of them learn soon that one has failed, of what, and what to change.

A rank that fails leaves the others in collectives. Over gloo and shared memory these get an error as soon as it closes
its end. NCCL's kernels wait on until the time limit of their group, and so does the host, in whatever synchronizes with
them. So a rank that fails says so under a key of the store by which the ranks have met, and a thread of every other
rank aborts the groups that were made for the try (`Alarm`).
"""

import contextlib
import threading
from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from convoy.comm.groups import Temporary, only_gloo
from convoy.comm.memory import NEEDS_LESS, lack_of_memory
from convoy.comm.position import current
from convoy.errors import ConvoyError, MachineError, RankFailedError

_POLL_S = 0.1


class Alarm:
    """While entered, a rank that leaves with an error calls the others out of the groups of a try, whose name no other
    try has. Over gloo alone there is nothing to do: closed connections say the same, and torch cannot abort its
    groups."""

    def __init__(self, name: str, groups: Temporary) -> None:
        self._name, self._groups = name, groups
        self._over = threading.Event()
        self._store: Store | None = None

    def __enter__(self) -> Self:
        if dist.is_initialized() and not only_gloo():
            world: Any = dist.group.WORLD
            store = world.get_group_store().clone()  # the other one serves one thread at a time
            self._store = PrefixStore(self._name, store)
            self._thread = threading.Thread(target=self._listen, daemon=True, name="convoy-alarm")
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        if self._store is None:
            return
        self._thread.join()
        if error is not None:
            with contextlib.suppress(RuntimeError):  # who keeps the store has ended, and all know it
                self._store.set("failed", "")

    def _listen(self) -> None:
        assert self._store is not None
        with contextlib.suppress(RuntimeError):
            while not self._over.wait(_POLL_S):
                if self._store.check(["failed"]):
                    self._groups.abort()
                    return


_LOST_MEMORY, _MISTAKE, _MACHINE, _BROKEN, _CUT_OFF = range(5)
_ENDED = ("closed by peer", "reset by peer", "Broken pipe", "aborted")


@dataclass(frozen=True)
class Cause:
    """Why a rank has failed; the lowest `sort` among several ranks is the cause of the others' failures."""

    sort: int
    text: str

    @staticmethod
    def of(error: Exception) -> "Cause":
        """Why this rank has just failed."""
        if (needed := lack_of_memory(error)) is not None:
            layer = current.layer.partition("#")[0]
            return Cause(_LOST_MEMORY, (f", in layer {layer}" if layer else "") + needed)
        if isinstance(error, ConvoyError):
            return Cause(_MACHINE if isinstance(error, MachineError) else _MISTAKE, str(error))
        first_line = str(error).partition("\n")[0].rstrip(".")
        cut_off = isinstance(error, RuntimeError) and any(words in str(error) for words in _ENDED)
        return Cause(_CUT_OFF if cut_off else _BROKEN, f"{type(error).__name__}: {first_line}")

    def error(self, rank: int, what: str = "") -> ConvoyError:
        """The error that every rank raises when `rank` has failed in `what` all tried together, worded to follow
        "while"."""
        attempt = f" while {what}" if what else ""
        if self.sort == _MISTAKE:
            return ConvoyError(self.text)
        if self.sort == _MACHINE:
            return MachineError(self.text)
        if self.sort == _LOST_MEMORY:
            return RankFailedError(f"rank {rank} ran out of memory{attempt}{self.text}; {NEEDS_LESS}", True)
        return RankFailedError(f"rank {rank} failed{attempt} ({self.text}): -v shows where")
