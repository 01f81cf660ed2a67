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

# fmt: off
HOSTILE = [
    "a'b", 'a"b', "a\nb: c", "a\r\n---\nkind: Secret", "${HOME}", "$(HOME)", "$(PET_MASTER_ADDR)", "$$(HOME)", "$",
    "-rf", "--", "!!python/object/apply:os.system [id]", "&anchor *alias", "{{ .Values.x }}", "# comment", "a: b",
    "- item", "| block", "> folded", "", " ", "~", "null", "yes", "y", "on", "0x10", "0o17", "017", "1e3", "1_000",
    "12:30:45", "2026-11-22", ".inf", "=", "<<", "\t", "\x1b[2J", "\u202egnp.exe", "\ufeffbom", "\u2028line",
    "\x85next", "ü 图片 🚢", "x" * 5000,
]
# fmt: on


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
    training = manifests.training(arguments=complete(arguments, {}, "resnet50", 8), environment=variables)
    written = KINDS[kind](training)
    assert json.loads(json.dumps(written)) == written
    for documents in cluster_readings(to_yaml(written)):
        assert documents == written  # and no document more
        (container,) = manifests.pod_of({one["kind"]: one for one in documents})["containers"]
        there = {"HOME": "/tmp", "PET_MASTER_ADDR": "elsewhere"}
        words = [manifests.expanded(argument, there) for argument in container["args"]]
        assert words == ["train", *arguments, "--out", "/runs/resnet50", "--resume"]
        found = {one["name"]: one.get("value") for one in container["env"]}
        assert {name: manifests.expanded(found[name], there) for name in variables} == variables
    assert manifests.expanded("$(HOME)", {"HOME": "/tmp"}) == "/tmp"  # which the escape keeps from


def test_texts_that_readers_differ_about_are_quoted() -> None:
    """PyYAML alone would write 1e3 and y without quotes, which Go's reader takes for a number and a truth."""
    text = to_yaml([{"values": ["1e3", "y", "0o17", "12:30", "plain-word", "/data"]}])
    assert text == ('---\nvalues:\n- "1e3"\n- "y"\n- "0o17"\n- "12:30"\n- plain-word\n- /data\n')


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"name": name}, "--name ") for name in ("ResNet50", "a_b", "-a", "a-", "1a", "", "a\n", "é")),
    ({"name": "a" * 60}, "has 60 characters: use at most 54"),
    ({"namespace": "../kube-system"}, "--namespace '../kube-system' is no name"),
    ({"run_claim": "runs\nx"}, r"--run-claim 'runs\\nx' is no name"),
    ({"data_claim": "Data"}, "--data-claim 'Data' is no name"),
    ({"image": "convoy:1.0 --privileged"}, "--image .* is no image"),
    ({"image": "$(IMAGE)"}, r"--image '\$\(IMAGE\)' is no image"),
    ({"image": "Convoy"}, "--image 'Convoy' is no image"),
    ({"accelerator": "gpu"}, "--accelerator 'gpu' is no resource: write it like nvidia.com/gpu"),
    ({"cpu": "0"}, "--cpu '0' is no amount"),
    ({"memory": "-1Gi"}, "--memory '-1Gi' is no amount"),
    ({"memory": "4Gi"}, "--shared-memory 8Gi is part of --memory 4Gi"),
    ({"user": 0}, "--user 0 must be at least 1, since 0 is root"),
    ({"num_nodes": 0}, "--nodes 0 must be at least 1"),
    ({"least_nodes": 3}, "--min-nodes 3 must be between 1 and --nodes 2"),
    ({"arguments": ()}, "nothing to train: write --"),
    ({"arguments": ("a\udcff",)}, "not text in UTF-8"),
    ({"arguments": ("a\0",)}, "zero byte"),
    ({"environment": {"A B": "1"}}, "--env 'A B' is no name of a variable"),
    ({"environment": {"PET_NNODES": "1"}}, "--env PET_NNODES is set by the launcher"),
    ({"environment": {"RANK": "1"}}, "--env RANK is set by the launcher"),
    ({"environment": {"A": "1"}, "secrets": (SecretVariable("A", "s", "k"),)}, "the variable A is given twice"),
]


def test_what_kubernetes_would_not_take_is_refused_in_one_sentence() -> None:
    for change, sentence in REFUSED:
        with pytest.raises(ConvoyError, match=sentence) as caught:
            manifests.training(**change)
        assert "\n" not in str(caught.value)
    longest = "a" * 54
    assert manifests.training(name=longest) and len(f"{longest}-node-0-1") == 63  # as host names may be


def test_what_looks_like_a_secret_is_refused_without_being_repeated() -> None:
    for name in ("HF_TOKEN", "wandb_api_key", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "MY_KEYS", "BASIC_AUTH"):
        with pytest.raises(ConvoyError, match=rf"--env {name} looks like a secret.*--env-from-secret {name}=") as error:
            manifests.training(environment={name: "hush"})
        assert "hush" not in str(error.value)
    for name in ("TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "KEYBOARD", "OMP_NUM_THREADS"):
        assert manifests.training(environment={name: "1"}).environment == {name: "1"}
    private = "-----BEGIN RSA PRIVATE KEY-----\nhush"
    for value in ("https://anna:hush@host/x", private, "hf_" + "a" * 34, "AKIA" + "A" * 16, "ghp_" + "b" * 36):
        with pytest.raises(ConvoyError, match="looks like a secret") as error:
            manifests.training(environment={"HARMLESS": value})
        assert value not in str(error.value)
        with pytest.raises(ConvoyError, match="argument 2 after -- looks like it holds a password") as error:
            manifests.training(arguments=("resnet50", value))
        assert value not in str(error.value)


LINE = ("launch", "kubernetes", "--image", "convoy:1.0", "--run-claim", "runs")
MISTAKES = {
    "-- lenet --dta x": "--dta",
    "-- resnt50 --data x": "did you mean resnet50",
    "-- lenet --data x --set optimizer.bogus=3": "optimizer.bogus",
    "-- runs/cifar --data x": "unknown model 'runs/cifar'",
    "--": "nothing to train",
    "-- lenet --out=/runs/../x": "would be lost with the pod",
    "-- lenet --data /data/x": "--data /data/x is on no volume",
    "--devices-per-node 2 -- lenet --devices 3": "--devices 3 contradicts",
    "--nodes 2 --min-nodes 1 -- lenet --devices 2": "contradicts --min-nodes",
    "--env-from-secret A=b -- lenet": "--env-from-secret A must be NAME=SECRET/KEY",
    "--env HF_TOKEN=hush -- lenet": "looks like a secret",
    "--out missing/job.yaml -- lenet": "--out missing/job.yaml cannot be written",
}


def test_the_command_line_writes_a_file_or_tells_mistakes_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line, words in MISTAKES.items():
        assert main([*LINE, *line.split()]) == 2, line
        output = capsys.readouterr()
        assert words in output.err and output.err.count("\n") == 1 and "hush" not in output.err, line
        assert not output.out and not list(tmp_path.iterdir()), line
    assert main([*LINE, "--data-claim", "d", "--out", "job.yaml", "--", "timm:ViT_B", "--data", "/data"]) == 0
    assert "kubectl apply -f job.yaml" in capsys.readouterr().out
    _, job = yaml.safe_load_all(Path("job.yaml").read_text(encoding="utf-8"))
    assert job["metadata"]["name"] == "timm-vit-b"
    assert job["spec"]["trainer"]["args"][-3:] == ["--out", "/runs/timm-vit-b", "--resume"]
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]
    names = {("my.nets:make", None): "my-nets-make", ("18", None): "convoy-18", ("图", None): "convoy"}
    names |= {(None, "lenet-mnist"): "lenet-mnist", ("lenet", "mine.yaml"): "lenet", ("a" * 100, None): "a" * 40}
    assert {asked: name_for(*asked) for asked in names} == names
