"""The profile store: what was measured on a device, kept for the next time, in a file of JSON for each device.

Of each operation it has the last runs (trainings that were watched), or the last profiling where no run had it, or none
for long. Its time is the median of those runs, in which a newer one weighs more. Too many operations or devices: those
that were measured longest ago go. What is damaged is written anew.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from convoy import resources
from convoy.files import expanded, write_text
from convoy.planner.cost.costs import Times
from convoy.planner.cost.local_op import LocalOp
from convoy.resources import cores_allowed, free_memory
from convoy.units import plural, size
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
_OPERATIONS, _DEVICES = 10_000, 64  # most that are kept of a device, and of devices

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
        """Keep a fact about a device that JSON can say, such as its links."""
        with self._changing(device) as document:
            document["notes"][name] = value

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
    times = Times(*map(_middle, (forward, backward)), *map(float, document["host"]))
    source: Source = "run" if document["source"] == "run" else "profiling"
    return Measurement(LocalOp.from_dict(document["op"]), times, float(measured[-1]), source)


def _middle(values: Sequence[float]) -> float:
    """The median, where the second value counts twice, the third three times, and so on."""
    weighed = sorted((float(value), place) for place, value in enumerate(values, 1))
    half = sum(place for _, place in weighed) / 2
    for value, place in weighed:
        half -= place
        if half <= 0:
            return value
    raise AssertionError("half of the weights is less than all of them")
