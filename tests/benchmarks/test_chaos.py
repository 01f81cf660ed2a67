"""The benchmark that kills ranks, with two kills, and ended before it has done any."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import chaos
import pytest

from processes import alive, children, variable
from started import wait_for


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_weights_are_those_of_the_run_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--kills", "2", "--updates", "120", "--every", "10", "--seed", "3"])
    assert chaos.main() == 0
    said = capsys.readouterr().out
    assert "weights          bit-identical" in said
    assert "metrics          identical" in said
    assert said.count("updates lost, ") == 2


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_it_ends_what_it_has_started_and_nothing_else(tmp_path: Path) -> None:
    line = [sys.executable, chaos.__file__, "--updates", "100000"]
    other = subprocess.Popen(["sleep", "300"])
    run = subprocess.Popen(line, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL)
    try:
        started: list[int] = []

        def two_ranks() -> bool:
            started[:] = [pid for launcher in children(run.pid) for pid in (launcher, *children(launcher))]
            return sum(variable(pid, "RANK") is not None for pid in started) == 2

        wait_for(two_ranks, 100)
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 128 + signal.SIGTERM
        assert not any(map(alive, started))
        assert list(tmp_path.iterdir()) == []
        assert other.poll() is None
    finally:
        for process in (run, other):
            process.kill()
            process.wait()
