"""Ranks write checkpoints together, beside the training, and agree on what became of them. Real processes."""

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from convoy.checkpoint import store as writing
from convoy.checkpoint.store import CheckpointStore
from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError, MachineError
from convoy.training import checkpoints as saving
from convoy.training.checkpoint_interval import Every
from convoy.training.checkpoints import Saver
from ranks import run_ranks

BIG = 40_000
VALUES = {"loss": 0.1 + 0.2, "list": [1, None]}


def state(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    sizes = {"a": BIG, "b": 10, "c": BIG, "d": BIG // 2, "e": 30, "f": BIG // 2}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


class Run:
    """The part of a training loop that saves."""

    def __init__(self, folder: Path, goes_on: bool = False, keep: int = 3, timeout_s: float = 300.0) -> None:
        self.said: list[str] = []
        self.ranks = Ranks.here()
        self.store = CheckpointStore(folder / "checkpoints", keep)
        self.saver = Saver(self.store, Every(1), self.ranks, self.said.append, goes_on=goes_on, timeout_s=timeout_s)
        self.seen = folder / "plan.yaml"
        if self.ranks.rank == 0:
            self.seen.write_text("plan")
        self.ranks.barrier()

    def save(self, step: int) -> None:
        self.saver.save(step, "run", state(step).items(), VALUES, None)


@contextmanager
def no_room(here: bool, size: int = 1000) -> Iterator[None]:
    """No file of this process may become larger than so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size if here else before[0], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def is_whole(folder: Path, step: int) -> bool:
    back = CheckpointStore(folder / "checkpoints").load(step)
    want = state(step)
    return back.values == VALUES and all(torch.equal(back.tensors[name], want[name]) for name in want)


def _save(folder: Path, steps: list[int]) -> tuple[int | None, int, int]:
    run = Run(folder)
    with run.saver.open(run.seen):
        for step in steps:
            run.save(step)
        run.saver.finish()
    return run.saver.newest, run.saver.tally.written, len(run.saver._writers)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_every_rank_writes_a_share_and_all_can_be_read_by_one(tmp_path: Path, world: int) -> None:
    assert run_ranks(_save, world, tmp_path, [1, 2]) == [(2, 2, world)] * world
    assert left(tmp_path) == ["step-00000001", "step-00000002"]
    assert is_whole(tmp_path, 1)
    assert is_whole(tmp_path, 2)
    sizes = [path.stat().st_size for path in (tmp_path / "checkpoints/step-00000002/state").iterdir()]
    assert len(sizes) == world
    total, largest = 4 * sum(len(x) for x in state(1).values()), 4 * BIG
    assert max(sizes) <= total / world + largest + 1000


def _lonely(folder: Path) -> tuple[int | None, int, int]:
    stamp = saving.stamp
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "stamp", lambda path: stamp(path) if Ranks.here().rank != 1 else None)
        return _save(folder, [1])


def test_a_rank_that_does_not_see_the_folder_does_not_write(tmp_path: Path) -> None:
    assert run_ranks(_lonely, 3, tmp_path) == [(1, 1, 2)] * 3
    assert is_whole(tmp_path, 1)


def _changed_after(folder: Path, copied: bool) -> None:
    run, live = Run(folder), state(1)
    begin = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        add = writing.Draft.add

        def late(self: Any, *arguments: Any) -> None:
            assert begin.wait(30)
            add(self, *arguments)

        patch.setattr(writing.Draft, "add", late)
        if not copied:
            patch.setattr(writing, "torch", SimpleNamespace(empty=lambda *_, **__: _Keeps()))
        with run.saver.open(run.seen):
            run.saver.save(1, "run", live.items(), VALUES, None)
            for tensor in live.values():
                tensor.add_(1)
            begin.set()
            run.saver.finish()


class _Keeps:
    def copy_(self, tensor: Tensor, non_blocking: bool) -> Tensor:
        return tensor


def test_training_goes_on_while_the_state_of_before_is_written(tmp_path: Path) -> None:
    run_ranks(_changed_after, 2, tmp_path, True)
    assert is_whole(tmp_path, 1)


def test_without_the_copy_that_would_be_noticed(tmp_path: Path) -> None:
    run_ranks(_changed_after, 2, tmp_path, False)
    assert not is_whole(tmp_path, 1)


def _slowly(folder: Path) -> tuple[list[int | None], bool, bool]:
    run = Run(folder)
    add, seen = writing.Draft.add, []

    def slow(self: Any, *arguments: Any) -> None:
        time.sleep(0.3 * run.ranks.rank)
        add(self, *arguments)

    with pytest.MonkeyPatch.context() as patch, run.saver.open(run.seen):
        patch.setattr(writing.Draft, "add", slow)
        for step in (1, 2, 3):
            run.save(step)
            seen.append(run.saver.newest)
            assert run.saver.has(step)
        time.sleep(0.5 * run.ranks.rank)  # the other one waits for this rank's training, not for a checkpoint
        run.saver.finish()
    tally = run.saver.tally
    return [*seen, run.saver.newest], tally.waited_s > 0.2, tally.longest_wait_s <= tally.waited_s


def test_a_new_one_waits_for_the_one_before(tmp_path: Path) -> None:
    assert run_ranks(_slowly, 2, tmp_path) == [([None, 1, 2, 3], True, True)] * 2


def _until_seen(folder: Path) -> bool:
    run = Run(folder)
    with run.saver.open(run.seen):
        run.save(1)
        for done in range(2, 10_000):
            run.saver.due(done)
            if run.saver.newest == 1:
                return True
            time.sleep(0.002)
    return False


def test_that_it_is_written_is_noticed_while_training_goes_on(tmp_path: Path) -> None:
    assert run_ranks(_until_seen, 2, tmp_path) == [True, True]


def _without_room(folder: Path, rank: int, goes_on: bool, or_raise: bool) -> tuple[list[str], str, list[str]]:
    run = Run(folder, goes_on)
    error = ""
    with run.saver.open(run.seen):
        run.save(1)
        run.saver.finish()
        run.ranks.barrier()
        with no_room(run.ranks.rank == rank or rank < 0):
            run.save(2)
            try:
                run.saver.finish(or_raise)
            except ConvoyError as failure:
                error = str(failure)
        run.ranks.barrier()
        names = left(folder)
        run.ranks.barrier()
        if goes_on and not or_raise:
            run.save(3)
            run.saver.finish()
    return names, error, run.said


@pytest.mark.parametrize("rank", [0, 1, 2, -1])
def test_no_room_on_one_rank_stops_all_and_the_one_before_stays(tmp_path: Path, rank: int) -> None:
    found = run_ranks(_without_room, 3, tmp_path, rank, False, False)
    for names, error, said in found:
        assert names == ["step-00000001"]
        assert said == []
        assert error == found[0][1]
        assert f"(rank {max(rank, 0)}: File too large): the newest whole one is of update 1; free" in error
        assert error.startswith("the checkpoint of update 2 could not be written to ")
        assert "checkpoint.on_error=continue" in error
    assert is_whole(tmp_path, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_or_all_go_on_and_say_when_it_works_again(tmp_path: Path, rank: int) -> None:
    for names, error, said in run_ranks(_without_room, 2, tmp_path, rank, True, False):
        assert (names, error) == (["step-00000001"], "")
        assert len(said) == 2
        assert said[0].endswith("the newest whole one is of update 1; the run goes on")
        assert said[1].startswith("the checkpoint of update 3 is written")
    assert left(tmp_path) == ["step-00000001", "step-00000003"]
    assert is_whole(tmp_path, 3)


def test_who_was_asked_to_stop_does_not_claim_to_have_saved(tmp_path: Path) -> None:
    for _, error, said in run_ranks(_without_room, 2, tmp_path, 1, True, True):
        assert "could not be written" in error
        assert said == []


def _without_an_answer(folder: Path) -> tuple[str, list[str]]:
    """The file system of rank 1 does not answer, and no rank asks it for anything more."""
    run, answers = Run(folder, goes_on=True, timeout_s=0.2), threading.Event()

    def hang(self: Any, *arguments: Any) -> None:
        answers.wait(30)
        raise AssertionError("too late to be heard of")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing.Draft, "discard", lambda self: answers.wait(30))
        if run.ranks.rank == 1:
            patch.setattr(writing.Draft, "add", hang)
        with pytest.raises(MachineError) as failure, run.saver.open(run.seen):
            run.save(1)
            run.saver.finish()
        hung = [thread for thread in threading.enumerate() if thread.name == "convoy-checkpoint"]
        answers.set()
        for thread in hung:
            thread.join()
    run.ranks.barrier()
    return str(failure.value), [name for name in left(folder) if not name.startswith(".")]


def test_a_file_system_that_does_not_answer_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    found = run_ranks(_without_an_answer, 2, tmp_path)
    for sentence, names in found:
        assert names == []
        assert sentence == found[0][0]
        assert "the checkpoint of update 1 is not written after 0.2 s (--timeout), still written by " in sentence
        assert "rank 1: there is no older one; see whether" in sentence


def _in_place_of_the_folder(folder: Path) -> str:
    run = Run(folder)
    if run.ranks.rank == 0:
        (folder / "checkpoints").write_text("a file")
    run.ranks.barrier()
    with pytest.raises(ConvoyError) as failure, run.saver.open(run.seen):
        run.save(1)
        run.saver.finish()
    return str(failure.value)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    for sentence in run_ranks(_in_place_of_the_folder, 2, tmp_path):
        assert "there is no older one" in sentence
        assert "rank 0: " in sentence


def _unexpected(folder: Path) -> str:
    run = Run(folder)

    def fail(*_: object) -> None:
        raise AssertionError("a bug")

    with pytest.MonkeyPatch.context() as patch:
        if run.ranks.rank == 1:
            patch.setattr(writing.Draft, "add", fail)
        with pytest.raises((ConvoyError, AssertionError)) as failure, run.saver.open(run.seen):
            run.save(1)
            run.saver.finish()
    return str(failure.value)


def test_a_bug_in_the_thread_of_one_rank_is_not_lost(tmp_path: Path) -> None:
    told, raised = run_ranks(_unexpected, 2, tmp_path)
    assert raised == "a bug"
    assert "rank 1: AssertionError: a bug" in told


def _ends(folder: Path, mistake: bool) -> list[str]:
    run = Run(folder)
    error = ConvoyError if mistake else RuntimeError
    with pytest.raises(error, match="end"), run.saver.open(run.seen):
        run.save(1)
        raise error("end")
    run.ranks.barrier()
    return left(folder)


def test_a_run_that_ends_by_a_mistake_still_gets_the_checkpoint_that_was_on_its_way(tmp_path: Path) -> None:
    assert run_ranks(_ends, 2, tmp_path, True) == [["step-00000001"]] * 2
    assert is_whole(tmp_path, 1)


def _after_others(folder: Path) -> tuple[int | None, list[str]]:
    """A process that was killed while it wrote the same step has left a shard that says it is ready."""
    store = CheckpointStore(folder / "checkpoints")
    if Ranks.here().rank == 0:
        store.draft(1, 2, "killed").add(1, {name: torch.zeros(3) for name in state(1)})
    run = Run(folder)
    with run.saver.open(run.seen):
        run.save(1)
        run.saver.finish()
    return run.saver.newest, left(folder)


def test_what_killed_ranks_left_is_not_mixed_in(tmp_path: Path) -> None:
    assert run_ranks(_after_others, 2, tmp_path) == [(1, ["step-00000001"])] * 2
    assert is_whole(tmp_path, 1)
