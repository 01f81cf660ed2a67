"""Runs a function on fresh processes, one a device, each pinned to one core and one thread, or within limits.

The processes are those of `convoy bench`, forked from a server that has torch imported. They know their places by
torchrun's variables.
"""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from convoy.bench import processes
from convoy.bench.emulated import EmulatedDevice
from convoy.bench.processes import Say
from convoy.errors import ConvoyError
from convoy.resources import folders, own_cores
from measuring import harness

ENVIRONMENT = {
    "GOMP_SPINCOUNT": "10000",  # waiting threads give the core back
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


@dataclass(frozen=True)
class _Place:
    """Where a rank runs: within its limits, and on an emulated device or a core of this machine."""

    core: int
    device: EmulatedDevice | None
    cgroup: Path | None

    def __call__(self) -> None:
        os.environ.update(ENVIRONMENT)
        if self.cgroup is not None:
            (self.cgroup / "cgroup.procs").write_text(str(os.getpid()))
        if self.device is not None:
            self.device()
        else:
            os.sched_setaffinity(0, {self.core})


def run_ranks(
    function: Callable[..., Any],
    num: int,
    *args: Any,
    places: Sequence[EmulatedDevice] = (),
    cgroups: Sequence[Path] = (),
    seconds: float = 600.0,
    first_core: int = 0,
) -> list[Any]:
    """What `function(*args)` returns on each of `num` ranks, which join control groups if there are some, and are ended
    after so many seconds."""
    os.environ.update(ENVIRONMENT)  # also of the server that forks them, which starts with the first call
    cores = own_cores()
    limited = [
        _Place(
            cores[(first_core + rank) % len(cores)],
            places[rank] if places else None,
            cgroups[rank] if cgroups else None,
        )
        for rank in range(num)
    ]
    return processes.run_ranks(_call, limited, function, args, seconds=seconds)


def _call(function: Callable[..., Any], args: tuple[Any, ...], say: Say) -> Any:
    return function(*args)


def bits_per_second(num_bytes: int) -> float:
    """What each of two ranks sends, and receives, in a second of gloo's all-reduce of `num_bytes`, which sends as many
    bytes each way as it adds up. Both ranks call it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    x = torch.ones(num_bytes // 4)
    dist.all_reduce(x[:1024])
    seconds = []
    for _ in range(3):
        dist.barrier()
        seconds.append(harness.seconds_of(lambda: dist.all_reduce(x)))
    return 8 * num_bytes / statistics.median(seconds)


@contextmanager
def memory_groups(num: int, limit: int | None) -> Iterator[list[Path]]:
    """Control groups (Linux, version 1, root) for `num` processes, which are killed if they have more than the limit;
    gone when the context is left. By then the processes must have ended."""
    parent = next((folder for folder, version in folders("memory") if version == 1 and folder.is_dir()), None)
    if parent is None:
        raise ConvoyError("the memory of a process cannot be limited here: that needs control groups version 1")
    made: list[Path] = []
    try:
        for number in range(num):
            path = parent / f"convoy-{os.getpid()}-{number}"
            try:
                path.mkdir()
                made.append(path)
                if limit is not None:
                    (path / "memory.limit_in_bytes").write_text(str(limit), encoding="ascii")
            except OSError as error:
                raise ConvoyError(f"the memory of a process cannot be limited here ({error}): be root") from error
        yield made
    finally:
        for group in made:
            group.rmdir()
