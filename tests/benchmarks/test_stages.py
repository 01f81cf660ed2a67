"""The benchmarks' cases, arrangements, processes and tables; sides of `benchmarks/stages.py` do the same training."""

import csv
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from measuring.cases import CASES as PLAN_CASES
from measuring.cases import OTHERS, hybrid
from measuring.link import bits_per_second
from measuring.ranks import Limits, RankFailed, run_ranks
from measuring.results import SERIAL, Results, Row, markdown
from measuring.sides import PEERS, Arrangement, Side
from measuring.stage_cases import CASES
from measuring.stage_exactness import SUBJECTS, Distance, _parts, distances, relative, table
from measuring.stage_sides import StageSide
from measuring.stage_sides import train as train_stages
from measuring.training import train, try_arrangements

from convoy import models
from convoy.bench.emulated import Cluster, emulate
from convoy.errors import ConvoyError
from convoy.plans.plan import Plan

TINY = OTHERS["lenet"].changed(8, 1)
UNET = replace(CASES["unet"], image_size=32, batch=8, updates=1, options={"groups": 4, "width": 8})


def test_plans_and_cuts_of_cases_are_for_as_many_devices_as_they_say() -> None:
    for case in (*PLAN_CASES.values(), *OTHERS.values()):
        assert {Plan.parse(plan).mesh.num_devices for plan in case.plans.values()} <= {2}
    for stages in CASES.values():
        assert stages.changed(None, None) == stages
        with torch.device("meta"):
            names = dict(models.create(stages.model, num_classes=10, **stages.options).named_modules())
        for num in (2, 4):
            plans = (*(stages.divided[num] if stages.divided else ()), *stages.staged[num])
            assert {Plan.parse(text).mesh.num_devices for text in plans} <= {num}
            assert all(len(cuts) == num - 1 and set(cuts) <= names.keys() for cuts in stages.cuts[num])
    plan = Plan.parse(hybrid(classifier__1="filter"))
    assert plan.strategy("classifier.1", "linear") == ("filter",)
    assert plan.strategy("features.0", "conv") == ("sample",)
    more = CASES["resnet50"].changed(256, None)  # more samples make more passes and parts
    assert (more.batch, more.passes, more.parts) == (256, (8, 16, 32, 64, 128), (2, 4, 8, 16))


def test_passes_and_parts_cover_the_batch_once_and_a_distance_is_relative() -> None:
    assert Arrangement(True, 3).passes(8) == [slice(0, 3), slice(3, 6), slice(6, 8)]
    assert Arrangement().passes(8) == [slice(0, 8)] and Arrangement(True, 8).for_batch(8) == Arrangement()
    assert list(_parts(7, sample_ranks=2, parts=2)) == [range(2), range(2, 4), range(4, 6), range(6, 7)]
    assert relative(torch.tensor([1.0, 4.1]), torch.tensor([1.0, 4.0])) == pytest.approx(0.025)
    near, far = Distance(), Distance()
    near.note("gradients", "a", 1e-12)
    far.note("gradients", "a", float("nan"))
    assert near.ok and not far.ok


def test_a_table_says_what_was_skipped_and_that_the_machine_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(SERIAL, "one pass", [2.0, 4.0, 3.0]), Row("Convoy", "one pass", [1.0, 2.0, 1.5])]
    results = Results("alexnet-32", 32, "alexnet", rows, skipped={"accelerate": "pip install accelerate"})
    text = markdown(results)
    assert "| Convoy | 1.5000 | 2.00 | 1.000–2.000 s, ×2.00–2.00 | one pass |" in text
    assert "accelerate: skipped, pip install accelerate" in text and "measure again" not in text
    rows[0].busy = 0.5
    assert "Other programs took 50% of the one device's core" in markdown(results)
    assert results.to_dict()["sides"][1]["ratio"] == 2.0
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [Side("", kind).missing for kind in PEERS] == [None, "lightning", "accelerate"]


def cores_and_threads() -> tuple[set[int], int]:
    return os.sched_getaffinity(0), torch.get_num_threads()


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("on purpose")
    if how == "hang":
        time.sleep(60)
    os._exit(7)


def test_ranks_have_one_core_and_one_thread() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert run_ranks(cores_and_threads, 2) == [({cores[0]}, 1), ({cores[1 % len(cores)]}, 1)]


@pytest.mark.slow
def test_ranks_that_fail_hang_or_die_are_named() -> None:
    assert run_ranks(cores_and_threads, 1, first_core=1)[0][0] == {sorted(os.sched_getaffinity(0))[-1]}
    for how, seconds, words in (("raise", 60, "on purpose"), ("hang", 2, "did not come back"), ("die", 60, "status 7")):
        with pytest.raises(RankFailed, match=words):
            run_ranks(fail, 1, how, limits=Limits(seconds))


@pytest.mark.slow
def test_accumulated_passes_are_the_same_update() -> None:
    """LeNet has no batch norm and no dropout, so the losses of all sides are the same."""
    case = TINY.changed(None, 2)
    whole = run_ranks(train, 1, Side("", "serial"), case, 0)[0].losses
    for side, num in (
        (Side("", "serial", Arrangement(True, 4)), 1),
        (Side("", "ddp", Arrangement(True, 2)), 2),
        (Side("", "convoy", Arrangement(True, 2), "owt=2"), 2),
    ):
        timings = run_ranks(train, num, side, case, 0, limits=Limits(90))
        losses = [sum(timing.losses[update] for timing in timings) / num for update in range(2)]
        assert losses == pytest.approx(whole, rel=1e-4), side
    seconds = run_ranks(try_arrangements, 1, TINY.changed(64, 1), limits=Limits(90))[0]
    assert {arrangement.samples for arrangement in seconds} <= {None, 32} and min(seconds.values()) > 0


@pytest.mark.slow
def test_lenet_is_exact_and_a_wrong_gradient_is_seen(tmp_path: Path) -> None:
    ((*_, distance),) = table(["lenet"], ["stage=2"], ["1f1b"], tmp_path)
    assert isinstance(distance, Distance) and distance.ok, distance
    (file,) = tmp_path.iterdir()
    serial, perturbed = torch.load(file, weights_only=False)
    for each in (serial, perturbed):  # where only one had it, it would pass as what rounding does
        each.gradients[1]["features.3.weight"][0] *= 1 + 1e-6
    torch.save((serial, perturbed), file)
    wrong = run_ranks(distances, 2, SUBJECTS["lenet"], "stage=2", ["1f1b"], file, limits=Limits(90))
    assert not any(distance.ok for (distance,) in wrong)


@pytest.mark.slow
def test_all_sides_begin_at_the_same_loss_and_devices_apart_take_their_own_samples() -> None:
    one = Arrangement()
    (serial,) = run_ranks(train_stages, 1, StageSide("", "serial", one), UNET, 0, limits=Limits(90))
    for side in (
        StageSide("", "convoy", one, Plan.parse("stage=2"), 4, "1f1b"),
        StageSide("", "convoy", one, Plan.parse("height=2")),
        StageSide("", "torch", Arrangement(False), None, 4, "gpipe", ("up.1",)),
    ):
        losses = [timing.losses[0] for timing in run_ranks(train_stages, 2, side, UNET, 0, limits=Limits(90))]
        assert losses[-1] == pytest.approx(serial.losses[0], rel=1e-4), side
    apart = StageSide("", "apart", one, samples=(6, 2))
    first, second = run_ranks(train_stages, 2, apart, UNET, 0, limits=Limits(90))
    assert first.losses != second.losses


def test_an_all_reduce_moves_what_an_emulated_link_lets_through() -> None:
    try:
        with emulate(Cluster.alike(2, 0.5, "200mbit")) as places:
            rates = run_ranks(bits_per_second, 2, 2**22, places=places, limits=Limits(60))
    except ConvoyError as error:
        pytest.skip(str(error))
    assert all(0.3 * 200e6 < rate < 1.1 * 200e6 for rate in rates), rates


# What the words of published tables mean, and the fit to them; on the tables themselves where they are at hand.

TABLES = Path(os.environ.get("CONVOY_PUBLISHED", Path(__file__).parents[3] / "shared" / "published"))
OUT = Path(__file__).parents[2] / "docs" / "benchmarks" / "published"
LAMBDA = "Lambda lambda-tensorflow-benchmark raw log Gold_6230-GeForce_RTX_2080_Ti_XLA_trt_TF1_15"
LINES = f"""\
{LAMBDA}|VGG16|ImageNet-synthetic|GeForce RTX 2080 Ti|PCIe|8|56|DP replicated fp32 [XLA_trt_TF1_15]
Theano-MPI|AlexNet|ImageNet|Tesla K80 (1 GK210 die)|PCIe 3.0|2|128|DP BSP, not overlapped, fp16 exchange
torchgpipe docs|ResNet-101|synthetic|Tesla P40|PCIe 3.0|4||PP n=4 partitions, m=32 micro-batches
somebody|ResNet-50|ImageNet|GPU unstated|unstated|2|64|DP Horovod
Lambda deeplearning|ResNet-50|ImageNet|RTX 3090||1|64|DP DDP fp32 (TF32 on Ampere+)
Lambda deeplearning|ResNet-50|ImageNet|RTX 3090||1|64|DP DDP fp16 AMP"""


def test_words_of_published_rows_are_devices_software_and_schemes(tmp_path: Path) -> None:
    published = pytest.importorskip("measuring.published_rows")
    with (tmp_path / "scaling.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*published.KEYS, "images_per_s", "speedup_vs_1"])
        writer.writerows([*line.split("|"), 100 + number, ""] for number, line in enumerate(LINES.splitlines()))
    lambda_, theano, gpipe, unknown, *ampere = published.read(tmp_path / "scaling.csv")
    assert (lambda_.device.name, lambda_.scheme.kind, lambda_.software.compiled) == ("rtx-2080-ti", "replicated", True)
    assert (lambda_.count, lambda_.images, lambda_.rate, lambda_.speedup) == (8, 56, 100, None)
    assert (theano.device.name, theano.precision, theano.scheme.itemsize) == ("k80", "fp32", 2)
    assert not theano.scheme.overlap and theano.network == "alexnet-2012"
    assert (gpipe.scheme.kind, gpipe.scheme.parts, gpipe.scheme.relative) == ("pipeline", 32, True)
    assert [row.precision for row in ampere] == ["tf32", "fp16"]
    assert "does not say which device" in unknown.refused
    assert published.family(LAMBDA) == published.family(LAMBDA.replace("XLA_", ""))
    ours = list(published.read(published.OURS))  # rows of one's own say how updates were made
    assert {(row.device.name, row.precision) for row in ours} == {("h200-sxm", "fp16"), ("h100-sxm5", "fp16")}
    assert not any(row.refused for row in ours) and {row.software.generation for row in ours} == {"2026"}
    ways = {(row.software.compiled, row.software.recorded, row.software.kernels) for row in ours}
    assert ways == {(c, r, False) for c in (False, True) for r in (False, True)} | {(False, True, True)}


def test_leaving_a_source_out_forgets_it() -> None:
    """A straight line through the points of two sources, and without one of them; the control keeps it."""
    fit = pytest.importorskip("measuring.published_fit")
    x, y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 4.0, 9.0, 12.0])
    problem = fit.Problem(["slope"], np.array([1e3]), lambda at: at[0] * x - y, np.array([0, 0, 1, 1]))
    whole, slopes = problem.solve()
    assert problem.without(1, whole, slopes, 20)[0] == pytest.approx(2, abs=0.02)
    assert problem.without(7, whole, slopes, 20)[0] == whole[0] > 2.5


@pytest.mark.skipif(not (TABLES / "scaling.csv").exists(), reason="the published tables are not part of the project")
def test_every_published_row_is_answered() -> None:
    keys = pytest.importorskip("measuring.published_rows").KEYS
    for questions, name in (("scaling.csv", "predictions.csv"), ("questions.csv", "blind.csv")):
        with (TABLES / questions).open(newline="", encoding="utf-8") as file:
            asked = {tuple(row[key] for key in keys) for row in csv.DictReader(file)}
        with (OUT / name).open(newline="", encoding="utf-8") as file:
            answers = {tuple(row[key] for key in keys): row for row in csv.DictReader(file)}
        assert asked == set(answers)
        assert sum(bool(row["refused"]) for row in answers.values()) < 0.1 * len(answers)
        for row in answers.values():
            assert row["refused"] or float(row["least"]) <= float(row["images_per_s"]) <= float(row["most"])
