"""The input is timed before a plan is made, for one rank's samples; a mistake in it is the training's to tell."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from convoy.comm.ranks import Ranks
from convoy.data import Batch, open_data
from convoy.errors import ConvoyError
from convoy.planner.cost.costs import HostCost
from convoy.training import auto_plan, load_recipe
from convoy.training.auto_plan import measure_input
from tiny import write_mnist


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("input") / "data")


def measured(data: Path, workers: int = 0, seconds: float = 0.0, samples: int = 16) -> HostCost | None:
    recipe = load_recipe("default", [f"data.path={data}", "model.name=lenet", "batch=16", f"data.workers={workers}"])
    opened = open_data(recipe.data, None)
    if not seconds:
        return measure_input(recipe, opened, torch.device("cpu"), Ranks())
    now = [0.0]

    def batches(*args: object, **options: object):  # type: ignore[no-untyped-def]
        for _ in range(options["num_updates"]):  # type: ignore[call-overload]
            now[0] += seconds
            images = torch.zeros(samples, 1, 28, 28, dtype=torch.uint8)
            yield Batch(images, torch.zeros(samples, dtype=torch.int64), torch.arange(samples))

    with (
        patch.object(auto_plan, "training_batches", batches),
        patch.object(auto_plan.time, "perf_counter", lambda: now[0]),
    ):
        return measure_input(recipe, opened, torch.device("cpu"), Ranks())


def test_a_sample_takes_its_part_of_a_batch(data: Path) -> None:
    found = measured(data, seconds=0.32)
    assert found == HostCost(per_sample=pytest.approx(0.02))  # type: ignore[arg-type]
    assert found is not None and not found.beside


def test_a_slow_input_is_not_waited_for_long(data: Path) -> None:
    found = measured(data, seconds=2.0)
    assert found is not None and found.per_sample == pytest.approx(2.0 / 16)


@pytest.mark.parametrize("workers", [0, 1])
def test_real_pictures_take_some_time(data: Path, workers: int) -> None:
    found = measured(data, workers)
    assert found is not None and found.per_sample > 0


def test_what_cannot_be_read_costs_nothing(data: Path) -> None:
    with patch.object(auto_plan, "_seconds", side_effect=ConvoyError("train/3.png is no picture")):
        assert measured(data) is None
