"""What `nvidia-smi` says of a GPU while something ran on it: a clock that was held down, other processes."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.terminal import printable

if TYPE_CHECKING:
    import torch

_TIMEOUT_S = 5.0
_SAMPLED_S = 1.1  # utilization is that of the last second, at most
_COUNTED = ("sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown")
_FIELDS = ("utilization.gpu",)
_COUNTERS = tuple(f"clocks_event_reasons_counters.{name}" for name in _COUNTED)  # not in drivers before 2025


@dataclass(frozen=True)
class GpuProcess:
    """A process that is no part of the run and computes on its GPU."""

    name: str  # of the program
    pid: int
    used_bytes: int  # of the GPU's memory; 0 where the driver does not say


@dataclass(frozen=True)
class GpuLoad:
    """What `nvidia-smi` says of a GPU."""

    # seconds of the interval, by `sw_power_cap`, `sw_thermal_slowdown` and `hw_thermal_slowdown`; empty where the
    # driver does not count them
    throttled_s: Mapping[str, float]
    # processes outside the run that compute on it, those with the most memory first; empty where process numbers are
    # not those of the driver, as in most containers
    others: tuple[GpuProcess, ...]
    others_busy: float  # share of the time in which they compute, while the run does not


class GpuWatch:
    """Counts what happens to a GPU since it was made or last read, if `nvidia-smi` knows the GPU."""

    def __init__(self, device: "torch.device | None") -> None:
        self._name = _identifier(device)
        self._begin = _counters(self._name)

    def read(self, is_ours: Callable[[int], bool]) -> GpuLoad | None:
        """What has happened since; None where nobody can say. Nothing of the run may compute meanwhile; `is_ours` says
        which processes are part of it."""
        begin, counters = self._begin, _counters(self._name)
        if not counters:
            return None
        self._begin = counters
        processes = {process.pid: process for process in _processes(self._name)}
        # if this process is not listed, numbers belong to another name space
        listed = processes.items() if os.getpid() in processes else ()
        strangers = sorted((entry for pid, entry in listed if not is_ours(pid)), key=lambda entry: -entry.used_bytes)
        if strangers:
            time.sleep(_SAMPLED_S)
        busy = number_of(_counters(self._name).get("utilization.gpu", "")) if strangers else None
        return GpuLoad(
            throttled_s=dict(_times(begin, counters)),
            others=tuple(strangers),
            others_busy=(busy or 0.0) / 100,
        )


def _times(old_counters: Mapping[str, str], counters: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Seconds between two answers for which a clock was held down, by the reason."""
    for name, key in zip(_COUNTED, _COUNTERS, strict=True):
        begin, end = (number_of(answer.get(key, "")) for answer in (old_counters, counters))
        if begin is not None and end is not None:
            yield name, (end - begin) / 1e6


def number_of(text: str) -> float | None:
    """A number; None where a machine says something else, as `[N/A]`, or nothing."""
    try:
        return float(text)
    except ValueError:
        return None


def _identifier(device: "torch.device | None") -> str:
    """The identifier of an NVIDIA GPU, whatever CUDA_VISIBLE_DEVICES says; empty for any other device."""
    if device is None or device.type != "cuda":
        return ""
    import torch

    with contextlib.suppress(AssertionError, AttributeError, RuntimeError):
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return ""


def _counters(gpu: str) -> dict[str, str]:
    for counters in (_COUNTERS, ()) if gpu else ():
        fields = (*_FIELDS, *counters)
        lines = _smi("-i", gpu, f"--query-gpu={','.join(fields)}")
        if lines and len(lines[0]) == len(fields):
            return dict(zip(fields, lines[0], strict=True))
    return {}


def _processes(gpu: str) -> Iterator[GpuProcess]:
    for line in _smi("-i", gpu, "--query-compute-apps=pid,name,used_memory"):
        if len(line) == 3 and line[0].isdecimal():
            yield GpuProcess(printable(Path(line[1]).name), int(line[0]), _bytes(line[2]))


def _smi(*arguments: str) -> list[list[str]]:
    """The table that `nvidia-smi` prints; empty where it is not there, fails or does not answer."""
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    return [line.split(", ") for line in done.stdout.splitlines() if line] if done.returncode == 0 else []


def _bytes(mebibytes: str) -> int:
    return round((number_of(mebibytes) or 0.0) * 2**20)
