"""`convoy.recorded` in a loop of one's own."""

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from ranks import run_ranks
from replayed import BrokenGraph, ReplayedGraph, recording

UPDATES = 20
UNLIKE = (1, 3, 9)  # updates of a smaller batch: before an update is recorded, while it is, and between its replays


def network(plan: str = "serial") -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(8 * 36, 4)
    return convoy.parallelize(nn.Sequential(*layers), plan, example=torch.empty(4, 3, 8, 8), seed=1)


def updates(plan: str, record: type[ReplayedGraph] | None, changes: bool, unlike: tuple[int, ...]) -> list[Tensor]:
    """Losses, weights and buffers of some updates with pictures, masks and learning rates of their own."""
    with recording(record) if record else nullcontext():
        net = network(plan)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def gradients(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = net(images)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)  # under filter=2 a norm inside is that of whole gradients
            return {"loss": loss, "right": (logits.argmax(1) == labels).sum()}

        step = convoy.recorded(net, gradients) if record else gradients
        results = []
        for update in range(UPDATES):
            generator = torch.Generator().manual_seed(update)
            number = 7 if update in unlike else 8
            if changes and update in (8, 12):  # and back
                net[1].momentum, net[3].p = (0.5, 0.1) if update == 8 else (0.1, 0.3)
                net[0].bias.requires_grad_(update == 12)
                net[5].weight.data, net[1].running_mean = net[5].weight.data.clone(), net[1].running_mean.clone()
            images = torch.randn(number, 3, 8, 8, generator=generator)
            labels = torch.randint(4, (number,), generator=generator)
            mine = convoy.local_samples(net, number)
            results.append(step(images[mine], labels[mine])["loss"].detach())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return [*results, *convoy.state_dict(net).values()]


def compared(
    plan: str, graph: type[ReplayedGraph], changes: bool = False, unlike: tuple[int, ...] = ()
) -> tuple[bool, str]:
    """Whether the bits are the same, and what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alike = all(map(torch.equal, *(updates(plan, record, changes, unlike) for record in (graph, None))))
    return alike, " ".join(str(one.message) for one in caught)


@pytest.mark.parametrize(
    ("plan", "changes", "unlike"),
    [
        ("filter=2", False, ()),
        ("sample=2", True, UNLIKE),  # of 7 samples the first of two ranks has 4, as of 8; layers are not frozen
    ],
)
def test_replayed_passes_have_the_bits_of_passes_that_run(plan: str, changes: bool, unlike: tuple[int, ...]) -> None:
    assert run_ranks(compared, 2, plan, ReplayedGraph, changes, unlike) == [(True, "")] * 2


def test_a_recording_that_breaks_off_leaves_no_trace() -> None:
    for alike, said in run_ranks(compared, 2, "sample=2", BrokenGraph):
        assert alike and "it breaks off" in said


def stepped(net: nn.Module, kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of a loop that does what cannot be recorded."""
    calls = itertools.count(1)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        number = next(calls)
        logits = net(images + torch.rand_like(images) if kind == "random" else images)
        if kind == "counter":
            logits = logits * (1 + 0.1 * number)
        elif kind == "read":
            logits = logits * float(logits.detach().mean())
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        return loss

    return step


NAMED = {
    "random": "draws random numbers from torch's generator",
    "counter": r"mul changes from update to update, by a number of Python's.* \(test_recorded\.py:",
    "read": r"the host reads a number or a size back from the device.* \(test_recorded\.py:",
}


def test_what_cannot_be_recorded_is_named() -> None:
    for kind, words in NAMED.items():
        with recording(), pytest.warns(UserWarning, match=words):
            net = network()
            step = convoy.recorded(net, stepped(net, kind))
            for _ in range(6):
                step(torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))
