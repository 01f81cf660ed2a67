"""Passes of few samples on one CPU thread: convolutions as torch computes them, and as Convoy has them computed.

    python benchmarks/small_passes.py
    python benchmarks/small_passes.py --networks resnet50:224 --passes 8
    python benchmarks/small_passes.py --parts 8
    python benchmarks/small_passes.py --batch 64 --passes 8,16,32,64

Forward and backward pass in float32 of a network as it is, and as `convoy train` prepares it, with batch norm over the
pass (`convoy.engine.layers.prepare`). Both take turns in one process, which keeps the memory that it frees.

With `--parts`, all 2-d convolutions of the network by themselves, channels_last, forward and the gradients of their
inputs, as a stage under zero-bubble computes them in so many parts of a batch: with each weight laid out in every call,
and once for all parts (`convoy.ops.onednn.packed`).

With `--batch`, an update of `convoy train` on one device, with so many samples in each of its passes, in turns, and how
many it takes itself. Microbatches are as small as the smallest passes.
"""

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from measuring import harness
from torch import Tensor, nn

from convoy import models
from convoy.bench.records import Made
from convoy.bench.study import data_of
from convoy.engine.allocation import keep_freed_memory
from convoy.engine.layers import PointwiseConv2d, prepare
from convoy.ops.convolution import weighted
from convoy.ops.onednn import packed, pointwise
from convoy.ops.postponed import Weighted
from convoy.training import load_recipe
from convoy.training.session import Session
from convoy.training.set_up import set_up
from convoy.training.step import update_seconds

NETWORKS = "resnet50:64,resnet50:224,googlenet:64,densenet121:64,squeezenet1_1:64"


def main() -> None:
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--networks", default=NETWORKS, help="with the image's size, e.g. resnet50:64,googlenet:96")
    parser.add_argument("--passes", type=harness.numbers, default=[1, 2, 4, 8, 12], help="samples of a pass")
    parser.add_argument("--parts", type=int, help="parts of a batch, each of as many samples as a pass")
    parser.add_argument("--batch", type=int, help="samples of an update of the trainer, in passes of `--passes`")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory(torch.device("cpu"))
    with harness.report(options.out) as report:
        mode = _laid_out if options.parts else _trainer if options.batch else _networks
        mode(report, options)


def _subjects(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    for text in options.networks.split(","):
        name, _, size = text.partition(":")
        yield name, int(size)


def _beside(options: argparse.Namespace, plain: Callable[[], object], other: Callable[[], object]) -> list[str]:
    """Median milliseconds of both in turn, after one call of each, and their ratio."""
    sides = {"plain": partial(harness.seconds_of, plain), "other": partial(harness.seconds_of, other)}
    seconds = harness.in_turn(sides, options.rounds + 1)
    one, two = (1e3 * statistics.median(values[1:]) for values in seconds.values())
    return [f"{one:.1f}", f"{two:.1f}", f"{one / two:.2f}"]


def _networks(report: harness.Report, options: argparse.Namespace) -> None:
    columns = ("as torch has it, ms", "prepared, ms", "ratio")
    report.header("network", "1 × 1 convolutions", "samples of a pass", *columns)
    for name, size in _subjects(options):
        torch.manual_seed(0)
        plain = models.create(name, num_classes=10)
        prepared = copy.deepcopy(plain)
        context = prepare(prepared, 0, "sync")
        number = sum(isinstance(layer, PointwiseConv2d) for layer in prepared.modules())
        for samples in options.passes:
            images, labels = torch.randn(samples, 3, size, size), torch.randint(10, (samples,))
            context.enter(0, 0, (samples,), torch.device("cpu"))  # for dropout
            both = (partial(_pass, network, images, labels) for network in (plain, prepared))
            report.row(f"{name}, {size} px", number, samples, *_beside(options, *both))


def _pass(network: nn.Module, images: Tensor, labels: Tensor) -> None:
    outputs = network(images)
    F.cross_entropy(outputs if isinstance(outputs, Tensor) else outputs[0], labels).backward()


def _trainer(report: harness.Report, options: argparse.Namespace) -> None:
    passes = sorted(options.passes)
    columns = [f"passes of {samples}, ms" for samples in passes]
    report.header("network", *columns, "MiB a sample", "the trainer's")
    for name, size in _subjects(options):
        keys = {"model.name": name, "batch": options.batch, "microbatch": passes[0], "threads": options.threads}
        keys |= {"channels_last": "false", "precision": "fp32"}
        recipe = load_recipe("default", [f"{key}={value}" for key, value in keys.items()])
        data = data_of(Made(shape=(1 if name == "lenet" else 3, size, size), classes=10), recipe)
        session = set_up(recipe, torch.device("cpu"), data=data)
        session.model.train()
        usual = min(options.batch, session.merge * passes[0])
        sides = {str(samples): partial(_seconds, session, samples // passes[0]) for samples in passes}
        times = harness.in_turn(sides, options.rounds)
        cells = [f"{1e3 * statistics.median(values):.1f}" for values in times.values()]
        report.row(f"{name}, {size} px", *cells, f"{session.probe.bytes_per_sample / 2**20:.2f}", usual)


def _seconds(session: Session, merge: int) -> float:
    """Of an update with so many microbatches in a pass."""
    session.merge = merge
    return update_seconds(session.step(), session.image_shape, session.device, session.ranks)


@dataclass
class _Layer:
    """A convolution, and one input and gradient of its output for every part."""

    plain: Weighted
    weight: Tensor
    inputs: list[Tensor]
    gradients: list[Tensor]


@torch.no_grad()
def _laid_out(report: harness.Report, options: argparse.Namespace) -> None:
    columns = ("parts", "laid out in every call, ms", "once, ms", "ratio")
    report.header("network", "convolutions", "samples of a part", *columns)
    for name, size in _subjects(options):
        for samples in options.passes:
            layers = _convolutions(name, torch.randn(samples, 3, size, size), options.parts)
            both = (partial(_pass_by_pass, layers, prepares) for prepares in (False, True))
            report.row(f"{name}, {size} px", len(layers), samples, options.parts, *_beside(options, *both))


def _convolutions(name: str, images: Tensor, parts: int) -> list[_Layer]:
    """The convolutions of one group of a network, with inputs of the shapes that they have there."""
    layers: list[_Layer] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        options = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation}
        layer = weighted(F.conv2d, {**options, "groups": 1})
        if (module.kernel_size, module.stride, module.dilation) == ((1, 1),) * 3:
            layer = pointwise(layer, weighted(F.conv2d, {**options, "groups": 1, "dilation": (2, 2)}))
        xs, gradients = ([torch.randn_like(like) for _ in range(parts)] for like in (inputs[0], output))
        layers.append(_Layer(packed(layer, **options), module.weight.detach(), xs, gradients))  # type: ignore[arg-type]

    network = models.create(name, num_classes=10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.groups == 1:
            module.register_forward_hook(note)
    network(images.contiguous(memory_format=torch.channels_last))
    return layers


def _pass_by_pass(layers: Sequence[_Layer], prepares: bool) -> None:
    """All parts forward and then back, each through all layers, so that no weight is still in the caches."""
    called = [layer.plain for layer in layers]
    for number, layer in enumerate(layers):
        assert layer.plain.prepare is not None
        ready = layer.plain.prepare(layer.inputs[0], layer.weight) if prepares else None
        called[number] = ready or layer.plain
    for part in range(len(layers[0].inputs)):
        for layer, call in zip(layers, called, strict=True):
            call.compute(layer.inputs[part], layer.weight, None)
    for part in range(len(layers[0].inputs)):
        for layer, call in zip(reversed(layers), reversed(called), strict=True):
            call.input_gradient(layer.gradients[part], layer.inputs[part], layer.weight)


if __name__ == "__main__":
    main()
