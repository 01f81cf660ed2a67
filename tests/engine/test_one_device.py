"""On one device the engine is out of the way: the plain network's numbers, and its one graph for torch.compile."""

import copy

import pytest
import torch
from torch import Tensor, nn

import convoy
from convoy.engine.network import Network, network_of
from small_nets import SMALL_NETS

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return SMALL_NETS[name]()


def trained(forward: nn.Module, model: nn.Module) -> list[Tensor]:
    forward(IMAGES).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers())


@pytest.mark.parametrize("name", ["depthwise", "shuffle"])
@pytest.mark.parametrize("plan", ["serial", "sample=1"])
def test_numbers_are_those_of_the_plain_network(name: str, plan: str) -> None:
    plain = build(name)
    net = convoy.parallelize(copy.deepcopy(plain), plan, example=IMAGES)
    assert all(map(torch.equal, trained(plain, plain), trained(net, net)))
    assert torch.equal(plain.eval()(IMAGES), net.eval()(IMAGES))


def test_the_compiled_network_is_one_graph() -> None:
    plain = build("depthwise")
    net = convoy.parallelize(copy.deepcopy(plain), "serial", example=IMAGES)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(trained(compiled, net), trained(plain, plain))


def test_what_is_drawn_still_follows_the_samples() -> None:
    def net(training: bool) -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5)).train(training)
        return convoy.parallelize(model, "serial", example=IMAGES, seed=3)

    first, second = net(True), net(False).train()
    assert not network_of(first).undivided and not network_of(second).undivided
    assert torch.equal(first(IMAGES), second(IMAGES))


class Branches(nn.Module):
    """Says something that no graph can of more than four samples, and takes a list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor, scales: list[float] | None = None) -> Tensor:
        y = self.norm(self.conv(x))
        if len(x) > 4 and float(y.detach().mean()) > -1:
            y = y * 2
        return y * (1 if scales is None else scales[0])


@pytest.mark.parametrize(("copies", "options"), [(2, {}), (1, {"scales": [3.0]})])
def test_what_no_graph_can_say_runs_beside_kernels_too(
    copies: int, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Network, "_has_kernels", lambda self: self.normalizes)
    plain = Branches()
    net = convoy.parallelize(copy.deepcopy(plain), "serial", example=IMAGES)
    assert network_of(net).normalizes
    images = IMAGES.repeat(copies, 1, 1, 1)
    assert torch.equal(net(images, **options), plain(images, **options))
    assert all(map(torch.equal, net.buffers(), plain.buffers()))


def test_statistics_of_announced_microbatches_are_left_to_the_engine() -> None:
    net = convoy.parallelize(build("shuffle"), "serial", example=IMAGES, batch_norm="microbatch")
    before = net.stem[1].running_mean.clone()
    network = network_of(net)
    network.context.enter(0, 0, (len(IMAGES),), IMAGES.device)
    network.samples = (len(IMAGES),)
    net(IMAGES)
    assert torch.equal(net.stem[1].running_mean, before)
    network.context.statistics.fold()
    after = net.stem[1].running_mean.clone()
    assert not torch.equal(after, before)
    network.samples = None  # nobody announces passes: each brings them up to date
    net(IMAGES)
    assert not torch.equal(net.stem[1].running_mean, after)
