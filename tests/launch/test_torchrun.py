"""How torchrun ends when a script of one's own fails on its ranks: with one sentence, or as it would without Convoy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NETWORK = """
import os, sys, time
import torch, convoy
from convoy.errors import ConvoyError
rank = int(os.environ["RANK"])
images = torch.zeros(2, 3, 8, 8)
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 10))
net = convoy.parallelize(net, os.environ.get("PLAN", "sample=2"), images)
"""
PLAN = "convoy: plan 'filtre=2': filtre is no strategy: did you mean filter? (script.py, line 8)\n"
ONE_LOST = """
if rank == 1:
    time.sleep(0.5)
    raise {error}
while True:
    net(images).sum().backward()
"""
PAGES = ("FAILED", "Root Cause", "Sending process", "exitcode")


def torchrun(folder: Path, script: str, *options: str, **variables: str) -> tuple[int, str]:
    """The status and what was said by two ranks of a script and their agent."""
    place = folder / "script.py"
    place.write_text(script)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options, str(place)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_the_traceback_is_shown_to_who_asks_for_it(tmp_path: Path) -> None:
    status, said = torchrun(tmp_path, NETWORK, PLAN="filtre=2", CONVOY_TRACEBACK="1")
    assert (status, said.count("Traceback"), said.count("did you mean")) == (1, 1, 2)
    assert said.endswith(PLAN)


@pytest.mark.slow
def test_a_mistake_of_all_ranks_is_one_sentence_of_every_attempt(tmp_path: Path) -> None:
    status, said = torchrun(tmp_path, NETWORK, "--max-restarts=1", PLAN="filtre=2")
    assert (status, said) == (1, f"{PLAN[:-1]}; all ranks start again (restart 1 of 1)\n{PLAN}")


@pytest.mark.slow
def test_a_mistake_of_one_rank_bears_its_number_and_is_not_buried_by_the_others(tmp_path: Path) -> None:
    status, said = torchrun(tmp_path, NETWORK + ONE_LOST.format(error="ConvoyError('no such file: look for it')"))
    assert status == 1
    assert said.endswith("no such file: look for it (script.py, line 12)\n") and said.count("\n") == 1


@pytest.mark.slow
def test_an_error_of_ones_own_keeps_its_traceback_and_is_not_buried_by_the_others(tmp_path: Path) -> None:
    status, said = torchrun(tmp_path, NETWORK + ONE_LOST.format(error="KeyError('my own')"))
    assert (status, said.count("Traceback")) == (1, 1)
    assert "raise KeyError('my own')" in said
    assert said.endswith("rank 1 failed: KeyError: 'my own' (script.py, line 12)\n")
    assert not any(words in said for words in PAGES)


@pytest.mark.slow
def test_jobs_of_others_end_as_without_convoy(tmp_path: Path) -> None:
    status, said = torchrun(tmp_path, "import torch\nraise KeyError('theirs')\n")
    assert status == 1 and "Traceback" in said and "KeyError: 'theirs'" in said
    assert all(words in said for words in ("FAILED", "Root Cause", "exitcode"))


def test_a_mistake_in_the_command_line_is_said_once(tmp_path: Path) -> None:
    script = "import sys\nfrom convoy.cli import main\nsys.exit(main(['train', 'lenet', '--nonsense']))\n"
    status, said = torchrun(tmp_path, script)
    assert (status, said.count("convoy: "), said.count("\n")) == (1, 1, 1)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts a process of another user")
@pytest.mark.parametrize(("backend", "times"), [("c10d", 1), ("convoy", 0)])
def test_where_others_are_their_way_in_is_said_once(tmp_path: Path, backend: str, times: int) -> None:
    with subprocess.Popen(["sleep", "100"], user=4242) as other:
        try:
            place = tmp_path / "script.py"
            place.write_text(NETWORK)
            line = ["--rdzv-backend", backend, "--rdzv-endpoint", "localhost:0", "--nproc-per-node=2", str(place)]
            done = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", *line],
                cwd=tmp_path,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
        finally:
            other.kill()
    assert done.stderr.count("convoy: here 1 other user has processes, and the ports of torchrun take") == times
