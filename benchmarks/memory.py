"""Memory of each rank under a plan: predicted and measured, with recomputation, in stages, and under a limit.

    python benchmarks/memory.py                 parameters and activations of each rank
    python benchmarks/memory.py recompute       activations that are computed again, and the time of an update
    python benchmarks/memory.py recompute --networks unet
    python benchmarks/memory.py limit           AlexNet under a limit that one device breaks and two keep, as root
    python benchmarks/memory.py stages          four times a device's memory; as root
    python benchmarks/memory.py stages --cases resnet50,vgg16 --no-limit       beside the prediction

`limit` and `stages` train in control groups, which know the most that each process had.
"""

import argparse
import os
import re
import statistics
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import harness
from measuring.cases import CASES, HELD, MEMORY, Case, Plan
from measuring.ranks import memory_groups, run_ranks
from measuring.sides import Side, batch, build, divided, stage_bytes, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import convoy
from convoy import models
from convoy.bench.processes import RankFailed
from convoy.engine.network import network_of
from convoy.ops.context import Rerun
from convoy.ops.memory import predict_memory
from convoy.plans.plan import Plan as ParsedPlan
from convoy.plans.schedule import Schedule, in_flight

MIB = 2**20


def main() -> None:
    parser = harness.parser(__doc__, rounds=7)
    ways = {"ranks": ranks, "recompute": recompute, "limit": limited, "stages": stages}
    parser.add_argument("what", nargs="?", choices=ways, default="ranks")
    harness.choice(parser, "--networks", RECOMPUTED, RECOMPUTED)
    harness.choice(parser, "--cases", MEMORY, ["resnet152"])
    parser.add_argument("--no-limit", dest="limited", action="store_false", help="only 1F1B beside its prediction")
    options = parser.parse_args()
    with harness.report(options.out) as report:
        ways[options.what](report, options)


def resident(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    line = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert line is not None, f"no {key} in /proc/self/status"
    return int(line[1]) * 1024


# What each rank holds under each plan.


def ranks(report: harness.Report, options: argparse.Namespace) -> None:
    """The table."""
    columns = ("rank", "parameters", "predicted", "activations", "predicted", "process")
    report.header("network, global batch", "plan", *columns)
    for case in HELD.values():
        for name, plan in case.plans.items():
            for rank, use in enumerate(run_ranks(held, 1 if plan == "serial" else 2, case, plan)):
                mib = [f"{value / MIB:.1f}" for value in use.values()]
                report.row(f"{case.model}, {case.batch}", name, rank, *mib, plan=plan, rank=rank, **use)
    report.print("\nMiB. Activations: what autograd keeps for the backward pass. Process: its most in two updates,")
    report.print("above its memory before the network was built; gradients, momentum and scratch memory are in it.")


def held(case: Case, plan: Plan) -> dict[str, int]:
    """Bytes in a rank's part of three updates of `case` under `plan`, in the order of the table's columns."""
    before, side = resident("VmRSS"), Side("", "convoy", plan=plan)
    model = build(case, side.arrangement)
    trained = divided(side, case, model)
    images, labels = (tensor[trained.samples].clone() for tensor in batch(case, side.arrangement))
    activations = _kept(trained.network, model, images, labels)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins again at what there is now
    for _ in range(2):
        trained.optimizer.zero_grad()
        F.cross_entropy(trained.network(images), labels).backward()
        trained.optimizer.step()
    network, rank = network_of(model), int(os.environ.get("RANK", 0))
    predicted = predict_memory(network.example_placement(True, network.open_pass((images,), None)[1]))[rank]
    return {
        "parameters": sum(p.numel() * p.element_size() for p in model.parameters()),
        "parameters_predicted": predicted.parameters,
        "activations": activations,
        "activations_predicted": predicted.activations,
        "process": resident("VmHWM") - before,
    }


def _kept(network: Callable[[Tensor], Tensor], model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Bytes of the storages that a forward pass keeps for the backward pass; those of parameters do not count."""
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = network(images)
    F.cross_entropy(output, labels).backward()
    return sum(sizes.values())


# Activations that are computed again: what is there of them at once, at most, and the times of all sides in turn.

RECOMPUTED = {"resnet50": ("layer1.*", "layer2.*"), "unet": ("down.0.*", "up.3.*")}
"""The layers of the third side: neither none nor all are computed again."""


@dataclass(frozen=True)
class Row:
    """A network under a plan. Stages are given the batch in parts."""

    network: str
    plan: str
    schedule: Schedule | None = None
    parts: int = 1
    size: int = 128
    batch: int = 8

    @property
    def sides(self) -> dict[str, Any]:
        some = RECOMPUTED[self.network]
        return {"none": False, "all": True, ",".join(some): some}

    def __str__(self) -> str:
        return f"{self.plan}, {self.schedule}" if self.schedule else self.plan


ROWS = [
    *(Row(name, plan) for name in RECOMPUTED for plan in ("serial", "sample=2", "height=2")),
    *(Row(name, "stage=2", way, parts=4) for name, way in product(RECOMPUTED, get_args(Schedule))),
]


class Recomputed:
    """One side of a row."""

    def __init__(self, row: Row, recompute: Any) -> None:
        torch.manual_seed(0)
        model = models.create(row.network, num_classes=10)
        example, parts = torch.empty(1, 3, row.size, row.size), row.parts if row.schedule else None
        options: dict[str, Any] = {"batch_norm": "microbatch", "recompute": recompute, "microbatches": parts}
        self.row, self.net = row, convoy.parallelize(model, row.plan, example, seed=1, **options)
        self.network = network_of(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        generator = torch.Generator().manual_seed(2)
        images = torch.randn(row.batch, 3, row.size, row.size, generator=generator)
        labels = torch.randint(0, 10, (row.batch,), generator=generator)
        mine = convoy.local_samples(self.net, row.batch)
        self.images, self.labels = images[mine].clone(), labels[mine].clone()
        sample_ranks = self.network.num_sample_ranks
        self.sizes = (row.batch // row.parts // sample_ranks,) * sample_ranks

    def update(self) -> None:
        """One microbatch on every sample rank, or several through the stages."""
        self.optimizer.zero_grad()
        if self.row.schedule is None:
            self.network.samples = self.sizes
            self.network.context.enter(0, 0, self.sizes, torch.device("cpu"))
            loss_of(self.net(self.images), self.labels).backward()
        else:
            convoy.forward_backward(self.net, self.images, self.labels, loss_of, schedule=self.row.schedule)
        self.network.context.statistics.fold(self.network.groups)
        self.optimizer.step()

    def activations(self) -> tuple[int, int]:
        """The most that is there at once in an update, measured and predicted: bytes on this rank."""
        rank, passes = dist.get_rank() if dist.is_initialized() else 0, 1
        placement = self.network.example_placement(True, self.sizes)
        staged = self.network.staged(placement)
        if staged is not None and self.row.schedule is not None:
            stage = placement.mesh.stage_of(rank)
            placement = staged.part(placement, stage)
            passes = in_flight(self.row.schedule, self.row.parts, stage, staged.number)
        original, living = Rerun.again, Living()
        with mock.patch.object(Rerun, "again", lambda rerun: living.again(original, rerun)), living:
            self.update()
        return living.most, predict_memory(placement, passes)[rank].activations


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Of images or of their pixels' means."""
    return F.cross_entropy(logits.mean((2, 3)) if logits.dim() == 4 else logits, labels)


class Living(TorchDispatchMode):
    """Counts bytes of the tensors that forward passes make, also where they run again; not what `.grad` is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self._reruns = 0
        self._storages: set[int] = set()

    @contextmanager
    def again(self, original: Callable[[Rerun], Any], rerun: Rerun) -> Iterator[None]:
        """In place of `Rerun.again`."""
        self._reruns += 1
        try:
            with original(rerun):
                yield
        finally:
            self._reruns -= 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        backward = torch._C._current_graph_task_id() != -1
        if not backward or self._reruns:
            inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            for x in tree_leaves(made):
                if isinstance(x, Tensor) and x.untyped_storage()._cdata not in inputs | self._storages:
                    self._note(x.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._storages.add(key)
        self.now += size
        self.most = max(self.most, self.now)

        def gone() -> None:
            self._storages.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


def in_turn(row: Row, rounds: int) -> dict[str, dict[str, Any]]:
    """A rank's part: bytes of all sides, and their seconds of an update in turn."""
    sides = {name: Recomputed(row, recompute) for name, recompute in row.sides.items()}
    results: dict[str, dict[str, Any]] = {}
    for name, side in sides.items():
        side.update()
        measured, predicted = side.activations()
        results[name] = {"measured": measured, "predicted": predicted, "seconds": []}
    for _, name, side in harness.turns(sides, rounds):
        results[name]["seconds"].append(harness.seconds_of(side.update))
    return results


def peak(row: Row, recompute: Any) -> int:
    """The most that a process had in two updates, above what it had before the network was there."""
    before = resident("VmRSS")
    side = Recomputed(row, recompute)
    for _ in range(2):
        side.update()
    return resident("VmHWM") - before


def recompute(report: harness.Report, options: argparse.Namespace) -> None:
    """Every row is a network under a plan, without recomputation, of all layers, and of some."""
    columns = ("recomputed", "activations", "predicted", "error", "process", "time")
    report.header("network, pixels, batch", "plan", *columns)
    for row in (row for row in ROWS if row.network in options.networks):
        number = 1 if row.plan == "serial" else 2
        of_ranks = run_ranks(in_turn, number, row, options.rounds)
        without: list[float] = []
        for name, recomputed in row.sides.items():
            process = max(run_ranks(peak, number, row, recomputed))
            measured, predicted = (max(result[name][key] for result in of_ranks) for key in ("measured", "predicted"))
            seconds = [max(turn) for turn in zip(*(result[name]["seconds"] for result in of_ranks), strict=True)]
            without = without or seconds
            ratio = statistics.median(a / b for a, b in zip(seconds, without, strict=True))
            mib = [f"{measured / MIB:.1f}", f"{predicted / MIB:.1f}", f"{predicted / measured - 1:+.1%}"]
            cells = [f"{row.network}, {row.size}, {row.batch}", row, name, *mib, f"{process / MIB:.0f}", f"{ratio:.2f}"]
            figures = {"measured": measured, "predicted": predicted, "process": process, "seconds": seconds}
            report.row(*cells, **asdict(row), recomputed=name, **figures)
    report.print("\nMiB, of the rank that needs most; time of an update, median of the turns, over that without.")


# Control groups: the most that each process had, with a limit and without.


@dataclass(frozen=True)
class Peaks:
    """The most bytes that each rank's process had, or how a process ended."""

    bytes: tuple[int, ...]
    ended: str = ""

    def __str__(self) -> str:
        return self.ended or ", ".join(f"{each / MIB:.0f}" for each in self.bytes) + " MiB"


def peaks(side: Side, num: int, case: Case, limit: int | None = None) -> Peaks:
    """Train, each process in a control group of its own."""
    with memory_groups(num, limit) as groups:
        try:
            run_ranks(train, num, side, case, 1, cgroups=groups, seconds=300)
        except RankFailed as error:
            return Peaks((), str(error).strip().partition("\n")[0])
        return Peaks(tuple(int((group / "memory.max_usage_in_bytes").read_text()) for group in groups))


def limited(report: harness.Report, options: argparse.Namespace) -> None:
    """AlexNet on one device and on two, without a limit, and with one for each process half way between the peaks."""
    case, plan = HELD["alexnet"], CASES["alexnet-32"].plans["pair + filter"]
    sides = {"one device": (Side("", "convoy", plan="serial"), 1), "two devices": (Side("", "convoy", plan=plan), 2)}
    report.print("AlexNet, two devices: classifier.1 filter, classifier.4 channel, classifier.6 filter\n")
    free = {name: peaks(*side, case) for name, side in sides.items()}
    limit = sum(max(each.bytes) for each in free.values()) // 2 // MIB * MIB
    report.header("", "without a limit", f"{limit // MIB} MiB for each process")
    for name, side in sides.items():
        report.row(name, free[name], peaks(*side, case, limit))


TINY = replace(MEMORY["resnet152"], model="squeezenet1_1-cifar", image_size=16, microbatch=0)
"""What is left of a rank's memory with hardly any network in it: Python, torch, the connections."""
STAGES, STAGE_PARTS = 4, 16
STAGE_PLAN = ParsedPlan.parse(f"stage={STAGES}")


def staged(case: Case, schedule: Schedule, limit: int | None = None) -> Peaks:
    """Of ranks that give freed memory back after each part, as the trainer does under `--memory-limit`."""
    options: dict[str, Any] = {"schedule": schedule, "keeps": True, "returns_memory": True}
    return peaks(Side("", "convoy", plan=STAGE_PLAN, parts=STAGE_PARTS, **options), STAGES, case, limit)


def stages(report: harness.Report, options: argparse.Namespace) -> None:
    """The most of each process in stages, beside what the plan says, and under a quarter of one device's memory."""
    base = max(staged(TINY, "1f1b").bytes)
    report.print(f"The most of each process:\n\n- with hardly any network: {base / MIB:.0f} MiB")

    def beside(case: Case, schedule: Schedule) -> None:
        free, asked = staged(case, schedule), (case, STAGE_PLAN, schedule, STAGE_PARTS)
        foreseen = [each + base for each in run_ranks(stage_bytes, 1, *asked)[0]]
        errors = ", ".join(f"{one / other - 1:+.0%}" for one, other in zip(foreseen, free.bytes, strict=True))
        report.print(f"- {STAGE_PLAN}, {schedule}: {free}; predicted {Peaks(tuple(foreseen))} ({errors})")

    for name in options.cases:
        case, serial = MEMORY[name], (Side("", "serial", keeps=True), 1)
        report.print(f"\n{name}, {case.image_size} px, global batch {case.batch}, {STAGE_PARTS} parts:\n")
        if not options.limited:
            beside(case, "1f1b")
            continue
        alone = peaks(*serial, case)
        limit = alone.bytes[0] // STAGES
        report.print(f"- one device, one pass: {alone}")
        report.print(f"- one device with a limit of {limit / MIB:.0f} MiB: {peaks(*serial, case, limit)}")
        for schedule in ("1f1b", "gpipe"):
            beside(case, schedule)
            tight = staged(case, schedule, limit)
            report.print(f"- {STAGE_PLAN}, {schedule}, each with that limit: {tight}")


if __name__ == "__main__":
    main()
