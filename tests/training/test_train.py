"""Whole runs in this process: what is in their folder, and that a stop leaves no trace in the result."""

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from convoy.checkpoint.store import CheckpointStore
from convoy.errors import ConvoyError
from convoy.training import Outcome, Recipe, load_recipe, train
from convoy.training.set_up import set_up
from tiny import NUM_TEST, NUM_TRAIN, TinyNet, write_mnist

BASE = {
    "model.name": "tiny:TinyNet",
    "batch": "24",
    "microbatch": "8",
    "epochs": "3ep",
    "threads": "1",
    "log_every": "2ba",
    "optimizer.lr": "0.05",
}
TOTAL = 3 * (NUM_TRAIN // 24)


class Watcher:
    """Takes the place of a person at the console; sends a signal when update `stop_at` is done."""

    def __init__(self, stop_at: int | None = None, number: signal.Signals = signal.SIGTERM) -> None:
        self.stop_at, self.number = stop_at, number
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def prepare(self, what: str, done: int, total: int) -> None:
        pass

    def begin(self, done: int, total: int) -> None:
        self.said.append(f"{done} of {total}")

    def advance(self, done: int, text: str | None = None) -> None:
        if done == self.stop_at:
            os.kill(os.getpid(), self.number)

    def end(self) -> None:
        pass


@pytest.fixture(autouse=True)
def as_before():
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_mnist(tmp_path / "data")


def recipe_of(data: Path, settings: Sequence[str]) -> Recipe:
    values = BASE | {"data.path": str(data)} | dict(setting.split("=", 1) for setting in settings)
    return load_recipe("default", [f"{key}={value}" for key, value in values.items()])


def run(
    data: Path, out: Path, settings: Sequence[str] = (), watcher: Watcher | None = None, resume: bool = False
) -> Outcome:
    return train(
        recipe_of(data, settings), out, resume=resume, device=torch.device("cpu"), reporter=watcher or Watcher()
    )


def metrics(out: Path, *keys: str) -> list[list[object]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [[line.get(key) for key in keys] for line in lines]


def test_a_run_learns_and_leaves_its_folder_complete(data: Path, tmp_path: Path) -> None:
    outcome = run(data, tmp_path / "run", ["epochs=12ep"])
    assert outcome.top1 is not None
    assert outcome.top1 > 0.9
    out = tmp_path / "run"
    model = TinyNet()
    model.load_state_dict(load_file(out / "weights.safetensors"))
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert evaluation["images"] == NUM_TEST == sum(map(sum, evaluation["confusion"]))
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["parameters"]) == ("finished", 48, 4_116)
    settled = recipe_of(data, ["epochs=12ep", "precision=fp32", "channels_last=false"])
    assert load_recipe(str(out / "config.yaml")) == settled
    assert any(path.name.startswith("events.out.tfevents") for path in (out / "tensorboard").iterdir())
    assert CheckpointStore(out / "checkpoints").steps()[-1] == 48


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["reproducible=true"],
        ["optimizer.name=adamw", "optimizer.lr=0.01", "ema.decay=0.9", "clip_norm=1.0"],
        ["optimizer.name=lamb", "optimizer.lr=0.01", "channels_last=true"],
        ["optimizer.name=lars", "optimizer.lr=1.0", "data.augment.crop=pad", "data.mix.mixup=0.4"],
    ],
    ids=["sgd", "reproducible", "adamw", "lamb", "lars"],
)
def test_a_stopped_and_resumed_run_is_bit_identical(data: Path, tmp_path: Path, settings: list[str]) -> None:
    settings = [*settings, "log_every=1ba"]
    run(data, tmp_path / "whole", settings)
    for stop_at in (1, 5, 8):  # in the first update, in the middle of an epoch, and at the end of one
        watcher = Watcher(stop_at, signal.SIGUSR2)
        stopped = run(data, tmp_path / "parts", settings, watcher, resume=stop_at > 1)
        assert (stopped.signal, stopped.steps) == ("SIGUSR2", stop_at)
        assert not (tmp_path / "parts" / "weights.safetensors").exists()
        assert json.loads((tmp_path / "parts" / "summary.json").read_text())["status"] == "stopped"
    run(data, tmp_path / "parts", settings, resume=True)
    whole, parts = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    keys = ("split", "step", "loss", "top1", "lr")
    assert metrics(tmp_path / "whole", *keys) == metrics(tmp_path / "parts", *keys)


def test_the_comparison_would_notice_another_momentum(data: Path, tmp_path: Path) -> None:
    settings = ["log_every=1ba"]
    run(data, tmp_path / "whole", settings)
    run(data, tmp_path / "parts", settings, Watcher(5))
    store = CheckpointStore(tmp_path / "parts" / "checkpoints")
    checkpoint = store.load(5)
    checkpoint.tensors["optimizer.momentum_buffer.head.bias"] += 1e-7
    store.save(checkpoint)
    run(data, tmp_path / "parts", settings, resume=True)
    whole, parts = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "parts"))
    assert any(not torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize(("model", "merge"), [("tiny:TinyNet", 8), ("tiny:TinyAgain", 1)])
def test_a_batch_norm_layer_that_runs_twice_has_a_pass_for_each_microbatch(data: Path, model: str, merge: int) -> None:
    settings = [f"model.name={model}", f"data.path={data}", "batch=24", "microbatch=3"]
    assert set_up(load_recipe("default", settings), torch.device("cpu")).merge == merge


def test_merged_and_single_microbatches_train_alike(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(data, tmp_path / "merged")
    monkeypatch.setattr("convoy.engine.coupling.CPU_BUDGET", 0)
    run(data, tmp_path / "single")
    for name, merged in (("merged", 3), ("single", 1)):
        derived = json.loads((tmp_path / name / "summary.json").read_text())["derived"]
        assert merged in [row["value"] for row in derived if row["name"] == "microbatches in one pass"]
    merged, single = (load_file(tmp_path / name / "weights.safetensors") for name in ("merged", "single"))
    assert all(torch.allclose(merged[name], single[name], rtol=1e-3, atol=1e-5) for name in merged)


def test_batch_norm_over_the_whole_batch_is_another_experiment(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "microbatch")
    run(data, tmp_path / "sync", ["batch_norm=sync"])
    a, b = (load_file(tmp_path / name / "weights.safetensors") for name in ("microbatch", "sync"))
    assert not torch.allclose(a["norm.running_var"], b["norm.running_var"], rtol=1e-3)


def test_the_newest_whole_checkpoint_is_used_and_named(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", ["checkpoint.every=1ba", "log_every=1ba"], Watcher(7))
    folder = tmp_path / "run" / "checkpoints" / "step-00000007"
    state = next((folder / "state").glob("*.safetensors"))
    state.write_bytes(state.read_bytes()[:-1])
    watcher = Watcher()
    run(data, tmp_path / "run", ["checkpoint.every=1ba", "log_every=1ba"], watcher, resume=True)
    assert any("step-00000007" in sentence for sentence in watcher.said)
    assert f"6 of {TOTAL}" in watcher.said


def test_new_checkpoints_stay_where_damaged_newer_ones_lie(data: Path, tmp_path: Path) -> None:
    settings = ["checkpoint.every=1ba", "checkpoint.keep=1", "log_every=1ba"]
    run(data, tmp_path / "run", settings, Watcher(3))
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(folder / "step-00000003", folder / "step-00000099")
    stopped = run(data, tmp_path / "run", settings, Watcher(5), resume=True)
    assert stopped.steps == 5
    watcher = Watcher()
    run(data, tmp_path / "run", settings, watcher, resume=True)
    assert f"5 of {TOTAL}" in watcher.said


def test_a_checkpoint_of_another_run_is_not_taken(data: Path, tmp_path: Path) -> None:
    settings = ["log_every=1ba"]
    run(data, tmp_path / "run", settings, Watcher(3))
    run(data, tmp_path / "other", [*settings, "seed=1"], Watcher(5))
    foreign = "step-00000005"
    shutil.copytree(tmp_path / "other" / "checkpoints" / foreign, tmp_path / "run" / "checkpoints" / foreign)
    watcher = Watcher()
    run(data, tmp_path / "run", settings, watcher, resume=True)
    assert f"3 of {TOTAL}" in watcher.said
    assert any(foreign in sentence and "another run" in sentence for sentence in watcher.said)


def test_a_finished_run_that_is_resumed_keeps_its_metrics(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run")
    keys = ("split", "step", "loss", "top1", "lr")
    before = metrics(tmp_path / "run", *keys)
    run(data, tmp_path / "run", resume=True)
    assert metrics(tmp_path / "run", *keys) == before


def test_restarts_are_noted_beside_who_began_the_run(data: Path, tmp_path: Path) -> None:
    settings = ["log_every=1ba"]
    run(data, tmp_path / "run", settings, Watcher(3))
    begun = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert "restarts" not in begun
    run(data, tmp_path / "run", settings, Watcher(5), resume=True)
    run(data, tmp_path / "run", settings, resume=True)
    noted = json.loads((tmp_path / "run" / "environment.json").read_text())
    restarts = noted.pop("restarts")
    assert noted == begun
    assert [(one["after"], one["devices"], one["plan"]) for one in restarts] == [(3, 1, "serial"), (5, 1, "serial")]
    assert all(one["started"] >= begun["started"] for one in restarts)


def test_notes_stay_with_a_run_that_goes_on(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", ["log_every=1ba"], Watcher(3))
    file = tmp_path / "run" / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "notes": ["something was decided"]}))
    run(data, tmp_path / "run", ["log_every=1ba"], resume=True)
    assert json.loads(file.read_text())["notes"][0] == "something was decided"


def test_another_recipe_does_not_go_on_with_a_run(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", ["log_every=1ba"], Watcher(3))
    with pytest.raises(ConvoyError, match=r"seed=0 and cannot go on with seed=1"):
        run(data, tmp_path / "run", ["seed=1"], resume=True)
    run(data, tmp_path / "run", ["log_every=3ba", "checkpoint.keep=1"], resume=True)


def test_a_loss_that_is_no_number_stops_the_run(data: Path, tmp_path: Path) -> None:
    settings = ["optimizer.lr=1e30", "schedule.warmup=0ba", "checkpoint.every=1ba", "log_every=100ba"]
    with pytest.raises(ConvoyError, match=r"the loss is nan in update 2, first in .* lower optimizer.lr"):
        run(data, tmp_path / "run", settings)
    for step in CheckpointStore(tmp_path / "run" / "checkpoints").steps():
        tensors = CheckpointStore(tmp_path / "run" / "checkpoints").load(step).tensors
        assert step == 1 or all(tensor.isfinite().all() for tensor in tensors.values())


def test_nothing_is_made_when_something_is_wrong(data: Path, tmp_path: Path) -> None:
    for settings in (["model.name=tiny:Unfit"], ["batch=1000"], ["model.name=alexnet"]):
        with pytest.raises(ConvoyError):
            run(data, tmp_path / "run", settings)
        assert not (tmp_path / "run").exists()


def test_what_cannot_be_reproducible_is_refused_in_a_sentence(tmp_path: Path, data: Path) -> None:
    with pytest.raises(ConvoyError, match="torch has no deterministic guess_backward_cuda"):
        run(data, tmp_path / "run", ["model.name=failing:Undetermined", "reproducible=true"])
