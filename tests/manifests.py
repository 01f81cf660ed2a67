"""Trainings for Kubernetes, and what a cluster makes of a manifest."""

import re
from typing import Any

import yaml

from convoy.launch.clusters import complete, manifest


def training(arguments: tuple[str, ...] = ("resnet50", "--data", "/data"), **changes: Any) -> dict[str, Any]:
    """A training on two pods with four GPUs each."""
    values: dict[str, Any] = {"name": "resnet50", "namespace": None, "image": "registry.example:5000/team/convoy:1.0"}
    values |= {"num_nodes": 2, "least_nodes": None, "devices_per_node": 4, "accelerator": "nvidia.com/gpu"}
    values |= {"cpu": "16", "memory": "64Gi", "shared_memory": "8Gi", "run_claim": "runs", "data_claim": "imagenet"}
    values |= {"runtime": "torch-distributed", "environment": {}, "secrets": {}, "max_restarts": 3, "user": 1000}
    values |= changes
    return values | {"arguments": complete(arguments, {}, values["name"])}


def read(values: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """The documents of a manifest, read back from its YAML, by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(manifest(kind=kind, **values))}


def pod_of(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The specification of the pods, of a TrainJob as far as it says it."""
    if "TrainJob" in documents:
        spec = documents["TrainJob"]["spec"]
        (patch,) = spec["runtimePatches"]
        (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = job["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        trainer = {key: spec["trainer"][key] for key in ("image", "command", "args", "env")}
        return pod | {"containers": [container | trainer | {"resources": spec["trainer"]["resourcesPerNode"]}]}
    return dict(documents["Job"]["spec"]["template"]["spec"])


def expanded(text: str, variables: dict[str, str]) -> str:
    """A command's word or a variable's value as the kubelet gives it to the process: `$(NAME)` is the variable, where
    there is one, and `$$` one dollar."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)", lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]), text
    )
