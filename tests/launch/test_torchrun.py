"""How torchrun ends when a script of one's own fails on its ranks: with one sentence, or as it would without Convoy."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NETWORK = """
import os, time
import torch, convoy
rank = int(os.environ["RANK"])
images = torch.zeros(2, 3, 8, 8)
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 10))
net = convoy.parallelize(net, os.environ.get("PLAN", "sample=2"), images)
if rank == 1:
    time.sleep(0.5)
    raise KeyError("my own")
while True:
    net(images).sum().backward()
"""
PLAN = "convoy: plan 'filtre=2': filtre is no strategy: did you mean filter? (script.py, line 7)\n"
OTHERS = "convoy: here 1 other user has processes, and the ports of torchrun take"
PAGES = ("FAILED", "Root Cause", "exitcode")


@pytest.fixture(autouse=True)
def other() -> Iterator[bool]:
    """Whether another user has a process on this host."""
    if os.geteuid() != 0:  # only root starts one
        yield False
        return
    with subprocess.Popen(["sleep", "200"], user=4242) as process:
        yield True
        process.kill()


def torchrun(folder: Path, script: str, *options: str, **variables: str) -> tuple[int, str]:
    """The status and what was said by two ranks of a script and their agent."""
    (folder / "script.py").write_text(script)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *options, "script.py"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(words, cwd=folder, env=environment, timeout=120, check=False, **output)
    return done.returncode, done.stdout


def test_a_mistake_of_all_ranks_is_one_sentence_of_every_attempt(tmp_path: Path) -> None:
    """With Convoy's rendezvous, where others have no way in."""
    options = ("--rdzv-backend=convoy", "--rdzv-endpoint=localhost:0", "--max-restarts=1")
    status, text = torchrun(tmp_path, NETWORK, *options, PLAN="filtre=2")
    assert (status, text) == (1, f"{PLAN[:-1]}; all ranks start again (restart 1 of 1)\n{PLAN}")


def test_what_fails_on_one_rank_is_not_buried_and_the_way_in_of_others_is_said_once(
    tmp_path: Path, other: bool
) -> None:
    status, text = torchrun(tmp_path, NETWORK, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    assert (status, text.count("Traceback"), text.count(OTHERS)) == (1, 1, int(other))
    assert "raise KeyError('my own')" in text or 'raise KeyError("my own")' in text
    assert text.endswith("rank 1 failed: KeyError: 'my own' (script.py, line 10)\n")
    assert not any(words in text for words in PAGES)


def test_jobs_of_others_end_as_without_convoy_and_a_command_line_by_its_sentence(tmp_path: Path) -> None:
    status, text = torchrun(tmp_path, "import torch\nraise KeyError('theirs')\n", "--standalone")
    assert status == 1 and "Traceback" in text and "KeyError: 'theirs'" in text
    assert all(words in text for words in PAGES)
    script = "import sys\nfrom convoy.cli import main\nsys.exit(main(['train', 'lenet', '--nonsense']))\n"
    status, text = torchrun(tmp_path, script, "--standalone")
    assert (status, text.count("convoy: "), text.count("\n")) == (1, 1, 1)
