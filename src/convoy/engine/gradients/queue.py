"""Starts messages in their order, each as soon as its gradients are ready.

All ranks must start the same collectives in the same order, whatever becomes ready first.
"""

from collections.abc import Callable, Sequence

from convoy.engine.gradients.buckets import Bucket


class MessageQueue:
    """Calls `start(number)` for one bucket after the other."""

    def __init__(self, buckets: Sequence[Bucket], start: Callable[[int], None]) -> None:
        self._buckets = buckets
        self._start = start
        self._bucket_of = {member: number for number, bucket in enumerate(buckets) for member in bucket.members}
        self.begin()

    def begin(self) -> None:
        """Nothing is ready, nothing started."""
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._next = 0

    def ready(self, member: int) -> None:
        """Note a gradient and start what can be started."""
        self._missing[self._bucket_of[member]] -= 1
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._next += 1
            self._start(self._next - 1)

    def rest(self) -> None:
        """Start all that is left, ready or not."""
        while self._next < len(self._buckets):
            self._next += 1
            self._start(self._next - 1)
