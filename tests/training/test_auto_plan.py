"""`--plan auto` in a run: all ranks agree on it, and it keeps to the memory that is said. Races: `planner/`."""

import re
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from convoy.errors import TooLargeError
from convoy.planner.cost.costs import HostCost
from convoy.training import workloads
from ranks import run_ranks
from training.scenarios import session


def notes_of(data: Path, cache: Path, input_s: float | None, *settings: str) -> tuple[str, str, bool]:
    """The plan, what is said, and whether anything that was measured is kept."""
    cost = patch.object(workloads, "measure_input", lambda ready: HostCost(per_sample=input_s))
    try:
        with cost if input_s else nullcontext(), patch.dict("os.environ", {"CONVOY_CACHE": str(cache)}):
            found = session(data, "parallel.plan=auto", *settings)
    except TooLargeError as error:
        return "", str(error), False
    returns = getattr(found.network, "returns_memory", False)
    notes = [*found.notes, *(["freed memory is given back"] if returns else [])]
    return str(found.plan), " ".join(notes), any(cache.rglob("*.json"))


def said(data: Path, cache: Path, cases: dict[str, tuple[str, ...]]) -> dict[str, str]:
    return {name: notes_of(data, cache, None, *settings)[1] for name, settings in cases.items()}


def test_all_ranks_agree_and_what_was_measured_is_kept(data: Path, tmp_path: Path) -> None:
    first, second = run_ranks(notes_of, 2, data, tmp_path / "once", 1.0)
    assert first[0] == second[0] and first[2]
    assert "plan auto: " in first[1] and "Input-bound" in first[1] and "of memory a device" in first[1]
    for plan, notes, kept in run_ranks(notes_of, 2, data, tmp_path / "bits", None, "reproducible=true"):
        assert plan == "sample=2" and "reproducible runs divide samples alone" in notes and not kept


@pytest.mark.slow
def test_plans_keep_to_the_memory_limit(data: Path, tmp_path: Path) -> None:
    cases = {
        "none": ("parallel.plan=auto", "parallel.memory_limit=10kB"),
        "auto": ("parallel.plan=auto", "parallel.memory_limit=90MB"),
        "stages": ("parallel.plan=stage=2", "parallel.memory_limit=90MB"),
        "small": ("parallel.plan=stage=2", "parallel.memory_limit=1kB"),
        "unseen": ("parallel.plan=sample=2", "parallel.memory_limit=90MB", "model.name=tiny:TinyUnseen"),
    }
    first, second = run_ranks(said, 2, data, tmp_path, cases)
    assert first == second
    assert re.match(r"no plan fits.*what the network itself computes takes most", first["none"])
    assert "within 90 MB of memory a device, as --memory-limit says" in first["auto"]
    assert first["stages"].endswith("freed memory is given back")
    assert "that cannot be captured" in first["unseen"]
    assert re.search(r"the plan stage=2 needs [\d.]+ kB on a device.*--memory-limit is 1kB", first["small"])
