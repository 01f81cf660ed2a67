"""What `convoy.save` takes and refuses, and that a checkpoint is whole or not there."""

import copy
import json
import math
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

import convoy
from convoy.checkpoint import store
from convoy.checkpoint.files import DamagedCheckpointError, write_record
from convoy.checkpoint.store import Draft
from convoy.errors import ConvoyError
from convoy.script import checkpoint
from convoy.script.checkpoint import load, save
from convoy.script.state import load_state_dict, optimizer_state_dict, state_dict
from ranks import run_ranks


def small(plan: str = "serial", width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(width * 4, 3))
    return convoy.parallelize(net, plan, example=torch.zeros(2, 3, 4, 4))


def stepped(net: nn.Module, kind: type[optim.Optimizer] = optim.Adam) -> optim.Optimizer:
    optimizer = kind(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2, 3, 4, 4)).square().mean().backward()
        optimizer.step()
    return optimizer


def refused(path: Path | str, *args: Any, way: Any = save, **kwargs: Any) -> str:
    with pytest.raises(ConvoyError) as caught:
        way(path, *args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


def listed(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()]


ANYTHING = {
    "epoch": 7,
    "lr": 0.1 + 0.2,
    "worst": -math.inf,
    "best": None,
    "name": "größer/kleiner ~1",
    "done": True,
    "history": [{"loss": 1.5, "top": (1, 5)}, {}],
    "by_number": {1: "one", 2.5: [None], "$": "tag"},
    "milestones": Counter({3: 1, 5: 2}),
    "mean": torch.tensor([0.5, 0.25], dtype=torch.bfloat16),
    "nested": {"a/b": [torch.arange(3), (torch.tensor(True),)], "a": {"b": torch.zeros(0, 2)}},
}


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and a == b


def _anything(plan: str, path: Path) -> None:
    net = small(plan)
    save(path, net, **ANYTHING)
    assert alike(load(path, net), ANYTHING)


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    _anything("serial", tmp_path / "alone")
    run_ranks(_anything, 2, "filter=2", tmp_path / "x")


def test_a_checkpoint_is_json_and_the_plain_networks_tensors(tmp_path: Path) -> None:
    net = small()
    save(tmp_path / "x", net, stepped(net), epoch=3)
    assert {each.name for each in (tmp_path / "x").iterdir()} == {"checkpoint.json", "state"}
    assert json.loads((tmp_path / "x" / "checkpoint.json").read_text())["values"]["state"]["epoch"] == 3
    (shard,) = (tmp_path / "x" / "state").iterdir()
    prefix = "net/"
    tensors = {name[len(prefix) :]: t for name, t in load_file(shard).items() if name.startswith(prefix)}
    nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).load_state_dict(tensors)


UNSAVED: list[tuple[dict[str, Any], str]] = [
    ({"x": {1, 2}}, "x is a set, which a checkpoint cannot hold"),
    ({"x": [0, object()]}, "x/1 is a object"),
    ({"x": {(1, 2): 3}}, "x has the key (1, 2)"),
    ({"x": torch.eye(2).to_sparse()}, "x is a tensor of torch.float32 and torch.sparse_coo"),
    ({"x": torch.zeros(1, dtype=torch.complex128)}, "convert it first"),
    ({"x": [optim.SGD([torch.zeros(1)], 0.1)]}, "under a name of its own"),
    ({"scheduler": 3}, "scheduler has no state_dict and load_state_dict: give the scheduler itself"),
    ({"second": optim.SGD([torch.zeros(1)], 0.1)}, "holds a parameter of shape [1] that is none of"),
]


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    net = small()
    for values, said in UNSAVED:
        assert said in refused(tmp_path / "x", net, **values)
    assert "pass what convoy.parallelize returned" in refused(tmp_path / "x", nn.Linear(2, 2))
    assert not any(tmp_path.iterdir())


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multi": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedules_go_on(kind: str, tmp_path: Path) -> None:
    def run(scheduler: Any, optimizer: optim.Optimizer, epochs: int) -> list[float]:
        rates = []
        for _ in range(epochs):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    def both(net: nn.Module) -> tuple[optim.Optimizer, Any]:
        optimizer = optim.SGD(net.parameters(), lr=0.1)
        return optimizer, SCHEDULERS[kind](optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = small()
        optimizer, scheduler = both(net)
        run(scheduler, optimizer, 4)
        save(tmp_path / "x", net, optimizer, scheduler=scheduler)
        rest = run(scheduler, optimizer, 6)
        fresh, again = both(net)
        assert load(tmp_path / "x", net, fresh, scheduler=again) == {}
        assert run(again, fresh, 6) == rest


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
    optimizer = stepped(net)
    save(tmp_path / "x", net, optimizer, scheduler=Touchy(5), last=Touchy(13), epoch=1)
    other = small()
    adam, first, last = stepped(other), Touchy(1), Touchy(2)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    before = copy.deepcopy((state_dict(other), optimizer_state_dict(other, adam)))
    path = tmp_path / "x"

    def no(*args: Any, **kwargs: Any) -> str:
        text = refused(path, *args, way=load, **kwargs)
        assert alike(before[0], state_dict(other)) and alike(before[1], optimizer_state_dict(other, adam))
        assert first.number == 1 and last.number == 2
        return text

    assert "last does not take what was saved (KeyError: '13')" in no(other, adam, scheduler=first, last=last)
    assert "no ema: leave ema away" in no(other, adam, ema=copy.deepcopy(other))
    assert "epoch is no object" in no(other, adam, epoch=0)
    assert "epoch is the state of an object, but a value in" in no(other, adam, epoch=last)
    assert "optimizer was saved from Adam, and is SGD now" in no(other, optim.SGD(other.parameters(), 0.1))
    assert "group 0: make the optimizer with" in no(other, optim.Adam(other[0].parameters(), 0.1))
    groups = [{"params": [p]} for p in other.parameters()]
    assert "has 1 parameter groups and the optimizer 4" in no(other, optim.Adam(groups, 0.1))
    assert "net is another network than was saved: 0.weight is [4, 3, 3, 3] in the state" in no(small(width=5))
    assert load(path, other, adam) == {"epoch": 1, "last": {"number": 13}}


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    net = small()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("file", "folder"):
        assert "is there and no checkpoint: give convoy.save another path" in refused(tmp_path / name, net)
        assert "is no checkpoint (it has no checkpoint.json)" in refused(tmp_path / name, net, way=load)
    assert "is not there: give the path" in refused(tmp_path / "none", net, way=load)
    assert (tmp_path / "folder" / "thesis.tex").read_text() == (tmp_path / "file").read_text() == "mine"
    save(tmp_path / "empty", net)
    save(tmp_path / "a" / "new" / "place", net)
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    save(tmp_path / "link", net, epoch=2)
    assert (tmp_path / "link").is_symlink() and load(tmp_path / "empty", net) == {"epoch": 2}
    assert "could not be written" in refused(tmp_path / "file" / "x", net)


def test_a_run_of_the_trainer_is_not_taken_for_one(tmp_path: Path) -> None:
    kept = store.CheckpointStore(tmp_path)
    place = kept.save(store.Checkpoint(3, "a run", {"model.x": torch.zeros(1)}, {}))
    assert "is a checkpoint of convoy train: give convoy.save another path" in refused(place, small())
    assert "not of convoy.save: go on with its run by --resume" in refused(place, small(), way=load)
    assert kept.load(3).identity == "a run"


@pytest.mark.parametrize("exchange", [True, False])
def test_the_old_one_stays_until_the_new_one_is_whole(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = small()
    path = tmp_path / "x"
    if not exchange:
        monkeypatch.setattr(store, "_EXCHANGE", 1 << 30)  # no file system knows this
    save(path, net, epoch=1)
    save(path, net, epoch=2)
    assert load(path, net) == {"epoch": 2} and listed(tmp_path) == ["x"]
    for step in ("write_shard", "write_record", "sync"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, step, full)
            assert "could not be written (No space left on device)" in refused(path, net, epoch=3)
        assert load(path, net) == {"epoch": 2} and listed(tmp_path) == ["x"]


def test_what_a_killed_process_has_left_is_swept(tmp_path: Path) -> None:
    net = small()
    Draft(tmp_path / ".x.abc.tmp", 0, 2).add(0, {"t": torch.zeros(2)})
    save(tmp_path / "x", net)
    assert listed(tmp_path) == ["x"]


def test_every_damage_is_noticed_and_the_next_one_takes_its_place(tmp_path: Path) -> None:
    net, place = small(), tmp_path / "x"
    save(place, net, stepped(net), epoch=1)
    for file in [each for each in place.rglob("*") if each.is_file()]:
        content = file.read_bytes()
        middle = len(content) // 2
        for damage in (content[:-3], content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :], None):
            file.unlink() if damage is None else file.write_bytes(damage)
            with pytest.raises((DamagedCheckpointError, ConvoyError), match=r"damaged|no checkpoint"):
                load(place, net)
        file.write_bytes(content)
    (place / "checkpoint.json").write_text("{")
    save(place, net, epoch=2)
    assert load(place, net) == {"epoch": 2}


def test_other_values_are_refused_though_the_checksums_fit(tmp_path: Path) -> None:
    net, place = small(), tmp_path / "x"
    save(place, net, epoch=1)
    record = json.loads((place / "checkpoint.json").read_text())
    tensor = {"$": "tensor", "name": "nobody"}
    for values in (
        {},
        {"about": {}, "state": {}},
        {"about": [], "state": {"net": 1}},
        {"about": {"net": {}}, "state": {"net": tensor}},
    ):
        write_record(place, record["step"], record["identity"], values, record["sha256"])
        assert re.search("holds other values|no net|damaged", refused(place, net, way=load))


def _rank(net: nn.Module) -> int:
    return checkpoint.network_of(net).groups.rank


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


class Shadow:
    """An average as some libraries keep it: of the parameters that it is given."""

    def __init__(self, net: nn.Module) -> None:
        self.shadow = [p.detach().clone() for p in net.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def _together(folder: Path) -> tuple[list[int], str, list[str], str]:
    """Shards where both ranks see the folder and where one does; what is said of a full disk of rank 1, of what is
    not alike on ranks, and where rank 0 saves alone."""
    net, own, shards = small("filter=2"), checkpoint.stamp, []
    optimizer, rank = stepped(net), _rank(net)
    for name, blind in (("both", -1), ("one", 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "stamp", lambda folder, blind=blind: own(folder) if rank != blind else None)
            save(folder / name, net, optimizer, epoch=4)
        shards.append(len(list((folder / name / "state").iterdir())))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(store, "write_shard", full)
        no_room = refused(folder / "both", net, epoch=2)
    assert load(folder / "both", net, optimizer) == {"epoch": 4}
    optimizer.param_groups[0]["lr"] += rank
    unlike = [refused(folder / "x", net, optimizer), refused(folder / "x", net, mean=torch.tensor(float(rank)))]
    unlike += [refused(folder / "x", net, shadow=Shadow(net)), refused(folder / "x", net, scheduler=Touchy(rank))]
    unlike.append(refused(folder / "x", net, **({"a": 1, "b": 2} if rank else {"b": 2, "a": 1, "c": 3})))
    save(folder / "x", net, loss=0.5 + rank)
    assert load(folder / "x", net) == {"loss": 0.5}
    if rank == 0:
        return shards, no_room, unlike, refused(folder / "y", net)
    with pytest.raises(ConvoyError) as caught:
        net(torch.ones(2, 3, 4, 4))
    return shards, no_room, unlike, str(caught.value)


def test_ranks_save_together_and_what_goes_wrong_on_one_is_said_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(_together, 2, tmp_path)
    assert first[:3] == second[:3] and sorted(listed(tmp_path)) == ["both", "one", "x"]
    shards, no_room, unlike, _ = first
    assert shards == [2, 1]
    assert no_room.startswith("rank 1: ") and "No space left" in no_room
    places = ["optimizer/param_groups/0/lr", "mean", "shadow/shadow/0", "scheduler/number", "c"]
    for text, place in zip(unlike, places, strict=True):
        assert text.startswith(place) and "is not the same on rank 1 as on rank 0" in text, text
    assert all("all ranks call convoy.save together" in alone for *_, alone in (first, second))
    nets = {name: small() for name in ("both", "one")}
    assert all(load(tmp_path / name, net, stepped(net)) == {"epoch": 4} for name, net in nets.items())
    assert alike(state_dict(nets["both"]), state_dict(nets["one"]))


class Tied(nn.Module):
    """Two layers with one weight, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((48,), 0.1), persistent=False)
        self.register_buffer("shift", torch.zeros(48))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.flatten(1)) * self.scale + self.shift)


def _everything(plan: str, path: Path, write: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """A second network, its copy of before, its optimizer, a plain module and a scale go with the first."""
    net = small(plan)
    torch.manual_seed(1 if write else 2)
    critic = convoy.parallelize(Tied(), plan, example=torch.zeros(2, 3, 4, 4))
    average, table = copy.deepcopy(critic), nn.Embedding(2, 3)
    judge = stepped(critic, optim.AdamW) if write else optim.AdamW(critic.parameters(), 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 if write else 2.0)
    rest = {"critic": critic, "average": average, "judge": judge, "table": table, "scaler": scaler}
    if write:
        with torch.no_grad():
            table.weight.fill_(4.0)
        save(path, net, stepped(net), **rest)
    else:
        assert load(path, net, **rest) == {}
        assert (table.weight == 4).all() and scaler.state_dict()["scale"] == 8.0
    return state_dict(critic), state_dict(average), optimizer_state_dict(critic, judge)


def test_whatever_goes_with_the_network_goes_to_every_plan(tmp_path: Path) -> None:
    saved = run_ranks(_everything, 2, "filter=2", tmp_path / "x", True)[0]
    assert set(saved[0]) == {"first.weight", "first.bias", "second.weight", "second.bias", "shift"}
    assert not alike(saved[0], saved[1])
    for plan, world in {"serial": 1, "sample=2": 2, "channel=2": 2}.items():
        assert all(alike(saved, found) for found in run_ranks(_everything, world, plan, tmp_path / "x", False))
    whole = load(tmp_path / "x", small())
    assert whole.keys() == {"critic", "average", "judge", "table", "scaler"}
    assert alike(dict(whole["critic"]), dict(saved[0])) and alike(whole["judge"], saved[2])


def _by_torch(plan: str, folder: Path, write: bool) -> dict[str, Tensor]:
    from torch.distributed import checkpoint as dcp

    net = small(plan)
    state = state_dict(net)
    if write:
        state["0.bias"] += 1
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        load_state_dict(net, state)
    return state


def test_torchs_distributed_checkpoint_takes_whole_tensors(tmp_path: Path) -> None:
    saved = run_ranks(_by_torch, 2, "filter=2", tmp_path / "x", True)[0]
    for plan, world in {"sample=2": 2, "serial": 1}.items():
        assert all(alike(saved, found) for found in run_ranks(_by_torch, world, plan, tmp_path / "x", False))
