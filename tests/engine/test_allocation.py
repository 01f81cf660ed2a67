"""Freed memory stays with the process: the kernel hands out no new pages for it."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")


HOLES = """
import sys, torch
from convoy.engine import allocation
allocation.keep_freed_memory(torch.device("cpu"))
allocation.host_memory, allocation.free_memory = lambda: 2**34, lambda: int(float(sys.argv[1]) * 2**34)
tensors = [torch.ones(2**20) for _ in range(2**8)][::2]
allocation.give_back_where_scarce()
print(next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("RssAnon")))
"""


@pytest.mark.slow
def test_holes_between_tensors_go_back_where_memory_is_scarce_and_only_there() -> None:
    """Of 1 GiB every other block is freed."""
    scarce, enough = (
        int(subprocess.run([sys.executable, "-c", HOLES, free], capture_output=True, text=True, check=True).stdout)
        for free in ("0.2", "0.3")
    )
    assert 512 < scarce < 1024 < enough
