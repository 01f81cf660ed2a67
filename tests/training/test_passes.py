"""How a batch is divided: over ranks, by what they take, and in passes that exchange gradients once."""

from collections.abc import Callable
from itertools import product
from operator import mul
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.comm.ranks import Ranks
from convoy.engine import microbatch_sizes
from convoy.errors import ConvoyError
from convoy.models import create
from convoy.planner.planner import passes_of
from convoy.plans.layout import proportional
from convoy.plans.plan import Plan
from convoy.plans.schedule import PARTS_PER_STAGE
from convoy.training import load_recipe
from convoy.training.build import divisible_sizes, merged, probed
from convoy.training.derived import num_microbatches
from convoy.training.division import Division, SlowRanks, divide, soonest
from convoy.training.set_up import parts_of
from convoy.training.workloads import workload_of_recipe

CPU = torch.device("cpu")


def test_microbatches_of_each_rank_and_the_parts_that_end_soonest() -> None:
    rows = {
        (8, 3, None): (3, 3, 2),
        (8, 3, (3, 3, 2)): (3, 3, 2),
        (8, 2, (3, 1)): (6, 2),
        (8, 2, (100, 1)): (7, 1),
        (3, 3, (5, 1, 1)): (1, 1, 1),
    }
    assert {row: divide(microbatch_sizes(37, row[0]), row[1], row[2]).counts for row in rows} == rows
    assert proportional(10, (1.0, 1.0, 1.5)) == (3, 3, 4)
    for weights in ((1e-9, 1.0, 1.0), (5.0, 4.9, 0.1), (1.0, 1e9, 1.0)):
        counts = proportional(9, weights)
        assert sum(counts) == 9 and min(counts) >= 1
    for batch, num, ranks, shares, words in (
        (64, 2, 3, None, "a batch of 64 is 2 microbatches, and 3 devices need 3: add --microbatches 3"),
        (2, 2, 3, None, "raise --batch to at least 3"),
        (64, 8, 3, (1, 1), "--shares names 2 parts, but the plan divides the batch into 3"),
    ):
        with pytest.raises(ConvoyError, match=words):
            divide(microbatch_sizes(batch, num), ranks, shares)
    for times in ((1.0, 3.3), (2.0, 1.0, 1.5, 5.0)):
        for total in (5, 9, 13):
            counts, every = soonest(total, times), product(range(1, total), repeat=len(times))
            last = min(max(map(mul, some, times)) for some in every if sum(some) == total)
            assert sum(counts) == total and min(counts) >= 1 and max(map(mul, counts, times)) == last


@pytest.mark.parametrize("counts", [(8,), (3, 3, 2), (1, 7), (6, 1, 1)])
def test_every_sample_is_in_one_pass_of_its_rank(counts: tuple[int, ...]) -> None:
    division = divide(microbatch_sizes(37, 8), len(counts), counts)
    for merge in (1, 2, 3, 8):
        passes = division.passes(merge)
        assert len(passes) == max(-(-count // merge) for count in counts)
        for rank in range(len(counts)):
            mine = [position for piece in passes for position in piece.parts[rank]]
            assert mine == list(division.positions(rank))
            assert all(len(piece.microbatches[rank]) <= merge for piece in passes)
            assert all(sum(piece.microbatches[rank]) == len(piece.parts[rank]) for piece in passes)
        assert sorted(position for piece in passes for position in piece.positions) == list(range(37))
        assert all(division.passes(merge, late=True)[-1].parts)  # all have something where gradients are exchanged


def test_a_given_plan_is_predicted_in_the_passes_in_which_it_runs() -> None:
    recipe = load_recipe("default", ["model.name=lenet", "data.path=nowhere", "batch=64", "microbatches=12"])
    stated, shape, model = Plan.parse("stage=2,sample=2"), (1, 28, 28), create("lenet")
    found = probed(model, recipe, shape, microbatch_sizes(recipe.batch, num_microbatches(recipe)), CPU, "nothing")
    parts, useful = parts_of(recipe, stated, 4)
    sizes, _ = divisible_sizes(recipe, model, parts, found, useful)
    merge, _ = merged(recipe, found, sizes, CPU, 4 // parts, passes=PARTS_PER_STAGE * stated.num_stages * parts)
    workload = workload_of_recipe(recipe, model, shape, 4, CPU)
    assert passes_of(workload, stated) == len(divide(sizes, parts, None).passes(merge))


# What is exact is not decided by numbers in low precision: TF32 rounds to 11 bits, and otherwise for other batches


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions and linear layers as a GPU computes them, by algorithms that hang on the number of samples."""

    def rounded(x: Tensor, samples: int) -> Tensor:
        if x.dtype != torch.float32:
            return x
        half = 0x1000 if samples % 4 else 0
        bits = (x.detach().contiguous().view(torch.int32) + half) & ~0x1FFF
        return x + (bits.view(torch.float32) - x.detach())

    def patched(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w, *rest, **named: function(rounded(x, len(x)), rounded(w, len(x)), *rest, **named)

    for name in ("conv2d", "linear"):
        monkeypatch.setattr(F, name, patched(getattr(F, name)))


ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "softmax": lambda x: x.softmax(0),
    "uncaptured": lambda x: x - x.mean(0) if float(x.detach().sum()) < 1e9 else x,
    "batch norm by hand": lambda x: F.batch_norm(x, None, None, training=True),
    "uncaptured, and apart": lambda x: x if float(x.detach().sum()) < 1e9 else x * 2,
}


class End(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))

    def forward(self, x: Tensor) -> Any:
        return ENDS[self.kind](self.layers(x))


def test_a_network_that_is_not_coupled_is_not_taken_for_one_and_those_that_are_are_found(tf32: None) -> None:
    def merge_of(model: nn.Module, channels: int, size: int) -> tuple[int, str]:
        recipe, sizes = load_recipe("default", ["model.name=any", "batch=12", "microbatch=3"]), (3, 3, 3, 3)
        probe = probed(model, recipe, (channels, size, size), sizes, CPU, "nothing")
        return merged(recipe, probe, sizes, CPU, sharing=2**30)  # memory aside

    torch.manual_seed(0)
    assert merge_of(create("lenet"), 1, 28)[0] == 4
    for kind in ENDS:
        merge, why = merge_of(End(kind), 3, 8)
        assert merge == (4 if "apart" in kind else 1), kind
        assert "apart" in kind or why == "one by one: the network couples the samples of a batch"


# Which rank is called slow, and when


def test_a_rank_that_stays_slow_is_named_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    even, one, more = divide((1,) * 6, 3), [1.0, 2.0, 1.0], divide((1,) * 6, 3, (1, 4, 1))

    def named(parts: list[int], division: Division, *seconds: list[float]) -> list[int]:
        """The stretches in which somebody is named, where ranks have these parts of the batch."""
        ranks = Ranks()
        monkeypatch.setattr(ranks, "gather", lambda value: [(part, "abc"[rank % 3]) for rank, part in enumerate(parts)])
        judge = SlowRanks(ranks)
        said = [judge.look(each, 20, 2.5 * max(each), division) for each in seconds]
        assert all(" is slow: its part of an update takes it " in sentence for sentence in said if sentence)
        return [number for number, sentence in enumerate(said, 1) if sentence]

    assert named([0, 1, 2], even, *[one] * 13) == [3, 6, 12]
    assert named([0, 1, 2], even, *[one, one, [1.0] * 3] * 6) == []
    assert named([0, 1, 2], more, *[[1.0, 4.0, 1.0]] * 9) == []  # it was given more
    # Only ranks in the same place of their groups are compared, and of stages those of one stage.
    assert named([0, 0, 1, 1, 2, 2], even, *[[1.0, 3.0, 1.0, 3.0, 1.0, 3.0]] * 6) == []
    assert named([0, 0, 1, 1, 2, 2], even, *[[1.0, 3.0, 2.0, 3.0, 1.0, 3.0]] * 6) == [3, 6]
