"""Manifests for Kubernetes: a Kubeflow TrainJob, or an indexed Job with a headless Service, that start the same pods.

A pod has one container with torch's elastic launcher, volumes, limits, and no rights beyond its work: it is
"restricted" in the sense of Kubernetes' Pod Security Standards. Nothing here talks to a cluster, and no value of a user
becomes anything but a value. Secrets are refused; whether names and amounts are such as Kubernetes takes, its own
`kubectl apply --dry-run=server` says.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from convoy.errors import ConvoyError
from convoy.launch.torchrun import BACKEND

PORT = 29500
# How long a pod waits for the others, which may have to pull the image first, and for the first one to listen.
JOIN_TIMEOUT_S, READ_TIMEOUT_S = 1800, 600
# Time for a checkpoint between the signal to stop and the end.
GRACE_S = 120
# The variable with the seconds after which torch's launcher kills its ranks, 30 by default.
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
RUNTIME = "torch-distributed"  # the runtime for torch that Kubeflow Trainer comes with
DATA_PATH, RUN_PATH = "/data", "/runs"  # where the claims are mounted
_NODE = "node"  # of the container and of the replicated job, as in Kubeflow's runtimes
_JOBSET_LABEL, _JOB_LABEL = "jobset.sigs.k8s.io/jobset-name", "batch.kubernetes.io/job-name"

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


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training: what to run, on what, with which volumes. Making it refuses what no cluster would: the ConvoyError
    names the option."""

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
    secrets: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # variables whose values are keys of Secrets
    max_restarts: int = 3  # of the ranks of a pod before the pod fails, and of pods
    user: int = 1000  # user and group of the processes; not 0, which is root

    def __post_init__(self) -> None:
        if self.least_nodes is not None and not 1 <= self.least_nodes <= self.num_nodes:
            raise ConvoyError(f"--min-nodes {self.least_nodes} must be between 1 and --nodes {self.num_nodes}")
        for name in (*self.environment, *self.secrets):
            if _RESERVED.fullmatch(name):
                raise ConvoyError(f"--env {name} is set by the launcher: leave it away")
        for name, value in self.environment.items():
            if _SECRET_NAME.search(name.upper()) or _SECRET_VALUE.search(value):
                raise ConvoyError(
                    f"--env {name} looks like a secret, and a manifest is no place for one: put it into a Kubernetes "
                    f"Secret and give --env-from-secret {name}=SECRET/KEY"
                )
        for number, argument in enumerate(self.arguments, 1):
            if _SECRET_VALUE.search(argument):
                raise ConvoyError(
                    f"argument {number} after -- looks like it holds a password or a token, and a manifest is no place "
                    "for one: mount the data as a claim, or give the secret by --env-from-secret"
                )
        for text in (*self.environment.values(), *self.arguments):
            if not text.isascii() and text != text.encode("utf-8", "replace").decode():
                raise ConvoyError(f"{text!a} is not text in UTF-8, which a manifest is: rename it")


def complete(
    arguments: Sequence[str], values: Mapping[str, Any], name: str, has_data_claim: bool = True
) -> tuple[str, ...]:
    """The user's arguments with `--out /runs/NAME` and `--resume` where they lack them; `values` are those of options.
    Refused where the run would be lost with the pod, or the data are on no volume."""
    out, data = (values.get(option) for option in ("out", "data"))
    if out is not None and not _below(str(out), RUN_PATH):
        raise ConvoyError(
            f"--out {out} would be lost with the pod: name a folder below {RUN_PATH}, where --run-claim is mounted"
        )
    if data is not None and (data == DATA_PATH or _below(data, DATA_PATH)) and not has_data_claim:
        raise ConvoyError(f"--data {data} is on no volume: give the claim that has it by --data-claim")
    lacking = [] if out is not None else ["--out", f"{RUN_PATH}/{name}"]
    return (*arguments, *lacking, *([] if values.get("resume") else ["--resume"]))


def _below(path: str, folder: str) -> bool:
    place = PurePosixPath(path)
    return ".." not in place.parts and PurePosixPath(folder) in place.parents


def name_for(model: str | None, recipe: str | None) -> str:
    """A name for the job that resembles that of the model or the recipe: `timm:ViT_B` becomes `timm-vit-b`."""
    label = re.sub(r"[^a-z0-9]+", "-", (model or recipe or "convoy").lower()).strip("-")[:40].strip("-")
    return label if label[:1].isalpha() else f"convoy-{label}".strip("-")


def _pod(training: Training, master: str | None = None) -> dict[str, Any]:
    """The whole specification of a pod; without `master`, the first pod's name, Kubeflow sets the PET_* variables. The
    command is torch's elastic launcher, which PET_* variables tell of the pods, with rendezvous at the first pod:
    `convoy` is torch's c10d, in which launchers wait for one that is started again, on the pod's own address. Requests
    equal the limits: the pod gets what it asks for and is the last to be evicted."""
    nodes = [] if training.least_nodes is None else [f"--nnodes={training.least_nodes}:{training.num_nodes}"]
    amounts = {"cpu": training.cpu, "memory": training.memory}
    if training.accelerator is not None:
        amounts[training.accelerator] = str(training.devices_per_node)
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "runs": (RUN_PATH, {"persistentVolumeClaim": {"claimName": training.run_claim}}),
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": training.shared_memory}}),
        "tmp": ("/tmp", {"emptyDir": {}}),
    }
    for_reading = {"readOnly": True}
    if training.data_claim is not None:
        claim = {"persistentVolumeClaim": {"claimName": training.data_claim, **for_reading}}
        volumes = {"data": (DATA_PATH, claim)} | volumes
    container = {
        "name": _NODE,
        "image": training.image,
        "command": [
            "torchrun",
            *nodes,
            f"--rdzv-backend={BACKEND}",
            "--rdzv-endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)",
            f"--rdzv-id={training.name}",
            f"--rdzv-conf=join_timeout={JOIN_TIMEOUT_S},read_timeout={READ_TIMEOUT_S}",
            f"--max-restarts={training.max_restarts}",
            "-m",
            "convoy",
        ],
        "args": ["train", *map(_escaped, training.arguments)],
        "env": _environment(training, master),
        "ports": [{"name": "rendezvous", "containerPort": PORT}],
        "resources": {"limits": amounts, "requests": amounts},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {"name": name, "mountPath": path} | (for_reading if name == "data" else {})
            for name, (path, _) in volumes.items()
        ],
    }
    return {
        "restartPolicy": "Never",  # the job makes a new pod, which may go to another node
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": training.user,
            "runAsGroup": training.user,
            "fsGroup": training.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": name, **volume} for name, (_, volume) in volumes.items()],
    }


def _environment(training: Training, master: str | None) -> list[dict[str, Any]]:
    """Variables of the container, secrets by reference; with a master also the PET_* variables."""
    values: dict[str, Any] = {}
    if master is not None:
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        values = {
            "PET_NNODES": str(training.num_nodes),
            "PET_NPROC_PER_NODE": str(training.devices_per_node),
            "PET_NODE_RANK": {"fieldRef": {"fieldPath": index}},
            "PET_MASTER_ADDR": master,
            "PET_MASTER_PORT": str(PORT),
        }
    values |= {"HOME": "/tmp", _SHUTDOWN: str(GRACE_S - 10)}
    values |= {name: _escaped(value) for name, value in training.environment.items()}
    secrets = training.secrets.items()
    values |= {name: {"secretKeyRef": {"name": secret, "key": key}} for name, (secret, key) in secrets}
    return [{"name": name, "value" if isinstance(x, str) else "valueFrom": x} for name, x in values.items()]


def _escaped(text: str) -> str:
    """A text in which Kubernetes substitutes no `$(VARIABLE)`: `$$` stands for one `$`."""
    return text.replace("$", "$$")


def _train_job(training: Training) -> list[dict[str, Any]]:
    """A TrainJob of Kubeflow Trainer (v2.2 and later), which sets PET_* and starts a JobSet. The runtime decides how
    often a pod is started again."""
    pod = _pod(training)
    (container,) = pod["containers"]
    patch = {
        "securityContext": pod["securityContext"],
        "containers": [{key: container[key] for key in ("name", "securityContext", "volumeMounts")}],
        "volumes": pod["volumes"],
    }
    job_patch = {"name": _NODE, "template": {"spec": {"template": {"spec": patch}}}}
    spec = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": training.runtime,
        },
        "trainer": {
            **{key: container[key] for key in ("image", "command", "args", "env")},
            "numNodes": training.num_nodes,
            "numProcPerNode": training.devices_per_node,
            "resourcesPerNode": container["resources"],
        },
        "runtimePatches": [
            {
                "manager": "convoy.launch/kubernetes",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job_patch]}}},
            }
        ],
    }
    return [
        _network_policy(training, _JOBSET_LABEL),
        _document("trainer.kubeflow.org/v1alpha1", "TrainJob", training, spec),
    ]


def _indexed_job(training: Training) -> list[dict[str, Any]]:
    """A Job whose pods have numbers, and the headless Service that gives them host names."""
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {_JOB_LABEL: training.name},
        "ports": [{"name": "rendezvous", "port": PORT, "protocol": "TCP"}],
    }
    pod = {**_pod(training, f"{training.name}-0.{training.name}"), "subdomain": training.name}
    # Pods that the cluster took away do not count as failures; none begins before its predecessor has ended, so that
    # no two write one run.
    spec = {
        "completionMode": "Indexed",
        "completions": training.num_nodes,
        "parallelism": training.num_nodes,
        "backoffLimit": training.max_restarts * training.num_nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": {"metadata": {"labels": _labels(training)}, "spec": pod},
    }
    return [
        _network_policy(training, _JOB_LABEL),
        _document("v1", "Service", training, service),
        _document("batch/v1", "Job", training, spec),
    ]


# By the kind of the job: the function that makes the documents to apply, in order.
KINDS: dict[str, Callable[[Training], list[dict[str, Any]]]] = {"trainjob": _train_job, "job": _indexed_job}


def _network_policy(training: Training, label: str) -> dict[str, Any]:
    """Pods of one job reach each other; nobody else reaches them, as the ranks' store asks for no password."""
    pods = {"matchLabels": {label: training.name}}
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]}
    return _document("networking.k8s.io/v1", "NetworkPolicy", training, spec)


def _document(version: str, kind: str, training: Training, spec: dict[str, Any]) -> dict[str, Any]:
    place = {} if training.namespace is None else {"namespace": training.namespace}
    metadata = {"name": training.name, **place, "labels": _labels(training)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _labels(training: Training) -> dict[str, str]:
    return {"app.kubernetes.io/name": "convoy", "app.kubernetes.io/instance": training.name}


class _Dumper(yaml.SafeDumper):
    """Quotes every text that is not clearly a word: readers differ in what else they take for a number or a truth."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_PLAIN = re.compile(r"(?!(?i:y|n|yes|no|on|off|true|false|null)$)/?[A-Za-z][A-Za-z0-9/._-]*")
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if _PLAIN.fullmatch(text) else '"'
    ),
)


def to_yaml(documents: Sequence[dict[str, Any]]) -> str:
    """Documents, one after the other, in ASCII."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=2**31)
