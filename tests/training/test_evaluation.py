"""What an evaluation counts: the same as sample by sample, quickly, and without waiting for a GPU at every batch."""

import gc
import heapq
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import convoy.training.evaluate as evaluation
from convoy.data import Batch
from convoy.training import load_recipe
from convoy.training.evaluate import NUM_MISTAKES, EvaluationTally, WrongAnswer, _on_host
from convoy.training.input import InputPipeline


def batches(logits: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Batch, Tensor]]:
    """Consecutive samples; the picture of a sample is its number, in four bytes."""
    for start in range(0, len(labels), size):
        part = slice(start, start + size)
        samples = torch.arange(len(labels))[part]
        pictures = samples.to(torch.int32).view(torch.uint8).view(-1, 1, 2, 2)
        yield Batch(pictures, labels[part], samples), logits[part]


def one_by_one(logits: Tensor, labels: Tensor, size: int) -> EvaluationTally:
    """A plain loop over the samples."""
    classes = logits.shape[1]
    tally = EvaluationTally(torch.zeros(classes, classes, dtype=torch.int64))
    for batch, rows in batches(logits, labels, size):
        tally.losses.append(F.cross_entropy(rows, batch.labels, reduction="sum").item())
        tally.top5 += int((rows.topk(5).indices == batch.labels[:, None]).sum()) if classes > 5 else 0
        probability, predicted = rows.softmax(1).max(1)
        for i, (true, found) in enumerate(zip(batch.labels.tolist(), predicted.tolist(), strict=True)):
            tally.confusion[true, found] += 1
            if true != found:
                picture = batch.images[i]
                heapq.heappush(
                    tally.worst, WrongAnswer(probability[i].item(), int(batch.samples[i]), true, found, picture)
                )
    return tally


@pytest.mark.parametrize("size", [1, 7, 64, 500])
@pytest.mark.parametrize("levels", [1, 3, 0])
def test_the_same_is_counted_as_sample_by_sample_with_ties_too(size: int, levels: int) -> None:
    """With few levels of confidence most of the mistakes are equally bad."""
    random = torch.Generator().manual_seed(levels)
    logits = torch.randn(500, 8, generator=random)
    if levels:
        logits = torch.randint(levels + 1, (500, 8), generator=random).float() * 20
    labels = torch.randint(8, (500,), generator=random)
    tally = EvaluationTally(torch.zeros(8, 8, dtype=torch.int64))
    for batch, rows in batches(logits, labels, size):
        tally.add(batch, rows)
    found, wanted = (EvaluationTally.total([one], 0.0) for one in (tally, one_by_one(logits, labels, size)))
    assert (found.loss, found.top1, found.top5) == (wanted.loss, wanted.top1, wanted.top5)
    assert torch.equal(found.confusion, wanted.confusion)
    assert found.mistakes == wanted.mistakes and len(found.mistakes) == NUM_MISTAKES
    rows = [[(one.label, one.predicted, one.picture.tolist()) for one in each.mistakes] for each in (found, wanted)]
    assert rows[0] == rows[1]
    assert all(one.picture.flatten().view(torch.int32).item() == one.sample for one in found.mistakes)


class Operations(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_a_large_batch_takes_no_more_operations_than_a_small_one() -> None:
    """But for mistakes that are among the worst."""
    random = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(256, 1000, generator=random), torch.randint(1000, (256,), generator=random)
    counted = []
    for size in (16, 256):
        tally = EvaluationTally(torch.zeros(1000, 1000, dtype=torch.int64))
        (batch, rows), *_ = batches(logits, labels, size)
        (whole, _), *_ = batches(logits, labels, 256)
        tally.add(whole, 100 * logits)  # surer of its mistakes than any of the next
        with Operations() as operations:
            tally.add(batch, rows)
        counted.append(operations.count)
        assert int(tally.confusion.sum()) == 256 + size
    assert counted[0] == counted[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_has_the_next_batch_before_one_is_counted(device: str) -> None:
    random = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(20, 8, generator=random), torch.randint(8, (20,), generator=random)
    happened: list[str] = []

    class Network(nn.Module):
        def forward(self, samples: Tensor) -> Tensor:
            happened.append("passed")
            return logits[samples]

    class Counting(EvaluationTally):
        def add(self, batch: Batch, logits: Tensor) -> None:
            happened.append("counted")
            super().add(batch, logits)

    pipeline = type("Pipeline", (), {"device": torch.device(device), "__call__": lambda self, batch: batch.samples})()
    with patch.object(evaluation, "EvaluationTally", Counting):
        parts = [batch for batch, _ in batches(logits, labels, 7)]
        found = evaluation.evaluate(Network(), parts, pipeline, 8, load_recipe("default", ["model.name=lenet"]))
    wanted = EvaluationTally.total([one_by_one(logits, labels, 7)], 0.0)
    assert (found.loss, found.top1, found.mistakes) == (wanted.loss, wanted.top1, wanted.mistakes)
    one_late = ["passed", "passed", "counted", "passed", "counted", "counted"]
    assert happened == (one_late if device == "cuda" else ["passed", "counted"] * 3)


class Streams:
    """Stands in for torch.cuda's streams and events: a list of what is asked of them, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now = "computing"
        self.done = False

    def made(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.calls.append(f"{name} waits for {other.name}"))

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before

    def event(self) -> Any:
        return SimpleNamespace(
            record=lambda: self.calls.append(f"event on {self.now}"),
            synchronize=lambda: self.calls.append("event waited"),
            query=lambda: self.done,
        )


class Pixels:
    """A tensor that tells which stream it was worked on."""

    device = torch.device("cuda")

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def __getitem__(self, part: slice) -> "Pixels":
        return self

    def to(self, device: object, non_blocking: bool = False) -> "Pixels":
        self.streams.calls.append(f"copy to {device} on {self.streams.now}{' at once' * (not non_blocking)}")
        return self

    def record_stream(self, stream: Any) -> None:
        self.streams.calls.append(f"kept for {stream.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: found.made("side"))
    monkeypatch.setattr(torch.cuda, "stream", found.entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.made(found.now))
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    return found


def test_pictures_go_to_a_gpu_and_are_normalized_beside_what_computes(streams: Streams) -> None:
    def normalize(pixels: Pixels) -> Pixels:
        streams.calls.append(f"normalize on {streams.now}")
        return pixels

    data = SimpleNamespace(mean=(0.5,), std=(0.5,))
    with patch("convoy.training.input.Normalize", lambda *options: normalize):
        pipeline = InputPipeline(data, torch.device("cuda"), torch.channels_last)  # type: ignore[arg-type]
    for _ in range(2):
        pipeline(SimpleNamespace(images=Pixels(streams)))  # type: ignore[arg-type]
    one = ["copy to cuda on side", "normalize on side", "event on side", "computing waits for side"]
    assert streams.calls == 2 * [*one, "kept for computing"]


def test_pictures_on_their_way_to_a_gpu_are_kept(streams: Streams) -> None:
    """Workers write other pictures to their memory once nobody has them any more."""
    with patch("convoy.training.input.Normalize", lambda *options: lambda pixels: pixels):
        pipeline = InputPipeline(SimpleNamespace(mean=(0.5,), std=(0.5,)), torch.device("cuda"), torch.channels_last)  # type: ignore[arg-type]
    pictures = [Pixels(streams) for _ in range(4)]
    kept = [weakref.ref(each) for each in pictures]
    for number in range(4):
        streams.done = number == 3
        pipeline(SimpleNamespace(images=pictures.pop(0)))  # type: ignore[arg-type]
        gc.collect()
        assert [each() is not None for each in kept] == ([True] * 4 if number < 3 else [False] * 3 + [True])


def test_the_host_is_two_updates_ahead_of_a_gpu(streams: Streams) -> None:
    """Or pictures of many updates, whose recordings are one launch each, would fill its memory."""
    with patch("convoy.training.input.Normalize"):
        pipeline = InputPipeline(SimpleNamespace(mean=(0.5,), std=(0.5,)), torch.device("cuda"), torch.channels_last)  # type: ignore[arg-type]
    waits = []
    for number in range(5):
        streams.done = number == 4
        streams.calls.clear()
        pipeline.labels(SimpleNamespace(labels=Pixels(streams)))  # type: ignore[arg-type]
        waits.append(streams.calls.count("event waited"))
    assert waits == [0, 0, 1, 1, 0]


def test_logits_are_waited_for_when_they_are_counted(streams: Streams) -> None:
    wait = _on_host(Pixels(streams))  # type: ignore[arg-type]
    assert streams.calls == ["copy to cpu on computing", "event on computing"]
    wait()
    assert streams.calls[2:] == ["event waited"]
    here = torch.ones(2)
    assert _on_host(here)() is here
