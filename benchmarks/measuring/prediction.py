"""What a rank does to hold predictions against measurements: predict every plan, then measure every plan."""

import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import convoy
from convoy import models
from convoy.cost.store import ProfileStore
from convoy.engine.allocation import keep_freed_memory
from convoy.engine.divided_update import divide_update
from convoy.engine.groups import join
from convoy.errors import ConvoyError
from convoy.planning import Ranks, make_plan, score, workload_of
from convoy.plans.plan import Plan

SERIAL = "one device"
CHOSEN = "auto"
_WARM_UP = 5
"""Updates, until memory that is freed is used again."""


@dataclass(frozen=True)
class Subject:
    """A network at one global batch.

    Attributes:
        name: in the table.
        model: name in `convoy.models`.
        image_size: height and width.
        options: of the model.
    """

    name: str
    model: str
    image_size: int
    batch: int
    num_classes: int = 10
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A plan of a subject.

    Attributes:
        predicted, measured: seconds of an update.
        where: predicted seconds by what they go to.
        spread: smallest and largest of the measured updates.
    """

    plan: str
    predicted: float
    measured: float
    where: Mapping[str, float]
    spread: tuple[float, float]


def run(subject: Subject, plans: Sequence[str], updates: int) -> list[Row]:
    """All plans that the network can have, and the planner's own: predicted first, then measured.

    Args:
        subject: what is trained.
        plans: for as many devices as ranks run.
        updates: timed of each plan, after those that warm up.
    """
    device = torch.device("cpu")
    keep_freed_memory(device)
    join()
    torch.manual_seed(0)
    model = models.create(subject.model, num_classes=subject.num_classes, **subject.options)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    channels = next(p for p in model.parameters() if p.dim() == 4).shape[1]
    images = torch.randn(subject.batch, channels, subject.image_size, subject.image_size)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, subject.num_classes, (subject.batch,))
    ranks = Ranks.here()
    workload = workload_of(model, images, subject.batch, name=subject.name)
    with tempfile.TemporaryDirectory() as folder:
        planned = make_plan(workload, ranks.num, ranks, store=ProfileStore(Path(folder)))
    predicted = {SERIAL: (planned.serial.seconds, planned.serial.timeline.by_kind())}
    named: dict[str, Plan] = {}
    for text in plans:
        try:
            scored = score(workload, Plan.parse(text), planned.costs)
        except ConvoyError:
            continue
        named[text] = scored.plan
        predicted[text] = scored.seconds, scored.timeline.by_kind()
    if ranks.num > 1:
        named[CHOSEN] = planned.best.plan
        predicted[CHOSEN] = planned.best.seconds, planned.best.timeline.by_kind()
    measured = {SERIAL: _alone(model, images, labels, updates, ranks)}
    for name, plan in named.items():
        measured[name] = _under(plan, model, images, labels, updates)
    texts = {CHOSEN: f"{CHOSEN}: {planned.best.plan}"}
    return [
        Row(texts.get(name, name), seconds, statistics.median(measured[name]), where, _ends(measured[name]))
        for name, (seconds, where) in predicted.items()
    ]


def _ends(seconds: Sequence[float]) -> tuple[float, float]:
    return min(seconds), max(seconds)


def _alone(model: nn.Module, images: Tensor, labels: Tensor, updates: int, ranks: Ranks) -> list[float]:
    """Rank 0 by itself, with the plain network; the others wait."""
    found: list[float] = []
    if ranks.rank == 0:
        own = copy.deepcopy(model)
        found = _time(_updater(own, images, labels), updates)
    if dist.is_initialized():
        dist.barrier()
    return ranks.first(lambda: found)


def _under(plan: Plan, model: nn.Module, images: Tensor, labels: Tensor, updates: int) -> list[float]:
    num = int(os.environ.get("WORLD_SIZE", 1))
    net = convoy.parallelize(copy.deepcopy(model), plan, example=images[: max(1, len(images) // num)])
    mine = convoy.local_samples(net, len(images))
    return _time(_updater(net, images[mine].clone(), labels[mine], divided=True), updates)


def _updater(net: nn.Module, images: Tensor, labels: Tensor, divided: bool = False) -> Callable[[], None]:
    """An update; `divided` as the trainer does it, who has ranks share the optimiser's work where that is faster."""
    optimizer: Optimizer = SGD(net.parameters(), lr=0.01, momentum=0.9)
    if divided:
        optimizer = divide_update(net, optimizer)

    def update() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()

    return update


def _time(update: Callable[[], None], updates: int) -> list[float]:
    seconds = []
    for _ in range(_WARM_UP + updates):
        start = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - start)
    return seconds[_WARM_UP:]
