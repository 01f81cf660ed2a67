"""`convoy predict` as people and scripts call it: CSV and JSON, folders and names on standard input, pipes, ranks."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.calls import Call
from convoy.data.folder import pictures
from started import ENVIRONMENT


@pytest.fixture(scope="module")
def val(pictures_run: Path) -> Path:
    """The folder of pictures that the run was tested on."""
    return pictures_run.parent / "data" / "val"


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_folder_gives_csv_in_order_and_files_give_an_object_a_line(pictures_run: Path, val: Path, call: Call) -> None:
    table = call(["predict", str(pictures_run), str(val), "--top", "2"])
    assert table.err == "" and table.out.startswith("file,rank,class,probability\n")
    lines = rows(table.out)
    assert [row["file"] for row in lines] == [file for file in pictures(val) for _ in range(2)]
    assert [row["rank"] for row in lines[:4]] == ["1", "2", "1", "2"]
    assert {row["class"] for row in lines} <= {"a", "b", "c"}
    assert all(0 <= float(row["probability"]) <= 1 for row in lines)
    first = [row for row in lines if row["rank"] == "1"]
    right = sum(Path(row["file"]).parent.name == row["class"] for row in first)
    assert call(["eval", str(pictures_run), "--json"]).document[0]["top1"] == pytest.approx(right / len(first))

    files = pictures(val)[:2]
    lines = [json.loads(line) for line in call(["predict", str(pictures_run), *files, "--json"]).out.splitlines()]
    assert [line["file"] for line in lines] == files
    assert [len(line["predictions"]) for line in lines] == [3, 3]  # of top 5 as many as there are classes
    assert lines[0]["predictions"][0].keys() == {"class", "probability"}


@pytest.mark.timeout(100)
def test_what_is_no_picture_is_named_and_counted(pictures_run: Path, val: Path, tmp_path: Path, call: Call) -> None:
    picture = pictures(val)[0]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bad\x1b.png").write_text("x")
    bad = [str(tmp_path / "bad\x1b.png"), str(tmp_path / "pipe"), "/dev/zero"]
    output = call(["predict", str(pictures_run), *bad, picture, "--top", "1"], status=2)
    assert [row["file"] for row in rows(output.out)] == [picture]
    first, *pipes, last = output.err.splitlines()
    assert "bad\\x1b.png is no picture in a known format" in first and last == "3 of 4 pictures cannot be read"
    assert all("a pipe or a device" in line for line in pipes)
    call(["predict", str(pictures_run), bad[0], picture, "--skip-bad"])


@pytest.mark.slow
def test_names_come_by_standard_input_to_two_devices(pictures_run: Path, val: Path, tmp_path: Path) -> None:
    files = pictures(val.parent)
    (tmp_path / "bad.png").write_text("x")
    names = os.fsencode("\n".join([*files[:9], str(tmp_path / "bad.png"), "", *files[9:]]) + "\r\n")
    line = [sys.executable, "-m", "convoy", "predict", str(pictures_run), "-", "--batch", "4", "--devices", "2"]
    done = subprocess.run(line, input=names, env=ENVIRONMENT, capture_output=True, check=False, timeout=150)
    assert done.returncode == 2
    assert [row["file"] for row in rows(done.stdout.decode()) if row["rank"] == "1"] == files
    assert done.stderr.decode().splitlines()[-1] == f"1 of {len(files) + 1} pictures cannot be read"
