"""`convoy plan` and `convoy profile`, as a person calls them."""

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch

import pytest

from convoy.cli import main, plan_answer
from convoy.errors import ConvoyError
from convoy.planner.cost.device import Device
from convoy.planner.cost.local_op import LocalOp, Operand
from convoy.planner.cost.store import ProfileStore
from convoy.planner.cost.times import Times
from convoy.plans.plan import Plan
from convoy.units import extra

LINE = ["plan", "lenet", "--devices", "2", "--batch", "32", "--microbatches", "2", "--link", "10gbit"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_store(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVOY_CACHE", str(cache))


def said(capsys: pytest.CaptureFixture[str], *line: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main(list(line)) == status
    out, err = capsys.readouterr()
    return out if status == 0 else err


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, *LINE)
    assert text.startswith("lenet on 2 devices, 32 samples an update")
    for words in (
        "plan ",
        "speed-up",
        "memory",
        "what if",
        "next best",
        "classifier.4",
        "the links are assumed: 10gbit",
    ):
        assert words in text


def test_stages_have_a_bubble_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "lenet", "--batch", "32", "--microbatches", "8", "--link", "10gbit", "--score", "stage=2"]
    text = said(capsys, *line, "--html", str(tmp_path / "plan.html"))
    assert text.startswith("lenet on 2 devices, 32 samples an update")
    for words in ("plan stage=2", ", schedule ", "bubble ", "waiting for other stages", "begins at"):
        assert words in text
    assert "schedule" in (tmp_path / "plan.html").read_text()
    found = json.loads(said(capsys, *line, "--json"))
    keys = {"begins", "ranks", "takes", "received_bytes", "computes_s", "waits_s", "sent_bytes", "memory"}
    assert [set(stage) for stage in found["stages"]] == [keys] * 2
    assert 0 < found["bubble"] < 1 and found["schedule"] in ("gpipe", "1f1b") and 1 <= found["passes"] <= 8
    for schedule in ("gpipe", "zero-bubble"):
        assert f", schedule {schedule}" in said(capsys, *line, "--schedule", schedule)
    again = said(capsys, *line, "--recompute")
    assert "the backward pass computes " in again and "the backward pass computes " not in text
    error = said(capsys, *line[:-1], "stage=40", "--devices", "40", "--batch", "80", status=2)
    assert error.startswith("convoy: --score stage=40: the network has ") and "at which a stage can begin" in error


@pytest.mark.slow
def test_json_yaml_page_and_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page, trace = tmp_path / "plan.yaml", tmp_path / "plan.html", tmp_path / "step.json"
    found = json.loads(said(capsys, *LINE, "--json", "--out", str(out), "--html", str(page), "--trace", str(trace)))
    assert Plan.parse(out) == Plan.parse({key: value for key, value in found["plan"].items() if key != "text"})
    assert f"# convoy {' '.join(LINE)}" in out.read_text()
    assert page.read_text().startswith("<!doctype html>")
    events = json.loads(trace.read_text())["traceEvents"]
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last / 1e6 == pytest.approx(found["update_s"])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["plan.html", "plan.yaml", "step.json"]


@pytest.mark.slow
def test_the_plan_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.yaml"
    said(capsys, *LINE, "--out", str(out), "--fix", "features.*=sample")
    plan = Plan.parse(out)
    assert plan.mesh.num_devices == 2
    assert plan.strategy("features.0", "conv") == ("sample",)


@pytest.mark.slow
def test_plans_of_ones_own_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, *LINE, "--score", "sample=2", "--score", "owt=2", "--json"))
    assert {candidate["plan"]["text"] for candidate in found["candidates"]} == {"sample=2", "owt=2"}
    assert found["exact"] is None


@pytest.mark.slow
def test_slow_input_is_what_holds_a_plan_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, *LINE, "--score", "sample=2", "--images-per-second", "10", "--json"))
    assert found["verdict"]["kind"] == "input"
    assert found["update_s"] > 1.6
    assert "Input-bound" in said(capsys, *LINE, "--score", "sample=2", "--images-per-second", "10")


@pytest.mark.slow
def test_devices_follow_from_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "lenet", "--batch", "32", "--score", "filter=2", "--link", "pcie4", "--json"]
    assert json.loads(said(capsys, *line))["devices"] == 2


@pytest.mark.slow
def test_a_batch_of_one_microbatch_says_why_samples_stay_together(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan", "lenet", "--devices", "2", "--batch", "32", "--microbatches", "1", "--link", "pcie4")
    assert text.startswith("the batch is 1 microbatch, which stay whole")  # before the plan
    assert "--microbatches 2 would" in text


def test_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    text = said(capsys, "plan", "lenet", "--batch", "16", "--html", str(page))
    assert "plan serial" in text
    assert "on</span> <bdi>1 device</bdi>" in page.read_text()


@pytest.mark.slow
def test_a_recipe_gives_model_and_batch(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "plan", "--recipe", "lenet-mnist", "--json"))
    assert (found["model"], found["batch"]) == ("lenet", 64)


@pytest.mark.slow
def test_a_factory_of_ones_own_with_one_channel(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(
        capsys, "plan", "tiny:TinyNet", "--batch", "16", "--image-size", "28", "--devices", "2", "--link", "pcie4"
    )
    assert "tiny:TinyNet on 2 devices, 16 samples an update, images of 1×28×28" in text
    assert "pixels are assumed" not in text


def test_the_size_that_is_assumed_is_said_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        patch.object(plan_answer, "ASSUMED_SIZE", 28),
        patch.object(plan_answer, "workload_of_recipe", side_effect=ConvoyError("measured")),
    ):
        assert main(["plan", "tiny:TinyNet", "--batch", "16"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("the size of the images for tiny:TinyNet is not known: 28×28 pixels are assumed, unless")
    assert second == "convoy: measured"
    with patch.object(plan_answer, "ASSUMED_SIZE", 28):
        found = json.loads(said(capsys, "plan", "tiny:TinyNet", "--batch", "16", "--json"))
    assert found["sample"] == [1, 28, 28]
    assert any("28×28 pixels are assumed" in note for note in found["notes"])


def test_given_plans_respect_the_memory_limit(capsys: pytest.CaptureFixture[str]) -> None:
    error = said(capsys, *LINE, "--score", "sample=2", "--memory-limit", "1kB", status=2)
    assert "the plan sample=2 does not fit: it needs" in error and "more than the 1 kB there are" in error


def test_an_alternative_that_is_not_slower_is_as_fast() -> None:
    assert [extra(number) for number in (1.2e-3, 0.0, -2.6e-3)] == ["+1.20 ms", "as fast", "as fast"]


@pytest.mark.slow
def test_more_devices_than_there_are_say_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    number = str(4 * (os.cpu_count() or 1))
    text = said(capsys, "plan", "lenet", "--devices", number, "--batch", "128", "--microbatches", number)
    assert "were not measured" in text
    assert "each device is taken to be as this one" in text


@pytest.mark.slow
def test_ranks_of_this_machine_measure(tmp_path: Path, cache: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    out = tmp_path / "plan.yaml"
    line = ["plan", "lenet", "--devices", "2", "--batch", "32", "--microbatches", "2", "--json", "--out", str(out)]
    environment = os.environ | {"CONVOY_CACHE": str(cache)}
    found = subprocess.run(
        [sys.executable, "-m", "convoy", *line],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["devices"] == 2
    assert not any("assumed" in note or "not measured" in note for note in json.loads(found.stdout)["notes"])
    assert Plan.parse(out).mesh.num_devices == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plan", "nothing to plan"),
        ("plan lenett", "did you mean lenet"),
        ("plan lenet --devices 0", "--devices is 0"),
        ("plan lenet --devices 4 --batch 2", "too small for 4 devices"),
        ("plan lenet --devices 2 --link string", "'string' is no link"),
        ("plan lenet --devices 2 --link 0gbit", "'0gbit' is no link"),
        ("plan lenet --devices 2 --batch 32 --link 10gbit --fix head.*=filter", "matches no layer"),
        ("plan lenet --devices 2 --batch 32 --link 10gbit --fix classifier.*", "fixes nothing"),
        ("plan lenet --devices 2 --batch 32 --link 10gbit --fix classifier.*=filer", "filer"),
        ("plan lenet --devices 2 --score sample=4", "--score sample=4 is for 4 devices"),
        ("plan lenet --devices 2 --score auto", "leave --score out"),
        ("plan lenet --devices 2 --score smaple=2", "smaple"),
        ("plan lenet --devices 2 --score none.yaml", "there is no plan file none.yaml"),
        ("plan lenet --devices 2 --score sample=2 --fix *=sample", "--fix is for a search"),
        ("plan lenet --devices 16 --batch 16 --microbatches 16 --score filter=16 --link pcie4", "6"),
        ("plan lenet --devices 2 --memory-limit much", "--memory-limit much is no size"),
        ("plan lenet --devices 2 --memory-limit 1kB --batch 32 --link pcie4", "no plan fits"),
        ("plan lenet --devices 2 --batch 32 --link pcie4 --images-per-second 0", "--images-per-second is 0"),
        ("plan lenet --devices 2 --batch 32 --link pcie4 --images-per-second nan", "--images-per-second is nan"),
        ("plan lenet --batch 32 --cores-per-device 0", "--cores-per-device is 0"),
        ("plan lenet --batch 32 --cores-per-device -1", "--cores-per-device is -1"),
        ("plan alexnet --image-size 16 --batch 4", "cannot train on images of 3×16×16"),
        ("plan lenet --precision fp8", "precision"),
        ("plan lenet --out missing/plan.yaml", "there is no folder missing"),
        ("plan lenet --html .", "is a folder"),
        ("plan failing:Nothing", "failing:Nothing"),
        ("plan lenet --device tpu", "--device tpu"),
    ],
)
def test_mistakes_are_one_sentence(line: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        error = said(capsys, *line.split(), status=2)
    finally:
        os.chdir(before)
    lines = [each for each in error.splitlines() if not each.startswith(("profiling", "measuring", "searching"))]
    assert len(lines) == 1 and lines[0].startswith("convoy: ")
    assert words in lines[0]
    assert not any(tmp_path.iterdir())


class Page(HTMLParser):
    """What a page holds, and what it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.loads: list[str] = []
        self.boxes = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)
        self.loads += [value or "" for name, value in attributes if name in ("src", "href") and tag != "a"]
        self.boxes += tag == "g" and "box" in (given.get("class") or "").split()

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.slow
def test_the_page_holds_everything_and_escapes_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    line = ["plan", "odd_names:net", "--batch", "8", "--image-size", "12", "--devices", "2", "--link", "pcie4"]
    said(capsys, *line, "--html", str(page))
    text = page.read_text()
    assert "<b>bold</b>" not in text
    parsed = Page()
    parsed.feed(text)
    assert all(load.startswith("data:") for load in parsed.loads)
    assert any("<b>bold</b>" in each for each in parsed.texts)
    assert parsed.boxes == 3


@pytest.mark.slow
def test_profile_lists_what_was_measured_and_forgets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path))
    assert "nothing is kept" in said(capsys, "profile")
    assert json.loads(said(capsys, "profile", "--json")) == []
    assert "nothing is kept" in said(capsys, "profile", "nowhere", status=2)
    said(capsys, "plan", "lenet", "--batch", "8")
    assert "convoy profile lists" in said(capsys, "profile", "nowhere", status=2)
    devices = json.loads(said(capsys, "profile", "--json"))
    assert len(devices) == 1 and devices[0]["pieces"] > 3
    assert "just now" in said(capsys, "profile")
    pieces = json.loads(said(capsys, "profile", "1", "--json"))
    assert len(pieces) == devices[0]["pieces"]
    assert pieces == json.loads(said(capsys, "profile", devices[0]["key"], "--json"))
    assert "conv 8×" in said(capsys, "profile", "1")
    assert "forgot 1 device" in said(capsys, "profile", "--clear", "1")
    assert "nothing is kept" in said(capsys, "profile")
    assert "forgot 0 devices" in said(capsys, "profile", "--clear")


def test_profile_says_what_came_from_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path))
    store, device = ProfileStore(), Device("Some CPU", "2.13", "0.1", 1)
    small, large = (
        LocalOp("copy", "", (Operand((size,), "float32"),), (Operand((size,), "float32"),)) for size in (3, 5)
    )
    store.put(device, {small: Times(1e-3, 0.0), large: Times(2e-3, 0.0)})
    store.put(device, {small: Times(3e-3, 0.0)}, "run")
    (found,) = json.loads(said(capsys, "profile", "--json"))
    assert (found["pieces"], found["from_runs"]) == (2, 1)
    assert "from runs" in said(capsys, "profile")
    pieces = json.loads(said(capsys, "profile", "1", "--json"))
    assert [(piece["source"], piece["forward_s"]) for piece in pieces] == [("run", 3e-3), ("profiling", 2e-3)]
    assert "a run" in said(capsys, "profile", "1")


@pytest.mark.slow
def test_no_store_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path))
    said(capsys, "plan", "lenet", "--batch", "8", "--no-store")
    assert not any(tmp_path.iterdir())
