"""What a rank is asked to do when a configuration has its turn, and what it answers."""

from dataclasses import dataclass, field

from convoy.experiments.scaling.study.made_data import Made
from convoy.experiments.scaling.visits.stopwatch import Lap
from convoy.training import Recipe


@dataclass(frozen=True)
class Task:
    """A visit to a configuration.

    Attributes:
        kind: of the configuration.
        recipe: of the configuration, with its devices and its plan.
        made: made-up pictures; None for those of the recipe.
        device_type: `cpu` or `cuda`.
        updates: that are timed.
        warm_up: that come before them.
    """

    kind: str
    recipe: Recipe
    made: Made | None
    device_type: str
    updates: int
    warm_up: int

    @property
    def num_devices(self) -> int:
        """Ranks of the configuration."""
        return self.recipe.parallel.devices or 1


@dataclass(frozen=True)
class RankTimes:
    """What a rank measured.

    Attributes:
        laps: of the timed updates.
        memory: bytes at the peak, beyond what the process had before the network was built.
        loss: this rank's part of the mean loss of the first update; the parts of all ranks add up to it.
        overhead: seconds that taking the time has added to an update.
        without: seconds of updates without exchange of gradients, where that is how the exchange is measured.
        microbatches: of an update, that were this rank's.
    """

    laps: list[Lap]
    memory: int
    loss: float
    overhead: float
    without: list[float] = field(default_factory=list)
    microbatches: int = 0
