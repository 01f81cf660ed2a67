"""Two hosts train together by the printed commands, and listen on one address each; and what the commands must say."""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from convoy.cli import main
from convoy.errors import ConvoyError
from convoy.launch.hosts import Host, HostGroup
from emulated_hosts import emulated_hosts, listening
from started import wait_for
from tiny import write_mnist

ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(Path(__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}
TRAIN = "tiny:TinyNet --data data --batch 24 --lr 0.05 --reproducible --epochs 24ba --set microbatch=3"


def digest(run: Path) -> str:
    return hashlib.sha256((run / "weights.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With data, and the run of one device."""
    tmp = tmp_path_factory.mktemp("hosts")
    write_mnist(tmp / "data")
    serial = [sys.executable, "-m", "convoy", "train", *TRAIN.split(), "--out", "serial"]
    subprocess.run(serial, cwd=tmp, env=ENVIRONMENT, check=True, timeout=100, capture_output=True)
    return tmp


def watched(processes: list[subprocess.Popen], pids: object) -> set[tuple[str, int]]:
    """Where processes listen until the first ones have ended."""
    found = set()
    until = time.monotonic() + 120
    while any(process.poll() is None for process in processes):
        assert time.monotonic() < until
        found |= listening(pids())  # type: ignore[operator]
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--rendezvous", "static"), marks=pytest.mark.matrix)],
    ids=["one-address", "static"],
)
def test_two_hosts_give_the_weights_of_one_device(
    folder: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"run{len(options)}"
    assert main(["launch", "hosts", *options, "node0:1,node1:1", "--", *TRAIN.split(), "--out", out]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# node0, 1 device"
    with emulated_hosts(2, "1gbit") as hosts:
        started = [
            host.start(
                ["sh", "-c", command],
                cwd=folder,
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host, command in zip(hosts, lines[1::2], strict=True)
        ]
        found = watched(started, lambda: [pid for host in hosts for pid in host.pids()])
        said = [process.communicate()[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], said
        addresses = {host.address for host in hosts}
    assert "on 2 devices (cpu), plan sample=2" in said[0]
    assert digest(folder / out) == digest(folder / "serial")
    if not options:
        assert {address for address, _ in found} == addresses
        assert (hosts[0].address, 29_400) in found
    else:  # torch's own, so that it is seen that the test would see it
        assert {address for address, _ in found} - addresses


@pytest.mark.matrix
def test_a_host_that_is_cut_off_ends_like_the_others(folder: Path) -> None:
    group = HostGroup(Host.parse("node0:1,node1:1"), "cut", secret={"CONVOY_SECRET": "of both"})
    train = [*TRAIN.replace("24ba", "9000ba").split(), "--out", "cut", "--timeout", "6s", "--set", "log_every=1ba"]
    metrics = folder / "cut/metrics.jsonl"
    with emulated_hosts(2, "1gbit") as hosts, ExitStack() as stack:
        logs = [stack.enter_context((folder / f"cut-{host.name}.log").open("w+")) for host in hosts]
        commands = [
            str(one).replace("--rdzv-id", "--rdzv-conf read_timeout=10 --rdzv-id") for one in group.commands(train)
        ]
        started = [
            host.start(["sh", "-c", command], cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log)
            for host, command, log in zip(hosts, commands, logs, strict=True)
        ]
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 9, 120)
        switch = hosts[1].namespace.replace("host1", "switch")
        subprocess.run(("ip", "-n", switch, "link", "set", "port1", "down"), check=True, timeout=20)
        assert [process.wait(60) for process in started] == [1, 1]
        said = [Path(log.name).read_text() for log in logs]
    assert "rank 0 on host node0 has not moved for" in said[0]
    assert said[1].endswith("start torchrun again on all hosts, and the run goes on\n")


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_a_host_that_vanishes_is_gone_on_without(folder: Path) -> None:
    """Bit for bit; torch takes half a minute to see that it does not come back."""
    group = HostGroup(Host.parse("node0:1,node1:1"), "elastic", least=1, max_restarts=3)
    train = TRAIN.replace("24ba", "400ba").split()
    options = ["--out", "left", "--set", "checkpoint.every=10ba", "--set", "log_every=1ba"]
    metrics = folder / "left/metrics.jsonl"
    with emulated_hosts(2, "1gbit") as hosts:
        commands = [str(command) for command in group.commands([*train, *options])]
        with (folder / "left.log").open("w") as log:
            first, second = (
                host.start(["sh", "-c", command], cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log)
                for host, command in zip(hosts, commands, strict=True)
            )
        until = time.monotonic() + 120
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 30:
            assert time.monotonic() < until and first.poll() is None, (folder / "left.log").read_text()
            time.sleep(0.02)
        for pid in hosts[1].pids():
            os.kill(pid, signal.SIGKILL)
        second.wait(30)
        assert first.wait(120) == 0, (folder / "left.log").read_text()
    assert "going on after" in (folder / "left.log").read_text()
    whole = [sys.executable, "-m", "convoy", "train", *train, "--out", "whole"]
    subprocess.run(whole, cwd=folder, env=ENVIRONMENT, check=True, timeout=150, capture_output=True)
    assert digest(folder / "left") == digest(folder / "whole")


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
    assert len({record["arguments"][6] for record in records}) == 1  # one run, one name
    assert len({record["environment"]["CONVOY_SECRET"] for record in records}) == 1
    static = HostGroup(Host.parse("a:1,b:4"), "x", 29_500, "static").commands(["lenet"])[1]
    assert str(static) == (
        "torchrun --nnodes=2 --nproc-per-node=4 --node-rank=1 --master-addr=a --master-port=29500 -m convoy train lenet"
    )


def test_the_secret_may_be_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a secret"
    line = ["launch", "hosts", "--secret", str(file), "a:1,b:1", "--", "lenet", "--data", "d"]
    for _ in "ab":  # the second time it is there
        assert main(line) == 0
        said = capsys.readouterr().out
        assert said.count(f"CONVOY_SECRET_FILE='{file}' torchrun") == 2 and file.read_text().strip() not in said
    assert file.stat().st_mode & 0o777 == 0o600 and len(file.read_text()) == 33
    file.chmod(0o644)
    assert main(line) == 2
    assert "is open to other users: chmod 600" in capsys.readouterr().err
    file.unlink()
    file.symlink_to(tmp_path / "of somebody else")  # who could read there what is written
    assert main(line) == 2
    assert "cannot be written (File exists)" in capsys.readouterr().err and not (tmp_path / "of somebody else").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a,b:2 -- lenet", "a says no number of devices: write e.g. a:4, or --devices-per-host 4"),
        ("a:0 -- lenet", "a:0 has 0 devices"),
        ("a:1,a:2 -- lenet", "host a is named twice"),
        ("a:1, -- lenet", "'' is no host"),
        ("a:1,fe80::1 -- lenet", "'fe80::1' is no host"),
        ("a:1,b:1", "nothing to train"),
        ("a:1,b:1 -- lenet --devices 3", "--devices 3 contradicts the 2 ranks"),
        ("a:1,b:1 -- lenet --max-restarts 3", "--max-restarts after --"),
        ("a:1,b:1 -- resnt50 --data d --set optimizer.bogus=3", "optimizer.bogus"),
        ("a:1,b:1 -- resnt50 --data d", "did you mean resnet50"),
        ("a:1,b:1 -- lenet --no-such-thing", "--no-such-thing"),
        ("--min-hosts 3 a:1,b:1 -- lenet", "--min-hosts 3 must be from 1 to the 2 hosts"),
        ("--min-hosts 1 --rendezvous static a:1,b:1 -- lenet", "--rendezvous static needs all hosts"),
        ("--port 0 a:1 -- lenet", "--port 0"),
        ("--max-restarts -1 a:1 -- lenet", "--max-restarts -1"),
        ("--interface a/b a:1 -- lenet", "--interface 'a/b'"),
        ("--secret /no/such a:1 -- lenet", "--secret /no/such cannot be written"),
    ],
)
def test_a_mistake_is_said_in_a_sentence(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "hosts", *line.split()]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


def test_hosts_in_a_line() -> None:
    assert Host.parse("n-1.x:2, n_2,[::1]:3", 4) == [Host("n-1.x", 2), Host("n_2", 4), Host("::1", 3)]
    with pytest.raises(ConvoyError, match="no host"):
        Host.parse("a b:1")
