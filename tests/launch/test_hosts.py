"""What is printed for hosts."""

import json
import shlex
from pathlib import Path

import pytest

from convoy.cli import main
from convoy.launch.torchrun import Host, commands


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
