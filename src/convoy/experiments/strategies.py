"""The look of strategies and of kinds of work on the planner's page: a letter, a colour and a word for each."""

from dataclasses import dataclass

from convoy.planning.engine_time import ENGINE


@dataclass(frozen=True)
class Look:
    """How something is drawn.

    Attributes:
        key: what the style sheet calls its colour.
        letter: so that it reads without colour.
        word: for the legend.
    """

    key: str
    letter: str
    word: str


STRATEGIES = {
    "sample": Look("sample", "S", "sample: divides the batch"),
    "filter": Look("filter", "F", "filter: divides its outputs' channels"),
    "channel": Look("channel", "C", "channel: divides its inputs' channels"),
    "height": Look("height", "H", "height: divides the rows"),
    "width": Look("width", "W", "width: divides the columns"),
    "replicate": Look("replicate", "R", "replicate: whole on every device"),
}

KINDS = {
    "around": Look("around", "", "input and loss"),
    "forward": Look("forward", "", "forward"),
    "backward": Look("backward", "", "backward"),
    "copy": Look("packing", "", "packing for messages"),
    "update": Look("update", "", "optimiser"),
    "engine": Look("engine", "", ENGINE),
    "transfer": Look("transfer", "", "messages between layers"),
    "gradient": Look("gradient", "", "gradients"),
}

PARTS = {
    "input": "around",
    "forward": "forward",
    "loss and the rest of a pass": "around",
    "backward": "backward",
    "packing for messages": "packing",
    "exposed communication": "transfer",
    "optimiser": "update",
    ENGINE: "engine",
    "idle": "idle",
}
"""The colours of the parts of an update's time."""
