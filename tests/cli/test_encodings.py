"""Output in encodings that lack some of its characters, and output that nobody reads."""

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from convoy import terminal
from data.made import write_folder
from started import ENVIRONMENT, command
from tiny import write_mnist

PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "", "PYTHONCOERCECLOCALE": "0"}
WAYS = [("ascii", PLAIN), ("ascii", {"PYTHONIOENCODING": "ascii"}), ("latin-1", {"PYTHONIOENCODING": "latin-1"})]


def convoy(
    arguments: Sequence[str], variables: dict[str, str], **options: object
) -> subprocess.CompletedProcess[bytes]:
    environment = {key: value for key, value in (ENVIRONMENT | variables).items() if value}
    words = [sys.executable, "-m", "convoy", *arguments]
    return subprocess.run(words, env=environment, timeout=100, check=False, **{"capture_output": True} | options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(("encoding", "variables"), WAYS, ids=["locale", "ascii", "latin-1"])
def test_what_an_encoding_lacks_is_written_in_ascii(encoding: str, variables: dict[str, str], tmp_path: Path) -> None:
    root = write_folder(tmp_path / "Käse…", ("图", "ö"), num=4, width=12, height=12)
    found = convoy(["data", str(root)], variables)
    said = found.stdout.decode(encoding) + found.stderr.decode(encoding)
    assert found.returncode == 0, said
    assert ("3x12x12" if encoding == "ascii" else "3×12×12") in said
    missing = convoy(["data", f"{root}→"], variables)
    assert missing.returncode == 2
    sentence = missing.stderr.decode(encoding)
    assert "...-> does not exist: did you mean" in sentence and sentence.count("\n") == 1


@pytest.mark.parametrize("words", ["--help", "recipes --keys", "recipes imagenet-90", "train --help"])
def test_no_verb_fails_for_its_characters(words: str) -> None:
    found = convoy(words.split(), PLAIN)
    assert (found.returncode, found.stderr) == (0, b"")
    assert found.stdout.decode("ascii")


def test_every_sign_that_is_written_has_a_form_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "ascii", "strict"))
    terminal.write_to_any()
    print("8×8 … −1 ± 2 µs → ½ 图\udcc3", end="", flush=True)
    written = sys.stdout.buffer
    assert isinstance(written, io.BytesIO)
    assert written.getvalue() == rb"8x8 ... -1 +- 2 us -> 1/2 \u56fe\udcc3"


def test_streams_that_are_closed_take_what_they_are_given(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", width=12, height=12)
    words = ["sh", "-c", '"$@" >&- 2>&-', "sh", sys.executable, "-m", "convoy", "data", str(root)]
    assert subprocess.run(words, env=ENVIRONMENT, timeout=100, check=False).returncode == 0


@pytest.mark.parametrize("devices", ["1", "2"])
def test_a_training_goes_on_without_readers_and_without_unicode(devices: str, tmp_path: Path) -> None:
    data, out = write_mnist(tmp_path / "dätä"), tmp_path / "läuft"
    words = command(data, out, "--devices", devices, epochs="2ba")
    environment = {key: value for key, value in (ENVIRONMENT | PLAIN).items() if value}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert b"1x28x28" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert "standard output could not be written (Broken pipe)" in (out / "summary.json").read_text()
    assert (out / "weights.safetensors").is_file()
    assert "dätä" in (out / "config.yaml").read_text(encoding="utf-8")
    assert os.fsencode(out).endswith("läuft".encode())


@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_training_goes_on_where_its_log_is_full(devices: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = command(write_mnist(tmp_path / "data"), out, "--devices", devices, epochs="2ba")
    with Path("/dev/full").open("wb") as full:
        assert (
            subprocess.run(words, env=ENVIRONMENT, stdout=full, stderr=full, timeout=100, check=False).returncode == 0
        )
    said = (out / "summary.json").read_text()
    assert "standard output could not be written (No space left on device)" in said and '"finished"' in said


@pytest.mark.parametrize("words", ["models", "recipes --keys", "eval --help"])
def test_what_nobody_reads_is_no_failure_and_what_is_lost_is_one(words: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    found = convoy(words.split(), {}, capture_output=False, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    assert (found.returncode, found.stderr) == (0, b"")
    with Path("/dev/full").open("wb") as full:
        found = convoy(words.split(), {}, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert found.returncode == 1
    assert found.stderr.startswith(b"convoy: standard output could not be written (No space left on device): ")
