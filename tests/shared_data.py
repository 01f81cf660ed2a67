"""Finds the real data sets that lie beside a checkout; tests that need them skip where they are absent."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared(path: str) -> Path:
    """The file or folder `path` of the shared data, or a skip that says what is missing."""
    found = FOLDER / path
    if not found.exists():
        pytest.skip(f"needs the real data set {path} in ../shared/data beside the checkout")
    return found
