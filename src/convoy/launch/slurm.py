"""Slurm: a script for `sbatch`, which saves and queues itself again before its time is over; and the place of a task
that its `srun` started, in torchrun's variables.

A script, not submitit: that submits a pickled Python function, pickles it again for every requeue, and starts one task
that would have to find the others. The signal goes to the script (`B:USR2`), which hands it to `srun`, because only the
script knows that the ranks ended because of it, and not of a failure.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convoy.errors import ConvoyError
from convoy.launch.templates import rendered

_TIMES = (
    r"(?:(?P<days>\d+)d)?(?:(?P<hours>\d+)h)?(?:(?P<minutes>\d+)m)?",
    r"(?P<days>\d+)-(?P<hours>\d\d?)(?::(?P<minutes>\d\d))?(?::(?P<seconds>\d\d))?",
    r"(?P<hours>\d\d?):(?P<minutes>\d\d):(?P<seconds>\d\d)",
)


def minutes_of(text: str) -> int:
    """A time in minutes, rounded up, from `90m`, `8h`, `1d12h`, or as Slurm writes it: `8:00:00`, `1-12`."""
    matches = filter(None, (re.fullmatch(form, text.strip().lower()) for form in _TIMES))
    parts = {unit: int(number or 0) for match in matches for unit, number in match.groupdict().items()}
    days, hours, minutes, seconds = (parts.get(unit, 0) for unit in ("days", "hours", "minutes", "seconds"))
    total = days * 1440 + hours * 60 + minutes + (seconds > 0)
    if total == 0:
        raise ConvoyError(f"--time {text!r} is no time: write e.g. 8h, 90m, 1d12h or 1-12:00:00")
    return total


# Options of `sbatch` that the script sets by options of Convoy's.
OWN = frozenset(
    ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "time", "signal", "requeue", "open-mode", "output")
)

_EARLY_S = 60  # Slurm may send a signal so much earlier than it was asked to


def script(
    arguments: Sequence[str],
    out: str | None,
    name: str,
    *,
    python: str,
    gpus: bool,
    options: Mapping[str, str | None],
    **values: Any,
) -> str:
    """The script of a training with the arguments of `convoy train`, `--resume` among them.

    `out` is what they say of the run directory, on a file system that all nodes share, None for a new one for each
    job; `python` the interpreter that has Convoy, on every node; `options` are others of `sbatch`, by name, and
    `values` those of `convoy launch slurm`. Each device is a task, of `gpus` a GPU too.
    """
    minutes, save_before = minutes_of(values["time"]), values["save_before"]
    if not name.isprintable():
        raise ConvoyError(f"--name {name!r} must be one line without control characters")
    if not 1 <= save_before < min(60 * minutes - _EARLY_S, 1 << 16):
        raise ConvoyError(
            f"--save-before {save_before} leaves nothing of the {60 * minutes:,} s of --time: Slurm may send its "
            f"signal {_EARLY_S} s early: give the job more time, or save later"
        )
    for option, value in options.items():
        if option in OWN:
            raise ConvoyError(f"--option {option} is set by an option of its own: see convoy launch slurm --help")
        if not re.fullmatch(r"[a-z][a-z-]*", option) or (value is not None and not value.isprintable()):
            raise ConvoyError(f"--option {option!r} is no option of sbatch: write e.g. --option partition=gpu")
    devices, width = values["devices_per_node"], values["cores_per_device"]
    all_options = {
        "job-name": name,
        "nodes": values["nodes"],
        "ntasks-per-node": devices,
        **({} if width is None else {"cpus-per-task": width}),
        **({"gpus-per-node": devices} if gpus else {}),
        "time": f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00",
        "signal": f"B:USR2@{save_before}",
        "requeue": None,
        "open-mode": "append",
        "output": f"{word(name)}-%j.log",
        **options,
    }
    command = shlex.join([python, "-m", "convoy", "train", *arguments])
    return rendered(
        "job.sbatch",
        lambda value: shlex.quote(str(value)),
        options=all_options,
        width=width,
        out=shlex.quote(out) if out is not None else f"runs/{word(name)}-$SLURM_JOB_ID",
        command=command if out is not None else f'{command} --out "$out"',
        max_restarts=values["max_restarts"],
    )


def word(name: str) -> str:
    """A name as a part of the names of files."""
    return re.sub(r"[^\w.-]+", "-", name)


def submit(script: Path) -> str:
    """Submit a script from the current folder, and return the number of the job."""
    if shutil.which("sbatch") is None:
        raise ConvoyError(f"there is no sbatch here: submit {script} on a host of the cluster, by sbatch {script}")
    answer = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if answer.returncode:
        message = " ".join((answer.stderr or answer.stdout).split())
        raise ConvoyError(f"sbatch does not take {script}: {message}")
    return answer.stdout.strip().partition(";")[0]


_FIRST_PORT, _NUM_PORTS = 15_000, 15_000


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str] | None:
    """torchrun's variables for a task that Slurm's `srun` started; None where there is no other task. The first host of
    the job is the master, and the port follows from the job's number."""
    if "SLURM_PROCID" not in environment or "SLURM_NTASKS" not in environment:
        return None
    # The batch script itself has these variables too, but is no task of a step.
    if "SLURM_TASK_PID" in environment and "SLURM_STEP_ID" not in environment:
        return None
    num_tasks = number_of(
        environment, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    )
    if num_tasks < 2:
        return None
    for name in ("SLURM_LOCALID", "SLURM_JOB_NODELIST", "SLURM_JOB_ID"):
        if not environment.get(name):
            raise ConvoyError(f"SLURM_PROCID is set but not {name}: start the ranks with srun inside of a job")
    job, local_rank = number_of(environment, "SLURM_JOB_ID"), number_of(environment, "SLURM_LOCALID")
    return {
        "RANK": str(number_of(environment, "SLURM_PROCID")),
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


def number_of(environment: Mapping[str, str], name: str) -> int:
    """A whole number that a launcher has set."""
    text = environment.get(name, "")
    if not text.isdecimal():
        problem = f"is {text!r}, but must be a whole number" if text else "is not set"
        raise ConvoyError(f"{name} {problem}: start the ranks with torchrun, srun or --devices")
    return int(text)
