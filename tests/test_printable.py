"""What people read: names of others without control characters, numbers as in a paper, and news of long work."""

import io
import sys

import pytest

from convoy import progress, units
from convoy.errors import ConvoyError
from convoy.progress import ConsoleReporter
from convoy.terminal import Console, printable, waiting_for
from made_time import made_time

ESCAPED = {
    "\x1b[2Jgone": r"\x1b[2Jgone",
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x9b31m": r"\x9b31m",  # one character that terminals take for ESC [
    "line\rover": r"line\rover",
    "back\x08": r"back\x08",
    "\u202egnp.exe": r"\u202egnp.exe",
    "\u2066isolate\u2069": r"\u2066isolate\u2069",
    "\u200fmark": r"\u200fmark",
    "\u2028line": r"\u2028line",
    "\ufeffbom": r"\ufeffbom",
    "\udcff": r"\udcff",
    "\ue000": r"\ue000",
    "\U000e0041tag": r"\U000e0041tag",
}


def test_what_cannot_be_seen_is_escaped_and_words_of_any_script_stay() -> None:
    for text, shown in ESCAPED.items():
        assert printable(text) == shown
        assert str(ConvoyError(f"{text} is missing: fetch it")) == f"{shown} is missing: fetch it"
    for text in ("cat", "Käse 图片", "می\u200cروم", "👩\u200d🚀", "a\u00a0b\u202fc\u3000d", "", "½ µs ± −"):
        assert printable(text) == text
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b" and str(ConvoyError("a\nb")) == "a\nb"


def test_a_console_writes_no_control_characters_but_its_own() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system=None, width=200, highlight=False)
    for text, shown in ESCAPED.items():
        if "\udcff" not in text:
            console.print(text)
            assert written.getvalue().endswith(f"{shown}\n")


NUMBERS: list[tuple[str, str]] = [
    (units.count(-1234), "−1,234"),
    (units.decimal(float("nan"), 2), "–"),
    (units.significant(0.05794), "0.0579"),
    (units.significant(3.2e-7), "3.20 · 10⁻⁷"),
    (units.tick(200_000), "200 k"),
    (units.tick(2e-6), "2·10⁻⁶"),
    (units.percent(0.99999, 1), "> 99.9 %"),
    (units.percent(0.00001, 2), "< 0.01 %"),
    (units.prefixed(999_999, "B"), "1.00 MB"),
    (units.duration(59.99), "1 min 00 s"),
    (units.duration(3 * 3600 + 299), "3 h 05 min"),
    (units.value([1] * 10), "1, 1, 1, 1, 1, 1, 1, 1, … (10 in all)"),
    (units.value({"image_size": 28, "mean": [0.1, 0.2]}), "image size: 28; mean: 0.1, 0.2"),
]


def test_numbers_are_printed_as_in_a_paper() -> None:
    assert [text.replace(units.SPACE, " ") for text, _ in NUMBERS] == [expected for _, expected in NUMBERS]
    low, high = units.wilson(0.9, 100)  # (0.919207 ∓ 0.061859) / 1.038415, by hand
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)


def test_long_work_before_a_training_is_told_in_a_file_too() -> None:
    with made_time(progress) as clock:
        written = io.StringIO()
        reporter = ConsoleReporter(Console(file=written, highlight=False))
        for second in range(12):
            clock.now += 1 if second else 0
            reporter.prepare("planning, about 12 s: profiling sample", second, 12)
        lines = [f"planning, about 12 s: profiling sample ({second} of 12)" for second in (5, 10)]
        assert written.getvalue().splitlines() == lines
        reporter.begin(0, 2)
        reporter.advance(1, "update 1")  # the first at once
        assert written.getvalue().splitlines()[-1] == "update 1"


class Terminal(io.StringIO):
    """Takes what a terminal would show."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_what_is_waited_for_unless_a_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    def shown(stream: io.StringIO) -> str:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", stream)
            with waiting_for("loading PyTorch"):
                pass
        return stream.getvalue()

    assert "loading PyTorch …" in shown(Terminal()) and shown(io.StringIO()) == ""
    monkeypatch.setenv("RANK", "1")
    assert shown(Terminal()) == ""
