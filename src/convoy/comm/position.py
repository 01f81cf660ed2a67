"""Where this process is in its training: kept all the time, as it is asked for when nothing moves any more."""

import time
from dataclasses import dataclass
from typing import Literal

Part = Literal[
    "start",
    "reading",
    "data",
    "input",
    "forward",
    "backward",
    "gradient",
    "update",
    "rest",
    "evaluation",
    "checkpoint",
    "weights",
    "report",
]
"""What a rank does; `reading` is of a checkpoint, `gradient` their exchange, `rest` the loss and all else."""


@dataclass(slots=True)
class Position:
    """The last thing that began; one for each process.

    Attributes:
        update: weight updates done before it.
        part: of the update.
        layer: the layer that it belongs to; empty for none.
        collective: what this rank waits for others in; empty where it does not wait.
        moved: when it began, in seconds of `time.monotonic`.
        waited_s: seconds waited for other ranks so far.
    """

    update: int = 0
    part: Part = "start"
    layer: str = ""
    collective: str = ""
    moved: float = 0.0
    waited_s: float = 0.0

    def to(self, part: Part) -> None:
        """Another part begins, outside of all layers."""
        self.part = part
        self.layer = ""
        self.moved = time.monotonic()

    def at(self, layer: str) -> None:
        """A layer begins."""
        self.layer = layer
        self.moved = time.monotonic()


current = Position()
