"""For what a program is made: a mode, sizes and types."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Kind = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Signature:
    """What a program is made for.

    Attributes:
        training: the mode.
        samples: of every sample rank.
        inputs: the inputs' sizes but for the samples, and their types.
        as_given: whether the outputs stay as the last layers give them.
    """

    training: bool
    samples: tuple[int, ...]
    inputs: tuple[Kind, ...]
    as_given: bool = False


def kinds(inputs: Sequence[Tensor]) -> tuple[Kind, ...]:
    """Sizes but for the samples, and types."""
    return tuple((tuple(x.shape[1:]), x.dtype) for x in inputs)
