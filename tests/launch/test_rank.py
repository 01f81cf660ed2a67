"""How a rank ends: with which status, and with what said, also where nothing can be written."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.errors import ConvoyError
from convoy.failure import failure_of
from convoy.launch import rank
from convoy.launch.place import find_place
from convoy.launch.rank import ended

TORCHRUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "job"}
SLURM = {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7"}


def status_of(environment: dict[str, str], status: int) -> int:
    place = find_place(environment)
    assert place is not None
    return ended(place, status)


@pytest.mark.parametrize("status", [0, 1])
def test_every_rank_of_torchrun_has_the_status_as_its_agent_sees_no_others(status: int) -> None:
    assert [status_of(TORCHRUN | {"RANK": rank}, status) for rank in "01"] == [status, status]
    inside = TORCHRUN | SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}  # an agent that srun has started
    assert status_of(inside | {"RANK": "1"}, status) == status


@pytest.mark.parametrize("status", [0, 1])
def test_the_first_rank_of_srun_has_the_status(status: int) -> None:
    assert [status_of(SLURM | {"SLURM_PROCID": rank}, status) for rank in "01"] == [status, 0]


def test_the_starting_process_reads_the_status(tmp_path: Path) -> None:
    (tmp_path / "attempt-0").mkdir()
    environment = TORCHRUN | {"CONVOY_LAUNCH": str(tmp_path)}
    assert [status_of(environment | {"RANK": rank}, 1) for rank in "01"] == [0, 0]
    assert (tmp_path / "attempt-0" / "status").read_text() == "1"


def test_a_status_that_cannot_be_written_is_that_of_the_first_rank(tmp_path: Path) -> None:
    environment = TORCHRUN | {"CONVOY_LAUNCH": str(tmp_path / "gone")}
    assert [status_of(environment | {"RANK": rank}, 1) for rank in "01"] == [1, 0]


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_failure_that_cannot_be_written_is_printed(
    torchrun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class EndedError(Exception):
        """In place of the process."""

    def end(status: int) -> None:
        raise EndedError(status)

    (tmp_path / "file").touch()
    monkeypatch.setattr(rank, "_end", end)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "file" / "error.json"))
    with pytest.raises(EndedError, match="2"):
        rank._fail(failure_of(1, ConvoyError("no such plan")), None if torchrun else tmp_path / "file")
    assert capsys.readouterr().err == "convoy: no such plan\n"


IN_A_FINALIZER = """
import os, sys, time, weakref
from convoy.launch.place import find_place
from convoy.launch.rank import as_rank

class Tensor: pass

def close():
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0.1)

with as_rank(find_place(), saves=True):
    x = Tensor()
    weakref.finalize(x, close)
    del x
    time.sleep(60)
"""


def test_a_signal_that_a_finalizer_swallows_still_ends_the_rank_without_noise(tmp_path: Path) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)
    ranks = []
    for number in numbers:
        (tmp_path / number.name).mkdir()
        own = {"RANK": "1", "CONVOY_LAUNCH": str(tmp_path / number.name), "CONVOY_LAUNCHER": str(os.getpid())}
        line = [sys.executable, "-c", IN_A_FINALIZER, str(int(number))]
        ranks.append(subprocess.Popen(line, env=os.environ | TORCHRUN | own, stderr=subprocess.PIPE, text=True))
    assert [(each.communicate(timeout=30)[1], each.returncode) for each in ranks] == [
        ("", 128 + signal.SIGTERM),
        ("", 1),
    ]
    stopped, interrupted = (list((tmp_path / number.name / "attempt-0").glob("failure-*")) for number in numbers)
    assert not stopped  # another rank has failed, and says so
    assert json.loads(interrupted[0].read_text())["sentence"] == "SIGINT: stopped at once, without saving"
