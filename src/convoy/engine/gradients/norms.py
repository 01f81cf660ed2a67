"""Norms of tensors whose elements are divided over ranks: every element counts once."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from convoy.engine.collectives import all_reduce
from convoy.engine.groups import Groups
from convoy.plans.mesh import Axes


def shard_norms(tensors: Sequence[tuple[Tensor, Axes]], groups: Groups) -> list[Tensor]:
    """The norm of each whole tensor, as scalars.

    Args:
        tensors: what this rank has of each, and the axes that divide it; none where it is whole on every rank. The same
            axes, in the same order, on all ranks.
        groups: of this rank.
    """
    norms = list(torch._foreach_norm([tensor for tensor, _ in tensors])) if tensors else []
    for axes, numbers in _by_axes(tensors, groups).items():
        if axes:
            squares = torch.stack([norms[number] for number in numbers]).double().square()
            whole = all_reduce(squares, groups.of(axes)).sqrt().to(norms[numbers[0]].dtype)
            for number, norm in zip(numbers, whole.unbind(), strict=True):
                norms[number] = norm
    return norms


def global_norm(tensors: Sequence[tuple[Tensor, Axes]], groups: Groups) -> Tensor:
    """The norm of all tensors as if they were one vector; arguments as for `shard_norms`.

    Where nothing is divided it is, bit for bit, that of `torch.nn.utils.get_total_norm`.
    """
    kinds = _by_axes(tensors, groups)
    parts = {axes: [tensors[number][0] for number in numbers] for axes, numbers in kinds.items()}
    if set(parts) <= {()}:
        return nn.utils.get_total_norm(parts.get((), []))
    total = torch.zeros((), dtype=torch.float64, device=tensors[0][0].device)
    for axes, own in parts.items():
        square = nn.utils.get_total_norm(own).double().square().reshape(1)
        total += all_reduce(square, groups.of(axes))[0]
    return total.sqrt().to(tensors[0][0].dtype)


def clip_grad_norm(
    parameters: Sequence[tuple[nn.Parameter, Axes]],
    groups: Groups,
    max_norm: float,
    own: Mapping[nn.Parameter, tuple[Tensor, Axes]] | None = None,
) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before.

    Args:
        parameters: each with the axes that divide it (not those over which its gradient was added).
        groups: of this rank.
        max_norm: as in `torch.nn.utils.clip_grad_norm_`.
        own: this rank's pieces of gradients that are divided over ranks with the same parameter, and over which axes
            (`GradientReducer.own_gradients`).
    """
    terms: list[tuple[Tensor, Axes]] = []
    for parameter, axes in parameters:
        whole = parameter.new_zeros(0) if parameter.grad is None else parameter.grad
        piece, more = (own or {}).get(parameter, (whole, ()))
        terms.append((piece, (*axes, *more)))
    norm = global_norm(terms, groups)
    nn.utils.clip_grads_with_norm_([parameter for parameter, _ in parameters], max_norm, norm)
    return norm


def _by_axes(tensors: Sequence[tuple[Tensor, Axes]], groups: Groups) -> dict[Axes, list[int]]:
    """Numbers of the tensors that the same axes divide, axes with one rank left out, in the order of the axes."""
    found: dict[Axes, list[int]] = {}
    for number, (_, axes) in enumerate(tensors):
        wide = tuple(sorted(axis for axis in set(axes) if groups.mesh.sizes[axis] > 1))
        found.setdefault(wide, []).append(number)
    return dict(sorted(found.items()))
