"""A rank's part of a measurement: a network as Convoy or another tool trains it, built anew, its updates by a clock;
and of a forecast: what the planner predicts of the rows of a study before, and the plans that it chooses for them."""

import contextlib
import importlib
import os
import re
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from convoy.bench.processes import Say
from convoy.bench.records import (
    AUTO,
    COMMUNICATION,
    CONVOY,
    INPUT,
    OPTIMIZER,
    PEERS,
    Forecast,
    Made,
    PlanPrediction,
    RankTimes,
)
from convoy.bench.study import data_of, in_recipe, opened
from convoy.comm.collectives import watching
from convoy.comm.joining import join as join_group
from convoy.comm.ranks import Ranks
from convoy.compiler import compile_function
from convoy.data.batch import Batch
from convoy.data.dataset import DataSet
from convoy.data.loader import training_batches
from convoy.data.order import Order
from convoy.data.transforms import mix
from convoy.engine.allocation import keep_freed_memory
from convoy.engine.coupling import microbatch_sizes
from convoy.engine.watched import DeviceClock
from convoy.errors import ConvoyError
from convoy.ops.random_bits import fold
from convoy.planner.cost.prediction import Scored
from convoy.planner.planner import Question, make_plan
from convoy.planner.store import ProfileStore
from convoy.plans.plan import Plan, plan_text
from convoy.recipe.recipe import Recipe
from convoy.resources import text_of
from convoy.tasks.registry import create_task
from convoy.training import choose_device
from convoy.training.build import build_model
from convoy.training.derived import resolve
from convoy.training.division import text as counts_text
from convoy.training.environment import join_ranks
from convoy.training.evaluation import InputPipeline
from convoy.training.optimizer import create_optimizer, set_rates
from convoy.training.precision import autocast_of, set_numerics
from convoy.training.session import Session
from convoy.training.set_up import set_up
from convoy.training.workloads import workload_of_recipe

_PAIRS = 2000


@dataclass(frozen=True)
class MeasurementTask:
    """One measurement of a configuration, as its ranks are told."""

    kind: str
    recipe: Recipe  # with the devices and the plan of the configuration
    made: Made | None  # None for the recipe's pictures
    device_type: str  # `cpu`, or `cuda`
    updates: int = 0  # those that are timed
    warm_up: int = 0  # updates before them

    @property
    def num_devices(self) -> int:
        return self.recipe.parallel.devices or 1

    def join(self, timeout_s: float = 600.0) -> tuple[Ranks, torch.device]:
        """The ranks, and this one's device; memory that is freed stays with the process, also on one device."""
        if self.num_devices > 1:
            ranks, device = join_ranks(timeout_s, self.device_type)
            return ranks, device if self.device_type == "cuda" else torch.device("cpu")
        device = choose_device(self.device_type)
        keep_freed_memory(device)
        return Ranks(), device


class Stopwatch:
    """Takes the time of updates and of their parts; a part within another one is not counted in that as well.

    On a GPU moments are events in its stream, so that what is waited for is what its computing waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self.clear()

    def clear(self) -> None:
        self._laps: list[Any] = []
        self._parts: list[list[tuple[str, str, Any, Any]]] = [[]]  # the part, that around it, its two ends; by laps
        self._open: list[tuple[str, Any]] = []

    @contextmanager
    def watch(self) -> Generator[None, None, None]:
        """Sees waits of the engine and steps of optimizers while it is entered."""
        with ExitStack() as stack:
            stack.enter_context(watching(self))
            stack.callback(register_optimizer_step_pre_hook(lambda *_: self.enter(OPTIMIZER)).remove)
            stack.callback(register_optimizer_step_post_hook(lambda *_: self.leave()).remove)
            yield

    def enter(self, part: str = COMMUNICATION) -> None:
        self._open.append((part, self._clock.now()))

    def leave(self) -> None:
        part, began = self._open.pop()
        around = self._open[-1][0] if self._open else ""
        self._parts[-1].append((part, around, began, self._clock.now()))

    def lap(self) -> None:
        """End an update, if one was begun, and begin the next."""
        self._laps.append(self._clock.now())
        self._parts.append([])

    def times(self) -> dict[str, Any]:
        """Seconds of all updates and of their parts, and what timing these adds, as `RankTimes` has them."""
        self._clock.wait()
        seconds = [self._clock.between(*ends) for ends in pairwise(self._laps)]
        times = {part: [0.0] * len(seconds) for part in (COMMUNICATION, INPUT, OPTIMIZER)}
        for number, parts in enumerate(self._parts[1:-1]):
            for part, around, *ends in parts:
                took_s = self._clock.between(*ends)
                times[part][number] += took_s
                if around:
                    times[around][number] -= took_s
        return {"seconds": seconds, **times, "overhead": self._overhead()}

    def _overhead(self) -> float:
        """Seconds that timing the parts has added to an update."""
        num_pairs = sum(map(len, self._parts)) / max(1, len(self._laps) - 1)
        began = time.perf_counter()
        for _ in range(_PAIRS):
            self.enter()
            self.leave()
        return (time.perf_counter() - began) / _PAIRS * num_pairs


def _bytes(name: str) -> int:
    """A number of this process's that Linux keeps: `VmRSS`, its bytes now, or `VmHWM`, its most so far."""
    match = re.search(rf"^{name}:\s*(\d+) kB", text_of(Path("/proc/self/status")), re.MULTILINE)
    return 1024 * int(match[1]) if match else 0


def memory_peak(device: torch.device) -> Callable[[], int]:
    """Tells the most bytes that this process has had since this call, beyond those that it had then."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated
    before = _bytes("VmRSS")
    return lambda: max(0, _bytes("VmHWM") - before)


@dataclass
class Row:
    """A configuration that is built, on this rank, whoever trains it."""

    device: torch.device
    batches: Callable[[int, int], Generator[Batch, None, None]]  # of so many updates, from one on
    update: Callable[[Batch, int], None]
    barrier: Callable[[], None]
    losses: list[Tensor] = field(default_factory=list)  # of the first update: parts of the sum over all ranks
    done: int = 0  # updates so far
    unfinished: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # of updates without an exchange

    def time(
        self, warm_up: int, updates: int, within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> dict[str, Any]:
        """Do updates, each `within` a context, and take the time of those after the warm-up."""
        stopwatch = Stopwatch(self.device)
        with stopwatch.watch(), closing(self.batches(self.done, warm_up + updates)) as batches:
            for number in range(warm_up + updates):
                if number == warm_up:
                    self.barrier()
                    stopwatch.clear()
                stopwatch.lap()
                stopwatch.enter(INPUT)
                batch = next(batches)
                stopwatch.leave()
                with within():
                    self.update(batch, self.done)
                self.done += 1
            stopwatch.lap()
            return stopwatch.times()


def measure_rank(task: MeasurementTask, say: Say) -> RankTimes:
    """A rank's part of a measurement. All ranks call it."""
    row, memory = (_of_convoy if task.kind == CONVOY else _of_peer)(task)
    times = row.time(task.warm_up, task.updates)
    times |= {"memory": memory(), "loss": sum(map(float, row.losses))}
    if task.kind in PEERS:  # the exchange is timed by updates without it
        times["without"] = row.time(0, task.updates, row.unfinished)["seconds"]
    return RankTimes(**times)


def _of_convoy(task: MeasurementTask) -> tuple[Row, Callable[[], int]]:
    ranks, device = task.join()
    memory = memory_peak(device)
    session = set_up(task.recipe, device, ranks=ranks, data=data_of(task.made, task.recipe))
    session.model.train()
    session.divide_by_speed()
    step = session.step()

    def update(batch: Batch, number: int) -> None:
        result = step(batch, number)
        if number == 0 and ranks.is_group_leader:
            row.losses.extend(result.losses)

    row = Row(device, session.batches, update, ranks.barrier)
    return row, memory


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
    if num > 1:
        join_group(device=device.type)
    if kind == "ddp":
        network = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return Wrapped(network, optimizer, unfinished=network.no_sync)
    if kind == "fabric":
        strategy = importlib.import_module("lightning.fabric.strategies").DDPStrategy(gradient_as_bucket_view=True)
        library = importlib.import_module("lightning.fabric")
        fabric = library.Fabric(accelerator=device.type, devices=num, strategy=strategy)
        fabric.launch()
        network, wrapped = fabric.setup(model, optimizer)
        return Wrapped(network, wrapped, fabric.backward, lambda: fabric.no_backward_sync(network))
    if kind == "accelerate":
        library = importlib.import_module("accelerate")
        wishes = library.DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        accelerator = library.Accelerator(cpu=device.type == "cpu", kwargs_handlers=[wishes])
        network, wrapped = accelerator.prepare(model, optimizer)
        return Wrapped(network, wrapped, accelerator.backward, lambda: accelerator.no_sync(network))
    return Wrapped(model, optimizer)


def network_of(recipe: Recipe, data: DataSet, device: torch.device) -> tuple[nn.Module, torch.memory_format]:
    """The plain network on its device, and its memory format."""
    model, _ = build_model(recipe, data)
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    return model.to(device=device, memory_format=memory_format), memory_format  # type: ignore[call-overload]


def _of_peer(task: MeasurementTask) -> tuple[Row, Callable[[], int]]:
    recipe, num, rank = task.recipe, task.num_devices, int(os.environ.get("RANK", "0"))
    if recipe.batch % num:
        raise ConvoyError(f"--peers divide the batch evenly, but {recipe.batch} samples are no multiple of {num}")
    positions = range(rank * recipe.batch // num, (rank + 1) * recipe.batch // num)
    device = torch.device("cpu")
    if task.device_type == "cuda":
        device = choose_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    set_numerics(recipe)
    threads = torch.get_num_threads()
    data = data_of(task.made, recipe) or opened(recipe)
    memory = memory_peak(device)
    model, memory_format = network_of(recipe, data, device)
    quantities = resolve(recipe, len(data.train))
    called: nn.Module = compile_function(model) if recipe.compile else model  # type: ignore[assignment]
    optimizer = create_optimizer(model, recipe.optimizer, quantities.lr, quantities.group_ends)
    wrapped = wrap(task.kind, called.train(), optimizer, num, device)
    torch.set_num_threads(threads)  # some libraries set it
    pipeline = InputPipeline(data, device, memory_format)
    training_task = create_task(recipe, data.classes, data.task)
    order = Order(len(data.train), recipe.batch, recipe.seed, recipe.data.repeats)

    def batches(first: int, number: int) -> Generator[Batch, None, None]:
        options: dict[str, Any] = {"seed": recipe.seed, "positions": positions, "pin_memory": device.type == "cuda"}
        return training_batches(data, recipe.data, order, first_update=first, num_updates=number, **options)

    def update(batch: Batch, number: int) -> None:
        wrapped.optimizer.zero_grad(set_to_none=True)
        images: Tensor = pipeline(batch)
        targets: Any = pipeline.targets(batch)
        if recipe.data.mix.on:  # in one piece
            num_classes, keys = len(data.classes), [fold(recipe.seed, number, positions.start)]
            images, targets = mix(
                images, targets, num_classes=num_classes, config=recipe.data.mix, sizes=[len(images)], keys=keys
            )
        with autocast_of(recipe, device):
            loss = training_task.loss(wrapped.network(images), targets)
        wrapped.backward(loss)
        set_rates(wrapped.optimizer, quantities.schedule.lr(number), number)
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(list(model.parameters()), recipe.clip_norm)
        wrapped.optimizer.step()
        if number == 0:
            row.losses.append(loss.detach() / num)

    unfinished = wrapped.unfinished if num > 1 else contextlib.nullcontext
    row = Row(device, batches, update, torch.distributed.barrier if num > 1 else lambda: None, unfinished=unfinished)
    return row, memory


def forecast(
    task: MeasurementTask, plans: Sequence[str], bound: Sequence[str], predict: bool, keep: bool, say: Say
) -> Forecast:
    """Predict all plans on the devices of a task's recipe, with the batch in even parts. All ranks call it.

    Devices that are not equally fast are predicted as such; shares are not, but those that the planner has for `auto`:
    plans are scored with even parts, so that `make_plan` is asked without shares.
    For `auto` among the plans, and for each of the shares in `bound`, the planner first finds a plan, also where
    `predict` is false. `keep` uses times that were measured before, and stores new ones.
    """
    ranks, device = task.join()
    recipe, result = task.recipe, Forecast()
    data = data_of(task.made, recipe) or opened(recipe)
    texts = [text for text in plans if text != AUTO]
    rivals = [plan for plan in map(Plan.parse, texts) if plan.mesh.num_devices == ranks.num]

    def choose(shares: str = "") -> Session:
        parallel = recipe.parallel.model_copy(update={"plan": AUTO, **in_recipe(shares)})
        auto_recipe = recipe.model_copy(update={"parallel": parallel})
        session = set_up(auto_recipe, device, say, ranks, data, keep, rivals=[] if shares else rivals)
        result.notes.extend(f"shares {shares}: {note}" if shares else note for note in session.notes)
        return session

    if AUTO in plans:
        session = choose()
        result.auto, counts = plan_text(session.plan), session.division.counts
        texts = list(dict.fromkeys(result.auto if text == AUTO else text for text in plans))
        if recipe.parallel.shares is None and counts != microbatch_sizes(len(session.division.sizes), len(counts)):
            result.auto_shares = list(counts)
            result.notes.append(f"plan auto divides the batch by speed: {counts_text(counts)} microbatches")
            if predict and session.chosen.scored is not None:
                result.predictions[AUTO] = _prediction(session.chosen.scored)
        del session
    for shares in bound:
        try:
            result.bound[shares] = plan_text(choose(shares).plan)
        except ConvoyError as error:
            result.notes.append(f"auto, shares {shares}: {error}")
    if not predict:
        return result
    try:
        set_numerics(recipe)
        model, _ = network_of(recipe, data, device)
        shape = data.channels, data.image_size, data.image_size
        workload = workload_of_recipe(recipe, model.train(), shape, ranks.num, device, ranks.group)
        scheduled = replace(workload, by_speed=None, schedules=(recipe.parallel.schedule or "1f1b",))
        placed: dict[str, Plan] = {}
        for text in texts:
            try:
                plan = Plan.parse(text)
                workload.place(plan)
                placed[text] = plan
            except ConvoyError as error:
                result.notes.append(f"{text}: {error}")
        store = ProfileStore() if keep else None
        question = Question(scheduled, ranks.num, store=store, plans=list(placed.values()))
        planned = make_plan(question, Ranks.here() if ranks.num > 1 else Ranks(), say)
        scored = {candidate.plan: candidate for candidate in planned.candidates}
        for text, plan in placed.items():
            result.predictions[text] = _prediction(planned.serial if ranks.num == 1 else scored[plan])
        result.notes.extend(planned.notes)
    except ConvoyError as error:
        result.notes.append(f"nothing is predicted: {error}")
    return result


def _prediction(scored: Scored) -> PlanPrediction:
    return PlanPrediction(seconds=scored.seconds, memory=scored.memory.total)
