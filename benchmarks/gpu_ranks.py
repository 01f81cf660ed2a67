"""What the first of many GPUs is given to do in an update, beside the plain network on one: operations, copies, waits.

    python benchmarks/gpu_ranks.py                            counted on any machine, with GPUs that compute nothing
    python benchmarks/gpu_ranks.py --models resnet50 --ranks 8
    python benchmarks/gpu_ranks.py --device cuda --precision bf16 --updates 50      timed on one GPU, and counted

The other ranks are not there: torch's `fake` process group lets this process be rank 0 of 8 or 64, with every kernel,
copy and wait of the host that the whole job would have there, and no bytes on a wire. So what the host does, which
limits large jobs, shows on one GPU, and as numbers of operations on none.

Both sides do whole updates in channels_last, with SGD with momentum: the plain network on its batch, Convoy as its
trainer does, every rank with a batch of that size, cut into microbatches. `operations` launch kernels (a `foreach` and
an operation of Convoy's own count once); `views` launch none; `host` are on tensors of the CPU; `waits` are where the
host waits for the GPU, and `uploads` where it copies to it. Collectives are counted by themselves. On a GPU
DistributedDataParallel is timed too, with a hook that returns at once, and Convoy's updates recorded as a CUDA graph.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from measuring import harness
from measuring.dispatch import Counter, Counts, FakeGpu, fake_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from convoy import models
from convoy.engine.recorded import Recorded, graph_on, leave_default_stream
from convoy.plans.plan import Plan
from convoy.recipe.recipe import load_recipe
from convoy.training.build import TriedNetwork
from convoy.training.division import Division
from convoy.training.gradients import Exchange, divided_network

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50": ("resnet50", {}),
    "efficientnet_b0": ("measuring.networks:efficientnet", {"width": 1.0, "depth": 1.0, "drops": True}),
    "convnext_t": ("measuring.networks:convnext_t", {}),
    "alexnet": ("alexnet", {}),
}
"""Names in `convoy.models`, and options."""
PLAIN, DDP, RECORDED = "plain", "DDP", ", recorded"
NORMS = ("microbatch", "sync", "local")
WARM_UP = 3
"""Updates before one is counted: in the first the ranks agree on an order of messages, and programs are made."""
PROVEN = 12
"""Updates after which a recording has proved itself."""
PROBE_SIZE = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Update = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """An update of one side."""

    model: str
    side: str  # `PLAIN`, `DDP`, or Convoy's batch norm and whether it is recorded
    ranks: int
    passes: int
    counts: dict[str, int]
    update_ms: float = 0.0  # from one update to the next; 0 where nothing was timed
    host_ms: float = 0.0  # until the host has issued an update, with nothing queued before


def network(name: str) -> nn.Module:
    """The same on all sides."""
    made, options = MODELS[name]
    return models.create(made, num_classes=1000, **options)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """That of all sides."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5, foreach=True)


def plain_update(
    called: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    autocast: AbstractContextManager[Any],
    optimizer: torch.optim.Optimizer,
    recorded: Callable[[Any], Any] = lambda passes: passes,
) -> Update:
    """Updates of a network as a loop of one's own does them."""

    def passes(images: Tensor, labels: Tensor) -> Tensor:
        with autocast:
            loss = F.cross_entropy(called(images), labels)
        loss.backward()
        return loss

    step = recorded(passes)

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        step(images, labels)
        optimizer.step()

    return update


def seconds_each(update: Update, number: int, device: torch.device) -> float:
    """Seconds of an update, of so many one after the other."""

    def several() -> None:
        for _ in range(number):
            update()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return harness.seconds_of(several) / number


def seconds_issued(update: Update, device: torch.device) -> float:
    """Seconds until the host has issued an update with nothing queued before, the median of five."""
    found = []
    for _ in range(5):
        found.append(harness.seconds_of(update))
        seconds_each(lambda: None, 1, device)
    return statistics.median(found)


def data_parallel(model: nn.Module) -> nn.Module:
    """DistributedDataParallel, where nobody else is there."""
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def at_once(_: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[0])
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, at_once)
    return ddp


def convoy_update(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    autocast: AbstractContextManager[Any],
    *,
    ranks: int,
    batch_norm: Any,
    microbatch: int,
    merge: int,
    record: bool = False,
) -> Update:
    """Updates as Convoy's trainer does them on rank 0, in passes of `merge` microbatches."""
    parts = len(images) // microbatch
    plan = Plan.parse("serial" if ranks == 1 else f"sample={ranks}", num_devices=ranks)
    recipe = load_recipe("default", ["model.name=any", f"batch_norm={batch_norm}"])
    network = divided_network(model, plan, images[:microbatch], recipe)
    exchange = Exchange(network, recipe)
    division = Division((microbatch,) * (parts * ranks), (parts,) * ranks)
    pieces = division.passes(merge)
    exchange.divide(division, len(pieces))

    def passes(number: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        images, labels = inputs
        losses = []
        for piece in pieces:
            part = piece.parts[0]
            network.samples = tuple(map(len, piece.parts))
            network.context.enter(number, piece.positions, piece.sizes, images.device)
            with autocast:
                loss = F.cross_entropy(model(images[part.start : part.stop]), labels[part.start : part.stop])
            with exchange.in_pass(piece is pieces[-1]):
                (loss * (len(part) / (ranks * len(images)))).backward()
            losses.append(loss.detach())
        exchange.finish()
        return losses

    step: Callable[[int, Sequence[Tensor]], Any] = passes
    graph = graph_on(images.device) if record else None
    if graph is not None:
        leave_default_stream(images.device)
        step = Recorded(passes, model, network.context, graph, tell=harness.say)
    optimizer, number = optimizer_of(model), 0

    def update() -> None:
        nonlocal number
        optimizer.zero_grad(set_to_none=True)
        step(number, [images, labels])
        with exchange.stepping(optimizer):
            optimizer.step()
        exchange.updated(number, optimizer.param_groups[0]["lr"])
        number += 1

    return update


def merge_of(name: str, batch_norm: str, options: argparse.Namespace) -> int:
    """Microbatches in one pass, as the trainer finds out by trying the network; memory apart."""
    keys = {"model.name": "any", "data.path": "none", "batch": options.batch, "batch_norm": batch_norm}
    recipe = load_recipe("default", [f"{key}={value}" for key, value in keys.items()])
    sizes, cpu = (options.microbatch,) * (options.batch // options.microbatch), torch.device("cpu")
    tried = TriedNetwork.of(recipe, network(name), (3, PROBE_SIZE, PROBE_SIZE), cpu, "the size")
    return tried.microbatches_in_pass(sizes, sharing=2**30)[0]


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


def measure(name: str, side: str, ranks: int, options: argparse.Namespace) -> Row:
    """An update of one side, counted, and on a GPU timed."""
    batch_norm, record = side.removesuffix(RECORDED), side.endswith(RECORDED)
    merge = merge_of(name, batch_norm, options) if batch_norm in NORMS else 1
    torch.manual_seed(0)
    with fake_ranks(ranks), contextlib.ExitStack() as counting:
        counter, take = counting.enter_context(device(options.device))
        model = take(network(name))
        images = take(torch.rand(options.batch, 3, options.size, options.size))
        labels = take(torch.zeros(options.batch, dtype=torch.int64))
        low = options.precision != "fp32"
        given = images, labels, torch.autocast("cuda", DTYPES[options.precision]) if low else contextlib.nullcontext()
        if batch_norm in NORMS:
            how: dict[str, Any] = {"batch_norm": batch_norm, "microbatch": options.microbatch, "merge": merge}
            update = convoy_update(model, *given, ranks=ranks, record=record, **how)
        else:
            called = data_parallel(model) if side == DDP else model
            update = plain_update(called, *given, optimizer_of(called))
        seen = Counts()
        if not record:  # of which the host issues hardly anything
            for _ in range(WARM_UP):
                update()
            with counter.count() as seen:
                update()
        counting.close()  # it would take time
        times = {}
        if options.device == "cuda":
            seconds_each(update, PROVEN, images.device)
            times["host_ms"] = 1e3 * seconds_issued(update, images.device)
            times["update_ms"] = 1e3 * seconds_each(update, options.updates, images.device)
    passes = -(-(options.batch // options.microbatch) // merge) if batch_norm in NORMS else 1
    return Row(name, side, ranks, passes, seen.totals(), **times)


def cells(row: Row, plain: Row) -> list[Any]:
    """Of the table."""
    operations, *others = row.counts.values()
    found: list[Any] = [row.model, row.side, row.ranks, row.passes, f"{operations:,}"]
    found += [f"{operations / plain.counts['operations']:.2f}", *(f"{number:,}" for number in others)]
    if row.update_ms:
        found += [f"{row.update_ms:.1f}", f"{plain.update_ms / row.update_ms:.3f}", f"{row.host_ms:.1f}"]
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    harness.choice(parser, "--models", MODELS, MODELS)
    harness.choice(parser, "--batch-norm", NORMS, NORMS)
    parser.add_argument("--ranks", type=harness.numbers, default=[8, 64])
    parser.add_argument("--batch", type=int, default=256, help="samples of each rank (256)")
    parser.add_argument("--microbatch", type=int, default=32, help="samples of a microbatch (32)")
    parser.add_argument("--size", type=int, default=224, help="of the images (224)")
    parser.add_argument("--device", choices=("fake", "cuda"), default="fake", help="fake: one that computes nothing")
    parser.add_argument("--precision", choices=list(DTYPES), default="fp32")
    parser.add_argument("--updates", type=int, default=20, help="timed, with --device cuda (20)")
    options = parser.parse_args()
    timed = options.device == "cuda"
    if timed and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here: --device fake counts without one")
    if not timed and options.precision != "fp32":
        sys.exit("other precisions need a GPU: add --device cuda")
    if options.microbatch < 1 or options.batch % options.microbatch or options.batch < options.microbatch:
        sys.exit(f"--batch {options.batch} must be a multiple of --microbatch {options.microbatch}")
    sides = [f"{norm}{how}" for norm in options.batch_norm for how in (("", RECORDED) if timed else ("",))]
    with harness.report(options.out) as report:
        columns = ("operations", "beside plain", "views", "host", "collectives", "waits", "uploads")
        times = ("ms", "beside plain", "host ms") if timed else ()
        report.header("network", "batch norm", "ranks", "passes", *columns, *times)
        for name in options.models:
            plain = measure(name, PLAIN, 1, options)
            report.row(*cells(plain, plain), **asdict(plain))
            for side in (DDP, *sides) if timed else sides:
                for ranks in options.ranks:
                    row = measure(name, side, ranks, options)
                    report.row(*cells(row, plain), **asdict(row))


if __name__ == "__main__":
    main()
