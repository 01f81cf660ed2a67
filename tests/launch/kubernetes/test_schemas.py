"""Manifests keep to the schemas that Kubeflow and Kubernetes publish, in which an unknown field is a mistake."""

from collections.abc import Iterator
from typing import Any

import pytest
from kubeflow_trainer_api import models

import manifests
from convoy.launch.kubernetes import KINDS, SecretVariable, Training

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


def faults(document: dict[str, Any]) -> Iterator[str]:
    """What a model of Kubeflow's does not know or not take: it drops what it does not know."""
    try:
        known = MODELS[document["kind"]].from_dict(document).to_dict()
    except ValueError as error:
        yield str(error)
        return
    yield from _differences(document, known, "")


def _differences(said: Any, known: Any, place: str) -> Iterator[str]:
    if isinstance(said, dict) and isinstance(known, dict):
        for key, value in said.items():
            if key not in known:
                yield f"{place}.{key} is unknown"
            else:
                yield from _differences(value, known[key], f"{place}.{key}")
    elif isinstance(said, list) and isinstance(known, list) and len(said) == len(known):
        for number, (one, other) in enumerate(zip(said, known, strict=True)):
            yield from _differences(one, other, f"{place}[{number}]")
    elif said != known:
        yield f"{place} is {said!r}, read as {known!r}"


@pytest.mark.parametrize("asked", TRAININGS.values(), ids=TRAININGS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_known_to_kubeflows_models(asked: Training, kind: str) -> None:
    documents = manifests.read(asked, kind)
    checked = [document for document in documents.values() if document["kind"] in MODELS]
    assert checked
    for document in checked:
        assert list(faults(document)) == []


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("trainjob", ("TrainJob", "spec", "trainer")),
        ("trainjob", ("TrainJob", "spec", "runtimePatches", 0)),
        ("job", ("Job", "spec", "template", "spec", "containers", 0, "securityContext")),
        ("job", ("Service", "spec", "ports", 0)),
    ],
)
def test_a_misspelt_field_is_found(kind: str, place: tuple[Any, ...]) -> None:
    documents = manifests.read(manifests.training(), kind)
    inner: Any = documents
    for step in place:
        inner = inner[step]
    first = next(iter(inner))
    inner[f"{first}s"] = inner.pop(first)
    assert list(faults(documents[place[0]]))


def test_a_value_of_the_wrong_type_is_found() -> None:
    document = manifests.read(manifests.training(), "job")["Job"]
    document["spec"]["completions"] = "2"
    assert list(faults(document))


class TestKubernetesOwnSchemas:
    """The JSON schemas made of Kubernetes' OpenAPI, oldest and newest version in which all fields are stable."""

    @pytest.mark.parametrize("version", ["1.31", "1.37"])
    @pytest.mark.parametrize("asked", TRAININGS.values(), ids=TRAININGS.keys())
    def test_strictly(self, asked: Training, version: str) -> None:
        library = _kubernetes_validate()
        for kind in KINDS:
            for document in manifests.read(asked, kind).values():
                if document["kind"] in ("NetworkPolicy", "Service", "Job"):
                    assert library.validate(document, version, strict=True)

    @pytest.mark.parametrize("kind", ["NetworkPolicy", "Service", "Job"])
    def test_a_misspelt_field_is_found(self, kind: str) -> None:
        library = _kubernetes_validate()
        document = manifests.read(manifests.training(), "job")[kind]
        first = next(iter(document["spec"]))
        document["spec"][f"{first}s"] = document["spec"].pop(first)
        with pytest.raises(library.ValidationError):
            library.validate(document, "1.37", strict=True)


def _kubernetes_validate() -> Any:
    return pytest.importorskip("kubernetes_validate", reason="22 MB of schemas: pip install 'convoy-nn[manifests]'")
