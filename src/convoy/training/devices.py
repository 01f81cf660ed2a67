"""The ranks of a run as the trainer sees them: who does what once for all, and what they tell each other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from convoy.comm import messages
from convoy.comm.collectives import gather_ints
from convoy.comm.groups import join, leave
from convoy.engine.allocation import keep_freed_memory
from convoy.planner.ranks import Ranks
from convoy.plans.mesh import Axes, Mesh

T = TypeVar("T")


@dataclass
class Devices:
    """This rank among all; without a process group the only one.

    Attributes:
        ranks: all of them, as they are found before there is a plan.
        sample_rank: place on the plan's sample axes: which part of every batch this rank computes.
        num_sample_ranks: parts of a batch.
        leads: whether this rank speaks for its model group, whose ranks compute the same samples together.
    """

    ranks: Ranks = field(default_factory=Ranks)
    sample_rank: int = 0
    num_sample_ranks: int = 1
    leads: bool = True
    _leaders: list[int] = field(default_factory=lambda: [0], repr=False)

    @staticmethod
    def join(timeout_s: float = 600.0) -> tuple["Devices", torch.device]:
        """Join the others by torchrun's variables.

        Args:
            timeout_s: that ranks wait for each other in a collective, unless something ends them earlier.

        Returns:
            The devices, and the torch device of this rank.

        Raises:
            ConvoyError: the others are not to be reached.
        """
        device = join(timeout_s)
        keep_freed_memory(device)
        return Devices(Ranks.here()), device

    @property
    def rank(self) -> int:
        """This one, from 0."""
        return self.ranks.rank

    @property
    def num(self) -> int:
        """How many there are."""
        return self.ranks.num

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
        return self.ranks.broadcast(value)

    def broadcast_tensors(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The named tensors of rank 0, on the CPU; others give None."""
        return messages.broadcast_tensors(tensors, self.ranks.group)

    def gather(self, value: T) -> list[T]:
        """What every rank has, in the order of their numbers."""
        return self.ranks.gather(value)

    def gather_samples(self, value: T) -> list[T]:
        """What each part of the batch gave, in the order of the parts; model groups speak once."""
        return self.of_parts(self.gather(value))

    def of_parts(self, values: list[T]) -> list[T]:
        """Of what every rank has said, that of one rank for each part of the batch."""
        return [values[rank] for rank in self._leaders]

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """The largest of every rank's numbers, one by one."""
        return tuple(map(max, *gather_ints(numbers, self.ranks.group), numbers))

    def any(self, here: bool) -> bool:
        """Whether something holds on any rank."""
        return self.largest(int(here))[0] == 1

    def first(self, work: Callable[[], T]) -> T:
        """Let rank 0 alone do something, and give its result to all; a mistake that it finds is everybody's.

        Raises:
            ConvoyError: rank 0 raised it.
        """
        return self.ranks.first(work)

    def barrier(self) -> None:
        """Wait for all."""
        self.ranks.barrier()
