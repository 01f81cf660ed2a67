"""Numbers that all ranks agree on."""

from collections.abc import Sequence

import torch

from convoy.engine.collectives import Group, gather_ints


def largest(numbers: Sequence[int], group: Group, device: torch.device) -> list[int]:
    """The largest of each number on any rank."""
    return [max(column) for column in zip(*gather_ints(numbers, group, device), strict=True)]


def of_first_rank(numbers: Sequence[int], group: Group, device: torch.device) -> list[int]:
    """Rank 0's numbers."""
    return gather_ints(numbers, group, device)[0]
