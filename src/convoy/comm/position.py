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


_OUTSIDE = {
    "start": "before the first update",
    "reading": "reading a checkpoint",
    "weights": "writing the weights",
    "report": "writing the report",
}
_WORDS = {
    "data": "waiting for data",
    "input": "moving its data to the device",
    "forward": "forward pass",
    "backward": "backward pass",
    "gradient": "exchange of gradients",
    "update": "optimizer",
    "rest": "between the parts of the update",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
}


def place_in_words(update: int, part: str, layer: str) -> str:
    """For people: `update 7, forward pass of layer conv1`.

    Args:
        update: updates done before.
        part: of the update, or outside of all.
        layer: empty for none; a number behind `#` tells calls of one layer apart.
    """
    if part in _OUTSIDE:
        return _OUTSIDE[part]
    of_layer = f" of layer {layer.partition('#')[0]}" if layer else ""
    return f"update {update + 1:,}, {_WORDS.get(part, part)}{of_layer}"


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
