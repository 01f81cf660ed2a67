"""Whole tensors and the parts of them that ranks hold."""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from convoy.comm.groups import Groups
from convoy.comm.redistribution import redistribute
from convoy.plans.layout import WHOLE, Layout
from convoy.plans.mesh import Coordinates, Mesh
from convoy.plans.transfer import transfer


def cut(tensor: Tensor, layout: Layout, mesh: Mesh, coordinates: Coordinates) -> Tensor:
    """A rank's own part of a whole tensor: a copy, or the tensor itself where the rank holds all of it."""
    if not layout.splits:
        return tensor
    if not tensor.dim():  # one number, which one stage has
        part_of_one = cut(tensor.view(1), layout, mesh, coordinates)
        return part_of_one.view(()) if len(part_of_one) else part_of_one
    memory_format = _memory_format(tensor)
    for dim, _ in layout.splits:
        part = layout.parts(dim, mesh, coordinates, tensor.shape[dim])
        if isinstance(part, range):
            tensor = tensor.narrow(dim, part.start, len(part))
        else:
            tensor = tensor.index_select(dim, torch.tensor(part, device=tensor.device))
    return tensor.clone(memory_format=memory_format)


def _memory_format(tensor: Tensor) -> torch.memory_format:
    """Plain or channels innermost, by its strides alone: a filter of 1 × 1 counts as contiguous in both, and one that
    lies in the wrong one has the convolution turn its images round."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    plain = tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
    return (
        torch.contiguous_format
        if plain or channels_last is None or not tensor.is_contiguous(memory_format=channels_last)
        else channels_last
    )


def collect(tensor: Tensor, layout: Layout, shape: Sequence[int], groups: Groups) -> Tensor:
    """The whole tensor of `shape` on all ranks, which all call it, from every rank's part; `copied` plays no role."""
    if layout.splits and not shape:
        return collect(tensor.reshape(-1), layout, (1,), groups).view(())
    steps = transfer(Layout(layout.splits), WHOLE, groups.mesh, shape)
    if not steps:
        return tensor.detach().clone()
    with torch.no_grad():
        return redistribute(steps, groups.mesh, groups.coordinates, groups, shape)(tensor.detach()).clone()


def part_name(
    layouts: Mapping[str, Layout],
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    groups: Groups,
    plan: object,
) -> str:
    """Which parts of a network's tensors this rank has, for people and `same_part`; `shapes` are the whole ones."""
    parts = [
        (name, dim, list(layout.parts(dim, groups.mesh, groups.coordinates, (shapes[name][0] or (1,))[dim])))
        for name, layout in sorted(layouts.items())
        for dim, _ in layout.splits
    ]
    plan_text = " ".join(str(plan).split())
    digest = zlib.crc32(repr(parts).encode())
    return f"part {digest:08x} (rank {groups.rank} of {groups.mesh.num_devices} under plan {plan_text})"


def same_part(name: str, second_name: str) -> bool:
    """Whether two of these names are of the same numbers of the same tensors."""
    return name.partition(" (")[0] == second_name.partition(" (")[0]
