"""Dropout by sample keys."""

import pytest
import torch
from torch import nn

from convoy.engine import SampleDropout, StepContext, prepare

CPU = torch.device("cpu")


def dropped(kind: type[nn.Module], shape: tuple[int, ...], p: float = 0.4) -> tuple[torch.Tensor, torch.Tensor]:
    model = nn.Sequential(kind(p))
    context = prepare(model, seed=5, batch_norm="microbatch")
    assert isinstance(model[0], SampleDropout)
    context.enter(3, 0, (shape[0],), CPU)
    x = torch.ones(shape, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_and_scale(p: float) -> None:
    y, grad = dropped(nn.Dropout, (64, 2000), p)
    assert abs((y == 0).double().mean().item() - p) < 0.005
    assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p)))
    assert torch.equal(y, grad)


def test_whole_channels() -> None:
    y, _ = dropped(nn.Dropout2d, (32, 40, 5, 5))
    assert torch.equal(y.amin((2, 3)), y.amax((2, 3)))
    assert 0.3 < (y == 0).double().mean() < 0.5


def test_probability_zero_and_one() -> None:
    assert torch.equal(dropped(nn.Dropout, (4, 10), 0.0)[0], torch.ones(4, 10))
    assert torch.equal(dropped(nn.Dropout, (4, 10), 1.0)[0], torch.zeros(4, 10))


def test_halves_of_a_batch_get_the_masks_of_the_whole() -> None:
    model = nn.Sequential(nn.Dropout())
    context = prepare(model, seed=1, batch_norm="sync")
    x = torch.ones(6, 100)
    context.enter(9, 0, (6,), CPU)
    whole = model(x)
    context.enter(9, 4, (2,), CPU)
    assert torch.equal(whole[4:], model(x[4:]))
    context.enter(9, 0, (2,), CPU)
    assert not torch.equal(whole[4:], model(x[4:]))  # the control: other samples, other masks


def test_evaluation_passes_everything() -> None:
    layer = SampleDropout("d", 0.5, False, StepContext()).eval()
    x = torch.randn(3, 4)
    assert torch.equal(layer(x), x)
