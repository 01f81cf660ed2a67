"""`convoy bench` on real processes: measured, stopped and gone on with; and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from convoy.cli import main
from convoy.training import RunDirectory, lock
from data.made import write_folder

TINY = ["--batch", "8", "--image-size", "28", "--updates", "2", "--warm-up", "1", "--timeout", "100"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_store(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVOY_CACHE", str(cache))


def several() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return found


def visits(folder: Path) -> int:
    path = folder / "bench.json"
    return sum(len(row["visits"]) for row in document(folder)["configurations"]) if path.exists() else 0


@pytest.mark.slow
def test_a_study_on_two_devices(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    several()
    out = tmp_path / "study"
    plans = "sample;filter;auto"
    line = ["bench", "tiny:TinyNet", "--devices", "1,2", "--plans", plans, "--peers", "ddp", "--rounds", "1"]
    assert main([*line, *TINY, "--out", str(out), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    rows = {(row["kind"], row["configuration"]): row for row in told["configurations"]}
    assert list(rows) == [
        ("convoy", "one device"),
        ("torch", "plain PyTorch"),
        ("convoy", "sample=2"),
        ("convoy", "filter=2"),
        ("convoy", "auto"),
        ("ddp", "DistributedDataParallel"),
    ]
    for row in rows.values():
        assert row["step_s"] > 0 and row["memory_bytes"] > 0 and row["rounds"] == 1
        parts = ("compute_s", "exposed_communication_s", "data_wait_s", "optimizer_s")
        assert sum(row[part] for part in parts) == pytest.approx(row["step_s"])
    assert all(row["predicted_s"] > 0 for (kind, _), row in rows.items() if kind == "convoy")
    assert rows["convoy", "sample=2"]["exposed_communication_s"] > 0
    assert rows["convoy", "one device"]["exposed_communication_s"] == 0
    own = [row for row in document(out)["configurations"] if row["kind"] == "convoy"]
    losses = [visit["loss"] for row in own for visit in row["visits"]]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    cores = [document(out)["study"]["cores_per_device"]]
    assert cores == [len(os.sched_getaffinity(0)) // 2]

    assert main([*line, *TINY, "--out", str(out)]) == 0
    table = capfd.readouterr().out
    assert visits(out) == 6  # all of it was there
    assert all(words in table for words in ("speed-up", "filter=2", "± needs two rounds", "report: "))

    assert main(["report", str(out)]) == 0
    assert main([*line, "--batch", "16", "--out", str(out)]) == 2
    assert "another --out" in capfd.readouterr().err


@pytest.mark.slow
def test_stopped_it_keeps_what_was_measured_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "study"
    line = [sys.executable, "-m", "convoy", "bench", "tiny:TinyNet", "--devices", "1,1", "--plans", "sample"]
    line += [*TINY, "--rounds", "200", "--no-predict", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 100
    while visits(out) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the same command goes on" in said
    kept = visits(out)
    assert kept >= 2
    first = document(out)["configurations"][0]["visits"][0]
    line[line.index("200")] = str(kept)
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert visits(out) == 2 * kept
    assert document(out)["configurations"][0]["visits"][0] == first
    assert len(document(out)["sessions"]) == 2


@pytest.mark.slow
def test_weak_scaling_and_real_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tiny import write_mnist

    write_mnist(tmp_path / "data")
    out = tmp_path / "study"
    line = [
        "bench",
        "tiny:TinyNet",
        "--data",
        str(tmp_path / "data"),
        "--devices",
        "1",
        "--batch-per-device",
        "4",
        "--set",
        "data.workers=0",
    ]
    options = ["--rounds", "1", "--updates", "2", "--no-predict", "--plans", "sample", "--out", str(out), "--json"]
    assert main([*line, *options]) == 0
    row = json.loads(capfd.readouterr().out)["configurations"][0]
    assert row["batch"] == 4 and row["data_wait_s"] > 0
    assert document(out)["table"]["dataset_size"] < 1000


@pytest.mark.slow
def test_pictures_are_loaded_by_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    several()
    data = write_folder(tmp_path / "photos", num=8)
    line = ["bench", "squeezenet1_1", "--data", str(data), "--devices", "2", "--plans", "sample", "--batch", "4"]
    line += ["--set", "data.workers=1", "--set", "data.image_size=64", "--peers", "ddp", "--no-predict"]
    options = ["--rounds", "1", "--updates", "2", "--warm-up", "1", "--out", str(tmp_path / "study"), "--json"]
    assert main([*line, *options]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [row["configuration"] for row in found["configurations"]] == ["sample=2", "DistributedDataParallel"]
    assert all(row["data_wait_s"] > 0 for row in found["configurations"])


@pytest.mark.slow
def test_shares_by_speed_are_the_same_work(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    several()
    out = tmp_path / "study"
    line = ["bench", "tiny:TinyNet", "--devices", "2", "--plans", "sample", "--shares", "even;auto;3,1"]
    options = ["--rounds", "1", "--no-predict", "--set", "microbatch=2", "--out", str(out), "--json"]
    assert main([*line, *TINY, *options]) == 0
    rows = json.loads(capfd.readouterr().out)["configurations"]
    assert [row["configuration"] for row in rows] == ["sample=2", "sample=2, shares auto", "sample=2, shares 3,1"]
    losses = [visit["loss"] for row in document(out)["configurations"] for visit in row["visits"]]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.slow
def test_a_row_that_cannot_be_is_named_and_the_others_stay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    several()
    out = tmp_path / "study"
    line = ["bench", "failing:Failing", "--devices", "1,2", "--plans", "sample", "--rounds", "2"]
    assert main([*line, *TINY, "--no-predict", "--out", str(out)]) == 0
    assert "sample=2 on 2 devices was not measured: rank 1 failed: KeyError: 'the odd key'" in capfd.readouterr().out
    assert visits(out) == 2
    report = (out / "report.html").read_text(encoding="utf-8")
    assert "the odd key" in report and "incomplete" in report


@pytest.mark.slow
def test_the_first_row_need_not_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    several()
    line = ["bench", "tiny:TinyNet", "--devices", "2", "--plans", "sample;filter", "--set", "microbatches=1"]
    sizes = ["--batch", "64", "--image-size", "28", "--warm-up", "1", "--rounds", "1", "--no-predict"]
    assert main([*line, *sizes, "--out", str(tmp_path)]) == 0
    assert [(len(row["visits"]), bool(row["failed"])) for row in document(tmp_path)["configurations"]] == [
        (0, True),
        (1, False),
    ]
    assert "sample=2 on 2 devices was not measured: " in capfd.readouterr().out


def test_a_folder_is_for_one_study_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "tiny:TinyNet", "--devices", "1", "--plans", "sample", "--out", str(tmp_path)]
    with RunDirectory(tmp_path).lock():
        assert main([*line, *TINY]) == 2
    said = capsys.readouterr().err
    assert f"another process is training in {tmp_path} (process " in said and "wait for its end" in said
    assert [entry.name for entry in tmp_path.iterdir()] == [lock.NAME]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("bench lenett", "did you mean lenet"),
        ("bench lenet --devices two", "--devices two is no list of numbers"),
        ("bench lenet --devices 0", "--devices 0 is no list of numbers"),
        ("bench lenet --devices 4096", "--devices 4096 needs 4096 cores"),
        ("bench lenet --devices 1 --cores-per-device 4096", "--cores-per-device 4096"),
        ("bench lenet --devices 1 --plans smaple", "smaple"),
        ("bench lenet --devices 1 --plans sample=3", "--devices has no 3"),
        ("bench lenet --devices 1 --peers horovod", "--peers horovod is no peer"),
        ("bench lenet --devices 1 --set precision=auto", "precision=auto may differ from row to row: name one for all"),
        ("bench lenet --devices 1 --peers ddp --set precision=fp16", "--peers do not train with precision=fp16"),
        ("bench lenet --devices 1 --batch 0", "--batch is 0"),
        ("bench lenet --devices 1 --shares half", "--shares half are no shares"),
        ("bench lenet --devices 1 --shares 1,0", "--shares 1,0 are no shares"),
        ("bench lenet --devices 1 --batch 8 --batch-per-device 8", "give one"),
        ("bench lenet --devices 1 --rounds 0", "--rounds is 0"),
        ("bench lenet --devices 1 --epochs 0", "--epochs is 0"),
        ("bench lenet --devices 1 --dataset-size 10", "give --epochs, too"),
        ("bench lenet --devices 1 --data mnist-mini --image-size 32", "leave one out"),
        ("bench lenet --devices 1 --data missing", "missing does not exist"),
        ("bench lenet --devices 1 --device tpu", "--device tpu"),
        ("bench lenet --devices 1 --emulate missing.yaml", "missing.yaml"),
        ("bench lenet --devices 1 --set nonsense=1", "nonsense"),
        ("bench failing:Nothing --devices 1", "failing:Nothing"),
    ],
)
def test_mistakes_are_one_sentence(
    line: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


def test_a_peer_that_is_not_installed_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = ["bench", "lenet", "--devices", "1", "--peers", "fabric", "--out", str(tmp_path)]
    assert main(line) == 2
    assert "pip install 'convoy-nn[lightning]'" in capsys.readouterr().err
