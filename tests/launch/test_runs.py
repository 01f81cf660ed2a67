"""One training on real launchers gives the weights of one device, bit for bit: on two hosts by the printed commands, on
a real Slurm that queues it again in its middle, in the place of two pods, and after a host is lost."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import manifests
from convoy.cli import main
from convoy.launch.torchrun import Host, commands
from emulated_hosts import TestHost, emulated_hosts, listening
from slurm_cluster import slurm_cluster
from started import ENVIRONMENT, digest, steps, wait_for
from tiny import write_mnist
from whole_runs import as_before

pytestmark = pytest.mark.slow
LINE = "tiny:TinyNet --data data --batch 24 --lr 0.05 --reproducible --set microbatch=3 --set log_every=1ba"
TRAIN = LINE.split()
SHORT, LONG = (*TRAIN, "--epochs", "60ba"), (*TRAIN, "--epochs", "400ba")
ON_HOSTS = ENVIRONMENT | {"PATH": f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With data."""
    folder = tmp_path_factory.mktemp("runs")
    write_mnist(folder / "data")
    return folder


@pytest.fixture(scope="module")
def serial(folder: Path) -> Callable[[tuple[str, ...]], str]:
    """The weights of one device, by what is trained."""
    known: dict[tuple[str, ...], str] = {}

    def of(train: tuple[str, ...]) -> str:
        if train not in known:
            with pytest.MonkeyPatch.context() as patch, as_before():
                patch.chdir(folder)
                assert main(["train", *train, "--out", f"serial-{len(known)}"]) == 0
            known[train] = digest(folder / f"serial-{len(known)}")
        return known[train]

    return of


def start(hosts: list[TestHost], lines: list[str], folder: Path) -> tuple[list[subprocess.Popen], list[Path]]:
    """The commands on their hosts, and what they write."""
    logs = [folder / f"{host.name}-{time.monotonic_ns()}.log" for host in hosts]
    processes = []
    for host, line, log in zip(hosts, lines, logs, strict=True):
        with log.open("w") as file:
            words = ["sh", "-c", line]
            processes.append(host.start(words, cwd=folder, env=ON_HOSTS, stdout=file, stderr=subprocess.STDOUT))
    return processes, logs


def pod_lines(folder: Path) -> list[str]:
    """What the containers of an indexed Job's two pods start, with no other variables than those of the manifest."""
    training = manifests.training(SHORT, name="pods", devices_per_node=1, accelerator=None, data_claim=None)
    (container,) = manifests.pod_of(manifests.read(training, "job"))["containers"]
    lines = []
    for index in "01":
        variables = {name: ON_HOSTS[name] for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")}
        variables |= {one["name"]: one.get("value", index) for one in container["env"]}  # no value: the number
        variables["PET_MASTER_ADDR"] = "node0"
        words = [manifests.expanded(word, variables) for word in (*container["command"], *container["args"])]
        line = shlex.join(["env", "-i", *(f"{name}={value}" for name, value in variables.items()), *words])
        lines.append(line.replace("/runs/", f"{folder}/"))
    return lines


@pytest.mark.parametrize("way", ["convoy", pytest.param("static", marks=pytest.mark.matrix), "pods"])
def test_two_hosts_or_pods_listen_on_one_address_each(
    folder: Path, serial: Callable[..., str], way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if way == "pods":
        lines, port = pod_lines(folder), 29_500
    else:
        line = ["launch", "hosts", "--rendezvous", way, "node0:1,node1:1", "--", *SHORT, "--out", way]
        assert main(line) == 0
        lines, port = capsys.readouterr().out.splitlines()[1::2], 29_400
    places, until = set[tuple[str, int]](), time.monotonic() + 120
    with emulated_hosts(2, "1gbit") as hosts:
        processes, logs = start(hosts, lines, folder)
        while any(process.poll() is None for process in processes):
            assert time.monotonic() < until
            places |= listening([pid for host in hosts for pid in host.pids()])
            time.sleep(0.5)
        assert [process.wait() for process in processes] == [0, 0], [log.read_text() for log in logs]
        addresses = {host.address for host in hosts}
    assert "on 2 devices (cpu), plan sample=2" in logs[0].read_text()
    assert digest(folder / way) == serial(SHORT)
    if way == "static":  # torch's own, so that it is seen that the test would see it
        assert {address for address, _ in places} - addresses
    else:
        assert {address for address, _ in places} == addresses and (hosts[0].address, port) in places


def cut(host: TestHost, off: bool) -> None:
    """Take the second host off the switch, or put it back."""
    switch, state = host.namespace.replace("host1", "switch"), "down" if off else "up"
    subprocess.run(("ip", "-n", switch, "link", "set", "port1", state), check=True, timeout=20)


@pytest.mark.matrix
@pytest.mark.timeout(500)
def test_a_run_outlives_a_short_cut_and_the_loss_of_a_host(folder: Path, serial: Callable[..., str]) -> None:
    """Torch takes half a minute to see that the host does not come back."""
    out = folder / "left"
    options = ["--out", str(out), "--timeout", "6s", "--set", "checkpoint.every=10ba"]
    restarts = {"least": 1, "max_restarts": 3, "environment": {"CONVOY_SECRET": "of both"}}
    group = commands(Host.parse("node0:1,node1:1"), [*LONG, *options], "cut", **restarts)
    lines = [str(one).replace("--rdzv-id", "--rdzv-conf read_timeout=10 --rdzv-id") for one in group]
    with emulated_hosts(2, "1gbit") as hosts:
        processes, logs = start(hosts, lines, folder)
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
    assert digest(out) == serial(LONG)


def test_a_job_that_slurm_queues_again_in_its_middle(folder: Path, serial: Callable[..., str]) -> None:
    with slurm_cluster() as cluster:
        cluster.environment["PYTHONPATH"] = str(Path(__file__).parents[1])
        words = ["-m", "convoy", "launch", "slurm", "--nodes", "2", "--time", "5m", "--submit", "--json", "--option"]
        names = ["comment=a $HOME b", "--name", "it's odd", "--script", "a job.sh"]
        answer = cluster.run(sys.executable, *words, *names, "--", *SHORT, "--device", "cpu", cwd=folder)
        job = answer.rpartition('"job": "')[2].partition('"')[0]
        run, log = folder / f"runs/it-s-odd-{job}", folder / f"it-s-odd-{job}.log"

        def wait_until(condition: Callable[[], bool]) -> None:
            try:
                wait_for(condition, 120)
            except AssertionError:
                pytest.fail(log.read_text() if log.exists() else "no log")

        wait_until(lambda: steps(run) > 5)
        assert cluster.state(job)["JobName"] == "it's"  # and ` odd`
        cluster.run("scancel", "--batch", "--signal=USR2", job)  # as Slurm does before the time is over
        weights = serial(SHORT)
        wait_until(lambda: cluster.state(job)["JobState"] == "COMPLETED")
        assert cluster.state(job)["Restarts"] == "1"
    text = log.read_text()
    assert "SIGUSR2: stopped and saved after" in text and "on 2 devices (cpu), plan sample=2" in text
    assert 5 <= int(text.partition("going on after ")[2].partition(" of 60 updates")[0]) < 60
    assert digest(run) == weights


SCRIPT = """import socket, torch, convoy
place = convoy.rank(), convoy.num_ranks()
net = convoy.parallelize(torch.nn.Linear(4, 3), "sample=2", torch.zeros(1, 4))
net(torch.full((1, 4), float(convoy.rank()))).sum().backward()
print(*place, socket.gethostname(), net.weight.grad.mean().item(), flush=True)
"""


def test_scripts_of_two_steps_side_by_side_on_a_part_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    step = f"srun --nodes=1 --ntasks=2 --relative=1 --exact --overlap {sys.executable} script.py &\n"
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{2 * step}wait\n")
    with slurm_cluster() as cluster:
        cluster.run("sbatch", "--nodes=2", "--ntasks=4", "--wait", "--output=log", "job.sh", cwd=tmp_path)
    printed = (tmp_path / "log").read_text()
    for rank in "01":
        assert printed.count(f"{rank} 2 node2 0.5\n") == 2, printed
