"""Where a process stands among the ranks, and how it ends: with which status and words, also where nothing can be
written; and the folder that it shares with the process that started it."""

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from convoy.errors import ConvoyError
from convoy.failure import failure_of
from convoy.launch import rank
from convoy.launch.rank import ended, find_place, private_folder
from convoy.launch.slurm import first_host, slurm_variables

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


def test_torchrun_is_joined_and_slurm_translated() -> None:
    place = find_place({"RANK": "1", "WORLD_SIZE": "3"})
    assert place is not None and (place.rank, place.num_ranks, place.folder) == (1, 3, None)
    place.check(3)
    place.check(None)
    with pytest.raises(ConvoyError, match=r"--devices 2 contradicts torchrun, which started 3 ranks"):
        place.check(2)
    environment = dict(SLURM)
    place = find_place(environment)
    assert place is not None and (place.rank, place.num_ranks, place.source) == (5, 6, "Slurm")
    assert (environment["MASTER_ADDR"], environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == (
        *("gpu07", "1", "2"),
    )
    assert 1024 < int(environment["MASTER_PORT"]) < 32768
    first = slurm_variables(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert first is not None and first["MASTER_PORT"] == environment["MASTER_PORT"]
    nodes = {"one": "one", "a,b": "a", "node[03-05,9],x": "node03", "n[7,9]": "n7", "r[1-2]-x": "r1-x"}
    assert {text: first_host(text) for text in nodes} == nodes


def test_a_batch_script_and_a_single_task_are_no_ranks_and_incomplete_variables_are_refused() -> None:
    assert find_place({}) is None
    assert find_place(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert find_place(SLURM | {"SLURM_TASK_PID": "77"}) is None
    assert find_place(SLURM | {"SLURM_TASK_PID": "77", "SLURM_STEP_ID": "0"}) is not None
    for environment, words in (
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "below WORLD_SIZE"),
        (SLURM | {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST"),
    ):
        with pytest.raises(ConvoyError, match=words):
            find_place(dict(environment))


def statuses(environment: dict[str, str], status: int, name: str = "RANK") -> list[int]:
    """Of two ranks, whose number has a name."""
    places = [find_place(environment | {name: number}) for number in "01"]
    return [ended(place, status) for place in places if place is not None]


@pytest.mark.parametrize("status", [0, 1])
def test_every_rank_of_torchrun_has_the_status_and_of_srun_the_first(status: int, tmp_path: Path) -> None:
    """An agent of torchrun's sees no other hosts, srun takes the highest status, and Convoy's own launcher reads it."""
    assert statuses(TORCHRUN, status) == [status, status]
    job = SLURM | {"SLURM_NTASKS": "2"}
    assert statuses(job, status, "SLURM_PROCID") == [status, 0]
    assert statuses(TORCHRUN | job | {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, status)[1] == status
    (tmp_path / "attempt-0").mkdir()
    assert statuses(TORCHRUN | {"CONVOY_LAUNCH": str(tmp_path)}, status) == [0, 0]
    assert (tmp_path / "attempt-0" / "status").read_text() == str(status)
    assert statuses(TORCHRUN | {"CONVOY_LAUNCH": str(tmp_path / "gone")}, status) == [status, 0]


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
from convoy.launch.rank import as_rank, find_place

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


LAUNCHER = """
import signal
from convoy.launch.rank import private_folder
with private_folder() as folder:
    (folder / "pid-0").touch()
    print(folder, flush=True)
    signal.pause()
"""


def test_what_launchers_leave_is_swept_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    launchers = [subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) for _ in "ab"]
    try:
        living, killed = (Path(each.stdout.readline().strip()) for each in launchers if each.stdout is not None)
        launchers[1].send_signal(signal.SIGKILL)
        launchers[1].wait(10)
        victim, young, theirs = (tmp_path / name for name in ("victim", "convoy-launch-young", "convoy-launch-theirs"))
        for folder in (victim, young, theirs):
            folder.mkdir()
        then = time.time() - 3600
        for folder in (living, killed, victim, theirs):
            os.utime(folder, (then, then))
        if os.geteuid() == 0:
            os.chown(theirs, 65534, 65534)
        link = tmp_path / "convoy-launch-link"
        link.symlink_to(victim)
        os.utime(link, (0, 0), follow_symlinks=False)
        with private_folder() as folder:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            left = {living, victim, young, link, folder} | ({theirs} if os.geteuid() == 0 else set())
            assert set(tmp_path.iterdir()) == left and killed not in left
        assert not folder.exists()
    finally:
        for each in launchers:
            each.kill()
            each.communicate()
