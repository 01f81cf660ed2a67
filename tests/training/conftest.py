"""Data that trainings share, and torch's switches as they were before each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiny import write_pictures


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders, which no test changes."""
    return write_pictures(tmp_path_factory.mktemp("photos") / "data", size=(100, 75))


@pytest.fixture(autouse=True)
def _switches_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    if torch.are_deterministic_algorithms_enabled():  # the call imports much
        torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(threads)
