"""The benchmarks' cases, sides, processes and tables; and the tables that others published."""

import csv
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from measuring.cases import CASES, HELD, MEMORY, STAGED, SUBJECTS, Case
from measuring.ranks import Limits, bits_per_second, run_ranks
from measuring.runs import SERIAL, Results, Row
from measuring.sides import Arrangement, Side, train, try_arrangements

from convoy import models
from convoy.bench.emulated import Cluster, emulate
from convoy.errors import ConvoyError
from convoy.plans.plan import Plan

TINY = Case("lenet", "lenet", 28, 8, 2)
UNET = replace(STAGED["unet"], image_size=32, batch=8, updates=1, options={"groups": 4, "width": 8})


def test_networks_plans_and_cuts_of_cases_are_there_and_for_as_many_devices_as_they_say() -> None:
    for case in (*CASES.values(), *STAGED.values(), *HELD.values(), *MEMORY.values(), *SUBJECTS):
        with torch.device("meta"):
            names = dict(models.create(case.model, num_classes=10, **case.options).named_modules())
        assert {Plan.parse(plan).mesh.num_devices for plan in case.plans.values()} <= {2}
        for num, plans in case.divided.items():
            assert {Plan.parse(text).mesh.num_devices for text in plans} <= {num}
            assert all(len(cuts) == num - 1 and set(cuts) <= names.keys() for cuts in case.cuts[num])
    plan = Plan.parse(CASES["alexnet-32"].plans["pair"])
    assert plan.strategy("classifier.1", "linear") == ("filter",) and plan.strategy("x", "conv") == ("sample",)


def test_a_table_says_what_was_skipped_predicted_and_that_the_machine_was_busy() -> None:
    assert Arrangement(True, 3).passes(8) == [slice(0, 3), slice(3, 6), slice(6, 8)]
    assert Arrangement().passes(8) == [slice(0, 8)] and Arrangement(True, 8).for_batch(8) == Arrangement()
    rows = [Row(SERIAL, "one pass", [2.0, 4.0, 3.0]), Row("Convoy", "one pass", [1.0, 2.0, 1.5], predicted=1.8)]
    results = Results("alexnet-32", 32, "alexnet", rows, skipped={"accelerate": "pip install accelerate"})
    text = results.markdown()
    assert "| Convoy | 1.5000 | 2.00 | 1.000–2.000 s, ×2.00–2.00 | one pass |" in text
    assert "| Convoy | 1.800 | 1.500 | +20.0% |" in text
    assert "accelerate: skipped, pip install accelerate" in text and "measure again" not in text
    rows[0].busy = 0.5
    assert "Other programs took 50% of the one device's core" in results.markdown()
    assert results.to_dict()["sides"][1]["ratio"] == 2.0


def cores_and_threads() -> tuple[set[int], int]:
    return os.sched_getaffinity(0), torch.get_num_threads()


def test_ranks_have_one_core_and_one_thread() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert run_ranks(cores_and_threads, 2) == [({cores[0]}, 1), ({cores[1 % len(cores)]}, 1)]


@pytest.mark.slow
def test_all_sides_do_the_same_updates() -> None:
    """The losses of one device, where there is no batch norm; of a U-Net the first one, before any update."""
    two = Plan.parse("sample=2")
    passes = [Side("", "serial", Arrangement(True, 4)), Side("", "ddp", Arrangement(True, 2))]
    passes += [Side("", "convoy", Arrangement(True, 2), "owt=2"), Side("", "convoy", plan=two)]
    staged = [Side("", "convoy", plan=Plan.parse("stage=2"), parts=4, schedule="1f1b")]
    staged += [Side("", "torch", Arrangement(False), parts=4, schedule="gpipe", cuts=("up.1",))]
    for case, sides in ((TINY, passes), (UNET, staged)):
        (serial,) = run_ranks(train, 1, Side("", "serial"), case, 0, limits=Limits(90))
        for side in sides:
            timings = run_ranks(train, 1 if side.kind == "serial" else 2, side, case, 0, limits=Limits(90))
            if side.schedule:
                timings = timings[-1:]
            losses = [sum(one.losses[update] for one in timings) / len(timings) for update in range(case.updates)]
            assert losses == pytest.approx(serial.losses, rel=1e-4), side
    first, second = run_ranks(train, 2, Side("", "apart", samples=(6, 2)), UNET, 0, limits=Limits(90))
    assert first.losses != second.losses
    seconds = run_ranks(try_arrangements, 1, replace(TINY, batch=64), limits=Limits(90))[0]
    assert {arrangement.samples for arrangement in seconds} <= {None, 32} and min(seconds.values()) > 0


def test_an_all_reduce_moves_what_an_emulated_link_lets_through() -> None:
    try:
        with emulate(Cluster.alike(2, 0.5, "200mbit")) as places:
            rates = run_ranks(bits_per_second, 2, 2**22, places=places, limits=Limits(60))
    except ConvoyError as error:
        pytest.skip(str(error))
    assert all(0.3 * 200e6 < rate < 1.1 * 200e6 for rate in rates), rates


# What the words of published tables mean, and the fit to them.

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
    assert (lambda_.site.link, theano.site.link, theano.site.network) == ("pcie3-host", "pcie3", "10gbit")
    assert (theano.device.name, theano.precision, theano.scheme.itemsize) == ("k80", "fp32", 2)
    assert not theano.scheme.overlap and theano.network == "alexnet-2012"
    assert (gpipe.scheme.kind, gpipe.scheme.parts, gpipe.scheme.relative) == ("pipeline", 32, True)
    assert [row.precision for row in ampere] == ["tf32", "fp16"]
    assert "does not say which device" in unknown.refused and unknown.scheme.cycle > 0
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
