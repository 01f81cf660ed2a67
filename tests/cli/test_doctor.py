"""`convoy doctor`: what it prints of a training and of a run, how it verifies and ends, and what it refuses."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest

from cli.calls import Call
from convoy.cli import doctor
from convoy.doctor.diagnosis import Advice, Diagnosis
from tiny import write_pictures

ADVICE = (
    Advice("busy", "end x (process 7)", (), 3.0, "It is slow."),
    Advice("threads", "--set threads=2", ("--set", "threads=2"), 1.5, "Threads and cores do not go together."),
)
DIAGNOSIS = Diagnosis("lenet", "photos", 1, "serial", 64, 100.0, 0.64, {"forward": 0.6}, "It is slow.", ADVICE)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that tests run in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_of_a_training_few_lines_are_said(folder: Path, call: Call, tmp_path_factory: pytest.TempPathFactory) -> None:
    photos = write_pictures(tmp_path_factory.mktemp("broken") / "photos", size=(100, 75))
    bad = sorted((photos / "train").rglob("*.png"))[0]
    bad.write_bytes(bad.read_bytes()[:200])
    size = "--set data.image_size=28 --set data.workers=0 --set data.channels=1"
    line = f"doctor train tiny:TinyNet --data {photos} --seconds 5 --set threads=1 --batch 24 {size}"
    first, second, *rest = (text := call(line).out).splitlines()
    assert f"1 picture cannot be read: convoy data {photos} --check names them" in text
    assert first.startswith("tiny:TinyNet on one device: ") and first.endswith(" for an update of 24")
    assert second.endswith(".")
    changes = [line for line in rest if "(predicted)" in line]
    assert len(changes) <= 3 and all(line.startswith(f"{n}. ") for n, line in enumerate(changes, 1))
    assert len(rest) - len(changes) <= 5, rest  # the command, and what there was no time for
    assert not list(folder.iterdir())


def test_verify_tries_the_first_change_of_an_option(data: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "lenet", "--data", str(data), "--batch", "24"]
    line, paces = f"doctor {shlex.join(words)} --verify", (100.0, 135.0, 131.0, 90.0)
    asked = list[Any]()

    def examine(what: list[str], seconds: float, no_trials: bool) -> Diagnosis:
        asked.append((list(what), seconds, no_trials))
        pace = paces[(len(asked) - 1) % len(paces)]
        return dataclasses.replace(DIAGNOSIS, images_per_s=pace, command="convoy train lenet")

    monkeypatch.setattr(doctor, "_examination", examine)
    assert call(f"{line} --seconds 7").out.splitlines()[2:] == [
        "1. end x (process 7): 3.00 × as many samples a second (predicted)",
        "2. --set threads=2: 1.50 × as many samples a second (predicted)",
        "With change 2: convoy train lenet",
        f"Tried: {ADVICE[1].text}, 1.40 × as many samples a second when tried",
    ]
    changed_words = [*words, "--set", "threads=2"]
    assert asked == [(words, 7, False), (changed_words, 7, True), (changed_words, 7, True), (words, 7, True)]
    advice = call(f"{line} --json").document["advice"][1]
    assert advice["measured"] == pytest.approx(1.4) and advice["turns"] == list(paces)
