"""The ranks that are there while a plan is made: those that will train, or one process by itself."""

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
    """

    rank: int = 0
    num: int = 1
    on_host: int = 1
    _group: Group = field(default=None, repr=False)

    @staticmethod
    def here(on_host: int | None = None) -> "Ranks":
        """Those that have joined; all of them call it."""
        group = everyone()
        return Ranks(place(group), size(group), on_host or size(group), group)

    def places(self, mesh: Mesh) -> list[int]:
        """The place on a mesh that each of them takes while it rehearses: spread out, where the mesh has more."""
        return [rank * mesh.num_devices // self.num for rank in range(self.num)]

    def barrier(self) -> None:
        """Wait for all."""
        gather_ints([0], self._group)

    def gather(self, value: T) -> list[T]:
        """What every rank says."""
        return messages.gather_objects(value, self._group)

    def first(self, work: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank.

        Raises:
            ConvoyError: it was rank 0's mistake.
        """
        found: T | ConvoyError | None = None
        if self.rank == 0:
            try:
                found = work()
            except ConvoyError as error:
                found = error
        known = messages.broadcast_object(found, self._group)
        if isinstance(known, ConvoyError):
            raise known
        return cast(T, known)
