"""Local SGD, compressed gradients and measured shares through the whole trainer: what is approximate is called so."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from convoy.checkpoint.store import CheckpointStore
from convoy.training.parallel import ParallelNetwork
from ranks import run_ranks
from tiny import write_mnist
from whole_runs import Ended, as_before, train_here

LOCAL = {"parallel.local_sgd": "2", "optimizer.lr": "0.02"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("options") / "data")


def apart(a: Ended, b: Ended) -> float:
    return max(abs(x - y) / y for x, y in zip(a.curve, b.curve, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words", "least"),
    [
        ({"parallel.gradient_compression": "bf16"}, "gradients are sent in bf16", 1e-5),
        ({"parallel.local_sgd": "3"}, "local SGD averages the weights every 3 updates", 1e-3),
    ],
    ids=["bf16", "local-sgd"],
)
def test_an_approximate_run_is_called_so_and_is_near(
    data: Path, tmp_path: Path, settings: dict[str, str], words: str, least: float
) -> None:
    shared = {"epochs": "6ba", "optimizer.lr": "0.02"}
    serial, exact = (run_ranks(train_here, num, data, tmp_path / str(num), shared, timeout=120)[0] for num in (1, 2))
    found = run_ranks(train_here, 2, data, tmp_path / "run", shared | settings, timeout=120)
    assert found[0].digest == found[1].digest
    assert f"approximate: {words}, so the result differs from that of one device" in found[0].said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["approximate"] == words
    assert not any("approximate" in sentence for sentence in exact.said)
    assert apart(exact, serial) < 1e-5
    assert least < apart(found[0], serial) < 0.2


@pytest.mark.parametrize(
    ("plan", "where"), [("serial", "on one device"), ("stage=2", "with a device for each stage")], ids=["one", "stages"]
)
def test_where_nothing_is_exchanged_nothing_is_approximate(data: Path, tmp_path: Path, plan: str, where: str) -> None:
    shared, num = {"epochs": "3ba", "parallel.plan": plan}, 1 if plan == "serial" else 2
    exact, *_ = run_ranks(train_here, num, data, tmp_path / "exact", shared)
    found, *_ = run_ranks(train_here, num, data, tmp_path / "run", shared | {"parallel.local_sgd": "2"})
    assert found.digest == exact.digest
    assert f"no approximation {where}, although the recipe says: local SGD" in "\n".join(found.said)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["approximate"] is None


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["sample=2", "sample=2,filter=2"])
def test_local_sgd_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(data: Path, tmp_path: Path, plan: str) -> None:
    world = 4 if "," in plan else 2
    settings = LOCAL | {"epochs": "7ba", "checkpoint.every": "3ba", "checkpoint.keep": "9", "parallel.plan": plan}
    whole = run_ranks(train_here, world, data, tmp_path / "whole", settings, timeout=120)[0]
    for name in ("parts", "control"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        store = CheckpointStore(tmp_path / name / "checkpoints", keep=9)
        for step in store.steps():
            if step > 3:
                shutil.rmtree(store.folder / f"step-{step:08d}")
        if name == "control":
            checkpoint = store.load(3)
            second = [key for key in checkpoint.tensors if key.startswith("optimizer-1.")]
            assert second
            for key in second:
                del checkpoint.tensors[key]
            store.save(checkpoint)
    resumed, control = (
        run_ranks(train_here, world, data, tmp_path / name, settings, True, timeout=120)[0]
        for name in ("parts", "control")
    )
    assert (resumed.digest, resumed.curve) == (whole.digest, whole.curve)
    assert control.digest != whole.digest


def test_averaged_weights_of_weights_that_drift_apart_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ema averages the weights of every update, but local_sgd"):
        run_ranks(train_here, 1, data, tmp_path / "run", LOCAL | {"ema.decay": "0.9"})


def _with_a_slow_rank(data: Path, out: Path, settings: dict[str, str]) -> Ended:
    forward = ParallelNetwork.forward

    def slow(self: ParallelNetwork, images: torch.Tensor) -> object:
        time.sleep(0.05 * self.engine.sample_rank)
        return forward(self, images)

    with as_before() as patch:
        patch.setattr(ParallelNetwork, "forward", slow)
        return train_here(data, out, settings | {"parallel.shares": "auto"})


@pytest.mark.slow
@pytest.mark.parametrize("reproducible", ["true", "false"])
def test_measured_shares_change_no_number(data: Path, tmp_path: Path, reproducible: str) -> None:
    settings = {"epochs": "10ba", "reproducible": reproducible}
    (serial,) = run_ranks(train_here, 1, data, tmp_path / "serial", settings)
    found, _ = run_ranks(_with_a_slow_rank, 2, data, tmp_path / "run", settings, timeout=120)
    (sentence,) = {sentence for sentence in found.said if sentence.startswith("shares ")}
    assert "of 8 microbatches from update 8 on, by measured times of" in sentence
    assert int(sentence.split()[1].partition(",")[0]) > 4, sentence
    assert not any("approximate" in each for each in found.said)
    assert apart(found, serial) < 1e-4
    assert (found.digest == serial.digest) == (reproducible == "true")
