"""Files that are whole or not there."""

import json
import math
from pathlib import Path

import pytest

from convoy.training.files import to_json, write_atomically, write_json


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
