"""Freed memory stays with the process: the kernel hands out no new pages for it."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from convoy.engine.allocation import keep_freed_memory
print(sys.argv[1] == "keep" and keep_freed_memory(torch.device("cpu")))
for step in range(9):  # blocks find their places in the first
    if step == 6:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(12 * 2**20) for _ in range(3)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")


def run(how: str, **variables: str) -> tuple[str, int]:
    """What `keep_freed_memory` says, and the pages that three steps of 144 MiB take from the kernel."""
    names = ("MALLOC_", "GLIBC_TUNABLES", "CONVOY_KEEP_MEMORY", "LD_PRELOAD")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(names)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], env=clean | variables, capture_output=True, text=True, check=True
    )
    said, pages = done.stdout.split("\n")[:2]
    return said, int(pages)


@pytest.mark.slow
def test_a_step_takes_no_new_pages_unless_it_is_left_alone_or_the_user_decides():
    said, pages = run("keep")
    assert said == "True" and pages < 100
    assert run("plain")[1] > 3 * 3 * 12 * 2**20 * 4 // 2**21  # whole pages of 2 MiB at the least
    for variable in ({"CONVOY_KEEP_MEMORY": "0"}, {"MALLOC_TRIM_THRESHOLD_": "131072"}):
        assert run("keep", **variable)[0] == "False"


HOLES = """
import sys, torch
from convoy.engine import allocation
allocation.keep_freed_memory(torch.device("cpu"))
allocation.host_memory, allocation.free_memory = lambda: 2**34, lambda: int(float(sys.argv[1]) * 2**34)
tensors = [torch.ones(2**20) for _ in range(2**8)][::2]
allocation.give_back_where_scarce()
print(next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("RssAnon")))
"""


def test_holes_between_tensors_go_back_where_memory_is_scarce_and_only_there() -> None:
    """Of 1 GiB every other block is freed."""
    scarce, enough = (
        int(subprocess.run([sys.executable, "-c", HOLES, free], capture_output=True, text=True, check=True).stdout)
        for free in ("0.2", "0.3")
    )
    assert 512 < scarce < 1024 < enough
