"""The three kinds of job that start the same pods, TrainJob, JobSet and Job, as YAML that every reader takes alike."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from convoy.launch.kubernetes import pod
from convoy.launch.kubernetes.training import Training

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
        "securityContext": pod.pod_security(training),
        "containers": [
            {
                "name": pod.CONTAINER,
                "securityContext": pod.container_security(),
                "volumeMounts": pod.mounts(training),
            }
        ],
        "volumes": pod.volumes(training),
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
                "command": pod.command(training),
                "args": pod.arguments(training),
                "env": pod.environment(training),
                "numNodes": training.num_nodes,
                "numProcPerNode": training.devices_per_node,
                "resourcesPerNode": pod.resources(training),
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
            "ports": [{"name": "rendezvous", "port": pod.PORT, "protocol": "TCP"}],
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
        "template": {"metadata": {"labels": _labels(training)}, "spec": pod.pod(training, master)},
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
