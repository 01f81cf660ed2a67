"""What a rank does: a side's updates, timed. And the search for the best arrangement on one device."""

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy import models
from convoy.engine.allocation import keep_freed_memory
from measuring.cases import Case
from measuring.sides import Arrangement, Side, Trained, set_up


@dataclass(frozen=True)
class Timing:
    """What one rank measured."""

    seconds: list[float]  # of each update
    losses: list[float]  # mean over this rank's samples, of each update from the first, those that were not timed too
    busy: float  # processor seconds of the process in a second of the timed updates

    @property
    def median(self) -> float:
        """Seconds of an update."""
        return statistics.median(self.seconds)


def train(side: Side, case: Case, warm_up: int) -> Timing:
    """A rank's part of some updates: `warm_up` that are not timed, and those of the case."""
    rank, num = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    model = build(case, side.arrangement)
    trained = set_up(side, case, model, rank, num)
    torch.set_num_threads(1)  # some libraries set it
    images, labels = batch(case, side.arrangement)
    images, labels = images[trained.samples].clone(), labels[trained.samples].clone()  # the others' are not kept
    return timed(updater(trained, images, labels, side.arrangement), warm_up, case.updates)


def timed(update: Callable[[], Tensor], warm_up: int, updates: int) -> Timing:
    """Some updates, each of which gives its mean loss over this rank's samples."""
    losses, seconds = [], []
    busy = 0.0
    for _ in range(warm_up + updates):
        start, used = time.perf_counter(), time.process_time()
        loss = update()
        seconds.append(time.perf_counter() - start)
        busy += time.process_time() - used if len(seconds) > warm_up else 0.0
        losses.append(loss.item())
    return Timing(seconds[warm_up:], losses, busy / sum(seconds[warm_up:]))


def updater(trained: Trained, images: Tensor, labels: Tensor, arrangement: Arrangement) -> Callable[[], Tensor]:
    """A function that does one weight update and gives the mean loss over this rank's samples."""
    passes = arrangement.passes(len(images))

    def update() -> Tensor:
        trained.optimizer.zero_grad()
        total = torch.zeros(())
        for number, part in enumerate(passes, 1):
            with trained.unfinished() if number < len(passes) else contextlib.nullcontext():
                weight = (part.stop - part.start) / len(images)
                loss = F.cross_entropy(trained.network(images[part]), labels[part]) * weight
                trained.backward(loss)
            total += loss.detach()
        trained.optimizer.step()
        return total

    return update


def try_arrangements(case: Case, keeps: bool = False) -> dict[Arrangement, float]:
    """Seconds of an update on one device under each arrangement, from a few passes of each.

    The memory format is chosen at passes of one size, unless the formats are near each other there.
    """
    if keeps:
        keep_freed_memory(torch.device("cpu"))
    sizes = [size for size in case.passes if size < case.batch] + [case.batch]
    first = sizes[min(1, len(sizes) - 1)]
    found = {}
    formats = [True, False]
    for channels_last in list(formats):
        arrangement = Arrangement(channels_last, first).for_batch(case.batch)
        found[arrangement] = _seconds(case, arrangement, first)
    best = min(found.values())
    formats = [one.channels_last for one, seconds in found.items() if seconds < 1.1 * best]
    for channels_last in formats:
        for size in sizes:
            arrangement = Arrangement(channels_last, size).for_batch(case.batch)
            if arrangement not in found:
                found[arrangement] = _seconds(case, arrangement, size)
    return found


def _seconds(case: Case, arrangement: Arrangement, size: int) -> float:
    model = build(case, arrangement)
    images, labels = (tensor[:size] for tensor in batch(case, arrangement))
    trained = Trained(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), slice(0, size))
    update = updater(trained, images, labels, Arrangement(arrangement.channels_last))
    update()
    update()
    start = time.perf_counter()
    trained.optimizer.step()
    step = time.perf_counter() - start
    times = []
    for _ in range(3 if size < 128 else 1):
        start = time.perf_counter()
        update()
        times.append(time.perf_counter() - start)
    return (statistics.median(times) - step) * case.batch / size + step


def build(case: Case, arrangement: Arrangement) -> nn.Module:
    """The case's network, the same on every rank and every side."""
    torch.manual_seed(0)
    model = models.create(case.model, num_classes=case.num_classes, **case.options)
    return model.to(memory_format=_format(arrangement))  # type: ignore[call-overload, no-any-return]


def batch(case: Case, arrangement: Arrangement) -> tuple[Tensor, Tensor]:
    """A global batch of random images and labels, the same on every rank and every side."""
    random = torch.Generator().manual_seed(1)
    channels = int(case.options.get("in_channels", 3))
    images = torch.randn(case.batch, channels, case.image_size, case.image_size, generator=random)
    shape = (case.batch, case.image_size, case.image_size) if case.dense else (case.batch,)
    labels = torch.randint(case.num_classes, shape, generator=random)
    return images.contiguous(memory_format=_format(arrangement)), labels


def _format(arrangement: Arrangement) -> torch.memory_format:
    return torch.channels_last if arrangement.channels_last else torch.contiguous_format
