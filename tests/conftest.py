"""What holds for all tests."""

import atexit
import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from short import measure_shortly

# A shell starts background jobs with SIGINT ignored, and processes pass that on to their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup does so with SIGHUP, which would then stop no run.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Two tests at a time share the cores: threads that wait leave them to others.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# Hundreds of processes import the same modules: the first of them keeps the bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Without a GPU Triton interprets kernels, also where torch._dynamo imports it first, here or in a rank.
if not any(Path(file).exists() for file in ("/dev/nvidiactl", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Runs and plans keep what they measure: here, not in the user's profile store.
_cache = tempfile.TemporaryDirectory(prefix="convoy-tests-")
atexit.register(_cache.cleanup)
os.environ["CONVOY_CACHE"] = _cache.name
os.environ["CONVOY_SHARED"] = "1"  # whatever else runs beside the tests


def pytest_collection_finish() -> None:
    """Planning and training look for garbage: not among what torch and thousands of tests keep, half a second each."""
    measure_shortly()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Ranks note in their environment through which interface they talk: later tests begin as the first."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() | before.keys():
        if name != "PYTEST_CURRENT_TEST" and os.environ.get(name) != before.get(name):
            os.environ.pop(name, None) if name not in before else os.environ.update({name: before[name]})


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MNIST's files, which no test changes."""
    from tiny import write_mnist  # which loads torch

    return write_mnist(tmp_path_factory.mktemp("mnist") / "data")
