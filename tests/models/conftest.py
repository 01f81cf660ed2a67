"""What several test files need: torchvision and timm where they import, and one thread."""

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def torchvision_models() -> ModuleType:
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:  # RuntimeError: a wheel made for another build of torch
        pytest.skip(f"needs a torchvision that imports beside torch {torch.__version__} ({error})")


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    try:
        return importlib.import_module("timm")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs timm and the torchvision that it imports ({error})")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
