"""Whole tensors and the parts of them that ranks hold; networks that rank 0 builds for all.

Of a deferred network the other ranks have shapes without numbers until `convoy.parallelize` sends them their parts, one
tensor at a time: one host has room for the whole network, as the largest ConvNets have 3 to 4 GB of weights.
"""

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.collectives import Group, broadcast, gather_ints
from convoy.comm.groups import Groups
from convoy.comm.joining import join
from convoy.comm.ranks import Ranks
from convoy.comm.redistribution import redistribute
from convoy.engine.allocation import without_holes
from convoy.errors import ConvoyError
from convoy.plans.layout import WHOLE, Layout
from convoy.plans.mesh import Coordinates, Mesh
from convoy.plans.transfer import transfer


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def owners(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """For every parameter and buffer the dictionary that holds it, and its key there."""
    owners: dict[str, tuple[dict[str, Any], str]] = {}
    for name in named_tensors(model):
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        owners[name] = (module._parameters if key in module._parameters else module._buffers), key
    return owners


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


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


def _memory_format(tensor: Tensor) -> torch.memory_format:
    """Plain or channels innermost, by its strides alone: a filter of 1 × 1 counts as contiguous in both, and one that
    lies in the wrong one has the convolution turn its images round."""
    channels_last = CHANNELS_LAST.get(tensor.dim(), torch.contiguous_format)
    is_plain = tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
    is_last = not is_plain and tensor.is_contiguous(memory_format=channels_last)
    return channels_last if is_last else torch.contiguous_format


def collect(tensor: Tensor, layout: Layout, shape: Sequence[int], groups: Groups) -> Tensor:
    """The whole tensor of `shape` on all ranks, which all call it, from every rank's part; `copied` plays no role."""
    if layout.splits and not shape:
        return collect(tensor.reshape(-1), layout, (1,), groups).view(())
    steps = transfer(Layout(layout.splits), WHOLE, groups.mesh, shape)
    if not steps:
        return tensor.detach().clone()
    with torch.no_grad():
        return redistribute(steps, groups, shape)(tensor.detach()).clone()


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


@contextmanager
def deferred() -> Iterator[None]:
    """A context in which rank 0 builds a network, and the other ranks its shapes alone, on the meta device.

    For networks that N ranks could not hold N times: `convoy.parallelize` sends rank 0's tensors one by one, and each
    rank keeps its parts. Only rank 0's host holds the whole network; no GPU does where the model stays on the CPU and
    the example is on the GPU. Torch's random state is rank 0's afterwards, on every rank. All ranks enter it together.

    >>> with convoy.deferred():
    ...     model = build_model()
    >>> net = convoy.parallelize(model, "filter=2", example=images)

    Raises:
        ConvoyError: the network cannot be built without numbers, as it reads some while it is built.
    """
    join()
    ranks = Ranks.here()
    failure: Exception | None = None
    try:
        with torch.device("meta") if ranks.rank else nullcontext():
            yield
    except Exception as error:  # the other ranks wait
        failure = error
    reason = ranks.first_of(None if failure is None else str(failure).partition("\n")[0] or type(failure).__name__)
    if failure is not None and ranks.rank == 0:
        raise failure
    if reason is not None:
        raise ConvoyError(
            f"the network cannot be built without numbers ({reason.rstrip('.')}): build it without convoy.deferred"
        ) from failure
    if ranks.group is not None:
        torch.set_rng_state(broadcast(torch.get_rng_state(), ranks.group))


def lacks_numbers(model: nn.Module) -> bool:
    """Whether a network, or a part of it, has shapes alone."""
    return any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers()))


def make_room(model: nn.Module, group: Group) -> None:
    """Give tensors without numbers memory, which the kernel hands out when it is first written to, and takes back when
    a part is all that stays. What layers keep as plain attributes is sent at once. All ranks call it."""
    if not any(row[0] for row in gather_ints([int(lacks_numbers(model))], group)):
        return
    blank: dict[int, Tensor] = {}
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                vars(module)[key] = broadcast(_blank(value).contiguous(), group)
        holders: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in holders:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in blank:  # tied layers hold the same one
                        is_weight = isinstance(tensor, nn.Parameter)
                        room = _blank(tensor)
                        blank[id(tensor)] = nn.Parameter(room, tensor.requires_grad) if is_weight else room
                    tensors[name] = blank[id(tensor)]


def _blank(tensor: Tensor) -> Tensor:
    """Itself if it has numbers, else memory for them that lies as it does."""
    if not tensor.is_meta:
        return tensor.detach()
    with without_holes(torch.device("cpu")):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
