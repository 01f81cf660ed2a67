"""What tests of the command line share."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from processes import alive
from started import Started


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
