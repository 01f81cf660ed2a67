"""A checkpoint of this rank on its way to disk, in a thread beside the training."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from convoy.training.checkpoints.draft import Draft

State = Literal["running", "written", "failed"]
_LOOK_S = 0.02


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
