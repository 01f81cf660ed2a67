"""Updates whose loss is not finite: left out alike on any number of devices, or the run ends and says where it is."""

import importlib
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.errors import ConvoyError
from convoy.progress import Reporter
from convoy.training import finite, load_recipe, train
from convoy.training.loop import Loop
from convoy.training.session import Session
from convoy.training.step import TrainingStep
from ranks import run_ranks
from tiny import write_mnist
from whole_runs import BASE, Ended, as_before, train_here

training = importlib.import_module("convoy.training.run")

SETTINGS = {"model.name": "unfinite:Unfinite", "reproducible": "true", "epochs": "16ba", "on_nan": "skip"}
"""Updates 7 and 15 are not finite."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("finite") / "data")


@pytest.fixture(scope="module")
def serial(data: Path) -> Ended:
    return run_ranks(train_here, 1, data, data.parent / "serial", SETTINGS)[0]


def test_one_device_leaves_out_what_is_not_finite(data: Path, serial: Ended) -> None:
    told = [sentence for sentence in serial.said if "left out" in sentence and "(" not in sentence]
    assert told[0] == "the loss is nan in update 7, first in the output of layer odd: left out, with 1 so far"
    assert told[1].startswith("the loss is nan in update 15, ")
    lines = [json.loads(line) for line in (data.parent / "serial" / "metrics.jsonl").read_text().splitlines()]
    train = {line["step"]: line for line in lines if line["split"] == "train"}
    assert train[7]["loss"] is None and train[7]["left_out"] == 1
    assert all(
        train[step]["loss"] is not None and "left_out" not in train[step] for step in train if step not in (7, 15)
    )
    assert json.loads((data.parent / "serial" / "summary.json").read_text())["left_out"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"ema": "{decay: 0.9}"}, {"reproducible": "false"}])
def test_several_devices_leave_out_the_same(data: Path, tmp_path: Path, settings: dict[str, str]) -> None:
    one = run_ranks(train_here, 1, data, tmp_path / "one", SETTINGS | settings)[0]
    for found in run_ranks(train_here, 3, data, tmp_path / "run", SETTINGS | settings):
        if "reproducible" in settings:
            want, have = ([loss for loss in each.curve if loss is not None] for each in (one, found))
            assert have == pytest.approx(want, rel=1e-4)
        else:
            assert (found.digest, found.curve) == (one.digest, one.curve)
    assert any("left out, with 2 so far" in sentence for sentence in found.said) or found.said == []


def _without_putting_back(data: Path, out: Path) -> Ended:
    """The running statistics keep what a bad update has put in."""
    with as_before() as patch:
        patch.setattr(finite.FiniteGuard, "restore", lambda self: None)
        return train_here(data, out, SETTINGS)


def test_buffers_that_kept_a_bad_update_would_be_noticed(data: Path, tmp_path: Path, serial: Ended) -> None:
    (found,) = run_ranks(_without_putting_back, 1, data, tmp_path / "run")
    assert found.digest != serial.digest


def _stopped(data: Path, out: Path, settings: dict[str, str]) -> str:
    with pytest.raises(ConvoyError) as raised:
        train_here(data, out, settings)
    return str(raised.value)


@pytest.mark.parametrize(("num", "plan"), [(1, "serial"), (2, "sample=2"), (2, "filter=2")])
def test_the_end_says_where_it_began(data: Path, tmp_path: Path, num: int, plan: str) -> None:
    settings = {"on_nan": "stop", "checkpoint.every": "2ba", "log_every": "4ba", "parallel.plan": plan}
    for said in run_ranks(_stopped, num, data, tmp_path / "run", SETTINGS | settings):
        assert said.startswith("the loss is nan in update 7, first in the output of layer odd")
        assert (" on rank 0 on host " in said) == (num > 1)
        assert said.endswith("(the newest checkpoint is of update 6)")
        assert "(--set on_nan=skip)" in said


def test_the_end_is_said_even_where_it_cannot_be_traced_back(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Session]] = []
    again: list[tuple[bool, str | None]] = []
    check = Loop._check_loss

    def checked(self: Loop, loss: float) -> None:
        seen.append(weakref.ref(self.session))
        check(self, loss)

    def out_of_memory(session: Session, *_: object) -> str:
        again.append((all(one() is None for one in seen), session.recipe.parallel.plan))
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(Loop, "_check_loss", checked)
    monkeypatch.setattr(training, "trace_back", out_of_memory)
    values = BASE | SETTINGS | {"on_nan": "stop", "data.path": str(data), "parallel.plan": "auto"}
    recipe = load_recipe("default", [f"{key}={value}" for key, value in values.items()])
    with as_before(), pytest.raises(finite.NotFiniteError, match="the loss became nan by update 7"):
        train(recipe, tmp_path / "run", reporter=Reporter())
    assert seen and again == [(True, "serial")]  # the first network is gone by then
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_no_checkpoint_holds_weights_that_are_not_finite(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = TrainingStep.__call__

    def spoil(self: TrainingStep, batch: Any, update: int) -> Any:
        result = call(self, batch, update)
        if update == 3:  # the loss was fine, and the next one comes after the checkpoint
            next(iter(self.network.model.parameters())).data.view(-1)[0] = float("inf")
        return result

    monkeypatch.setattr(TrainingStep, "__call__", spoil)
    monkeypatch.setattr(training, "trace_back", lambda session, store, name, error, s: str(error))
    values = BASE | {"data.path": str(data), "checkpoint.every": "2ba", "epochs": "8ba"}
    recipe = load_recipe("default", [f"{key}={value}" for key, value in values.items()])
    with (
        as_before(),
        pytest.raises(ConvoyError, match=r"weights became infinite .* by update 4: .*update 2"),
    ):
        train(recipe, tmp_path / "run", reporter=Reporter())
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


class _Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


def test_a_gradient_that_is_not_finite_is_named_by_its_layer() -> None:
    from convoy.training.finite import Origin

    class Middle(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Spoilt.apply(x)

    net = torch.nn.Sequential(torch.nn.Linear(3, 3), Middle(), torch.nn.Linear(3, 2))
    origin = Origin()
    with origin.watching(net):
        net(torch.ones(4, 3)).sum().backward()
    assert str(origin.found) == "the gradient of layer 0"


def test_a_run_whose_every_update_is_left_out_ends(data: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"model.name": "tiny:TinyNet", "optimizer.lr": "1e30", "epochs": "60ba"}
    (said,) = run_ranks(_stopped, 1, data, tmp_path / "run", settings)
    assert "the 20th in a row to be left out: lower optimizer.lr" in said
