"""Jobs for Slurm: a script for `sbatch`, which saves and queues itself again before its time is over."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from convoy import interfaces
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


@dataclass(frozen=True)
class SlurmJob:
    """A training, and the nodes that it runs on."""

    arguments: Sequence[str]  # of `convoy train`, without `--out` and `--resume`
    out: str | None  # on a file system that all nodes share; None for a new run directory for each job
    python: str  # the interpreter that has Convoy, on every node
    name: str
    nodes: int = 1
    devices_per_node: int = 1  # ranks, each a task, and on GPUs each a GPU
    gpus: bool = True
    cores_per_device: int | None = None  # None for Slurm's default
    time: str = "1h"  # limit of the job before it is queued again, as a person writes it
    save_before: int = 120  # seconds before its end at which the run is saved and queued again
    max_restarts: int = 3  # of the ranks, in the same job, when one has failed
    interface: str | None = None  # of every node, for the ranks; None for the one on the way to the first node
    options: Mapping[str, str | None] = field(default_factory=dict)  # other options of `sbatch`, by name

    def __post_init__(self) -> None:
        counts = {"--nodes": self.nodes, "--devices-per-node": self.devices_per_node}
        for option, number in {**counts, "--cores-per-device": self.cores_per_device}.items():
            if number is not None and number < 1:
                raise ConvoyError(f"{option} {number} must be at least 1")
        if not self.name.isprintable():
            raise ConvoyError(f"--name {self.name!r} must be one line without control characters")
        if self.max_restarts < 0:
            raise ConvoyError(f"--max-restarts {self.max_restarts} must be 0 or more")
        seconds = 60 * minutes_of(self.time)
        if not 1 <= self.save_before < min(seconds - _EARLY_S, 1 << 16):
            raise ConvoyError(
                f"--save-before {self.save_before} leaves nothing of the {seconds:,} s of --time: Slurm may send its "
                f"signal {_EARLY_S} s early: give the job more time, or save later"
            )
        if self.interface is not None:
            interfaces.check_name(self.interface)
        for name, value in self.options.items():
            if name in OWN:
                raise ConvoyError(f"--option {name} is set by an option of its own: see convoy launch slurm --help")
            if not re.fullmatch(r"[a-z][a-z-]*", name) or (value is not None and not value.isprintable()):
                raise ConvoyError(f"--option {name!r} is no option of sbatch: write e.g. --option partition=gpu")

    def script(self) -> str:
        hours, minutes = divmod(minutes_of(self.time), 60)
        options: dict[str, str | None] = {
            "job-name": self.name,
            "nodes": str(self.nodes),
            "ntasks-per-node": str(self.devices_per_node),
        }
        srun = ["--kill-on-bad-exit=1"]
        if self.cores_per_device is not None:
            options["cpus-per-task"] = str(self.cores_per_device)
            srun.append(f"--cpus-per-task={self.cores_per_device}")
        if self.gpus:
            options["gpus-per-node"] = str(self.devices_per_node)
        options |= {
            "time": f"{hours // 24}-{hours % 24:02}:{minutes:02}:00",
            "signal": f"B:USR2@{self.save_before}",
            "requeue": None,
            "open-mode": "append",
            "output": f"{_word(self.name)}-%j.log",
            **self.options,
        }
        command = f'{shlex.join([self.python, "-m", "convoy", "train", *self.arguments])} --out "$out" --resume'
        if self.interface is not None:
            command += f" --interface {shlex.quote(self.interface)}"
        return _SCRIPT.format(
            options="\n".join(
                f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={shlex.quote(value)}"
                for name, value in options.items()
            ),
            out=shlex.quote(self.out) if self.out is not None else f"runs/{_word(self.name)}-$SLURM_JOB_ID",
            srun=" ".join(srun),
            command=command,
            max_restarts=self.max_restarts,
        )


def _word(name: str) -> str:
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
