"""What was known of several devices when a plan was made, kept beside the times of pieces: links, optimizer, engine.

With it, a plan that is given can be predicted without measuring anything, once all its pieces have been measured.
"""

import contextlib
from dataclasses import asdict, replace
from typing import Any

from convoy.errors import ConvoyError
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Around, Costs
from convoy.planner.cost.device import Device
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Links
from convoy.planner.cost.local import BatchNorm, piece
from convoy.planner.cost.local_op import VIEWS
from convoy.planner.cost.memory import most, rank_memory
from convoy.planner.cost.step import predict
from convoy.planner.cost.store import ProfileStore
from convoy.planner.cost.timeline import apart
from convoy.planner.cost.times import Times
from convoy.planner.planner import Scored
from convoy.plans.place import Placement
from convoy.plans.plan import Plan


def remember(store: ProfileStore, device: Device, devices: int, optimizer: str, costs: Costs) -> None:
    """Keep what is known of so many devices, but for their input, which is the data's.

    Args:
        store: where.
        device: one of them, with as many neighbours as compute at once.
        devices: how many.
        optimizer: its name.
        costs: with measured links.
    """
    with contextlib.suppress(OSError):  # a full disk is no reason to stop
        store.note(
            device,
            _name(devices, optimizer),
            {
                "links": costs.links.to_list(),
                "update": asdict(costs.update),
                "loss": asdict(costs.loss),
                "per_transfer": asdict(costs.per_transfer),
                "per_parameter": costs.per_parameter,
                "pace": list(costs.pace),
                "on_cpu": costs.on_cpu,
            },
        )


def recalled(
    store: ProfileStore,
    device: Device,
    optimizer: str,
    plan: Plan,
    placement: Placement,
    passes: int,
    batch_norm: BatchNorm = "sync",
    microbatch: int = 0,
) -> Scored | None:
    """A prediction from what is kept; None where not all of it is known.

    Args:
        store, device, optimizer: as they were given to `remember`.
        plan: that is predicted.
        placement: of a pass of it.
        passes: of an update.
        batch_norm, microbatch: as the run has them.
    """
    try:
        costs = _costs(store.noted(device, _name(placement.mesh.num_devices, optimizer)))
    except (KeyError, TypeError, ValueError, ConvoyError):
        return None
    costs = replace(costs, batch_norm=batch_norm, microbatch=microbatch)
    known = store.times(device)
    for rank in range(placement.mesh.num_devices):
        for placed in placement.calls:
            one = piece(placed, placement, rank, batch_norm=costs.batch_norm, microbatch=costs.microbatch)
            if one not in known and not one.is_empty and one.op not in VIEWS:
                return None
    costs = replace(costs, times=Calibrated(known))
    timeline = apart(predict(placement, costs, passes), costs.update.fixed)
    return Scored(plan, placement, timeline, most(rank_memory(placement, costs)))


def _name(devices: int, optimizer: str) -> str:
    return f"{devices} devices, {optimizer}"


def _costs(noted: Any) -> Costs:
    """What `remember` wrote.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    return Costs(
        times=Calibrated({}),
        links=Links.from_list(noted["links"]),
        update=Update(**noted["update"]),
        loss=Around(**noted["loss"]),
        on_cpu=bool(noted["on_cpu"]),
        per_transfer=Times(**noted["per_transfer"]),
        per_parameter=float(noted["per_parameter"]),
        pace=tuple(map(float, noted.get("pace", ()))),
    )
