"""Norms of tensors whose elements are divided over ranks: every element counts once.

LARS and LAMB need them for their trust ratios. They ask through two functions of torch, for every parameter in turn or
for lists of parameters; `WholeNorms` lets these functions answer for the whole tensors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from convoy.comm.collectives import all_gather, all_reduce
from convoy.comm.groups import Groups
from convoy.plans.mesh import Axes


def whole_norms(norms: Sequence[Tensor], axes: Sequence[Axes], groups: Groups, order: float = 2.0) -> list[Tensor]:
    """Norms of whole tensors, as scalars, from those of the parts that ranks have. `axes` are those that divide each
    tensor, none where it is whole on every rank; the same, in the same order, on all ranks."""
    result = list(norms)
    for wide, numbers in _by_axes(axes, groups).items():
        if wide:
            parts = all_gather(torch.stack([norms[number] for number in numbers]).double(), groups.of(wide))
            if math.isinf(order):
                wide_norms = parts.amax(0) if order > 0 else parts.amin(0)
            else:
                wide_norms = parts.sum(0) if order == 0 else parts.pow(order).sum(0).pow(1 / order)
            for number, norm in zip(numbers, wide_norms.to(norms[numbers[0]].dtype).unbind(), strict=True):
                result[number] = norm
    return result


def shard_norms(tensors: Sequence[tuple[Tensor, Axes]], groups: Groups) -> list[Tensor]:
    """The norm of each whole tensor, as scalars, from this rank's parts and the axes that divide them."""
    norms = torch._foreach_norm([tensor for tensor, _ in tensors]) if tensors else ()
    return whole_norms(norms, [axes for _, axes in tensors], groups)


def global_norm(tensors: Sequence[tuple[Tensor, Axes]], groups: Groups) -> Tensor:
    """The norm of all tensors as if they were one vector; arguments as for `shard_norms`. Where nothing is divided it
    is, bit for bit, that of `torch.nn.utils.get_total_norm`."""
    kinds = _by_axes([axes for _, axes in tensors], groups)
    parts = {axes: [tensors[number][0] for number in numbers] for axes, numbers in kinds.items()}
    if set(parts) <= {()}:
        return nn.utils.get_total_norm(parts.get((), []))
    if groups.mesh.stage_axis is not None:  # of tensors that stages have whole: to the bit that of one device
        return nn.utils.get_total_norm(shard_norms(tensors, groups))
    total = torch.zeros((), dtype=torch.float64, device=tensors[0][0].device)
    for axes, shards in parts.items():
        square = nn.utils.get_total_norm(shards).double().square().reshape(1)
        total += all_reduce(square, groups.of(axes))[0]
    return total.sqrt().to(tensors[0][0].dtype)


def clip_grad_norm(parameters: Sequence[tuple[nn.Parameter, Axes]], groups: Groups, max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before. Parameters come
    with the axes that divide them (not those over which gradients were added)."""
    terms = [(p.new_zeros(0) if p.grad is None else p.grad, axes) for p, axes in parameters]
    norm = global_norm(terms, groups)
    nn.utils.clip_grads_with_norm_([parameter for parameter, _ in parameters], max_norm, norm)
    return norm


def _by_axes(axes: Sequence[Axes], groups: Groups) -> dict[Axes, list[int]]:
    """Numbers of the tensors that the same axes divide, axes with one rank left out, in the order of the axes."""
    numbers: dict[Axes, list[int]] = {}
    for number, tensor_axes in enumerate(axes):
        wide = tuple(sorted(axis for axis in set(tensor_axes) if groups.mesh.sizes[axis] > 1))
        numbers.setdefault(wide, []).append(number)
    return dict(sorted(numbers.items()))


class WholeNorms(TorchFunctionMode):
    """Within it, `torch.linalg.norm` and `torch._foreach_norm` give norms over all shards. What is asked for must be
    one of `parameters`, which come with the axes that divide them, or belong to the parameters asked for last, as in
    the `step` of `pytorch_optimizer`'s LARS and Lamb. All ranks must ask for the same."""

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
        candidates = [self._axes.get(id(tensor)) for tensor in tensors]
        axes = [entry for entry in candidates if entry is not None]
        if len(axes) == len(tensors):
            self._last = axes
        elif axes or len(self._last) != len(tensors):
            raise RuntimeError("the optimizer asks for norms of tensors that do not belong to known parameters")
        return shard_norms(list(zip(tensors, self._last, strict=True)), self._groups)
