"""Runs a function on fresh processes, one a device, each pinned to one core and one thread.

The processes are forked from a server that has torch and the libraries beside which Convoy is measured imported, so
that starting them takes no time worth mentioning. They know their places by torchrun's variables.
"""

import faulthandler
import multiprocessing
import os
import resource
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from convoy.bench.emulated import Place

PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "convoy", "lightning.fabric", "accelerate"]
ENVIRONMENT = {
    "GOMP_SPINCOUNT": "10000",  # waiting threads give the core back
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


class RankFailed(RuntimeError):  # noqa: N818 (it is what happened)
    """A rank raised an error, was killed or did not come back."""


@dataclass(frozen=True)
class Limits:
    """What a run may use.

    Attributes:
        seconds: until it is ended.
        cgroups: for each rank the control group that it joins, if it is to have one.
        data_bytes: that each rank may allocate; None for all there is.
    """

    seconds: float = 600.0
    cgroups: tuple[Path, ...] = ()
    data_bytes: int | None = None


def prepare() -> None:
    """Once, before the first run: the environment of all processes, and what their server imports."""
    os.environ.update(ENVIRONMENT)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)


def run_ranks(
    function: Callable[..., Any],
    num: int,
    *args: Any,
    places: Sequence[Place] = (),
    limits: Limits | None = None,
    first_core: int = 0,
) -> list[Any]:
    """What `function(*args)` returns on each of `num` ranks.

    Args:
        function: of a module's top level.
        num: processes; with one there is no process group to join.
        args: for the function; they and the results are pickled.
        places: the emulated devices of the ranks; none for this machine's cores and its loopback.
        limits: what the ranks may use.
        first_core: the core of rank 0, counted among those of this process; the others follow. Places have their own.

    Raises:
        RankFailed: with what the first rank to fail has said.
    """
    limits = limits or Limits()
    context = multiprocessing.get_context("forkserver")
    seats = [_Seat.of(rank, num, places, limits, first_core) for rank in range(num)]
    port = _free_port()
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for seat in seats:
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=_serve, args=(theirs, seat, port, function, args), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return _collect(pipes, processes, time.monotonic() + limits.seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


@dataclass(frozen=True)
class _Seat:
    rank: int
    num: int
    core: int
    place: Place | None
    cgroup: Path | None
    data_bytes: int | None

    @staticmethod
    def of(rank: int, num: int, places: Sequence[Place], limits: Limits, first_core: int) -> "_Seat":
        cores = sorted(os.sched_getaffinity(0))
        return _Seat(
            rank=rank,
            num=num,
            core=cores[(first_core + rank) % len(cores)],
            place=places[rank] if places else None,
            cgroup=limits.cgroups[rank] if limits.cgroups else None,
            data_bytes=limits.data_bytes,
        )

    def variables(self, port: int) -> dict[str, str]:
        """As torchrun sets them; all ranks count as local, since they share the machine."""
        if self.num == 1:
            return dict(ENVIRONMENT)
        return {
            **ENVIRONMENT,
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(self.num),
            "LOCAL_WORLD_SIZE": str(self.num),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "benchmark",
            "GLOO_SOCKET_IFNAME": "lo",
            **(self.place.environment if self.place else {}),
        }


def _collect(pipes: list[Connection], processes: list[BaseProcess], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        left = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"rank {min(left.values())} did not come back in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = left[pipe]
            try:
                done, value = pipe.recv()
            except (EOFError, ConnectionError) as error:
                processes[rank].join(5)
                raise RankFailed(f"rank {rank} ended with status {processes[rank].exitcode}") from error
            if not done:
                raise RankFailed(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _serve(pipe: Connection, seat: _Seat, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """A rank's whole life."""
    faulthandler.enable()
    try:
        if seat.cgroup is not None:
            (seat.cgroup / "cgroup.procs").write_text(str(os.getpid()))
        if seat.data_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (seat.data_bytes, seat.data_bytes))
        if seat.place is not None:
            seat.place.enter()
        else:
            os.sched_setaffinity(0, {seat.core})
        os.environ.update(seat.variables(port))
        threading.Thread(target=_end_with_parent, daemon=True).start()
        answer = True, _call(function, args)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send(answer)


def _end_with_parent() -> None:
    """A rank that outlives whoever measures would be in the way of other measurements."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = function(*args)
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early would cut the connections of the others
        dist.destroy_process_group()
    return result


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
