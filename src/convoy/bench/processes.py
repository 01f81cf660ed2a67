"""The processes that measure: fresh ones for each measurement, one a device, each on its own cores.

They are forked from a server that has torch imported, so that starting them takes no time worth mentioning, and nothing
that one configuration leaves in memory or in caches of the allocator meets the next one. (Started as `convoy train`
starts its ranks, each turn of a study would begin with seconds of imports.) Each runs in a place: on a block of
cores, on a GPU, or on a device of an emulated cluster.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from convoy import interfaces, resources
from convoy.data.processes import follow_parent
from convoy.errors import ConvoyError
from convoy.failure import end_of
from convoy.launch.rank import private_folder

Say = Callable[[str, int, int], None]  # is told of long work: what, done, of how many

_PATIENCE_S, _AGAIN_S = 60.0, 0.25  # in which ranks that were asked to stop save; and until they are asked again
# What the server that forks the processes imports: torch._dynamo comes with an optimizer, `jobs` with the trainer.
_PRELOAD = ["torch", "torch._dynamo", "convoy.bench.jobs", "convoy.report.report"]


class RankFailed(RuntimeError):  # noqa: N818 (it is what happened)
    """A rank raised an unexpected error, was killed or did not come back."""


def reason_of(error: Exception) -> str:
    """Why ranks did not do their work, without where in the code that was."""
    return str(error).strip().partition("\n")[0] if isinstance(error, RankFailed) else str(error)


Place = Callable[[], None]  # moves the calling process to where a rank runs, before torch starts threads


@dataclass(frozen=True)
class Places:
    """The devices that there are: cores of a CPU, GPUs, or those of an emulated cluster."""

    cores_per_device: int  # 0 on GPUs and in an emulated cluster
    emulated: Sequence[Place] = ()

    def of(self, num: int, round_: int = 1, first: int = 0) -> Sequence[Place]:
        """Those of some ranks, the first one on device `first`; from round to round they move on by one over equal
        devices."""
        if self.emulated:
            return self.emulated[first : first + num]
        if not self.cores_per_device:
            return [partial(_show_gpus, first, num)] * num
        cores, width = resources.own_cores(), self.cores_per_device
        blocks = len(cores) // width
        numbers = ((rank + first + round_ - 1) % blocks for rank in range(num))
        return [partial(resources.pin, resources.share(cores, blocks, number, width)) for number in numbers]


def _show_gpus(first: int, num: int) -> None:
    """Let only some GPUs be seen, of which a rank's number chooses one."""
    every = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(first + num)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(every.split(",")[first : first + num])


class Group:
    """Processes that do one work together, a rank in each of some places."""

    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self._results: dict[int, Any] = {}
        self._stack = contextlib.ExitStack()

    def start(
        self, function: Callable[..., Any], places: Sequence[Place], args: tuple[Any, ...], quiet: bool = False
    ) -> None:
        """Let each rank run `function(*args, say)`, of a module's top level. `quiet` drops what they print, which else
        goes to the standard error."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        folder = self._stack.enter_context(private_folder())
        for rank, place in enumerate(places):
            pipe, end = context.Pipe()
            variables = _variables(rank, len(places), folder / "store")
            job = end, place, rank, variables, quiet, function, args
            # a daemon may not start processes that load pictures
            process: BaseProcess = context.Process(target=_serve, args=job, daemon=False)
            process.start()  # may be interrupted: what has not begun cannot be killed
            self.processes.append(process)
            end.close()
            self.pipes.append(pipe)

    @property
    def waiting(self) -> list[Connection]:
        """The pipes of ranks that are not done."""
        return [pipe for rank, pipe in enumerate(self.pipes) if rank not in self._results]

    @property
    def results(self) -> list[Any]:
        return [self._results[rank] for rank in range(len(self.pipes))]

    def hear(self, pipe: Any, say: Say) -> None:
        """Take what a rank sends; what made it fail is raised."""
        rank = self.pipes.index(pipe)
        try:
            kind, value = pipe.recv()
        except (EOFError, ConnectionError) as error:
            self.processes[rank].join(5)
            raise RankFailed(f"rank {rank} {end_of(self.processes[rank].exitcode)}") from error
        if kind == "failed":
            raise value
        if kind == "says":
            say(*value)
        else:
            self._results[rank] = value

    def close(self) -> None:
        """End the processes that there still are."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self._stack.close()


def end_softly(groups: Iterable[Group]) -> None:
    """Ask ranks to end until they have: one that has not begun to train ignores it, and so it does the second."""
    processes, until = [process for group in groups for process in group.processes], time.monotonic() + _PATIENCE_S
    while time.monotonic() < until and any(process.is_alive() for process in processes):
        for process in processes:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGINT)
        time.sleep(_AGAIN_S)


def run_ranks(
    function: Callable[..., Any],
    places: Sequence[Place],
    *args: Any,
    seconds: float = 600.0,
    say: Say = lambda *_: None,
    quiet: bool = False,
) -> list[Any]:
    """What `function(*args, say)` gives on a rank in each of some places, which are ended after so many seconds."""
    group, deadline = Group(), time.monotonic() + seconds
    try:
        group.start(function, places, args, quiet)
        while group.waiting:
            ready = wait(group.waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = group.pipes.index(group.waiting[0])
                raise RankFailed(f"rank {late} did not come back in time (--timeout)")
            for pipe in ready:
                group.hear(pipe, say)
        return group.results
    finally:
        group.close()


_pipe: Connection | None = None  # of a rank to whoever started it


def _answer(kind: str, value: Any) -> None:
    assert _pipe is not None
    with contextlib.suppress(BrokenPipeError):
        _pipe.send((kind, value))


def give_up(sentence: str) -> None:
    """End this rank, from any thread, with a sentence for whoever started it."""
    _answer("failed", RankFailed(sentence))
    os._exit(1)


def _variables(rank: int, num: int, store: Path) -> dict[str, str]:
    """Those of `convoy.launch.start` where there are other ranks, which meet in the file `store`; all count as local,
    since they share the machine."""
    if num == 1:
        return {}
    variables = {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "convoy-bench", interfaces.STORE: str(store)}
    variables |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num))
    loopback = interfaces.loopback()
    return variables if loopback is None else variables | {"GLOO_SOCKET_IFNAME": loopback}


def _serve(
    pipe: Connection,
    place: Place,
    rank: int,
    variables: Mapping[str, str],
    quiet: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    global _pipe
    _pipe = pipe
    if quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    os.dup2(2, 1)  # the standard output is for the table
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it decides when it ends
    faulthandler.enable()

    def say(*work: Any) -> None:
        if rank == 0:
            _answer("says", work)

    try:
        os.environ.update(variables)
        place()
        follow_parent()  # by a thread, which is to run there, too
        import torch
        import torch.distributed as dist

        torch.set_num_threads(len(resources.own_cores()))
        torch.manual_seed(0)
        result = function(*args, say)
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves early would cut the connections of the others
            dist.destroy_process_group()
        _answer("done", result)
    except ConvoyError as error:
        _answer("failed", ConvoyError(str(error)))
    except BaseException as error:
        reason = f"rank {rank} failed: {type(error).__name__}: {error}\n{traceback.format_exc()}"
        _answer("failed", RankFailed(reason))
