"""What the words of published tables mean, and the fit to them; on the tables themselves where they are at hand."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("measuring.published_rows")

from measuring.published_fit import Problem
from measuring.published_rows import KEYS, OURS, Row, family, read

TABLES = Path(os.environ.get("CONVOY_PUBLISHED", Path(__file__).parents[3] / "shared" / "published"))
OUT = Path(__file__).parents[2] / "docs" / "benchmarks" / "published"

LAMBDA = "Lambda lambda-tensorflow-benchmark raw log Gold_6230-GeForce_RTX_2080_Ti_XLA_trt_TF1_15"
ROWS = [
    (
        LAMBDA,
        "VGG16",
        "ImageNet-synthetic",
        "GeForce RTX 2080 Ti",
        "PCIe",
        8,
        56,
        "DP replicated fp32 [XLA_trt_TF1_15]",
    ),
    (
        "Theano-MPI",
        "AlexNet",
        "ImageNet",
        "Tesla K80 (1 GK210 die)",
        "PCIe 3.0",
        2,
        128,
        "DP BSP, not overlapped, fp16 exchange",
    ),
    (
        "torchgpipe docs",
        "ResNet-101",
        "synthetic",
        "Tesla P40",
        "PCIe 3.0",
        4,
        "",
        "PP n=4 partitions, m=32 micro-batches",
    ),
    ("somebody", "ResNet-50", "ImageNet", "GPU unstated", "unstated", 2, 64, "DP Horovod"),
    ("Lambda deeplearning", "ResNet-50", "ImageNet", "RTX 3090", "", 1, 64, "DP DDP fp32 (TF32 on Ampere+)"),
    ("Lambda deeplearning", "ResNet-50", "ImageNet", "RTX 3090", "", 1, 64, "DP DDP fp16 AMP"),
]


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    path = tmp_path / "scaling.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*KEYS, "images_per_s", "speedup_vs_1"])
        for number, row in enumerate(ROWS):
            writer.writerow([*row, 100 + number, ""])
    return list(read(path))


def test_devices_software_and_schemes(rows: list[Row]) -> None:
    lambda_, theano, gpipe, unknown, *ampere = rows
    assert (lambda_.device.name, lambda_.scheme.kind, lambda_.software.compiled) == ("rtx-2080-ti", "replicated", True)
    assert (lambda_.count, lambda_.images, lambda_.rate, lambda_.speedup) == (8, 56, 100, None)
    assert (theano.device.name, theano.precision, theano.scheme.itemsize) == ("k80", "fp32", 2)
    assert not theano.scheme.overlap and theano.network == "alexnet-2012"
    assert (gpipe.scheme.kind, gpipe.scheme.parts, gpipe.scheme.relative) == ("pipeline", 32, True)
    assert [one.precision for one in ampere] == ["tf32", "fp16"]
    assert "does not say which device" in unknown.refused
    assert family(LAMBDA) == family(LAMBDA.replace("XLA_", ""))


def test_rows_of_ones_own_say_how_updates_were_made() -> None:
    found = list(read(OURS))
    assert {(one.device.name, one.precision) for one in found} == {("h200-sxm", "fp16"), ("h100-sxm5", "fp16")}
    assert not any(one.refused for one in found) and {one.software.generation for one in found} == {"2026"}
    ways = {(one.software.compiled, one.software.recorded, one.software.kernels) for one in found}
    assert ways == {(c, r, False) for c in (False, True) for r in (False, True)} | {(False, True, True)}


def test_leaving_a_source_out_forgets_it() -> None:
    """A straight line through the points of two sources, and without one of them; the control keeps it."""
    x, y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 4.0, 9.0, 12.0])
    groups = np.array([0, 0, 1, 1])
    problem = Problem(["slope"], np.array([1e3]), lambda at: at[0] * x - y, groups)
    whole, slopes = problem.solve()
    assert problem.without(1, whole, slopes, 20)[0] == pytest.approx(2, abs=0.02)
    assert problem.without(7, whole, slopes, 20)[0] == whole[0] > 2.5


@pytest.mark.skipif(not (TABLES / "scaling.csv").exists(), reason="the published tables are not part of the project")
@pytest.mark.parametrize(("table", "name"), [("scaling.csv", "predictions.csv"), ("questions.csv", "blind.csv")])
def test_every_published_row_is_answered(table: str, name: str) -> None:
    with (TABLES / table).open(newline="", encoding="utf-8") as file:
        asked = [tuple(row[key] for key in KEYS) for row in csv.DictReader(file)]
    with (OUT / name).open(newline="", encoding="utf-8") as file:
        answers = {tuple(row[key] for key in KEYS): row for row in csv.DictReader(file)}
    assert set(asked) == set(answers)
    refused = sum(bool(row["refused"]) for row in answers.values())
    assert refused < 0.1 * len(answers)
    for row in answers.values():
        assert row["refused"] or float(row["least"]) <= float(row["images_per_s"]) <= float(row["most"])
