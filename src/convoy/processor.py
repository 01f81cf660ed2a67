"""What the CPU here is and has, as far as the system tells: other kernels for it may round otherwise."""

import platform
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def name() -> str:
    """The processor's model."""
    named = (line.partition(":")[2].strip() for line in _info().splitlines() if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "CPU"


def flags() -> set[str]:
    """What Linux calls its abilities, on x86 and on Arm; empty elsewhere."""
    return set(_info().split())


def has_amx() -> bool:
    """Whether the processor multiplies matrices in tiles, which oneDNN does in bf16 where it can."""
    return "amx_tile" in flags()


def kernels() -> str:
    """For which abilities torch and oneDNN choose their kernels."""
    return torch.backends.cpu.get_cpu_capability() + (" with AMX" if has_amx() else "")


def _info() -> str:
    try:
        return CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
