"""Runs a function on fresh processes, one a device, each pinned to one core and one thread.

The processes are forked from a server that has torch and the libraries beside which Convoy is measured imported, so
that starting them takes no time worth mentioning. They know their places by torchrun's variables.
"""

import faulthandler
import multiprocessing
import os
import resource
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from measuring.hosts import Host

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
    hosts: Sequence[Host] = (),
    limits: Limits | None = None,
    first_core: int = 0,
) -> list[Any]:
    """What `function(*args)` returns on each of `num` ranks.

    Args:
        function: of a module's top level.
        num: processes; with one there is no process group to join.
        args: for the function; they and the results are pickled.
        hosts: where the ranks are, in turn; none for this machine's loopback.
        limits: what the ranks may use.
        first_core: the core of rank 0, counted among those of this process; the others follow.

    Raises:
        RankFailed: with what the first rank to fail has said.
    """
    limits = limits or Limits()
    context = multiprocessing.get_context("forkserver")
    places = [_Place.of(rank, num, hosts, limits, first_core) for rank in range(num)]
    port = 29500 if hosts else _free_port()
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for place in places:
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=_serve, args=(theirs, place, port, function, args), daemon=True
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
class _Place:
    rank: int
    num: int
    core: int
    address: str
    host: Host | None
    cgroup: Path | None
    data_bytes: int | None

    @staticmethod
    def of(rank: int, num: int, hosts: Sequence[Host], limits: Limits, first_core: int) -> "_Place":
        cores = sorted(os.sched_getaffinity(0))
        return _Place(
            rank=rank,
            num=num,
            core=cores[(first_core + rank) % len(cores)],
            address=hosts[0].address if hosts else "127.0.0.1",
            host=hosts[rank % len(hosts)] if hosts and num > 1 else None,
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
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "benchmark",
            "GLOO_SOCKET_IFNAME": self.host.interface if self.host else "lo",
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


def _serve(pipe: Connection, place: _Place, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """A rank's whole life."""
    faulthandler.enable()
    try:
        if place.cgroup is not None:
            (place.cgroup / "cgroup.procs").write_text(str(os.getpid()))
        if place.data_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (place.data_bytes, place.data_bytes))
        if place.host is not None:
            place.host.enter()
        os.sched_setaffinity(0, {place.core})
        os.environ.update(place.variables(port))
        answer = True, _call(function, args)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send(answer)


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
