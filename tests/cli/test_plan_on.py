"""`convoy plan --on`: machines that are not at hand."""

import json
from pathlib import Path

import pytest

from convoy.cli import main

LINE = ["plan", "lenet", "--on", "4xv100-sxm2", "--batch", "256"]


def said(capsys: pytest.CaptureFixture[str], *line: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main(list(line)) == status
    out, err = capsys.readouterr()
    return out if status == 0 else err


def test_text_with_price_and_days(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, plan = tmp_path / "page.html", tmp_path / "plan.yaml"
    more = ["--compare", "2xrtx-4090", "--price", "2,0.3", "--html", str(page), "--out", str(plan)]
    text = said(capsys, *LINE, *more)
    priced = "days and price, in the currency of --price, of "
    for words in ("predicted, not measured", "4xv100-sxm2", "2xrtx-4090", "90 % range", priced, "held back by"):
        assert words in text
    assert "<svg" in page.read_text() and "2xrtx-4090" in page.read_text()
    assert "mesh" in plan.read_text()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = json.loads(said(capsys, *LINE, "--images", "60000", "--price", "1", "--json"))
    assert found["devices"] == 4 and found["range"][0] < found["images_per_s"] < found["range"][1]
    assert found["price"] == pytest.approx(24 * 4 * found["days"], rel=0.1, abs=0.01)
    assert found["speedup"] <= 4.05 and found["faster_than_data_parallel"] >= 1


def test_microbatches_are_as_small_as_devices_need(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["plan", "resnet18", "--image-size", "32", "--on", "4xv100-sxm2", "--batch", "64"]
    assert "over 16 samples, so that each device has a microbatch: training does so with --microbatches 4" in said(
        capsys, *few
    )
    assert "batch norm takes its statistics" not in said(capsys, *few, "--microbatches", "4")


def test_hosts_and_a_device_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine: {generation: ada, processors: 60, fp32: 20, memory_gb: 16, gbytes_per_s: 500}\n")
    line = ["plan", "lenet", "--on", "2x(2xmine)", "--between", "25gbit", "--catalog", str(path), "--batch", "64"]
    assert "2x(2xmine) over 25gbit" in said(capsys, *line)


def test_the_schedule_is_the_one_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "lenet", "--on", "2xt4", "--batch", "64", "--score", "stage=2"]
    assert ", schedule 1f1b" in said(capsys, *line)
    assert ", schedule zero-bubble" in said(capsys, *line, "--schedule", "zero-bubble")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--on", "8xv100-smx2"], "v100-sxm2"),
        (["--on", "2xt4", "--price", "1,2"], "--price has 2 prices for 1 machine"),
        (["--on", "2xt4", "--price", "cheap"], "no list of numbers"),
        (["--on", "2xt4", "--devices", "2"], "--devices is for devices at hand"),
        (["--on", "2xt4", "--between", "10gbit"], "is one host"),
        (["--on", "2x(2xt4)", "--between", "string"], "is no link"),
        (["--on", "2xt4", "--images", "0"], "at least 1"),
        (["--score", "sample=2", "--schedule", "gpipe"], "--schedule is for plans with stages, and --score names none"),
        (["--schedule", "quick"], "--schedule is quick, but must be 1f1b"),
        (["--on", "2xt4", "--score", "sample=3"], "--score sample=3 is for 3 devices, but 2xt4 has 2"),
        (["--on", "512xt4"], "too small for 512 devices"),
        (["--between", "10gbit"], "name one with --on"),
        (["--on", "2xt4", "--catalog", "/nowhere.yaml"], "there is no devices file"),
        (["--on", "2xt4", "--shares", "1,2"], "--shares is not for --on"),
        (["--on", "2xt4", "--recompute"], "--recompute is not for --on"),
        (["--on", "2xt4", "--compare", "200xt4"], "too small for the 200 devices of 200xt4"),
        (["--on", "k20", "--batch", "4000000"], "more than the"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], more: list[str], words: str) -> None:
    found = said(capsys, "plan", "lenet", *more, status=2)
    assert words in found and found.count("\n") == 1


def test_a_measured_device_can_be_planned_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    said(capsys, "profile", "cpu", "--export", str(path))
    name = path.read_text().partition(":")[0]
    text = said(capsys, "plan", "lenet", "--on", f"2x{name}", "--catalog", str(path), "--batch", "64")
    assert f"2x{name}" in text
