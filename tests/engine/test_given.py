"""Networks as people have them: norms by the batch's own statistics, computed weights, wrapped or unfinished ones."""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import convoy
from convoy.errors import ConvoyError
from convoy.graph.given import unwrapped
from ranks import RankFailed, run_ranks

CLOSE = 1e-9


def base(norm: Callable[[], nn.Module] = nn.Identity) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), norm(), nn.LeakyReLU(0.1))
    return nn.Sequential(first, nn.Conv2d(6, 6, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 64, 4)).double()


class ByHand(nn.Module):
    """Batch norm by the batch's own statistics, in evaluation too, called by the network itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = base()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(F.batch_norm(x, None, None, training=True))
        return F.batch_norm(y, None, None, training=True)


class Asking(nn.Module):
    """Asks for a number, so that it cannot be captured."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x if float(x.detach().sum()) < 1e9 else -x)
        return y


def weighed(*norms: Callable[..., nn.Module]) -> nn.Module:
    net = base()
    for layer, norm in zip((net[0][0], net[1]), norms, strict=False):
        norm(layer)
    return net


def compiled_inside() -> nn.Module:
    net = base(lambda: nn.BatchNorm2d(6))
    net[0] = torch.compile(net[0])
    net[1].compile()
    net[4].forward = torch.compile(net[4].forward)
    return net


def doubled(self: nn.Sequential, x: Tensor) -> Tensor:
    return nn.Sequential.forward(self, 2 * x)


def own_forward() -> nn.Module:
    net = base()
    net.forward = MethodType(doubled, net)  # type: ignore[method-assign]
    return net


OLD_SPECTRAL, OLD_WEIGHT = nn.utils.spectral_norm, nn.utils.weight_norm
NETS: dict[str, Callable[[], nn.Module]] = {
    "no running statistics": lambda: base(lambda: nn.BatchNorm2d(6, track_running_stats=False)),
    "by hand": ByHand,
    "momentum none": lambda: base(lambda: nn.BatchNorm2d(6, momentum=None)),
    "instance norm that tracks": lambda: base(lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
    "spectral": lambda: weighed(OLD_SPECTRAL),
    "weight": lambda: weighed(OLD_WEIGHT, OLD_WEIGHT),
    "spectral beside weight": lambda: weighed(OLD_SPECTRAL, OLD_WEIGHT),
    "spectral, asking": lambda: Asking(weighed(OLD_SPECTRAL, OLD_WEIGHT)),
    "data parallel": lambda: nn.DataParallel(base()),
    "compiled inside": compiled_inside,
    "traced by fx": lambda: fx.symbolic_trace(base()),
    "own forward": own_forward,
}
STAGED = ["no running statistics", "by hand", "momentum none", "instance norm that tracks", "weight", "own forward"]


def far(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / (1 + want.abs().max())).item()


def worst(kind: str, plan: str) -> float:
    """How far losses' gradients, the state after three updates and the outputs in evaluation are from one device's."""
    plain = NETS[kind]()
    for layer in plain.modules():
        layer._compiled_call_impl = None  # the reference need not be compiled
    plain = plain if kind != "compiled inside" else base(lambda: nn.BatchNorm2d(6))
    net = convoy.parallelize(NETS[kind](), plan, torch.zeros(3, 3, 8, 8, dtype=torch.float64))
    generator, found = torch.Generator().manual_seed(1), []
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, net)]
    for size in (6, 5, 7):
        x = torch.randn(size, 3, 8, 8, dtype=torch.float64, generator=generator)
        y = torch.randint(4, (size,), generator=generator)
        mine = convoy.local_samples(net, size)
        for each, part, optimizer in zip((plain, net), (slice(size), mine), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(each(x[part]), y[part]).backward()
        pairs = zip(plain.parameters(), convoy.gradients(net).values(), strict=True)
        found += [far(gradient, parameter.grad) for parameter, gradient in pairs if parameter.grad is not None]
        for optimizer in optimizers:
            optimizer.step()
    state = convoy.state_dict(net)
    names = {name.replace("_orig_mod.", ""): name for name in state}
    assert names.keys() == plain.state_dict().keys()
    found += [far(state[names[name]], want) for name, want in plain.state_dict().items()]
    with torch.no_grad():
        found.append(far(net.eval()(x[mine]), plain.eval()(x)[mine]))
    return max(found)


@pytest.mark.parametrize("kind", NETS)
def test_it_is_the_network_on_one_device(kind: str) -> None:
    for plan in ["sample=2", "filter=2", *(["stage=2"] if kind in STAGED else ["height=2"])]:
        assert max(run_ranks(worst, 2, kind, plan)) < CLOSE, plan


@pytest.mark.parametrize("kind", NETS)
def test_so_it_is_with_one(kind: str) -> None:
    (found,) = run_ranks(worst, 1, kind, "serial")
    assert found < CLOSE


def in_parts() -> None:
    example = torch.zeros(4, 3, 8, 8, dtype=torch.float64)
    convoy.parallelize(NETS["no running statistics"](), "stage=2", example, microbatches=2)


def test_parts_with_statistics_of_their_own_are_refused() -> None:
    with pytest.raises(RankFailed, match=r"batch norm over the global batch \(layer 0.1\) .* microbatches=1 "):
        run_ranks(in_parts, 2)


def lazy() -> nn.Module:
    return base(nn.LazyBatchNorm2d)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return base()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "compiled": (lambda: torch.compile(base()), r"torch.compile returned: .*net\._orig_mod.* compile=True"),
    "scripted": (lambda: torch.jit.script(base()), "the network is TorchScript.*: give the module that was scripted"),
    "traced": (lambda: torch.jit.trace(base(), torch.zeros(2, 3, 8, 8).double()), "the network is TorchScript"),
    "scripted inside": (lambda: Asking(torch.jit.script(base())), "layer net is TorchScript"),
    "lazy": (lazy, r"weight of layer 0\.1 has no shape .*: call the network once, net\(example\), then"),
    "on meta": (on_meta, r"weight of layer 0\.0 is on the meta device .*convoy\.deferred\(\)"),
    "exported": (
        lambda: torch.export.export(base(), (torch.zeros(2, 3, 8, 8).double(),)).module(),
        "the network comes from torch.export",
    ),
    "a function": (lambda: F.relu, "the network is of type function: give an nn.Module"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_before_anything_runs(kind: str) -> None:
    make, words = REFUSED[kind]
    with pytest.raises(ConvoyError, match=words):
        convoy.parallelize(make(), "serial", torch.zeros(2, 3, 8, 8, dtype=torch.float64))


def distributed() -> None:
    net = nn.parallel.DistributedDataParallel(base())
    convoy.parallelize(net, "sample=2", torch.zeros(2, 3, 8, 8, dtype=torch.float64))


def test_distributed_data_parallel_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"DistributedDataParallel, which adds up .*net\.module"):
        run_ranks(distributed, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch, when it first compiles
def test_wrappers_are_taken_off() -> None:
    net = base()
    assert unwrapped(nn.DataParallel(torch.compile(net))) is net
    assert unwrapped(net) is net


def test_a_plan_for_a_lazy_network_is_refused() -> None:
    with pytest.raises(ConvoyError, match="has no shape before a first pass"):
        convoy.plan(lazy(), example=torch.zeros(2, 3, 8, 8), devices=2)


def test_a_copy_of_computed_weights_is_one() -> None:
    net = convoy.parallelize(NETS["spectral"](), "serial", torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    assert copy.deepcopy(net)(torch.ones(2, 3, 8, 8, dtype=torch.float64)).shape == (2, 4)
