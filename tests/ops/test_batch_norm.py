"""Batch norm over a mesh against the plain layer, in float64 on real processes."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from batch_norm_cases import CHANNELS, LAYOUTS, by_microbatch, layer, make, samples, serial
from convoy.engine import MicrobatchNorm, StepContext
from convoy.ops import batch_norm, shared_batch_norm
from convoy.plans.layout import WHOLE, Layout, Split, consecutive
from one_call import OneCall, run_call, worst
from ranks import RankFailed, run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_statistics_of_the_whole_pass(name: str) -> None:
    sizes, given = LAYOUTS[name]
    case = make(given, sizes)
    where, error = worst(run_call(case), serial(case))
    assert error < 1e-11, where


@pytest.mark.parametrize("name", ["uneven samples", "channel lists", "samples and columns"])
def test_evaluation_uses_the_running_statistics(name: str) -> None:
    sizes, given = LAYOUTS[name]
    case = make(given, sizes, training_call=False, training=False)
    where, error = worst(run_call(case), serial(case))
    assert error < 1e-12, where


@pytest.mark.parametrize(
    "options", [{"affine": False}, {"track": False}, {"momentum": None}, {"track": False, "training": False}]
)
def test_variants(options: dict[str, Any]) -> None:
    case = make(Layout.of(samples(5, 2)), (2,), **options, passes=2)
    where, error = worst(run_call(case), serial(case))
    assert error < 1e-11, where


def test_vectors() -> None:
    case = make(Layout.of(samples(5, 2)), (2,), shape=(7, 6))
    where, error = worst(run_call(case), serial(case))
    assert error < 1e-11, where


def test_local_statistics_are_noticed_and_their_buffers_averaged() -> None:
    case = make(Layout.of(samples(4, 3)), (2,), mode="local")
    got, want = run_call(case), serial(case)
    assert worst(got, want)[1] > 1e-3  # the control: statistics of each rank's own samples are something else
    x, mean = case.tensors["x"], case.tensors["running_mean"]
    halves = [0.9 * mean + 0.1 * part.mean((0, 2, 3)) for part in x.split([4, 3])]
    assert torch.allclose(got["running_mean"], (halves[0] + halves[1]) / 2, atol=0, rtol=1e-13)


def local_pass(as_on_gpus: bool) -> dict[str, Tensor]:
    """Gradients and buffers of a pass over two ranks, with each one's own statistics."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).double()
    images, labels = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.arange(8) % 3
    with mock.patch.object(batch_norm, "at_once", lambda x: as_on_gpus):
        net = convoy.parallelize(net, "sample=2", images[:4], batch_norm="local")
        mine = convoy.local_samples(net, 8)
        F.cross_entropy(net(images[mine]), labels[mine]).backward()
    return convoy.gradients(net) | convoy.state_dict(net)


def test_local_statistics_by_the_kernel_of_gpus() -> None:
    """It follows the buffers itself, which are averaged over ranks before the backward pass."""
    for got, want in zip(run_ranks(local_pass, 2, True), run_ranks(local_pass, 2, False), strict=True):
        assert got.keys() == want.keys()
        assert all(torch.allclose(got[name], want[name], rtol=1e-12, atol=1e-14) for name in want)


class Joined(nn.Module):
    """Adds what another branch gives to a batch norm, of channels that the first of two ranks has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(2)
        self.wide, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)[:, :2]) + self.second(self.wide(x).relu())[:, :2]
        return y.relu().flatten(1)


def joined(plan: str | None, mode: Any = "sync") -> dict[str, Tensor]:
    """Gradients."""
    torch.manual_seed(0)
    net, images = Joined().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    if plan is not None:
        net = convoy.parallelize(net, plan, images, batch_norm=mode)
    net(images).square().sum().backward()
    return convoy.gradients(net) if plan is not None else {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("mode", ["sync", "microbatch", "local"])
def test_a_rank_without_channels_takes_part_in_the_backward_pass_of_what_is_added(mode: str) -> None:
    want = joined(None)
    for got in run_ranks(joined, 2, "filter=2", mode):
        assert all(torch.allclose(got[name], want[name], rtol=1e-11, atol=1e-12) for name in want)


def test_a_backward_pass_without_its_sums_is_noticed() -> None:
    case = make(Layout.of(samples(4, 3)), (2,), sabotage=(shared_batch_norm.__name__, "all_reduce"))
    where, error = worst(run_call(case), serial(case))
    assert where == "x.grad"
    assert error > 1e-3


@pytest.mark.parametrize(
    ("sizes", "given"),
    [
        ((2,), Layout.of(samples(3, 4))),
        ((2,), Layout.of(samples(5, 2))),
        ((2,), Layout.of(samples(7, 0))),
        ((3,), Layout.of(samples(3, 2, 2))),
        ((2, 2), Layout.of({**samples(5, 2), 1: Split((1,), CHANNELS[1].parts)})),
        ((2,), WHOLE),
    ],
)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_microbatches_have_the_same_bits_on_any_number_of_ranks(
    sizes: tuple[int, ...], given: Layout, momentum: float | None
) -> None:
    case = make(given, sizes, microbatches=(3, 2, 2), mode="microbatch", passes=2, momentum=momentum)
    for name in case.tensors:
        case.tensors[name] = case.tensors[name].float() if name != "num_batches_tracked" else case.tensors[name]
    case.gradient = case.gradient.float()
    torch.set_num_threads(1)
    reference = make(given, sizes, microbatches=(3, 2, 2), mode="microbatch", passes=2, momentum=momentum)
    reference.tensors, reference.gradient = case.tensors, case.gradient
    got, want = run_call(case), by_microbatch_float(reference)
    for name in ("y", "x.grad", "running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(got[name], want[name]), name


def by_microbatch_float(case: OneCall) -> dict[str, Tensor]:
    module = layer(case).float()
    module.load_state_dict({name: t for name, t in case.tensors.items() if name != "x"})
    context = StepContext()
    context.enter(7, 0, case.microbatches, torch.device("cpu"))
    return serial(case, MicrobatchNorm(module, context).train())  # type: ignore[arg-type]


def test_microbatches_with_divided_rows() -> None:
    given = Layout.of({**samples(5, 2), 2: Split((1,), consecutive((2, 3)))})
    case = make(given, (2, 2), microbatches=(3, 2, 2), mode="microbatch", passes=2)
    where, error = worst(run_call(case), by_microbatch(case))
    assert error < 1e-11, where


def test_a_divided_microbatch_is_refused() -> None:
    case = make(Layout.of(samples(4, 3)), (2,), microbatches=(3, 2, 2), mode="microbatch")
    with pytest.raises(RankFailed, match=r"layer 'layer': the plan divides a microbatch of 2 samples"):
        run_call(case)
