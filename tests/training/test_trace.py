"""How many files of Convoy a training goes through: from `main` to the first batch, and in each update after that.

A reader who follows an update goes through these files too. What is added there is paid by everybody, so the numbers
only ever go down.
"""

import inspect
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import convoy
from convoy.cli import main
from ranks import run_ranks
from whole_runs import as_before

MOST_BEFORE, MOST_IN_AN_UPDATE = 100, 32
ROOT = Path(convoy.__file__).parent
UPDATES = 78
QUIET = range(66, 77)
"""Updates to which nothing else is due: no line of metrics, no evaluation, no checkpoint; and nobody watches calls."""


def files_entered(command: list[str]) -> tuple[list[str], list[list[str]]]:
    """The files of which some function is called in the main thread: before the first batch, and from asking for each
    batch until the next one is asked for."""
    sets: list[set[str]] = [set()]
    names: dict[Any, str] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in names:
            path = Path(code.co_filename)
            names[code] = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
        if names[code] == "training/recorder.py" and code.co_name == "ask":
            sets.append(set())
        if names[code] and code.co_flags & inspect.CO_OPTIMIZED:  # no module or class that is made as it is imported
            sets[-1].add(names[code])

    with as_before():
        sys.setprofile(note)
        try:
            assert main(command) == 0
        finally:
            sys.setprofile(None)
    return sorted(sets[0]), [sorted(files) for files in sets[1:]]


def test_an_update_and_the_way_to_it_go_through_few_files(data: Path, tmp_path: Path) -> None:
    settings = {"epochs": f"{UPDATES}ba", "evaluate_every": "1000ba", "checkpoint.every": "1000ba", "log_every": "20ba"}
    command = f"train lenet --plan sample=2 --batch 32 --data {data} --out {tmp_path / 'run'}".split()
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    (before, updates), _ = run_ranks(files_entered, 2, command, join=False, timeout=170)
    assert len(updates) == UPDATES
    steady = min((updates[number] for number in QUIET), key=len)  # now and then a bar moves, and ranks meet
    assert len(before) <= MOST_BEFORE, before
    assert len(steady) <= MOST_IN_AN_UPDATE, steady
