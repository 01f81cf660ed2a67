"""A rank's share of a checkpoint: copied to the memory of the host, then written beside the training."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from convoy.checkpoint.store import Draft

State = Literal["running", "written", "failed"]
_LOOK_S = 0.02


def snapshot(tensors: Iterable[tuple[str, Tensor]], number: int | None, num_shards: int) -> dict[str, Tensor]:
    """Copy the tensors that are this rank's to write. All ranks call it with the same names in the same order.

    Each tensor goes whole to the shard that has the fewest bytes so far: for n shards none is larger than an even
    share and the largest tensor (Graham, 1966: list scheduling). A tensor may be made only as it is asked for, so that
    no rank ever has to have all of them.

    Args:
        tensors: whole, by serial names.
        number: of this rank's shard; None where it writes none.
        num_shards: how many there are.

    Returns:
        Copies on the CPU, which nobody else changes.
    """
    sizes = [0] * num_shards
    mine: dict[str, Tensor] = {}
    devices: set[torch.device] = set()
    for name, tensor in tensors:
        shard = sizes.index(min(sizes))
        sizes[shard] += tensor.nbytes
        if shard == number:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            mine[name] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            devices |= {tensor.device} if tensor.is_cuda else set()
    for device in devices:
        torch.cuda.synchronize(device)
    return mine


def stamp(path: Path) -> tuple[int, int, int] | None:
    """What tells a file or folder from one of the same name on another machine; None where it is not seen here."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class Writing:
    """Writes a rank's shard; on the rank that has `put`, waits for the shards of the others and then calls it.

    The thread talks to other ranks through the files of the draft alone, never through torch.distributed, whose calls
    belong to the training. A shard that cannot be written is not said there, as the disk may be full: the rank's own
    thread knows it, and the ranks agree on that when they next ask each other.

    Attributes:
        failure: what went wrong; None where nothing did.
        seconds: how long it took, once it has ended.
        processor_s: how much of the processor.
    """

    def __init__(
        self,
        draft: Draft,
        number: int | None,
        tensors: Mapping[str, Tensor],
        put: Callable[[], None] | None = None,
    ) -> None:
        """Begin.

        Args:
            draft: the checkpoint.
            number: of this rank's shard; None where it writes none.
            tensors: that are in it.
            put: makes the draft a checkpoint when it is complete; on one rank.
        """
        self.draft = draft
        self.failure: Exception | None = None
        self.seconds = 0.0
        self.processor_s = 0.0
        self._number, self._tensors, self._put = number, tensors, put
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="convoy-checkpoint", daemon=True)
        self._thread.start()

    @property
    def state(self) -> State:
        """How it stands."""
        if self._thread.is_alive():
            return "running"
        return "failed" if self.failure is not None else "written"

    def wait(self, timeout_s: float) -> None:
        """Wait for its end, but not for longer."""
        self._thread.join(timeout_s)

    def give_up(self) -> None:
        """Another rank has failed: do not wait for its shard any more."""
        self._given_up.set()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            if self._number is not None:
                self.draft.add(self._number, self._tensors)
            self._tensors = {}
            self.processor_s = time.thread_time()
            if self._put is not None and self._others():
                self._put()
        except Exception as error:
            self.failure = error
            self._tensors = {}
        self.seconds = time.perf_counter() - began

    def _others(self) -> bool:
        """Wait for the shards of the others; whether they came."""
        while not self.draft.complete():
            if self._given_up.wait(_LOOK_S):
                return False
        return True
