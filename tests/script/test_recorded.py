"""`convoy.recorded` in a loop of one's own."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.errors import ConvoyError
from ranks import run_ranks
from replayed import recording

UPDATES = 20


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(8 * 36, 4)
    return nn.Sequential(*layers)


def updates(plan: str, record: bool, twice: bool = False) -> list[Tensor]:
    """Losses, weights and buffers of some updates with pictures, masks and learning rates of their own."""
    with recording() if record else nullcontext():
        net = convoy.parallelize(network(), plan, example=torch.empty(4, 3, 8, 8), seed=1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def gradients(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = net(images)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            return {"loss": loss, "right": (logits.argmax(1) == labels).sum()}

        step = convoy.recorded(net, gradients) if record else gradients
        found = []
        for update in range(UPDATES):
            generator = torch.Generator().manual_seed(update)
            for _ in range(1 + twice):
                images = torch.randn(8, 3, 8, 8, generator=generator)
                labels = torch.randint(4, (8,), generator=generator)
                mine = convoy.local_samples(net, 8)
                found.append(step(images[mine], labels[mine])["loss"].detach())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return [*found, *convoy.state_dict(net).values()]


def compared(plan: str, twice: bool) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what is not recorded
        pairs = zip(updates(plan, True, twice), updates(plan, False, twice), strict=True)
        # gradients that were there are added after the exchange, not before it
        return all(torch.equal(a, b) or (twice and torch.allclose(a, b, 1e-4, 1e-5)) for a, b in pairs)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "accumulated"])
@pytest.mark.parametrize("plan", ["serial", "sample=2", "filter=2"])
def test_replayed_passes_have_the_bits_of_passes_that_run(plan: str, twice: bool) -> None:
    assert all(run_ranks(compared, 1 if plan == "serial" else 2, plan, twice))


def made(change: Callable[[nn.Module], Callable[..., Tensor]]) -> str:
    with recording(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = convoy.parallelize(network(), "serial", example=torch.empty(4, 3, 8, 8))
        step = convoy.recorded(net, change(net))
        for _ in range(6):
            step(torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))
    return " ".join(str(one.message) for one in caught)


def test_a_step_of_the_optimizer_is_not_recorded() -> None:
    def change(net: nn.Module) -> Callable[..., Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(images: Tensor, labels: Tensor) -> Tensor:
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            return loss

        return step

    assert "optimizer.step() is part of it" in made(change)


def test_a_parameter_of_another_module_is_named() -> None:
    def change(net: nn.Module) -> Callable[..., Tensor]:
        head = nn.Linear(4, 4)

        def step(images: Tensor, labels: Tensor) -> Tensor:
            loss = F.cross_entropy(head(net(images)), labels)
            loss.backward()
            return loss

        return step

    assert "a parameter is used that is none of the network's" in made(change)


def test_random_numbers_of_torchs_own_are_named() -> None:
    def change(net: nn.Module) -> Callable[..., Tensor]:
        def step(images: Tensor, labels: Tensor) -> Tensor:
            loss = F.cross_entropy(net(images + torch.rand_like(images)), labels)
            loss.backward()
            return loss

        return step

    assert "draws random numbers from torch's generator" in made(change)


def test_arguments_are_tensors() -> None:
    net = convoy.parallelize(network(), "serial", example=torch.empty(4, 3, 8, 8))
    with pytest.raises(ConvoyError, match="takes tensors alone"):
        convoy.recorded(net, lambda images, epoch: net(images))(torch.empty(4, 3, 8, 8), 1)


def test_batches_of_another_shape_run_as_ever() -> None:
    with recording():
        net = convoy.parallelize(network(), "serial", example=torch.empty(4, 3, 8, 8))
        step = convoy.recorded(net, lambda images: net(images).sum())
        shapes = [step(torch.randn(number, 3, 8, 8)).shape for number in (4, 4, 4, 4, 4, 3, 4, 4)]
    assert set(shapes) == {torch.Size([])}
