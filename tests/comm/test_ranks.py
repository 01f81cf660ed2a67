"""What ranks tell each other; what one finds all know, and what one fails with nobody waits for, over any backend."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import stuck
from convoy.comm.collectives import all_reduce
from convoy.comm.groups import Groups
from convoy.comm.joining import leave
from convoy.comm.position import NEEDS_LESS, current
from convoy.comm.ranks import Ranks, from_json, to_json
from convoy.errors import ConvoyError, RankFailedError, TooLargeError
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.timeline import Span, Task
from convoy.recipe.recipe import load_recipe
from convoy.tasks.classification import ClassificationEvaluation
from ranks import run_ranks


class OwnError(ConvoyError):
    """A user's."""


VALUES: list[Any] = [
    {"a": (1, 2.5, float("inf"), -0.0), 3: [None, True], (1, 2): {"ä"}, "dict": {}},
    [frozenset({1}), b"\0\xff", Path("/a b"), torch.Size([2, 3]), torch.bfloat16, ""],
    Plan.parse("sample=2,filter=2"),
    Span(Task(0, "compute", "forward", "conv1", "x", 0.25, (1,)), 0.1, 0.2, 0.45),
    load_recipe("imagenet-90", ["data.path=nowhere", "model.name=lenet"]),
]
TENSORS = {
    "steps": torch.tensor(7),
    "none": torch.empty(0, 2),
    "half": torch.tensor(7.0, dtype=torch.bfloat16),
    "turned": torch.arange(12.0).view(3, 4).t(),
    "mask": torch.tensor([True, False]),
}


def test_what_goes_in_comes_out() -> None:
    for value in VALUES:
        back = from_json(to_json(value))
        assert back == value and type(back) is type(value) and repr(back) == repr(value)
    tally = ClassificationEvaluation(TENSORS["turned"])
    assert torch.equal(from_json(to_json(tally)).confusion, tally.confusion)
    for error, kind, fields in [
        (ConvoyError("no"), ConvoyError, {}),
        (RankFailedError("no", True), RankFailedError, {"out_of_memory": True}),
        (TooLargeError("no", 8.0), TooLargeError, {"needed": 8.0}),
        (OwnError("no"), ConvoyError, {}),
    ]:
        back = from_json(to_json(error))
        assert type(back) is kind and str(back) == "no" and vars(back) == fields


CALLED = ["os:system", "builtins:eval", "subprocess:Popen"]
CALLED += ["convoy.launch.local:start", "convoy.launch.local:os"]  # a function, a module
CALLED += ["convoy.data.decode:Turbo", "convoy.training.watchdog:Watchdog"]  # no data


def test_what_is_no_data_is_neither_made_nor_sent(tmp_path: Path) -> None:
    for name in CALLED:
        for args in ([], ["touch"]):
            parts = [name, [f"{one} {tmp_path}/here" for one in args], None]
            with pytest.raises(TypeError, match="is no class of data"):
                from_json(json.dumps({"object": parts}).encode())
            assert not list(tmp_path.iterdir())
    for value in (print, lambda: None, object(), {1: range(3)}, ValueError("no"), open):
        with pytest.raises(TypeError):
            to_json(value)


TWO = Mesh(("gpu",), (2,))
LACKS = f"rank 1 ran out of memory while adding; {NEEDS_LESS}"
# By the error of rank 1, what all ranks say, and whether rank 0 waits for objects of it or for its tensor.
FAILURES: list[tuple[Exception, str, bool]] = [
    (torch.OutOfMemoryError("CUDA out of memory"), LACKS, True),
    (RuntimeError("can't allocate memory: you tried"), LACKS, False),
    (ValueError("odd\nmore"), "rank 1 failed while adding (ValueError: odd): -v shows where", False),
    (ConvoyError("change the plan"), "change the plan", False),
]


def waiting(shared: str) -> list[tuple[str, bool]]:
    """What ranks know when rank 1 fails while rank 0 waits for its message; that they can still talk, and that groups
    end with what they were made for."""
    os.environ["CONVOY_SHARED_MEMORY"] = shared
    ranks, said, opened = Ranks.here(), [], []
    for error, _, talking in FAILURES:

        def work(meanwhile: Ranks, error: Exception = error, talking: bool = talking) -> float:
            group = Groups(TWO).of((0,))
            all_reduce(torch.ones(1 << 20), group)
            if ranks.rank == 1:
                raise error
            return meanwhile.gather(1.0)[0] if talking else float(all_reduce(torch.ones(1 << 20), group)[0])

        try:
            ranks.trying("adding", work)
        except ConvoyError as failure:
            said.append((str(failure), isinstance(failure, RankFailedError) and failure.out_of_memory))
        assert float(all_reduce(torch.ones(1), Groups(TWO).of((0,)))) == 2.0
    for _ in range(4):
        assert ranks.trying("adding", lambda _: float(all_reduce(torch.ones(1 << 20), Groups(TWO).of((0,)))[0])) == 2
        opened.append(len(list(Path("/proc/self/fd").iterdir())))
    assert opened[1] == opened[-1]
    return said


@pytest.mark.parametrize("shared", "10")
def test_nobody_waits_for_a_rank_that_has_failed_and_groups_end(shared: str) -> None:
    expected = [(words, words == LACKS) for _, words, _ in FAILURES]
    assert run_ranks(waiting, 2, shared, timeout=40) == [expected] * 2


MESH = Mesh(("a", "b"), (2, 2))
LIMIT_S = 8.0
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.02 GiB is free."
)


def failing() -> tuple[str, bool, float, int]:
    """Rank 2 lacks memory; what this rank then knows, after how many seconds, and how many ranks still talk."""
    stuck.join(LIMIT_S)
    ranks = Ranks.here()

    def work(meanwhile: Ranks) -> None:
        made = Groups(MESH)
        for number in range(2):
            current.at(f"conv{number}#1")
            if number == 1 and ranks.rank == 2:
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            for axis in (0, 1):
                all_reduce(torch.ones(1 << 20), made.of((axis,)))
        stuck.synchronize()  # until the other one comes, or the groups are aborted
        meanwhile.barrier()

    began = time.monotonic()
    try:
        ranks.trying("profiling sample=4", work)
    except RankFailedError as error:
        return str(error), error.out_of_memory, time.monotonic() - began, len(ranks.gather(0))
    finally:
        leave()
    raise AssertionError("nothing failed")


def test_all_ranks_know_soon_who_lacks_memory_and_what_needs_less() -> None:
    for said, out_of_memory, took_s, talking in run_ranks(failing, 4, join=False):
        assert said == (
            "rank 2 ran out of memory while profiling sample=4, in layer conv1: it asked for 2.00 GiB where 1.02 GiB "
            "of 79.10 GiB were free; smaller microbatches, a plan over more devices or --precision bf16 need less"
        )
        assert out_of_memory and talking == 4
        assert took_s < LIMIT_S
