"""The three kinds of job that start the same pods, TrainJob, JobSet and Job, as YAML that every reader takes alike.

A pod has one container with the elastic launcher, volumes, limits, and no rights beyond its work: it is "restricted" in
the sense of Kubernetes' Pod Security Standards.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from convoy.launch.kubernetes.training import DATA_PATH, RUN_PATH, Training
from convoy.launch.torchrun import BACKEND

CONTAINER = "node"
"""The container's name; Kubeflow's runtimes call theirs so too."""
PORT = 29500
JOIN_TIMEOUT_S, READ_TIMEOUT_S = 1800, 600
"""How long a pod waits for the others, which may have to pull the image first, and for the first one to listen."""
GRACE_S = 120
"""Between the signal to stop and the end: time for a checkpoint."""
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Names the seconds after which torch's launcher kills its ranks by itself, 30 unless it is set."""


def command(training: Training) -> list[str]:
    """The elastic launcher, told by PET_* variables who takes part, with rendezvous at the first pod.

    `convoy` is torch's c10d, in which launchers wait for one that is started again, on the pod's own address.
    """
    nodes = [] if training.least_nodes is None else [f"--nnodes={training.least_nodes}:{training.num_nodes}"]
    return [
        "torchrun",
        *nodes,
        f"--rdzv-backend={BACKEND}",
        "--rdzv-endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)",
        f"--rdzv-id={training.name}",
        f"--rdzv-conf=join_timeout={JOIN_TIMEOUT_S},read_timeout={READ_TIMEOUT_S}",
        f"--max-restarts={training.max_restarts}",
        "-m",
        "convoy",
    ]


def arguments(training: Training) -> list[str]:
    """`train` and what it is given, so that Kubernetes changes nothing in it."""
    return ["train", *(escaped(argument) for argument in training.arguments)]


def escaped(text: str) -> str:
    """A text in which Kubernetes finds no `$(VARIABLE)` to put a value for: `$$` stands for one `$`."""
    return text.replace("$", "$$")


def environment(training: Training) -> list[dict[str, Any]]:
    """Variables of the container, secrets by reference."""
    return [
        {"name": "HOME", "value": "/tmp"},
        *([] if _SHUTDOWN in training.environment else [{"name": _SHUTDOWN, "value": str(GRACE_S - 10)}]),
        *({"name": name, "value": escaped(value)} for name, value in training.environment.items()),
        *(
            {"name": one.name, "valueFrom": {"secretKeyRef": {"name": one.secret, "key": one.key}}}
            for one in training.secrets
        ),
    ]


def launcher_environment(training: Training, master: str) -> list[dict[str, Any]]:
    """The PET_* variables, which Kubeflow sets by itself.

    Args:
        training: the training.
        master: host name of the first pod.
    """
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        {"name": "PET_NNODES", "value": str(training.num_nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(training.devices_per_node)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": "PET_MASTER_ADDR", "value": master},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
    ]


def resources(training: Training) -> dict[str, Any]:
    """Limits, and requests equal to them: the pod gets what it asks for and is the last to be evicted."""
    amounts = {"cpu": training.cpu, "memory": training.memory}
    if training.accelerator is not None:
        amounts[training.accelerator] = str(training.devices_per_node)
    return {"limits": amounts, "requests": dict(amounts)}


def volumes(training: Training) -> list[dict[str, Any]]:
    """Runs, data, shared memory, and a place for temporary files."""
    data = []
    if training.data_claim is not None:
        data = [{"name": "data", "persistentVolumeClaim": {"claimName": training.data_claim, "readOnly": True}}]
    return [
        *data,
        {"name": "runs", "persistentVolumeClaim": {"claimName": training.run_claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": training.shared_memory}},
        {"name": "tmp", "emptyDir": {}},
    ]


def mounts(training: Training) -> list[dict[str, Any]]:
    """Where the volumes are in the container."""
    data = [{"name": "data", "mountPath": DATA_PATH, "readOnly": True}] if training.data_claim is not None else []
    return [
        *data,
        {"name": "runs", "mountPath": RUN_PATH},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": "/tmp"},
    ]


def pod_security(training: Training) -> dict[str, Any]:
    """A plain user, whose group may write the volumes."""
    return {
        "runAsNonRoot": True,
        "runAsUser": training.user,
        "runAsGroup": training.user,
        "fsGroup": training.user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    """No privileges to gain, none to begin with, and nothing to change in the image."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def pod(training: Training, master: str) -> dict[str, Any]:
    """The whole specification of a pod.

    Args:
        training: the training.
        master: host name of the first pod.
    """
    return {
        "restartPolicy": "Never",  # the job makes a new pod, which may go to another node
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(training),
        "containers": [
            {
                "name": CONTAINER,
                "image": training.image,
                "command": command(training),
                "args": arguments(training),
                "env": [*launcher_environment(training, master), *environment(training)],
                "ports": [{"name": "rendezvous", "containerPort": PORT}],
                "resources": resources(training),
                "securityContext": container_security(),
                "volumeMounts": mounts(training),
            }
        ],
        "volumes": volumes(training),
    }


RUNTIME = "torch-distributed"
"""The runtime for torch that Kubeflow Trainer comes with."""
_REPLICATED = "node"  # Kubeflow's runtimes call their job so too
_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
_JOB_LABEL = "batch.kubernetes.io/job-name"


def manifest(training: Training, kind: str, runtime: str = RUNTIME) -> list[dict[str, Any]]:
    """The documents to apply, in order: what the pods need, and the job.

    Args:
        training: what to run.
        kind: a key of `KINDS`.
        runtime: the ClusterTrainingRuntime of a TrainJob.
    """
    if kind == "trainjob":
        return train_job(training, runtime)
    return KINDS[kind](training)


def train_job(training: Training, runtime: str = RUNTIME) -> list[dict[str, Any]]:
    """A TrainJob of Kubeflow Trainer (v2.2 and later), which sets PET_* and starts a JobSet.

    How often a pod is started again is the runtime's matter.

    Args:
        training: what to run.
        runtime: name of a ClusterTrainingRuntime for torch.
    """
    pod_patch = {
        "securityContext": pod_security(training),
        "containers": [
            {
                "name": CONTAINER,
                "securityContext": container_security(),
                "volumeMounts": mounts(training),
            }
        ],
        "volumes": volumes(training),
    }
    job_patch = {"name": _REPLICATED, "template": {"spec": {"template": {"spec": pod_patch}}}}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(training),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": runtime,
            },
            "trainer": {
                "image": training.image,
                "command": command(training),
                "args": arguments(training),
                "env": environment(training),
                "numNodes": training.num_nodes,
                "numProcPerNode": training.devices_per_node,
                "resourcesPerNode": resources(training),
            },
            "runtimePatches": [
                {
                    "manager": "convoy.launch/kubernetes",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job_patch]}}},
                }
            ],
        },
    }
    return [_network_policy(training, _JOBSET_LABEL), job]


def job_set(training: Training) -> list[dict[str, Any]]:
    """A JobSet of one replicated job; its controller gives the pods their host names."""
    replicated = {
        "name": _REPLICATED,
        "replicas": 1,
        "template": {"spec": _job_spec(training, f"{training.name}-{_REPLICATED}-0-0.{training.name}")},
    }
    job = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(training),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [replicated],
        },
    }
    return [_network_policy(training, _JOBSET_LABEL), job]


def indexed_job(training: Training) -> list[dict[str, Any]]:
    """A Job whose pods have numbers, and the headless Service that gives them host names."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(training),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {_JOB_LABEL: training.name},
            "ports": [{"name": "rendezvous", "port": PORT, "protocol": "TCP"}],
        },
    }
    spec = _job_spec(training, f"{training.name}-0.{training.name}")
    spec["template"]["spec"]["subdomain"] = training.name
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(training), "spec": spec}
    return [_network_policy(training, _JOB_LABEL), service, job]


KINDS: dict[str, Callable[[Training], list[dict[str, Any]]]] = {
    "trainjob": train_job,
    "jobset": job_set,
    "job": indexed_job,
}
"""What makes the documents of each kind."""


def _job_spec(training: Training, master: str) -> dict[str, Any]:
    """One pod a node. Pods that the cluster took away do not count as failures; none begins before its predecessor
    has ended, so that no two write one run."""
    return {
        "completionMode": "Indexed",
        "completions": training.num_nodes,
        "parallelism": training.num_nodes,
        "backoffLimit": training.max_restarts * training.num_nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": {"metadata": {"labels": _labels(training)}, "spec": pod(training, master)},
    }


def _network_policy(training: Training, label: str) -> dict[str, Any]:
    """Pods of one job reach each other; nobody else reaches them, since torch's rendezvous asks for no password."""
    mine = {"matchLabels": {label: training.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(training),
        "spec": {
            "podSelector": mine,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": mine}]}],
        },
    }


def _metadata(training: Training) -> dict[str, Any]:
    place = {} if training.namespace is None else {"namespace": training.namespace}
    return {"name": training.name, **place, "labels": _labels(training)}


def _labels(training: Training) -> dict[str, str]:
    return {"app.kubernetes.io/name": "convoy", "app.kubernetes.io/instance": training.name}


_PLAIN = re.compile(r"/?[A-Za-z][A-Za-z0-9/._-]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


class _Dumper(yaml.SafeDumper):
    """Quotes every text that is not clearly a word: readers differ in what else they take for a number or a truth."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def to_yaml(documents: Sequence[dict[str, Any]]) -> str:
    """Documents, one after the other, in ASCII."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=2**31)
