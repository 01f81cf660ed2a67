"""What holds for all tests."""

import atexit
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

# A shell starts background jobs with SIGINT ignored, and processes pass that on to their children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Runs and plans keep what they measure: here, not in the user's profile store.
_cache = tempfile.TemporaryDirectory(prefix="convoy-tests-")
atexit.register(_cache.cleanup)
os.environ["CONVOY_CACHE"] = _cache.name


_TESTS = Path(__file__).parent
_START_RANKS = {"benchmarks", "cli", "engine", "launch", "planning", "training"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Under `-n 2 --dist loadgroup`, tests that start ranks take turns, beside those that do not: two runs at a time
    would push each other off the cores."""
    for item in items:
        place = item.path.relative_to(_TESTS).parts
        item.add_marker(pytest.mark.xdist_group("ranks" if place[0] in _START_RANKS else "-".join(place)))


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Ranks note in their environment through which interface they talk: later tests begin as the first."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() | before.keys():
        if name != "PYTEST_CURRENT_TEST" and os.environ.get(name) != before.get(name):
            os.environ.pop(name, None) if name not in before else os.environ.update({name: before[name]})
