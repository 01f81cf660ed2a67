"""What the tests of data share."""

from pathlib import Path

import pytest

from data.made import write_folder


@pytest.fixture(scope="module")
def photos(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of three classes, for training and for the test so many of each as `PHOTOS` of the module says."""
    root = tmp_path_factory.mktemp("photos")
    for split, num in zip(("train", "val"), getattr(request.module, "PHOTOS", (5, 2)), strict=True):
        write_folder(root / split, ("a", "b", "c"), num=num)
    return root
