"""How much memory a plan may take on a device."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from convoy.plans.explain import size

SHARE = 0.9
"""Of what there is: kernels, the framework and the data take some."""


def device_memory(device: torch.device, on_host: int) -> tuple[float, str]:
    """Bytes for parameters, gradients, optimiser and activations on a device, and a word on where they come from.

    Args:
        device: a GPU, which has what is free and what this process holds of it; or a CPU, whose memory, or what
            control groups leave of it, is shared by all ranks of the host.
        on_host: ranks of this host.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        there = float(free + torch.cuda.memory_reserved(device))
        return SHARE * there, f"nine tenths of the {size(int(there))} that are free on the GPU"
    there = min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *group_limits()])
    shared = f" over {on_host} devices" if on_host > 1 else ""
    return SHARE * there / on_host, f"nine tenths of the host's {size(int(there))}{shared}"


def group_limits(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Bytes that the process's control groups, and those around them, may have; both versions of them.

    Args:
        membership: the file that says which groups these are.
        root: where their file systems are.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            yield from _upwards(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _upwards(root / "memory", path, "memory.limit_in_bytes")


def _upwards(mount: Path, path: str, name: str) -> Iterator[int]:
    """The limits of a group and of all that it is in."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for length in range(len(parts), -1, -1):
        try:
            text = mount.joinpath(*parts[:length], name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdecimal():
            yield int(text)
