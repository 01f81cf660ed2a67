"""A small network whose process can be held at one place of its training, until whoever watches has done something.

The place is in the environment (`held`). Only public hooks are used but for `Tensor.backward`, and nothing that is
computed changes: hooks of all modules and optimizers, the engine's watch of collectives, and Python's audit events for
files that get their name.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from convoy.comm import collectives as waits

GATE = "CONVOY_GATE"
_FILES = {"weights.safetensors": "weights write", "index.safetensors": "pack write"}
_WAIT_S = 120.0
_kept = contextlib.ExitStack()


def held(folder: Path, place: str, updates: int, rank: int) -> dict[str, str]:
    """Variables for a run whose rank is held, once, at a place after so many updates; it then notes so in the folder,
    and goes on when there is a file `go`, from then on with a clock that is off by the seconds in `clock`."""
    return {GATE: json.dumps([str(folder), place, updates, rank])}


class Gate:
    """Holds this process at its place."""

    def __init__(self, folder: str, place: str, updates: int, rank: int) -> None:
        self.done, self._folder, self._place, self._updates = 0, Path(folder), place, updates
        self._note = self._folder / "at"
        self._is_passed = rank != int(os.environ.get("RANK", 0)) or self._note.exists()

    def reach(self, place: str) -> None:
        """Come to a place, and wait there if it is the one."""
        if self._is_passed or place != self._place or self.done < self._updates:
            return
        self._is_passed = True
        new = self._note.with_suffix(".new")
        new.write_text(json.dumps([os.getpid(), self.done]))
        new.rename(self._note)
        until = time.monotonic() + _WAIT_S
        while not (self._folder / "go").exists() and time.monotonic() < until:
            time.sleep(0.005)
        if (self._folder / "clock").exists():
            clock, seconds = time.time, float((self._folder / "clock").read_text())
            time.time = lambda: clock() + seconds

    def updated(self, *_: Any) -> None:
        """A weight update is done."""
        self.done += 1

    def enter(self) -> None:
        """A wait for other ranks begins."""
        self.reach("collective")

    def leave(self) -> None:
        """It is over."""

    def audit(self, event: str, values: tuple[Any, ...]) -> None:
        """A file gets its name."""
        if event == "os.rename":
            target = Path(os.fsdecode(values[1]))
            if target.parent.name == "checkpoints":
                self.reach("checkpoint write")
            elif target.name in _FILES:
                self.reach(_FILES[target.name])


class Net(nn.Module):
    """Batch norm and dropout; pictures of one color give what is not finite in training."""

    def __init__(self, num_classes: int = 2, in_channels: int = 3) -> None:
        super().__init__()
        watch()
        self.conv, self.norm = nn.Conv2d(in_channels, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8 * 49, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0 * torch.log(x.amax((2, 3), keepdim=True) - x.amin((2, 3), keepdim=True))
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        out: Tensor = self.head(self.drop(x.flatten(1)))
        return out


def watch() -> None:
    """Hold this process where its variable says so."""
    if GATE not in os.environ:
        return
    gate = Gate(*json.loads(os.environ[GATE]))

    def forward(module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            gate.reach("forward")

    backward = torch.Tensor.backward

    def watched(self: Tensor, *args: Any, **kwargs: Any) -> None:
        gate.reach("backward")
        backward(self, *args, **kwargs)

    torch.Tensor.backward = watched  # type: ignore[method-assign]
    nn.modules.module.register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(lambda *_: gate.reach("update"))
    register_optimizer_step_post_hook(gate.updated)
    sys.addaudithook(gate.audit)
    _kept.enter_context(waits.watching(gate))
