"""A manifest for Kubernetes: a Kubeflow TrainJob, or an indexed Job with a headless Service, that start the same pods.

A pod has one container with torch's elastic launcher, volumes, limits, and no rights beyond its work. Nothing here
talks to a cluster, and no value of a user becomes anything but a value. Secrets are refused; whether names and amounts
are such as Kubernetes takes, its own `kubectl apply --dry-run=server` says.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from convoy.errors import ConvoyError
from convoy.launch.templates import rendered

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
    _check(arguments, environment, secrets, values["least_nodes"], values["num_nodes"])
    variables = {name: value for name, value in _ENVIRONMENT.items() if name not in secrets} | dict(environment)
    values |= {"arguments": arguments, "environment": variables, "secrets": secrets}
    values |= {"grace_s": _GRACE_S, "data_path": _DATA, "run_path": _RUNS}
    return rendered("manifest.yaml", _quoted, **values)


def _quoted(text: str) -> str:
    """A text that no reader takes for a number or a truth, nor for anything else of YAML."""
    document: str = yaml.safe_dump(text, default_style='"', width=2**31)
    return document.rstrip("\n")


def _check(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    secrets: Mapping[str, tuple[str, str]],
    least_nodes: int | None,
    num_nodes: int,
) -> None:
    if least_nodes is not None and not 1 <= least_nodes <= num_nodes:
        raise ConvoyError(f"--min-nodes {least_nodes} must be between 1 and --nodes {num_nodes}")
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
