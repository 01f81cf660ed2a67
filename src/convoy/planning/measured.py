"""What the planner knows of the devices at hand: measured here, or in the profile store from before."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from convoy.cost.calibrated import Calibrated
from convoy.cost.costs import Around, Costs
from convoy.cost.device import Device, this_device
from convoy.cost.link import Links
from convoy.cost.piece import VIEWS, Piece
from convoy.cost.store import ProfileStore
from convoy.cost.times import Times
from convoy.engine.allocation import release_freed_memory
from convoy.engine.groups import Groups
from convoy.planning.overhead import with_overhead
from convoy.planning.ranks import Ranks
from convoy.planning.rehearse import mean, piece_of, rehearse
from convoy.planning.uniform import placements
from convoy.planning.update import measure_update
from convoy.planning.workload import Workload
from convoy.plans.memory import predict_memory
from convoy.plans.mesh import Mesh
from convoy.plans.place import Placement

_ROOM = 0.6

Progress = Callable[[str, int, int], None]
"""Is told what is done, how much of it, and of how much."""


@dataclass
class Knowledge:
    """Times on the devices at hand.

    Attributes:
        alone: of pieces, where one device computes and the others of the host rest.
        together: where all devices of the host compute at the same time.
    """

    alone: Costs
    together: Costs


def measure(
    workload: Workload,
    meshes: Sequence[Mesh],
    ranks: Ranks,
    links: Links,
    store: ProfileStore | None = None,
    progress: Progress = lambda what, done, total: None,
    per_transfer: float = 0.0,
    room: float | None = None,
) -> Knowledge:
    """Rehearse the network on the devices at hand; all ranks call it.

    What the store has is not measured again.

    Args:
        workload: what is to be trained.
        meshes: for which times are needed.
        ranks: the devices at hand.
        links: between the devices of the meshes.
        store: of what was measured before; None keeps nothing.
        progress: is told of every rehearsal.
        per_transfer: seconds of the engine for a redistribution in one direction.
        room: bytes that a rank has; what needs more than `_ROOM` of them is not rehearsed, as what kernels hold while
            they run comes on top.
    """
    serial = Mesh((), ())
    jobs = [(name, placement, True) for name, placement in placements(workload, serial)]
    for mesh in meshes:
        if mesh.num_devices > 1:
            jobs += [(name, placement, False) for name, placement in placements(workload, mesh)]
    if room is not None:
        jobs = [job for job in jobs if max(each.total for each in predict_memory(job[1])) <= _ROOM * room]
    neighbours = {True: 1, False: ranks.on_host}
    devices = {alone: _device(workload, neighbours[alone]) for alone in (True, False)}
    known = {alone: ranks.first(partial(_stored, store, devices[alone])) for alone in (True, False)}
    outside: dict[bool, list[Times]] = {True: [], False: []}
    groups: dict[Mesh, Groups] = {}
    for number, (name, placement, alone) in enumerate(jobs):
        progress(f"rehearsing {name}", number, len(jobs))
        wanted = _pieces(workload, placement, {0} if alone else ranks.places(placement.mesh))
        if all(one in known[alone] for one in wanted):
            continue
        mesh = placement.mesh
        if not alone and mesh.num_devices == ranks.num and mesh not in groups:
            groups[mesh] = Groups(mesh)
        found, rest = rehearse(workload, placement, ranks, alone, links, groups.get(mesh))
        known[alone] = found | known[alone]  # of several places of a piece the first counts: plain `sample`
        outside[alone].append(rest)
        if store is not None and ranks.rank == 0:
            with contextlib.suppress(OSError):  # a full disk is no reason not to plan
                store.put(devices[alone], found)
                store.note(devices[alone], _around_of(workload, alone), [rest.forward, rest.backward])
    if workload.device.type == "cpu":
        release_freed_memory()
    progress("rehearsing", len(jobs), len(jobs))
    updates = {True: ranks.first(lambda: measure_update(workload.optimizer, workload.device))}
    everyone = ranks.gather(measure_update(workload.optimizer, workload.device)) if ranks.num > 1 else [updates[True]]
    updates[False] = max(everyone, key=lambda update: update.per_byte)
    found_costs = {}
    for alone in (True, False):
        moved = any(one.op == "redistribute" for one in known[alone])  # with what the engine takes for it
        around = ranks.first(partial(_around, outside[alone], store, devices[alone], _around_of(workload, alone)))
        found_costs[alone] = Costs(
            times=Calibrated(known[alone] or known[not alone]),
            links=links,
            update=updates[alone],
            loss=around,
            batch_norm=workload.batch_norm,
            microbatch=workload.microbatch,
            on_cpu=workload.device.type == "cpu",
            per_transfer=Times() if moved else Times(per_transfer, per_transfer),
        )
    return Knowledge(found_costs[True], with_overhead(found_costs[False], workload, ranks))


def _pieces(workload: Workload, placement: Placement, places: Iterable[int]) -> set[Piece]:
    """What is computed at some places of a placement, but for what takes no time."""
    found = (piece_of(workload, placement, placed, place) for place in places for placed in placement.calls)
    return {one for one in found if not one.is_empty and one.op not in VIEWS}


def _device(workload: Workload, neighbours: int) -> Device:
    weights = next((value.dtype for value in workload.graph.parameters()), torch.float32)
    precision = str(workload.precision or weights).removeprefix("torch.")
    return this_device(
        workload.device, precision=precision, channels_last=workload.channels_last, neighbours=neighbours
    )


def _stored(store: ProfileStore | None, device: Device) -> dict[Piece, Times]:
    return {} if store is None else store.times(device)


def _around_of(workload: Workload, alone: bool) -> str:
    """Under which name it is kept what a pass of a network takes outside of its calls."""
    return f"around {workload.name} {workload.samples} {'alone' if alone else 'together'}"


def _around(measured: Sequence[Times], store: ProfileStore | None, device: Device, name: str) -> Around:
    if measured:
        return Around(per_pass=mean(measured).total)
    noted = store.noted(device, name) if store is not None else None
    return Around(per_pass=sum(noted)) if isinstance(noted, list) else Around()
