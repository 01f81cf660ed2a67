"""What the pods of a manifest may do, what they are given, and how they are started again."""

import pytest

import manifests
from convoy.launch.kubernetes import KINDS


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_pods_are_restricted(self, kind: str) -> None:
        """As the profile "restricted" of Kubernetes' Pod Security Standards asks, and with a file system to read."""
        pod = manifests.pod_of(manifests.read(manifests.training(), kind))
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True
        allowed = {"persistentVolumeClaim", "emptyDir"}
        assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"])
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)

    def test_volumes(self, kind: str) -> None:
        pod = manifests.pod_of(manifests.read(manifests.training(), kind))
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} == set(volumes)
        assert mounts["/data"]["readOnly"] is True
        assert volumes["data"]["persistentVolumeClaim"] == {"claimName": "imagenet", "readOnly": True}
        assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
        assert "readOnly" not in mounts["/runs"]
        assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}

    def test_a_data_volume_only_where_it_is_asked_for(self, kind: str) -> None:
        pod = manifests.pod_of(manifests.read(manifests.training(("lenet",), data_claim=None), kind))
        assert "data" not in {volume["name"] for volume in pod["volumes"]}
        assert "/data" not in {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}

    def test_limits_are_requests(self, kind: str) -> None:
        asked = manifests.training()
        (container,) = manifests.pod_of(manifests.read(asked, kind))["containers"]
        wanted = {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "4"}
        assert container["resources"] == {"limits": wanted, "requests": wanted}

    def test_on_cpus_no_gpu_is_asked_for(self, kind: str) -> None:
        (container,) = manifests.pod_of(manifests.read(manifests.training(accelerator=None), kind))["containers"]
        assert set(container["resources"]["limits"]) == {"cpu", "memory"}

    def test_ranks_have_the_pods_time_to_save(self, kind: str) -> None:
        name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        for changes, seconds in (({}, "110"), ({"environment": {name: "50"}}, "50")):
            pod = manifests.pod_of(manifests.read(manifests.training(**changes), kind))
            assert [one["value"] for one in pod["containers"][0]["env"] if one["name"] == name] == [seconds]
            assert kind == "trainjob" or pod["terminationGracePeriodSeconds"] == 120

    def test_only_the_jobs_own_pods_may_connect(self, kind: str) -> None:
        documents = manifests.read(manifests.training(), kind)
        policy = documents["NetworkPolicy"]["spec"]
        assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
        assert policy["policyTypes"] == ["Ingress"]
        (value,) = policy["podSelector"]["matchLabels"].values()
        assert value == "resnet50"

    def test_the_namespace_is_everywhere_or_nowhere(self, kind: str) -> None:
        for document in manifests.read(manifests.training(), kind).values():
            assert "namespace" not in document["metadata"]
        for document in manifests.read(manifests.training(namespace="team-a"), kind).values():
            assert document["metadata"]["namespace"] == "team-a"

    def test_a_name_is_short_enough_for_host_names(self, kind: str) -> None:
        name = "a" * 54
        manifests.read(manifests.training(name=name), kind)
        assert len(f"{name}-node-0-1") == 63


class TestRestarts:
    def job(self, **changes: int) -> dict:
        return manifests.read(manifests.training(**changes), "job")["Job"]["spec"]

    def test_a_failed_pod_is_made_anew_by_the_job(self) -> None:
        job = self.job(max_restarts=5)
        assert job["template"]["spec"]["restartPolicy"] == "Never"
        assert job["backoffLimit"] == 10
        assert job["podReplacementPolicy"] == "Failed"
        assert "--max-restarts=5" in job["template"]["spec"]["containers"][0]["command"]

    def test_a_pod_that_the_cluster_took_away_is_no_failure(self) -> None:
        (rule,) = self.job()["podFailurePolicy"]["rules"]
        assert rule == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}

    def test_one_pod_a_node(self) -> None:
        job = self.job()
        assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)


def test_the_first_pods_host_name_is_what_the_service_gives_it() -> None:
    documents = manifests.read(manifests.training(), "job")
    pod = manifests.pod_of(documents)
    assert pod["subdomain"] == documents["Service"]["metadata"]["name"]
    assert documents["Service"]["spec"]["clusterIP"] == "None"
    variables = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert variables["PET_MASTER_ADDR"] == "resnet50-0.resnet50"


def test_a_train_job_leaves_kubeflows_variables_to_kubeflow() -> None:
    job = manifests.read(manifests.training(), "trainjob")["TrainJob"]["spec"]
    assert not [one for one in job["trainer"]["env"] if one["name"].startswith("PET_")]
    assert (job["trainer"]["numNodes"], job["trainer"]["numProcPerNode"]) == (2, 4)
    assert job["runtimeRef"]["name"] == "torch-distributed"
