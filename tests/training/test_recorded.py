"""Updates recorded and replayed give the bits of updates that run, and say so; what cannot be replayed is named."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.engine.recorded import Recorded, distance
from convoy.errors import ConvoyError
from convoy.models import create
from convoy.ops.context import StepContext
from convoy.planner import Workload
from convoy.training import auto_plan
from convoy.training.environment import join_ranks
from convoy.training.recipe import load_recipe
from convoy.training.set_up import set_up
from convoy.training.workloads import workload_of_recipe
from ranks import run_ranks
from replayed import BrokenGraph, ReplayedGraph, recording
from tiny import TinyNet, write_mnist

UPDATES = 20
Bits = tuple[dict[str, Tensor], list[float], list[str]]


def train(data: Path, model: str, record: type[ReplayedGraph] | None, *settings: str) -> Bits:
    """Weights and buffers, and EMA's, after some updates; their losses; what was said of recording."""
    ranks, device = join_ranks()
    with recording(record) if record else nullcontext():
        choices = ["data.path=" + str(data), "model.name=" + model, "batch=16", "microbatch=4", *settings]
        session = set_up(load_recipe("default", choices), device, ranks=ranks, keep=False)
        step, averaged, said, losses = session.step(), session.state.averaged, list[str](), list[float]()
        step.records = True
        if record:
            assert step.recorded is not None
            step.recorded.tell = said.append
        session.model.train()
        with closing(session.batches(0, UPDATES)) as batches:
            for update, batch in enumerate(batches):
                result = step(batch, update)
                losses.append(float(sum(result.losses)))
                if averaged is not None:
                    averaged.update(session.model)
        state = {name: x.clone() for name, x in session.model.state_dict().items()}
        if averaged is not None:
            state |= {f"average of {n}": x.clone() for n, x in session.state.contents({})[0] if "average" in n}
        return state, losses, said


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("recorded") / "data")


def same(a: Bits, b: Bits) -> bool:
    return a[1] == b[1] and all(torch.equal(x, b[0][name]) for name, x in a[0].items())


ALL = "optimizer.base_lr=0.1", "ema={decay: 0.9}", "clip_norm=0.5", "epochs=20ba"


def both(
    data: Path, model: str, settings: tuple[str, ...], graph: type[ReplayedGraph] = ReplayedGraph
) -> tuple[bool, list[str]]:
    eager, replayed = (train(data, model, record, *settings) for record in (None, graph))
    return same(eager, replayed), replayed[2]


@pytest.mark.parametrize("plan", ["serial", "sample=2", "filter=2"])
@pytest.mark.parametrize("batch_norm", ["microbatch", "sync", "local"])
def test_replayed_updates_have_the_bits_of_updates_that_run(data: Path, plan: str, batch_norm: str) -> None:
    """Other pictures, labels, random keys and learning rates in each; dropout, EMA and clipping."""
    settings = (*ALL, f"parallel.plan={plan}", f"batch_norm={batch_norm}")
    for alike, said in run_ranks(both, 1 if plan == "serial" else 2, data, "tiny:TinyNet", settings):
        assert alike
        assert len(said) == 1 and said[0].startswith("updates are replayed as a CUDA graph"), said
        assert "has the same bits" in said[0]


def test_a_recording_that_breaks_off_leaves_no_trace(data: Path) -> None:
    """Neither of gradients that were to be added nor of what batch norm had noted."""
    settings = (*ALL, "parallel.plan=sample=2", "batch_norm=microbatch")
    for alike, said in run_ranks(both, 2, data, "tiny:TinyNet", settings, BrokenGraph):
        assert alike
        assert len(said) == 1 and "not recorded as CUDA graphs: it breaks off" in said[0]


class Forgetful:
    """Keeps nothing alive, as a CUDA graph does not; what it recorded has run already."""

    def record(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        return work()

    def replay(self) -> None:
        pass


def test_a_recording_keeps_what_it_reads_and_notices_weights_elsewhere() -> None:
    net, constants, runs = nn.Linear(3, 1), [torch.ones(3)], list[int]()

    def function(step: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        runs.append(step)
        loss = net(inputs[0] * constants[0]).sum()
        loss.backward()
        return [loss.detach()]

    recorded = Recorded(function, net, StepContext(), Forgetful)
    for step in range(6):
        net.zero_grad()
        recorded(step, [torch.ones(2, 3)])
    assert recorded.is_recorded and runs == [0, 1, 2, 3, 4, 4, 3]
    constant = weakref.ref(constants.pop())
    assert constant() is not None
    constants.append(torch.ones(3))
    net.weight.data = net.weight.data.clone()
    recorded(6, [torch.ones(2, 3)])
    assert runs[-1] == 6
    recorded.forget()
    assert constant() is None


@pytest.mark.parametrize("change", ["freeze", "mode", "buffer"])
def test_a_network_that_is_no_longer_as_recorded_runs_as_ever(change: str) -> None:
    net, runs = nn.Sequential(nn.Linear(3, 2), nn.Identity()), list[int]()
    net[1].register_buffer("offset", torch.ones(2))

    def function(step: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        runs.append(step)
        net(inputs[0]).sum().backward()
        return []

    recorded = Recorded(function, net, StepContext(), Forgetful)
    for step in range(7):
        net.zero_grad()
        recorded(step, [torch.ones(2, 3)])
    assert recorded.is_recorded and runs[-1] == 3
    if change == "freeze":
        net[0].bias.requires_grad_(False)
    elif change == "mode":
        net[1].eval()
    else:
        net[1].offset = net[1].offset.clone()
    recorded(7, [torch.ones(2, 3)])
    assert runs[-1] == 7


@pytest.mark.parametrize(("broken", "changes"), [(1, 1e-3), (2, 1e-3), (3, 1e-3), (4, 0.0)])
def test_a_call_that_breaks_off_proves_nothing(broken: int, changes: float) -> None:
    """What changes from update to update is noticed all the same; what does not is recorded later."""
    net, calls, told = nn.Linear(3, 1), list[int](), list[str]()

    def function(step: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        calls.append(step)
        if len(calls) == broken + 1:
            raise KeyboardInterrupt
        loss = net(inputs[0] * (1 + changes * len(calls))).sum()
        loss.backward()
        return [loss.detach()]

    recorded = Recorded(function, net, StepContext(), Forgetful, tell=told.append)
    for step in range(9):
        net.zero_grad()
        with suppress(KeyboardInterrupt):
            recorded(step, [torch.ones(2, 3)])
    (sentence,) = told
    assert ("mul changes from update to update" if changes else "are replayed as a CUDA graph") in sentence


def test_numbers_that_are_none_count_where_only_one_side_has_them() -> None:
    """As gradients of a loss that is scaled too much have them."""
    nan, inf = float("nan"), float("inf")
    first = [torch.tensor([nan, inf, 2.0]), torch.tensor([inf])]
    assert distance([torch.tensor([nan, inf, 3.0]), torch.tensor([inf])], first) == 0.5
    assert distance([torch.tensor([nan, inf, 2.0]), torch.tensor([inf])], first) < 1e-300
    assert distance([torch.tensor([1.0, inf, 2.0]), torch.tensor([inf])], first) == inf
    assert distance([torch.tensor([nan, inf, 2.0]), torch.tensor([1.0])], first) == inf


def test_the_scale_of_a_loss_in_fp16_is_that_of_each_update(data: Path) -> None:
    with_scale = (*ALL, "precision=fp16", "parallel.plan=serial")
    ((alike, said),) = run_ranks(both, 1, data, "tiny:TinyNet", with_scale)
    assert alike and "has the same bits" in said[0]


@pytest.mark.parametrize(
    ("record", "settings", "recorded"),
    [
        (True, (), True),
        (False, (), False),
        (True, ("cuda_graphs=off",), False),
        (True, ("reproducible=true",), False),
    ],
)
def test_the_planner_knows_whether_updates_will_be_recorded(
    record: bool, settings: tuple[str, ...], recorded: bool
) -> None:
    recipe = load_recipe("default", ["model.name=lenet", "data.path=nowhere", "batch=16", *settings])
    with recording() if record else nullcontext():
        workload = workload_of_recipe(recipe, create("lenet"), (1, 28, 28), 2, torch.device("cpu"))
    assert workload.recorded == recorded


def planned(data: Path, *settings: str) -> str:
    """What is said of a plan that is to be found; whether updates are recorded then stands in place of a plan."""

    def stop(workload: Workload, *_: Any, **__: Any) -> Any:
        raise ConvoyError(f"recorded: {workload.recorded}")

    ranks, device = join_ranks()
    with recording(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_plan, "make_plan", stop)
        choices = [f"data.path={data}", "model.name=tiny:TinyNet", "batch=16", "microbatch=4", "parallel.plan=auto"]
        return " ".join(set_up(load_recipe("default", [*choices, *settings]), device, ranks=ranks, keep=False).notes)


@pytest.mark.parametrize(("settings", "recorded"), [((), True), (("cuda_graphs=off",), False)])
def test_a_plan_is_chosen_for_updates_as_they_will_run(data: Path, settings: tuple[str, ...], recorded: bool) -> None:
    assert all(f"recorded: {recorded}" in notes for notes in run_ranks(planned, 2, data, *settings))


class Frozen(TinyNet):
    """Does what a recording would freeze or cannot hold."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1, kind: str = "") -> None:
        super().__init__(num_classes, in_channels)
        self.kind, self.count = kind, 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        found: Any = super().forward(x)
        if not self.training:
            return found
        logits, aux = found
        if self.kind == "counter":
            logits = logits * (1 + 0.1 * self.count)
        elif self.kind == "constant":
            logits = logits + torch.tensor([float(self.count)])
        elif self.kind == "replaced":
            self.offset = torch.full((10,), 0.1) * x.mean().detach()
            logits = logits + self.__dict__.get("before", self.offset)
            self.before = self.offset
        elif self.kind == "read":
            logits = logits * float(aux.detach().mean())
        elif self.kind == "branch":
            logits = logits + 0 if self.count % 2 else logits
        return logits, aux


def train_frozen(data: Path, kind: str) -> str:
    """What is said of a network that runs as it is, on one device."""
    settings = (*ALL, "parallel.plan=serial", f"model.options={{kind: {kind}}}")
    _, _, said = train(data, "training.test_recorded:Frozen", ReplayedGraph, *settings)
    (sentence,) = said
    return sentence


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("counter", "mul changes from update to update, by a number of Python's (test_recorded.py:"),
        ("constant", "takes another tensor in each update (test_recorded.py:"),
        ("replaced", "takes another tensor in each update (test_recorded.py:"),
        ("read", "the host reads a number or a size back from the device (test_recorded.py:"),
        ("branch", "operations"),
    ],
)
def test_what_a_replay_would_freeze_is_named(data: Path, kind: str, named: str) -> None:
    assert named in train_frozen(data, kind)
