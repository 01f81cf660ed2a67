"""Where the ranks of a configuration run: on places of an emulated cluster, on blocks of cores, or on GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.experiments.scaling.ranks.processes import Place, Seat
from convoy.launch.cores import own_cores


@dataclass(frozen=True)
class Seats:
    """All that there are.

    Attributes:
        cores_per_device: on a CPU; 0 on others, and in an emulated cluster.
        places: of an emulated cluster, one for each device.
    """

    cores_per_device: int
    places: Sequence[Place] = ()

    def of(self, num: int, round_: int = 1, first: int = 0) -> list[Seat]:
        """Those of some ranks.

        Args:
            num: how many ranks.
            round_: from round to round they move on by one over equal devices.
            first: the device of rank 0, counted from 0.
        """
        if self.places:
            return [Seat(rank, num, place=self.places[first + rank]) for rank in range(num)]
        each = self.cores_per_device
        if not each:
            return [Seat(rank, num) for rank in range(num)]
        cores = own_cores()
        blocks = len(cores) // each
        begins = [(rank + first + round_ - 1) % blocks * each for rank in range(num)]
        return [Seat(rank, num, tuple(cores[begin : begin + each])) for rank, begin in enumerate(begins)]
