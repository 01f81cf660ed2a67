"""Options of `convoy train` that have no effect say so."""

from pathlib import Path
from typing import Any

import pytest

from convoy.cli import main
from convoy.cli.requests import TrainRequest
from convoy.cli.train_run import _without_effect
from convoy.launch import RankPlace
from tiny import write_mnist


def test_on_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    write_mnist(tmp_path / "data", 64, 16)
    run = ["train", "lenet", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"), "--epochs", "1ba"]
    options = ["--interface", "lo", "--max-restarts", "2", "--schedule", "gpipe"]
    assert main([*run, "--batch", "8", "--workers", "0", *options]) == 0
    said = capsys.readouterr().out
    for option in ("--interface", "--max-restarts"):
        assert said.count(f"{option} has no effect on one device: ") == 1
    assert said.count("--schedule has no effect: the plan has no stages\n") == 1


@pytest.mark.slow
def test_a_weight_of_heads_that_a_network_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mnist(tmp_path / "data", 64, 16)
    (tmp_path / "mine.yaml").write_text("loss: {aux_weight: 0.4}\nbatch: 8\nepochs: 1ba\n")
    own = ["--recipe", str(tmp_path / "mine.yaml")]
    said = "loss.aux_weight=0.4 has no effect: tiny:TinyDepth has no auxiliary heads"

    def status(model: str, out: str, *options: str) -> int:
        return main(["train", model, "--data", str(tmp_path / "data"), "--out", str(tmp_path / out), *options])

    assert status("tiny:TinyDepth", "refused", *own, "--set", "loss.aux_weight=0.4") == 2
    assert capsys.readouterr().err == f"convoy: {said}; leave it out\n"
    assert not (tmp_path / "refused").exists()
    assert status("tiny:TinyDepth", "noted", *own) == 0
    assert capsys.readouterr().out.count(said) == 1
    assert status("tiny:TinyDepth", "silent", "--batch", "8", "--epochs", "1ba") == 0
    assert status("tiny:TinyNet", "heads", *own, "--set", "loss.aux_weight=0.5") == 0
    assert "aux_weight" not in capsys.readouterr().out


def notes(place: RankPlace | None, number: int, **options: Any) -> list[str]:
    return _without_effect(TrainRequest([], [], **options), place, number)


@pytest.mark.parametrize(("source", "instead"), [("torchrun", "torchrun"), ("Slurm", "convoy launch slurm")])
def test_restarts_are_the_matter_of_who_started_the_ranks(source: str, instead: str) -> None:
    (note,) = notes(RankPlace(0, 2, source), 2, max_restarts=3, timeout="30s", interface="lo")
    assert note == f"--max-restarts has no effect on ranks that {source} started: give it to {instead}"


def test_what_has_an_effect_is_not_noted() -> None:
    assert notes(RankPlace(0, 2, "--devices", "folder"), 2, max_restarts=3, timeout="30s", interface="lo") == []
    assert notes(RankPlace(0, 2, "torchrun"), 2, timeout="30s", interface="lo") == []
    assert notes(None, 1, max_restarts=0) == []
