"""What a training within a study says of itself."""

import time

import pytest

from convoy.bench import training_runs
from convoy.bench.training_runs import Heard
from convoy.comm.position import current
from started import wait_for


def test_a_training_that_moves_is_heard_of_while_it_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_runs, "_BEAT_S", 0.01)
    told: list[tuple[str, int, int]] = []
    heard = Heard(lambda *what: told.append(what))
    heard.prepare("counting", 3, 9)
    heard.begin(0, 50)
    heard.advance(7, "loss 2.3")
    before = [("counting", 0, 0), ("beginning", 0, 50), ("loss 2.3", 7, 50)]
    assert told == before
    with heard.beating():
        time.sleep(0.1)
        assert told == before  # nothing has moved
        current.to("evaluation")
        wait_for(lambda: len(told) > 3, 10)
    current.to("evaluation")
    time.sleep(0.1)
    assert told == [*before, before[-1]]
