"""The memory of a host: what the machine has, or what control groups leave of it."""

import os
from collections.abc import Iterator
from pathlib import Path

from convoy.launch.cores import MEMBERSHIP, ROOT, folders, text_of


def host_memory() -> int:
    """Bytes that the processes here may have together."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits()])


def memory_limits(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[int]:
    """Bytes that each of the groups may have."""
    for folder, version in folders("memory", membership, root):
        text = text_of(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if text.isdecimal():
            yield int(text)
