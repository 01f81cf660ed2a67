"""The trainer's features under the schedule zero-bubble, in float64: what one device gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from convoy.comm.stage_links import StageLinks
from convoy.engine.stage import Stage
from convoy.ops.postponed import PostponedGradients
from convoy.plans.plan import Plan
from convoy.training import RunDirectory
from ranks import run_ranks
from tiny import write_mnist
from whole_runs import Ended, as_before, train_here, train_until

FEATURES = {
    "average of weights": {"ema.decay": "0.9"},
    "lars": {"optimizer.name": "lars", "optimizer.lr": "0.5"},
    "clipping": {"clip_norm": "0.05"},
    "accumulation": {"microbatch": "2"},
    "all": {"ema.decay": "0.9", "optimizer.name": "lars", "optimizer.lr": "0.5", "clip_norm": "0.05"},
}
BASE = {"model.name": "tiny:TinyDouble", "epochs": "6ba"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("bubble") / "data")


def distance(one: Path, other: Path) -> float:
    """The largest of any tensor of the weights that are delivered, as a part of its largest element."""
    have, want = (load_file(run / "weights.safetensors") for run in (one, other))
    assert have.keys() == want.keys()
    assert any(tensor.dtype == torch.float64 for tensor in want.values())
    return max(float((have[n] - want[n]).abs().max() / want[n].abs().max().clamp(min=1e-9)) for n in want)


def _without_weights_of_the_last_pass(*given: Any) -> Ended:
    with as_before() as patch:
        compute = PostponedGradients.compute
        patch.setattr(PostponedGradients, "compute", lambda self, last: compute(self, min(last, 2)))
        return train_here(*given)


@pytest.mark.parametrize("plan", ["stage=2", pytest.param("stage=2,sample=2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "feature", [pytest.param(name, marks=() if name == "all" else pytest.mark.slow) for name in FEATURES]
)
def test_trains_as_one_device_does(data: Path, tmp_path: Path, plan: str, feature: str) -> None:
    settings, ranks = BASE | FEATURES[feature], Plan.parse(plan).mesh.num_devices
    (serial,) = run_ranks(train_here, 1, data, tmp_path / "serial", settings)
    settings |= {"parallel.plan": plan, "parallel.schedule": "zero-bubble"}
    for found in run_ranks(train_here, ranks, data, tmp_path / "run", settings):
        assert found.curve == pytest.approx(serial.curve, rel=1e-6)  # recorded in float32
    assert distance(tmp_path / "run", tmp_path / "serial") < 1e-9
    assert any("zero-bubble, stages wait about" in note for note in RunDirectory(tmp_path / "run").summary()["notes"])
    run_ranks(_without_weights_of_the_last_pass, ranks, data, tmp_path / "wrong", settings)
    assert distance(tmp_path / "wrong", tmp_path / "serial") > 1e-6


def test_goes_on_from_a_checkpoint(data: Path, tmp_path: Path) -> None:
    settings = BASE | FEATURES["all"] | {"checkpoint.every": "2ba"}
    run_ranks(train_here, 1, data, tmp_path / "serial", settings)
    settings |= {"parallel.plan": "stage=2", "parallel.schedule": "zero-bubble"}
    assert run_ranks(train_until, 2, data, tmp_path / "run", settings, 5) == [None, None]
    ended, _ = run_ranks(train_until, 2, data, tmp_path / "run", settings, None)
    assert ended.said[0].startswith("going on after ")
    assert distance(tmp_path / "run", tmp_path / "serial") < 1e-9


def _messages(forgets: bool, *given: Any) -> list[list[str]]:
    """What this rank does in each update, in its order: asks for gradients of a part, sends values of one."""
    updates: list[list[str]] = []
    with as_before() as patch:
        begin, send, receive, finish = Stage.begin_update, StageLinks.send, StageLinks.receive, StageLinks.finish

        def begin_update(stage: Stage, *order: Any) -> Any:
            updates.append([])
            return begin(stage, *order)

        def sent(links: StageLinks, key: Any, values: Any, part: int, back: bool = False) -> None:
            updates[-1] += [] if back else ["sends"]
            send(links, key, values, part, back)

        def asked(links: StageLinks, *values: Any, back: bool = False) -> Any:
            updates[-1] += ["asks"] if back else []
            return receive(links, *values, back=back)

        patch.setattr(Stage, "begin_update", begin_update)
        patch.setattr(StageLinks, "send", sent)
        patch.setattr(StageLinks, "receive", asked)
        if forgets:
            patch.setattr(StageLinks, "finish", lambda links, same_loss: finish(links, same_loss=False))
        train_here(*given)
    return [messages for messages in updates if "asks" in messages]


@pytest.mark.parametrize("forgets", [False, True])
def test_the_first_stage_asks_for_gradients_before_it_sends_what_they_answer(
    data: Path, tmp_path: Path, forgets: bool
) -> None:
    settings = BASE | {"microbatch": "2", "parallel.plan": "stage=2", "parallel.schedule": "zero-bubble"}
    first, *others = run_ranks(_messages, 2, forgets, data, tmp_path / "run", settings)[0]
    parts = first.count("sends")
    assert first[:parts] == ["sends"] * parts, "how gradients lie is not known yet"
    assert parts > 3 and len(others) == 5
    for messages in others:
        assert messages.count("asks") == messages.count("sends") == parts
        assert (messages[:8] == ["asks", "sends"] * 3 + ["sends"] * 2) is not forgets
