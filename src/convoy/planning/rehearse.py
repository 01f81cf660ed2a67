"""Rehearsals on the devices at hand: how long every piece of a placement takes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from convoy.cost.local import piece
from convoy.cost.piece import VIEWS, Piece
from convoy.cost.times import Times
from convoy.engine.rehearsal import OUTSIDE, Rehearsal
from convoy.planning.ranks import Ranks
from convoy.planning.workload import Workload
from convoy.plans.place import PlacedCall, Placement


def rehearse(
    workload: Workload, placement: Placement, ranks: Ranks, alone: bool, enough: int = 3
) -> tuple[dict[Piece, Times], Times]:
    """Times of the pieces on all ranks, the mean where several have the same, and of what belongs to no call.

    Alone, the first rank runs while the others wait. Otherwise each runs a place of the mesh, all at the same time.
    `enough` passes are to be near the fastest of their rank.
    """
    place = 0 if alone else ranks.places(placement.mesh)[ranks.rank]
    own: list[tuple[Piece, Times]] = []
    around = (0.0, 0.0)
    if not alone or ranks.rank == 0:
        rehearsal = Rehearsal(
            placement,
            place,
            workload.device,
            channels_last=workload.channels_last,
            batch_norm=workload.batch_norm,
            microbatches=workload.sizes,
            contents=workload.contents,
        )
        with _precision(workload):
            times = rehearsal.run((lambda done: done) if alone else ranks.agree, enough)
        for placed in placement.calls:
            one = piece_of(workload, placement, placed, place)
            if placed.call.name in times and not one.is_empty and one.op not in VIEWS:
                of_call = times[placed.call.name]
                own.append((one, Times(of_call.forward, of_call.backward)))
        rest = times[OUTSIDE]
        around = rest.forward, rest.backward
    measured: dict[Piece, list[Times]] = {}
    arounds: list[Times] = []
    for rows, other in ranks.gather((own, around)):
        for one, found in rows:
            measured.setdefault(one, []).append(found)
        if rows:
            arounds.append(Times(*other))
    return {one: mean(found) for one, found in measured.items()}, mean(arounds)


def mean(times: Sequence[Times]) -> Times:
    """The mean; of none, no time."""
    total = sum(times, Times())
    return total * (1 / max(1, len(times)))


def piece_of(workload: Workload, placement: Placement, placed: PlacedCall, rank: int) -> Piece:
    """What a rank computes for a call of a workload."""
    return piece(placed, placement, rank, batch_norm=workload.batch_norm, microbatch=workload.microbatch)


@contextmanager
def _precision(workload: Workload) -> Iterator[None]:
    """Autocast, if the workload has it."""
    if workload.precision is None:
        yield
        return
    with torch.autocast(workload.device.type, workload.precision):
        yield
