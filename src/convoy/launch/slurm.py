"""Slurm: a script for `sbatch`, which saves and queues itself again before its time is over; and the place of a task
that its `srun` started, in torchrun's variables."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from convoy.errors import ConvoyError

_UNITS = {"d": 1440, "h": 60, "m": 1}
_SLURM = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d{1,2})(?::(?P<minutes>\d{2}))?(?::(?P<seconds>\d{2}))?")


def minutes_of(text: str) -> int:
    """A time in minutes, rounded up, from `90m`, `8h`, `1d12h`, or as Slurm writes it: `8:00:00`, `1-12`."""
    words = text.strip().lower()
    parts = re.findall(r"(\d+)([dhm])", words)
    match = _SLURM.fullmatch(words)
    if parts and "".join(number + unit for number, unit in parts) == words:
        total = sum(int(number) * _UNITS[unit] for number, unit in parts)
    elif match is not None and (match["days"] or match["seconds"]):
        days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
        total = days * 1440 + hours * 60 + minutes + (seconds > 0)
    else:
        raise ConvoyError(f"--time {text!r} is no time: write e.g. 8h, 90m, 1d12h or 1-12:00:00")
    if total == 0:
        raise ConvoyError(f"--time {text!r} is no time at all: write e.g. 8h")
    return total


# Options of `sbatch` that the script sets by options of Convoy's.
OWN = frozenset(
    ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "time", "signal", "requeue", "open-mode", "output")
)

_EARLY_S = 60  # Slurm may send a signal so much earlier than it was asked to

_SCRIPT = """\
#!/bin/bash
{options}
# One task for each device; Convoy finds its place by Slurm's variables. Slurm sends USR2 before the time is over: the
# run is saved and the job queued again, and goes on where it was, like after the loss of a node.

# The tasks know each other by it; srun hands it on with the environment.
export CONVOY_SECRET="${{CONVOY_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}}"
out={out}
stopping=
step=
told=
stop() {{
    stopping=yes
    if [ -n "$step" ] && [ -z "$told" ]; then
        told=yes
        kill -USR2 "$step"
    fi
}}
trap stop USR2
restarts=0
while true; do
    step=
    srun {srun} \\
        {command} &
    step=$!
    [ -z "$stopping" ] || stop  # the signal came while nothing ran
    wait "$step"
    status=$?
    if [ -n "$stopping" ]; then
        wait "$step"  # the first one ended with the signal
        status=$?
    fi
    if [ "$status" -eq 0 ] || [ "$status" -eq 2 ]; then
        exit "$status"  # done, or a mistake that another try would not mend
    fi
    if [ -n "$stopping" ]; then
        echo "queued again, to go on with $out"
        exec scontrol requeue "$SLURM_JOB_ID"
    fi
    if [ "$restarts" -ge {max_restarts} ]; then
        exit "$status"
    fi
    restarts=$((restarts + 1))
    echo "restart $restarts of {max_restarts} after status $status"
done
"""


def script(
    arguments: Sequence[str],
    out: str | None,
    name: str,
    python: str = "python",
    nodes: int = 1,
    devices_per_node: int = 1,
    gpus: bool = True,
    cores_per_device: int | None = None,
    time: str = "1h",
    save_before: int = 120,
    max_restarts: int = 3,
    options: Mapping[str, str | None] = {},
) -> str:
    """The script of a training with the arguments of `convoy train`, `--resume` among them.

    `out` is what they say of the run directory, on a file system that all nodes share, None for a new one for each
    job; `python` the interpreter that has Convoy, on every node. Each device is a task, of `gpus` a GPU too. `time`,
    as a person writes it, is the limit of the job before it is queued again, saved `save_before` seconds earlier; ranks
    start again within the job `max_restarts` times when one has failed. `options` are others of `sbatch`, by name.
    """
    minutes = minutes_of(time)
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
    width = {} if cores_per_device is None else {"cpus-per-task": str(cores_per_device)}
    all_options = {
        "job-name": name,
        "nodes": str(nodes),
        "ntasks-per-node": str(devices_per_node),
        **width,
        **({"gpus-per-node": str(devices_per_node)} if gpus else {}),
        "time": f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00",
        "signal": f"B:USR2@{save_before}",
        "requeue": None,
        "open-mode": "append",
        "output": f"{word(name)}-%j.log",
        **options,
    }
    command = shlex.join([python, "-m", "convoy", "train", *arguments])
    return _SCRIPT.format(
        options="\n".join(
            f"#SBATCH --{option}" if value is None else f"#SBATCH --{option}={shlex.quote(value)}"
            for option, value in all_options.items()
        ),
        out=shlex.quote(out) if out is not None else f"runs/{word(name)}-$SLURM_JOB_ID",
        srun=" ".join(["--kill-on-bad-exit=1", *(f"--{option}={value}" for option, value in width.items())]),
        command=command if out is not None else f'{command} --out "$out"',
        max_restarts=max_restarts,
    )


def word(name: str) -> str:
    """A name as a part of the names of files."""
    return re.sub(r"[^\w.-]+", "-", name)


def submit(script: Path) -> str:
    """Submit a script from the current folder, and return the number of the job."""
    if shutil.which("sbatch") is None:
        raise ConvoyError(f"there is no sbatch here: submit {script} on a host of the cluster, by sbatch {script}")
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split())
        raise ConvoyError(f"sbatch does not take {script}: {message}")
    return done.stdout.strip().partition(";")[0]


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
