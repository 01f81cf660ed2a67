"""`convoy doctor`: what it prints of a training and of a run, and what it refuses."""

import dataclasses
import json
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

from convoy.cli import doctor, doctor_run, main
from convoy.doctor.advice import Advice
from convoy.doctor.diagnosis import Diagnosis
from convoy.errors import ConvoyError, MachineError
from convoy.progress import ConsoleReporter
from convoy.terminal import Console
from convoy.training import Session, load_recipe, train
from convoy.training.budget import Budget
from processes import alive, children
from started import Started, wait_for
from tiny import write_mnist, write_pictures

SETTINGS = ["--set", "threads=1", "--batch", "24"]
SHORT = ["--seconds", "3", "--no-trials"]
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
"""What hides a terminal's cursor, and what shows it."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("doctor") / "data")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("doctor") / "run"
    settings = {"data.path": data, "model.name": "tiny:TinyNet", "batch": 24, "epochs": "2ba", "threads": 1}
    settings |= {"optimizer.lr": 0.1, "data.workers": 0}
    train(
        load_recipe("default", [f"{key}={value}" for key, value in settings.items()]), out, reporter=ConsoleReporter()
    )
    return out


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["doctor", *arguments]) == 0
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert not list(Path.cwd().iterdir())
    return out


def test_of_a_command_line_it_is_said_in_a_few_lines(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(["train", "tiny:TinyNet", "--data", str(data), "--seconds", "8", *SETTINGS], capsys).splitlines()
    assert lines[0].startswith("tiny:TinyNet on one device: ") and lines[0].endswith(" for an update of 24")
    assert lines[1].endswith(".")
    changes = [line for line in lines[2:] if "(predicted)" in line]
    assert len(changes) <= 3 and all(line.startswith(f"{n}. ") for n, line in enumerate(changes, 1))
    others = ("Another training: ", "With change ", "There was no time", "The pace changed", "An update takes")
    assert all(line.startswith(others) for line in lines[2 + len(changes) :])


def test_json_is_all_that_is_printed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(said(["train", "lenet", "--data", str(data), "--json", *SHORT, *SETTINGS], capsys))
    assert list(document) == [field.name for field in dataclasses.fields(Diagnosis)]
    assert all(list(one) == [field.name for field in dataclasses.fields(Advice)] for one in document["advice"])
    assert (document["model"], document["devices"], document["batch"]) == ("lenet", 1, 24)
    assert Diagnosis.from_document(document).to_document() == json.loads(json.dumps(document)) | {
        "advice": tuple(one | {"arguments": tuple(one["arguments"]), "turns": ()} for one in document["advice"]),
        "notes": tuple(document["notes"]),
    }


def test_pictures_that_cannot_be_read_are_skipped_and_counted(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = write_pictures(tmp_path_factory.mktemp("broken") / "photos", size=(100, 75))
    bad = sorted((photos / "train").rglob("*.png"))[0]
    bad.write_bytes(bad.read_bytes()[:200])
    words = ["train", "tiny:TinyNet", "--data", str(photos), *SHORT, *SETTINGS]
    size = ["--set", "data.image_size=28", "--set", "data.workers=0", "--set", "data.channels=1"]
    assert f"1 picture cannot be read: convoy data {photos} --check names them" in said([*words, *size], capsys)


def test_of_a_run_it_is_as_it_was_begun_or_with_other_options(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for options, batch in (([], 24), (["--batch", "16"], 16)):
        document = json.loads(said([str(run), *options, "--trust-code", "--json", *SHORT], capsys))
        assert (document["model"], document["batch"]) == ("tiny:TinyNet", batch)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


FOUND = Diagnosis(
    "lenet",
    "photos",
    1,
    "serial",
    64,
    100.0,
    0.64,
    {"forward": 0.6},
    "It is slow.",
    (
        Advice("busy", "end x (process 7)", (), 3.0, "It is slow."),
        Advice("threads", "--set threads=2", ("--set", "threads=2"), 1.5, "Threads and cores do not go together."),
    ),
)


def test_verify_tries_the_first_change_that_an_option_makes(
    monkeypatch: pytest.MonkeyPatch, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paces = (100.0, 135.0, 131.0, 90.0)
    asked: list[tuple[list[str], float, bool]] = []

    def examination(what: Sequence[str], seconds: float, no_trials: bool) -> Diagnosis:
        asked.append((list(what), seconds, no_trials))
        return dataclasses.replace(FOUND, images_per_s=paces[len(asked) - 1], command="convoy train lenet")

    monkeypatch.setattr(doctor, "_examination", examination)
    line = ["train", "lenet", "--data", str(data), "--batch", "24"]
    assert said([*line, "--verify", "--seconds", "7"], capsys).splitlines()[2:] == [
        "1. end x (process 7): 3.00 × as many samples a second (predicted)",
        "2. --set threads=2: 1.50 × as many samples a second (predicted)",
        "With change 2: convoy train lenet",
        f"Tried: {FOUND.advice[1].text}, 1.40 × as many samples a second when tried",
    ]
    changed = [*line, "--set", "threads=2"]
    assert asked == [(line, 7, False), (changed, 7, True), (changed, 7, True), (line, 7, True)]
    asked.clear()
    found = json.loads(said([*line, "--verify", "--json"], capsys))["advice"][1]
    assert found["measured"] == pytest.approx(1.4) and found["turns"] == list(paces)


def test_what_was_found_is_said_though_the_change_cannot_be_tried(
    monkeypatch: pytest.MonkeyPatch, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = iter([FOUND])

    def examination(what: Sequence[str], seconds: float, no_trials: bool) -> Diagnosis:
        for one in found:
            return one
        raise MachineError("the training that was examined was killed")

    monkeypatch.setattr(doctor, "_examination", examination)
    assert main(["doctor", "train", "lenet", "--data", str(data), "--verify"]) == 1
    out, err = capsys.readouterr()
    assert out == f"{FOUND.text()}\n"
    assert err.splitlines() == [
        "training 1 of 3, with --set threads=2",
        "convoy: the training that was examined was killed",
    ]


def test_verify_of_a_healthy_training_tries_nothing(
    monkeypatch: pytest.MonkeyPatch, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    healthy = dataclasses.replace(FOUND, advice=())
    monkeypatch.setattr(doctor, "_examination", lambda what, *_, **options: (asked.append(what), healthy)[1])
    assert len(said(["train", "lenet", "--data", str(data), "--verify"], capsys).splitlines()) == 2
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("line", "arguments", "wanted"),
    [
        ("train lenet --set threads=1 -v", "--set threads=2", "train lenet -v --set threads=2"),
        ("train lenet --set=threads=1 --seed 3", "--set threads=2", "train lenet --seed 3 --set threads=2"),
        ("RUN --set data.workers=0 --batch=8", "--workers 2", "RUN --batch=8 --workers 2"),
        ("RUN --channels-first --compile", "--channels-last", "RUN --compile --channels-last"),
        ("RUN --plan filter=2 --devices 2 --shares 1,2", "--devices 1", "RUN --devices 1"),
        ("RUN --plan filter=2 --devices 2", "--plan auto", "RUN --devices 2 --plan auto"),
        ("RUN --microbatches 8 --lr 0.1", "--set microbatch=32", "RUN --lr 0.1 --set microbatch=32"),
    ],
)
def test_what_is_tried_takes_the_place_of_what_was_given(line: str, arguments: str, wanted: str) -> None:
    assert doctor.replaced(line.split(), arguments.split()) == wanted.split()


def test_the_command_that_is_printed_trains_with_the_change(data: Path, run: Path) -> None:
    line = ["lenet", "--data", str(data), "--set", "threads=1"]
    for what, kept in ((["train", *line], line[:3]), ([str(run)], ["--recipe", str(run / "config.yaml")])):
        command = doctor.with_command(what, FOUND).command
        assert command is not None
        _, verb, *words = shlex.split(command)
        assert (verb, words) == ("train", [*kept, "--set", "threads=2"])
        request = doctor.request_of([], ["train", *words])
        request.check()
        assert request.recipe_of().threads == 2
    with pytest.raises(ConvoyError, match="twice"):  # the negative control: the change at the end of what was typed
        doctor.request_of([], ["train", *line, "--set", "threads=2"]).check()
    assert doctor.with_command(["train", *line], dataclasses.replace(FOUND, advice=FOUND.advice[:1])).command is None


def test_sigterm_ends_it_with_a_sentence_and_a_cursor(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
        assert main(["doctor", "train", "tiny:TinyNet", "--data", str(data), "--batch", "24"]) == 1
        assert signal.getsignal(signal.SIGTERM) is not_taken
    finally:
        signal.signal(signal.SIGTERM, before)
    out, err = capsys.readouterr()
    assert not out and err.endswith("\nconvoy: interrupted\n")  # as Ctrl-C, after which a terminal's line is to end
    assert err.count(HIDDEN) == err.count(SHOWN) > 0 and err.rindex(HIDDEN) < err.rindex(SHOWN)


@pytest.mark.slow
def test_sigterm_ends_what_verify_has_started(data: Path, start: Callable[[list[str]], Started]) -> None:
    line = [sys.executable, "-m", "convoy", "doctor", "--verify", "train", "tiny:TinyNet", "--data", str(data)]
    verifying = start([*line, "--batch", "24"])
    wait_for(lambda: bool(children(verifying.process.pid)), 60)
    (child,) = children(verifying.process.pid)
    time.sleep(5)  # so that it is loading, or at work
    verifying.process.terminate()
    output, errors = verifying.end(60)
    assert not output and set(errors.splitlines()) == {"", "convoy: interrupted"}  # of both, perhaps, while one loads
    assert verifying.process.returncode == 1 and not alive(child)


def test_more_devices_than_cores_are_said_to_take_turns(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("convoy.launch.cores.own_cores", lambda: [0, 1])
    monkeypatch.setattr("convoy.launch.start", lambda *of: 0)
    for devices, words in ((3, ["3 devices share 2 cores and compute in turns: that is no faster than 2"]), (2, [])):
        assert main(["doctor", str(run), "--trust-code", "--plan", f"stage={devices}"]) == 0
        assert capsys.readouterr().err.splitlines() == words


@pytest.mark.matrix
def test_verify_on_two_devices(data: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "convoy", "doctor", "--verify", "train", "lenet", "--data", str(data), "--seconds"]
    line += ["15", "--devices", "2", "--batch", "48", "--microbatches", "2", "--set", "evaluate_every=1ba"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "on 2 devices, plan sample=2" in done.stdout and "when tried" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_verify_starts_says_why_it_has_ended(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "convoy", "doctor", "--verify", "train", "lenet", "--batch", "24", "--data", "."]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stderr.count("convoy: ") == 1 and not done.stdout


NO_RUN = "is no run directory: name one, or write convoy doctor train MODEL"
WRONG = {
    "no run": ("none", NO_RUN),
    "a folder that is none": (".", NO_RUN),
    "nothing": ("", "missing argument 'RUN|train"),
    "no network": ("train --data {data}", "nothing to train: give a MODEL"),
    "unknown network": ("train lenett --data {data}", "did you mean lenet"),
    "unknown option": ("train lenet --data {data} --bacth 3", "did you mean --batch"),
    "where the options are": ("train lenet --data {data} --bacth 3", "see convoy train --help"),
    "unknown option of its own": ("--verfy train lenet", "no such option --verfy: did you mean --verify?"),
    "unknown option of a run": ("{run} --bacth 3", "did you mean --batch"),
    "no data": ("train lenet --data {tmp}/none", "does not exist"),
    "an empty data set": ("train lenet --data {tmp}", "{tmp}"),
    "a batch that is too large": ("train lenet --data {data} --batch 1000", "96 training samples"),
    "a run to go on with": ("train lenet --data {data} --resume", "--resume"),
    "a run that is made longer": ("train lenet --data {data} --extend 8", "--extend is for a run"),
    "an output": ("train lenet --data {data} --out x", "--out is for a run, but the doctor leaves none"),
    "negative time": ("--seconds -1 train lenet", "-1"),
    "no time": ("--seconds long train lenet", "'long' is not a valid float"),
    "no end": ("train lenet --data {data} --seconds inf", "--seconds inf is no time: give a number"),
    "no number of seconds": ("train lenet --data {data} --seconds nan", "--seconds nan is no time: give a number"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_sentence(mistake: str, data: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, words = (text.format(data=data, run=run, tmp=Path.cwd()) for text in WRONG[mistake])
    assert main(["doctor", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("convoy: ")
    assert words in err
    assert not list(Path.cwd().iterdir())


def test_a_damaged_recipe_of_a_run_is_refused(
    run: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path_factory.mktemp("damaged")
    (copy / "config.yaml").write_text((run / "config.yaml").read_text()[:40] + ": [")
    assert main(["doctor", str(copy)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_ranks_that_torchrun_has_started_do_not_verify(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 2), ("MASTER_PORT", 1), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert main(["doctor", "train", "lenet", "--data", str(data), "--verify"]) == 2
    assert "--verify starts the training a second time, but here torchrun has" in capsys.readouterr().err


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(["--help"], capsys)
    assert "convoy doctor train resnet18 --data photos/" in out and "convoy doctor runs/photos" in out
    assert "--verify" in out and "Try no change, and say nothing of batch" in " ".join(out.split())


def test_what_breaks_in_the_machine_is_no_mistake(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> int:
        raise MachineError("the disk does not answer")

    monkeypatch.setattr("convoy.cli.doctor_run.run", broken)
    assert main(["doctor", "train", "lenet", "--data", str(data)]) == 1
    assert capsys.readouterr().err == "convoy: the disk does not answer\n"
