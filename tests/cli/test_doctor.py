"""`convoy doctor`: what it prints of a training and of a run, how it verifies and ends, and what it refuses."""

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.calls import Call
from convoy.cli import doctor, doctor_run
from convoy.doctor.diagnosis import Advice, Diagnosis
from convoy.doctor.trials import Budget
from convoy.errors import ConvoyError, MachineError
from convoy.terminal import Console
from convoy.training import Session
from processes import alive, children
from started import Started, wait_for
from tiny import write_pictures

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
"""What hides a terminal's cursor, and what shows it."""
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


def test_of_a_command_line_it_is_said_in_a_few_lines_with_the_pictures_that_cannot_be_read(
    folder: Path, call: Call, tmp_path_factory: pytest.TempPathFactory
) -> None:
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


def test_of_a_run_it_is_as_it_was_begun_or_with_other_options_and_json_is_all_that_is_printed(
    run: Path, call: Call
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for batch in (24, 16):
        line = f"doctor {run} --batch {batch} --trust-code --json --seconds 3 --no-trials"
        document = call(line.replace("--batch 24 ", "")).document
        assert (document["model"], document["devices"], document["batch"]) == ("tiny:TinyNet", 1, batch)
    assert list(document) == [field.name for field in dataclasses.fields(Diagnosis)]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


class Examinations:
    """In place of the examination of a training: each at another pace, until it is killed where none is left."""

    def __init__(self, *paces: float, diagnosis: Diagnosis = DIAGNOSIS) -> None:
        self.paces, self.diagnosis, self.asked = iter(paces), diagnosis, list[tuple[list[str], float, bool]]()

    def __call__(self, what: Sequence[str], seconds: float, no_trials: bool) -> Diagnosis:
        self.asked.append((list(what), seconds, no_trials))
        for pace in self.paces:
            return dataclasses.replace(self.diagnosis, images_per_s=pace, command="convoy train lenet")
        raise MachineError("the training that was examined was killed")


def test_verify_tries_the_first_change_that_an_option_makes(
    data: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "lenet", "--data", str(data), "--batch", "24"]
    line, paces = f"doctor {shlex.join(words)} --verify", (100.0, 135.0, 131.0, 90.0)
    examine = Examinations(*paces)
    monkeypatch.setattr(doctor, "_examination", examine)
    assert call(f"{line} --seconds 7").out.splitlines()[2:] == [
        "1. end x (process 7): 3.00 × as many samples a second (predicted)",
        "2. --set threads=2: 1.50 × as many samples a second (predicted)",
        "With change 2: convoy train lenet",
        f"Tried: {ADVICE[1].text}, 1.40 × as many samples a second when tried",
    ]
    changed_words = [*words, "--set", "threads=2"]
    assert examine.asked == [(words, 7, False), (changed_words, 7, True), (changed_words, 7, True), (words, 7, True)]
    monkeypatch.setattr(doctor, "_examination", Examinations(*paces))
    advice = call(f"{line} --json").document["advice"][1]
    assert advice["measured"] == pytest.approx(1.4) and advice["turns"] == list(paces)

    monkeypatch.setattr(doctor, "_examination", Examinations(100.0))  # killed then
    output = call(line, status=1)
    assert "2. --set threads=2: 1.50" in output.out, "what was found is said though the change cannot be tried"
    assert output.err.splitlines()[-1] == "convoy: the training that was examined was killed"
    examine_healthy = Examinations(100.0, diagnosis=dataclasses.replace(DIAGNOSIS, advice=()))
    monkeypatch.setattr(doctor, "_examination", examine_healthy)
    assert len(call(line).out.splitlines()) == 2 and len(examine_healthy.asked) == 1


REPLACED = [
    ("train lenet --set threads=1 -v", "--set threads=2", "train lenet -v --set threads=2"),
    ("train lenet --set=threads=1 --seed 3", "--set threads=2", "train lenet --seed 3 --set threads=2"),
    ("RUN --set data.workers=0 --batch=8", "--workers 2", "RUN --batch=8 --workers 2"),
    ("RUN --channels-first --compile", "--channels-last", "RUN --compile --channels-last"),
    ("RUN --plan filter=2 --devices 2 --shares 1,2", "--devices 1", "RUN --devices 1"),
    ("RUN --plan filter=2 --devices 2", "--plan auto", "RUN --devices 2 --plan auto"),
    ("RUN --microbatches 8 --lr 0.1", "--set microbatch=32", "RUN --lr 0.1 --set microbatch=32"),
]


def test_what_is_tried_takes_the_place_of_what_was_given() -> None:
    for line, arguments, result in REPLACED:
        assert doctor.replaced(line.split(), arguments.split()) == result.split()


def test_the_command_that_is_printed_trains_with_the_change(data: Path, run: Path) -> None:
    line = ["lenet", "--data", str(data), "--set", "threads=1"]
    for what, words_before in ((["train", *line], line[:3]), ([str(run)], ["--recipe", str(run / "config.yaml")])):
        command = doctor.with_command(what, DIAGNOSIS).command
        assert command is not None
        _, verb, *words = shlex.split(command)
        assert (verb, words) == ("train", [*words_before, "--set", "threads=2"])
        request = doctor.request_of([], ["train", *words])
        request.check()
        assert request.recipe_of().threads == 2
    with pytest.raises(ConvoyError, match="twice"):  # the negative control: the change at the end of what was typed
        doctor.request_of([], ["train", *line, "--set", "threads=2"]).check()
    no_option = dataclasses.replace(DIAGNOSIS, advice=ADVICE[:1])
    assert doctor.with_command(["train", *line], no_option).command is None


def test_sigterm_ends_it_with_a_sentence_and_a_cursor(data: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(session: Session, budget: Budget, **options: Any) -> None:
        budget.tell("timing updates")
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it has gone on")

    def not_taken(number: int, frame: Any) -> None:
        raise AssertionError("nobody has taken the signal")

    monkeypatch.setattr(doctor_run, "examine", stopped)
    monkeypatch.setattr(doctor_run, "Console", partial(Console, force_terminal=True))
    before = signal.signal(signal.SIGTERM, not_taken)
    try:
        output = call(f"doctor train tiny:TinyNet --data {data} --batch 24", status=1)
        assert signal.getsignal(signal.SIGTERM) is not_taken
    finally:
        signal.signal(signal.SIGTERM, before)
    err = output.err
    assert not output.out and err.endswith("\nconvoy: interrupted\n")  # as Ctrl-C: a terminal's line is to end
    assert err.count(HIDDEN) == err.count(SHOWN) > 0 and err.rindex(HIDDEN) < err.rindex(SHOWN)


@pytest.mark.slow
def test_sigterm_ends_what_verify_has_started(data: Path, start: Callable[[list[str]], Started]) -> None:
    line = f"doctor --verify train tiny:TinyNet --data {data} --batch 24"
    verifying = start([sys.executable, "-m", "convoy", *line.split()])
    wait_for(lambda: bool(children(verifying.process.pid)), 60)
    (child,) = children(verifying.process.pid)
    time.sleep(5)  # so that it is loading, or at work
    verifying.process.terminate()
    output, errors = verifying.end(60)
    assert not output and set(errors.splitlines()) == {"", "convoy: interrupted"}  # of both, perhaps, while one loads
    assert verifying.process.returncode == 1 and not alive(child)


@pytest.mark.slow
def test_what_verify_starts_says_why_it_has_ended() -> None:
    words = [sys.executable, "-m", "convoy", *["doctor", "--verify", "train", "lenet", "--batch", "24", "--data", "."]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stderr.count("convoy: ") == 1 and not done.stdout


@pytest.mark.matrix
def test_verify_on_two_devices(data: Path, folder: Path) -> None:
    line = f"doctor --verify train lenet --data {data} --seconds 15 --devices 2 --batch 48 --microbatches 2"
    words = [sys.executable, "-m", "convoy", *line.split(), "--set", "evaluate_every=1ba"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "on 2 devices, plan sample=2" in done.stdout and "when tried" in done.stdout
    assert not list(folder.iterdir())
