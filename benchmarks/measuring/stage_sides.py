"""The sides of `stages.py` on a rank: one device, Convoy, torch's own pipelining, PhysicsNeMo's ShardTensor.

All of them keep freed memory with the process, as Convoy does it wherever it runs.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD

import convoy
from convoy.bench.measure import measure_rank
from convoy.bench.measurement import MeasurementTask
from convoy.bench.records import CONVOY, Made
from convoy.comm.joining import join
from convoy.comm.ranks import Ranks
from convoy.engine.allocation import keep_freed_memory
from convoy.engine.network import network_of
from convoy.engine.optimizers import divide_update
from convoy.engine.stages import StagedNetwork
from convoy.errors import ConvoyError
from convoy.planner import Planned, Scored, Workload, make_plan, score, workload_of
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.store import ProfileStore
from convoy.plans.plan import Plan
from convoy.plans.schedule import SCHEDULES
from convoy.training import load_recipe
from measuring.sides import Arrangement, Trained
from measuring.stage_cases import StageCase
from measuring.training import Timing, batch, build, timed, updater

TORCH_SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
"""Those of `torch.distributed.pipelining`."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class StageSide:
    """One way to train a case."""

    label: str  # in the table
    kind: str  # a key of `SIDES`, or `trainer`
    arrangement: Arrangement
    plan: Plan | None = None  # of Convoy
    parts: int = 1  # into how many parts the batch is cut that go through the stages one after the other
    schedule: str = ""  # of the parts, where there are stages
    cuts: tuple[str, ...] = ()  # of torch's pipelining
    samples: tuple[int, ...] = ()  # of each rank, where they do not talk to each other
    returns_memory: bool = False  # freed memory goes back to the system after each part, as under `--memory-limit`

    @property
    def how(self) -> str:
        """What was chosen in trials, for the table."""
        shape = "channels_last" if self.arrangement.channels_last else "contiguous"
        if not self.schedule:
            return str(self.arrangement)
        return ", ".join([shape, f"{self.parts} parts", self.schedule, *([" ".join(self.cuts)] if self.cuts else [])])


def train(side: StageSide, case: StageCase, warm_up: int) -> Timing:
    """A rank's part of some updates: `warm_up` that are not timed, and those of the case."""
    if side.kind == "trainer":
        return _by_trainer(side, case, warm_up)
    keep_freed_memory(CPU)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        join()
    update = SIDES[side.kind](side, case)
    torch.set_num_threads(1)  # some libraries set it
    return timed(update, warm_up, case.updates)


def _serial(side: StageSide, case: StageCase) -> Callable[[], Tensor]:
    model = build(case, side.arrangement)
    trained = Trained(model, _optimizer(model.parameters()), slice(0, case.batch))
    return updater(trained, *batch(case, side.arrangement), side.arrangement)


def _apart(side: StageSide, case: StageCase) -> Callable[[], Tensor]:
    """Every rank trains a network of its own on its samples: the most that the devices can do together."""
    case = replace(case, batch=side.samples[torch.distributed.get_rank()])
    update = _serial(side, case)

    def together() -> Tensor:
        torch.distributed.barrier()
        return update()

    return together


def _convoy(side: StageSide, case: StageCase) -> Callable[[], Tensor]:
    """The loop of docs/your-own-loop.md, with the optimizer's work shared as the trainer does it."""
    assert side.plan is not None
    with convoy.deferred() if side.plan.num_stages > 1 else nullcontext():
        model = build(case, side.arrangement)
    images, labels = batch(case, side.arrangement)
    net = convoy.parallelize(
        model,
        side.plan,
        example=images[: case.batch // side.plan.parts],
        batch_norm="microbatch" if case.microbatch else "sync",
        microbatches=side.parts,
    )
    network = network_of(net)
    if isinstance(network, StagedNetwork):
        network.returns_memory = side.returns_memory
    own = convoy.local_samples(net, case.batch)
    images, labels = images[own].clone(), labels[own].clone()
    optimizer = divide_update(net, _optimizer(net.parameters()))
    if side.schedule in ("1f1b", "zero-bubble"):

        def update() -> Tensor:
            optimizer.zero_grad()
            loss = convoy.forward_backward(net, images, labels, F.cross_entropy, schedule=side.schedule)  # type: ignore[arg-type]
            optimizer.step()
            return loss

        return update
    called = net if side.schedule else partial(_announced, net, case.microbatch)
    trained = Trained(called, optimizer, own, unfinished=lambda: convoy.accumulate(net))
    return updater(trained, images, labels, side.arrangement)


def _announced(net: torch.nn.Module, microbatch: int, images: Tensor) -> Tensor:
    """A pass in microbatches of every rank, as the trainer has them."""
    network = network_of(net)
    if microbatch:
        samples = len(images) * network.num_sample_ranks
        network.samples = (len(images),) * network.num_sample_ranks
        network.context.enter(0, list(range(samples)), (microbatch,) * (samples // microbatch), CPU)
    outputs: Tensor = net(images)
    return outputs


def _by_trainer(side: StageSide, case: StageCase, warm_up: int) -> Timing:
    """`convoy train`; microbatches are the parts that go through the stages, or else are merged as it sees fit."""
    assert side.plan is not None
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


def _torch(side: StageSide, case: StageCase) -> Callable[[], Tensor]:
    """`torch.distributed.pipelining`, as its tutorial has it: the network traced, cut at names of modules."""
    from torch.distributed import pipelining

    rank, num = torch.distributed.get_rank(), torch.distributed.get_world_size()
    images, labels = batch(case, side.arrangement)
    part = images[: case.batch // side.parts]
    begins = dict.fromkeys(side.cuts, pipelining.SplitPoint.BEGINNING)
    stage = pipelining.pipeline(build(case, side.arrangement), (part,), split_spec=begins).build_stage(rank, CPU)
    schedule = getattr(pipelining, TORCH_SCHEDULES[side.schedule])(stage, side.parts, loss_fn=F.cross_entropy)
    optimizer = _optimizer(stage.submod.parameters())

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


SIDES = {"serial": _serial, "apart": _apart, "convoy": _convoy, "torch": _torch}


@dataclass(frozen=True)
class Predicted:
    """What the planner says of a plan before it is run."""

    name: str  # `auto`, `auto without stages`, or the text of the plan
    plan: Plan
    seconds: float | None = None  # of an update; None where it was not asked
    parts: int = 1  # through the stages, by which the planner goes
    # seconds with other numbers of parts and schedules, by their names
    others: Mapping[str, float] = field(default_factory=dict)

    def of(self, side: StageSide) -> float | None:
        """Seconds of an update in as many parts and in the schedule of a side."""
        return self.others.get(f"{side.parts} parts {side.schedule}", self.seconds)


def predict(
    case: StageCase, plans: Iterable[str], arrangement: Arrangement, folder: Path
) -> tuple[float, list[Predicted]]:
    """Seconds of one device, and the predictions for the planner's own plans and for others. All ranks call it."""
    keep_freed_memory(CPU)
    join()
    ranks = Ranks.here()
    images, _ = batch(case, arrangement)
    workload = workload_of(
        build(case, arrangement),
        images,
        case.batch,
        name=case.name,
        batch_norm="microbatch" if case.microbatch else "sync",
        microbatch=case.microbatch,
    )
    store = ProfileStore(folder)
    planned = make_plan(workload, ranks.num, ranks, store=store)
    asked = [(name, one, planned.costs) for name, one in _own(planned)]
    for text in plans:
        try:
            given = [Plan.parse(text)]
            known = make_plan(workload, ranks.num, ranks, link=planned.costs.links, store=store, plans=given)
            asked.append((text, known.best, known.costs))
        except ConvoyError:
            continue
    return planned.serial.seconds, [_predicted(name, one, case, workload, costs) for name, one, costs in asked]


def _predicted(name: str, best: Scored, case: StageCase, workload: Workload, costs: Costs) -> Predicted:
    """With all numbers of parts and schedules that are tried."""
    staged = best.plan.num_stages > 1
    numbers = {*case.parts, best.passes} if staged else ()
    others = {
        f"{number} parts {schedule}": score(replace(workload, schedules=(schedule,)), best.plan, costs, number).seconds
        for number in sorted(numbers)
        for schedule in SCHEDULES
    }
    return Predicted(name, best.plan, best.seconds, best.passes if staged else 1, others)


def _own(planned: Planned) -> list[tuple[str, Scored]]:
    """The planner's own plan, and its best without stages where that is another."""
    best = planned.best
    found = [("auto", best)]
    if best.plan.mesh.stage_axis is not None:
        without = next((one for one in planned.candidates if one.plan.mesh.stage_axis is None), None)
        if without is not None:
            found.append(("auto without stages", without))
    return found


def _optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return SGD(parameters, lr=0.01, momentum=0.9)
