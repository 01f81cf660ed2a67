"""Ranks write checkpoints together, beside the training, and agree on what became of them. Real processes."""

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from convoy.checkpoint import store as writing
from convoy.checkpoint.store import CheckpointStore
from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError, MachineError
from convoy.training import checkpoints
from convoy.training.checkpoints import Saver, Timetable
from ranks import run_ranks

BIG = 40_000
SIZES = {"a": BIG, "b": 10, "c": BIG, "d": BIG // 2, "e": 30, "f": BIG // 2}
VALUES = {"loss": 0.1 + 0.2, "list": [1, None]}
ADD = writing.Draft.add


def state(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


class Run:
    """The part of a training loop that saves."""

    def __init__(self, folder: Path, goes_on: bool = False, timeout_s: float = 300.0) -> None:
        self.said: list[str] = []
        self.ranks = Ranks.here()
        self.store = CheckpointStore(folder / "checkpoints", 3)
        fixed = self.store, Timetable(1, self.ranks), self.ranks, self.said.append
        self.saver = Saver(*fixed, goes_on=goes_on, timeout_s=timeout_s)
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


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def is_whole(folder: Path, step: int) -> bool:
    back, want = CheckpointStore(folder / "checkpoints").load(step), state(step)
    return back.values == VALUES and all(torch.equal(back.tensors[name], want[name]) for name in want)


def adding(before: Callable[[], object]) -> Any:
    """Something happens before this rank writes its share."""

    def add(self: Any, *arguments: Any) -> None:
        before()
        ADD(self, *arguments)

    return patch.object(writing.Draft, "add", add)


def _save(folder: Path, blind: int) -> tuple[int | None, int, int]:
    """One rank may not see the folder; a process that was killed as it wrote the same step has left a shard."""
    run, stamp = Run(folder), checkpoints.stamp
    if run.ranks.rank == 0:
        run.store.draft(1, 2, "killed").add(1, {name: torch.zeros(3) for name in SIZES})
    run.ranks.barrier()
    with (
        patch.object(checkpoints, "stamp", lambda path: stamp(path) if run.ranks.rank != blind else None),
        run.saver.open(run.seen),
    ):
        run.save(1, 2)
        run.saver.finish()
    return run.saver.newest, run.saver.tally.written, len(run.saver._writers)


@pytest.mark.parametrize(("world", "blind"), [(1, -1), (3, 1)])
def test_every_rank_that_sees_the_folder_writes_a_share_and_all_can_be_read_by_one(
    tmp_path: Path, world: int, blind: int
) -> None:
    writers = world - (blind >= 0)
    assert run_ranks(_save, world, tmp_path, blind) == [(2, 2, writers)] * world
    assert left(tmp_path) == ["step-00000001", "step-00000002"]
    assert is_whole(tmp_path, 1) and is_whole(tmp_path, 2)
    sizes = [path.stat().st_size for path in (tmp_path / "checkpoints/step-00000002/state").iterdir()]
    assert len(sizes) == writers
    assert max(sizes) <= 4 * sum(SIZES.values()) / writers + 4 * BIG + 1000


def _changed_after(folder: Path) -> None:
    run, live, begin = Run(folder), state(1), threading.Event()
    with adding(lambda: begin.wait(30)), run.saver.open(run.seen):
        run.saver.save(1, "run", live.items(), VALUES, None)
        for tensor in live.values():
            tensor.add_(1)
        begin.set()
        run.saver.finish()


def test_training_goes_on_while_the_copy_of_before_is_written(tmp_path: Path) -> None:
    run_ranks(_changed_after, 2, tmp_path)
    assert is_whole(tmp_path, 1)


@contextmanager
def no_room(here: bool) -> Iterator[None]:
    """No file of this process may become larger than so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if here else before[0], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _without_room(folder: Path, rank: int, goes_on: bool, or_raise: bool = False) -> tuple[list[str], str, list[str]]:
    """What is left, the error, and what was said, where one rank has no room."""
    run, error = Run(folder, goes_on), ""
    with run.saver.open(run.seen):
        run.save(1)
        run.saver.finish()
        run.ranks.barrier()
        with no_room(run.ranks.rank == rank):
            run.save(2)
            try:
                run.saver.finish(or_raise)
            except ConvoyError as failure:
                error = str(failure)
        run.ranks.barrier()
        names = left(folder)
        run.ranks.barrier()
        if not error:
            run.save(3)
            run.saver.finish()
    return names, error, run.said


def test_no_room_on_one_rank_stops_all_or_all_go_on_and_say_when_it_works_again(tmp_path: Path) -> None:
    (names, error, said), *others = run_ranks(_without_room, 3, tmp_path / "stops", 2, False)
    assert others == [(names, error, said)] * 2 and (names, said) == (["step-00000001"], [])
    assert error.startswith("the checkpoint of update 2 could not be written to ")
    assert "(rank 2: File too large): the newest whole one is of update 1; free" in error
    assert is_whole(tmp_path / "stops", 1)
    for names, error, said in run_ranks(_without_room, 2, tmp_path, 1, True):
        assert (names, error) == (["step-00000001"], "") and said[0].endswith("of update 1; the run goes on")
        assert said[1].startswith("the checkpoint of update 3 is written")
    assert is_whole(tmp_path, 3)
    for _, error, said in run_ranks(_without_room, 2, tmp_path / "stopped", 1, True, True):
        assert "could not be written" in error and said == []  # who was asked to stop does not claim to have saved


def _silent(folder: Path) -> list[str]:
    """The thread of rank 1 has a bug; its file system does not answer, and no rank asks it for anything more."""
    bug, silent = Run(folder / "bug"), Run(folder / "silent", timeout_s=0.2)
    second, answers = bug.ranks.rank == 1, threading.Event()

    def fail() -> None:
        raise AssertionError("a bug")

    def hang() -> None:
        answers.wait(30)
        raise AssertionError("too late to be heard of")

    with adding(fail if second else int):
        said = [bug.failure((ConvoyError, AssertionError))]
    with patch.object(writing.Draft, "discard", lambda self: answers.wait(30)), adding(hang if second else int):
        said.append(silent.failure(MachineError))
        hung = [thread for thread in threading.enumerate() if thread.name == "convoy-checkpoint"]
        answers.set()
        for thread in hung:
            thread.join()
    return said


def test_what_goes_wrong_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    (told, silent), (raised, other_silent) = run_ranks(_silent, 2, tmp_path)
    assert raised == "a bug" and "rank 1: AssertionError: a bug" in told and "there is no older one" in told
    assert silent == other_silent and not [name for name in left(tmp_path / "silent") if not name.startswith(".")]
    assert "the checkpoint of update 1 is not written after 0.2 s (--timeout), still written by " in silent
