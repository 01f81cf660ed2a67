"""The benchmark that kills ranks, with two kills."""

import sys

import chaos
import pytest


@pytest.mark.timeout(400)
def test_the_weights_are_those_of_the_run_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--kills", "2", "--updates", "120", "--every", "10", "--seed", "3"])
    assert chaos.main() == 0
    said = capsys.readouterr().out
    assert "weights          bit-identical" in said
    assert "metrics          identical" in said
    assert said.count("updates lost, ") == 2
