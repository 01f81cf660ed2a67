"""Runs a function on fresh processes, one a device, each pinned to one core and one thread.

The processes are those of `convoy bench`, forked from a server that has torch and the libraries beside which Convoy is
measured imported. They know their places by torchrun's variables.
"""

import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy.bench import processes
from convoy.bench.emulated import EmulatedDevice
from convoy.bench.processes import RankFailed, RankSlot, Say
from convoy.resources import own_cores

__all__ = ["Limits", "RankFailed", "prepare", "run_ranks"]

PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "convoy", "lightning.fabric", "accelerate")
ENVIRONMENT = {
    "GOMP_SPINCOUNT": "10000",  # waiting threads give the core back
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


@dataclass(frozen=True)
class Limits:
    """What a run may use."""

    seconds: float = 600.0  # until it is ended
    cgroups: tuple[Path, ...] = ()  # for each rank the control group that it joins, if it is to have one
    data_bytes: int | None = None  # that each rank may allocate; None for all there is


@dataclass(frozen=True)
class _Location:
    """Where a rank runs: within its limits, and on an emulated device or a core of this machine."""

    core: int
    device: EmulatedDevice | None
    cgroup: Path | None
    data_bytes: int | None

    @property
    def environment(self) -> Mapping[str, str]:
        return {**ENVIRONMENT, **(self.device.environment if self.device else {})}

    def enter(self) -> None:
        if self.cgroup is not None:
            (self.cgroup / "cgroup.procs").write_text(str(os.getpid()))
        if self.data_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (self.data_bytes, self.data_bytes))
        if self.device is not None:
            self.device.enter()
        else:
            os.sched_setaffinity(0, {self.core})


def prepare() -> None:
    """Once, before the first run: the environment of all processes, and of the server that forks them."""
    os.environ.update(ENVIRONMENT)


def run_ranks(
    function: Callable[..., Any],
    num: int,
    *args: Any,
    places: Sequence[EmulatedDevice] = (),
    limits: Limits | None = None,
    first_core: int = 0,
) -> list[Any]:
    """What `function(*args)` returns on each of `num` ranks."""
    limits, cores = limits or Limits(), own_cores()
    slots = [
        RankSlot(
            rank,
            num,
            location=_Location(
                cores[(first_core + rank) % len(cores)],
                places[rank] if places else None,
                limits.cgroups[rank] if limits.cgroups else None,
                limits.data_bytes,
            ),
        )
        for rank in range(num)
    ]
    return processes.run_ranks(_call, slots, function, args, seconds=limits.seconds, preload=PRELOAD)


def _call(function: Callable[..., Any], args: tuple[Any, ...], say: Say) -> Any:
    return function(*args)
