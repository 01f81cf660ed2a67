"""Where a process stands among the ranks, and how it ends: with which status and words;
and the folder that it shares with the process that started it."""

from pathlib import Path

import pytest

from convoy.errors import ConvoyError
from convoy.launch.rank import ended, find_place
from convoy.slurm import first_host

TORCHRUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "job"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
SLURM |= {"SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_JOB_ID": "123456"}


def test_torchruns_and_slurms_variables_are_places_and_incomplete_ones_are_refused() -> None:
    place = find_place({"RANK": "1", "WORLD_SIZE": "3"})
    assert place is not None and (place.rank, place.num_ranks, place.folder) == (1, 3, None)
    with pytest.raises(ConvoyError, match=r"--devices 2 contradicts torchrun, which started 3 ranks"):
        place.check(2)
    environment = dict(SLURM)
    place = find_place(environment)
    assert place is not None and (place.rank, place.num_ranks, place.source) == (5, 6, "Slurm")
    variables = {"MASTER_ADDR": "gpu07", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "18456"}
    assert variables.items() <= environment.items() and find_place(environment) == place
    step = {"SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "gpu[08-09]", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
    environment = SLURM | step | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "0"}
    assert find_place(environment) is not None
    variables = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "gpu08"}
    assert variables.items() <= environment.items()
    assert environment["MASTER_PORT"] not in ("18456", "18457")  # those of the step before, and of the next job
    nodes = {"one": "one", "a,b": "a", "node[03-05,9],x": "node03", "n[7,9]": "n7", "r[1-2]-x": "r1-x"}
    assert {text: first_host(text) for text in nodes} == nodes
    one_task = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}
    for alone in ({}, *(SLURM | changes for changes in (*one_task, {"SLURM_TASK_PID": "77"}))):
        assert find_place(alone) is None  # also of a batch script, which is no task of a step
    for wrong in ({"RANK": "1"}, {"RANK": "2", "WORLD_SIZE": "2"}, SLURM | {"SLURM_JOB_NODELIST": ""}):
        with pytest.raises(ConvoyError, match=r"WORLD_SIZE|SLURM_JOB_NODELIST"):
            find_place(dict(wrong))


def test_every_rank_of_torchrun_has_the_status_and_of_other_launchers_the_first(tmp_path: Path) -> None:
    """An agent of torchrun's sees no other hosts; srun and Convoy's own launcher take the highest status."""

    def statuses(environment: dict[str, str], name: str = "RANK") -> list[int]:
        places = [find_place(environment | {name: number}) for number in "01"]
        return [ended(place, 1) for place in places if place is not None]

    assert statuses(TORCHRUN) == [1, 1]
    assert statuses(SLURM | {"SLURM_NTASKS": "2"}, "SLURM_PROCID") == [1, 0]
    for folder in (tmp_path, tmp_path / "gone"):
        assert statuses(TORCHRUN | {"CONVOY_LAUNCH": str(folder)}) == [1, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ended-0", "ended-1"]
