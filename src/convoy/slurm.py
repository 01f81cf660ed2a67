"""The place of a task that Slurm's `srun` has started, as torchrun's variables, by which ranks find each other."""

import os
import re
from collections.abc import Mapping, MutableMapping

from convoy.errors import ConvoyError
from convoy.interfaces import number_of

_FIRST_PORT, _NUM_PORTS = 15_000, 15_000
_STEP = 1_009  # ports from one step of a job to the next: jobs with the numbers that follow run beside it


def translate(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables in a task of a step that has several, where nobody has set them. The master is the first
    host of the step, which may have some of the job's; its port follows from the numbers of both."""
    if {"RANK", "WORLD_SIZE"} & {*environment} or not {"SLURM_PROCID", "SLURM_NTASKS"} <= {*environment}:
        return
    # The batch script itself has these variables too, but is no task of a step.
    if "SLURM_TASK_PID" in environment and "SLURM_STEP_ID" not in environment:
        return
    of_job = "SLURM_STEP_NUM_TASKS" not in environment
    num_tasks = number_of(environment, "SLURM_NTASKS" if of_job else "SLURM_STEP_NUM_TASKS")
    if num_tasks < 2:
        return
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ConvoyError("SLURM_PROCID is set but not SLURM_JOB_NODELIST: start the ranks with srun inside of a job")
    rank, local_rank, job = (number_of(environment, f"SLURM_{name}") for name in ("PROCID", "LOCALID", "JOB_ID"))
    step = number_of(environment, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environment else 0
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(max(_tasks_on_node(environment, num_tasks), local_rank + 1)),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_FIRST_PORT + (job + _STEP * step) % _NUM_PORTS),
    }
    environment.update(variables)


def first_host(nodes: str) -> str:
    """The first host of Slurm's short form: `node[03-05,9],other` begins with `node03`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?([^,]*)", nodes)
    if match is None:
        raise ConvoyError(f"the node list {nodes!r} names no host: set MASTER_ADDR to the first one")
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
