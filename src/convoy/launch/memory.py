"""The memory of a host: what the machine has, or what control groups leave of it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from convoy.launch.cores import MEMBERSHIP, ROOT, folders, text_of

_MEMINFO = Path("/proc/meminfo")
# Files with the limit and the use of a group.
_OF_VERSION = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
# The part of its use that is cached files, in `memory.stat`.
_REMEMBERED = {1: r"^total_(?:in)?active_file (\d+)$", 2: r"^(?:in)?active_file (\d+)$"}


def host_memory() -> int:
    """Bytes that the processes here may have together."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits()])


def free_memory() -> int:
    """Bytes that processes here may still have: those that no process of the machine and no group has used up. Files
    that the system remembers count as free."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text_of(_MEMINFO), re.MULTILINE)
    host_bytes = 1024 * int(match[1]) if match else host_memory()
    return max(0, min([host_bytes, *memory_left()]))


def memory_left(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[int]:
    """Bytes that each of the groups has left."""
    for folder, version in folders("memory", membership, root):
        limit, used = (text_of(folder / name) for name in _OF_VERSION[version])
        if limit.isdecimal() and used.isdecimal():
            remembered = re.findall(_REMEMBERED[version], text_of(folder / "memory.stat"), re.MULTILINE)
            yield int(limit) - int(used) + sum(map(int, remembered))


def memory_limits(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[int]:
    """Bytes that each of the groups may have."""
    for folder, version in folders("memory", membership, root):
        text = text_of(folder / _OF_VERSION[version][0])
        if text.isdecimal():
            yield int(text)
