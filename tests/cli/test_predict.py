"""`convoy predict` as people and scripts call it: CSV and JSON, folders and names on standard input, pipes, ranks."""

import csv
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.cli import main
from convoy.data.folder import pictures
from started import ENVIRONMENT
from tiny import train_on_pictures, write_pictures


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("predict")
    return train_on_pictures(write_pictures(tmp / "data"), tmp / "run", "--workers", "0")


class Output:
    """What the command line wrote."""

    def __init__(self, capfdbinary: pytest.CaptureFixture[bytes], *arguments: object) -> None:
        capfdbinary.readouterr()
        self.status = main(["predict", *map(str, arguments)])
        out, err = capfdbinary.readouterr()
        self.out, self.err = os.fsdecode(out), err.decode()

    @property
    def rows(self) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(self.out)))


def test_a_folder_gives_csv_in_order(run: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    folder = run.parent / "data" / "val"
    found = Output(capfdbinary, run, folder, "--top", "2")
    assert (found.status, found.err) == (0, "")
    assert found.out.startswith("file,rank,class,probability\n")
    assert [row["file"] for row in found.rows] == [file for file in pictures(folder) for _ in range(2)]
    assert [row["rank"] for row in found.rows[:4]] == ["1", "2", "1", "2"]
    assert {row["class"] for row in found.rows} <= {"a", "b", "c"}
    assert all(0 <= float(row["probability"]) <= 1 for row in found.rows)
    capfdbinary.readouterr()
    assert main(["eval", str(run), "--json"]) == 0
    top1 = json.loads(capfdbinary.readouterr().out)[0]["top1"]
    first = [row for row in found.rows if row["rank"] == "1"]
    assert sum(Path(row["file"]).parent.name == row["class"] for row in first) / len(first) == pytest.approx(top1)


def test_json_has_an_object_a_line(run: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    files = pictures(run.parent / "data" / "val")[:2]
    found = Output(capfdbinary, run, *files, "--json")
    lines = [json.loads(line) for line in found.out.splitlines()]
    assert [line["file"] for line in lines] == files
    assert [len(line["predictions"]) for line in lines] == [3, 3]  # of top 5 as many as there are classes
    assert lines[0]["predictions"][0].keys() == {"class", "probability"}


def test_bad_pictures_are_named_and_counted(
    run: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    good = pictures(run.parent / "data" / "val")[0]
    (tmp_path / "bad\x1b.png").write_text("x")
    found = Output(capfdbinary, run, tmp_path / "bad\x1b.png", good, "--top", "1")
    assert found.status == 2
    assert [row["file"] for row in found.rows] == [good]
    assert found.err.splitlines() == [
        f"{tmp_path}/bad\\x1b.png is no picture in a known format",
        "1 of 2 pictures cannot be read",
    ]
    assert Output(capfdbinary, run, tmp_path, "--skip-bad").status == 0


def test_names_that_are_no_text_or_formulas_are_kept_apart(
    run: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Path(pictures(run.parent / "data" / "val")[0]).read_bytes()
    names = ["=1+1.png", 'a",b.png', os.fsdecode(b"\xff.png")]
    for name in names:
        (tmp_path / name).write_bytes(good)
    monkeypatch.chdir(tmp_path)
    found = Output(capfdbinary, run, *names, "--top", "1", "--trust-code")  # of another folder
    assert [row["file"] for row in found.rows] == ["'=1+1.png", *names[1:]]
    found = Output(capfdbinary, run, *names, "--json", "--trust-code")
    assert [json.loads(line)["file"] for line in found.out.splitlines()] == names


@pytest.mark.timeout(60)
def test_what_is_no_file_is_named(run: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    good = pictures(run.parent / "data" / "val")[0]
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        places = [
            tmp_path / "pipe",
            tmp_path / "socket",
            "/dev/zero",
            "/dev/null",
            "/proc/cpuinfo",
        ]
        found = Output(capfdbinary, run, *places, good, "--top", "1")
    assert found.status == 2
    assert [row["file"] for row in found.rows] == [good]
    words = ["a pipe or a device", "cannot be read (", "a pipe or a device", "a pipe or a device"]
    words += ["is no picture in a known format", "5 of 6 pictures cannot be read"]
    said = found.err.splitlines()
    assert len(said) == 6 and all(words in line for words, line in zip(words, said, strict=True)), said


def predict(run: Path, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "convoy", "predict", str(run), *map(str, arguments)]


@pytest.mark.slow
def test_names_come_by_standard_input_and_ranks_change_nothing(run: Path, tmp_path: Path) -> None:
    files = pictures(run.parent / "data")
    (tmp_path / "bad.png").write_text("x")
    names = os.fsencode("\n".join([*files[:9], str(tmp_path / "bad.png"), "", *files[9:]]) + "\r\n")
    found = [
        subprocess.run(
            predict(run, "-", "--batch", "4", "--devices", str(devices)),
            input=names,
            env=ENVIRONMENT,
            capture_output=True,
            check=False,
            timeout=150,
        )
        for devices in (1, 2)
    ]
    assert [each.returncode for each in found] == [2, 2], found
    assert found[0].stdout == found[1].stdout
    rows = list(csv.DictReader(io.StringIO(found[0].stdout.decode())))
    assert [row["file"] for row in rows if row["rank"] == "1"] == files
    assert found[1].stderr.decode().splitlines()[-1] == f"1 of {len(files) + 1} pictures cannot be read"


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_pipe_that_closes_ends_it_without_a_word(run: Path, devices: int) -> None:
    many = [run.parent / "data"] * 40
    line = predict(run, *many, "--batch", "1", "--devices", devices)
    with subprocess.Popen(line, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"file,rank,class,probability\n"
        process.stdout.close()
        assert process.wait(120) == 1
        assert process.stderr.read() == b""
