"""Names of others, in sentences and on a terminal."""

import io

import pytest

from convoy.errors import ConvoyError
from convoy.terminal import Console, brief, printable, shortened

ESCAPED = [
    ("\x1b[2Jgone", r"\x1b[2Jgone"),
    ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
    ("\x9b31m", r"\x9b31m"),  # one character that terminals take for ESC [
    ("line\rover", r"line\rover"),
    ("back\x08", r"back\x08"),
    ("\u202egnp.exe", r"\u202egnp.exe"),
    ("\u2066isolate\u2069", r"\u2066isolate\u2069"),
    ("\u200fmark", r"\u200fmark"),
    ("\u2028line", r"\u2028line"),
    ("\ufeffbom", r"\ufeffbom"),
    ("\udcff", r"\udcff"),
    ("\ue000", r"\ue000"),
    ("\U000e0041tag", r"\U000e0041tag"),
]


@pytest.mark.parametrize(("text", "shown"), ESCAPED)
def test_what_cannot_be_seen_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert str(ConvoyError(f"{text} is missing: fetch it")) == f"{shown} is missing: fetch it"


@pytest.mark.parametrize(
    "text", ["cat", "Käse 图片", "می\u200cروم", "👩\u200d🚀", "a\u00a0b\u202fc\u3000d", "", "½ µs ± −"]
)
def test_words_of_any_script_stay(text: str) -> None:
    assert printable(text) == text


def test_lines_stay_where_they_are_asked_for() -> None:
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"
    assert str(ConvoyError("a\nb")) == "a\nb"


@pytest.mark.parametrize("markup", [True, False])
def test_a_console_writes_no_control_characters_but_its_own(markup: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system=None, width=200, highlight=False)
    for text, shown in ESCAPED:
        if "\udcff" not in text:
            console.print(text, markup=markup)
            assert written.getvalue().endswith(f"{shown}\n")
    console.print("bold", style="bold")
    assert not {"\x1b[2J", "\x07", "\x9b", "\u202e"} & set(written.getvalue())


def test_what_was_typed_is_not_repeated_at_length() -> None:
    assert brief("sample=2") == "sample=2"
    assert brief("a" * 50 + "b" * 5_000 + "c" * 26) == "a" * 50 + "bbb…" + "c" * 26
    path = "/".join(["folder"] * 30)
    assert str(ConvoyError(f"there is no file {path}: check the path")) == f"there is no file {path}: check the path"
    long = str(ConvoyError(f"there is no file {'x' * 5_000}: check the path"))
    assert long.startswith("there is no file xxx") and long.endswith("xxx: check the path") and len(long) < 300
    assert len(shortened("x " * 5_000)) == 1_500
    assert shortened("line\n" * 5_000) == "line\n" * 5_000
