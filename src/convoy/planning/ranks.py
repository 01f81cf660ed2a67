"""The ranks that are there while a plan is made: those that will train, or one process by itself."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from convoy.engine import messages
from convoy.engine.collectives import Group, gather_ints, place, size
from convoy.engine.groups import everyone
from convoy.errors import ConvoyError
from convoy.plans.mesh import Mesh

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Who measures.

    Attributes:
        rank: this one.
        num: how many there are.
        on_host: how many of them share this host.
        group: through which they talk.
    """

    rank: int = 0
    num: int = 1
    on_host: int = 1
    group: Group = field(default=None, repr=False)

    @staticmethod
    def here(on_host: int | None = None) -> "Ranks":
        """Those that have joined; all of them call it. Who shares a host is what the launcher says, unless given."""
        group = everyone()
        return Ranks(place(group), size(group), on_host or _on_host(size(group)), group)

    def places(self, mesh: Mesh) -> list[int]:
        """The place on a mesh that each of them takes while it rehearses: spread out, where the mesh has more."""
        return [rank * mesh.num_devices // self.num for rank in range(self.num)]

    def barrier(self) -> None:
        """Wait for all."""
        gather_ints([0], self.group)

    def agree(self, done: bool) -> bool:
        """Whether all say so."""
        return all(row[0] for row in gather_ints([int(done)], self.group))

    def broadcast(self, value: T) -> T:
        """What rank 0 has."""
        return messages.broadcast_object(value, self.group)

    def gather(self, value: T) -> list[T]:
        """What every rank says."""
        return messages.gather_objects(value, self.group)

    def first(self, work: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank.

        Raises:
            ConvoyError: it was rank 0's mistake.
            RuntimeError: rank 0 failed otherwise; there, what it failed with.
        """
        if self.num == 1:
            return work()
        found: T | ConvoyError | RuntimeError | None = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                found = work()
            except ConvoyError as error:
                found = error
            except Exception as error:  # the others wait for an answer
                failure = error
                found = RuntimeError(f"rank 0 failed: {type(error).__name__}: {error}")
        known = self.broadcast(found)
        if failure is not None:
            raise failure
        if isinstance(known, ConvoyError | RuntimeError):
            raise known
        return cast(T, known)


def _on_host(ranks: int) -> int:
    """How many of the ranks share this host."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and 0 < int(text) <= ranks else ranks
