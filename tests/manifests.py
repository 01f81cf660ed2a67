"""Trainings for Kubernetes, and what a cluster makes of a manifest."""

import re
from typing import Any

import yaml

from convoy.launch.kubernetes import KINDS, Training, to_yaml
from convoy.launch.kubernetes.training import complete


def training(arguments: tuple[str, ...] = ("resnet50", "--data", "/data"), **changes: Any) -> Training:
    """A training on two pods with four GPUs each."""
    values: dict[str, Any] = {
        "name": "resnet50",
        "image": "registry.example:5000/team/convoy:1.0",
        "arguments": arguments if "--resume" in arguments else complete(arguments, {}, "resnet50", 8),
        "num_nodes": 2,
        "devices_per_node": 4,
        "run_claim": "runs",
        "data_claim": "imagenet",
        "cpu": "16",
        "memory": "64Gi",
        "shared_memory": "8Gi",
    }
    return Training(**values | changes)


def read(asked: Training, kind: str) -> dict[str, dict[str, Any]]:
    """The documents of a manifest, read back from its YAML, by kind."""
    documents = yaml.safe_load_all(to_yaml(KINDS[kind](asked)))
    return {document["kind"]: document for document in documents}


def pod_of(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The specification of the pods, of a TrainJob as far as it says it."""
    if "TrainJob" in documents:
        spec = documents["TrainJob"]["spec"]
        (patch,) = spec["runtimePatches"]
        (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = job["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        own = {key: spec["trainer"][key] for key in ("image", "command", "args", "env")}
        return pod | {"containers": [container | own | {"resources": spec["trainer"]["resourcesPerNode"]}]}
    return dict(documents["Job"]["spec"]["template"]["spec"])


def expanded(text: str, variables: dict[str, str]) -> str:
    """A command's word or a variable's value as the kubelet gives it to the process: `$(NAME)` is the variable, where
    there is one, and `$$` one dollar."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)
