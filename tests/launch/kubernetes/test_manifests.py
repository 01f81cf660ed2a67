"""What the pods of a manifest may do, what they are given, and how they are started again; in the schemas that Kubeflow
and Kubernetes publish, in which an unknown field is a mistake."""

import contextlib
import functools
import socket
from typing import Any

import pytest
from kubeflow_trainer_api import models

import manifests
from convoy import interfaces
from convoy.launch.kubernetes import KINDS, SecretVariable

MODELS: dict[str, Any] = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "Job": models.IoK8sApiBatchV1Job,
    "Service": models.IoK8sApiCoreV1Service,
}
TRAININGS = {
    "plain": manifests.training(),
    "no data": manifests.training(("lenet",), data_claim=None),
    "cpus": manifests.training(accelerator=None, cpu="500m"),
    "elastic": manifests.training(least_nodes=1, namespace="team-a"),
    "variables": manifests.training(
        environment={"NCCL_DEBUG": "INFO"}, secrets=(SecretVariable("WANDB_API_KEY", "wandb", "key"),)
    ),
}


def is_known(document: dict[str, Any]) -> bool:
    """Whether a model of Kubeflow's takes all of a document: what it does not know it drops."""
    with contextlib.suppress(ValueError):
        return _holds(MODELS[document["kind"]].from_dict(document).to_dict(), document)
    return False


def _holds(known: Any, written: Any) -> bool:
    if isinstance(written, dict) and isinstance(known, dict):
        return all(key in known and _holds(known[key], value) for key, value in written.items())
    if isinstance(written, list) and isinstance(known, list) and len(written) == len(known):
        return all(_holds(*pair) for pair in zip(known, written, strict=True))
    return bool(known == written)


def misspell(fields: dict[str, Any]) -> None:
    """The first one."""
    first = next(iter(fields))
    fields[f"{first}s"] = fields.pop(first)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_known_to_kubeflows_models(kind: str) -> None:
    for name, training in TRAININGS.items():
        documents = [each for each in manifests.read(training, kind).values() if each["kind"] in MODELS]
        assert documents and all(map(is_known, documents)), name


def test_a_misspelt_field_and_a_value_of_the_wrong_type_are_found() -> None:
    for kind, place in (
        ("trainjob", ("TrainJob", "spec", "trainer")),
        ("trainjob", ("TrainJob", "spec", "runtimePatches", 0)),
        ("job", ("Job", "spec", "template", "spec", "containers", 0, "securityContext")),
        ("job", ("Service", "spec", "ports", 0)),
    ):
        documents: Any = manifests.read(manifests.training(), kind)
        misspell(functools.reduce(lambda inner, step: inner[step], place, documents))
        assert not is_known(documents[place[0]]), place
    job = manifests.read(manifests.training(), "job")["Job"]
    job["spec"]["completions"] = "2"
    assert not is_known(job)


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_own_schemas_hold_strictly_and_know_a_misspelt_field(version: str) -> None:
    """Those made of its OpenAPI, of the oldest and newest version in which all fields are stable."""
    library = pytest.importorskip("kubernetes_validate", reason="22 MB of schemas: pip install 'convoy-nn[manifests]'")
    documents = [
        document
        for training in TRAININGS.values()
        for kind in KINDS
        for document in manifests.read(training, kind).values()
        if document["kind"] in ("NetworkPolicy", "Service", "Job")
    ]
    for document in documents:
        assert library.validate(document, version, strict=True)
        misspell(document["spec"])
        with pytest.raises(library.ValidationError):
            library.validate(document, version, strict=True)


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_pods_are_restricted_and_only_their_own_may_connect(self, kind: str) -> None:
        """As the profile "restricted" of Kubernetes' Pod Security Standards asks, and with a file system to read."""
        documents = manifests.read(manifests.training(), kind)
        pod = manifests.pod_of(documents)
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
        allowed = {"persistentVolumeClaim", "emptyDir"}
        assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"])
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        policy = documents["NetworkPolicy"]["spec"]
        assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
        assert policy["policyTypes"] == ["Ingress"]
        assert list(policy["podSelector"]["matchLabels"].values()) == ["resnet50"]

    def test_volumes_and_limits_are_what_was_asked_for(self, kind: str) -> None:
        pod = manifests.pod_of(manifests.read(manifests.training(), kind))
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} == set(volumes)
        assert mounts["/data"]["readOnly"] is True and "readOnly" not in mounts["/runs"]
        assert volumes["data"]["persistentVolumeClaim"] == {"claimName": "imagenet", "readOnly": True}
        assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
        assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
        limits = {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "4"}
        assert container["resources"] == {"limits": limits, "requests": limits}
        pod = manifests.pod_of(manifests.read(manifests.training(("lenet",), data_claim=None, accelerator=None), kind))
        assert "data" not in {volume["name"] for volume in pod["volumes"]}
        assert "/data" not in {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert set(pod["containers"][0]["resources"]["limits"]) == {"cpu", "memory"}

    def test_ranks_have_the_pods_time_to_save(self, kind: str) -> None:
        name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        for changes, seconds in (({}, "110"), ({"environment": {name: "50"}}, "50")):
            pod = manifests.pod_of(manifests.read(manifests.training(**changes), kind))
            assert [one["value"] for one in pod["containers"][0]["env"] if one["name"] == name] == [seconds]
            assert kind == "trainjob" or pod["terminationGracePeriodSeconds"] == 120

    def test_the_namespace_is_everywhere_or_nowhere_and_a_secret_is_named_not_written(self, kind: str) -> None:
        for document in manifests.read(manifests.training(), kind).values():
            assert "namespace" not in document["metadata"]
        secret = SecretVariable("WANDB_API_KEY", "wandb", "api-key")
        documents = manifests.read(manifests.training(namespace="team-a", secrets=(secret,)), kind)
        assert all(document["metadata"]["namespace"] == "team-a" for document in documents.values())
        (container,) = manifests.pod_of(documents)["containers"]
        (variable,) = (one for one in container["env"] if one["name"] == "WANDB_API_KEY")
        assert variable["valueFrom"] == {"secretKeyRef": {"name": "wandb", "key": "api-key"}} and len(variable) == 2


def test_a_failed_pod_is_made_anew_by_the_job_and_one_that_the_cluster_took_away_is_no_failure() -> None:
    documents = manifests.read(manifests.training(max_restarts=5), "job")
    job, pod = documents["Job"]["spec"], manifests.pod_of(documents)
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    assert (pod["restartPolicy"], job["backoffLimit"], job["podReplacementPolicy"]) == ("Never", 10, "Failed")
    assert "--max-restarts=5" in pod["containers"][0]["command"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert pod["subdomain"] == documents["Service"]["metadata"]["name"]
    assert documents["Service"]["spec"]["clusterIP"] == "None"
    variables = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert variables["PET_MASTER_ADDR"] == "resnet50-0.resnet50"  # as the service names the first pod


def test_a_train_job_leaves_kubeflows_variables_to_kubeflow() -> None:
    job = manifests.read(manifests.training(), "trainjob")["TrainJob"]["spec"]
    assert not [one for one in job["trainer"]["env"] if one["name"].startswith("PET_")]
    assert (job["trainer"]["numNodes"], job["trainer"]["numProcPerNode"]) == (2, 4)
    assert job["runtimeRef"]["name"] == "torch-distributed"


def test_the_first_pod_knows_its_name_before_it_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def unpublished(host: str, *args: object, **kwargs: object) -> list:
        if "." in host and host != "127.0.0.1":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1" if host == "lenet-0" else host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", unpublished)
    for name, is_first in (("lenet-0", True), ("lenet-1", False)):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert interfaces.is_own("lenet-0.lenet") == is_first
