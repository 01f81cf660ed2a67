"""The gradient noise scale: against its definition, on any devices, and that measuring it changes nothing."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.training import Session
from convoy.training.gradients import Exchange, GradientNoise, estimate_noise
from ranks import run_ranks
from training.scenarios import cores_as_before, lines, session
from whole_runs import train_here


def test_over_all_microbatches_the_estimate_is_the_definition() -> None:
    gradients = torch.randn(7, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    big = float(gradients.mean(0).square().sum())
    parts = [gradients[list(places)].mean(0).square().sum() for places in combinations(range(7), 3)]
    estimates = [estimate_noise(float(small), big, 3, 7) for small in parts]
    squared, variance = torch.tensor(estimates, dtype=torch.float64).mean(0)
    covariance = float(gradients.var(0).sum())  # the trace of the unbiased one
    assert float(variance) == pytest.approx(covariance, rel=1e-12)
    assert float(squared) == pytest.approx(big - covariance / 7, rel=1e-12)


class Plain(nn.Module):
    """Its samples do not depend on each other."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(in_channels, 4, 5, stride=4).double(), nn.Linear(144, num_classes).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x.double())).flatten(1))


def test_a_sampled_update_has_the_norms_of_the_gradients_of_its_samples(data: Path) -> None:
    with cores_as_before(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "noise_every", 1)
        ended = "optimizer.groups=[{parameters: 'conv.*', until: 1ba}]"  # whose gradients count no more
        run = session(data, "model.name=training.test_gradients:Plain", "microbatch=4", "clip_norm=0.01", ended)
        (batch,) = run.batches(1, 1)
        plain, gradients = Plain(), []
        plain.load_state_dict(run.model.state_dict())
        for image, label in zip(run.pipeline(batch).split(1), run.pipeline.targets(batch).split(1), strict=True):
            loss = F.cross_entropy(plain(image), label)
            gradients.append(torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(plain.head.parameters()))]))
        small, big = (float(torch.stack(some).mean(0).square().sum()) for some in (gradients[:4], gradients))
        step = run.step()
        step.noise = GradientNoise(1, run.division, {})
        step(batch, 1)
    expected = dict(zip(("gradient_squared", "gradient_variance"), estimate_noise(small, big, 4, 16), strict=True))
    assert step.noise.averages == pytest.approx(expected, rel=1e-9)
    assert expected["gradient_variance"] > 0


def sample(data: Path, settings: tuple[str, ...] = (), local: bool = False) -> dict[str, float]:
    """What a trainer measures in its first two updates; `local` takes norms of this rank's parts alone."""
    with cores_as_before(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "noise_every", 1)
        if local:
            patch.setattr(Exchange, "norm", lambda exchange: norm_of([p.grad for p, _ in exchange._split]))
        run = session(data, "model.name=tiny:TinyDouble", "microbatch=4", "optimizer.lr=0.01", *settings)
        run.model.train()
        step, averages = run.step(), dict[str, float]()
        step.noise = GradientNoise(1, run.division, averages)
        for update, batch in enumerate(run.batches(0, 2)):
            step(batch, update)
        return averages


def norm_of(tensors: list[Any]) -> Tensor:
    return torch.nn.utils.get_total_norm([tensor for tensor in tensors if tensor is not None])


FILTER, STAGE = ("parallel.plan=filter=2",), ("parallel.plan=stage=2", "parallel.schedule=zero-bubble")


@pytest.mark.parametrize("settings", [("parallel.shares=[3, 1]",), FILTER, STAGE, ("reproducible=true",)])
def test_it_is_the_same_on_one_device_and_two(data: Path, settings: tuple[str, ...]) -> None:
    alone = sample(data)
    for averages in run_ranks(sample, 2, data, settings):
        assert averages == pytest.approx(alone, rel=1e-9)


def test_norms_of_parts_would_be_noticed(data: Path) -> None:
    assert run_ranks(sample, 2, data, FILTER, True)[0] != pytest.approx(sample(data), rel=1e-3)


def _often(data: Path, out: Path, settings: dict[str, str], *options: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "noise_every", 3)
        return train_here(data, out, settings, *options).digest


@pytest.mark.parametrize("exact", ["false", "true"])
def test_it_changes_no_bit_and_goes_on_after_a_stop(data: Path, tmp_path: Path, exact: str) -> None:
    settings = {"epochs": "3ep", "reproducible": exact, "ema.decay": "0.9"}
    without = train_here(data, tmp_path / "without", settings | {"noise_scale": "false"}).digest
    assert _often(data, tmp_path / "with", settings) == without
    if exact == "true":
        assert run_ranks(_often, 2, data, tmp_path / "two", settings) == [without] * 2
    assert _often(data, tmp_path / "parts", settings, False, 5) == ""
    assert _often(data, tmp_path / "parts", settings, True) == without
    keys = "step", "noise_scale", "gradient_variance"
    found = lines(tmp_path / "with", *keys, split="train")
    assert found == lines(tmp_path / "parts", *keys, split="train") and found[0] == [1, None, None]
    assert found[-1][2] > 0 and lines(tmp_path / "without", *keys, split="train")[-1][2] is None
