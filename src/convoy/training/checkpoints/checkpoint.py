"""What a checkpoint is: the state of a run by names, independent of the devices that it ran on."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from convoy.errors import ConvoyError


class DamagedCheckpointError(ConvoyError):
    """A checkpoint that is truncated, altered or not Convoy's; the message names it."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` weight updates.

    Attributes:
        step: weight updates done.
        identity: of the run: checkpoints of others are not taken.
        tensors: everything that is a tensor, whole and by its serial name.
        values: everything else, as JSON can hold it.
    """

    step: int
    identity: str
    tensors: dict[str, Tensor]
    values: dict[str, Any]
