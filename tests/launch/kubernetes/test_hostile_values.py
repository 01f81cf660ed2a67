"""Whatever a name, a variable or an argument holds, the manifest says that and nothing else, or is not written."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import manifests
from convoy.cli import main
from convoy.errors import ConvoyError
from convoy.launch.kubernetes import KINDS, SecretVariable, to_yaml
from convoy.launch.kubernetes.training import complete, name_for

HOSTILE = [
    "a'b",
    'a"b',
    "a\nb: c",
    "a\r\n---\nkind: Secret",
    "${HOME}",
    "$(HOME)",
    "$(PET_MASTER_ADDR)",
    "$$(HOME)",
    "$",
    "-rf",
    "--",
    "!!python/object/apply:os.system [id]",
    "&anchor *alias",
    "{{ .Values.x }}",
    "# comment",
    "a: b",
    "- item",
    "| block",
    "> folded",
    "",
    " ",
    "~",
    "null",
    "yes",
    "y",
    "on",
    "0x10",
    "0o17",
    "017",
    "1e3",
    "1_000",
    "12:30:45",
    "2026-11-22",
    ".inf",
    "=",
    "<<",
    "\t",
    "\x1b[2J",
    "\u202egnp.exe",
    "\ufeffbom",
    "\u2028line",
    "\x85next",
    "ü 图片 🚢",
    "x" * 5000,
]


def cluster_readings(text: str) -> list[list[dict[str, Any]]]:
    """The documents as readers of YAML 1.1, and of JSON's types alone, take them."""

    class Core(yaml.SafeLoader):
        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [
                (tag, pattern)
                for tag, pattern in resolvers
                if tag.rpartition(":")[2] in ("null", "bool", "int", "float")
            ]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    return [list(yaml.safe_load_all(text)), list(yaml.load_all(text, Core))]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_and_variables_arrive_as_they_are(kind: str) -> None:
    arguments = ("resnet50", *HOSTILE)
    variables = {f"VALUE_{number}": value for number, value in enumerate(HOSTILE)}
    asked = manifests.training(arguments=complete(arguments, {}, "resnet50", 8), environment=variables)
    written = KINDS[kind](asked)
    for documents in cluster_readings(to_yaml(written)):
        assert documents == written  # and no document more
        (container,) = manifests.pod_of({one["kind"]: one for one in documents})["containers"]
        there = {"HOME": "/tmp", "PET_MASTER_ADDR": "elsewhere"}
        got = [manifests.expanded(argument, there) for argument in container["args"]]
        assert got == ["train", *arguments, "--out", "/runs/resnet50", "--resume"]
        found = {one["name"]: one.get("value") for one in container["env"]}
        assert {name: manifests.expanded(found[name], there) for name in variables} == variables


def test_without_the_escape_a_variable_would_be_put_in() -> None:
    assert manifests.expanded("$(HOME)", {"HOME": "/tmp"}) == "/tmp"


def test_texts_that_readers_differ_about_are_quoted() -> None:
    """PyYAML alone would write 1e3 and y without quotes, which Go's reader takes for a number and a truth."""
    text = to_yaml([{"values": ["1e3", "y", "0o17", "12:30", "plain-word", "/data"]}])
    assert text == ('---\nvalues:\n- "1e3"\n- "y"\n- "0o17"\n- "12:30"\n- plain-word\n- /data\n')


def test_every_manifest_is_json_too() -> None:
    for kind in KINDS:
        for document in KINDS[kind](manifests.training()):
            assert json.loads(json.dumps(document)) == document


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": "ResNet50"}, r"--name 'ResNet50' is no name for Kubernetes"),
        ({"name": "a_b"}, r"--name 'a_b' is no name"),
        ({"name": "-a"}, r"--name '-a' is no name"),
        ({"name": "a-"}, r"--name 'a-' is no name"),
        ({"name": "1a"}, r"beginning with a letter"),
        ({"name": ""}, r"--name '' is no name"),
        ({"name": "a\n"}, r"--name 'a\\n' is no name"),
        ({"name": "é"}, r"--name 'é' is no name"),
        ({"name": "a" * 60}, r"has 60 characters: use at most 54"),
        ({"namespace": "../kube-system"}, r"--namespace '../kube-system' is no name"),
        ({"run_claim": "runs\nx"}, r"--run-claim 'runs\\nx' is no name"),
        ({"data_claim": "Data"}, r"--data-claim 'Data' is no name"),
        ({"image": "convoy:1.0 --privileged"}, r"--image .* is no image"),
        ({"image": "$(IMAGE)"}, r"--image '\$\(IMAGE\)' is no image"),
        ({"image": "Convoy"}, r"--image 'Convoy' is no image"),
        ({"accelerator": "gpu"}, r"--accelerator 'gpu' is no resource: write it like nvidia.com/gpu"),
        ({"cpu": "many"}, r"--cpu 'many' is no amount"),
        ({"cpu": "0"}, r"--cpu '0' is no amount"),
        ({"memory": "-1Gi"}, r"--memory '-1Gi' is no amount"),
        ({"memory": "4Gi"}, r"--shared-memory 8Gi is part of --memory 4Gi"),
        ({"user": 0}, r"--user 0 must be at least 1, since 0 is root"),
        ({"num_nodes": 0}, r"--nodes 0 must be at least 1"),
        ({"least_nodes": 3}, r"--min-nodes 3 must be between 1 and --nodes 2"),
        ({"arguments": ()}, r"nothing to train: write --"),
        ({"arguments": ("a\udcff",)}, r"not text in UTF-8"),
        ({"arguments": ("a\0",)}, r"zero byte"),
        ({"environment": {"A B": "1"}}, r"--env 'A B' is no name of a variable"),
        ({"environment": {"1A": "1"}}, r"--env '1A' is no name of a variable"),
        ({"environment": {"PET_NNODES": "1"}}, r"--env PET_NNODES is set by the launcher"),
        ({"environment": {"RANK": "1"}}, r"--env RANK is set by the launcher"),
    ],
)
def test_what_kubernetes_would_not_take_is_refused_in_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConvoyError, match=sentence) as caught:
        manifests.training(**change)
    assert "\n" not in str(caught.value)


class TestSecrets:
    @pytest.mark.parametrize(
        "name",
        ["HF_TOKEN", "wandb_api_key", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "MY_KEYS", "SSH_PRIVATE", "BASIC_AUTH"],
    )
    def test_names_of_secrets_are_refused(self, name: str) -> None:
        with pytest.raises(ConvoyError, match=rf"--env {name} looks like a secret.*--env-from-secret {name}=") as error:
            manifests.training(environment={name: "hush"})
        assert "hush" not in str(error.value)

    @pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "KEYBOARD", "OMP_NUM_THREADS"])
    def test_other_names_are_not(self, name: str) -> None:
        assert manifests.training(environment={name: "1"}).environment == {name: "1"}

    @pytest.mark.parametrize(
        "value",
        [
            "https://anna:hush@host/x",
            "-----BEGIN RSA PRIVATE KEY-----\nhush",
            "hf_" + "a" * 34,
            "AKIA" + "A" * 16,
            "ghp_" + "b" * 36,
        ],
    )
    def test_values_that_are_secrets_are_refused(self, value: str) -> None:
        with pytest.raises(ConvoyError, match="looks like a secret") as error:
            manifests.training(environment={"HARMLESS": value})
        assert value not in str(error.value)
        with pytest.raises(ConvoyError, match="argument 2 after -- looks like it holds a password") as error:
            manifests.training(arguments=("resnet50", value))
        assert value not in str(error.value)

    def test_a_secret_is_named_not_written(self) -> None:
        asked = manifests.training(secrets=(SecretVariable("WANDB_API_KEY", "wandb", "api-key"),))
        for kind in KINDS:
            (container,) = manifests.pod_of(manifests.read(asked, kind))["containers"]
            (found,) = (one for one in container["env"] if one["name"] == "WANDB_API_KEY")
            assert found == {
                "name": "WANDB_API_KEY",
                "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "api-key"}},
            }

    def test_a_variable_is_given_once(self) -> None:
        with pytest.raises(ConvoyError, match="the variable A is given twice"):
            manifests.training(environment={"A": "1"}, secrets=(SecretVariable("A", "s", "k"),))


class TestCommandLine:
    ASKED = ("launch", "kubernetes", "--image", "convoy:1.0", "--run-claim", "runs")

    def test_it_writes_a_file_and_says_what_to_do(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "job.yaml"
        status = main([*self.ASKED, "--data-claim", "d", "--out", str(out), "--", "timm:ViT_B", "--data", "/data"])
        assert status == 0
        assert f"kubectl apply -f {out}" in capsys.readouterr().out
        _, job = yaml.safe_load_all(out.read_text(encoding="utf-8"))
        assert job["metadata"]["name"] == "timm-vit-b"
        assert job["spec"]["trainer"]["args"][-3:] == ["--out", "/runs/timm-vit-b", "--resume"]
        assert list(tmp_path.iterdir()) == [out]

    @pytest.mark.parametrize(
        ("more", "sentence"),
        [
            (["--", "lenet", "--dta", "x"], "--dta"),
            (["--", "resnt50", "--data", "x"], "did you mean resnet50"),
            (["--", "lenet", "--data", "x", "--set", "optimizer.bogus=3"], "optimizer.bogus"),
            (["--", "runs/cifar", "--data", "x"], "unknown model 'runs/cifar'"),
            (["--"], "nothing to train"),
            (["--", "lenet", "--out", "runs/x"], "--out runs/x would be lost with the pod"),
            (["--", "lenet", "--out=/runs/../x"], "would be lost with the pod"),
            (["--", "lenet", "--data", "/data/x"], "--data /data/x is on no volume"),
            (["--devices-per-node", "2", "--", "lenet", "--devices", "3"], "--devices 3 contradicts"),
            (["--nodes", "2", "--min-nodes", "1", "--", "lenet", "--devices", "2"], "contradicts --min-nodes"),
            (["--env", "A", "--", "lenet"], "--env 'A' must be NAME=VALUE"),
            (["--env-from-secret", "A=b", "--", "lenet"], "--env-from-secret A must be NAME=SECRET/KEY"),
            (["--env", "HF_TOKEN=hush", "--", "lenet"], "looks like a secret"),
            (["--out", "missing/job.yaml", "--", "lenet"], "--out missing/job.yaml cannot be written"),
        ],
    )
    def test_mistakes_are_told_before_anything_is_written(
        self,
        more: list[str],
        sentence: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main([*self.ASKED, *more]) == 2
        said = capsys.readouterr()
        assert sentence in said.err
        assert "hush" not in said.err
        assert said.err.count("\n") == 1
        assert not said.out
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "recipe", "name"),
    [
        ("timm:ViT_B", None, "timm-vit-b"),
        ("my.nets:make", None, "my-nets-make"),
        ("18", None, "convoy-18"),
        ("图", None, "convoy"),
        (None, "lenet-mnist", "lenet-mnist"),
        ("lenet", "mine.yaml", "lenet"),
        (None, None, "convoy"),
        ("a" * 100, None, "a" * 40),
    ],
)
def test_names_made_from_models_are_names(model: str | None, recipe: str | None, name: str) -> None:
    assert name_for(model, recipe) == name
