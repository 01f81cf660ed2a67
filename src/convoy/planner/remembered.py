"""What plans and runs leave in the profile store for later predictions, beside the times of single operations.

Of several devices: links, optimizer and engine, so that a given plan can be predicted without measuring anything once
all its operations have been measured. Of watched updates: how long each operation took in training.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from convoy.engine.watched import WatchedUpdate
from convoy.errors import ConvoyError
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs, HostCost, Times
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Links
from convoy.planner.cost.local_op import VIEWS, BatchNorm, LocalOp, local_op
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.prediction import Scored, scored
from convoy.planner.cost.program import internal_messages
from convoy.planner.cost.store import Device, ProfileStore
from convoy.planner.profiling import mean
from convoy.plans.place import Placement
from convoy.plans.plan import Plan, plan_text
from convoy.units import seconds

_PARTS: dict[str, type[Any]] = {"update": Update, "loss": HostCost, "per_transfer": Times}  # of `Costs`
_NUMBERS = ("per_parameter", "host_per_parameter", "on_cpu")
_UNLIKE = 1.25  # A prediction that is so many times what a run took, or the other way round, contradicts it
_LATE = 0.9  # from this part of a GPU's time on its host may have been late


def remember(store: ProfileStore, device: Device, devices: int, optimizer: str, costs: Costs) -> None:
    """Keep what is known of so many devices, with measured links, but for their input, which is the data's."""
    with contextlib.suppress(OSError):  # a full disk is no reason to stop
        store.note(
            device,
            _name(devices, optimizer),
            {"links": costs.links.to_list(), "pace": list(costs.slowdowns)}
            | {name: asdict(getattr(costs, name)) for name in _PARTS}
            | {name: getattr(costs, name) for name in _NUMBERS},
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
    recorded: bool = False,
    staging: Staging | None = None,
) -> Scored | None:
    """A prediction from what is kept for `remember`'s arguments; None where not all of it is known. The placement is a
    pass under the plan."""
    try:
        costs = _costs(store.noted(device, _name(placement.mesh.num_devices, optimizer)))
    except (KeyError, TypeError, ValueError, ConvoyError):
        return None
    costs = replace(costs, batch_norm=batch_norm, microbatch=microbatch, recorded=recorded)
    measured = store.times(device)
    for rank in range(placement.mesh.num_devices):
        part = placement if staging is None else staging.staged.part(placement, placement.mesh.stage_of(rank))
        for placed in part.calls:
            one = local_op(placed, placement, rank, batch_norm=costs.batch_norm, microbatch=costs.microbatch)
            if one not in measured and not one.is_empty and one.op not in VIEWS:
                return None
    costs = replace(costs, times=Calibrated(measured))
    return scored(plan, placement, costs, passes, staging)


def remember_run(store: ProfileStore, device: Device, name: str, batch: int, plan: Plan, seconds: float) -> None:
    """Keep what an update of a run took, without its input; arguments as `unlike_runs` looks for them."""
    with contextlib.suppress(OSError):  # a full disk is no reason to stop
        store.note(device, _of_run(name, batch, plan), seconds)


def unlike_runs(
    store: ProfileStore, device: Device, name: str, batch: int, plans: Mapping[Plan, float]
) -> Iterator[str]:
    """A sentence on every plan that is expected to be much faster or slower than it was in its last run. `plans` have
    the seconds of an update that are predicted, or were measured now."""
    for plan, predicted in plans.items():
        last = store.noted(device, _of_run(name, batch, plan))
        if isinstance(last, float) and last > 0 and max(last / predicted, predicted / last) > _UNLIKE:
            yield (
                f"{plan} is expected to take {seconds(predicted)} an update, and took {seconds(last)} in the last run "
                "here: if the machine was busy at either time, convoy profile --clear forgets what was measured"
            )


def _of_run(name: str, batch: int, plan: Plan) -> str:
    return f"last run of {name} {batch} {plan_text(plan)}"


def _name(devices: int, optimizer: str) -> str:
    return f"{devices} devices, {optimizer}"


def _costs(noted: Any) -> Costs:
    """The costs that `remember` wrote; a KeyError, TypeError or ValueError where they are none."""
    parts = {name: kind(**noted[name]) for name, kind in _PARTS.items()}
    numbers = {name: type(getattr(Costs, name))(noted[name]) for name in _NUMBERS if name in noted}
    links = Links.from_list(noted["links"])
    return Costs(Calibrated({}), links, slowdowns=tuple(map(float, noted.get("pace", ()))), **parts, **numbers)


def measured_ops(
    updates: Sequence[WatchedUpdate],
    rank: int,
    batch_norm: BatchNorm,
    microbatch: int,
    typed: Callable[[Placement], Placement] = lambda placement: placement,
) -> dict[LocalOp, Times]:
    """How long the operations of a rank took: the mean over calls and passes, the median over updates.

    In these updates, gradients were sent after the backward pass, so that no message took cycles from it; `typed` gives
    a placement the types that its values have under autocast. Left out are views, empty operations, and calls inside of
    which ranks wait for each other. So are calls in which a GPU may have waited for its host, which took about as long:
    their time is the host's. What the host takes without being watched only profiling knows.
    """
    times_of: dict[LocalOp, list[Times]] = defaultdict(list)
    for update in updates:
        for op, times in _of_update(update, rank, batch_norm, microbatch, typed).items():
            times_of[op].append(mean(times))
    return {
        op: Times(median(one.forward for one in times), median(one.backward for one in times))
        for op, times in times_of.items()
    }


def _of_update(
    update: WatchedUpdate, rank: int, batch_norm: BatchNorm, microbatch: int, typed: Callable[[Placement], Placement]
) -> dict[LocalOp, list[Times]]:
    spent: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    issuing: dict[tuple[int, str], float] = defaultdict(float)
    for segment in update.segments():
        if segment.kind in ("forward", "backward") and segment.call:
            spent[segment.run, segment.call][segment.kind == "backward"] += segment.seconds
            issuing[segment.run, segment.call] += segment.host
    times_of: dict[LocalOp, list[Times]] = defaultdict(list)
    for run, placement in enumerate(map(typed, update.placements)):
        for placed in placement.calls:
            call = run, placed.call.name
            if call not in spent or issuing[call] > _LATE * sum(spent[call]):
                continue
            op = local_op(placed, placement, rank, batch_norm=batch_norm, microbatch=microbatch)
            talks = internal_messages(placed, placement.graph, placement.mesh, op, batch_norm).axes
            if not talks and not op.is_empty and op.op not in VIEWS:
                times_of[op].append(Times(*spent[call]))
    return times_of
