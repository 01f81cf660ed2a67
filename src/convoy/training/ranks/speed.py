"""How fast each rank is, measured in the first updates of a run, for `--shares auto`."""

from dataclasses import dataclass, field

from convoy.training.ranks.devices import Devices
from convoy.training.ranks.division import Division, soonest

WARM_UP, MEASURED = 3, 5


@dataclass
class SpeedTest:
    """Takes the time of a rank's microbatches.

    Gradients are exchanged apart from it. What layers exchange is in it, so under plans that divide layers, or with
    batch norm over the global batch, ranks that wait for others look slower than they are.
    """

    updates: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether enough updates were seen."""
        return self.updates >= WARM_UP + MEASURED

    def add(self, seconds: float) -> None:
        """Count one update: what one microbatch took."""
        self.updates += 1
        if self.updates > WARM_UP:
            self.seconds.append(seconds)

    def shares(self, devices: Devices, division: Division) -> tuple[Division, list[float]]:
        """The division by which the slowest rank ends soonest; the same on every rank. All ranks call it.

        Returns:
            The division, and milliseconds that a microbatch takes each part of the batch.
        """
        median = sorted(self.seconds)[len(self.seconds) // 2]
        said = devices.gather((devices.sample_rank, median))
        times = [max(s for part, s in said if part == rank) for rank in range(devices.num_sample_ranks)]
        if min(times) <= 0:  # a rank's only pass is the one that waits for the others
            return division, [1e3 * time for time in times]
        return Division(division.sizes, soonest(len(division.sizes), times)), [1e3 * time for time in times]
