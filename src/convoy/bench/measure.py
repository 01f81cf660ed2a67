"""A rank's part of a measurement: Convoy under a plan, or another tool as its users write it, built anew and timed."""

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.bench.configuration import CONVOY, PEERS, check_installed, check_recipe
from convoy.bench.measurement import MeasurementTask, MemoryPeak, RankTimes, Stopwatch, join, run_updates
from convoy.bench.processes import Say
from convoy.bench.study import data_of
from convoy.comm.groups import join as join_group
from convoy.data import Batch, Order, mix, open_data, training_batches
from convoy.errors import ConvoyError
from convoy.ops.random_bits import fold
from convoy.training import choose_device
from convoy.training.build import build_model
from convoy.training.derived import resolve
from convoy.training.division import MEASURED, WARM_UP, SpeedTest
from convoy.training.loss import ClassificationLoss
from convoy.training.optimizers import create_optimizer
from convoy.training.precision import autocast_of, set_numerics
from convoy.training.session import Session
from convoy.training.set_up import set_up
from convoy.training.step import InputPipeline


def measure_convoy(task: MeasurementTask) -> RankTimes:
    """A rank's part of a measurement of Convoy under a plan. All ranks call it."""
    ranks, device = join(task)
    data = data_of(task.made, task.recipe)
    memory = MemoryPeak(device)
    session = set_up(task.recipe, device, ranks=ranks, data=data)
    session.model.train()
    stopwatch = Stopwatch(device)
    losses: list[Tensor] = []
    first = _divide_by_speed(session, losses)
    step = session.step()

    def update(batch: Batch, number: int) -> None:
        result = step(batch, first + number)
        if first + number == 0:
            losses.extend(result.losses)

    with stopwatch.watch():
        batches = session.batches(first, task.warm_up + task.updates)
        run_updates(batches, update, stopwatch, task.warm_up, ranks.barrier)
    loss = sum(float(part) for part in losses) if ranks.is_group_leader else 0.0
    own = session.division.counts[ranks.sample_rank]
    return RankTimes(stopwatch.laps(), memory.peak(), loss, stopwatch.overhead, microbatches=own)


def _divide_by_speed(session: Session, losses: list[Tensor]) -> int:
    """With `shares=auto`, measure what a microbatch takes each device, and divide the batch by that.

    Returns:
        How many updates that took.
    """
    if session.recipe.parallel.shares != "auto" or session.ranks.num_sample_ranks == 1:
        return 0
    speed, step, updates = SpeedTest(), session.step(), 0
    step.timed = True
    with closing(session.batches(0, WARM_UP + MEASURED)) as batches:
        for batch in batches:
            result = step(batch, updates)
            if updates == 0:
                losses.extend(result.losses)
            speed.add(result.seconds)
            updates += 1
    session.division, _ = speed.shares(session.ranks, session.division)
    return updates


@dataclass(frozen=True)
class Wrapped:
    """A network ready to be trained.

    Attributes:
        backward: of a loss.
        unfinished: the context of a pass whose gradients are not exchanged.
    """

    network: Callable[..., Any]
    optimizer: Optimizer
    backward: Callable[[Tensor], None] = Tensor.backward
    unfinished: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def wrap(kind: str, model: nn.Module, optimizer: Optimizer, num: int, device: torch.device) -> Wrapped:
    """A network as a peer trains it. All ranks call it; it joins them, if nobody has.

    The peers take the group that there is: one of their own would meet in a store that listens on all interfaces.

    Args:
        kind: `torch` for plain PyTorch, or a key of `PEERS`.
        model: on its device.
        optimizer: of its parameters.
        num: how many ranks there are.
        device: of this one.
    """
    wrappers = {"ddp": _ddp, "fabric": _fabric, "accelerate": _accelerate}
    if num > 1:
        join_group()
    return wrappers[kind](model, optimizer, num, device) if kind in wrappers else Wrapped(model, optimizer)


def _ddp(model: nn.Module, optimizer: Optimizer, num: int, device: torch.device) -> Wrapped:
    from torch.nn.parallel import DistributedDataParallel

    network = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Wrapped(network, optimizer, unfinished=network.no_sync)


def _fabric(model: nn.Module, optimizer: Optimizer, num: int, device: torch.device) -> Wrapped:
    lightning = importlib.import_module("lightning.fabric")
    strategy = importlib.import_module("lightning.fabric.strategies").DDPStrategy(gradient_as_bucket_view=True)
    fabric = lightning.Fabric(accelerator=device.type, devices=num, strategy=strategy)
    fabric.launch()
    network, wrapped = fabric.setup(model, optimizer)
    return Wrapped(network, wrapped, fabric.backward, lambda: fabric.no_backward_sync(network))


def _accelerate(model: nn.Module, optimizer: Optimizer, num: int, device: torch.device) -> Wrapped:
    library = importlib.import_module("accelerate")
    wishes = library.DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = library.Accelerator(cpu=device.type == "cpu", kwargs_handlers=[wishes])
    network, wrapped = accelerator.prepare(model, optimizer)
    return Wrapped(network, wrapped, accelerator.backward, lambda: accelerator.no_sync(network))


def measure_peer(task: MeasurementTask) -> RankTimes:
    """A rank's part of a measurement of another tool. All ranks call it."""
    check_recipe(task.recipe)
    check_installed(task.kind)
    peer = _Peer(task)
    stopwatch = Stopwatch(peer.device)
    num_updates = task.warm_up + task.updates
    with stopwatch.watch():
        run_updates(peer.batches(0, num_updates), peer.update, stopwatch, task.warm_up, peer.barrier)
    laps = stopwatch.laps()
    peak = peer.memory.peak()
    without = peer.without_exchange(num_updates, task.updates) if task.kind in PEERS else []
    return RankTimes(laps, peak, peer.first_loss, stopwatch.overhead, without)


class _Peer:
    def __init__(self, task: MeasurementTask) -> None:
        recipe = self._recipe = task.recipe
        num, rank = task.num_devices, int(os.environ.get("RANK", "0"))
        if recipe.batch % num:
            raise ConvoyError(f"--peers divide the batch evenly, but {recipe.batch} samples are no multiple of {num}")
        self._num, own = num, recipe.batch // num
        self._positions = range(rank * own, (rank + 1) * own)
        self._first = self._positions.start
        self.device = _device(task.device_type)
        set_numerics(recipe)
        threads = torch.get_num_threads()
        self._data = data_of(task.made, recipe) or open_data(recipe.data)
        self.memory = MemoryPeak(self.device)
        model, _ = build_model(recipe, self._data)
        memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
        model.to(device=self.device, memory_format=memory_format)  # type: ignore[call-overload]
        quantities = resolve(recipe, len(self._data.train))
        self._rate = quantities.schedule.lr
        optimizer = create_optimizer(model, recipe.optimizer, quantities.lr)
        called: nn.Module = torch.compile(model) if recipe.compile else model  # type: ignore[assignment]
        self._wrapped = wrap(task.kind, called.train(), optimizer, num, self.device)
        torch.set_num_threads(threads)  # some libraries set it
        self._parameters = list(model.parameters())
        self._pipeline = InputPipeline(self._data, self.device, memory_format)
        self._loss = ClassificationLoss(recipe.loss.label_smoothing, recipe.loss.aux_weight)
        self._order = Order(len(self._data.train), recipe.batch, recipe.seed)
        self.first_loss = 0.0

    def barrier(self) -> None:
        """Wait for all."""
        if self._num > 1:
            torch.distributed.barrier()

    def batches(self, first: int, number: int) -> Generator[Batch, None, None]:
        """This rank's samples of some updates."""
        return training_batches(
            self._data,
            self._recipe.data,
            self._order,
            first_update=first,
            num_updates=number,
            seed=self._recipe.seed,
            positions=self._positions,
            pin_memory=self.device.type == "cuda",
        )

    def update(self, batch: Batch, number: int) -> None:
        """One of them."""
        optimizer = self._wrapped.optimizer
        optimizer.zero_grad(set_to_none=True)
        images = self._pipeline(batch)
        targets = batch.labels.to(self.device, non_blocking=True)
        images, targets = self._mixed(images, targets, number)
        with autocast_of(self._recipe, self.device):
            loss = self._loss(self._wrapped.network(images), targets)
        self._wrapped.backward(loss)
        for group in optimizer.param_groups:
            group["lr"] = self._rate(number)
        if self._recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._recipe.clip_norm)
        optimizer.step()
        if number == 0:
            self.first_loss = float(loss.detach()) / self._num

    def without_exchange(self, first: int, number: int) -> list[float]:
        """Seconds of updates whose gradients stay where they are: what is missing then is what the exchange costs."""
        seconds = []
        with closing(self.batches(first, number)) as batches:
            for place in range(number):
                began = time.perf_counter()
                with self._wrapped.unfinished() if self._num > 1 else contextlib.nullcontext():
                    self.update(next(batches), first + place)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                seconds.append(time.perf_counter() - began)
        return seconds

    def _mixed(self, images: Tensor, targets: Tensor, number: int) -> tuple[Tensor, Any]:
        """As the recipe mixes samples, in one piece."""
        if not self._recipe.data.mix.on:
            return images, targets
        return mix(
            images,
            targets,
            num_classes=len(self._data.classes),
            config=self._recipe.data.mix,
            sizes=[len(images)],
            keys=[fold(self._recipe.seed, number, self._first)],
        )


def _device(kind: str) -> torch.device:
    if kind != "cuda":
        return torch.device("cpu")
    device = choose_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    torch.cuda.set_device(device)
    return device


def measure_rank(task: MeasurementTask, say: Say) -> RankTimes:
    """A rank's part of a measurement. All ranks call it."""
    return measure_convoy(task) if task.kind == CONVOY else measure_peer(task)
