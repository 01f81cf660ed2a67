"""What a cluster's scheduler is given: a script for Slurm's `sbatch`, which saves and queues itself again before its
time is over; and a manifest for Kubernetes: a Kubeflow TrainJob, or an indexed Job with a headless Service, that start
the same pods.

Slurm gets a script, not a function by submitit: that is pickled, again for every requeue, and starts one task that
would have to find the others. The signal goes to the script (`B:USR2`), which hands it to `srun`, because only the
script knows that the ranks ended because of it, and not of a failure.

A pod has one container with torch's elastic launcher, volumes, limits, and no rights beyond its work. Nothing here
talks to a cluster but by `sbatch`, and no value of a user becomes anything but a value. Secrets are refused; whether
names and amounts are such as Kubernetes takes, its own `kubectl apply --dry-run=server` says.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from convoy.errors import ConvoyError

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


def job_script(
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
    return _rendered(
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


KINDS = ("trainjob", "job")
RUNTIME = "torch-distributed"  # the runtime for torch that Kubeflow Trainer comes with
# Time for a checkpoint between the signal to stop and the end.
_GRACE_S = 120
_DATA, _RUNS = "/data", "/runs"  # where the claims are mounted
# Variables that a pod has anyway; the second: the seconds after which torch's launcher kills its ranks, 30 by default.
_ENVIRONMENT = {"HOME": "/tmp", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_GRACE_S - 10)}

# Variables that the launchers set.
_RESERVED = re.compile(
    r"(PET_|TORCHELASTIC_|CONVOY_LAUNCH|CONVOY_STORE|KUBERNETES_).*|HOME|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_)?RANK"
    r"|(LOCAL_)?WORLD_SIZE"
)
_SECRET_NAME = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|(?:KEYS?|_PWD|_PAT|_AUTH)$")
_SECRET_VALUE = re.compile(
    r"://[^/@\s]*:[^/@\s]+@"  # https://user:password@host
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|\b(?:hf_[A-Za-z0-9]{20,}|gh[opsu]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|AKIA[0-9A-Z]{16}|xox[abp]-[\w-]{20,})"
)


def manifest(
    arguments: Sequence[str], environment: Mapping[str, str], secrets: Mapping[str, tuple[str, str]], **values: Any
) -> str:
    """The documents to apply, in ASCII: `arguments` are those of `convoy train`, `environment` and `secrets` variables
    and those whose values are keys of Secrets, `values` the other options of `convoy launch kubernetes` and the
    `name`. Raises ConvoyError, which names the option, for a secret, and what no cluster would find wrong."""
    least_nodes, num_nodes = values["least_nodes"], values["num_nodes"]
    if least_nodes is not None and not 1 <= least_nodes <= num_nodes:
        raise ConvoyError(f"--min-nodes {least_nodes} must be between 1 and --nodes {num_nodes}")
    _check_secrets(arguments, environment, secrets)
    variables = {name: value for name, value in _ENVIRONMENT.items() if name not in secrets} | dict(environment)
    values |= {"arguments": arguments, "environment": variables, "secrets": secrets}
    values |= {"grace_s": _GRACE_S, "data_path": _DATA, "run_path": _RUNS}
    return _rendered("manifest.yaml", _quoted, **values)


def _quoted(text: str) -> str:
    """A text that no reader takes for a number or a truth, nor for anything else of YAML."""
    document: str = yaml.safe_dump(text, default_style='"', width=2**31)
    return document.rstrip("\n")


def _check_secrets(arguments: Sequence[str], environment: Mapping[str, str], secrets: Collection[str]) -> None:
    for name in (*environment, *secrets):
        if _RESERVED.fullmatch(name):
            raise ConvoyError(f"--env {name} is set by the launcher: leave it away")
    for name, value in environment.items():
        if _SECRET_NAME.search(name.upper()) or _SECRET_VALUE.search(value):
            raise ConvoyError(
                f"--env {name} looks like a secret, and a manifest is no place for one: put it into a Kubernetes "
                f"Secret and give --env-from-secret {name}=SECRET/KEY"
            )
    for number, argument in enumerate(arguments, 1):
        if _SECRET_VALUE.search(argument):
            raise ConvoyError(
                f"argument {number} after -- looks like it holds a password or a token, and a manifest is no place "
                "for one: mount the data as a claim, or give the secret by --env-from-secret"
            )
    for text in (*environment.values(), *arguments):
        if not text.isascii() and text != text.encode("utf-8", "replace").decode():
            raise ConvoyError(f"{text!a} is not text in UTF-8, which a manifest is: rename it")


def complete(
    arguments: Sequence[str], values: Mapping[str, Any], name: str, has_data_claim: bool = True
) -> tuple[str, ...]:
    """The user's arguments with `--out /runs/NAME` and `--resume` where they lack them; `values` are those of options.
    Refused where the run would be lost with the pod, or the data are on no volume."""
    out, data = (values.get(option) for option in ("out", "data"))
    if out is not None and not _below(str(out), _RUNS):
        raise ConvoyError(
            f"--out {out} would be lost with the pod: name a folder below {_RUNS}, where --run-claim is mounted"
        )
    if data is not None and (data == _DATA or _below(data, _DATA)) and not has_data_claim:
        raise ConvoyError(f"--data {data} is on no volume: give the claim that has it by --data-claim")
    lacking = [] if out is not None else ["--out", f"{_RUNS}/{name}"]
    return (*arguments, *lacking, *([] if values.get("resume") else ["--resume"]))


def _below(path: str, folder: str) -> bool:
    place = PurePosixPath(path)
    return ".." not in place.parts and PurePosixPath(folder) in place.parents


def name_for(model: str | None, recipe: str | None) -> str:
    """A name for the job that resembles that of the model or the recipe: `timm:ViT_B` becomes `timm-vit-b`."""
    label = re.sub(r"[^a-z0-9]+", "-", (model or recipe or "convoy").lower()).strip("-")[:40].strip("-")
    return label if label[:1].isalpha() else f"convoy-{label}".strip("-")


def _rendered(template: str, quoted: Callable[[Any], str], /, **values: Any) -> str:
    """A template with these values, which pass through its filter `quoted` where they are a user's."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # which no other command needs

    templates = Environment(
        loader=PackageLoader("convoy.launch"), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    templates.filters["quoted"] = quoted
    return templates.get_template(template).render(values)
