"""Files that are whole or not there."""

import errno
import json
import math
import os
from pathlib import Path

import pytest

from convoy.files import to_json, unwritable, write_atomically, write_json


def test_json_is_strict() -> None:
    text = to_json({"a": math.nan, "b": [math.inf, 1.5], "c": "é"})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": "é"}


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, 1)

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        write_atomically(path, fail)
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
    assert path.read_text() == "1\n"


def test_whether_a_folder_can_be_written_is_tried_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert unwritable(tmp_path) is None
    assert unwritable(tmp_path / "a" / "b") is None
    assert unwritable(tmp_path / "file") == os.strerror(errno.ENOTDIR)
    assert unwritable(tmp_path / "file" / "run") == os.strerror(errno.ENOTDIR)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    if Path("/proc/self").is_dir():  # nobody, whatever his rights, makes a folder there
        assert unwritable(Path("/proc/nowhere/run")) is not None
