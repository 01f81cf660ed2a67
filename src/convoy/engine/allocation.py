"""Memory that training frees stays with the process.

The C library gives large freed blocks back to the kernel, which hands them out again page by page, zeroed: a tenth of
a training step on a CPU. Every step frees and asks for the same blocks, so they are kept.
"""

import ctypes
import functools
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from convoy.resources import free_memory, host_memory

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

PAGE = 4096
SWITCH = "CONVOY_KEEP_MEMORY"
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of mallopt(3)
_LARGE = 2**20
_OTHERS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory(device: torch.device) -> bool:
    """Tell glibc to keep what the process frees, where tensors are computed on the CPU; gives whether it does so now.
    Left alone where the user has set glibc's own variables, and with `CONVOY_KEEP_MEMORY=0`."""
    if device.type != "cpu" or os.environ.get(SWITCH) == "0" or any(name in os.environ for name in _OTHERS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 2**31 - 1) and mallopt(_TRIM_THRESHOLD, -1))


@contextmanager
def without_holes(device: torch.device) -> Iterator[None]:
    """Within it large freed blocks return to the kernel: whole tensors cut to parts leave holes that stay."""
    keeps = keep_freed_memory(device)
    if keeps:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        if keeps:
            keep_freed_memory(device)


def release_freed_memory(device: torch.device) -> None:
    """Give what the process has freed back to the kernel, or to the GPU, whose odd blocks nothing else fits."""
    gc.collect()  # networks are in circles
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim_heap()


def trim_heap() -> None:
    """Give the kernel what the C library keeps of freed memory, also between blocks that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


_SCARCE, _LOOK = 1 / 4, 1 / 64  # of the memory that the processes here may have together
_pages_at_last_look = 0


def give_back_where_scarce() -> None:
    """Where less than a quarter of a host's memory is free, or of what a control group leaves, freed blocks go back to
    the kernel: between those in use they are holes that often nothing else fits, and grow to as much as is in use. An
    update of ResNet-50 at 224 px, `--recompute`, so takes 2.9 GB instead of 4.2, and a fifth longer where it must."""
    global _pages_at_last_look
    new_pages = page_faults() - _pages_at_last_look
    if new_pages * PAGE < _LOOK * _all_memory():
        return
    if free_memory() < _SCARCE * _all_memory():
        trim_heap()
    _pages_at_last_look = page_faults()


@functools.cache
def _all_memory() -> int:
    return host_memory()


def page_faults() -> int:
    """How many pages of memory this process has got from the kernel so far; 0 where nobody counts them."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


def get_ahead(pages: int) -> None:
    """Get pages from the kernel now, at most 128 MiB, so that what grows next finds them: all ranks do so at once."""
    torch.empty(min(pages * PAGE, 2**27), dtype=torch.uint8)[::PAGE] = 0
