"""Networks that rank 0 builds for all: the other ranks have shapes without numbers until `convoy.parallelize` sends
them their parts, one tensor at a time. To note what fills tensors, and to run it again for each rank's part, took 600
lines for networks larger than a host's memory; the largest ConvNets have 3 to 4 GB of weights."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.collectives import Group, broadcast, gather_ints
from convoy.comm.joining import join
from convoy.comm.ranks import Ranks
from convoy.engine.allocation import without_holes
from convoy.errors import ConvoyError


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
