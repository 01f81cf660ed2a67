"""Which of several failures is said, and how."""

import json
import os
import re
from pathlib import Path

import pytest

from convoy.errors import ConvoyError, MachineError, MeetingError
from convoy.failure import AGENTS, Failure, cause, failure_of, place_of, read_error_file, text_of, write_error_file
from convoy.recipe.schema import Duration


def fail(rank: int, error: BaseException) -> Failure:
    try:
        raise error
    except BaseException as raised:
        return failure_of(rank, raised)


def test_a_failure_is_a_sentence_a_status_and_where_it_is_an_error_a_traceback() -> None:
    mistake, error = fail(1, ConvoyError("the data is missing: look for it")), fail(1, KeyError("x"))
    assert (mistake.text(), mistake.status) == ("convoy: the data is missing: look for it", 2)
    assert re.match(r"rank 1 failed: KeyError: 'x' \(test_failure\.py, line \d+, in fail\)\nTraceback", error.text())
    assert error.status == 1
    meeting = fail(1, MeetingError("rank 1 cannot join the others"))  # they may when they are started again
    assert meeting.text() == "rank 1 failed: rank 1 cannot join the others"
    assert (meeting.status, meeting.final) == (1, False)
    machine = fail(1, MachineError("a process that loads pictures died"))  # which is nobody's mistake
    assert machine.text() == "rank 1 failed: a process that loads pictures died"
    assert machine.text(verbose=True).startswith(f"{machine.text()}\nTraceback")
    assert (machine.kind, machine.status, machine.final) == ("error", 1, False)


def test_the_place_is_the_last_in_code_of_ones_own() -> None:
    def mine() -> None:
        json.loads("{")

    with pytest.raises(ValueError, match="Expecting") as caught:
        mine()
    place = place_of(caught.value)
    assert place is not None and re.fullmatch(r"test_failure\.py, line \d+, in mine", place)
    with pytest.raises(ValueError, match="is not a duration") as caught:
        Duration.parse("long")
    assert place_of(caught.value.with_traceback(caught.tb.tb_next)) is None  # as the command line has it


LOST = "[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"


def test_the_loss_of_another_rank_is_not_the_cause_and_the_first_is() -> None:
    for text in (LOST, "Application timeout caused pair closure; Connection reset by peer"):
        lost, error = fail(0, RuntimeError(text)), fail(1, KeyError("x"))
        killed = Failure(2, "killed", "it was ended by SIGKILL", "", lost.time + 9)
        assert lost.kind == "lost"
        assert cause([lost, killed]) == killed and cause([lost, killed, error]) == error
    step = MachineError("the step failed")
    step.__cause__ = RuntimeError(LOST)
    assert text_of([fail(0, step)], [killed]) == killed.text()
    assert cause([]) is None
    first, second = fail(1, KeyError("x")), fail(0, ConvoyError("y"))
    assert cause([second, first]) == first


def test_what_a_rank_leaves_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    failure = fail(1, ConvoyError("no plan"))
    assert not write_error_file(failure)  # there is no agent that would say it
    monkeypatch.setenv(AGENTS, f"1 {os.getppid()}")
    assert write_error_file(failure)
    assert read_error_file(tmp_path / "error.json") == failure
    (tmp_path / "other.json").write_text('{"message": "theirs", "timestamp": 1}')
    assert read_error_file(tmp_path / "other.json") is None and read_error_file("<N/A>") is None
