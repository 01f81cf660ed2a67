"""What is printed for hosts, and what `convoy launch` refuses before anything is started or written."""

import json
import shlex
from pathlib import Path

import pytest

from convoy.cli import main
from convoy.launch.hosts import Host, commands


def test_the_commands_for_each_host(capsys: pytest.CaptureFixture[str]) -> None:
    line = "launch hosts --json --devices-per-host 2 --interface eth1 --min-hosts 1 --max-restarts 9 a,b:3,[fe80::1]"
    assert main([*line.split(), "--", "lenet", "--data", "a 'b'; $c"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [(record["host"], record["devices"]) for record in records] == [("a", 2), ("b", 3), ("fe80::1", 2)]
    for record in records:
        variables, words = shlex.split(record["command"])[:3], shlex.split(record["command"])[3:]
        secret = record["environment"]["CONVOY_SECRET"]
        assert variables == ["GLOO_SOCKET_IFNAME=eth1", "NCCL_SOCKET_IFNAME=eth1", f"CONVOY_SECRET={secret}"]
        assert words == record["arguments"]
        assert words[:4] == ["torchrun", "--nnodes=1:3", f"--nproc-per-node={record['devices']}", "--max-restarts=9"]
        assert words[4:6] == ["--rdzv-backend=convoy", "--rdzv-endpoint=a:29400"]
        assert words[7:] == ["-m", "convoy", "train", "lenet", "--data", "a 'b'; $c"]
    assert len({(record["arguments"][6], record["environment"]["CONVOY_SECRET"]) for record in records}) == 1  # one run
    static = commands(Host.parse("a:1,b:4"), ["lenet"], "x", 29_500, "static")[1]
    assert str(static) == (
        "torchrun --nnodes=2 --nproc-per-node=4 --node-rank=1 --master-addr=a --master-port=29500 -m convoy train lenet"
    )


def test_the_secret_may_be_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a secret"
    line = ["launch", "hosts", "--secret", str(file), "a:1,b:1", "--", "lenet", "--data", "d"]
    for _ in "ab":  # the second time it is there
        assert main(line) == 0
        text = capsys.readouterr().out
        assert text.count(f"CONVOY_SECRET_FILE='{file}' torchrun") == 2 and file.read_text().strip() not in text
    assert file.stat().st_mode & 0o777 == 0o600 and len(file.read_text()) == 33
    file.chmod(0o644)
    assert main(line) == 2
    assert "is open to other users: chmod 600" in capsys.readouterr().err
    file.unlink()
    file.symlink_to(tmp_path / "of somebody else")  # who could read there what is written
    assert main(line) == 2
    assert "cannot be written (File exists)" in capsys.readouterr().err and not (tmp_path / "of somebody else").exists()


KUBERNETES = "kubernetes --image convoy:1.0 --run-claim runs"
MISTAKES = {
    "hosts a:1,a:2 -- lenet": "host a is named twice",
    "hosts a:1,b:1 -- lenet --max-restarts 3": "--max-restarts after --",
    "slurm --option nodes=3 -- lenet": "--option nodes is set by an option of its own",
    "slurm --script /no/such/folder/x -- lenet": "--script /no/such/folder/x cannot be written",
    "slurm -- lenet --dvice cpu": "--dvice",
    "slurm -- lenet --data d --set optimizer.bogus=3": "optimizer.bogus",
    f"{KUBERNETES} --": "nothing to train",
    f"{KUBERNETES} -- lenet --out=/runs/../x": "would be lost with the pod",
    f"{KUBERNETES} -- lenet --data /data/x": "--data /data/x is on no volume",
    f"{KUBERNETES} --env HF_TOKEN=hush -- lenet": "looks like a secret",
}


def test_a_mistake_is_said_in_a_sentence_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line, words in MISTAKES.items():
        assert main(["launch", *line.split()]) == 2, line
        output = capsys.readouterr()
        assert words in output.err and output.err.count("\n") == 1, (line, output.err)
        assert not output.out and "hush" not in output.err and not list(tmp_path.iterdir()), line
