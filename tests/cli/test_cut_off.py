"""A host whose network is cut while it trains: emulated, as root."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from convoy.bench.emulated import Cluster, EmulatedDevice, emulate
from convoy.errors import ConvoyError
from started import ENVIRONMENT, command, curve, digest, finish, steps, wait_for
from tiny import write_mnist

pytestmark = pytest.mark.matrix  # a minute
UPDATES = "200ba"
CONFIG = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10"


@pytest.fixture
def places() -> Iterator[list[EmulatedDevice]]:
    try:
        with emulate(Cluster.alike(2, 1.0, "1gbit")) as places:
            yield places
    except ConvoyError as error:
        pytest.skip(str(error))


def cut(place: EmulatedDevice, off: bool) -> None:
    """Take a host off the switch, or put it back."""
    switch = place.host.namespace.replace(f"host{place.rank}", "switch")
    state = "down" if off else "up"
    subprocess.run(("ip", "-n", switch, "link", "set", f"port{place.rank}", state), check=True, timeout=20)


@contextmanager
def torchrun(place: EmulatedDevice, arguments: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "cut-off"]
    options += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{place.master}:29400",
        "--rdzv-conf",
        f"{CONFIG},is_host={int(place.rank == 0)}",
    ]
    options += ["--local-addr", place.host.address]
    everywhere = place.environment
    variables = {key: value for key, value in everywhere.items() if not key.startswith("MASTER_")}
    inside = ["ip", "netns", "exec", place.host.namespace, sys.executable, "-m", "torch.distributed.run"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*inside, *options, *arguments],
            env=ENVIRONMENT | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(40)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def test_the_run_outlives_a_short_cut_and_the_loss_of_a_host(places: list[EmulatedDevice], tmp_path: Path) -> None:
    data, out = write_mnist(tmp_path / "data"), tmp_path / "run"
    finish(command(data, tmp_path / "serial", epochs=UPDATES))
    settings = ("--set", "checkpoint.every=5ba", "--timeout", "6s")
    arguments = command(data, out, *settings, epochs=UPDATES)[1:]
    logs = [tmp_path / f"log-{place.rank}" for place in places]

    def said() -> str:
        return "\n".join(log.read_text() for log in logs)

    try:
        with torchrun(places[0], arguments, logs[0]) as first, torchrun(places[1], arguments, logs[1]):
            wait_for(lambda: steps(out) >= 10, 90)
            cut(places[1], off=True)
            time.sleep(1.5)
            cut(places[1], off=False)
            seen = steps(out)
            wait_for(lambda: steps(out) >= seen + 10, 60)
            assert "has not moved" not in said()
            cut(places[1], off=True)
            took = wait_for(lambda: "has not moved" in said(), 30)
            assert took < 15
            assert first.wait(120) == 0
    except BaseException:
        print(said())
        raise
    assert "going on after" in logs[0].read_text()
    assert "  rank 1 on host " in said()
    assert digest(out) == digest(tmp_path / "serial")
    assert curve(out) == curve(tmp_path / "serial")
