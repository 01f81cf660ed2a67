"""Frozen runs: their losses and weights are those of before, to nine digits. For exact bits see `bits.py`."""

from pathlib import Path

import pytest

from convoy.cli import main
from frozen.golden import golden, unlike
from frozen.runs import RUNS, SAME, arguments, numbers, write_data
from ranks import run_ranks
from whole_runs import as_before

FAST = ("serial", "dropout")


def train(command: list[str]) -> int:
    """As one of the ranks that torchrun starts."""
    with as_before():
        return main(command)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("frozen") / "data")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in RUNS])
def test_a_run_gives_what_it_gave(name: str, data: Path, tmp_path: Path) -> None:
    command, count = arguments(name, data, tmp_path / "run", double=True), 1 if name == "serial" else 2
    assert run_ranks(train, count, command, join=False) == [0] * count
    now = numbers(tmp_path / "run")
    assert unlike(now, golden("runs.json", SAME[0] if name in SAME else name, now)) == []
