"""What the first of many GPUs is given to do in an update, beside the plain network on one: operations, copies, waits.

    python benchmarks/gpu_ranks.py                            counted on any machine, with GPUs that compute nothing
    python benchmarks/gpu_ranks.py --models resnet50 --ranks 8 --details
    python benchmarks/gpu_ranks.py --device cuda --precision bf16 --updates 50      timed on one GPU, and counted
    python benchmarks/gpu_ranks.py --device cuda --strict     CUDA itself raises where the host waits in an update

The other ranks are not there: torch's `fake` process group lets this process be rank 0 of 8 or 64, with every kernel,
copy and wait of the host that the whole job would have there, and no bytes on a wire. So what the host does, which
limits large jobs, shows on one GPU, and as numbers of operations on none.

Both sides do whole updates in channels_last, with SGD with momentum: the plain network on its batch, Convoy as its
trainer does, every rank with a batch of that size, cut into microbatches. `operations` launch kernels (a `foreach` and
an operation of Convoy's own count once); `views` launch none; `host` are on tensors of the CPU; `waits` are where the
host waits for the GPU, and `uploads` where it copies to it. Collectives are counted by themselves.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import harness, machine, networks
from measuring.dispatch import Counter, Counts, FakeGpu, fake_ranks, lines
from torch import Tensor, nn

from convoy import models
from convoy.engine.parallelize import BatchNorm
from convoy.plans.plan import Plan
from convoy.training import load_recipe
from convoy.training.build import merged, probed
from convoy.training.division import Division
from convoy.training.parallel import Method, TrainedNetwork

MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": partial(models.create, "resnet50", num_classes=1000),
    "efficientnet_b0": partial(networks.efficientnet_b0, 1000),
    "convnext_t": partial(networks.convnext_t, 1000),
    "alexnet": partial(models.create, "alexnet", num_classes=1000),
}
NORMS: tuple[BatchNorm, ...] = ("microbatch", "sync", "local")
WARM_UP = 3
"""Updates before one is counted: in the first the ranks agree on an order of messages, and programs are made."""
STRICT = 9
"""Updates in which the host is to wait for nothing."""
PROBE_SIZE = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Update = Callable[[], None]


@dataclass(frozen=True)
class Work:
    """What every rank does in an update."""

    batch: int  # samples of a rank
    microbatch: int  # samples of each of its parts
    size: int  # of the images


@dataclass(frozen=True)
class Row:
    """An update of one side."""

    model: str
    batch_norm: str
    ranks: int
    passes: int
    operations: int
    views: int
    host: int
    collectives: int
    waits: int
    uploads: int
    update_ms: float = 0.0  # from one update to the next; 0 where nothing was timed
    host_ms: float = 0.0  # until the host has issued an update, with nothing queued before


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5, foreach=True)


def plain_update(model: nn.Module, images: Tensor, labels: Tensor, autocast: AbstractContextManager[Any]) -> Update:
    """Updates of the network as a loop of one's own does them."""
    optimizer = optimizer_of(model)

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return update


@dataclass(frozen=True)
class Passes:
    """The passes of an update as Convoy's trainer makes them on rank 0; `passes(number, images, labels)` gives the loss
    and leaves gradients."""

    network: TrainedNetwork
    passes: Callable[[int, Tensor, Tensor], Tensor]


def convoy_passes(
    model: nn.Module,
    images: Tensor,
    autocast: AbstractContextManager[Any],
    *,
    ranks: int,
    batch_norm: BatchNorm,
    microbatch: int,
    merge: int,
) -> Passes:
    """In passes of `merge` microbatches."""
    parts = len(images) // microbatch
    plan = Plan.parse("serial" if ranks == 1 else f"sample={ranks}", num_devices=ranks)
    network = TrainedNetwork(model, plan, images[:microbatch], batch_norm=batch_norm, seed=0, method=Method())
    division = Division((microbatch,) * (parts * ranks), (parts,) * ranks)
    pieces = division.passes(merge)
    network.divide(division, len(pieces))

    def passes(number: int, images: Tensor, labels: Tensor) -> Tensor:
        losses = []
        for piece in pieces:
            part = piece.parts[0]
            network.enter(number, piece)
            with autocast:
                loss = F.cross_entropy(network.forward(images[part.start : part.stop]), labels[part.start : part.stop])
            network.backward(loss * (len(part) / (ranks * len(images))), last=piece is pieces[-1])
            losses.append(loss.detach())
        network.finish_update()
        return losses[-1]

    return Passes(network, passes)


def convoy_update(
    model: nn.Module, images: Tensor, labels: Tensor, autocast: AbstractContextManager[Any], **options: Any
) -> Update:
    """Updates as Convoy's trainer does them on rank 0; options as of `convoy_passes`."""
    made = convoy_passes(model, images, autocast, **options)
    optimizer = made.network.share(optimizer_of(model))
    number = 0

    def update() -> None:
        nonlocal number
        optimizer.zero_grad(set_to_none=True)
        made.passes(number, images, labels)
        with made.network.stepping(optimizer):
            optimizer.step()
        made.network.updated()
        number += 1

    return update


def merge_of(name: str, batch_norm: str, work: Work) -> int:
    """Microbatches in one pass, as the trainer finds out by trying the network; memory apart."""
    keys = {"model.name": "any", "data.path": "none", "batch": work.batch, "batch_norm": batch_norm}
    recipe = load_recipe("default", [f"{key}={value}" for key, value in keys.items()])
    sizes, cpu = (work.microbatch,) * (work.batch // work.microbatch), torch.device("cpu")
    probe = probed(MODELS[name](), recipe, (3, PROBE_SIZE, PROBE_SIZE), sizes, cpu, "the size")
    return merged(recipe, probe, sizes, cpu, sharing=2**30)[0]


@contextlib.contextmanager
def device(kind: str) -> Iterator[tuple[Counter, Callable[[Any], Any]]]:
    """What counts there, and what brings networks and tensors there."""

    def form(moved: Any) -> torch.memory_format:
        images = isinstance(moved, nn.Module) or moved.dim() == 4
        return torch.channels_last if images else torch.contiguous_format

    if kind == "cuda":
        with Counter() as counter:
            yield counter, lambda moved: moved.to(device="cuda", memory_format=form(moved))
    else:
        with FakeGpu() as gpu:
            yield gpu, lambda moved: gpu.take(moved.to(memory_format=form(moved)))


def measure(
    name: str, batch_norm: BatchNorm | None, ranks: int, work: Work, options: argparse.Namespace
) -> tuple[Row, Counts]:
    """One side: the plain network, if there is no batch norm to choose."""
    merge = merge_of(name, batch_norm, work) if batch_norm is not None else 1
    torch.manual_seed(0)
    with fake_ranks(ranks), contextlib.ExitStack() as counting:
        counter, take = counting.enter_context(device(options.device))
        model = take(MODELS[name]().train())
        images = take(torch.rand(work.batch, 3, work.size, work.size))
        labels = take(torch.zeros(work.batch, dtype=torch.int64))
        low = options.precision != "fp32"
        autocast = torch.autocast("cuda", DTYPES[options.precision]) if low else contextlib.nullcontext()
        if batch_norm is None:
            update = plain_update(model, images, labels, autocast)
        else:
            how: dict[str, Any] = {"ranks": ranks, "batch_norm": batch_norm, "merge": merge}
            update = convoy_update(model, images, labels, autocast, microbatch=work.microbatch, **how)
        for _ in range(WARM_UP):
            update()
        with counter.count() as seen:
            update()
        counting.close()  # it would take time
        if options.device == "cuda" and options.strict:
            _without_waits(update)
        times = _times(update, options.updates) if options.device == "cuda" else {}
    passes = -(-(work.batch // work.microbatch) // merge) if batch_norm is not None else 1
    counts = (seen.num_operations, seen.views.total(), seen.host.total(), seen.collectives.total())
    events = (len(seen.synchronizations), len(seen.uploads))
    return Row(name, batch_norm or "plain", ranks, passes, *counts, *events, **times), seen


def _without_waits(update: Update) -> None:
    """Some updates, in which CUDA raises where the host would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(STRICT):
            update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _times(update: Update, updates: int) -> dict[str, Any]:
    host = []
    for _ in range(5):
        torch.cuda.synchronize()
        host.append(harness.seconds_of(update))

    def several() -> None:
        for _ in range(updates):
            update()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return {"update_ms": 1e3 * harness.seconds_of(several) / updates, "host_ms": 1e3 * statistics.median(host)}


def markdown(rows: list[Row]) -> str:
    """The table."""
    timed = any(row.update_ms for row in rows)
    columns = ["network", "batch norm", "ranks", "passes", "operations", "beside plain", "views", "host", "collectives"]
    table = [harness.header(*columns, "waits", "uploads", *(["ms", "beside plain", "host ms"] if timed else []))]
    plain: dict[str, Row] = {row.model: row for row in rows if row.batch_norm == "plain"}
    for row in rows:
        one = plain[row.model]
        cells: list[Any] = [row.model, row.batch_norm, row.ranks, row.passes, f"{row.operations:,}"]
        cells += [f"{row.operations / one.operations:.2f}", f"{row.views:,}", row.host, row.collectives]
        cells += [row.waits, row.uploads]
        if timed:
            cells += [f"{row.update_ms:.1f}", f"{one.update_ms / row.update_ms:.3f}", f"{row.host_ms:.1f}"]
        table.append(harness.row(*cells))
    return "\n".join(table)


def details(row: Row, seen: Counts, plain: Counts) -> str:
    """Where a side waits and copies, and which operations it has beyond those of the plain network."""
    more = ", ".join(f"{number} {name}" for name, number in (seen.operations - plain.operations).most_common())
    events = [f"  waits: {line}" for line in lines(seen.synchronizations)]
    events += [f"  uploads: {line}" for line in lines(seen.uploads)]
    return "\n".join([f"{row.model}, {row.batch_norm}, {row.ranks} ranks", f"  more: {more}", *events])


def main() -> None:
    options = _parser().parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here: --device fake counts without one")
    if options.device == "fake" and (options.strict or options.precision != "fp32"):
        sys.exit("--strict and other precisions need a GPU: add --device cuda; waits are counted without it")
    if options.microbatch < 1 or options.batch % options.microbatch or options.batch < options.microbatch:
        sys.exit(f"--batch {options.batch} must be a multiple of --microbatch {options.microbatch}")
    work = Work(options.batch, options.microbatch, options.size)
    print(machine.sentence(machine.describe()), flush=True)
    rows: list[Row] = []
    for name in options.models:
        row, plain = measure(name, None, 1, work, options)
        rows.append(row)
        for batch_norm in options.batch_norm:
            for ranks in options.ranks:
                row, seen = measure(name, batch_norm, ranks, work, options)
                rows.append(row)
                if options.details:
                    print(details(row, seen, plain), file=sys.stderr, flush=True)
    print(markdown(rows), flush=True)
    document = {"machine": machine.describe(), "work": asdict(work), "rows": [asdict(row) for row in rows]}
    harness.save(options.out, document)


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", type=harness.some(MODELS), default=list(MODELS), help="several, with commas")
    parser.add_argument("--batch-norm", type=harness.some(NORMS), default=list(NORMS), help="likewise")
    parser.add_argument("--ranks", type=harness.numbers, default=[8, 64])
    parser.add_argument("--batch", type=int, default=256, help="samples of each rank (256)")
    parser.add_argument("--microbatch", type=int, default=32, help="samples of a microbatch (32)")
    parser.add_argument("--size", type=int, default=224, help="of the images (224)")
    parser.add_argument("--device", choices=("fake", "cuda"), default="fake", help="fake: one that computes nothing")
    parser.add_argument("--precision", choices=list(DTYPES), default="fp32")
    parser.add_argument("--updates", type=int, default=20, help="timed, with --device cuda (20)")
    parser.add_argument("--strict", action="store_true", help="with --device cuda: fail where the host waits for it")
    parser.add_argument("--details", action="store_true", help="which operations, and the lines that wait and copy")
    parser.add_argument("--out", type=Path, help="file for JSON")
    return parser


if __name__ == "__main__":
    main()
