"""How torchrun ends when a script of one's own fails on its ranks: with one sentence, or as it would without Convoy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

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
PAGES = ("FAILED", "Root Cause", "exitcode")


def torchrun(folder: Path, script: str, *options: str, **variables: str) -> tuple[int, str]:
    """The status and what was said by two ranks of a script and their agent."""
    place = folder / "script.py"
    place.write_text(script)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            *(options or ["--standalone"]),
            str(place),
        ],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_mistake_of_all_ranks_is_one_sentence_of_every_attempt(tmp_path: Path) -> None:
    status, text = torchrun(tmp_path, NETWORK, "--standalone", "--max-restarts=1", PLAN="filtre=2")
    assert (status, text) == (1, f"{PLAN[:-1]}; all ranks start again (restart 1 of 1)\n{PLAN}")
    status, text = torchrun(tmp_path, NETWORK, PLAN="filtre=2", CONVOY_TRACEBACK="1")
    assert (status, text.count("Traceback"), text.count("did you mean")) == (1, 1, 2)  # for who asks
    assert text.endswith(PLAN)


def test_what_fails_on_one_rank_is_not_buried_by_the_others_and_has_a_traceback_unless_it_is_a_mistake(
    tmp_path: Path,
) -> None:
    status, text = torchrun(tmp_path, NETWORK + ONE_LOST.format(error="ConvoyError('no such file: look for it')"))
    assert status == 1
    assert text.endswith("no such file: look for it (script.py, line 12)\n") and text.count("\n") == 1
    status, text = torchrun(tmp_path, NETWORK + ONE_LOST.format(error="KeyError('my own')"))
    assert (status, text.count("Traceback")) == (1, 1) and "raise KeyError('my own')" in text
    assert text.endswith("rank 1 failed: KeyError: 'my own' (script.py, line 12)\n")
    assert not any(words in text for words in PAGES)


def test_jobs_of_others_end_as_without_convoy(tmp_path: Path) -> None:
    status, text = torchrun(tmp_path, "import torch\nraise KeyError('theirs')\n")
    assert status == 1 and "Traceback" in text and "KeyError: 'theirs'" in text
    assert all(words in text for words in PAGES)


def test_a_mistake_in_the_command_line_is_said_once(tmp_path: Path) -> None:
    script = "import sys\nfrom convoy.cli import main\nsys.exit(main(['train', 'lenet', '--nonsense']))\n"
    status, text = torchrun(tmp_path, script)
    assert (status, text.count("convoy: "), text.count("\n")) == (1, 1, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts a process of another user")
def test_where_others_are_their_way_in_is_said_once(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "200"], user=4242) as other:
        try:
            for backend, times in (("c10d", 1), ("convoy", 0)):
                options = ("--rdzv-backend", backend, "--rdzv-endpoint", "localhost:0")
                status, text = torchrun(tmp_path, NETWORK, *options)
                sentence = "convoy: here 1 other user has processes, and the ports of torchrun take"
                assert (status, text.count(sentence)) == (0, times), text
        finally:
            other.kill()
