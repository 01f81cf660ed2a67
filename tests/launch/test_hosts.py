"""Two hosts train together by the printed commands, and listen on one address each; and what the commands must say."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.cli import main
from convoy.errors import ConvoyError
from convoy.launch.hosts import Host, HostGroup
from emulated_hosts import TestHost, emulated_hosts, listening
from started import ENVIRONMENT, digest, steps, wait_for
from tiny import write_mnist
from whole_runs import as_before

ON_HOSTS = ENVIRONMENT | {"PATH": f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"}
TRAIN = "tiny:TinyNet --data data --batch 24 --lr 0.05 --reproducible --epochs 24ba --set microbatch=3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With data, and the run of one device."""
    folder = tmp_path_factory.mktemp("hosts")
    write_mnist(folder / "data")
    with pytest.MonkeyPatch.context() as patch, as_before():
        patch.chdir(folder)
        assert main(["train", *TRAIN.split(), "--out", "serial"]) == 0
    return folder


def listening_until_the_end(processes: list[subprocess.Popen], pids: Callable[[], list[int]]) -> set[tuple[str, int]]:
    """Where processes listen until the first ones have ended."""
    places: set[tuple[str, int]] = set()
    until = time.monotonic() + 120
    while any(process.poll() is None for process in processes):
        assert time.monotonic() < until
        places |= listening(pids())
        time.sleep(0.05)
    return places


def start(hosts: list[TestHost], commands: list[str], folder: Path) -> tuple[list[subprocess.Popen], list[Path]]:
    """The commands on their hosts, and what they write."""
    logs = [folder / f"{host.name}-{time.monotonic_ns()}.log" for host in hosts]
    processes = []
    for host, command, log in zip(hosts, commands, logs, strict=True):
        with log.open("w") as file:
            words = ["sh", "-c", command]
            processes.append(host.start(words, cwd=folder, env=ON_HOSTS, stdout=file, stderr=subprocess.STDOUT))
    return processes, logs


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--rendezvous", "static"), marks=pytest.mark.matrix)],
    ids=["one-address", "static"],
)
def test_two_hosts_give_the_weights_of_one_device_and_listen_on_one_address_each(
    folder: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"run{len(options)}"
    assert main(["launch", "hosts", *options, "node0:1,node1:1", "--", *TRAIN.split(), "--out", out]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# node0, 1 device"
    with emulated_hosts(2, "1gbit") as hosts:
        processes, logs = start(hosts, lines[1::2], folder)
        places = listening_until_the_end(processes, lambda: [pid for host in hosts for pid in host.pids()])
        assert [process.wait() for process in processes] == [0, 0], [log.read_text() for log in logs]
        addresses = {host.address for host in hosts}
    assert "on 2 devices (cpu), plan sample=2" in logs[0].read_text()
    assert digest(folder / out) == digest(folder / "serial")
    if options:  # torch's own, so that it is seen that the test would see it
        assert {address for address, _ in places} - addresses
    else:
        assert {address for address, _ in places} == addresses and (hosts[0].address, 29_400) in places


def cut(host: TestHost, off: bool) -> None:
    """Take the second host off the switch, or put it back."""
    switch, state = host.namespace.replace("host1", "switch"), "down" if off else "up"
    subprocess.run(("ip", "-n", switch, "link", "set", "port1", state), check=True, timeout=20)


@pytest.mark.matrix
@pytest.mark.timeout(500)
def test_a_run_outlives_a_short_cut_and_the_loss_of_a_host_bit_for_bit(folder: Path) -> None:
    """Torch takes half a minute to see that the host does not come back."""
    group = HostGroup(
        Host.parse("node0:1,node1:1"), "cut", least=1, max_restarts=3, secret={"CONVOY_SECRET": "of both"}
    )
    out, train = folder / "left", TRAIN.replace("24ba", "400ba").split()
    options = ["--out", str(out), "--timeout", "6s", "--set", "checkpoint.every=10ba", "--set", "log_every=1ba"]
    commands = [str(one).replace("--rdzv-id", "--rdzv-conf read_timeout=10 --rdzv-id") for one in group.commands(train)]
    with emulated_hosts(2, "1gbit") as hosts:
        processes, logs = start(hosts, [f"{one} {' '.join(options)}" for one in commands], folder)
        wait_for(lambda: steps(out) >= 10, 120)
        cut(hosts[1], off=True)
        time.sleep(1.5)
        cut(hosts[1], off=False)
        before = steps(out)
        wait_for(lambda: steps(out) >= before + 10, 60)
        assert not any("has not moved" in log.read_text() for log in logs)
        cut(hosts[1], off=True)
        assert processes[0].wait(150) == 0, logs[0].read_text()
        assert processes[1].wait(60) == 1
    assert "rank 0 on host node0 has not moved for" in logs[0].read_text()
    assert "going on after" in logs[0].read_text()
    assert logs[1].read_text().endswith("start torchrun again on all hosts, and the run goes on\n")
    with pytest.MonkeyPatch.context() as patch, as_before():
        patch.chdir(folder)
        assert main(["train", *train, "--out", "whole"]) == 0
    assert digest(out) == digest(folder / "whole")


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


MISTAKES = {
    "a,b:2 -- lenet": "a says no number of devices: write e.g. a:4, or --devices-per-host 4",
    "a:0 -- lenet": "a:0 has 0 devices",
    "a:1,a:2 -- lenet": "host a is named twice",
    "a:1, -- lenet": "'' is no host",
    "a:1,fe80::1 -- lenet": "'fe80::1' is no host",
    "a:1,b:1": "nothing to train",
    "a:1,b:1 -- lenet --devices 3": "--devices 3 contradicts the 2 ranks",
    "a:1,b:1 -- lenet --max-restarts 3": "--max-restarts after --",
    "a:1,b:1 -- resnt50 --data d --set optimizer.bogus=3": "optimizer.bogus",
    "a:1,b:1 -- resnt50 --data d": "did you mean resnet50",
    "--min-hosts 3 a:1,b:1 -- lenet": "--min-hosts 3 must be from 1 to the 2 hosts",
    "--port 0 a:1 -- lenet": "--port 0",
    "--max-restarts -1 a:1 -- lenet": "--max-restarts -1",
    "--interface a/b a:1 -- lenet": "--interface 'a/b'",
    "--secret /no/such a:1 -- lenet": "--secret /no/such cannot be written",
}


def test_a_mistake_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for line, words in MISTAKES.items():
        assert main(["launch", "hosts", *line.split()]) == 2, line
        errors = capsys.readouterr().err
        assert words in errors and errors.count("\n") == 1, (line, errors)
    assert Host.parse("n-1.x:2, n_2,[::1]:3", 4) == [Host("n-1.x", 2), Host("n_2", 4), Host("::1", 3)]
    with pytest.raises(ConvoyError, match="no host"):
        Host.parse("a b:1")
