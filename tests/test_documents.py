"""Files that people write are YAML 1.2 or refused by name; files that Convoy writes are whole or not there."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from convoy.documents import dump, parse, read_mapping
from convoy.errors import ConvoyError
from convoy.files import to_json, write_atomically, write_json

VALUES: dict[str, Any] = {
    "1e-3": 1e-3, "1E5": 1e5, ".5": 0.5, "5.": 5.0, "-2": -2, "090": 90, "0x10": "0x10", "1_000": "1_000", "no": "no",
    "on": "on", "True": True, "false": False, "null": None, "~": None, "": None, "1:30": "1:30", "1.2.3": "1.2.3",
    "2026-01-01": "2026-01-01", "'1'": "1", "[1, a, 2.5]": [1, "a", 2.5],
}  # fmt: skip


def test_values_are_those_of_yaml_1_2_and_read_back_the_same() -> None:
    for text, value in VALUES.items():
        assert repr(parse(text, "test")) == repr(value), text
    for value in (*VALUES, *VALUES.values(), 1e300, 0.1, 1, "a: b", "é", [1, "2"]):
        assert repr(parse(dump({"key": value}), "test")["key"]) == repr(value)


@pytest.mark.timeout(60)
def test_a_bad_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text, words in (
        ("a: 1\nb: [1\n", "line 3"),
        ("a: 1\na: 2\n", "line 2: the key a is twice"),
        ("x: !!python/object/apply:os.system [echo]\ny: 1", "line 1"),
        ("{[1]: 2}\n", "plain word"),
        ("text\n", "is not a recipe"),
        ("a: " + "9" * 5000, "no YAML"),
        ("[" * 3000, "no YAML|expected"),
        ("a: &0 [x]\n" + "".join(f"b{i}: &{i + 1} [{f'*{i}, ' * 9}]\n" for i in range(60)), "line 2: write the value"),
        ("a: " + "x" * 2**20, "more than 1,048,576 characters"),
    ):
        path.write_text(text)
        with pytest.raises(ConvoyError, match=words) as caught:
            read_mapping(path, "recipe")
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "picture.yaml").write_bytes(b"\x89PNG\xff\xfe")
    for name, words in (
        ("/dev/zero", "more than 1,048,576 characters"),
        ("absent.yaml", "there is no recipe file"),
        ("", "is a folder"),
        ("picture.yaml", "UTF-8"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(ConvoyError, match=words):
            read_mapping(tmp_path / name, "recipe")
    path.write_text("# nothing\n")
    assert read_mapping(path, "recipe") == {}


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    written = to_json({"a": math.nan, "b": [math.inf, 1.5], "c": "é"})
    assert json.loads(written) == {"a": None, "b": [None, 1.5], "c": "é"}
    path = tmp_path / "x.json"
    write_json(path, 1)

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        write_atomically(path, fail)
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
    assert path.read_text() == "1\n"
