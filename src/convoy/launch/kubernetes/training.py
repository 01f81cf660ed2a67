"""A training on Kubernetes, and the checks of its names, amounts and arguments, which must hold no secret."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

from convoy.errors import ConvoyError

LONGEST_NAME = 63
_IMAGE = re.compile(
    r"(?:[a-zA-Z0-9](?:[-a-zA-Z0-9.]*[a-zA-Z0-9])?(?::[0-9]+)?/)?"  # registry
    r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"  # path
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"  # tag, digest
)
# Kinds of names in Kubernetes: a pattern, the longest, and the sentence for all others.
_FORMS = {
    "label": (
        re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?"),  # RFC 1035, of jobs and services
        10_000,
        "is no name for Kubernetes: use small letters, digits and '-', beginning with a letter and ending with a "
        "letter or a digit",
    ),
    "subdomain": (
        re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"),  # RFC 1123, of claims, secrets
        253,
        "is no name for Kubernetes: use small letters, digits, '-' and '.', beginning and ending with a letter or a "
        "digit",
    ),
    "variable": (
        re.compile(r"[A-Za-z_][A-Za-z0-9_]*"),
        10_000,
        "is no name of a variable: use letters, digits and '_', beginning with no digit",
    ),
    "secret key": (
        re.compile(r"[-._a-zA-Z0-9]+"),
        253,
        "is no key of a Secret: use letters, digits, '-', '_' and '.'",
    ),
    "image": (_IMAGE, 500, "is no image: write it like registry.example/team/convoy:1.0"),
    "resource": (
        re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"),
        10_000,
        "is no resource: write it like nvidia.com/gpu, or none for CPUs",
    ),
}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_UNITS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGT", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGT", 1)},
}


def check(option: str, text: str, form: str, longest: int = LONGEST_NAME) -> None:
    """Refuse a name that Kubernetes would not take; a label may be as long as `longest`."""
    pattern, most, problem = _FORMS[form]
    if not pattern.fullmatch(text) or len(text) > most:
        raise ConvoyError(f"{option} {text!r} {problem}")
    if form == "label" and len(text) > longest:
        raise ConvoyError(f"{option} {text!r} has {len(text)} characters: use at most {longest}")


def amount(option: str, text: str) -> Decimal:
    """The value of an amount of CPUs or bytes: `500m` is a half, `2Gi` is 2 · 1024³."""
    match = _AMOUNT.fullmatch(text)
    if match is None or not Decimal(match[1]):
        raise ConvoyError(f"{option} {text!r} is no amount: write CPUs like 8 or 500m, and memory like 32Gi")
    return Decimal(match[1]) * _UNITS[match[2] or ""]


_NAME = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|(?:KEYS?|_PWD|_PAT|_AUTH)$")
_VALUE = re.compile(
    r"://[^/@\s]*:[^/@\s]+@"  # https://user:password@host
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|\b(?:hf_[A-Za-z0-9]{20,}|gh[opsu]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|AKIA[0-9A-Z]{16}|xox[abp]-[\w-]{20,})"
)


RUNTIME = "torch-distributed"  # the runtime for torch that Kubeflow Trainer comes with
DATA_PATH, RUN_PATH = "/data", "/runs"  # where the claims are mounted
_RESERVED = ("PET_", "TORCHELASTIC_", "CONVOY_LAUNCH", "CONVOY_STORE", "KUBERNETES_")
_OWN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "HOME"}


@dataclass(frozen=True)
class SecretVariable:
    """An environment variable whose value stays in a Secret."""

    name: str
    secret: str
    key: str

    def __post_init__(self) -> None:
        check("--env-from-secret", self.name, "variable")
        check("--env-from-secret", self.secret, "subdomain")
        check("--env-from-secret", self.key, "secret key")


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training: what to run, on what, with which volumes. Making it checks it; the ConvoyError names the option
    that is wrong."""

    name: str  # of the job, and of its run
    image: str  # with Convoy in it
    arguments: tuple[str, ...]  # of `convoy train`
    num_nodes: int  # pods
    devices_per_node: int  # ranks in each
    run_claim: str  # the PersistentVolumeClaim for runs, mounted at `/runs`
    cpu: str  # CPUs of a pod
    memory: str  # bytes of a pod, shared memory included
    shared_memory: str  # bytes of its /dev/shm
    data_claim: str | None = None  # the PersistentVolumeClaim with the data, mounted at `/data` for reading
    least_nodes: int | None = None  # pods with which the run begins, and goes on while others are away; None means all
    accelerator: str | None = "nvidia.com/gpu"  # the resource that a device is; None for CPUs
    namespace: str | None = None  # None leaves it to `kubectl`
    runtime: str = RUNTIME  # the ClusterTrainingRuntime of a TrainJob
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[SecretVariable, ...] = ()
    max_restarts: int = 3  # of the ranks of a pod before the pod fails, and of pods
    user: int = 1000  # user and group of the processes; not 0, which is root

    def __post_init__(self) -> None:
        check("--name", self.name, "label", LONGEST_NAME - len(f"-node-0-{self.num_nodes - 1}"))
        check("--image", self.image, "image")
        check("--run-claim", self.run_claim, "subdomain")
        if self.data_claim is not None:
            check("--data-claim", self.data_claim, "subdomain")
        if self.namespace is not None:
            check("--namespace", self.namespace, "label")
        if self.accelerator is not None:
            check("--accelerator", self.accelerator, "resource")
        for option, value, least in (
            ("--nodes", self.num_nodes, 1),
            ("--devices-per-node", self.devices_per_node, 1),
            ("--max-restarts", self.max_restarts, 0),
            ("--user", self.user, 1),
        ):
            if value < least:
                why = ", since 0 is root" if option == "--user" else ""
                raise ConvoyError(f"{option} {value} must be at least {least}{why}")
        if self.least_nodes is not None and not 1 <= self.least_nodes <= self.num_nodes:
            raise ConvoyError(f"--min-nodes {self.least_nodes} must be between 1 and --nodes {self.num_nodes}")
        amount("--cpu", self.cpu)
        if amount("--shared-memory", self.shared_memory) > amount("--memory", self.memory):
            raise ConvoyError(
                f"--shared-memory {self.shared_memory} is part of --memory {self.memory}, and cannot be more: raise "
                "--memory"
            )
        self._check_environment()
        self._check_arguments()

    def _check_environment(self) -> None:
        secret = [variable.name for variable in self.secrets]
        for name in [*self.environment, *secret]:
            check("--env", name, "variable")
            if name in _OWN or name.startswith(_RESERVED):
                raise ConvoyError(f"--env {name} is set by the launcher: leave it away")
        for name, value in self.environment.items():
            if _NAME.search(name.upper()) or _VALUE.search(value):
                raise ConvoyError(
                    f"--env {name} looks like a secret, and a manifest is no place for one: put it into a Kubernetes "
                    f"Secret and give --env-from-secret {name}=SECRET/KEY"
                )
            _check_text(f"--env {name}", value)
        repeated_names = [name for name in secret if secret.count(name) > 1 or name in self.environment]
        if repeated_names:
            raise ConvoyError(f"the variable {repeated_names[0]} is given twice: leave one away")

    def _check_arguments(self) -> None:
        for argument in self.arguments:
            _check_text("an argument after --", argument)
        for number, argument in enumerate(self.arguments, 1):
            if _VALUE.search(argument):
                raise ConvoyError(
                    f"argument {number} after -- looks like it holds a password or a token, and a manifest is no place "
                    "for one: mount the data as a claim, or give the secret by --env-from-secret"
                )


def _check_text(what: str, text: str) -> None:
    """Refuse text that YAML or a process cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConvoyError(f"{what} is not text in UTF-8 ({text!a}): rename it") from None
    if "\0" in text:
        raise ConvoyError(f"{what} has a zero byte in it: leave it away")


def complete(
    arguments: Sequence[str],
    said: Mapping[str, Any],
    name: str,
    num_devices: int,
    elastic: bool = False,
    data_claim: bool = True,
) -> tuple[str, ...]:
    """The user's arguments with `--out /runs/NAME` and `--resume` where they lack them; `said` has their values by
    names of options. Refused where the run would be lost with the pod, the data are on no volume, or `--devices` is not
    that of the job."""
    if not arguments:
        raise ConvoyError("nothing to train: write -- and what convoy train would be given, e.g. -- resnet50")
    out, data, devices = (said.get(option) for option in ("out", "data", "devices"))
    if devices is not None and elastic:
        raise ConvoyError(f"--devices {devices} contradicts --min-nodes, which lets the number change: leave it away")
    if devices is not None and devices != num_devices:
        raise ConvoyError(
            f"--devices {devices} contradicts --nodes and --devices-per-node, which make {num_devices}: leave it away"
        )
    if out is not None and not _below(str(out), RUN_PATH):
        raise ConvoyError(
            f"--out {out} would be lost with the pod: name a folder below {RUN_PATH}, where --run-claim is mounted"
        )
    if data is not None and _below(data, DATA_PATH, itself=True) and not data_claim:
        raise ConvoyError(f"--data {data} is on no volume: give the claim that has it by --data-claim")
    added = [] if out is not None else ["--out", f"{RUN_PATH}/{name}"]
    if not said.get("resume"):
        added.append("--resume")
    return (*arguments, *added)


def name_for(model: str | None, recipe: str | None) -> str:
    """A name for the job that resembles that of the model or the recipe: `timm:ViT_B` becomes `timm-vit-b`."""
    label = re.sub(r"[^a-z0-9]+", "-", (model or recipe or "convoy").lower()).strip("-")[:40].strip("-")
    return label if label[:1].isalpha() else f"convoy-{label}".strip("-")


def _below(path: str, folder: str, itself: bool = False) -> bool:
    place, root = PurePosixPath(path), PurePosixPath(folder)
    return ".." not in place.parts and root in (*place.parents, *([place] if itself else []))
