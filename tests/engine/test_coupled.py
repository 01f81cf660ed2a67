"""Networks whose own code couples the samples of a batch, or that give something that belongs to no sample."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.engine.network import network_of
from convoy.engine.uncaptured import Uncaptured
from ranks import RankFailed, run_ranks

COUPLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "softmax": lambda x: x * torch.softmax(x, 0),
    "cumsum": lambda x: x + x.cumsum(0),
    "flip": lambda x: x + x.flip(0),
    "roll": lambda x: x + x.roll(1, 0),
    "std": lambda x: x / (x.std(0) + 1),
    "gram": lambda x: x + 0.1 * (x @ x.t()) @ x,
    "size": lambda x: x * x.shape[0],
    "sort": lambda x: x + x.sort(0)[0],
    "largest": lambda x: x - x.max(0)[0],
    "first": lambda x: x - x[:1],
    "neighbour": lambda x: x + torch.cat([x[1:], x[:1]]),
    "norm": lambda x: x / x.norm(),
    "flat": lambda x: x + x.reshape(-1).cumsum(0).view_as(x),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "einsum": lambda x: x + 0.1 * torch.einsum("bi,bj,cj->ci", x, x, x),
}

UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0) if x.isfinite().all() else x,
    "choice": lambda x: x * 2 if float(x.detach().mean()) > 0.1 else x,
    "part": lambda x: _without_first(x),
    "in place": lambda x: x.mul_(2) if x.isfinite().all() else x,
}
"""Those that cannot be captured."""


def _without_first(x: Tensor) -> Tensor:
    x = x.clone()
    x[0] = 0
    return x


class Coupled(nn.Module):
    """A convolution, the coupling, a classifier."""

    def __init__(self, couple: Callable[[Tensor], Tensor], gives: str = "") -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 6)
        self.couple = couple
        self.gives = gives

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.norm(F.relu(self.conv(x.mul_(1)), inplace=True)), inplace=True)
        x = self.couple(x.mean((2, 3)) * self.scale)
        logits = self.fc(self.drop(x))
        if self.gives == "scalar":
            return logits, (x * x).sum() * self.scale.sum()
        if self.gives == "vector":
            return {"logits": logits, "mean": x.mean(0), "seen": (x > 0).sum(0)}
        return logits


def loss_of(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, tuple):
        return F.mse_loss(output[0], target) + 0.3 * output[1] + 0.01 * output[1] ** 2
    if isinstance(output, dict):
        assert output["seen"].shape == (4,)
        return F.mse_loss(output["logits"], target) + (output["mean"] ** 2).sum()
    return F.mse_loss(output, target)


def changed(output: Any) -> Any:
    """The output, changed in place as users may."""
    for tensor in output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]:
        if tensor.is_floating_point():
            tensor.mul_(0.5)
    return output


def errors(table: str, kind: str, plan: str, gives: str, drop: float) -> tuple[float, bool]:
    """The worst error, relative to the largest gradient, and whether the network could not be captured."""
    torch.manual_seed(0)
    serial = Coupled(globals()[table][kind], gives).double()
    serial.drop.p = drop
    example = torch.zeros(2, 3, 6, 6, dtype=torch.float64)
    net = convoy.parallelize(copy.deepcopy(serial), plan, example, seed=5)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64, generator=generator)
    target = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    mine = convoy.local_samples(net, 5)
    inputs = {"serial": x.clone().requires_grad_(), "net": x[mine].clone().requires_grad_()}
    loss_of(changed(serial(inputs["serial"] * 1)), target).backward()
    loss_of(changed(net(inputs["net"] * 1)), target[mine]).backward()
    got = {**convoy.gradients(net), "input": inputs["net"].grad}
    want = {name: p.grad for name, p in serial.named_parameters()} | {"input": inputs["serial"].grad[mine]}
    largest = max(gradient.abs().max() for gradient in want.values())
    found = max(((got[name] - want[name]).abs().max() / largest).item() for name in want)
    for name, buffer in serial.named_buffers():
        found = max(found, (convoy.state_dict(net)[name] - buffer).abs().max().item())
    return found, isinstance(network_of(net), Uncaptured)


@pytest.mark.parametrize("kind", COUPLINGS)
def test_a_captured_coupling_is_over_the_global_batch(kind: str) -> None:
    for found, uncaptured in run_ranks(errors, 2, "COUPLINGS", kind, "sample=2", "", 0.0):
        assert found < 1e-12
        assert not uncaptured


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "owt=2", "sample=2,filter=2"])
@pytest.mark.parametrize("kind", UNSEEN)
def test_a_coupling_that_nobody_sees_is_over_the_global_batch(kind: str, plan: str) -> None:
    world = 4 if "," in plan else 2
    for found, uncaptured in run_ranks(errors, world, "UNSEEN", kind, plan, "", 0.0):
        assert found < 1e-12
        assert uncaptured


@pytest.mark.parametrize("gives", ["scalar", "vector"])
@pytest.mark.parametrize(("table", "kind"), [("COUPLINGS", "mean"), ("UNSEEN", "choice")])
def test_outputs_that_belong_to_no_sample(table: str, kind: str, gives: str) -> None:
    for plan in ("sample=2", "sample=2,filter=2"):
        for found, _ in run_ranks(errors, 4 if "," in plan else 2, table, kind, plan, gives, 0.0):
            assert found < 1e-12, plan


def test_a_coupling_over_each_ranks_samples_would_be_noticed() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.float64)
    for table in (COUPLINGS, UNSEEN):
        for kind, couple in table.items():
            if kind != "choice":
                apart = torch.cat([couple(x[:3]), couple(x[3:])])
                assert (apart - couple(x)).abs().max() > 1e-3, kind


def dropped(plan: str) -> Tensor:
    torch.manual_seed(0)
    net = convoy.parallelize(Coupled(UNSEEN["mean"]).double(), plan, torch.zeros(2, 3, 6, 6).double(), seed=5)
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    net(x[convoy.local_samples(net, 4)]).square().mean().backward()
    return convoy.gradients(net)["fc.weight"]


def test_dropout_is_that_of_one_device() -> None:
    (want,) = run_ranks(dropped, 1, "serial")
    for plan in ("sample=2", "filter=2"):
        for got in run_ranks(dropped, 2, plan):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def noisy(plan: str) -> None:
    class Noisy(Coupled):
        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(x, 0.5, self.training)
            return super().forward(x)

    convoy.parallelize(Noisy(UNSEEN["choice"]), plan, torch.zeros(2, 3, 6, 6))


def test_numbers_drawn_where_nobody_sees_it_are_refused() -> None:
    with pytest.raises(RankFailed, match="the network draws random numbers that belong to no sample"):
        run_ranks(noisy, 2, "sample=2")
    run_ranks(noisy, 1, "serial")


class Table(Coupled):
    """Drops numbers of a table that all samples share."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.drop(self.scale).sum())


def shared(plan: str, p: float) -> None:
    net = Table(UNSEEN["choice"])
    net.drop.p = p
    convoy.parallelize(net, plan, torch.zeros(2, 3, 6, 6))(torch.ones(2, 3, 6, 6))


def test_dropout_of_what_belongs_to_no_sample_is_refused_by_name() -> None:
    with pytest.raises(RankFailed, match="layer drop draws random numbers that belong to no sample"):
        run_ranks(shared, 2, "sample=2", 0.5)
    run_ranks(shared, 2, "sample=2", 0.0)
    run_ranks(shared, 1, "serial", 0.5)
