"""What a rank does: the network of a case as each side trains it, its updates timed, and the planner's predictions.

A side is a way to train, as a user would write it: plain PyTorch on one device, Convoy in a loop of one's own or by
`convoy train`, the peers of `convoy bench`, torch's own pipelining.
"""

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import convoy
from convoy import models
from convoy.bench.measure import MeasurementTask, measure_rank, wrap
from convoy.bench.records import CONVOY, Made
from convoy.comm.joining import join
from convoy.comm.ranks import Ranks
from convoy.engine.allocation import keep_freed_memory
from convoy.engine.network import network_of
from convoy.engine.stages import StagedNetwork
from convoy.errors import ConvoyError
from convoy.planner.cost.costs import Costs, Times
from convoy.planner.cost.link import links_named
from convoy.planner.cost.prediction import Scored
from convoy.planner.planner import Question, make_plan, score
from convoy.planner.store import ProfileStore
from convoy.planner.workload import Workload, workload_of
from convoy.plans.plan import Plan
from convoy.plans.schedule import SCHEDULES
from convoy.recipe.recipe import load_recipe
from measuring import cases, harness
from measuring.cases import Case

CPU = torch.device("cpu")
FORMATS = {True: torch.channels_last, False: torch.contiguous_format}
AUTO = "auto"


@dataclass(frozen=True)
class Arrangement:
    """How a device goes through its samples, which is free: the update stays the same but for batch norm."""

    channels_last: bool = True  # memory format
    samples: int | None = None  # of one pass, the gradients of passes being accumulated; None for one pass over all

    def __str__(self) -> str:
        shape = "channels_last" if self.channels_last else "contiguous"
        return f"{shape}, {f'passes of {self.samples}' if self.samples else 'one pass'}"

    def for_batch(self, samples: int) -> "Arrangement":
        """The same on a batch of `samples`."""
        fits = self.samples is None or self.samples < samples
        return self if fits else replace(self, samples=None)

    def passes(self, samples: int) -> list[slice]:
        """Where in a batch of `samples` each pass begins and ends."""
        size = self.samples or samples
        return [slice(start, min(start + size, samples)) for start in range(0, samples, size)]


@dataclass(frozen=True)
class Side:
    """One way to train a case."""

    label: str  # in the table
    kind: str  # a key of `KINDS`, or a peer of `convoy bench`
    arrangement: Arrangement = Arrangement()
    plan: cases.Plan | Plan | None = None  # of Convoy
    batch_norm: str = "sync"  # of Convoy, by samples: `sync` is exact, `local` is what the peers do
    compiled: bool = False  # by torch.compile
    keeps: bool = False  # freed memory stays with the process, as Convoy has it wherever it runs
    parts: int = 1  # into how many parts the batch is cut that go through stages one after the other
    schedule: str = ""  # of the parts, where there are stages
    cuts: tuple[str, ...] = ()  # of torch's pipelining
    samples: tuple[int, ...] = ()  # of each rank, where they do not talk to each other
    returns_memory: bool = False  # freed memory goes back to the system after each part, as under `--memory-limit`

    @property
    def how(self) -> str:
        """What was chosen in trials, for the table."""
        if not self.schedule:
            return str(self.arrangement)
        shape = str(self.arrangement).partition(",")[0]
        return ", ".join([shape, f"{self.parts} parts", self.schedule, *([" ".join(self.cuts)] if self.cuts else [])])


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
    if side.kind == "trainer":
        return _by_trainer(side, case, warm_up)
    if side.keeps:
        keep_freed_memory(CPU)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        join()
    update = KINDS.get(side.kind, _peer)(side, case)
    torch.set_num_threads(1)  # some libraries set it
    losses, seconds = [], []
    busy = 0.0
    for _ in range(warm_up + case.updates):
        start, used = time.perf_counter(), time.process_time()
        loss = update()
        seconds.append(time.perf_counter() - start)
        busy += time.process_time() - used if len(seconds) > warm_up else 0.0
        losses.append(loss.item())
    return Timing(seconds[warm_up:], losses, busy / sum(seconds[warm_up:]))


Update = Callable[[], Tensor]
"""Does one weight update, and gives the mean loss over this rank's samples."""


@dataclass(frozen=True)
class Trained:
    """A network ready to be trained."""

    network: Callable[..., Any]
    optimizer: Optimizer
    samples: slice  # the slice of the global batch that this rank computes
    backward: Callable[[Tensor], None] = Tensor.backward  # of a loss
    # the context of all passes but the last, so that gradients are exchanged once an update
    unfinished: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def updater(trained: Trained, images: Tensor, labels: Tensor, arrangement: Arrangement) -> Update:
    """Updates in the passes of an arrangement over this rank's part of a batch."""
    images, labels = (whole[trained.samples].clone() for whole in (images, labels))  # the others' are not kept
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


def build(case: Case, arrangement: Arrangement) -> nn.Module:
    """The case's network, the same on every rank and every side."""
    torch.manual_seed(0)
    model = models.create(case.model, num_classes=case.num_classes, **case.options)
    return model.to(memory_format=FORMATS[arrangement.channels_last])  # type: ignore[call-overload, no-any-return]


def batch(case: Case, arrangement: Arrangement) -> tuple[Tensor, Tensor]:
    """A global batch of random images and labels, the same on every rank and every side."""
    random = torch.Generator().manual_seed(1)
    channels = 1 if case.model == "lenet" else 3
    images = torch.randn(case.batch, channels, case.image_size, case.image_size, generator=random)
    shape = (case.batch, case.image_size, case.image_size) if case.dense else (case.batch,)
    labels = torch.randint(case.num_classes, shape, generator=random)
    return images.contiguous(memory_format=FORMATS[arrangement.channels_last]), labels


sgd = partial(SGD, lr=0.01, momentum=0.9)
"""The optimizer of all sides."""


def _serial(side: Side, case: Case) -> Update:
    model = build(case, side.arrangement)
    network = torch.compile(model) if side.compiled else model
    trained = Trained(network, sgd(model.parameters()), slice(0, case.batch))
    return updater(trained, *batch(case, side.arrangement), side.arrangement)


def _apart(side: Side, case: Case) -> Update:
    """Every rank trains a network of its own on its samples: the most that the devices can do together."""
    update = _serial(side, replace(case, batch=side.samples[torch.distributed.get_rank()]))

    def together() -> Tensor:
        torch.distributed.barrier()
        return update()

    return together


def _peer(side: Side, case: Case) -> Update:
    rank, num = torch.distributed.get_rank(), torch.distributed.get_world_size()
    assert case.batch % num == 0, f"a batch of {case.batch} on {num} devices"
    samples = case.batch // num
    model = build(case, side.arrangement)
    peer = wrap(side.kind, model, sgd(model.parameters()), num, CPU)
    part = slice(rank * samples, (rank + 1) * samples)
    trained = Trained(peer.network, peer.optimizer, part, peer.backward, peer.unfinished)
    return updater(trained, *batch(case, side.arrangement), side.arrangement)


def divided(side: Side, case: Case, model: nn.Module) -> Trained:
    """The loop of docs/your-own-loop.md."""
    plan = side.plan if isinstance(side.plan, Plan) else Plan.parse(side.plan or "serial")
    images, _ = batch(case, side.arrangement)
    net = convoy.parallelize(
        model,
        plan,
        example=images[: max(1, case.batch // plan.parts)],
        batch_norm="microbatch" if case.microbatch else side.batch_norm,  # type: ignore[arg-type]
        microbatches=side.parts if side.schedule else None,
        compile=side.compiled,
    )
    network = network_of(net)
    if isinstance(network, StagedNetwork):
        network.returns_memory = side.returns_memory
    optimizer = sgd(net.parameters())
    samples = convoy.local_samples(net, case.batch)
    called = net if side.schedule or not case.microbatch else partial(_announced, net, case.microbatch)
    return Trained(called, optimizer, samples, unfinished=lambda: convoy.accumulate(net))


def _convoy(side: Side, case: Case) -> Update:
    with convoy.deferred() if side.schedule else contextlib.nullcontext():
        model = build(case, side.arrangement)
    trained = divided(side, case, model)
    images, labels = batch(case, side.arrangement)
    if side.schedule not in ("1f1b", "zero-bubble"):
        return updater(trained, images, labels, side.arrangement)
    images, labels = images[trained.samples].clone(), labels[trained.samples].clone()

    def update() -> Tensor:
        trained.optimizer.zero_grad()
        loss = convoy.forward_backward(trained.network, images, labels, F.cross_entropy, schedule=side.schedule)  # type: ignore[arg-type]
        trained.optimizer.step()
        return loss

    return update


def _announced(net: nn.Module, microbatch: int, images: Tensor) -> Tensor:
    """A pass in microbatches of every rank, as the trainer has them."""
    network = network_of(net)
    samples = len(images) * network.num_sample_ranks
    network.samples = (len(images),) * network.num_sample_ranks
    network.context.enter(0, list(range(samples)), (microbatch,) * (samples // microbatch), CPU)
    outputs: Tensor = net(images)
    return outputs


def _by_trainer(side: Side, case: Case, warm_up: int) -> Timing:
    """`convoy train`; microbatches are the parts that go through the stages, or else are merged as it sees fit."""
    assert isinstance(side.plan, Plan)
    num = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {
        "model.name": case.model,
        "batch": case.batch,
        "microbatch": case.batch // side.parts if side.schedule else case.microbatch or min(case.passes),
        "channels_last": side.arrangement.channels_last,
        "precision": "fp32",
        "clip_norm": "null",  # as the other sides
        "parallel.devices": num,
        "parallel.schedule": side.schedule or "1f1b",
    }
    with TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.yaml"
        plan.write_text(side.plan.to_yaml(), encoding="utf-8")
        texts = [f"{key}={str(value).lower()}" for key, value in settings.items()]
        recipe = load_recipe("default", [*texts, f"parallel.plan={plan}"])
        made = Made(shape=(3, case.image_size, case.image_size), classes=case.num_classes)
        task = MeasurementTask(CONVOY, recipe, made, "cpu", case.updates, warm_up)
        times = measure_rank(task, lambda *_: None)
    return Timing(list(times.seconds), [times.loss * num], 1.0)  # ranks give their parts of the loss


def _torch(side: Side, case: Case) -> Update:
    """`torch.distributed.pipelining`, as its tutorial has it: the network traced, cut at names of modules."""
    from torch.distributed import pipelining

    rank, num = torch.distributed.get_rank(), torch.distributed.get_world_size()
    images, labels = batch(case, side.arrangement)
    part = images[: case.batch // side.parts]
    begins = dict.fromkeys(side.cuts, pipelining.SplitPoint.BEGINNING)
    stage = pipelining.pipeline(build(case, side.arrangement), (part,), split_spec=begins).build_stage(rank, CPU)
    made = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[side.schedule]
    schedule = made(stage, side.parts, loss_fn=F.cross_entropy)
    optimizer = sgd(stage.submod.parameters())

    def update() -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == num - 1:
            schedule.step(target=labels, losses=losses)
        else:
            schedule.step(*((images,) if rank == 0 else ()))
        optimizer.step()
        return torch.stack(losses).detach().mean() if losses else torch.tensor(torch.nan)

    return update


KINDS = {"serial": _serial, "apart": _apart, "convoy": _convoy, "torch": _torch}


def try_arrangements(case: Case, keeps: bool = False) -> dict[Arrangement, float]:
    """Seconds of an update on one device under each arrangement, from a few passes of each.

    The memory format is chosen at passes of one size, unless the formats are near each other there.
    """
    if keeps:
        keep_freed_memory(CPU)
    sizes = [size for size in case.passes if size < case.batch] + [case.batch]
    first = sizes[min(1, len(sizes) - 1)]
    found: dict[Arrangement, float] = {}

    def measure(channels_last: bool, size: int) -> None:
        arrangement = Arrangement(channels_last, size).for_batch(case.batch)
        if arrangement not in found:
            found[arrangement] = _seconds(case, arrangement, size)

    measure(True, first)
    measure(False, first)
    near = [one.channels_last for one, seconds in found.items() if seconds < 1.1 * min(found.values())]
    for channels_last, size in itertools.product(near, sizes):
        measure(channels_last, size)
    return found


def _seconds(case: Case, arrangement: Arrangement, size: int) -> float:
    model = build(case, arrangement)
    trained = Trained(model, sgd(model.parameters()), slice(0, size))
    update = updater(trained, *batch(case, arrangement), Arrangement(arrangement.channels_last))
    update()
    update()
    step = harness.seconds_of(trained.optimizer.step)
    times = [harness.seconds_of(update) for _ in range(3 if size < 128 else 1)]
    return (statistics.median(times) - step) * case.batch / size + step


@dataclass(frozen=True)
class Predicted:
    """What the planner says of a plan before it is run."""

    name: str  # `auto`, `auto without stages`, or the text of the plan
    plan: Plan
    seconds: float  # of an update
    parts: int = 1  # through the stages, by which the planner goes
    # seconds with other numbers of parts and schedules, by their names
    others: Mapping[str, float] = field(default_factory=dict)

    def of(self, side: Side) -> float:
        """Seconds of an update in as many parts and in the schedule of a side."""
        return self.others.get(f"{side.parts} parts {side.schedule}", self.seconds)


def predict(
    case: Case, plans: Sequence[str], arrangement: Arrangement, folder: Path | None = None
) -> tuple[float, list[Predicted]]:
    """Seconds of one device, and the predictions for plans and for the planner's own. All ranks call it.

    With a folder for what is measured each plan is profiled by itself; without, it is predicted from what the search
    has measured.
    """
    keep_freed_memory(CPU)
    join()
    ranks = Ranks.here()
    workload = _workload(case, arrangement)
    with TemporaryDirectory() as temporary:
        store = ProfileStore(folder or Path(temporary))
        planned = make_plan(Question(workload, ranks.num, store=store), ranks)
        asked: list[tuple[str, Scored, Costs]] = []
        for text in plans:
            with contextlib.suppress(ConvoyError):
                plan, costs = Plan.parse(text), planned.costs
                if folder is None:
                    asked.append((text, score(workload, plan, costs), costs))
                    continue
                known = make_plan(Question(workload, ranks.num, link=costs.links, store=store, plans=[plan]), ranks)
                asked.append((text, known.best, known.costs))
    own = [(AUTO, planned.best)]
    if planned.best.plan.mesh.stage_axis is not None:
        without = [one for one in planned.candidates if one.plan.mesh.stage_axis is None]
        own += [(f"{AUTO} without stages", one) for one in without[:1]]
    asked += [(name, one, planned.costs) for name, one in own]
    return planned.serial.seconds, [_predicted(name, one, case, workload, costs) for name, one, costs in asked]


def _workload(case: Case, arrangement: Arrangement, **options: Any) -> Workload:
    norm: Any = "microbatch" if case.microbatch else "sync"
    options |= {"name": case.name, "batch_norm": norm, "microbatch": case.microbatch}
    return workload_of(build(case, arrangement), batch(case, arrangement)[0], case.batch, **options)


def _predicted(name: str, best: Scored, case: Case, workload: Workload, costs: Costs) -> Predicted:
    """With all numbers of parts and schedules that are tried."""
    staged = best.plan.num_stages > 1
    numbers = {*case.parts, best.passes} if staged else ()
    others = {
        f"{number} parts {schedule}": score(replace(workload, schedules=(schedule,)), best.plan, costs, number).seconds
        for number in sorted(numbers)
        for schedule in SCHEDULES
    }
    return Predicted(name, best.plan, best.seconds, best.passes if staged else 1, others)


def stage_bytes(case: Case, plan: Plan, schedule: str, parts: int) -> list[int]:
    """Bytes of weights, gradients, momentum and activations of each stage, as the planner predicts them."""
    workload: Workload = _workload(case, Arrangement(), passes=parts)
    costs = Costs(lambda _: Times(), links_named("5gb/s", on_cpu=True)[0])
    found = score(replace(workload, schedules=(schedule,)), plan, costs, parts)  # type: ignore[arg-type]
    return [each.total for each in found.by_stage]
