"""Taking some indices of a dimension."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from convoy.plans.layout import Indices


def taking(dim: int, places: Indices, size: int) -> Callable[[Tensor], Tensor]:
    """Gives the entries at these places of a dimension of `size`, as a view where they are evenly spaced."""
    if isinstance(places, range):
        if places == range(size):
            return lambda x: x
        return lambda x: x.narrow(dim, places.start, len(places))
    steps = {b - a for a, b in pairwise(places)}
    if len(steps) == 1 and min(steps) > 0:
        key = (*(slice(None),) * dim, slice(places[0], places[-1] + 1, steps.pop()))
        return lambda x: x[key]
    return picking(dim, torch.tensor(places))


def picking(dim: int, places: Tensor) -> Callable[[Tensor], Tensor]:
    """Gives the entries at these places of a dimension, in any order and number."""
    by_device: dict[torch.device, Tensor] = {}

    def pick(x: Tensor) -> Tensor:
        if x.device not in by_device:
            by_device[x.device] = places.to(x.device)
        return x.index_select(dim, by_device[x.device])

    return pick
