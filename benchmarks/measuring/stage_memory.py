"""Memory of ranks in stages: control groups with a limit, the most that each rank had, and what the plan says.

Ranks give freed memory back after each part, as the trainer does under `--memory-limit`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from convoy.planner import score, workload_of
from convoy.planner.cost.costs import Costs, Times
from convoy.planner.cost.link import links_named
from convoy.plans.plan import Plan
from convoy.plans.schedule import Schedule
from measuring.memory_limits import memory_groups
from measuring.ranks import Limits, RankFailed, run_ranks
from measuring.results import SERIAL
from measuring.sides import Arrangement
from measuring.stage_cases import UNET, StageCase
from measuring.stage_sides import StageSide, train
from measuring.training import batch, build

CASE = StageCase("resnet152", "resnet152", 96, 64, updates=1, batch_norm=True, microbatch=4)
CASES = {
    case.name: case
    for case in (
        CASE,
        StageCase("resnet50", "resnet50", 64, 64, updates=1, batch_norm=True, microbatch=4),
        StageCase("densenet121", "densenet121", 64, 32, updates=1, batch_norm=True, microbatch=2),
        StageCase("vgg16", "vgg16", 64, 32, updates=1),
        StageCase("unet", UNET, 64, 64, updates=1, options={"groups": 8}, dense=True),
    )
}
TINY = replace(CASE, model="squeezenet1_1-cifar", image_size=16, batch_norm=False, microbatch=0)
"""What is left of a rank's memory with hardly any network in it: Python, torch, the connections."""
DEVICES, PARTS = 4, 16
PLAN = Plan.parse(f"stage={DEVICES}")


@dataclass(frozen=True)
class Peaks:
    """The most bytes that each rank's process had, or how a process ended."""

    bytes: tuple[int, ...]
    ended: str = ""

    def __str__(self) -> str:
        return self.ended or ", ".join(f"{each / 2**20:.0f}" for each in self.bytes) + " MiB"


def side(schedule: str) -> StageSide:
    """Training in stages; plain PyTorch in one pass where there is no schedule."""
    if not schedule:
        return StageSide(SERIAL, "serial", Arrangement())
    return StageSide(schedule, "convoy", Arrangement(), PLAN, PARTS, schedule, returns_memory=True)


def peaks(case: StageCase, schedule: str, limit: int | None = None) -> Peaks:
    """Train, each process in a control group of its own."""
    num = DEVICES if schedule else 1
    with memory_groups(num, limit) as groups:
        limits = Limits(seconds=300, cgroups=tuple(group.path for group in groups))
        try:
            run_ranks(train, num, side(schedule), case, 1, limits=limits)
        except RankFailed as error:
            return Peaks((), str(error).strip().partition("\n")[0])
        return Peaks(tuple(group.peak for group in groups))


def predicted(case: StageCase, schedule: Schedule) -> Sequence[int]:
    """Bytes of weights, gradients, momentum and activations of each stage."""
    return run_ranks(partial(_predicted, case, schedule), 1)[0]  # type: ignore[no-any-return]


def _predicted(case: StageCase, schedule: Schedule) -> list[int]:
    arrangement = Arrangement()
    images, _ = batch(case, arrangement)
    workload = workload_of(
        build(case, arrangement),
        images,
        case.batch,
        passes=PARTS,
        batch_norm="microbatch" if case.microbatch else "sync",
        microbatch=case.microbatch,
    )
    costs = Costs(lambda _: Times(), links_named("5gb/s", on_cpu=True)[0])
    found = score(replace(workload, schedules=(schedule,)), PLAN, costs, PARTS)
    return [each.total for each in found.by_stage]
