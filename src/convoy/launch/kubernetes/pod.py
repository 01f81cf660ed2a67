"""The pod of a training: one container with the elastic launcher, volumes, limits, and no rights beyond its work.

The pod is "restricted" in the sense of Kubernetes' Pod Security Standards.
"""

from typing import Any

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
