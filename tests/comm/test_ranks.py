"""What ranks tell each other; what one finds all know, and what one fails with nobody waits for, over any backend."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import stuck
from convoy.comm import alarm as module
from convoy.comm import groups
from convoy.comm.collectives import all_reduce
from convoy.comm.groups import Groups, everyone
from convoy.comm.joining import leave, num_ranks
from convoy.comm.memory import NEEDS_LESS, memory_explained
from convoy.comm.position import current
from convoy.comm.ranks import Ranks, broadcast_object, broadcast_tensors, gather_objects, received
from convoy.errors import ConvoyError, MachineError, RankFailedError
from convoy.plans.mesh import Mesh
from convoy.training.environment import join_ranks
from ranks import run_ranks

THINGS: list[Any] = [None, 3, "läuft", {"a": (1, 2.5), "b": [None]}, "x" * 100_000, torch.arange(5)]
TENSORS = {
    "weight": torch.randn(3, 4),
    "steps": torch.tensor(7),
    "none": torch.empty(0, 2),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "turned": torch.randn(4, 3).t(),
    "mask": torch.tensor([True, False]),
}


def told() -> tuple[list[Any], dict[str, torch.Tensor], list[Any]]:
    group, rank = everyone(), dist.get_rank()
    objects = [broadcast_object(thing if rank == 0 else "nothing", group) for thing in THINGS]
    tensors = broadcast_tensors(TENSORS if rank == 0 else None, group)
    tensors = {name: received(tensor) for name, tensor in tensors.items()}
    return objects, tensors, gather_objects({"rank": rank, "words": "a" * 1000 * rank}, group)


def as_the_trainer_does() -> Any:
    ranks, device = join_ranks()
    assert device == torch.device("cpu") and (ranks.rank, ranks.num) == (dist.get_rank(), 3)
    ranks.follow(Mesh(("sample",), (3,)), (0,))
    assert ranks.is_group_leader
    assert ranks.largest(ranks.rank, -ranks.rank, 5) == (2, 0, 5)
    assert ranks.gather_samples(ranks.rank) == [0, 1, 2]
    assert ranks.first(lambda: dist.get_rank()) == 0
    assert (ranks.agree(ranks.rank == 0), ranks.agree(True)) == (False, True)
    ranks.barrier()
    return ranks.broadcast(ranks.rank)


def test_objects_tensors_and_answers_reach_all_ranks() -> None:
    for world in (1, 3):
        for objects, tensors, gathered in run_ranks(told, world):
            assert str(objects) == str(THINGS) and list(tensors) == list(TENSORS)
            assert all(tensors[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
            for name in set(TENSORS) - {"weight", "turned"}:  # which are random: of rank 0's own
                assert torch.equal(tensors[name], TENSORS[name])
            assert gathered == [{"rank": rank, "words": "a" * 1000 * rank} for rank in range(world)]
    assert run_ranks(as_the_trainer_does, 3) == [0, 0, 0]


def test_without_a_process_group_there_is_one_rank() -> None:
    assert everyone() is None and num_ranks() == 1
    assert broadcast_object("a", None) == "a" and gather_objects("a", None) == ["a"]
    assert broadcast_tensors(TENSORS, None) is TENSORS
    alone = Ranks()
    assert alone.largest(3, 4) == (3, 4)
    alone.barrier()
    assert alone.trying("adding", lambda ranks: ranks.num) == 1
    with pytest.raises(RankFailedError, match="rank 0 ran out of memory while adding"):
        alone.trying("adding", lambda _: torch.empty(1 << 60))
    with pytest.raises(MachineError, match=r"^a process died$"):  # which is no mistake of what was tried
        alone.trying("adding", mock.Mock(side_effect=MachineError("a process died")))


def failing_first(kind: type[Exception]) -> tuple[str, str]:
    ranks = Ranks.here()

    def work() -> None:
        raise kind("no such thing")

    try:
        ranks.first(work)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_failure_of_the_first_is_one_of_all() -> None:
    for kind, others in [
        (ConvoyError, ("ConvoyError", "no such thing")),
        (MachineError, ("MachineError", "no such thing")),
        (ValueError, ("RankFailedError", "rank 0 failed (ValueError: no such thing): -v shows where")),
    ]:
        assert run_ranks(failing_first, 2, kind) == [(kind.__name__, "no such thing"), others]


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


TWO = Mesh(("gpu",), (2,))
LACKS = f"rank 1 ran out of memory while adding; {NEEDS_LESS}"


def waiting(error: Exception, shared: str, talking: bool) -> tuple[str, bool, float]:
    """Rank 1 fails while rank 0 waits for its message; what both then know, and whether they can still talk."""
    os.environ["CONVOY_SHARED_MEMORY"] = shared
    ranks = Ranks.here()

    def work(meanwhile: Ranks) -> float:
        group = Groups(TWO).of((0,))
        all_reduce(torch.ones(1 << 20), group)
        if ranks.rank == 1:
            raise error
        return meanwhile.gather(1.0)[0] if talking else float(all_reduce(torch.ones(1 << 20), group)[0])

    try:
        ranks.trying("adding", work)
    except ConvoyError as failure:
        total = all_reduce(torch.ones(1), Groups(TWO).of((0,)))
        return str(failure), isinstance(failure, RankFailedError) and failure.out_of_memory, float(total)
    return "", False, 0.0


@pytest.mark.parametrize(
    ("error", "words", "out_of_memory", "shared", "talking"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), LACKS, True, "1", True),
        (RuntimeError("can't allocate memory: you tried"), LACKS, True, "0", False),
        (ValueError("odd\nmore"), "rank 1 failed while adding (ValueError: odd): -v shows where", False, "1", False),
        (ConvoyError("change the plan"), "change the plan", False, "0", False),
    ],
)
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
        found = ranks.trying("adding", lambda _: float(all_reduce(torch.ones(1 << 20), Groups(TWO).of((0,)))[0]))
        opened.append(len(list(Path("/proc/self/fd").iterdir())))
    return opened, found


def test_groups_end_with_what_they_were_made_for() -> None:
    for opened, found in run_ranks(trying_often, 2):
        assert found == 2.0
        assert opened[1] == opened[-1]


MESH = Mesh(("a", "b"), (2, 2))
LIMIT_S = 8.0
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.02 GiB is free."
)


def failing(when: str, alarm: bool) -> tuple[str, bool, float, int]:
    """Rank 2 lacks memory; what this rank then knows, after how many seconds, and how many ranks still talk."""
    stuck.join(LIMIT_S)
    ranks = Ranks.here()

    def work(meanwhile: Ranks) -> None:
        if when == "before the groups are made" and ranks.rank == 2:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        made = Groups(MESH)
        for number in range(2):
            current.at(f"conv{number}#1")
            if number == 1 and ranks.rank == 2:
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            for axis in (0, 1):
                all_reduce(torch.ones(1 << 20), made.of((axis,)))
        stuck.synchronize()  # until the other one comes, or the groups are aborted
        if when == "while others talk":
            meanwhile.barrier()

    began = time.monotonic()
    with mock.patch.object(module, "only_gloo", lambda: not alarm):
        try:
            ranks.trying("profiling sample=4", work)
        except RankFailedError as error:
            return str(error), error.out_of_memory, time.monotonic() - began, len(ranks.gather(0))
        finally:
            leave()
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("when", ["before the groups are made", "while others wait", "while others talk"])
def test_all_ranks_know_soon_who_lacks_memory_and_what_needs_less(when: str) -> None:
    layer = "" if when == "before the groups are made" else ", in layer conv1"
    for said, out_of_memory, took_s, talking in run_ranks(failing, 4, when, True, join=False):
        assert said == (
            f"rank 2 ran out of memory while profiling sample=4{layer}: it asked for 2.00 GiB where 1.02 GiB of "
            "79.10 GiB were free; smaller microbatches, a plan over more devices or --precision bf16 need less"
        )
        assert out_of_memory and talking == 4
        assert took_s < LIMIT_S


@pytest.mark.slow
def test_without_the_key_they_wait_for_the_limit() -> None:
    """The negative control."""
    found = run_ranks(failing, 4, "while others wait", False, join=False)
    assert max(took_s for _, _, took_s, _ in found) > LIMIT_S


def failing_to_connect() -> tuple[str, float]:
    """Rank 2 lacks memory for its first connection; what this rank then knows, and after how many seconds."""
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=4, timeout=limit)
    ranks = Ranks.here()

    def connect(group: dist.ProcessGroup) -> None:
        if ranks.rank == 2:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        if 2 in dist.get_process_group_ranks(group):
            all_reduce(torch.ones(1), group)

    began = time.monotonic()
    with mock.patch.object(groups, "connect", connect), pytest.raises(RankFailedError) as raised:
        ranks.trying("profiling sample=4", lambda meanwhile: Groups(MESH))
    return str(raised.value), time.monotonic() - began


def test_no_rank_waits_for_the_group_of_another_one_that_failed_to_connect() -> None:
    """Ranks 1 and 3 have connected their first group meanwhile, and would wait in the store to make the next."""
    for said, took_s in run_ranks(failing_to_connect, 4, join=False):
        assert said.startswith("rank 2 ran out of memory while profiling sample=4")
        assert took_s < LIMIT_S


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
    for _ in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
