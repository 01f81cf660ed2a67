from pathlib import Path
from typing import Any

import pytest

from convoy.documents import dump, parse, read_mapping
from convoy.errors import ConvoyError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1E5", 1e5), (".5", 0.5), ("5.", 5.0), ("-2", -2), ("090", 90), ("0x10", "0x10"),
        ("1_000", "1_000"), ("no", "no"), ("on", "on"), ("True", True), ("false", False),
        ("null", None), ("~", None), ("", None),
        ("1:30", "1:30"), ("2026-01-01", "2026-01-01"), ("1.2.3", "1.2.3"), ("'1'", "1"),
        ("[1, a, 2.5]", [1, "a", 2.5]),
    ],
)  # fmt: skip
def test_values_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    read = parse(text, "test")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "value", [1e-3, 1e300, 0.1, 1, "1e-3", "1", "no", "null", "~", "", True, None, "a: b", "é", [1, "2"]]
)
def test_what_is_written_reads_back_the_same(value: Any) -> None:
    read = parse(dump({"key": value}), "test")["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: [1\n", "line 3"),
        ("a: 1\na: 2\n", "line 2: the key a is twice"),
        ("a: 1\n\tb: 2\n", "line 2"),
        ("x: !!python/object/apply:os.system [echo]\ny: 1", "line 1"),
        ("{[1]: 2}\n", "plain word"),
        ("- 1\n", "is not a recipe"),
        ("text\n", "is not a recipe"),
        ("a: \x00", "no YAML"),
        ("a: " + "9" * 5000, "no YAML"),
        ("[" * 3000, "no YAML|expected"),
        ("a: &x 1\nb: *x\n", r"line 2: write the value itself, without \*x"),
        ("a: &a {b: *a}", r"without \*a"),
        ("a: &0 [x]\n" + "".join(f"b{i}: &{i + 1} [{f'*{i}, ' * 9}]\n" for i in range(60)), "line 2: write the value"),
        ("a: !!timestamp x", "without tag:yaml.org,2002:timestamp"),
        ("!!bool x: 1", "write the value itself"),
        ("a: " + "x" * 2**20, "more than 1,048,576 characters"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConvoyError, match=words) as caught:
        read_mapping(path, "recipe")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(20)
def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "picture.yaml").write_bytes(b"\x89PNG\xff\xfe")
    for path, words in [
        ("/dev/zero", "more than 1,048,576 characters"),
        ("absent.yaml", "there is no recipe file"),
        ("", "is a folder"),
        ("picture.yaml", "UTF-8"),
        ("a\0b", "null byte"),
    ]:
        with pytest.raises(ConvoyError, match=words):
            read_mapping(tmp_path / path, "recipe")


def test_an_empty_file_is_an_empty_recipe(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_mapping(tmp_path / "empty.yaml", "recipe") == {}
