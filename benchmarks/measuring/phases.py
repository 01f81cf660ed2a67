"""LeNet that notes what its rank is doing, in a file that another process reads: for whoever kills ranks.

Only public hooks are used, and nothing that is computed changes: hooks of all modules, of all optimizers, and the
engine's watch of collectives.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from convoy import models
from convoy.comm import collectives as waits

FOLDER = "CONVOY_PHASES"
"""Environment variable: where the files are; without it nothing is noted."""
PHASES = ("start", "forward", "backward", "collective", "update", "between updates")
_FORM = struct.Struct("<BQ")


class Phase:
    """What this process does, as others see it."""

    def __init__(self, folder: Path) -> None:
        path = folder / str(os.getpid())
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._now = self._updates = 0
        self._before: list[int] = []

    def set(self, phase: str) -> None:
        """Something begins."""
        self._now = PHASES.index(phase)
        self._memory[0] = self._now

    def updated(self) -> None:
        """A weight update is done."""
        self._updates += 1
        _FORM.pack_into(self._memory, 0, PHASES.index("between updates"), self._updates)

    def enter(self) -> None:
        """A wait for others begins."""
        self._before.append(self._now)
        self.set("collective")

    def leave(self) -> None:
        """It is over."""
        self._now = self._before.pop()
        self._memory[0] = self._now


def seen(folder: Path, pid: int) -> tuple[str, int]:
    """What a process does now, and how many weight updates it has done."""
    try:
        number, updates = _FORM.unpack_from((folder / str(pid)).read_bytes())
    except (OSError, struct.error):
        return PHASES[0], 0
    return PHASES[number], updates


def lenet(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """LeNet; the process that makes it is watched from then on."""
    if FOLDER in os.environ:
        _watch(Phase(Path(os.environ[FOLDER])))
    return models.create("lenet", num_classes=num_classes, in_channels=in_channels)


def _watch(phase: Phase) -> None:
    def forward(module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            phase.set("forward")

    nn.modules.module.register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(lambda *_: phase.set("update"))
    register_optimizer_step_post_hook(lambda *_: phase.updated())
    backward = torch.Tensor.backward

    def watched(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        phase.set("backward")
        backward(self, *args, **kwargs)

    torch.Tensor.backward = watched  # type: ignore[method-assign]
    _kept.enter_context(waits.watching(phase))


_kept = contextlib.ExitStack()


@contextlib.contextmanager
def environment(folder: Path) -> Iterator[dict[str, str]]:
    """Variables for a run whose ranks are watched."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    yield os.environ | {FOLDER: str(folder), "PYTHONPATH": paths}
