"""What recomputation saves and costs: activations predicted and measured, and the time of an update, sides in turn.

    python benchmarks/recompute.py              all rows
    python benchmarks/recompute.py unet         those of one network

Every row is a network under a plan, without recomputation, of all layers, and of some. Activations are what is there of
them at once, at most: storages that were made in the forward pass or by computing it again. The times are those of
updates of all sides in turn, in the same processes. A process's peak is from processes of its own.
"""

import argparse
import json
import re
import statistics
import time
import weakref
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import machine, networks, ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from convoy.plans.schedule import Schedule, in_flight

MIB = 2**20
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


RESNET, UNET = ("layer1.*", "layer2.*"), ("stem.*", "joined.3.*")
ROWS = [
    Row("resnet50", 128, 8, "serial", RESNET),
    Row("resnet50", 128, 8, "sample=2", RESNET),
    Row("resnet50", 128, 8, "height=2", RESNET),
    Row("unet", 128, 8, "serial", UNET),
    Row("unet", 128, 8, "sample=2", UNET),
    Row("unet", 128, 8, "height=2", UNET),
    *(
        Row(name, 128, 8, "stage=2", some, schedule)
        for name, some in (("resnet50", RESNET), ("unet", UNET))
        for schedule in get_args(Schedule)
    ),
]


def build(row: Row, recompute: Any) -> nn.Module:
    """This rank's part of the network."""
    import convoy
    from convoy import models

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
        import convoy
        from convoy.engine.network import network_of

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
        import convoy

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
        from convoy.ops.memory import predict_memory

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


@dataclass
class Living(TorchDispatchMode):
    """Counts bytes of the tensors that forward passes make, also where they run again; not what `.grad` is made of."""

    now: int = 0
    most: int = 0
    known: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self._again = 0

    def __enter__(self) -> "Living":
        from convoy.ops.context import Rerun

        self._original = original = Rerun.again
        living = self

        @contextmanager
        def again(rerun: Rerun) -> Any:
            living._again += 1
            try:
                with original(rerun):
                    yield
            finally:
                living._again -= 1

        Rerun.again = again  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        from convoy.ops.context import Rerun

        super().__exit__(*error)
        Rerun.again = self._original  # type: ignore[method-assign]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        backward = torch._C._current_graph_task_id() != -1
        if not backward or self._again:
            given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            for x in tree_leaves(made):
                if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given | self.known:
                    self._note(x.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)

        def gone() -> None:
            self.known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


def in_turn(row: Row) -> dict[str, dict[str, Any]]:
    """A rank's part: bytes of all sides, and their seconds of an update in turn."""
    sides = {name: Trained(row, recompute) for name, recompute in row.sides.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, side in sides.items():
        side.update()
        measured, predicted = side.activations()
        found[name] = {"measured": measured, "predicted": predicted, "seconds": []}
    for _ in range(ROUNDS):
        for name, side in sides.items():
            began = time.perf_counter()
            side.update()
            found[name]["seconds"].append(time.perf_counter() - began)
    return found


def peak(row: Row, recompute: Any) -> int:
    """The most that a process had in two updates, above what it had before the network was there."""
    before = _resident("VmRSS")
    side = Trained(row, recompute)
    for _ in range(2):
        side.update()
    return _resident("VmHWM") - before


def _resident(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="*", help="only rows of these")
    parser.add_argument("--plan", help="only rows of this plan")
    parser.add_argument("--out", type=Path, help="file for JSON")
    arguments = parser.parse_args()
    ranks.prepare()
    document: dict[str, Any] = {"machine": machine.describe(), "rows": []}
    print(machine.sentence(document["machine"]))
    print("\n| network, pixels, batch | plan | recomputed | activations | predicted | error | process | time |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in ROWS:
        if (arguments.network and row.network not in arguments.network) or arguments.plan not in (None, row.plan):
            continue
        number = 1 if row.plan == "serial" else 2
        of_ranks = ranks.run_ranks(in_turn, number, row)
        for name, recompute in row.sides.items():
            peaks = ranks.run_ranks(peak, number, row, recompute)
            measured, predicted = (max(found[name][key] for found in of_ranks) for key in ("measured", "predicted"))
            turns = [max(found[name]["seconds"][turn] for found in of_ranks) for turn in range(ROUNDS)]
            alone = [max(found["none"]["seconds"][turn] for found in of_ranks) for turn in range(ROUNDS)]
            ratio = statistics.median(ours / without for ours, without in zip(turns, alone, strict=True))
            document["rows"].append(
                {**asdict(row), "recompute": name, "measured": measured, "predicted": predicted, "process": max(peaks)}
                | {"ratio": ratio, "seconds": statistics.median(turns)}
            )
            print(
                f"| {row.network}, {row.size}, {row.batch} | {row.how} | {name} | {measured / MIB:.1f} | "
                f"{predicted / MIB:.1f} | {predicted / measured - 1:+.1%} | {max(peaks) / MIB:.0f} | {ratio:.2f} |",
                flush=True,
            )
    print(
        "\nMiB, of the rank that needs most; time: of an update, median of the turns, over that without recomputation."
    )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
