"""What is wrong with a disk is said of its own folder only."""

import errno
from pathlib import Path

import pytest

from convoy.errors import ConvoyError
from convoy.training.run_directory import disk_explained


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        OSError(errno.EIO, "Input/output error"),
        OSError("image file is truncated"),
        PermissionError(errno.EACCES, "Permission denied", "/elsewhere/picture"),
    ],
)
def test_what_is_not_about_the_folder_is_not_explained_by_it(tmp_path: Path, error: OSError) -> None:
    with pytest.raises(type(error)) as raised, disk_explained(tmp_path):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), None])
def test_a_full_disk_and_a_file_of_the_folder_are(tmp_path: Path, error: OSError | None) -> None:
    own = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "metrics.jsonl"))
    with pytest.raises(ConvoyError, match=f"cannot write to {tmp_path} "), disk_explained(tmp_path):
        raise error or own
