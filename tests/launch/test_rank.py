"""Where a process stands among the ranks, and how it ends: with which status and words, also where nothing can be
written."""

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
from convoy.launch.rank import find_place, first_host, slurm_variables
from convoy.launch.rank import ended

TORCHRUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "job"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x3)",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_JOB_ID": "123456",
}


def test_torchrun_is_joined() -> None:
    place = find_place({"RANK": "1", "WORLD_SIZE": "3"})
    assert place is not None
    assert (place.rank, place.num_ranks, place.folder) == (1, 3, None)
    place.check(3)
    place.check(None)
    with pytest.raises(ConvoyError, match=r"--devices 2 contradicts torchrun, which started 3 ranks"):
        place.check(2)


def test_slurm_is_translated() -> None:
    environment = dict(SLURM)
    place = find_place(environment)
    assert place is not None
    assert (place.rank, place.num_ranks, place.source) == (5, 6, "Slurm")
    assert environment["MASTER_ADDR"] == "gpu07"
    assert 1024 < int(environment["MASTER_PORT"]) < 32768
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("1", "2")
    first = slurm_variables(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert first is not None and first["MASTER_PORT"] == environment["MASTER_PORT"]
    for nodes, host in {
        "one": "one",
        "a,b": "a",
        "node[03-05,9],x": "node03",
        "n[7,9]": "n7",
        "r[1-2]-x": "r1-x",
    }.items():
        assert first_host(nodes) == host


def test_a_batch_script_and_a_single_task_are_no_ranks() -> None:
    assert find_place({}) is None
    assert find_place(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert find_place(SLURM | {"SLURM_TASK_PID": "77"}) is None
    assert find_place(SLURM | {"SLURM_TASK_PID": "77", "SLURM_STEP_ID": "0"}) is not None


def test_incomplete_variables_are_refused() -> None:
    for environment, words in (
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "below WORLD_SIZE"),
        (SLURM | {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST"),
    ):
        with pytest.raises(ConvoyError, match=words):
            find_place(dict(environment))


def status_of(environment: dict[str, str], status: int) -> int:
    place = find_place(environment)
    assert place is not None
    return ended(place, status)


@pytest.mark.parametrize("status", [0, 1])
def test_every_rank_of_torchrun_has_the_status_and_of_srun_the_first(status: int) -> None:
    """An agent of torchrun's sees no other hosts, and srun takes the highest status."""
    assert [status_of(TORCHRUN | {"RANK": rank}, status) for rank in "01"] == [status, status]
    job = SLURM | {"SLURM_NTASKS": "2"}
    assert [status_of(job | {"SLURM_PROCID": rank}, status) for rank in "01"] == [status, 0]
    assert status_of(TORCHRUN | job | {"RANK": "1", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, status) == status


def test_the_starting_process_reads_the_status_or_has_that_of_the_first_rank(tmp_path: Path) -> None:
    (tmp_path / "attempt-0").mkdir()
    environment = TORCHRUN | {"CONVOY_LAUNCH": str(tmp_path)}
    assert [status_of(environment | {"RANK": rank}, 1) for rank in "01"] == [0, 0]
    assert (tmp_path / "attempt-0" / "status").read_text() == "1"
    environment["CONVOY_LAUNCH"] = str(tmp_path / "gone")
    assert [status_of(environment | {"RANK": rank}, 1) for rank in "01"] == [1, 0]


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_a_failure_that_cannot_be_written_is_printed(
    by_torchrun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class EndedError(Exception):
        """In place of the process."""

    def end(status: int) -> None:
        raise EndedError(status)

    (tmp_path / "file").touch()
    monkeypatch.setattr(rank, "_end", end)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "file" / "error.json"))
    with pytest.raises(EndedError, match="2"):
        rank._fail(failure_of(1, ConvoyError("no such plan")), None if by_torchrun else tmp_path / "file")
    assert capsys.readouterr().err == "convoy: no such plan\n"


IN_A_FINALIZER = """
import os, sys, time, weakref
from convoy.launch.rank import find_place
from convoy.launch.rank import as_rank

class Tensor: pass

def close():
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0.1)

with as_rank(find_place(), saves=sys.argv[2] == "saves"):
    x = Tensor()
    weakref.finalize(x, close)
    del x
    time.sleep(60)
"""


def test_a_signal_that_a_finalizer_swallows_still_ends_the_rank_without_noise(tmp_path: Path) -> None:
    cases = {"another": (signal.SIGTERM, "saves"), "saves": (signal.SIGINT, "saves"), "shows": (signal.SIGINT, "")}
    ranks = []
    for name, (number, saves) in cases.items():
        (tmp_path / name).mkdir()
        variables = {"RANK": "1", "CONVOY_LAUNCH": str(tmp_path / name), "CONVOY_LAUNCHER": str(os.getpid())}
        line = [sys.executable, "-c", IN_A_FINALIZER, str(int(number)), saves]
        ranks.append(subprocess.Popen(line, env=os.environ | TORCHRUN | variables, stderr=subprocess.PIPE, text=True))
    outcomes = [(each.communicate(timeout=60)[1], each.returncode) for each in ranks]
    assert outcomes == [("", 128 + signal.SIGTERM), ("", 1), ("", 1)]
    sentences = {
        name: [json.loads(path.read_text())["sentence"] for path in (tmp_path / name / "attempt-0").glob("failure-*")]
        for name in cases
    }
    assert sentences == {
        "another": [],  # another rank has failed, and says so
        "saves": ["SIGINT: stopped at once, without saving"],
        "shows": ["SIGINT: stopped at once"],
    }
