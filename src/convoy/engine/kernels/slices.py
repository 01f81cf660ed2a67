"""Taking some indices of a dimension."""

from itertools import pairwise

import torch
from torch import Tensor

from convoy.plans.layout import Indices


def take(x: Tensor, dim: int, places: Indices) -> Tensor:
    """The entries of `x` at these places of a dimension, as a view where they are evenly spaced."""
    if isinstance(places, range):
        return x if places == range(x.shape[dim]) else x.narrow(dim, places.start, len(places))
    steps = {b - a for a, b in pairwise(places)}
    if len(steps) == 1 and min(steps) > 0:
        step = steps.pop()
        return x[(slice(None),) * dim + (slice(places[0], places[-1] + 1, step),)]
    return x.index_select(dim, torch.tensor(places, device=x.device))
