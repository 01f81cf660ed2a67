"""What plans and runs leave in the profile store for later predictions, beside the times of single operations.

Of several devices: links, optimizer and engine, so that a given plan can be predicted without measuring anything once
all its operations have been measured. Of watched updates: how long each operation took in training.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from statistics import median
from typing import Any

from convoy.engine.watched import WatchedUpdate
from convoy.errors import ConvoyError
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs, Times
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

_KEPT = ("update", "loss", "per_parameter", "host_per_parameter", "on_cpu")  # of `Costs`
_UNLIKE = 1.25  # A prediction that is so many times what a run took, or the other way round, contradicts it
_LATE = 0.9  # from this part of a GPU's time on its host may have been late


def remember(store: ProfileStore, device: Device, devices: int, optimizer: str, costs: Costs) -> None:
    """Keep what is known of so many devices, with measured links, but for their input, which is the data's."""
    document: dict[str, Any] = {"links": costs.links.to_list(), "pace": list(costs.slowdowns)}
    for name in _KEPT:
        value = getattr(costs, name)
        document[name] = asdict(value) if is_dataclass(value) else value  # type: ignore[arg-type]
    with contextlib.suppress(OSError):  # a full disk is no reason to stop
        store.note(device, _name(devices, optimizer), document)


def recalled(
    store: ProfileStore,
    device: Device,
    optimizer: str,
    plan: Plan,
    placement: Placement,
    passes: int,
    staging: Staging | None = None,
    **training: Any,
) -> Scored | None:
    """A prediction from what is kept for `remember`'s arguments; None where not all of it is known. The placement is a
    pass under the plan; `training` are fields of `Costs`: batch norm, microbatch, whether it is recorded."""
    mesh, measured, default = placement.mesh, store.times(device), Costs(Calibrated({}))
    try:
        noted = store.noted(device, _name(mesh.num_devices, optimizer))
        fields: dict[str, Any] = {"links": Links.from_list(noted["links"]), **training}
        for name in filter(noted.__contains__, _KEPT):
            kind, value = type(getattr(default, name)), noted[name]
            fields[name] = kind(**value) if is_dataclass(kind) else kind(value)
        costs = Costs(Calibrated(measured), slowdowns=tuple(map(float, noted.get("pace", ()))), **fields)
    except (KeyError, TypeError, ValueError, ConvoyError):
        return None
    for rank in range(mesh.num_devices):
        part = placement if staging is None else staging.staged.part(placement, mesh.stage_of(rank))
        for placed in part.calls:
            op = local_op(placed, placement, rank, batch_norm=costs.batch_norm, microbatch=costs.microbatch)
            if op not in measured and not op.is_empty and op.op not in VIEWS:
                return None
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
        last_s = store.noted(device, _of_run(name, batch, plan))
        if isinstance(last_s, float) and last_s > 0 and not 1 / _UNLIKE <= last_s / predicted <= _UNLIKE:
            yield (
                f"{plan} is expected to take {seconds(predicted)} an update, and took {seconds(last_s)} in the last "
                "run here: if the machine was busy at either time, convoy profile --clear forgets what was measured"
            )


def _of_run(name: str, batch: int, plan: Plan) -> str:
    return f"last run of {name} {batch} {plan_text(plan)}"


def _name(devices: int, optimizer: str) -> str:
    return f"{devices} devices, {optimizer}"


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
        seconds_of: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for segment in update.segments():
            if segment.kind in ("forward", "backward") and segment.call:
                seconds_of[segment.run, segment.call][segment.kind == "backward"] += segment.seconds
                seconds_of[segment.run, segment.call][2] += segment.host
        of_update: dict[LocalOp, list[Times]] = defaultdict(list)
        for run, placement in enumerate(map(typed, update.placements)):
            for placed in placement.calls:
                forward, backward, issuing = seconds_of.get((run, placed.call.name), (0.0, 0.0, math.inf))
                op = local_op(placed, placement, rank, batch_norm=batch_norm, microbatch=microbatch)
                if issuing > _LATE * (forward + backward) or op.is_empty or op.op in VIEWS:
                    continue
                if not internal_messages(placed, placement.graph, placement.mesh, op, batch_norm).axes:
                    of_update[op].append(Times(forward, backward))
        for op, times in of_update.items():
            times_of[op].append(mean(times))
    return {
        op: Times(median(run.forward for run in times), median(run.backward for run in times))
        for op, times in times_of.items()
    }
