"""LARS and LAMB on parameters that are divided over ranks.

Their trust ratios need norms of whole tensors. The optimisers ask for them through two functions of torch, for every
parameter in turn or for lists of parameters; here these functions answer for the whole tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from convoy.engine.gradients.norms import shard_norms
from convoy.engine.groups import Groups
from convoy.plans.mesh import Axes


class WholeNorms(TorchFunctionMode):
    """Within it, `torch.linalg.norm` and `torch._foreach_norm` give norms over all shards.

    What is asked for must be a parameter, or belong to the parameters asked for last, as in the `step` of
    `pytorch_optimizer`'s LARS and Lamb. All ranks must ask for the same.

    Args:
        parameters: each with the axes that divide it.
        groups: of this rank.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, Axes]], groups: Groups) -> None:
        super().__init__()
        self._axes: Mapping[int, Axes] = {id(parameter): axes for parameter, axes in parameters}
        self._groups = groups
        self._last: list[Axes] = []

    def __torch_function__(
        self, function: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch._foreach_norm:
            return tuple(self._norms(args[0]))
        if function is torch.linalg.norm:
            return self._norms([args[0]])[0]
        return function(*args, **(kwargs or {}))

    def _norms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        known = [self._axes.get(id(tensor)) for tensor in tensors]
        axes = [found for found in known if found is not None]
        if len(axes) == len(tensors):
            self._last = axes
        elif axes or len(self._last) != len(tensors):
            raise RuntimeError("the optimiser asks for norms of tensors that do not belong to known parameters")
        return shard_norms(list(zip(tensors, self._last, strict=True)), self._groups)
