"""The ranks of a run as the trainer sees them: who does what once for all, and what they tell each other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from convoy.engine import messages
from convoy.engine.allocation import keep_freed_memory
from convoy.engine.collectives import Group, gather_ints, place, size
from convoy.engine.groups import everyone, join, leave
from convoy.errors import ConvoyError
from convoy.plans.mesh import Axes, Mesh

T = TypeVar("T")


@dataclass
class Devices:
    """This rank among all; without a process group the only one.

    Attributes:
        rank: this one, from 0.
        num: how many there are.
        sample_rank: place on the plan's sample axes: which part of every batch this rank computes.
        num_sample_ranks: parts of a batch.
        leads: whether this rank speaks for its model group, whose ranks compute the same samples together.
    """

    rank: int = 0
    num: int = 1
    sample_rank: int = 0
    num_sample_ranks: int = 1
    leads: bool = True
    _group: Group = field(default=None, repr=False)
    _leaders: list[int] = field(default_factory=lambda: [0], repr=False)

    @staticmethod
    def join() -> tuple["Devices", torch.device]:
        """Join the others by torchrun's variables.

        Returns:
            The devices, and the torch device of this rank.

        Raises:
            ConvoyError: the others are not to be reached.
        """
        device = join()
        keep_freed_memory(device)
        group = everyone()
        return Devices(place(group), size(group), _group=group), device

    @staticmethod
    def leave() -> None:
        """Leave the others at the end of a run."""
        leave()

    def follow(self, mesh: Mesh, axes: Axes) -> None:
        """Take this rank's place on a mesh whose `axes` divide the samples."""
        assert mesh.num_devices == self.num
        places = [mesh.coordinates(rank) for rank in range(self.num)]
        self.num_sample_ranks = mesh.size(axes)
        self.sample_rank = mesh.index(places[self.rank], axes)
        self._leaders = [
            next(rank for rank, place in enumerate(places) if mesh.index(place, axes) == part)
            for part in range(self.num_sample_ranks)
        ]
        self.leads = self.rank in self._leaders

    def broadcast(self, value: T) -> T:
        """What rank 0 has."""
        return messages.broadcast_object(value, self._group)

    def broadcast_tensors(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The named tensors of rank 0, on the CPU; others give None."""
        return messages.broadcast_tensors(tensors, self._group)

    def gather(self, value: T) -> list[T]:
        """What every rank has, in the order of their numbers."""
        return messages.gather_objects(value, self._group)

    def gather_samples(self, value: T) -> list[T]:
        """What each part of the batch gave, in the order of the parts; model groups speak once."""
        values = self.gather(value)
        return [values[rank] for rank in self._leaders]

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """The largest of every rank's numbers, one by one."""
        return tuple(map(max, *gather_ints(numbers, self._group), numbers))

    def any(self, here: bool) -> bool:
        """Whether something holds on any rank."""
        return self.largest(int(here))[0] == 1

    def first(self, work: Callable[[], T]) -> T:
        """Let rank 0 alone do something, and give its result to all; a mistake that it finds is everybody's.

        Raises:
            ConvoyError: rank 0 raised it.
        """
        if self.num == 1:
            return work()
        answer: tuple[bool, Any] = (True, None)
        if self.rank == 0:
            try:
                answer = (True, work())
            except ConvoyError as error:
                answer = (False, str(error))
        done, value = self.broadcast(answer)
        if not done:
            raise ConvoyError(value)
        found: T = value
        return found

    def barrier(self) -> None:
        """Wait for all."""
        gather_ints([0], self._group)
