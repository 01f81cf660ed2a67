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
    line = f"""-m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-id cut-off
        --rdzv-backend c10d --rdzv-endpoint {place.master}:29400 --local-addr {place.host.address}
        --rdzv-conf {CONFIG},is_host={int(place.rank == 0)}"""
    words = ["ip", "netns", "exec", place.host.namespace, sys.executable, *line.split(), *arguments]
    variables = {key: value for key, value in place.environment.items() if not key.startswith("MASTER_")}
    with log.open("w") as file:
        process = subprocess.Popen(
            words, env=ENVIRONMENT | variables, stdout=file, stderr=file, text=True, start_new_session=True
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


def test_the_run_outlives_a_short_cut_and_the_loss_of_a_host(
    places: list[EmulatedDevice], data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    finish(command(data, tmp_path / "serial", epochs=UPDATES))
    arguments = command(data, out, "--set", "checkpoint.every=5ba", "--timeout", "6s", epochs=UPDATES)[1:]
    logs = [tmp_path / f"log-{place.rank}" for place in places]

    def text() -> str:
        return "\n".join(log.read_text() for log in logs)

    with torchrun(places[0], arguments, logs[0]) as first, torchrun(places[1], arguments, logs[1]):
        wait_for(lambda: steps(out) >= 10, 90)
        cut(places[1], off=True)
        time.sleep(1.5)
        cut(places[1], off=False)
        before = steps(out)
        wait_for(lambda: steps(out) >= before + 10, 60)
        assert "has not moved" not in text()
        cut(places[1], off=True)
        assert wait_for(lambda: "has not moved" in text(), 30) < 15
        assert first.wait(120) == 0, text()
    assert "going on after" in logs[0].read_text() and "  rank 1 on host " in text()
    assert digest(out) == digest(tmp_path / "serial")
    assert curve(out) == curve(tmp_path / "serial")
