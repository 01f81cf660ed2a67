"""Whole runs on one device: what is in their folder, and that a stop leaves no trace in the result."""

import json
import shutil
from pathlib import Path

import pytest

from convoy.errors import ConvoyError
from convoy.recipe.recipe import load_recipe
from ranks import run_ranks
from tiny import NUM_TEST, TinyNet
from training.scenarios import Settings, drop_checkpoints, lines, put, store_of, summary, weights
from whole_runs import recipe_of, train_here

SHORT = {"epochs": "3ep"}


def test_a_run_learns_and_leaves_its_folder_complete(data: Path, tmp_path: Path) -> None:
    settings, out = {"epochs": "12ep", "data.augment.crop": "none", "microbatch": "8"}, tmp_path / "run"
    top1 = train_here(data, out, settings).outcome.top1
    assert top1 is not None and top1 > 0.9
    TinyNet().load_state_dict(weights(out))
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert evaluation["images"] == NUM_TEST == sum(map(sum, evaluation["confusion"]))
    assert (summary(out)["status"], summary(out)["steps"], store_of(out).steps()[-1]) == ("finished", 48, 48)
    chosen = {"precision": "fp32", "channels_last": "false", "parallel.devices": "1", "optimizer.fused": "true"}
    assert load_recipe(str(out / "config.yaml")) == recipe_of(data, settings | chosen)


@pytest.mark.parametrize(
    "settings",
    [
        {"reproducible": "true", "optimizer.name": "adamw", "ema.decay": "0.9", "clip_norm": "1"},
        {"optimizer.name": "sgd", "reproducible": "true", "model.name": "tiny:TinyWhite"}
        | {"model.whiten": "9", "lookahead.every": "3", "optimizer.groups": "[{parameters: '*.bias', until: 6ba}]"},
        {"optimizer.name": "lamb", "data.repeats": "3", "data.augment.crop": "random-resized", "microbatch": "6"}
        | {"data.workers": "0", "data.progressive": "{from_size: 16, begin: 0, end: 2}"}
        | {"model.name": "tiny:TinyResidual"},
        {"optimizer.name": "lars", "optimizer.lr": "1", "data.mix.mixup": "0.4", "channels_last": "true"},
    ],
    ids=lambda settings: settings["optimizer.name"],
)
def test_a_stopped_and_resumed_run_is_bit_identical(data: Path, tmp_path: Path, settings: Settings) -> None:
    settings = SHORT | {"optimizer.lr": "0.01"} | settings
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    uninterrupted = train_here(data, whole, settings)
    for stop_at in (1, 5, 8):  # in the first update, in the middle of an epoch, and at the end of one
        stopped = train_here(data, parts, settings, stop_at > 1, stop_at).outcome
        assert (stopped.signal, stopped.steps) == ("SIGUSR2", stop_at)
        assert not (parts / "weights.safetensors").exists() and summary(parts)["status"] == "stopped"
    assert train_here(data, parts, settings, resume=True).digest == uninterrupted.digest
    assert lines(whole) == lines(parts)


def test_the_comparison_would_notice_another_momentum(data: Path, tmp_path: Path) -> None:
    whole = train_here(data, tmp_path / "whole", SHORT)
    train_here(data, parts := tmp_path / "parts", SHORT, stop_at=5)
    checkpoint = store_of(parts).load(5)
    checkpoint.tensors["optimizer.momentum_buffer.head.bias"] += 1e-7
    put(store_of(parts), checkpoint)
    assert train_here(data, parts, SHORT, resume=True).digest != whole.digest


def test_a_reproducible_run_refuses_what_torch_computes_otherwise_each_time(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvoyError, match="torch has no deterministic guess_backward_cuda"):
        train_here(data, tmp_path / "run", {"model.name": "failing:Undetermined", "reproducible": "true"})


# Longer runs

FLAT = {"schedule.name": "constant", "schedule.warmup": "0ep"}
OLD, NEW = {"epochs": "5ba"}, {"epochs": "10ba"}  # from the middle of an epoch to that of another: one has 4 updates
EXACT = {"reproducible": "true", "ema.decay": "0.9", "optimizer.momentum": "0.9", "evaluate_every": "3ba"}


def test_a_longer_run_ends_as_one_of_that_length_and_leaves_the_old_one_as_it_was(data: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    whole = train_here(data, tmp_path / "whole", EXACT | FLAT | NEW).digest
    train_here(data, old, EXACT | FLAT | OLD)
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    longer = EXACT | FLAT | NEW | {"extends": str(old), "checkpoint.every": "100ba", "checkpoint.keep": "9"}
    one = train_here(data, new, longer)
    assert any(text.startswith(f"begins with the state of {old} after 5 updates; the") for text in one.said), one.said
    two = run_ranks(train_here, 2, data, tmp_path / "two", longer)[0]
    assert one.digest == whole == two.digest
    assert before == {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    # Its curves begin with the old one's, which was evaluated at its end too.
    assert [step for (step,) in lines(new, "step", split="train")] == list(range(1, 11))
    assert [step for (step,) in lines(new, "step", split="test")] == [3, 5, 6, 9, 10]
    # The weights alone are not the state.
    again = EXACT | FLAT | {"epochs": "5ba", "model.weights": str(old)}
    assert train_here(data, tmp_path / "again", again).digest != whole
    # With its first checkpoint it needs the old run no more.
    shutil.rmtree(old)
    drop_checkpoints(new, 5)
    (new / "weights.safetensors").unlink()
    assert train_here(data, new, longer, resume=True).digest == whole
