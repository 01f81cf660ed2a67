"""Whole runs: when checkpoints are made changes nothing, and any number of ranks goes on from them."""

import json
import shutil
from pathlib import Path

import pytest

from convoy.checkpoint.store import CheckpointStore
from convoy.training import checkpoint_interval as when
from convoy.training import loop
from convoy.training.checkpoint_interval import Young
from ranks import run_ranks
from tiny import write_mnist
from whole_runs import Ended, as_before, train_here

OFTEN = {"checkpoint.every": "auto", "checkpoint.mtbf": "0.01s", "checkpoint.keep": "99"}
NEVER = {"checkpoint.every": "1000ba", "evaluate_every": "1000ba"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_mnist(tmp_path / "data")


def saved(out: Path) -> list[int]:
    return CheckpointStore(out / "checkpoints").steps()


@pytest.mark.slow
def test_how_often_the_clock_has_a_reproducible_run_save_changes_no_bit(data: Path, tmp_path: Path) -> None:
    shared = {"epochs": "24ba", "reproducible": "true", "ema.decay": "0.9", "evaluate_every": "4ba"}
    (never,) = run_ranks(train_here, 1, data, tmp_path / "never", shared | {"checkpoint.every": "1000ba"})
    often = run_ranks(train_here, 2, data, tmp_path / "often", shared | OFTEN)
    assert [(each.digest, each.curve) for each in often] == [(never.digest, never.curve)] * 2
    assert len(saved(tmp_path / "often")) > len(saved(tmp_path / "never"))
    said = [sentence for sentence in often[0].said if sentence.startswith("checkpoint every")]
    assert said
    assert "Young 1974; at most" in said[0]
    summary = json.loads((tmp_path / "often" / "summary.json").read_text())
    assert said[-1] in summary["notes"]  # and none of those that it takes the place of
    assert sum(note.startswith("checkpoint every") for note in summary["notes"]) == 1
    assert summary["checkpoints"]["written"] >= len(saved(tmp_path / "often")) > 3
    assert summary["checkpoints"]["failed"] == 0
    assert summary["checkpoints"]["waited_s"] >= summary["checkpoints"]["longest_wait_s"] > 0
    assert any(f"{summary['checkpoints']['written']} checkpoints written" in sentence for sentence in often[0].said)


def _local_sgd(data: Path, out: Path, settings: dict[str, str], at_any_update: bool = False) -> Ended:
    with as_before() as patch:
        patch.setattr(when, "FIRST_UPDATES", 3)
        if at_any_update:
            patch.setattr(loop, "Young", lambda mtbf, multiple: Young(mtbf))
        return train_here(data, out, {"epochs": "19ba", "parallel.local_sgd": "4"} | settings)


@pytest.mark.slow
def test_nor_that_of_local_sgd_which_averages_weights_to_save_them(data: Path, tmp_path: Path) -> None:
    never = run_ranks(_local_sgd, 3, data, tmp_path / "never", NEVER)[0]
    often_settings = OFTEN | {"evaluate_every": "1000ba"}
    often = run_ranks(_local_sgd, 3, data, tmp_path / "often", often_settings)[0]
    assert often.digest == never.digest

    def saved_at_any_update(attempt: int) -> Ended:
        ended: Ended = run_ranks(_local_sgd, 3, data, tmp_path / f"control-{attempt}", often_settings, True)[0]
        return ended

    # the clock says when, and may have them saved where weights are averaged anyway
    assert any(saved_at_any_update(attempt).digest != never.digest for attempt in range(4))


@pytest.mark.parametrize("world", [3, 1])
def test_other_ranks_go_on_from_what_four_wrote(data: Path, tmp_path: Path, world: int) -> None:
    settings = {"epochs": "8ba", "reproducible": "true", "checkpoint.every": "3ba", "checkpoint.keep": "9"}
    whole = run_ranks(train_here, 4, data, tmp_path / "whole", settings, timeout=120)[0]
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    store = CheckpointStore(tmp_path / "parts" / "checkpoints")
    assert len(list((store.place(3) / "state").iterdir())) == 4
    for step in store.steps():
        if step > 3:
            shutil.rmtree(store.place(step))
    resumed = run_ranks(train_here, world, data, tmp_path / "parts", settings, True, timeout=120)[0]
    assert (resumed.digest, resumed.curve) == (whole.digest, whole.curve)
    assert len(list((store.place(6) / "state").iterdir())) == world
