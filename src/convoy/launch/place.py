"""This process's place among the ranks, by the variables of torchrun or Slurm."""

import os
import re
import signal
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from convoy.errors import ConvoyError

FOLDER = "CONVOY_LAUNCH"
# To a rank: the run as a whole is to stop, where SIGTERM says that another rank has failed. SIGUSR1 may have a handler
# of NCCL's or of a profiler; the first real-time signal is nobody's. macOS has none.
STOP = getattr(signal, "SIGRTMIN", signal.SIGUSR1)
# The signals that ask a rank to stop, and their names where the starting process received them.
HANDED_ON: Mapping[int, str] = {
    signal.SIGINT: "SIGINT",
    STOP: "SIGTERM",
    signal.SIGUSR2: "SIGUSR2",
    signal.SIGHUP: "SIGHUP",
}


def outlives(number: int) -> bool:
    """Whether this process was started to outlive this signal, as `nohup` does for that of a closed terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


_FIRST_PORT, _NUM_PORTS = 15_000, 15_000


@dataclass(frozen=True)
class RankPlace:
    """One rank among all."""

    rank: int
    num_ranks: int
    source: str  # its launcher, for sentences: `--devices`, `torchrun` or `Slurm`
    # where ranks of this attempt leave word for `convoy.launch.start`; None where it did not start them
    folder: str | None = None
    job: str = ""  # its name, the same when ranks are started again; empty where nobody restarts them
    restarts: int = 0  # so far
    max_restarts: int = 0

    def check(self, devices: int | None) -> None:
        if devices is not None and devices != self.num_ranks:
            raise ConvoyError(
                f"--devices {devices} contradicts {self.source}, which started {self.num_ranks} "
                f"rank{'s' if self.num_ranks > 1 else ''}: leave --devices out, or start {devices}"
            )


def find_place(environment: MutableMapping[str, str] = os.environ) -> RankPlace | None:
    """The place of this process; None where nobody started several. Slurm's variables are translated to torchrun's,
    which are set in the environment."""
    source = "torchrun"
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        variables = slurm_variables(environment)
        if variables is None:
            return None
        environment.update(variables)
        source = "Slurm"
    launch = environment.get(FOLDER)
    rank, num_ranks = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if not rank < num_ranks:
        raise ConvoyError(f"RANK={rank} must be below WORLD_SIZE={num_ranks}: start the ranks with torchrun")
    restarts, max_restarts = (
        int(environment.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    folder = str(Path(launch) / f"attempt-{restarts}") if launch else None
    return RankPlace(
        rank, num_ranks, "--devices" if launch else source, folder, job(environment), restarts, max_restarts
    )


def job(environment: Mapping[str, str] = os.environ) -> str:
    """The name of the launcher of this process, which stays the same when ranks are started again. For torch's elastic
    launcher that is the identifier of the job (`--rdzv-id`), or the agent itself where the user gave none; for Slurm
    the number of the job, which a requeued one keeps. Empty where nobody restarts anything."""
    if "TORCHELASTIC_RUN_ID" in environment:
        name = environment["TORCHELASTIC_RUN_ID"]
        return f"torchrun:{name}" if name != "none" else f"agent:{socket.gethostname()}:{os.getppid()}"
    return f"slurm:{environment['SLURM_JOB_ID']}" if environment.get("SLURM_JOB_ID") else ""


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str] | None:
    """torchrun's variables for a task that Slurm's `srun` started; None where there is no other task. The first host of
    the job is the master, and the port follows from the job's number."""
    if "SLURM_PROCID" not in environment or "SLURM_NTASKS" not in environment:
        return None
    # The batch script itself has these variables too, but is no task of a step.
    if "SLURM_TASK_PID" in environment and "SLURM_STEP_ID" not in environment:
        return None
    num_tasks = _number(
        environment, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    )
    if num_tasks < 2:
        return None
    for name in ("SLURM_LOCALID", "SLURM_JOB_NODELIST", "SLURM_JOB_ID"):
        if not environment.get(name):
            raise ConvoyError(f"SLURM_PROCID is set but not {name}: start the ranks with srun inside of a job")
    job, local_rank = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_LOCALID")
    return {
        "RANK": str(_number(environment, "SLURM_PROCID")),
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(max(_tasks_on_node(environment, num_tasks), local_rank + 1)),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment["SLURM_JOB_NODELIST"]),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_FIRST_PORT + job % _NUM_PORTS),
    }


def first_host(nodes: str) -> str:
    """The first host of Slurm's short form: `node[03-05,9],other` begins with `node03`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?([^,]*)", nodes)
    if match is None:
        raise ConvoyError(f"SLURM_JOB_NODELIST={nodes!r} names no host: set MASTER_ADDR to the first one")
    stem, ranges, rest = match.groups()
    return stem + (ranges or "").partition(",")[0].partition("-")[0] + rest


def _tasks_on_node(environment: Mapping[str, str], num_tasks: int) -> int:
    """Tasks of the step on this node, from a list such as `2(x3),1`."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or str(num_tasks)
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return num_tasks
        counts += [int(match[1])] * int(match[2] or 1)
    node = environment.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else num_tasks


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        problem = f"is {text!r}, but must be a whole number" if text else "is not set"
        raise ConvoyError(f"{name} {problem}: start the ranks with torchrun, srun or --devices")
    return int(text)
