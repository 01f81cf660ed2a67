"""Ranks that plan together: what one finds all know, and what one fails with nobody waits for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from convoy.comm.collectives import all_reduce
from convoy.comm.groups import Groups
from convoy.comm.memory import NEEDS_LESS, memory_explained
from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError, MachineError, RankFailedError
from convoy.plans.mesh import Mesh
from ranks import run_ranks


def failing(kind: type[Exception]) -> tuple[str, str]:
    ranks = Ranks.here()

    def work() -> None:
        raise kind("no such thing")

    try:
        ranks.first(work)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (ConvoyError, ("ConvoyError", "no such thing")),
        (MachineError, ("MachineError", "no such thing")),
        (ValueError, ("RankFailedError", "rank 0 failed (ValueError: no such thing): -v shows where")),
    ],
)
def test_a_failure_of_the_first_is_one_of_all(kind: type[Exception], others: tuple[str, str]) -> None:
    first, second = run_ranks(failing, 2, kind)
    assert first == (kind.__name__, "no such thing")
    assert second == others


def lacking() -> tuple[str, str]:
    ranks = Ranks.here()

    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    try:
        with memory_explained(ranks.rank, ranks.num):
            ranks.first(work)
    except ConvoyError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_of_the_first_all_know_whose_memory_lacks() -> None:
    """The second rank once took the first one's words for its own."""
    for kind, said in run_ranks(lacking, 2):
        assert kind == "TooLargeError"
        assert said.startswith("rank 0 ran out of memory") and said.endswith(f": it asked for 2.00 GiB; {NEEDS_LESS}")


def agreeing() -> tuple[bool, bool]:
    ranks = Ranks.here()
    return ranks.agree(ranks.rank == 0), ranks.agree(True)


def test_all_must_agree() -> None:
    assert run_ranks(agreeing, 2) == [(False, True), (False, True)]


MESH = Mesh(("gpu",), (2,))


def waiting(error: Exception, shared: str, talking: bool) -> tuple[str, bool, float]:
    """Rank 1 fails while rank 0 waits for its message; what both then know, and whether they can still talk."""
    os.environ["CONVOY_SHARED_MEMORY"] = shared
    ranks = Ranks.here()

    def work(meanwhile: Ranks) -> float:
        group = Groups(MESH).of((0,))
        all_reduce(torch.ones(1 << 20), group)
        if ranks.rank == 1:
            raise error
        return meanwhile.gather(1.0)[0] if talking else float(all_reduce(torch.ones(1 << 20), group)[0])

    try:
        ranks.trying("adding", work)
    except ConvoyError as failure:
        total = all_reduce(torch.ones(1), Groups(MESH).of((0,)))
        return str(failure), isinstance(failure, RankFailedError) and failure.out_of_memory, float(total)
    return "", False, 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "words", "out_of_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "rank 1 ran out of memory while adding; " + NEEDS_LESS, True),
        (
            RuntimeError("can't allocate memory: you tried"),
            "rank 1 ran out of memory while adding; " + NEEDS_LESS,
            True,
        ),
        (ValueError("odd\nmore"), "rank 1 failed while adding (ValueError: odd): -v shows where", False),
        (RuntimeError("odd"), "rank 1 failed while adding (RuntimeError: odd): -v shows where", False),
        (ConvoyError("change the plan"), "change the plan", False),
    ],
)
@pytest.mark.parametrize(("shared", "talking"), [("1", False), ("0", False), ("1", True)])
def test_nobody_waits_for_a_rank_that_has_failed(
    error: Exception, words: str, out_of_memory: bool, shared: str, talking: bool
) -> None:
    assert run_ranks(waiting, 2, error, shared, talking, timeout=40) == [(words, out_of_memory, 2.0)] * 2


def failing_before_the_first_message() -> str:
    """Ranks that only hear of it from each other have to close their connections too."""
    ranks = Ranks.here()

    def work(meanwhile: Ranks) -> None:
        if ranks.rank == 2:
            raise ValueError("odd")
        meanwhile.barrier()

    try:
        ranks.trying("adding", work)
    except RankFailedError as failure:
        return str(failure)
    return ""


def test_a_rank_fails_before_the_others_first_message() -> None:
    words = "rank 2 failed while adding (ValueError: odd): -v shows where"
    assert run_ranks(failing_before_the_first_message, 4, timeout=30) == [words] * 4


def trying_often() -> tuple[list[int], float]:
    """Open files after each of several tries, and what came of the last."""
    ranks, opened, found = Ranks.here(), [], 0.0
    for _ in range(4):
        found = ranks.trying("adding", lambda _: float(all_reduce(torch.ones(1 << 20), Groups(MESH).of((0,)))[0]))
        opened.append(len(list(Path("/proc/self/fd").iterdir())))
    return opened, found


def test_groups_end_with_what_they_were_made_for() -> None:
    for opened, found in run_ranks(trying_often, 2):
        assert found == 2.0
        assert opened[1] == opened[-1]


def test_one_rank_alone_fails_in_the_same_words() -> None:
    with pytest.raises(RankFailedError, match="rank 0 ran out of memory while adding"):
        Ranks().trying("adding", lambda _: torch.empty(1 << 60))
    assert Ranks().trying("adding", lambda ranks: ranks.num) == 1


def test_what_a_machine_did_while_ranks_tried_is_no_mistake() -> None:
    def fail(_: Ranks) -> None:
        raise MachineError("a process died")

    with pytest.raises(MachineError, match=r"^a process died$"):
        Ranks().trying("adding", fail)


LOOP = """
import torch
from convoy.comm.collectives import all_reduce
from convoy.comm.groups import everyone
from convoy.comm.joining import join

join()
all_reduce(torch.ones(3), everyone())
"""


@pytest.mark.slow
def test_a_script_may_end_without_leaving_its_group(tmp_path: Path) -> None:
    """gloo's threads once aborted a fifth of such processes, as they let go of tensors while Python ended."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP, encoding="utf-8")
    for _ in range(4):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
