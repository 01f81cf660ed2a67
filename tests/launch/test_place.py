"""Where a process stands among the ranks, by the variables that torchrun and Slurm set."""

import pytest

from convoy.errors import ConvoyError
from convoy.launch.place import find_place, first_host, slurm_variables

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
    other = slurm_variables(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert other is not None
    assert other["MASTER_PORT"] == environment["MASTER_PORT"]


def test_a_batch_script_and_a_single_task_are_no_ranks() -> None:
    assert find_place({}) is None
    assert find_place(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert find_place(SLURM | {"SLURM_TASK_PID": "77"}) is None
    assert find_place(SLURM | {"SLURM_TASK_PID": "77", "SLURM_STEP_ID": "0"}) is not None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("one", "one"), ("a,b", "a"), ("node[03-05,9],x", "node03"), ("n[7,9]", "n7"), ("rack[1-2]-x", "rack1-x")],
)
def test_the_first_host_of_slurms_short_form(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "below WORLD_SIZE"),
        ({key: value for key, value in SLURM.items() if key != "SLURM_JOB_NODELIST"}, "SLURM_JOB_NODELIST"),
    ],
)
def test_incomplete_variables_are_refused(environment: dict[str, str], word: str) -> None:
    with pytest.raises(ConvoyError, match=word):
        find_place(dict(environment))
