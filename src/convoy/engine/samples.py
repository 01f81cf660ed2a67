"""How many samples every rank passes: exchanged before each pass that nobody has announced."""

import zlib
from collections.abc import Sequence

from torch import Tensor

from convoy.engine.collectives import gather_ints
from convoy.engine.groups import Groups
from convoy.engine.signature import kinds
from convoy.errors import ConvoyError
from convoy.plans.mesh import Axes


def exchange_samples(inputs: Sequence[Tensor], training: bool, groups: Groups, axes: Axes) -> tuple[int, ...]:
    """How many samples every sample rank has in this pass. All ranks call it.

    Args:
        inputs: this rank's.
        training: the mode.
        groups: of this rank.
        axes: the sample axes.

    Raises:
        ConvoyError: ranks pass images of different sizes or types, or run in different modes, or those that work on the
            same samples have different numbers of them.
    """
    mesh, device = groups.mesh, inputs[0].device
    if groups.of(axes) is None and not inputs[0].is_cpu:
        return (len(inputs[0]),)  # no need to send the number to the device and wait for it to come back
    shapes = [f"{list(size)} of {dtype}" for size, dtype in kinds(inputs)]
    what = f"{', '.join(shapes)}{' in training' if training else ' in evaluation'}"
    own = [len(inputs[0]), zlib.crc32(what.encode())]
    rows = gather_ints(own, groups.of(tuple(mesh.axes)), device)
    found: dict[int, int] = {}
    for rank, (number, kind) in enumerate(rows):
        place = mesh.index(mesh.coordinates(rank), axes)
        if kind != own[1]:
            raise ConvoyError(
                f"rank {groups.rank} passes samples of {what}, but rank {rank} passes others: all ranks must "
                "pass images of the same size and type, in the same mode"
            )
        if found.setdefault(place, number) != number:
            raise ConvoyError(
                f"rank {rank} passes {number} samples, and a rank that works on the same ones {found[place]}: "
                "pass the samples that convoy.local_samples says"
            )
    return tuple(found[place] for place in range(mesh.size(axes)))
