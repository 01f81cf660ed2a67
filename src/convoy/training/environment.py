"""What a run ran on, for its report and for whoever wants to repeat it."""

import functools
import os
import platform
import sys
from datetime import UTC, datetime
from typing import Any

import torch

from convoy import resources
from convoy.comm.joining import gpus, join
from convoy.comm.ranks import Ranks
from convoy.engine.allocation import keep_freed_memory
from convoy.errors import ConvoyError
from convoy.resources import own_cores
from convoy.version import __version__


def choose_device(name: str | None) -> torch.device:
    """The device of this process: `cpu`, `cuda`, `cuda:1` …; None takes the first GPU where there is one. A ConvoyError
    where there is no such device.
    """
    present = gpus()
    if name is None and present.too_old:
        raise ConvoyError(f"torch cannot use the GPUs here: {present.why}; --device cpu trains without")
    if name is None:
        if present.why and os.environ.get("RANK", "0") == "0":
            _say_once(f"convoy: no GPU is used: {present.why}")
        return torch.device("cuda:0" if present.number else "cpu")
    device = torch.device(resources.device_name(name))
    if device.type == "cuda":
        if present.why:
            raise ConvoyError(f"--device {name} is not to be used: {present.why}; --device cpu trains without")
        if not 0 <= (device.index or 0) < present.number:
            raise ConvoyError(f"--device {name} is not here: torch sees {present.number} GPUs; use --device cpu")
        if device.index is not None:
            torch.cuda.set_device(device)  # what asks for "cuda" alone means this one: streams, events, random numbers
    return device


@functools.cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def join_ranks(timeout_s: float = 600.0, device: str | None = None) -> tuple[Ranks, torch.device]:
    """Join the other ranks by torchrun's variables, and choose this rank's device as `choose_device` does; memory that
    this process frees stays with it from then on. Ranks wait `timeout_s` for each other in a collective; a ConvoyError
    where the others cannot be reached.
    """
    ranks_and_device = join(timeout_s, device)
    keep_freed_memory(ranks_and_device)
    return Ranks.here(), ranks_and_device


def describe(command: str, device: torch.device, num_devices: int = 1, plan: str = "serial") -> dict[str, Any]:
    """The facts for `environment.json`."""
    return {
        "command": command,
        "convoy": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **machine(device),
        "device": str(device) if num_devices == 1 else f"{num_devices} devices ({device.type})",
        "devices": num_devices,
        "plan": plan,
        "threads": torch.get_num_threads(),
        "cores": len(own_cores()),
        "started": _now(),
    }


def restart(after: int, num_devices: int, plan: str) -> dict[str, str | int]:
    """The same of a run that is gone on with after some updates."""
    return {"started": _now(), "after": after, "devices": num_devices, "plan": plan}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine(device: torch.device) -> dict[str, str | int]:
    """The facts that decide which kernels torch takes, and so how a run rounds."""
    if device.type == "cuda":
        return {"machine": torch.cuda.get_device_name(device)}
    return {"machine": resources.processor_name(), "kernels": resources.kernels()}
