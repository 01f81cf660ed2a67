"""What tests of the command line share: a data set and runs that nobody changes, lines in this process, and runs in
processes of their own."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.calls import UPDATES, Call, Output
from convoy.cli import main
from processes import alive
from started import Started, command
from tiny import train_on_pictures, write_pictures
from whole_runs import as_before


@pytest.fixture(scope="session")
def run(data: Path) -> Path:
    """A run of four epochs that has ended."""
    out = data.parent / "run"
    line = f"train tiny:TinyNet --data {data} --batch 24 --epochs 4 --lr 0.05 --set threads=1 --out {out}"
    assert main(line.split()) == 0
    return out


@pytest.fixture(scope="session")
def pictures_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on pictures, which lie in `data` beside it, with a checkpoint in its middle."""
    folder = tmp_path_factory.mktemp("pictures")
    options = ("--workers", "0", "--set", "checkpoint.every=2ba")
    return train_on_pictures(write_pictures(folder / "data"), folder / "run", *options)


@pytest.fixture(scope="session")
def serial(data: Path) -> Path:
    """What `started.command` trains, on one device."""
    out = data.parent / "serial"
    with as_before():
        assert main(command(data, out, epochs=UPDATES)[3:]) == 0
    return out


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    def run_line(line: str | list[str], status: int | None = 0) -> Output:
        capfd.readouterr()
        output = Output(main(line.split() if isinstance(line, str) else line), *capfd.readouterr())
        assert status in (None, output.status), output
        return output

    return run_line


@pytest.fixture
def start() -> Iterator[Callable[[list[str]], Started]]:
    runs: list[Started] = []

    def begin(arguments: list[str]) -> Started:
        runs.append(Started(arguments))
        return runs[-1]

    yield begin
    for run in runs:
        ranks = run.ranks().values() if run.process.poll() is None else []
        for pid in (*ranks, run.process.pid):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        run.process.communicate()
