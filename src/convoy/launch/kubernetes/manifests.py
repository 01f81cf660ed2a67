"""The two kinds of job that start the same pods, TrainJob and Job, as YAML that every reader takes alike.

A pod has one container with the elastic launcher, volumes, limits, and no rights beyond its work: it is "restricted" in
the sense of Kubernetes' Pod Security Standards.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from convoy.launch.kubernetes.training import DATA_PATH, RUN_PATH, Training
from convoy.launch.torchrun import BACKEND

# The container's name, as in Kubeflow's runtimes.
CONTAINER = "node"
PORT = 29500
# How long a pod waits for the others, which may have to pull the image first, and for the first one to listen.
JOIN_TIMEOUT_S, READ_TIMEOUT_S = 1800, 600
# Time for a checkpoint between the signal to stop and the end.
GRACE_S = 120
# The variable with the seconds after which torch's launcher kills its ranks, 30 by default.
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def pod(training: Training, master: str | None = None) -> dict[str, Any]:
    """The whole specification of a pod; without `master`, the first pod's name, Kubeflow sets the PET_* variables. The
    command is torch's elastic launcher, which PET_* variables tell of the pods, with rendezvous at the first pod:
    `convoy` is torch's c10d, in which launchers wait for one that is started again, on the pod's own address. Requests
    equal the limits: the pod gets what it asks for and is the last to be evicted."""
    nodes = [] if training.least_nodes is None else [f"--nnodes={training.least_nodes}:{training.num_nodes}"]
    amounts = {"cpu": training.cpu, "memory": training.memory}
    if training.accelerator is not None:
        amounts[training.accelerator] = str(training.devices_per_node)
    volumes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"persistentVolumeClaim": {"claimName": training.run_claim}}, {"name": "runs", "mountPath": RUN_PATH}),
        (
            {"emptyDir": {"medium": "Memory", "sizeLimit": training.shared_memory}},
            {"name": "shm", "mountPath": "/dev/shm"},
        ),
        ({"emptyDir": {}}, {"name": "tmp", "mountPath": "/tmp"}),
    ]
    if training.data_claim is not None:
        claim = {"claimName": training.data_claim, "readOnly": True}
        mount = {"name": "data", "mountPath": DATA_PATH, "readOnly": True}
        volumes.insert(0, ({"persistentVolumeClaim": claim}, mount))
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
        "containers": [
            {
                "name": CONTAINER,
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
                "args": ["train", *map(escaped, training.arguments)],
                "env": _environment(training, master),
                "ports": [{"name": "rendezvous", "containerPort": PORT}],
                "resources": {"limits": amounts, "requests": amounts},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "readOnlyRootFilesystem": True,
                },
                "volumeMounts": [mount for _, mount in volumes],
            }
        ],
        "volumes": [{"name": mount["name"], **volume} for volume, mount in volumes],
    }


def _environment(training: Training, master: str | None) -> list[dict[str, Any]]:
    """Variables of the container, secrets by reference; with a master also the PET_* variables."""
    values = {"HOME": "/tmp"} | ({} if _SHUTDOWN in training.environment else {_SHUTDOWN: str(GRACE_S - 10)})
    values |= {name: escaped(value) for name, value in training.environment.items()}
    variables = [{"name": name, "value": value} for name, value in values.items()]
    secrets = [
        {"name": variable.name, "valueFrom": {"secretKeyRef": {"name": variable.secret, "key": variable.key}}}
        for variable in training.secrets
    ]
    if master is None:
        return [*variables, *secrets]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        {"name": "PET_NNODES", "value": str(training.num_nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(training.devices_per_node)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": "PET_MASTER_ADDR", "value": master},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
        *variables,
        *secrets,
    ]


def escaped(text: str) -> str:
    """A text in which Kubernetes substitutes no `$(VARIABLE)`: `$$` stands for one `$`."""
    return text.replace("$", "$$")


_REPLICATED = "node"  # as in Kubeflow's runtimes
_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
_JOB_LABEL = "batch.kubernetes.io/job-name"


def train_job(training: Training) -> list[dict[str, Any]]:
    """A TrainJob of Kubeflow Trainer (v2.2 and later), which sets PET_* and starts a JobSet. The runtime decides how
    often a pod is started again."""
    pod_spec = pod(training)
    (container,) = pod_spec["containers"]
    container_patch = {key: container[key] for key in ("name", "securityContext", "volumeMounts")}
    patch = {
        "securityContext": pod_spec["securityContext"],
        "containers": [container_patch],
        "volumes": pod_spec["volumes"],
    }
    job_patch = {"name": _REPLICATED, "template": {"spec": {"template": {"spec": patch}}}}
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


def indexed_job(training: Training) -> list[dict[str, Any]]:
    """A Job whose pods have numbers, and the headless Service that gives them host names."""
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {_JOB_LABEL: training.name},
        "ports": [{"name": "rendezvous", "port": PORT, "protocol": "TCP"}],
    }
    started = {**pod(training, f"{training.name}-0.{training.name}"), "subdomain": training.name}
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
        "template": {"metadata": {"labels": _labels(training)}, "spec": started},
    }
    return [
        _network_policy(training, _JOB_LABEL),
        _document("v1", "Service", training, service),
        _document("batch/v1", "Job", training, spec),
    ]


# By the kind of the job: the function that makes the documents to apply, in order.
KINDS: dict[str, Callable[[Training], list[dict[str, Any]]]] = {
    "trainjob": train_job,
    "job": indexed_job,
}


def _network_policy(training: Training, label: str) -> dict[str, Any]:
    """Pods of one job reach each other; nobody else reaches them, as the ranks' store asks for no password."""
    mine = {"matchLabels": {label: training.name}}
    spec = {"podSelector": mine, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": mine}]}]}
    return _document("networking.k8s.io/v1", "NetworkPolicy", training, spec)


def _document(version: str, kind: str, training: Training, spec: dict[str, Any]) -> dict[str, Any]:
    place = {} if training.namespace is None else {"namespace": training.namespace}
    metadata = {"name": training.name, **place, "labels": _labels(training)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


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
