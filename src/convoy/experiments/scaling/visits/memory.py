"""How much memory a visit takes."""

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class Memory:
    """The most that this process has had since, beyond what it had at the beginning."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before = self._now("VmRSS")

    def peak(self) -> int:
        """Bytes."""
        return max(0, self._now("VmHWM") - self._before)

    def _now(self, name: str) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) if name == "VmHWM" else 0
        if not _STATUS.exists():
            return 0
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        return 0
