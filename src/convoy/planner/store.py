"""The profile store: what was measured on a device, kept for the next time, in a file of JSON for each device.

Of each operation it has the last runs (trainings that were watched), or the last profiling where no run had it, or none
for long. Its time is the median of those runs, in which a newer one weighs more. Too many operations or devices: those
that were measured longest ago go. What is damaged is written anew.

Of several devices plans leave links, optimizer and engine, so that a given plan can be predicted without measuring
anything once all its operations have been measured; runs leave what an update took, and each operation in it.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any, Literal

import torch

from convoy import resources
from convoy.engine.watched import WatchedUpdate
from convoy.errors import ConvoyError
from convoy.files import expanded, write_text
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs, Times, mean
from convoy.planner.cost.link import Links
from convoy.planner.cost.local_op import VIEWS, BatchNorm, LocalOp, local_op
from convoy.planner.cost.prediction import Scored, predicted
from convoy.planner.cost.program import internal_messages
from convoy.planner.cost.step import Staging
from convoy.plans.place import Placement
from convoy.plans.plan import Plan, plan_text
from convoy.resources import cores_allowed, free_memory
from convoy.units import plural, seconds, size
from convoy.version import __version__

# Of what is free, for the tensors that are counted. Kernels and the framework take the rest of a GPU. On a host, four
# ranks of ResNet-50 with a predicted 1.05 GB each came to 1.47 GB, and with the processes that load pictures to all of
# 8.6 GB: gradients of activations, kernels and messages between processes take 0.4 of what is free.
GPU_SHARE, HOST_SHARE = 0.9, 0.6


def device_memory(device: torch.device, on_host: int) -> tuple[float, str]:
    """Bytes for parameters, gradients, optimizer and activations on a device, and a word on where they come from. A GPU
    has what is free and what this process holds of it. What is free of a host's memory, or of what control groups leave
    of it, its `on_host` ranks share."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        there = float(free + torch.cuda.memory_reserved(device))
        return GPU_SHARE * there, f"nine tenths of the {size(int(there))} that are free on the GPU"
    there = free_memory()
    shared = f" over {on_host} devices" if on_host > 1 else ""
    return HOST_SHARE * there / on_host, f"{HOST_SHARE} of the {size(int(there))} that are free here{shared}"


_LOWER = ("tf32", "bf16")  # precisions in which float32 may be multiplied


@dataclass(frozen=True)
class Device:
    """Everything that would make the same piece take another time."""

    name: str  # the processor's or GPU's name
    torch: str  # version
    convoy: str
    threads: int  # that compute on it; 0 where that says nothing, as on a GPU
    precision: str = "float32"  # in which convolutions and matrix products compute
    channels_last: bool = False
    neighbours: int = 1  # ranks that compute on the same host at once and share its memory, itself counted
    numerics: str = ""  # torch's switches that change kernels, as `benchmark, tf32 products`
    share: float = 1.0  # of the time of its threads' cores, what control groups leave it

    @property
    def key(self) -> str:
        """A name that equal devices share, fit for a file."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40]
        digest = hashlib.blake2b(repr(sorted(asdict(self).items())).encode(), digest_size=6).hexdigest()
        return f"{plain or 'device'}-{self.threads}t-{self.precision}-{digest}"

    def describe(self) -> str:
        parts = [
            self.name,
            plural(self.threads, "thread") if self.threads else "",
            f"{self.share:.0%} of the time" if self.share < 1 else "",
            self.precision,
            self.numerics,
            "channels last" if self.channels_last else "",
            f"{self.neighbours} ranks on the host" if self.neighbours > 1 else "",
            f"torch {self.torch}",
        ]
        return ", ".join(filter(None, parts))


def this_device(device: torch.device) -> Device:
    """The device that this process computes on in float32, with the threads that torch uses now."""
    numerics = ", ".join(_numerics(device.type == "cpu"))
    if device.type != "cpu":
        return Device(torch.cuda.get_device_name(device), torch.__version__, __version__, 0, numerics=numerics)
    threads, name = torch.get_num_threads(), resources.processor_name()
    share = round(min(1.0, cores_allowed() / threads), 3)
    return Device(name, torch.__version__, __version__, threads, numerics=numerics, share=share)


def _numerics(is_cpu: bool) -> Iterator[str]:
    if torch.are_deterministic_algorithms_enabled():
        yield "deterministic"
    if not is_cpu and torch.backends.cudnn.benchmark:
        yield "benchmark"
    convolutions: Any = torch.backends.mkldnn if is_cpu else torch.backends.cudnn
    products: Any = torch.backends.mkldnn if is_cpu else torch.backends.cuda
    for what, setting in (("convolutions", convolutions.conv), ("products", products.matmul)):
        if setting.fp32_precision in _LOWER:
            yield f"{setting.fp32_precision} {what}"


ENVIRONMENT = "CONVOY_CACHE"
_RUNS = 5  # runs that the time of an operation is the median of
_LONG_S = 30 * 86_400.0  # seconds after which a run is old: later measurements count in its place
_OPERATIONS, _NOTES, _DEVICES = 10_000, 1_000, 64  # most that are kept of a device, and of devices

# What measured an operation: the planner by itself, or a training that was watched
Source = Literal["profiling", "run"]


@dataclass(frozen=True)
class Measurement:
    """One measured operation."""

    local_op: LocalOp
    times: Times
    measured: float  # seconds since 1970
    source: Source = "profiling"


class ProfileStore:
    """Times of operations, and other facts about a device, by device. Several processes may share it; writing raises
    OSError where it cannot be. The folder is by default `$CONVOY_CACHE/profiles`, or `convoy/profiles` in the user's
    cache folder."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_folder() if path is None else Path(path)

    def times(self, device: Device) -> dict[LocalOp, Times]:
        return {row.local_op: row.times for row in self.rows(device)}

    def rows(self, device: Device) -> list[Measurement]:
        """What is known of every operation, those measured longest ago first."""
        rows = []
        for entry in self._read(self._file(device))["operations"].values():
            with contextlib.suppress(*_DAMAGED):
                rows.append(_measurement(entry))
        return rows

    def put(self, device: Device, measured: Mapping[LocalOp, Times], source: Source = "profiling") -> None:
        """Add measurements of the planner, or of a run; a ValueError for a time that is none. A run knows nothing of
        the host: what was known of it stays."""
        now = time.time()
        for times in measured.values():
            if not all(math.isfinite(seconds) and seconds >= 0 for seconds in times.numbers):
                raise ValueError(f"{times} are no times")
        if not measured:
            return
        with self._changing(device) as document:
            operations = document["operations"]
            for local_op, times in measured.items():
                runs: list[list[float]] = []
                host = [times.host_forward, times.host_backward]
                with contextlib.suppress(*_DAMAGED):
                    before = operations[local_op.key]
                    if before["source"] == "run":
                        runs = [run for run in before["seconds"] if run[0] >= now - _LONG_S]
                    host = before["host"] if source == "run" else host
                if source == "profiling" and runs:  # what training took counts more
                    continue
                seconds = [*runs[1 - _RUNS :], [now, times.forward, times.backward]]
                operations.pop(local_op.key, None)  # what is written anew comes last
                operations[local_op.key] = {
                    "op": local_op.to_dict(),
                    "source": source,
                    "seconds": seconds,
                    "host": host,
                }
            if len(operations) > _OPERATIONS:
                for key in list(operations)[: -_OPERATIONS * 3 // 4]:
                    del operations[key]

    def note(self, device: Device, name: str, value: Any) -> None:
        """Keep a fact about a device that JSON can say, such as its links, or forget it where that is None."""
        with self._changing(device) as document:
            notes = {key: kept for key, kept in document["notes"].items() if key != name and kept is not None}
            notes |= {} if value is None else {name: value}  # what is written anew comes last
            document["notes"] = dict(list(notes.items())[-_NOTES:])

    def noted(self, device: Device, name: str) -> Any:
        """What was noted last under a name, None where nothing was."""
        return self._read(self._file(device))["notes"].get(name)

    def devices(self) -> list[Device]:
        devices = []
        for file in sorted(self.path.glob("*.json")):
            with contextlib.suppress(TypeError):  # of another version of this program
                devices.append(Device(**self._read(file)["device"]))
        return devices

    def clear(self, device: Device | None = None) -> int:
        """Forget a device, or all of them; how many those were."""
        files = [file for file in self.path.glob("*.json") if device is None or file == self._file(device)]
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)

    def _file(self, device: Device) -> Path:
        return self.path / f"{device.key}.json"

    def _read(self, file: Path) -> dict[str, dict[str, Any]]:
        """What a file says of its device; nothing where there is none, or a damaged one."""
        parts: dict[str, dict[str, Any]] = {"device": {}, "notes": {}, "operations": {}}
        with contextlib.suppress(OSError, ValueError):
            document = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(document, dict):
                parts |= {name: document[name] for name in parts if isinstance(document.get(name), dict)}
        return parts

    @contextmanager
    def _changing(self, device: Device) -> Iterator[dict[str, dict[str, Any]]]:
        """What is known of a device; while entered, nobody else writes. All that is changed in it is kept, or
        nothing."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            document = {**self._read(self._file(device)), "device": asdict(device)}
            yield document
            write_text(self._file(device), json.dumps(document, allow_nan=False))
            files = sorted(self.path.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
            for file in files[:-_DEVICES]:
                file.unlink()


def default_folder() -> Path:
    """`$CONVOY_CACHE/profiles`, else `convoy/profiles` under `$XDG_CACHE_HOME` or `~/.cache`."""
    folder = os.environ.get(ENVIRONMENT)
    if folder:
        return expanded(folder) / "profiles"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else expanded("~") / ".cache") / "convoy" / "profiles"


# What a document may raise that this program did not write
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, IndexError)


def _measurement(document: Any) -> Measurement:
    """The measurement that `put` wrote; one of `_DAMAGED` where it is none."""
    measured, forward, backward = zip(*document["seconds"], strict=True)
    forward_s, backward_s = (  # of later runs more: the second counts twice, the third three times, and so on
        median_low(float(value) for place, value in enumerate(values, 1) for _ in range(place))
        for values in (forward, backward)
    )
    times = Times(forward_s, backward_s, *map(float, document["host"]))
    source: Source = "run" if document["source"] == "run" else "profiling"
    return Measurement(LocalOp.from_dict(document["op"]), times, float(measured[-1]), source)


_KEPT = ("update", "loss", "per_parameter", "host_per_parameter", "on_cpu")  # of `Costs`
_UNLIKE = 1.25  # A prediction that is so many times what a run took, or the other way round, contradicts it
_LATE = 0.9  # from this part of a GPU's time on its host may have been late


def remember(store: ProfileStore, device: Device, devices: int, optimizer: str, costs: Costs) -> None:
    """Keep what is known of so many devices, with measured links, but for their input, which is the data's."""
    document: dict[str, Any] = {"links": costs.links.to_list(), "slowdowns": list(costs.slowdowns)}
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
        slowdowns = noted.get("slowdowns", noted.get("pace", ()))  # as older versions wrote it
        costs = Costs(Calibrated(measured), slowdowns=tuple(map(float, slowdowns)), **fields)
        for rank in range(mesh.num_devices):
            part = placement if staging is None else staging.staged.part(placement, mesh.stage_of(rank))
            for placed in part.calls:
                op = local_op(placed, placement, rank, batch_norm=costs.batch_norm, microbatch=costs.microbatch)
                if op not in measured and not op.is_empty and op.op not in VIEWS:
                    return None
        return predicted(plan, placement, costs, passes, staging)
    except (KeyError, TypeError, ValueError, ConvoyError):
        return None


def remember_run(store: ProfileStore, device: Device, name: str, batch: int, plan: Plan, seconds: float) -> None:
    """Keep what an update of a run took, without its input; arguments as `unlike_runs` looks for them."""
    with contextlib.suppress(OSError):  # a full disk is no reason to stop
        store.note(device, _of_run(name, batch, plan), seconds)


def unlike_runs(
    store: ProfileStore, device: Device, name: str, batch: int, plans: Mapping[Plan, float]
) -> Iterator[str]:
    """A sentence on every plan that is expected to be much faster or slower than it was in its last run. `plans` have
    the seconds of an update that are predicted, or were measured now."""
    for plan, expected_s in plans.items():
        last_s = store.noted(device, _of_run(name, batch, plan))
        if isinstance(last_s, float) and last_s > 0 and not 1 / _UNLIKE <= last_s / expected_s <= _UNLIKE:
            yield (
                f"{plan} is expected to take {seconds(expected_s)} an update, and took {seconds(last_s)} in the last "
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
