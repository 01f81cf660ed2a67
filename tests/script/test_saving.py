"""What `convoy.save` takes and refuses, and that a checkpoint is whole or not there."""

import copy
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn, optim

import convoy
from convoy.checkpoint import store
from convoy.checkpoint.files import Checkpoint
from convoy.checkpoint.store import Draft
from convoy.script.checkpoint import load, save
from convoy.script.state import optimizer_state_dict, state_dict
from ranks import run_ranks
from script.saved import alike, refused
from training.scenarios import put


def plain(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(width * 4, 3))


def small(plan: str = "serial", width: int = 4) -> nn.Module:
    return convoy.parallelize(plain(width), plan, example=torch.zeros(2, 3, 4, 4))


def stepped(net: nn.Module, kind: type[optim.Optimizer] = optim.Adam) -> optim.Optimizer:
    optimizer = kind(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2, 3, 4, 4)).square().mean().backward()
        optimizer.step()
    return optimizer


ANYTHING: dict[str, Any] = {"epoch": 7, "lr": 0.1 + 0.2, "worst": -math.inf, "best": None, "done": True}
ANYTHING |= {
    "name": "größer/kleiner ~1",
    "history": [{"loss": 1.5, "top": (1, 5)}, {}],
    "by_number": {1: "one", 2.5: [None], "$": "tag"},
    "milestones": Counter({3: 1, 5: 2}),
    "mean": torch.tensor([0.5, 0.25], dtype=torch.bfloat16),
    "nested": {"a/b": [torch.arange(3), (torch.tensor(True),)], "a": {"b": torch.zeros(0, 2)}},
}


def test_a_checkpoint_is_json_and_the_plain_networks_tensors_and_values_come_back(tmp_path: Path) -> None:
    net = small()
    save(tmp_path / "x", net, stepped(net), **ANYTHING)
    assert {file.name for file in (tmp_path / "x").iterdir()} == {"checkpoint.json", "state"}
    assert json.loads((tmp_path / "x" / "checkpoint.json").read_text())["values"]["state"]["epoch"] == 7
    (shard,) = (tmp_path / "x" / "state").iterdir()
    tensors = {name[4:]: tensor for name, tensor in load_file(shard).items() if name.startswith("net/")}
    plain().load_state_dict(tensors)
    rest = load(tmp_path / "x", net)
    assert alike({name: rest[name] for name in ANYTHING}, ANYTHING, 0.0) and "optimizer" not in rest


class Touchy:
    """Refuses the state of another."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]
        if self.number == 13:
            raise KeyError("13")


def test_nothing_is_changed_where_something_does_not_fit(tmp_path: Path) -> None:
    net = small()
    save(path := tmp_path / "x", net, stepped(net), scheduler=Touchy(5), last=Touchy(13), epoch=1)
    other = small()
    adam, first, last = stepped(other), Touchy(1), Touchy(2)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    before = copy.deepcopy((state_dict(other), optimizer_state_dict(other, adam)))
    for words, args, named in (
        ("last does not take what was saved (KeyError: '13')", (other, adam), {"scheduler": first, "last": last}),
        ("optimizer was saved from Adam, and is SGD now", (other, optim.SGD(other.parameters(), 0.1)), {}),
        ("net is another network than was saved: 0.weight is [4, 3, 3, 3] in the state", (small(width=5),), {}),
    ):
        assert words in refused(load, path, *args, **named)
        assert alike(before, (state_dict(other), optimizer_state_dict(other, adam)), 0.0)
        assert first.number == 1 and last.number == 2
    assert load(path, other, adam) == {"epoch": 1, "last": {"number": 13}}


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    net, folder = small(), tmp_path / "folder"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    for place in (folder, folder / "thesis.tex"):
        assert "is there and no checkpoint: give convoy.save another path" in refused(save, place, net)
        assert "is no checkpoint (it has no checkpoint.json)" in refused(load, place, net)
    assert "is not there: give the path" in refused(load, tmp_path / "none", net)
    assert (folder / "thesis.tex").read_text() == "mine"
    save(tmp_path / "a" / "new" / "place", net)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "new" / "place")
    save(tmp_path / "link", net, epoch=2)
    assert (tmp_path / "link").is_symlink() and load(tmp_path / "a" / "new" / "place", net) == {"epoch": 2}
    kept = store.CheckpointStore(tmp_path / "run")
    place = put(kept, Checkpoint(3, "a run", {"model.x": torch.zeros(1)}, {}))
    assert "is a checkpoint of convoy train: give convoy.save another path" in refused(save, place, net)
    assert "not of convoy.save: go on with its run by --resume" in refused(load, place, net)
    assert kept.load(3).identity == "a run"


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("exchange", [True, False])
def test_the_old_one_stays_until_the_new_one_is_whole(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, path = small(), tmp_path / "x"
    if not exchange:
        monkeypatch.setattr(store, "_EXCHANGE", 1 << 30)  # no file system knows this
    Draft(tmp_path / ".x.abc.tmp", 0, 2).add(0, {"t": torch.zeros(2)})  # of a process that was killed
    for epoch in (1, 2):
        save(path, net, epoch=epoch)
        assert load(path, net) == {"epoch": epoch} and [file.name for file in tmp_path.iterdir()] == ["x"]
    for step in ("write_shard", "write_record", "sync"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, step, full)
            assert "cannot be written (No space left on device)" in refused(save, path, net, epoch=3)
        assert load(path, net) == {"epoch": 2} and [file.name for file in tmp_path.iterdir()] == ["x"]


def _together(folder: Path) -> tuple[str, list[str], str]:
    """What is said of a full disk of rank 1, of what is not alike on ranks, and where rank 0 saves alone."""
    net, place, rank = small("filter=2"), folder / "x", torch.distributed.get_rank()
    optimizer = stepped(net)
    save(place, net, **ANYTHING)
    assert alike(load(place, net), ANYTHING, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(store, "write_shard", full)
        no_room = refused(save, place, net, epoch=2)
    assert alike(load(place, net), ANYTHING, 0.0)
    optimizer.param_groups[0]["lr"] += rank
    different: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((optimizer,), {}),
        ((), {"mean": torch.tensor(float(rank))}),
        ((), {"scheduler": Touchy(rank)}),
        ((), {"a": 1, "b": 2} if rank else {"b": 2, "a": 1, "c": 3}),
    ]
    unlike = [refused(save, place, net, *args, **named) for args, named in different]
    save(place, net, loss=0.5 + rank)
    assert load(place, net) == {"loss": 0.5}
    alone = refused(save, folder / "y", net) if rank == 0 else refused(net, torch.ones(2, 3, 4, 4))
    return no_room, unlike, alone


def test_ranks_save_together_and_what_goes_wrong_on_one_is_said_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(_together, 2, tmp_path)
    assert first[:2] == second[:2] and [file.name for file in tmp_path.iterdir()] == ["x"]
    no_room, unlike, _ = first
    assert no_room.startswith("rank 1: ") and "No space left" in no_room
    places = ["optimizer/param_groups/0/lr", "mean", "scheduler/number", "c"]
    for text, place in zip(unlike, places, strict=True):
        assert text.startswith(place) and "is not the same on rank 1 as on rank 0" in text, text
    assert all("all ranks call convoy.save together" in alone for *_, alone in (first, second))
