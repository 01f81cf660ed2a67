"""Ranks of one host agree on one piece of memory."""

import mmap
import os
import platform
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from convoy.engine.shared_memory.channel import Channel

SWITCH = "CONVOY_SHARED_MEMORY"
"""Environment variable; 0 sends everything through gloo."""

Gather = Callable[[Sequence[int]], list[list[int]]]


def meet(index: int, names: Sequence[str], timeout: float, gather: Gather) -> Channel | None:
    """The memory that the ranks of a group share, or None on every rank where one of them cannot.

    The memory has no name in any file system: nothing is left behind when processes are killed.

    Args:
        index: this rank's number in the group.
        names: of all ranks, for what is said of them; all call this at the same time.
        timeout: seconds to wait for the others in what the memory is used for.
        gather: gives every rank the same number of whole numbers from each.
    """
    memory = _create(Channel.size(len(names))) if index == 0 else None
    rows = gather([*_host(), os.getpid(), -1 if memory is None else memory])
    channel = None
    together = all(row[:-2] == rows[0][:-2] for row in rows) and rows[0][0] == 1 and rows[0][-1] >= 0
    if together:
        channel = _open(index, [row[-2] for row in rows], rows[0][-1], names, timeout)
    opened = gather([int(channel is not None)])
    if memory is not None:
        os.close(memory)
    if channel is not None and not all(row == [1] for row in opened):
        channel.close()
        return None
    return channel


def _host() -> list[int]:
    """Whether this process can share memory, and numbers that are equal for processes that can share it.

    Processes in other network namespaces are on other hosts: that is how clusters are emulated.
    """
    able = (
        os.environ.get(SWITCH, "1") != "0"
        and platform.machine() in ("x86_64", "AMD64")
        and all(hasattr(os, name) for name in ("memfd_create", "pidfd_open", "sched_yield"))
    )
    try:
        boot = zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
        namespaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("net", "pid")]
    except OSError:
        return [0, 0, 0, 0]
    return [int(able), boot, *namespaces]


def _create(size: int) -> int | None:
    try:
        memory = os.memfd_create("convoy", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return None
    try:
        os.ftruncate(memory, size)
    except OSError:
        os.close(memory)
        return None
    return memory


def _open(index: int, processes: Sequence[int], number: int, names: Sequence[str], timeout: float) -> Channel | None:
    """Map what the first process has under a number; None where this one may not."""
    watched: list[int] = []
    try:
        for process in processes:
            watched.append(os.pidfd_open(process))
        with Path(f"/proc/{processes[0]}/fd/{number}").open("r+b") as file:
            memory = mmap.mmap(file.fileno(), Channel.size(len(processes)))
    except OSError:
        for one in watched:
            os.close(one)
        return None
    return Channel(memory, index, watched, names, timeout)
