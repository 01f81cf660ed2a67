"""Which of several failures is said, and how."""

from pathlib import Path

import pytest

from convoy.errors import ConvoyError, MachineError, MeetingError
from convoy.launch.failure import Failure, cause, failure_of, read_failures


def fail(rank: int, error: BaseException) -> Failure:
    try:
        raise error
    except BaseException as raised:
        return failure_of(rank, raised)


def test_a_mistake_is_one_sentence_and_an_error_has_its_rank_and_traceback() -> None:
    mistake, error = fail(1, ConvoyError("the data is missing: look for it")), fail(1, KeyError("x"))
    assert (mistake.text(), mistake.status) == ("convoy: the data is missing: look for it", 2)
    assert error.text().startswith("rank 1 failed: KeyError: 'x'\nTraceback")
    assert error.status == 1


def test_ranks_that_did_not_meet_may_when_they_are_started_again() -> None:
    failure = fail(1, MeetingError("rank 1 cannot join the others"))
    assert failure.text() == "rank 1 failed: rank 1 cannot join the others"
    assert (failure.status, failure.final) == (1, False)


def test_what_a_machine_did_is_no_mistake() -> None:
    failure = fail(1, MachineError("a process that loads pictures died"))
    assert failure.text() == "rank 1 failed: a process that loads pictures died"
    assert failure.text(verbose=True).startswith(f"{failure.text()}\nTraceback")
    assert (failure.kind, failure.status, failure.final) == ("error", 1, False)


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3",
        "Application timeout caused pair closure; Connection reset by peer",
    ],
)
def test_the_loss_of_another_rank_is_not_the_cause(text: str) -> None:
    lost, error = fail(0, RuntimeError(text)), fail(1, KeyError("x"))
    killed = Failure(2, "killed", "it was ended by SIGKILL", "", lost.time + 9)
    assert lost.kind == "lost"
    assert cause([lost, killed]) == killed
    assert cause([lost, killed, error]) == error
    assert cause([]) is None


def test_the_first_of_several_is_said(tmp_path: Path) -> None:
    first, second = fail(1, KeyError("x")), fail(0, ConvoyError("y"))
    for failure in (second, first):
        failure.write(tmp_path)
    assert cause(read_failures(tmp_path)) == first
