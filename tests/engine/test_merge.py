"""Several microbatches in one pass: equal to one after the other, and seen where it would not be."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.engine import StepContext, passes, prepare
from convoy.engine.coupling import CPU_BUDGET, Probe, probe
from convoy.engine.parallelize import take_part

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.between = between or nn.Identity()
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6 * 8 * 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.between(F.relu(self.norm(self.conv(x)))).flatten(1)))


class FunctionalDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, self.training)


class CenterOverBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Scaled(nn.Module):
    """A branch that counts for little at first."""

    def __init__(self, scale: float, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6, 1, 1), scale))
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (x - x.mean(self.dims, keepdim=True))


class Zero(nn.Module):
    """The same by a layer of which all weights are zero, beside one of which all are small."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.normal_(self.first.weight, std=0.01)
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        branch = self.first(x)
        return x + self.last(branch - branch.mean(self.dims, keepdim=True))


def survivors(x: Tensor, p: float) -> Tensor:
    """Stochastic depth as torchvision and timm draw it: one number for each sample."""
    return torch.empty(len(x), 1, 1, 1, dtype=x.dtype, device=x.device).bernoulli_(p).div_(p)


class InvertedResidual(nn.Module):
    """A block of EfficientNet (Tan and Le, 2019): depthwise, squeeze and excitation, stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(6, 12, 1, bias=False),
            nn.BatchNorm2d(12),
            nn.SiLU(inplace=True),
            nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False),
            nn.BatchNorm2d(12),
            nn.SiLU(inplace=True),
        )
        self.squeeze, self.excite = nn.Conv2d(12, 3, 1), nn.Conv2d(3, 12, 1)
        self.project = nn.Sequential(nn.Conv2d(12, 6, 1, bias=False), nn.BatchNorm2d(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = y * self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))).sigmoid()
        y = self.project(y)
        return x + (y * survivors(y, 0.6) if self.training else y)


class LayerScaled(nn.Module):
    """A block of ConvNeXt (Liu et al., 2022): depthwise, layer norm and a perceptron, scaled, with stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(6, 6, 7, padding=3, groups=6)
        self.norm = nn.LayerNorm(6)
        self.perceptron = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))
        self.scale = nn.Parameter(torch.full((6, 1, 1), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.perceptron(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x + (self.scale * y * survivors(y, 0.6) if self.training else self.scale * y)


class OneNumberForAll(nn.Module):
    """Stochastic depth of whole microbatches: the numbers belong to no sample."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty(1, 1, 1, 1).bernoulli_(0.5) if self.training else x


class Noise(nn.Module):
    """Draws in a way that the engine has no rule for."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


class OwnBatchNorm(nn.BatchNorm2d):
    pass


def gradients(model: nn.Module, context: StepContext, groups: list[tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(12, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (12,), generator=generator)
    start = 0
    for group in groups:
        end = start + sum(group)
        context.enter(1, start, group, CPU)
        loss = F.cross_entropy(model(images[start:end]), labels[start:end])
        (loss * ((end - start) / 12)).backward()
        start = end
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {**found, **dict(model.named_buffers())}


def worst(change: Callable[[nn.Module], None] = lambda model: None) -> float:
    torch.manual_seed(0)
    apart = Net().double()
    together = copy.deepcopy(apart)
    sizes = (5, 4, 3)
    want = gradients(apart, prepare(apart, 3, "microbatch"), passes(sizes, 1))
    context = prepare(together, 3, "microbatch")
    change(together)
    have = gradients(together, context, passes(sizes, 3))
    assert want.keys() == have.keys()
    return max(((want[n] - have[n]).abs().max() / want[n].abs().max().clamp(min=1e-9)).item() for n in want)


def test_one_pass_equals_microbatches_one_by_one() -> None:
    assert worst() < 1e-10


def test_plain_batch_norm_over_the_merged_batch_would_not() -> None:
    def plain(model: nn.Module) -> None:
        assert isinstance(model, Net)
        norm = nn.BatchNorm2d(6).double()
        norm.load_state_dict(model.norm.state_dict())
        model.norm = norm

    assert worst(plain) > 1e-3


def test_another_dropout_key_would_not() -> None:
    def rekey(model: nn.Module) -> None:
        assert isinstance(model, Net)
        model.drop.key = 1

    assert worst(rekey) > 1e-3


def by_engine(between: nn.Module, merge: int, by_pass: bool = False) -> dict[str, Tensor]:
    """Gradients and buffers where the engine draws: by the samples' places in the batch, or wrongly in the pass."""
    torch.manual_seed(0)
    model = Net(between).double()
    network = take_part(
        model, "serial", torch.zeros(5, 3, 8, 8, dtype=torch.float64), batch_norm="microbatch", loss="part", seed=3
    )

    def forward(images: Tensor) -> Tensor:
        network.samples = (len(images),)
        return model(images)

    generator = torch.Generator().manual_seed(7)
    images = torch.randn(12, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (12,), generator=generator)
    start = 0
    for group in passes((5, 4, 3), merge):
        end = start + sum(group)
        network.context.enter(1, 0 if by_pass else start, group, CPU)
        loss = F.cross_entropy(forward(images[start:end]), labels[start:end])
        (loss * ((end - start) / 12)).backward()
        start = end
    network.context.statistics.fold()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {**found, **dict(model.named_buffers())}


@pytest.mark.parametrize("block", [InvertedResidual, LayerScaled])
def test_one_pass_with_stochastic_depth_equals_microbatches_one_by_one(block: Callable[[], nn.Module]) -> None:
    def off(by_pass: bool) -> float:
        between = block()
        want, have = by_engine(copy.deepcopy(between), 1, by_pass), by_engine(between, 3)
        assert want.keys() == have.keys()
        return max(((want[n] - have[n]).abs().max() / want[n].abs().max().clamp(min=1e-9)).item() for n in want)

    assert off(by_pass=False) < 1e-10
    assert off(by_pass=True) > 1e-3


@pytest.mark.parametrize(
    ("between", "owned"),
    [
        (InvertedResidual(), True),
        (LayerScaled(), True),
        (FunctionalDropout(), True),
        (OneNumberForAll(), False),
        (Noise(), False),
        (nn.Sequential(FunctionalDropout(), CenterOverBatch()), False),
        (nn.Sequential(FunctionalDropout(), Scaled(0.0, (0,))), False),
        (nn.Sequential(FunctionalDropout(), Scaled(1e-6, (2, 3))), True),
    ],
)
def test_the_engine_owns_numbers_that_belong_to_samples(between: nn.Module, owned: bool) -> None:
    model = Net(copy.deepcopy(between))
    state = torch.get_rng_state()
    assert probe(model, (3, 8, 8), CPU).owned == owned
    assert torch.equal(state, torch.get_rng_state())


def test_replacing_keeps_names_and_values() -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepare(model, 0, "microbatch")
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("between", "draws", "separable"),
    [
        (nn.Identity(), False, True),
        (FunctionalDropout(), True, True),
        (nn.Sequential(FunctionalDropout(), CenterOverBatch()), True, False),
        (CenterOverBatch(), False, False),
        (OwnBatchNorm(6), False, False),
        (Scaled(0.0, (0,)), False, False),
        (Scaled(1e-6, (0,)), False, False),
        (Scaled(1e-6, (2, 3)), False, True),
        (Zero((0,)), False, False),
        (Zero((2, 3)), False, True),
        (nn.Sequential(FunctionalDropout(), Scaled(0.0, (0,))), True, False),
    ],
)
def test_probe_sees_what_a_merged_pass_would_change(between: nn.Module, draws: bool, separable: bool) -> None:
    torch.manual_seed(0)
    model = Net(between)
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    found = probe(model, (3, 8, 8), CPU)
    assert (found.draws, found.separable) == (draws, separable)
    assert (found.merge((32,) * 4, CPU, 2.0**40) == 4) == (separable and (not draws or found.owned))
    assert not model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_probe_sees_a_dropout_layer_that_runs_twice() -> None:
    def draws(between: nn.Module) -> bool:
        return probe(Net(between), (3, 8, 8), CPU).draws

    layer = nn.Dropout(0.1)
    assert draws(nn.Sequential(layer, nn.ReLU(), layer))
    assert not draws(nn.Sequential(layer, nn.ReLU(), nn.Dropout(0.1)))


def test_probe_sees_a_batch_norm_layer_that_runs_twice() -> None:
    def again(between: nn.Module) -> bool:
        return probe(Net(between), (3, 8, 8), CPU).normed_again

    layer = nn.BatchNorm2d(6)
    assert again(nn.Sequential(layer, nn.ReLU(), layer))
    assert not again(nn.Sequential(layer, nn.ReLU(), nn.BatchNorm2d(6)))


def test_probe_measures_the_memory_of_a_sample() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.Sigmoid(), nn.Flatten(), nn.Linear(1024, 2))
    found = probe(model, (3, 8, 8), CPU)
    kept = (3 * 64 + 16 * 64) * 4  # the convolution's input; the sigmoid's output, which is the linear layer's input
    assert found.bytes_per_sample == kept


def test_a_pass_keeps_a_part_of_the_memory() -> None:
    found, sizes = Probe(separable=True, draws=False, bytes_per_sample=2**20, normed_again=False), (8,) * 100
    assert [found.merge(sizes, CPU, memory) * 2**23 for memory in (2.0**31, 2.0**40)] == [2**28, CPU_BUDGET]
    assert found.merge(sizes, CPU, 2.0**28, sharing=2) * 2**23 == 2**26
    assert found.merge(sizes, CPU, 2.0**20) == 1
