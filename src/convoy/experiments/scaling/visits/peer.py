"""A visit to a peer: the same network, data, recipe and clock, in the loop that its users write."""

import contextlib
import os
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from convoy.data import Batch, Order, mix, open_data, training_batches
from convoy.engine.random import fold
from convoy.errors import ConvoyError
from convoy.experiments.scaling.study.made_data import data_of
from convoy.experiments.scaling.study.peers import PEERS, check_installed, check_recipe
from convoy.experiments.scaling.visits.memory import Memory
from convoy.experiments.scaling.visits.stopwatch import Stopwatch
from convoy.experiments.scaling.visits.task import RankTimes, Task
from convoy.experiments.scaling.visits.updates import run_updates
from convoy.experiments.scaling.visits.wrapped import wrap
from convoy.training import choose_device
from convoy.training.build import build_model
from convoy.training.derived import resolve
from convoy.training.numerics import autocast_of, set_numerics
from convoy.training.optimization.loss import ClassificationLoss
from convoy.training.optimization.optimizers import create_optimizer
from convoy.training.step import InputPipeline


def visit_peer(task: Task) -> RankTimes:
    """A rank's part of a visit. All ranks call it."""
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
    def __init__(self, task: Task) -> None:
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
        self.memory = Memory(self.device)
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
