"""Ranks tell each other what they are about to do, so that one that does something else gets a sentence, not a hang."""

import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from convoy.engine.collectives import gather_ints
from convoy.engine.groups import Groups
from convoy.engine.signature import kinds
from convoy.errors import ConvoyError
from convoy.plans.mesh import Axes

_PASS = "a pass of the network"
_CALLS = (
    _PASS,
    "convoy.state_dict",
    "convoy.load_state_dict",
    "convoy.optimizer_state_dict",
    "convoy.load_optimizer_state_dict",
    "convoy.save",
    "convoy.load",
    "convoy.gradients",
    "convoy.evaluate",
    "convoy.BatchSampler",
    "convoy.clip_grad_norm_",
)
"""What all ranks do together; a place in this list is what they send."""
PATIENCE_S = 20.0
"""How long a rank waits for the others before it says so."""


def exchange_samples(
    inputs: Sequence[Tensor], types: int, training: bool, groups: Groups, axes: Axes
) -> tuple[int, ...]:
    """How many samples every sample rank has in this pass. All ranks call it.

    Args:
        inputs: this rank's.
        types: a checksum of the types and devices of the parameters.
        training: the mode.
        groups: of this rank.
        axes: the sample axes.

    Raises:
        ConvoyError: ranks pass images of different sizes or types, run in different modes, or do something else; or
            those that work on the same samples have different numbers of them.
    """
    mesh, device = groups.mesh, inputs[0].device
    if groups.of(axes) is None and not inputs[0].is_cpu:
        return (len(inputs[0]),)  # no need to send the number to the device and wait for it to come back
    shapes = [f"{list(size)} of {dtype}" for size, dtype in kinds(inputs)]
    what = f"{', '.join(shapes)}{' in training' if training else ' in evaluation'}"
    own = [_CALLS.index(_PASS), len(inputs[0]), zlib.crc32(f"{what}, {types}".encode())]
    rows = gather_ints(own, groups.of(tuple(mesh.axes)), device)
    _check(_PASS, groups.rank, [row[0] for row in rows])
    found: dict[int, int] = {}
    for rank, (_, number, kind) in enumerate(rows):
        place = mesh.index(mesh.coordinates(rank), axes)
        if kind != own[2]:
            raise ConvoyError(
                f"rank {groups.rank} passes samples of {what}, but rank {rank} passes others: all ranks must "
                "pass images of the same size and type, in the same mode, to weights of the same types"
            )
        if found.setdefault(place, number) != number:
            raise ConvoyError(
                f"rank {rank} passes {number} samples, and a rank that works on the same ones {found[place]}: "
                "pass the samples that convoy.local_samples says"
            )
    return tuple(found[place] for place in range(mesh.size(axes)))


def agree(call: str, groups: Groups, device: torch.device) -> None:
    """Wait until all ranks have made the same call of the interface.

    Raises:
        ConvoyError: a rank does something else, or has ended.
    """
    group = groups.of(tuple(groups.mesh.axes))
    if group is None:
        return
    try:
        with _impatient(call, groups.rank):
            rows = gather_ints([_CALLS.index(call), 0, 0], group, device)
    except RuntimeError as error:
        raise ConvoyError(
            f"rank {groups.rank} has called {call}, which all ranks call together, and others have not "
            f"({str(error).splitlines()[0]}): call it on every rank, also where only one of them uses the result"
        ) from error
    _check(call, groups.rank, [row[0] for row in rows])


def _check(call: str, rank: int, calls: Sequence[int]) -> None:
    for other, number in enumerate(calls):
        theirs = _CALLS[number]
        if theirs != call:
            name = theirs if call == _PASS else call
            raise ConvoyError(
                f"rank {rank} is in {call} while rank {other} is in {theirs}: all ranks call {name} together, also "
                "where only one of them uses the result"
            )


@contextmanager
def _impatient(call: str, rank: int) -> Iterator[None]:
    """Say so where the others do not come: they may wait for something else for ever."""

    def say() -> None:
        print(
            f"rank {rank} has waited {PATIENCE_S:.0f} s in {call} for the other ranks: all ranks call it together",
            file=sys.stderr,
            flush=True,
        )

    timer = threading.Timer(PATIENCE_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
