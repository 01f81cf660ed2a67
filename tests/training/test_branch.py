"""A run that begins in the middle of another one, with the same batch or others."""

from pathlib import Path

import torch

from convoy.recipe.recipe import LookaheadConfig
from convoy.training.state import SlowWeights
from training.scenarios import lines, store_of, summary
from whole_runs import train_here

FLAT = {"schedule.name": "constant", "schedule.warmup": "0ep", "epochs": "2ep", "reproducible": "true"}
FLAT |= {"lookahead": "{every: 2, step: 0.5, power: 3}"}  # whose step grows with the share of updates that are done


def test_a_branch_of_the_same_batch_is_the_run_itself_and_one_of_half_goes_on_at_the_same_samples(
    data: Path, tmp_path: Path
) -> None:
    old, half = tmp_path / "old", tmp_path / "half"
    whole = train_here(data, old, FLAT | {"checkpoint.every": "4ba"}).digest
    assert 4 in store_of(old).steps()
    branch = FLAT | {"extends": str(old), "extends_at": "4"}
    assert train_here(data, tmp_path / "same", branch).digest == whole
    ended = train_here(data, half, branch | {"batch": "12", "optimizer.lr": "0.025", "checkpoint.keep": "9"})
    assert ended.digest != whole and any("after 4 updates of 24" in sentence for sentence in ended.said)
    assert lines(half, "step", split="train")[0] == [9] and summary(half)["steps"] == 16
    assert lines(half, "top1", split="test")  # its curves are its own
    saved = store_of(half).steps()
    assert saved[0] == 8 and [store_of(half).load(step).values["ema"] for step in saved] == saved


def test_lookahead_after_the_last_update_takes_the_slow_weights() -> None:
    model, config = torch.nn.Linear(2, 2), LookaheadConfig(every=1, step=0.5, power=3)
    averages = SlowWeights(model, config, total_updates=9)
    slow, averages.num_updates = model.weight.detach().clone(), 22
    with torch.no_grad():
        model.weight += 1
    averages.update(model)
    assert torch.allclose(model.weight, slow + 0.5)
