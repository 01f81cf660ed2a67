"""What a terminal is told while torch is loaded, and others are not."""

import io
import sys
import time

import pytest

import convoy.models
from convoy.late import lazily, waiting_for


class Terminal(io.StringIO):
    """Takes what a terminal would show."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "said"), [(Terminal(), "loading PyTorch …\r\x1b[K"), (io.StringIO(), "")])
def test_a_terminal_is_told_what_is_waited_for(stream: io.StringIO, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with waiting_for("loading PyTorch", after_s=0.01):
        time.sleep(0.3)
    assert stream.getvalue() == said


@pytest.mark.parametrize("rank", [None, "1"])
def test_what_is_quick_and_what_a_rank_waits_for_is_not_told(rank: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with waiting_for("loading PyTorch", after_s=60 if rank is None else 0):
        time.sleep(0.05)
    assert stream.getvalue() == ""


def test_public_names_are_imported_when_they_are_used() -> None:
    find = lazily("convoy.models", {"counting": "Counts count"})
    assert find("count") is convoy.models.count
    with pytest.raises(AttributeError, match="no attribute 'cuont'"):
        find("cuont")
