"""What recomputation saves and costs: activations predicted and measured, and the time of an update, sides in turn.

    python benchmarks/recompute.py              all rows
    python benchmarks/recompute.py unet         those of one network

Every row is a network under a plan, without recomputation, of all layers, and of some. Activations are what is there of
them at once, at most: storages that were made in the forward pass or by computing it again. The times are those of
updates of all sides in turn, in the same processes. A process's peak is from processes of its own.
"""

import statistics
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import harness, networks, ranks
from measuring.memory_use import MIB, Living, resident
from torch import Tensor, nn

import convoy
from convoy import models
from convoy.engine.network import network_of
from convoy.ops.memory import predict_memory
from convoy.plans.schedule import Schedule, in_flight

ROUNDS = 7
PARTS = 4


@dataclass(frozen=True)
class Row:
    """A network under a plan; `some` are the layers of the third side. Stages are given the batch in parts."""

    network: str
    size: int
    batch: int
    plan: str
    some: tuple[str, ...]
    schedule: Schedule | None = None

    @property
    def parts(self) -> int:
        return PARTS if self.schedule else 1

    @property
    def how(self) -> str:
        return f"{self.plan}, {self.schedule}" if self.schedule else self.plan

    @property
    def sides(self) -> dict[str, Any]:
        return {"none": False, "all": True, ",".join(self.some): self.some}


SOME = {"resnet50": ("layer1.*", "layer2.*"), "unet": ("stem.*", "joined.3.*")}
ROWS = [
    *(Row(name, 128, 8, plan, some) for name, some in SOME.items() for plan in ("serial", "sample=2", "height=2")),
    *(Row(name, 128, 8, "stage=2", SOME[name], way) for name, way in product(SOME, get_args(Schedule))),
]


def build(row: Row, recompute: Any) -> nn.Module:
    """This rank's part of the network."""
    torch.manual_seed(0)
    model = networks.unet() if row.network == "unet" else models.create("resnet50", num_classes=10)
    example = torch.empty(1, 3, row.size, row.size)
    parts = row.parts if row.schedule else None
    net: nn.Module = convoy.parallelize(
        model, row.plan, example, batch_norm="microbatch", recompute=recompute, seed=1, microbatches=parts
    )
    return net


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Of images or of their pixels' means."""
    return F.cross_entropy(logits.mean((2, 3)) if logits.dim() == 4 else logits, labels)


class Trained:
    """One side of a row."""

    def __init__(self, row: Row, recompute: Any) -> None:
        self.row, self.net = row, build(row, recompute)
        self.network = network_of(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        generator = torch.Generator().manual_seed(2)
        images = torch.randn(row.batch, 3, row.size, row.size, generator=generator)
        labels = torch.randint(0, 10, (row.batch,), generator=generator)
        mine = convoy.local_samples(self.net, row.batch)
        self.images, self.labels = images[mine].clone(), labels[mine].clone()
        ranks = self.network.num_sample_ranks
        self.sizes = (row.batch // row.parts // ranks,) * ranks
        if row.schedule is None:
            self.network.samples = self.sizes

    def update(self) -> None:
        """One microbatch on every sample rank, or several through the stages."""
        self.optimizer.zero_grad()
        if self.row.schedule is None:
            self.network.context.enter(0, 0, self.sizes, torch.device("cpu"))
            loss_of(self.net(self.images), self.labels).backward()
        else:
            convoy.forward_backward(self.net, self.images, self.labels, loss_of, schedule=self.row.schedule)
        self.network.context.statistics.fold(self.network.groups)
        self.optimizer.step()

    def activations(self) -> tuple[int, int]:
        """The most that is there at once in an update, measured and predicted: bytes on this rank."""
        rank, passes = dist.get_rank() if dist.is_initialized() else 0, 1
        placement = self.network.placement((self.images[: self.sizes[0]],), self.sizes, True)
        staged = self.network.staged(placement)
        if staged is not None and self.row.schedule is not None:
            stage = placement.mesh.stage_of(rank)
            placement = staged.part(placement, stage)
            passes = in_flight(self.row.schedule, self.row.parts, stage, staged.number)
        with Living() as living:
            self.update()
        return living.most, predict_memory(placement, passes)[rank].activations


def in_turn(row: Row) -> dict[str, dict[str, Any]]:
    """A rank's part: bytes of all sides, and their seconds of an update in turn."""
    sides = {name: Trained(row, recompute) for name, recompute in row.sides.items()}
    results: dict[str, dict[str, Any]] = {}
    for name, side in sides.items():
        side.update()
        measured, predicted = side.activations()
        results[name] = {"measured": measured, "predicted": predicted, "seconds": []}
    for _, name, side in harness.turns(sides, ROUNDS):
        results[name]["seconds"].append(harness.seconds_of(side.update))
    return results


def peak(row: Row, recompute: Any) -> int:
    """The most that a process had in two updates, above what it had before the network was there."""
    before = resident("VmRSS")
    side = Trained(row, recompute)
    for _ in range(2):
        side.update()
    return resident("VmHWM") - before


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("network", nargs="*", help="only rows of these")
    parser.add_argument("--plan", help="only rows of this plan")
    parser.add_argument("--out", type=Path, help="file for JSON")
    options = parser.parse_args()
    ranks.prepare()
    document: dict[str, Any] = {"machine": harness.heading(), "rows": []}
    columns = ("recomputed", "activations", "predicted", "error", "process", "time")
    print(harness.header("network, pixels, batch", "plan", *columns))
    for row in ROWS:
        if (options.network and row.network not in options.network) or options.plan not in (None, row.plan):
            continue
        number = 1 if row.plan == "serial" else 2
        of_ranks = ranks.run_ranks(in_turn, number, row)
        slowest = {
            name: [max(t) for t in zip(*(r[name]["seconds"] for r in of_ranks), strict=True)] for name in row.sides
        }
        for name, recompute in row.sides.items():
            process = max(ranks.run_ranks(peak, number, row, recompute))
            measured, predicted = (max(result[name][key] for result in of_ranks) for key in ("measured", "predicted"))
            ratio = statistics.median(a / b for a, b in zip(slowest[name], slowest["none"], strict=True))
            figures = {"measured": measured, "predicted": predicted, "process": process, "ratio": ratio}
            document["rows"].append({**asdict(row), "recompute": name, **figures, "seconds": slowest[name]})
            mib = [f"{measured / MIB:.1f}", f"{predicted / MIB:.1f}", f"{predicted / measured - 1:+.1%}"]
            what = f"{row.network}, {row.size}, {row.batch}"
            harness.show(what, row.how, name, *mib, f"{process / MIB:.0f}", f"{ratio:.2f}")
    print(
        "\nMiB, of the rank that needs most; time: of an update, median of the turns, over that without recomputation."
    )
    harness.save(options.out, document)


if __name__ == "__main__":
    main()
