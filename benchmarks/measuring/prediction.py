"""What ranks do to hold predictions against measurements: predict every plan, then measure each."""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import convoy
from convoy import models
from convoy.comm.joining import join
from convoy.comm.ranks import Ranks
from convoy.engine.allocation import keep_freed_memory
from convoy.engine.optimizers import divide_update
from convoy.errors import ConvoyError
from convoy.planner import make_plan, score, workload_of
from convoy.planner.cost.store import ProfileStore
from convoy.plans.plan import Plan

SERIAL = "one device"
CHOSEN = "auto"


@dataclass(frozen=True)
class Subject:
    """A network at one global batch."""

    name: str  # in the table
    model: str  # name in `convoy.models`
    image_size: int  # height and width
    batch: int
    num_classes: int = 10
    options: Mapping[str, Any] = field(default_factory=dict)  # of the model


@dataclass(frozen=True)
class Row:
    """A plan of a subject."""

    plan: str
    predicted: float
    measured: float  # seconds of an update
    where: Mapping[str, float]  # predicted seconds by what they go to
    spread: tuple[float, float]  # smallest and largest of the measured updates


@dataclass(frozen=True)
class Predicted:
    """What was said of a plan."""

    name: str  # in the table
    plan: Plan | None  # None for one device, the plain network
    seconds: float  # of an update
    where: Mapping[str, float]  # seconds by what they go to


def predict(subject: Subject, plans: Sequence[str]) -> list[Predicted]:
    """One device, all plans that the network can have, and the planner's own. All ranks call it."""
    made = _Made.of(subject)
    ranks = Ranks.here()
    workload = workload_of(made.model, made.images, subject.batch, name=subject.name)
    with tempfile.TemporaryDirectory() as folder:
        planned = make_plan(workload, ranks.num, ranks, store=ProfileStore(Path(folder)))
    found = [Predicted(SERIAL, None, planned.serial.seconds, planned.serial.timeline.by_kind())]
    for text in plans:
        try:
            scored = score(workload, Plan.parse(text), planned.costs)
        except ConvoyError:
            continue
        found.append(Predicted(text, scored.plan, scored.seconds, scored.timeline.by_kind()))
    if ranks.num > 1:
        best = planned.best
        name = f"{CHOSEN}: {best.plan}"
        found.append(Predicted(name, best.plan, best.seconds, best.timeline.by_kind()))
    return found


def measure(subject: Subject, plan: Plan | None, updates: int, warm_up: int) -> list[float]:
    """Seconds of updates under a plan, after those that warm up. All ranks call it, of processes that are new: memory
    of a process that has done other things before is not that of a training run.
    """
    made = _Made.of(subject)
    ranks = Ranks.here()
    if plan is None:
        found = _time(_updater(made.model, made.images, made.labels), updates, warm_up) if ranks.rank == 0 else []
        return ranks.first(lambda: found)
    net = convoy.parallelize(made.model, plan, example=made.images[: max(1, subject.batch // ranks.num)])
    mine = convoy.local_samples(net, subject.batch)
    return _time(_updater(net, made.images[mine].clone(), made.labels[mine], divided=True), updates, warm_up)


def beside(predictions: Sequence[Predicted], seconds: Sequence[float]) -> Row:
    """What was predicted of a plan, each time anew, and the seconds of its updates."""
    predicted = statistics.median(one.seconds for one in predictions)
    where, ends = predictions[0].where, (min(seconds), max(seconds))
    return Row(predictions[0].name, predicted, statistics.median(seconds), where, ends)


@dataclass(frozen=True)
class _Made:
    """A network and one global batch."""

    model: nn.Module
    images: Tensor
    labels: Tensor

    @staticmethod
    def of(subject: Subject) -> "_Made":
        """The same on every rank, which joins the others."""
        keep_freed_memory(torch.device("cpu"))
        join()
        torch.manual_seed(0)
        model = models.create(subject.model, num_classes=subject.num_classes, **subject.options)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        channels = next(p for p in model.parameters() if p.dim() == 4).shape[1]
        images = torch.randn(subject.batch, channels, subject.image_size, subject.image_size)
        labels = torch.randint(0, subject.num_classes, (subject.batch,))
        return _Made(model, images.contiguous(memory_format=torch.channels_last), labels)


def _updater(net: nn.Module, images: Tensor, labels: Tensor, divided: bool = False) -> Callable[[], None]:
    """An update; `divided` as the trainer does it, who has ranks share the optimizer's work where that is faster."""
    optimizer: Optimizer = SGD(net.parameters(), lr=0.01, momentum=0.9)
    if divided:
        optimizer = divide_update(net, optimizer)

    def update() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()

    return update


def _time(update: Callable[[], None], updates: int, warm_up: int) -> list[float]:
    seconds = []
    for _ in range(warm_up + updates):
        start = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - start)
    return seconds[warm_up:]
