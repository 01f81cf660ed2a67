"""Output in encodings that lack some of its characters, and output that nobody reads."""

import os
import subprocess
import sys
from pathlib import Path

from started import ENVIRONMENT


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
