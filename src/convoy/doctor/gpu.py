"""What `nvidia-smi` says of a GPU while something ran on it: a clock that was held down, other processes."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.terminal import printable

if TYPE_CHECKING:
    import torch

_TIMEOUT_S = 5.0
_REASONS = (  # bits of NVML's clocks event reasons
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
)
_COUNTED = ("sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown")
_FIELDS = ("clocks.sm", "clocks.max.sm", "temperature.gpu", "utilization.gpu", "memory.used")
_REASON_FIELDS = (  # as drivers of 2025, of 2023 and before call them
    ("clocks_event_reasons.active", *(f"clocks_event_reasons_counters.{name}" for name in _COUNTED)),
    ("clocks_event_reasons.active",),
    ("clocks_throttle_reasons.active",),
)


@dataclass(frozen=True)
class GpuProcess:
    """A process that is no part of the run and computes on its GPU.

    Attributes:
        name: of the program.
        pid: its number.
        used_bytes: of the GPU's memory; 0 where the driver does not say.
    """

    name: str
    pid: int
    used_bytes: int


@dataclass(frozen=True)
class GpuLoad:
    """What `nvidia-smi` says of a GPU.

    Attributes:
        throttled: why its clock was held down when it was read, as NVML names the reasons (`sw_power_cap`,
            `hw_thermal_slowdown`, `gpu_idle`, ...). They are to be read while it computes.
        throttled_s: seconds of the interval for which `sw_power_cap`, `sw_thermal_slowdown` and `hw_thermal_slowdown`
            held; empty where the driver does not count them.
        clock: the multiprocessors' clock over their highest one; None where the driver does not say.
        temperature_c: in degrees Celsius, or None.
        utilization: share of the last second or less in which a kernel ran, or None.
        used_bytes: of its memory, by all processes.
        others: processes that compute on it and are no part of the run, those with the most memory first. Empty where
            process numbers are not those of the driver, as in most containers.
    """

    throttled: tuple[str, ...]
    throttled_s: Mapping[str, float]
    clock: float | None
    temperature_c: float | None
    utilization: float | None
    used_bytes: int
    others: tuple[GpuProcess, ...]


class GpuWatch:
    """Counts from its making on what happens to a GPU, where it is one of NVIDIA's that `nvidia-smi` knows.

    Args:
        device: the GPU; anything else is not looked at.
    """

    def __init__(self, device: "torch.device | None") -> None:
        self._name = _identifier(device)
        self._begin = _counters(self._name)

    def read(self, is_ours: Callable[[int], bool]) -> GpuLoad | None:
        """What has happened since the beginning; None where nobody can say.

        Args:
            is_ours: whether the process of a number is part of the run.
        """
        said = _counters(self._name)
        if not said:
            return None
        active = next(text for name, text in said.items() if name.endswith("reasons.active"))
        bits = int(active, 16) if active.startswith("0x") else 0
        clock, highest = number_of(said["clocks.sm"]), number_of(said["clocks.max.sm"])
        utilization = number_of(said["utilization.gpu"])
        processes = {process.pid: process for process in _processes(self._name)}
        others = [process for pid, process in processes.items() if not is_ours(pid)]
        return GpuLoad(
            throttled=tuple(name for place, name in enumerate(_REASONS) if bits >> place & 1),
            throttled_s=dict(self._times(said)),
            clock=clock / highest if clock is not None and highest else None,
            temperature_c=number_of(said["temperature.gpu"]),
            utilization=None if utilization is None else utilization / 100,
            used_bytes=_bytes(said["memory.used"]),
            # where this process is not listed, numbers are of another name space
            others=tuple(sorted(others, key=lambda other: -other.used_bytes)) if os.getpid() in processes else (),
        )

    def _times(self, said: Mapping[str, str]) -> Iterator[tuple[str, float]]:
        for name in _COUNTED:
            key = f"clocks_event_reasons_counters.{name}"
            now, begin = number_of(said.get(key, "")), number_of(self._begin.get(key, ""))
            if now is not None and begin is not None:
                yield name, (now - begin) / 1e6


def number_of(text: str) -> float | None:
    """A number; None where a machine says something else, as `[N/A]`, or nothing."""
    try:
        return float(text)
    except ValueError:
        return None


def _identifier(device: "torch.device | None") -> str:
    """The identifier of an NVIDIA GPU, whatever CUDA_VISIBLE_DEVICES says; empty where it is none."""
    if device is None or device.type != "cuda":
        return ""
    import torch

    with contextlib.suppress(AssertionError, AttributeError, RuntimeError):
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return ""


def _counters(gpu: str) -> dict[str, str]:
    for reasons in _REASON_FIELDS if gpu else ():
        fields = (*_FIELDS, *reasons)
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
    return [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []


def _bytes(mebibytes: str) -> int:
    return round((number_of(mebibytes) or 0.0) * 2**20)
