"""A rank's part of a study: what is measured, of Convoy or another tool, built anew; and what is predicted before."""

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.bench.measurement import MeasurementTask, MemoryPeak, Stopwatch, join, run_updates
from convoy.bench.processes import Say
from convoy.bench.records import (
    AUTO,
    COMMUNICATION,
    COMPUTE,
    CONVOY,
    INPUT,
    OPTIMIZER,
    PEERS,
    Forecast,
    PlanPrediction,
    RankTimes,
)
from convoy.bench.study import data_of, in_recipe
from convoy.comm.joining import join as join_group
from convoy.comm.ranks import Ranks
from convoy.compiler import compile_function
from convoy.data import Batch, DataSet, Order, mix, open_data, training_batches
from convoy.engine.coupling import microbatch_sizes
from convoy.errors import ConvoyError
from convoy.ops.random_bits import fold
from convoy.planner import make_plan
from convoy.planner.cost.prediction import Scored
from convoy.planner.cost.store import ProfileStore
from convoy.plans.plan import Plan, plan_text
from convoy.training import Recipe, choose_device
from convoy.training.build import build_model
from convoy.training.classification import ClassificationLoss, InputPipeline
from convoy.training.derived import resolve
from convoy.training.division import text as text_of
from convoy.training.optimizers import create_optimizer
from convoy.training.precision import autocast_of, set_numerics
from convoy.training.session import Session
from convoy.training.set_up import set_up
from convoy.training.workloads import workload_of_recipe


def measure_rank(task: MeasurementTask, say: Say) -> RankTimes:
    """A rank's part of a measurement. All ranks call it."""
    return _measure_convoy(task) if task.kind == CONVOY else _measure_peer(task)


def _measure_convoy(task: MeasurementTask) -> RankTimes:
    ranks, device = join(task)
    memory = MemoryPeak(device)
    session = set_up(task.recipe, device, ranks=ranks, data=data_of(task.made, task.recipe))
    session.model.train()
    stopwatch = Stopwatch(device)
    losses: list[Tensor] = []
    session.divide_by_speed()
    step = session.step()

    def update(batch: Batch, number: int) -> None:
        result = step(batch, number)
        if number == 0:
            losses.extend(result.losses)

    with stopwatch.watch():
        batches = session.batches(0, task.warm_up + task.updates)
        run_updates(batches, update, stopwatch, task.warm_up, ranks.barrier)
    return RankTimes(
        **stopwatch.times(),
        memory=memory.peak(),
        loss=sum(float(part) for part in losses) if ranks.is_group_leader else 0.0,
        overhead=stopwatch.overhead,
        microbatches=session.division.counts[ranks.sample_rank],
    )


@dataclass(frozen=True)
class Wrapped:
    """A network ready to be trained."""

    network: Callable[..., Any]
    optimizer: Optimizer
    backward: Callable[[Tensor], None] = Tensor.backward
    unfinished: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # of passes without an exchange


def wrap(kind: str, model: nn.Module, optimizer: Optimizer, num: int, device: torch.device) -> Wrapped:
    """A network, on its device, as plain PyTorch or a peer trains it. All ranks call it; it joins them, if nobody has.

    The peers take the group that there is: one of their own would meet in a store that listens on all interfaces.
    """
    wrappers = {"ddp": _ddp, "fabric": _fabric, "accelerate": _accelerate}
    if num > 1:
        join_group(device=device.type)
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


def _measure_peer(task: MeasurementTask) -> RankTimes:
    recipe, num, rank = task.recipe, task.num_devices, int(os.environ.get("RANK", "0"))
    if recipe.batch % num:
        raise ConvoyError(f"--peers divide the batch evenly, but {recipe.batch} samples are no multiple of {num}")
    positions = range(rank * recipe.batch // num, (rank + 1) * recipe.batch // num)
    device = torch.device("cpu")
    if task.device_type == "cuda":
        device = choose_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(device)
    set_numerics(recipe)
    threads = torch.get_num_threads()
    data = data_of(task.made, recipe) or open_data(recipe.data)
    memory = MemoryPeak(device)
    model, memory_format = _network(recipe, data, device)
    quantities = resolve(recipe, len(data.train))
    called: nn.Module = compile_function(model) if recipe.compile else model  # type: ignore[assignment]
    wrapped = wrap(task.kind, called.train(), create_optimizer(model, recipe.optimizer, quantities.lr), num, device)
    torch.set_num_threads(threads)  # some libraries set it
    pipeline = InputPipeline(data, device, memory_format)
    criterion = ClassificationLoss(recipe.loss.label_smoothing, recipe.loss.aux_weight)
    order = Order(len(data.train), recipe.batch, recipe.seed)
    first_loss = 0.0

    def batches(first: int, number: int) -> Generator[Batch, None, None]:
        options: dict[str, Any] = {"seed": recipe.seed, "positions": positions, "pin_memory": device.type == "cuda"}
        return training_batches(data, recipe.data, order, first_update=first, num_updates=number, **options)

    def update(batch: Batch, number: int) -> None:
        nonlocal first_loss
        wrapped.optimizer.zero_grad(set_to_none=True)
        images: Tensor = pipeline(batch)
        targets: Any = pipeline.labels(batch)
        if recipe.data.mix.on:  # in one piece
            num_classes, keys = len(data.classes), [fold(recipe.seed, number, positions.start)]
            images, targets = mix(
                images, targets, num_classes=num_classes, config=recipe.data.mix, sizes=[len(images)], keys=keys
            )
        with autocast_of(recipe, device):
            loss = criterion(wrapped.network(images), targets)
        wrapped.backward(loss)
        for group in wrapped.optimizer.param_groups:
            group["lr"] = quantities.schedule.lr(number)
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(list(model.parameters()), recipe.clip_norm)
        wrapped.optimizer.step()
        if number == 0:
            first_loss = float(loss.detach()) / num

    stopwatch, num_updates = Stopwatch(device), task.warm_up + task.updates
    with stopwatch.watch():
        barrier = torch.distributed.barrier if num > 1 else lambda: None
        run_updates(batches(0, num_updates), update, stopwatch, task.warm_up, barrier)
    times, peak, without = stopwatch.times(), memory.peak(), []
    if task.kind in PEERS:  # the exchange is timed by updates without it
        with closing(batches(num_updates, task.updates)) as more:
            for number in range(num_updates, num_updates + task.updates):
                began = time.perf_counter()
                with wrapped.unfinished() if num > 1 else contextlib.nullcontext():
                    update(next(more), number)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                without.append(time.perf_counter() - began)
    return RankTimes(**times, memory=peak, overhead=stopwatch.overhead, loss=first_loss, without=without)


def _network(recipe: Recipe, data: DataSet, device: torch.device) -> tuple[nn.Module, torch.memory_format]:
    model, _ = build_model(recipe, data)
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    return model.to(device=device, memory_format=memory_format), memory_format  # type: ignore[call-overload]


def forecast(
    task: MeasurementTask, plans: Sequence[str], bound: Sequence[str], predict: bool, keep: bool, say: Say
) -> Forecast:
    """Predict all plans on the devices of a task's recipe, with the batch in even parts. All ranks call it.

    Devices that are not equally fast are predicted as such; shares are not, but those that the planner has for `auto`.
    For `auto` among the plans, and for each of the shares in `bound`, the planner first finds a plan, also where
    `predict` is false. `keep` uses times that were measured before, and stores new ones.
    """
    ranks, device = join(task)
    data = data_of(task.made, task.recipe)
    result = Forecast()
    rivals = [plan for text in plans if text != AUTO and (plan := Plan.parse(text)).mesh.num_devices == ranks.num]

    def choose(numbers: str = "") -> Session:
        parallel = task.recipe.parallel.model_copy(update={"plan": AUTO, **in_recipe(numbers)})
        recipe = task.recipe.model_copy(update={"parallel": parallel})
        session = set_up(recipe, device, say, ranks, data, keep, rivals=[] if numbers else rivals)
        result.notes.extend(f"shares {numbers}: {note}" if numbers else note for note in session.notes)
        return session

    if AUTO in plans:
        session = choose()
        result.auto, counts = plan_text(session.plan), session.division.counts
        even = microbatch_sizes(len(session.division.sizes), len(counts))
        if task.recipe.parallel.shares is None and counts != even:
            result.auto_shares = list(counts)
            result.notes.append(f"plan auto divides the batch by speed: {text_of(counts)} microbatches")
            if predict and session.scored is not None:
                result.predictions[AUTO] = _prediction(session.scored)
        del session
    for numbers in bound:
        try:
            result.bound[numbers] = plan_text(choose(numbers).plan)
        except ConvoyError as error:
            result.notes.append(f"auto, shares {numbers}: {error}")
    if predict:
        texts = dict.fromkeys(result.auto if text == AUTO and result.auto is not None else text for text in plans)
        try:
            _predict(result, task.recipe, list(texts), data or open_data(task.recipe.data), (ranks, device), keep, say)
        except ConvoyError as error:
            result.notes.append(f"nothing is predicted: {error}")
        chosen = result.predictions.get(result.auto or "") if AUTO in plans else None
        for text, other in result.predictions.items():
            if chosen is not None and other.seconds < chosen.seconds:
                result.notes.append(f"{text} is predicted to be faster than {result.auto}, but did not win the race")
    return result


def _predict(
    result: Forecast,
    recipe: Recipe,
    texts: Sequence[str],
    data: DataSet,
    here: tuple[Ranks, torch.device],
    keep: bool,
    say: Say,
) -> None:
    """Add predictions of plans to a forecast, and notes on those that cannot be."""
    ranks, device = here
    set_numerics(recipe)
    model, _ = _network(recipe, data, device)
    shape = data.channels, data.image_size, data.image_size
    workload = workload_of_recipe(recipe, model.train(), shape, ranks.num, device, ranks.group)
    plans: dict[str, Plan] = {}
    for text in texts:
        try:
            plan = Plan.parse(text)
            workload.place(plan)
            plans[text] = plan
        except ConvoyError as error:
            result.notes.append(f"{text}: {error}")
    planned = make_plan(
        replace(workload, by_speed=None, schedules=(recipe.parallel.schedule or "1f1b",)),
        ranks.num,
        Ranks.here() if ranks.num > 1 else Ranks(),
        store=ProfileStore() if keep else None,
        plans=list(plans.values()),
        progress=say,
    )
    by_plan = {one.plan: one for one in planned.candidates}
    for text, plan in plans.items():
        result.predictions[text] = _prediction(planned.serial if ranks.num == 1 else by_plan[plan])
    result.notes.extend(planned.notes)


def _prediction(scored: Scored) -> PlanPrediction:
    timeline = scored.timeline
    kinds = timeline.by_kind()
    around = [span for span in timeline.spans if (span.task.rank, span.task.kind) == (timeline.busiest, "around")]
    parts = {
        INPUT: sum(span.end - span.start for span in around if span.task.name == "input"),
        COMMUNICATION: kinds["exposed"] + kinds["idle"],
        OPTIMIZER: kinds.get("update", 0.0),
    }
    compute = scored.seconds - sum(parts.values())
    return PlanPrediction(seconds=scored.seconds, parts={COMPUTE: compute, **parts}, memory=scored.memory.total)
