"""The tasks of a step: what runs on which stream of which rank, for how long, and after what."""

from dataclasses import dataclass
from typing import Literal

Stream = Literal["compute", "transfers", "gradients"]
"""`transfers` carries what layers wait for, `gradients` what is added while others compute."""

Kind = Literal["around", "forward", "backward", "copy", "transfer", "gradient", "update"]
"""What a task is for. `around`: input and loss, outside of the network. `copy`: packing and adding on the rank itself,
for the sake of what is sent. `transfer` and `gradient` are messages."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work. The tasks of a stream run in the order of the list that they stand in.

    Attributes:
        rank: that does it.
        layer: whose it is, empty where it belongs to none.
        name: of the call, the value or the parameter.
        seconds: that it takes while nobody is in its way.
        after: places in the list of the tasks that must be done before it begins.
        meeting: tasks of several ranks with one number are one collective: they begin when all ranks are there, and
            end together. -1 for what a rank does by itself.
        cpu_share: the part of the rank's computing that it takes while it runs.
        num_bytes: that it is about, for messages.
    """

    rank: int
    stream: Stream
    kind: Kind
    layer: str
    name: str
    seconds: float
    after: tuple[int, ...] = ()
    meeting: int = -1
    cpu_share: float = 0.0
    num_bytes: int = 0
