"""Output in encodings that lack some of its characters, and output that nobody reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from started import ENVIRONMENT, command
from tiny import write_mnist

PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "", "PYTHONCOERCECLOCALE": "0"}


def convoy(line: str, variables: dict[str, str], **options: object) -> subprocess.CompletedProcess[bytes]:
    environment = {key: value for key, value in (ENVIRONMENT | variables).items() if value}
    words = [sys.executable, "-m", "convoy", *line.split()]
    return subprocess.run(words, env=environment, timeout=100, check=False, **{"stderr": subprocess.PIPE} | options)  # type: ignore[call-overload,no-any-return]


def test_what_nobody_reads_is_no_failure_and_what_is_lost_is_one() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = convoy("recipes --keys", {}, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    with Path("/dev/full").open("wb") as full:
        done = convoy("recipes --keys", {}, stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith(b"convoy: standard output could not be written (No space left on device): ")
    closed = ["sh", "-c", '"$@" >&- 2>&-', "sh", sys.executable, "-m", "convoy", "recipes"]
    assert subprocess.run(closed, env=ENVIRONMENT, timeout=100, check=False).returncode == 0


@pytest.mark.slow
def test_a_training_goes_on_without_readers_and_without_unicode(tmp_path: Path) -> None:
    data, out = write_mnist(tmp_path / "dätä"), tmp_path / "läuft"
    words = command(data, out, "--devices", "2", epochs="2ba")
    environment = {key: value for key, value in (ENVIRONMENT | PLAIN).items() if value}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert any(b"28" in line for line in process.stdout)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0 and (out / "weights.safetensors").is_file()
    assert "standard output could not be written (Broken pipe)" in (out / "summary.json").read_text()
    assert "dätä" in (out / "config.yaml").read_text(encoding="utf-8")
