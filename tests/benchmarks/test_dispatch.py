"""What `measuring/dispatch.py` sees on a GPU that is not there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from measuring.dispatch import Counts, FakeGpu, fake_ranks, lines
from torch import Tensor, nn

import convoy

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "float": lambda x: float(x[0]),
    "tolist": lambda x: x.tolist(),
    "to the CPU": lambda x: x.cpu(),
    "equal": lambda x: torch.equal(x, x + 1),
    "into a tensor of the CPU": lambda x: torch.ones(4).copy_(x),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
UPLOADS: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "an index": lambda x: x[[0, 2]],
    "an index of the CPU": lambda x: x[torch.tensor([0, 2])],
    "from a tensor of the CPU": lambda x: x.copy_(torch.ones(4)),
}
NEITHER: dict[str, Callable[[Tensor], Any]] = {
    "a slice": lambda x: x[1:3] * 2.0,
    "is it there": lambda x: x.is_cuda or x.item(),
    "the same device": lambda x: x.to("cuda:0"),
    "fill": lambda x: torch.full((4,), 2.0, device=x.device) + x,
    "a number": lambda x: x.fill_(2.0),
    "lists of the CPU": lambda x: torch.tensor([1, 2]).tolist(),
}


def seen_of(run: Callable[[Tensor], Any]) -> Counts:
    with FakeGpu() as gpu:
        x = gpu.take(torch.ones(4))
        with gpu.count() as seen:
            run(x)
    return seen


@pytest.mark.parametrize("run", READS.values(), ids=READS)
def test_reads_synchronize(run: Callable[[Tensor], Any]) -> None:
    seen = seen_of(run)
    assert len(seen.synchronizations) == 1 and not seen.uploads
    assert "test_dispatch.py" in str(seen.synchronizations[0])


@pytest.mark.parametrize("run", UPLOADS.values(), ids=UPLOADS)
def test_lists_are_uploaded_and_waited_for(run: Callable[[Tensor], Any]) -> None:
    seen = seen_of(run)
    assert len(seen.uploads) == len(seen.synchronizations) == 1


@pytest.mark.parametrize("run", NEITHER.values(), ids=NEITHER)
def test_the_rest_does_neither(run: Callable[[Tensor], Any]) -> None:
    seen = seen_of(run)
    assert not seen.uploads and not seen.synchronizations


def test_a_copy_that_nobody_waits_for_is_no_synchronization() -> None:
    seen = seen_of(lambda x: torch.ones(3).to(x.device, non_blocking=True))
    assert len(seen.uploads) == 1 and not seen.synchronizations


def test_a_backward_pass_is_counted_with_its_collectives() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    with fake_ranks(8), FakeGpu() as gpu:
        images, labels = gpu.take(torch.rand(2, 3, 8, 8)), gpu.take(torch.zeros(2, dtype=torch.int64))
        net = convoy.parallelize(gpu.take(model), "sample=8", example=images, checks=False)
        with gpu.count() as seen:
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
        parameters = list(net.parameters())
    assert all(p.grad is not None and p.grad.device == FakeGpu.device for p in parameters)
    assert seen.operations["convolution"] == seen.operations["convolution_backward"] == 1
    assert seen.collectives["allreduce_"] > 0
    assert seen.synchronizations == [], lines(seen.synchronizations)


def test_no_device_is_left_behind() -> None:
    with FakeGpu():
        pass
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(1, device="cuda")
