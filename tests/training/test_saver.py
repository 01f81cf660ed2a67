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
from convoy.training.checkpoints import Every, Saver
from ranks import run_ranks

BIG = 40_000
VALUES = {"loss": 0.1 + 0.2, "list": [1, None]}


def state(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    sizes = {"a": BIG, "b": 10, "c": BIG, "d": BIG // 2, "e": 30, "f": BIG // 2}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


class Run:
    """The part of a training loop that saves."""

    def __init__(self, folder: Path, goes_on: bool = False, timeout_s: float = 300.0) -> None:
        self.said: list[str] = []
        self.ranks = Ranks.here()
        self.store = CheckpointStore(folder / "checkpoints", 3)
        self.saver = Saver(self.store, Every(1), self.ranks, self.said.append, goes_on=goes_on, timeout_s=timeout_s)
        self.seen = folder / "plan.yaml"
        if self.ranks.rank == 0:
            folder.mkdir(exist_ok=True)
            self.seen.write_text("plan")
        self.ranks.barrier()

    def save(self, *steps: int) -> None:
        for step in steps:
            self.saver.save(step, "run", state(step).items(), VALUES, None)

    def failure(self, kind: type[Exception] | tuple[type[Exception], ...] = ConvoyError) -> str:
        """Of the first checkpoint."""
        with pytest.raises(kind) as failure, self.saver.open(self.seen):
            self.save(1)
            self.saver.finish()
        self.ranks.barrier()
        return str(failure.value)


@contextmanager
def no_room(here: bool) -> Iterator[None]:
    """No file of this process may become larger than so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if here else before[0], before[1]))
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


def _save(folder: Path, blind: int) -> tuple[int | None, int, int]:
    """One rank may not see the folder; a process that was killed as it wrote the same step has left a shard."""
    run, stamp = Run(folder), saving.stamp
    if run.ranks.rank == 0:
        run.store.draft(1, 2, "killed").add(1, {name: torch.zeros(3) for name in state(1)})
    run.ranks.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "stamp", lambda path: stamp(path) if run.ranks.rank != blind else None)
        with run.saver.open(run.seen):
            run.save(1, 2)
            run.saver.finish()
    return run.saver.newest, run.saver.tally.written, len(run.saver._writers)


@pytest.mark.parametrize(("world", "blind"), [(1, -1), (3, 1), (4, -1)])
def test_every_rank_that_sees_the_folder_writes_a_share_and_all_can_be_read_by_one(
    tmp_path: Path, world: int, blind: int
) -> None:
    writers = world - (blind >= 0)
    assert run_ranks(_save, world, tmp_path, blind) == [(2, 2, writers)] * world
    assert left(tmp_path) == ["step-00000001", "step-00000002"]
    assert is_whole(tmp_path, 1) and is_whole(tmp_path, 2)
    sizes = [path.stat().st_size for path in (tmp_path / "checkpoints/step-00000002/state").iterdir()]
    assert len(sizes) == writers
    assert max(sizes) <= 4 * sum(len(x) for x in state(1).values()) / writers + 4 * BIG + 1000


def _changed_after(folder: Path) -> None:
    begin, add = threading.Event(), writing.Draft.add

    def late(self: Any, *arguments: Any) -> None:
        assert begin.wait(30)
        add(self, *arguments)

    kept = SimpleNamespace(copy_=lambda tensor, non_blocking: tensor)
    for copied in (True, False):
        run, live = Run(folder / str(copied)), state(1)
        begin.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing.Draft, "add", late)
            if not copied:
                patch.setattr(writing, "torch", SimpleNamespace(empty=lambda *_, **__: kept))
            with run.saver.open(run.seen):
                run.saver.save(1, "run", live.items(), VALUES, None)
                for tensor in live.values():
                    tensor.add_(1)
                begin.set()
                run.saver.finish()


def test_training_goes_on_while_the_copy_of_before_is_written(tmp_path: Path) -> None:
    run_ranks(_changed_after, 2, tmp_path)
    assert is_whole(tmp_path / "True", 1)
    assert not is_whole(tmp_path / "False", 1)


def _slowly(folder: Path) -> tuple[list[int | None], bool, bool]:
    run, add, seen = Run(folder), writing.Draft.add, list[int | None]()

    def slow(self: Any, *arguments: Any) -> None:
        time.sleep(0.3 * run.ranks.rank)
        add(self, *arguments)

    with pytest.MonkeyPatch.context() as patch, run.saver.open(run.seen):
        patch.setattr(writing.Draft, "add", slow)
        for step in (1, 2):
            run.save(step)
            seen.append(run.saver.newest)
            assert run.saver.has(step)
        for done in range(3, 10_000):  # that it is written is noticed while training goes on
            run.saver.due(done)
            if run.saver.newest == 2:
                break
            time.sleep(0.002)
        seen.append(run.saver.newest)
        run.saver.finish()
    tally = run.saver.tally
    return seen, tally.waited_s > 0.2, tally.longest_wait_s <= tally.waited_s


def test_a_new_one_waits_for_the_one_before(tmp_path: Path) -> None:
    assert run_ranks(_slowly, 2, tmp_path) == [([None, 1, 2], True, True)] * 2


def _without_room(folder: Path, rank: int, goes_on: bool, or_raise: bool) -> tuple[list[str], str, list[str]]:
    run, error = Run(folder, goes_on), ""
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


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_no_room_on_one_rank_stops_all_and_the_one_before_stays(tmp_path: Path, rank: int) -> None:
    found = run_ranks(_without_room, 3, tmp_path, rank, False, False)
    for names, error, said in found:
        assert (names, said) == (["step-00000001"], []) and error == found[0][1]
        assert f"(rank {max(rank, 0)}: File too large): the newest whole one is of update 1; free" in error
        assert error.startswith("the checkpoint of update 2 could not be written to ")
        assert "checkpoint.on_error=continue" in error
    assert is_whole(tmp_path, 1)


def test_or_all_go_on_and_say_when_it_works_again(tmp_path: Path) -> None:
    for names, error, said in run_ranks(_without_room, 2, tmp_path, 1, True, False):
        assert (names, error, len(said)) == (["step-00000001"], "", 2)
        assert said[0].endswith("the newest whole one is of update 1; the run goes on")
        assert said[1].startswith("the checkpoint of update 3 is written")
    assert left(tmp_path) == ["step-00000001", "step-00000003"] and is_whole(tmp_path, 3)
    for _, error, said in run_ranks(_without_room, 2, tmp_path / "stopped", 1, True, True):
        assert "could not be written" in error and said == []  # who was asked to stop does not claim to have saved


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
        sentence = run.failure(MachineError)
        hung = [thread for thread in threading.enumerate() if thread.name == "convoy-checkpoint"]
        answers.set()
        for thread in hung:
            thread.join()
    run.ranks.barrier()
    return sentence, [name for name in left(folder) if not name.startswith(".")]


def test_a_file_system_that_does_not_answer_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    found = run_ranks(_without_an_answer, 2, tmp_path)
    for sentence, names in found:
        assert names == [] and sentence == found[0][0]
        assert "the checkpoint of update 1 is not written after 0.2 s (--timeout), still written by " in sentence
        assert "rank 1: there is no older one; see whether" in sentence


def _odd(folder: Path) -> tuple[str, str]:
    """A file lies in the place of the folder; the thread of rank 1 has a bug."""
    run = Run(folder / "file")
    if run.ranks.rank == 0:
        (folder / "file" / "checkpoints").write_text("a file")
    run.ranks.barrier()
    in_place = run.failure()
    bug = Run(folder / "bug")

    def fail(*_: object) -> None:
        raise AssertionError("a bug")

    with pytest.MonkeyPatch.context() as patch:
        if run.ranks.rank == 1:
            patch.setattr(writing.Draft, "add", fail)
        return in_place, bug.failure((ConvoyError, AssertionError))


def test_what_goes_wrong_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    (first, told), (second, raised) = run_ranks(_odd, 2, tmp_path)
    assert first == second and "there is no older one" in first and "rank 0: " in first
    assert raised == "a bug" and "rank 1: AssertionError: a bug" in told


def _ends(folder: Path) -> list[str]:
    run = Run(folder)
    with pytest.raises(ConvoyError, match="end"), run.saver.open(run.seen):
        run.save(1)
        raise ConvoyError("end")
    run.ranks.barrier()
    return left(folder)


def test_a_run_that_ends_by_a_mistake_still_gets_the_checkpoint_that_was_on_its_way(tmp_path: Path) -> None:
    assert run_ranks(_ends, 2, tmp_path) == [["step-00000001"]] * 2
    assert is_whole(tmp_path, 1)
