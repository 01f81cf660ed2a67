"""A run that ends at the first evaluation that reaches its target."""

from pathlib import Path

import pytest

from ranks import run_ranks
from training.scenarios import drop_checkpoints, lines, summary
from whole_runs import train_here

SETTINGS = {"epochs": "12ep", "target": "0.8", "evaluate_every": "3ba", "log_every": "2ba", "microbatch": "8"}
SETTINGS |= {"data.augment.crop": "none", "reproducible": "true", "checkpoint.every": "5ba"}


@pytest.mark.parametrize("cut", [False, True], ids=["at its end", "before it"])
def test_a_run_ends_at_its_target_on_one_rank_and_two_and_after_a_stop(data: Path, tmp_path: Path, cut: bool) -> None:
    whole, two = tmp_path / "whole", tmp_path / "two"
    ended = train_here(data, whole, SETTINGS)
    scores = [(step, top1) for _, step, _, top1, _ in lines(whole, split="test")]
    assert [top1 >= 0.8 for _, top1 in scores] == [False] * (len(scores) - 1) + [True]
    steps = scores[-1][0]
    assert steps < 48 and lines(whole, "step", split="train")[-1] == [steps]
    facts = summary(whole)
    assert (facts["status"], facts["steps"], facts["reached"], facts["target"]) == ("finished", steps, True, 0.8)
    assert sum(f"target of 80.00% reached after {steps} updates" in line for line in ended.said) == 1
    again = run_ranks(train_here, 2, data, two, SETTINGS)
    assert again[0].digest == ended.digest == again[1].digest and lines(two) == lines(whole)
    if cut:
        drop_checkpoints(two, steps - 3)
    (two / "weights.safetensors").unlink()
    assert train_here(data, two, SETTINGS, resume=True).digest == ended.digest and lines(two) == lines(whole)


def test_a_target_that_is_not_reached_is_said_at_the_end(data: Path, tmp_path: Path) -> None:
    ended = train_here(data, tmp_path / "run", SETTINGS | {"epochs": "4ba", "target": "1"})
    assert summary(tmp_path / "run")["reached"] is False and ended.outcome.signal is None
    assert any("target of 100.00% not reached: the best was top-1" in line for line in ended.said)
