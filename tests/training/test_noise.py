"""The gradient noise scale: against its definition, on any devices, and that measuring it changes nothing."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from convoy.training import noise
from convoy.training.gradients import Exchange
from convoy.training.noise import GradientNoise, estimate
from ranks import run_ranks
from training.scenarios import cores_as_before, lines, session, weights
from whole_runs import train_here


def test_over_all_microbatches_the_estimate_is_the_definition() -> None:
    gradients = torch.randn(7, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    big = float(gradients.mean(0).square().sum())
    parts = [gradients[list(places)].mean(0).square().sum() for places in combinations(range(7), 3)]
    squared, variance = torch.tensor([estimate(float(small), big, 3, 7) for small in parts], dtype=torch.float64).mean(
        0
    )
    covariance = float(gradients.var(0).sum())  # the trace of the unbiased one
    assert float(variance) == pytest.approx(covariance, rel=1e-12)
    assert float(squared) == pytest.approx(big - covariance / 7, rel=1e-12)


def sample(data: Path, *settings: str, local: bool = False) -> tuple[dict[str, float], list[float]]:
    """What a trainer measures in its first two updates, and what per-sample gradients of the first one say, where the
    network is whole here; `local` takes norms of this rank's parts alone."""
    with cores_as_before(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "interval", lambda session: 1)
        if local:
            patch.setattr(Exchange, "norm", lambda exchange: norm_of([p.grad for p, _ in exchange._split]))
        run = session(data, "model.name=tiny:TinyDouble", "microbatch=4", "optimizer.lr=0.01", *settings)
        run.model.train()
        step, averages, expected = run.step(), dict[str, float](), list[float]()
        step.noise = GradientNoise(run, averages)
        for update, batch in enumerate(run.batches(0, 2)):
            if run.ranks.num == 1 and not expected:
                whole = [
                    float(step.whole_gradient(batch, 0).losses[0]),
                    norm_of([p.grad for p in run.model.parameters()]),
                ]
                expected = whole[1:]
                run.state.optimizer.zero_grad(set_to_none=True)
            step(batch, update)
        return averages, [float(number) for number in expected]


def norm_of(tensors: list[Any]) -> Tensor:
    return torch.nn.utils.get_total_norm([tensor for tensor in tensors if tensor is not None])


@pytest.mark.parametrize(
    "settings", [(), ("parallel.plan=filter=2",), ("reproducible=true",), ("parallel.plan=stage=2",)]
)
def test_it_is_the_same_on_one_device_and_two(data: Path, settings: tuple[str, ...]) -> None:
    (alone, _) = sample(data)
    for averages, _ in run_ranks(sample, 2, data, *settings):
        assert averages == pytest.approx(alone, rel=1e-9)
    assert alone["variance"] > 0


def _local(data: Path, settings: tuple[str, ...]) -> Any:
    return sample(data, *settings, local=True)


def test_norms_of_parts_would_be_noticed(data: Path) -> None:
    alone, _ = sample(data)
    averages, _ = run_ranks(_local, 2, data, ("parallel.plan=filter=2",))[0]
    assert averages != pytest.approx(alone, rel=1e-3)


def _often(data: Path, out: Path, settings: dict[str, str], *options: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "interval", lambda session: 3)
        return train_here(data, out, settings, *options).digest


@pytest.mark.parametrize("exact", ["false", "true"])
def test_it_changes_no_bit_and_goes_on_after_a_stop(data: Path, tmp_path: Path, exact: str) -> None:
    settings = {"epochs": "3ep", "reproducible": exact, "ema.decay": "0.9"}
    without = train_here(data, tmp_path / "without", settings | {"noise_scale": "false"}).digest
    assert (
        _often(data, tmp_path / "with", settings)
        == without
        == run_ranks(_often, 2, data, tmp_path / "two", settings)[0]
        or exact == "false"
    )
    assert _often(data, tmp_path / "parts", settings, False, 5) == ""
    assert _often(data, tmp_path / "parts", settings, True) == without
    keys = "step", "noise_scale"
    scales = lines(tmp_path / "with", *keys, split="train")
    assert scales == lines(tmp_path / "parts", *keys, split="train") and scales[0] == [1, None]
    assert any(scale is not None for _, scale in scales)
    assert all(scale is None for _, scale in lines(tmp_path / "without", *keys, split="train"))
    assert weights(tmp_path / "with")
