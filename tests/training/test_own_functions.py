"""A loss, metrics and an augmentation of the user's: the same numbers on any number of devices, or a sentence."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from convoy.cli import main
from convoy.data.config import DataConfig
from convoy.data.dataset import open_data
from convoy.data.loader import training_batches
from convoy.data.order import Order
from ranks import run_ranks
from training.scenarios import refusals, summary
from training.test_devices import distance, on_plan
from whole_runs import as_before, train_here

MINE = """
import os

import numpy as np
import torch
import torch.nn.functional as F


def focal(outputs, targets):
    logs = outputs.log_softmax(1)[range(len(targets)), targets]
    return -((1 - logs.exp()) ** 2) * logs


def mean_focal(outputs, targets):
    return focal(outputs, targets).mean()


def summed(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum")


def detached(outputs, targets):
    return focal(outputs.detach(), targets)


def infinite(outputs, targets):
    return focal(outputs, targets) / 0


def shapeless(outputs, targets):
    return outputs


def failing(outputs, targets):
    return outputs.no_such_thing


def kappa(outputs, targets):
    answers, classes = outputs.argmax(1), outputs.shape[1]
    table = torch.bincount(targets * classes + answers, minlength=classes**2).view(classes, classes).double()
    chance = (table.sum(0) * table.sum(1)).sum() / table.sum() ** 2
    return (table.trace() / table.sum() - chance) / (1 - chance)


def first_wrong(outputs, targets):  # depends on the order of samples
    return int((outputs.argmax(1) != targets).nonzero()[0])


first_wrong.better = "lower"


def of_process(outputs, targets):
    return os.getpid()


def drawn(outputs, targets):
    return torch.rand(())


def never(outputs, targets):
    return float("nan")


def images(outputs, targets):
    return 0.5


def noise(picture, rng):
    return np.clip(picture + rng.integers(-20, 20, picture.shape), 0, 255).astype(np.uint8)


def undetermined(picture, rng):
    return np.random.randint(0, 255, picture.shape).astype(np.uint8)


def as_floats(picture, rng):
    return picture / 255
"""


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "mine.py").write_text(MINE)
    return lambda name: f"{tmp_path / 'mine.py'}:{name}"


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "plan", [pytest.param("filter=2", marks=slow), pytest.param("height=2", marks=slow), "sample=2", "stage=2"]
)
def test_own_functions_train_and_measure_as_on_one_device(
    data: Path, tmp_path: Path, mine: Callable[[str], str], plan: str
) -> None:
    settings = {"model.name": "tiny:TinyResidual", "epochs": "5ba", "data.workers": "0", "loss.function": mine("focal")}
    settings |= {"data.augment.function": mine("noise"), "metrics": f"[{mine('kappa')}, {mine('first_wrong')}]"}
    settings |= {"parallel.shares": "[3,1]"} if plan == "sample=2" else {}
    (want,) = on_plan(data, tmp_path / "serial", "serial", settings)
    for ended in on_plan(data, tmp_path / "run", plan, settings):
        assert ended.curve == pytest.approx(want.curve, rel=1e-6)  # recorded in float32
        assert ended.outcome.metrics == pytest.approx(want.outcome.metrics, rel=1e-6)
    assert {"kappa", "first_wrong"} <= want.outcome.metrics.keys()
    assert distance(tmp_path / "run", tmp_path / "serial") < 1e-9
    if plan == "sample=2":
        for number, unlike in enumerate(({"loss.function": mine("mean_focal")}, {"loss.function": "null"})):
            on_plan(data, tmp_path / str(number), plan, settings | unlike)
        assert distance(tmp_path / "0", tmp_path / "serial") < 1e-9  # a mean of samples is weighed as they are
        assert distance(tmp_path / "1", tmp_path / "serial") > 1e-6


def test_all_ranks_go_on_by_the_same_value_of_a_metric(data: Path, tmp_path: Path, mine: Callable[[str], str]) -> None:
    settings = {"epochs": "3ep", "metrics": f"[{mine('of_process')}]", "best": "of_process", "stop_after": "1ep"}
    one, other = run_ranks(train_here, 2, data, tmp_path / "run", settings)
    assert one.outcome.metrics == other.outcome.metrics


def test_a_metric_without_a_value_chooses_nothing(data: Path, tmp_path: Path, mine: Callable[[str], str]) -> None:
    command = f"train tiny:TinyNet --data {data} --batch 24 --epochs 3 --set threads=1 --set metrics=[{mine('never')}]"
    with as_before():
        assert main([*command.split(), *f"--best never --stop-after 1ep --out {tmp_path / 'run'}".split()]) == 0
    ended = summary(tmp_path / "run")
    assert (ended["status"], ended["steps"]) == ("finished", ended["total_steps"])
    assert "never had no value in any evaluation: the last weights are delivered" in ended["notes"]


def test_an_augmentation_is_the_same_with_any_number_of_workers(data: Path, mine: Callable[[str], str]) -> None:
    pictures = []
    for workers, function in ((0, "noise"), (2, "noise"), (0, None)):
        section = DataConfig(path=str(data), workers=workers, augment={"function": function and mine(function)})
        opened = open_data(section)
        order = Order(len(opened.train), 24, 0)
        batches = training_batches(opened, section, order, first_update=3, num_updates=2, seed=0)
        pictures.append(torch.cat([batch.images for batch in batches]))
    assert torch.equal(pictures[0], pictures[1])
    assert not torch.equal(pictures[0], pictures[2])


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("loss.function", "summed", "some samples is not the mean of each of them"),
        ("loss.function", "detached", "has no gradient: compute it from the outputs"),
        ("loss.function", "infinite", "gave inf for outputs [64, 10] of float32"),
        ("loss.function", "shapeless", "gave [64, 10] of float32 for outputs [64, 10] of float32 and targets [64] of"),
        ("loss.function", "failing", "failed with AttributeError"),
        ("loss.function", "focale", "has no 'focale': did you mean focal"),
        ("metrics", "noise", "the metric "),
        ("metrics", "drawn", "the metric drawn of the same outputs was 0."),
        ("metrics", "images", "images is a number in the metrics of classification already"),
        ("data.augment.function", "undetermined", "changes a picture otherwise each time"),
        ("data.augment.function", "as_floats", "gave float64 [28, 28, 1] for a picture, uint8 [28, 28, 1]"),
    ],
)
def test_what_is_no_such_function_is_one_sentence(
    data: Path, tmp_path: Path, mine: Callable[[str], str], key: str, name: str, words: str
) -> None:
    value = f"[{mine(name)}]" if key == "metrics" else mine(name)
    (said,) = refusals(data, tmp_path / "run", [{key: value}])
    assert words in said
    assert "\n" not in said
    assert not (tmp_path / "run").exists()


def test_the_file_is_kept_by_its_checksum_and_a_change_is_said(
    data: Path, tmp_path: Path, mine: Callable[[str], str]
) -> None:
    settings = {"epochs": "4ba", "loss.function": mine("focal"), "checkpoint.every": "1ba"}
    settings |= {"metrics": f"[{mine('kappa')}]", "best": "kappa"}
    train_here(data, tmp_path / "run", settings, stop_at=2)
    noted = json.loads((tmp_path / "run" / "environment.json").read_text())["own"]
    assert noted == dict.fromkeys([mine("focal"), mine("kappa")], hashlib.sha256(MINE.encode()).hexdigest())
    (tmp_path / "mine.py").write_text(f"{MINE}\n# again\n")
    ended = train_here(data, tmp_path / "run", settings, resume=True)
    assert f"the file of {mine('focal')} is another than when the run was begun" in ended.said
    assert "kappa" in ended.outcome.metrics
    assert ended.outcome.best_metric == "kappa"
