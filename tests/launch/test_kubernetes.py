"""What the pods of a manifest may do, what they are given, and how they are started again, in the schemas that Kubeflow
and Kubernetes publish; and that a manifest says what a name, a variable or an argument holds, or is not written."""

import contextlib
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models

import manifests
from convoy.cli import main
from convoy.errors import ConvoyError
from convoy.launch.clusters import KINDS, manifest

MODELS: dict[str, Any] = {"TrainJob": models.TrainerV1alpha1TrainJob, "Job": models.IoK8sApiBatchV1Job}
MODELS["Service"] = models.IoK8sApiCoreV1Service
TRAININGS = {
    "plain": manifests.training(),
    "no data, on CPUs": manifests.training(("lenet",), data_claim=None, accelerator=None, cpu="500m"),
    "all else": manifests.training(
        least_nodes=1,
        namespace="team-a",
        environment={"NCCL_DEBUG": "INFO", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "50"},
        secrets={"WANDB_API_KEY": ("wandb", "key")},
        max_restarts=5,
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


def test_every_field_is_known_to_kubeflows_models_and_a_misspelt_one_is_not() -> None:
    for kind in KINDS:
        for name, training in TRAININGS.items():
            documents = [each for each in manifests.read(training, kind).values() if each["kind"] in MODELS]
            assert documents and all(map(is_known, documents)), (kind, name)
    job = manifests.read(manifests.training(), "trainjob")["TrainJob"]
    job["spec"]["runtimePatches"][0]["managers"] = job["spec"]["runtimePatches"][0].pop("manager")
    assert not is_known(job)


def documented(begin: str, end: str = "```") -> str:
    """An example of the documentation."""
    text = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    return text.partition(begin)[2].partition(end)[0]


def test_the_manifest_is_the_documented_one_and_a_trainjobs_pods_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = documented("```\nconvoy launch kubernetes", "\nkubectl").replace("\\\n", "")
    assert main(["launch", "kubernetes", *shlex.split(line)]) == 0
    documents = {document["kind"]: document for document in yaml.safe_load_all(Path("job.yaml").read_text())}
    pods = documents["Job"]["spec"]["template"]["metadata"]
    for metadata in (*(one["metadata"] for one in documents.values()), pods):
        assert metadata.pop("labels") == {"app.kubernetes.io/name": "convoy", "app.kubernetes.io/instance": "resnet50"}
    del documents["Job"]["spec"]["template"]["metadata"]
    assert list(yaml.safe_load_all(documented("```yaml\n"))) == list(documents.values())
    for training in TRAININGS.values():
        trainjob, job = (manifests.pod_of(manifests.read(training, kind)) for kind in KINDS)
        (container,), (trainer,) = job["containers"], trainjob["containers"]
        pet = [variable for variable in container["env"] if variable["name"].startswith("PET_")]
        assert pet + trainer["env"] == container["env"]  # which Kubeflow sets by itself
        for key in ("image", "command", "args", "resources", "securityContext", "volumeMounts"):
            assert trainer[key] == container[key]
        assert all(trainjob[key] == job[key] for key in ("securityContext", "volumes"))


DOCUMENTS = {"trainjob": ["NetworkPolicy", "TrainJob"], "job": ["NetworkPolicy", "Service", "Job"]}
# fmt: off
HOSTILE = [
    "a'b", 'a"b', "a\nb: c", "a\r\n---\nkind: Secret", "$(HOME)", "$$(HOME)", "$", "-rf", "--", "# comment", "a: b", "",
    "!!python/object/apply:os.system [id]", "&anchor *alias", "- item", "| block", " ", "~", "null", "yes", "y", "0o17",
    "1e3", "12:30:45", ".inf", "<<", "\t", "\x1b[2J", "\ufeffbom", "\u2028line", "ü 图片 🚢", "x" * 5000,
]
# fmt: on


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_and_variables_arrive_as_they_are(kind: str) -> None:
    arguments = ("resnet50", *HOSTILE)
    variables = {f"VALUE_{number}": value for number, value in enumerate(HOSTILE)}
    text = manifest(kind=kind, **manifests.training(arguments, environment=variables))
    documents = list(yaml.safe_load_all(text))
    assert text.isascii() and [one["kind"] for one in documents] == DOCUMENTS[kind]  # and none more
    (container,) = manifests.pod_of({one["kind"]: one for one in documents})["containers"]
    there = {"HOME": "/tmp", "PET_MASTER_ADDR": "elsewhere"}
    words = [manifests.expanded(argument, there) for argument in container["args"]]
    assert words == ["train", *arguments, "--out", "/runs/resnet50", "--resume"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert {name: manifests.expanded(values[name], there) for name in variables} == variables
    assert manifests.expanded("$(HOME)", {"HOME": "/tmp"}) == "/tmp"  # which the escape keeps from
    for word in ("1e3", "y", "0o17", "12:30:45"):  # without quotes Go's reader takes them for numbers and a truth
        assert text.count(f'- "{word}"\n') == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"least_nodes": 3}, "--min-nodes 3 must be between 1 and --nodes 2"),
    ({"arguments": ("a\udcff",)}, "not text in UTF-8"),
    ({"environment": {"RANK": "1"}}, "--env RANK is set by the launcher"),
]


def test_what_no_cluster_would_find_and_what_looks_like_a_secret_is_refused_without_being_repeated() -> None:
    for change, sentence in REFUSED:
        with pytest.raises(ConvoyError, match=sentence):
            manifest(kind="job", **manifests.training(**change))
    for name in ("HF_TOKEN", "wandb_api_key", "DB_PASSWORD", "BASIC_AUTH"):
        with pytest.raises(ConvoyError, match=rf"--env {name} looks like a secret.*--env-from-secret {name}=") as error:
            manifest(kind="job", **manifests.training(environment={name: "hush"}))
        assert "hush" not in str(error.value)
    for name in ("TOKENIZERS_PARALLELISM", "KEYBOARD"):
        assert f'"{name}"' in manifest(kind="job", **manifests.training(environment={name: "1"}))
    private = "-----BEGIN RSA PRIVATE KEY-----\nhush"
    for value in ("https://anna:hush@host/x", private, "hf_" + "a" * 34, "AKIA" + "A" * 16, "ghp_" + "b" * 36):
        for change in ({"environment": {"HARMLESS": value}}, {"arguments": ("resnet50", value)}):
            with pytest.raises(ConvoyError, match=r"looks like (a secret|it holds a password)") as error:
                manifest(kind="job", **manifests.training(**change))
            assert value not in str(error.value)
