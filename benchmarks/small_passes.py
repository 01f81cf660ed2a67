"""Passes of few samples on one CPU thread: convolutions as torch computes them, and as Convoy has them computed.

    python benchmarks/small_passes.py
    python benchmarks/small_passes.py --networks resnet50:224 --passes 8 --channels-last
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
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from measuring import machine
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
from convoy.training.set_up import set_up
from convoy.training.step import update_seconds

NETWORKS = "resnet50:64,resnet50:224,googlenet:64,densenet121:64,squeezenet1_1:64"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=NETWORKS, help="with the image's size, e.g. resnet50:64,googlenet:96")
    parser.add_argument("--passes", default="1,2,4,8,12", help="samples of a pass")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--parts", type=int, help="parts of a batch, each of as many samples as a pass")
    parser.add_argument("--batch", type=int, help="samples of an update of the trainer, in passes of `--passes`")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory(torch.device("cpu"))
    about = machine.describe()
    print(f"{about['date']}: `{about['command']}`\n\n{machine.sentence(about)}\n")
    if arguments.parts:
        _laid_out(arguments)
        return
    if arguments.batch:
        _trainer(arguments)
        return
    print("| network | 1 × 1 convolutions | samples of a pass | as torch has it, ms | prepared, ms | ratio |")
    print("| --- " * 6 + "|", flush=True)
    memory_format = torch.channels_last if arguments.channels_last else torch.contiguous_format
    for text in arguments.networks.split(","):
        name, _, size = text.partition(":")
        torch.manual_seed(0)
        plain = models.create(name, num_classes=10).to(memory_format=memory_format)  # type: ignore[call-overload]
        prepared = copy.deepcopy(plain)
        context = prepare(prepared, 0, "sync")
        number = sum(isinstance(layer, PointwiseConv2d) for layer in prepared.modules())
        for samples in map(int, arguments.passes.split(",")):
            images = torch.randn(samples, 3, int(size), int(size)).contiguous(memory_format=memory_format)
            labels = torch.randint(10, (samples,))
            context.enter(0, 0, (samples,), torch.device("cpu"))  # for dropout
            one, other = _in_turns((plain, prepared), images, labels, arguments.rounds)
            row = [f"{name}, {size} px", number, samples, f"{1e3 * one:.1f}", f"{1e3 * other:.1f}"]
            print(f"| {' | '.join(map(str, row))} | {one / other:.2f} |", flush=True)


def _in_turns(networks: tuple[nn.Module, ...], images: Tensor, labels: Tensor, rounds: int) -> list[float]:
    """Median seconds of a pass of each."""
    seconds: list[list[float]] = [[] for _ in networks]
    for _ in range(rounds + 1):
        for network, own in zip(networks, seconds, strict=True):
            start = time.perf_counter()
            outputs = network(images)
            outputs = outputs if isinstance(outputs, Tensor) else outputs[0]
            F.cross_entropy(outputs, labels).backward()
            own.append(time.perf_counter() - start)
    return [statistics.median(own[1:]) for own in seconds]


def _trainer(arguments: argparse.Namespace) -> None:
    passes = sorted(map(int, arguments.passes.split(",")))
    print(
        f"| network | {' | '.join(f'passes of {samples}, ms' for samples in passes)} | MiB a sample | the trainer's |"
    )
    print("| --- " * (len(passes) + 3) + "|", flush=True)
    for text in arguments.networks.split(","):
        name, _, size = text.partition(":")
        channels = 1 if name == "lenet" else 3
        settings = {
            "model.name": name,
            "batch": arguments.batch,
            "microbatch": passes[0],
            "channels_last": arguments.channels_last,
            "precision": "fp32",
            "threads": arguments.threads,
        }
        recipe = load_recipe("default", [f"{key}={str(value).lower()}" for key, value in settings.items()])
        data = data_of(Made(shape=(channels, int(size), int(size)), classes=10), recipe)
        session = set_up(recipe, torch.device("cpu"), data=data)
        session.model.train()
        usual = min(arguments.batch, session.merge * passes[0])
        seconds: dict[int, list[float]] = {samples: [] for samples in passes}
        for number in range(arguments.rounds):
            for samples in passes if number % 2 == 0 else reversed(passes):
                session.merge = samples // passes[0]
                step = session.step()
                seconds[samples].append(update_seconds(step, session.image_shape, session.device, session.ranks))
        times = [f"{1e3 * statistics.median(own):.1f}" for own in seconds.values()]
        kept = f"{session.probe.bytes_per_sample / 2**20:.2f}"
        print(f"| {name}, {size} px | {' | '.join(times)} | {kept} | {usual} |", flush=True)


@dataclass
class _Layer:
    """A convolution, and one input and gradient of its output for every part."""

    plain: Weighted
    weight: Tensor
    inputs: list[Tensor]
    gradients: list[Tensor]


@torch.no_grad()
def _laid_out(arguments: argparse.Namespace) -> None:
    print("| network | convolutions | samples of a part | parts | laid out in every call, ms | once, ms | ratio |")
    print("| --- " * 7 + "|", flush=True)
    for text in arguments.networks.split(","):
        name, _, size = text.partition(":")
        for samples in map(int, arguments.passes.split(",")):
            layers = _convolutions(name, torch.randn(samples, 3, int(size), int(size)), arguments.parts)
            one, other = _layers_in_turns(layers, arguments.rounds)
            row = [
                f"{name}, {size} px",
                len(layers),
                samples,
                arguments.parts,
                f"{1e3 * one:.1f}",
                f"{1e3 * other:.1f}",
            ]
            print(f"| {' | '.join(map(str, row))} | {one / other:.2f} |", flush=True)


def _convolutions(name: str, images: Tensor, parts: int) -> list[_Layer]:
    """The convolutions of one group of a network, with inputs of the shapes that they have there."""
    found: list[_Layer] = []

    def seen(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        options = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation}
        layer = weighted(F.conv2d, {**options, "groups": 1})
        if (module.kernel_size, module.stride, module.dilation) == ((1, 1),) * 3:
            layer = pointwise(layer, weighted(F.conv2d, {**options, "groups": 1, "dilation": (2, 2)}))
        xs, gradients = ([torch.randn_like(like) for _ in range(parts)] for like in (inputs[0], output))
        found.append(_Layer(packed(layer, **options), module.weight.detach(), xs, gradients))  # type: ignore[arg-type]

    network = models.create(name, num_classes=10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.groups == 1:
            module.register_forward_hook(seen)
    network(images.contiguous(memory_format=torch.channels_last))
    return found


def _layers_in_turns(layers: Sequence[_Layer], rounds: int) -> tuple[float, float]:
    """Median seconds of all layers together, with weights laid out in every call and once."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds + 1):
        for prepares, own in seconds.items():
            start = time.perf_counter()
            _pass_by_pass(layers, prepares)
            own.append(time.perf_counter() - start)
    return statistics.median(seconds[False][1:]), statistics.median(seconds[True][1:])


def _pass_by_pass(layers: Sequence[_Layer], prepares: bool) -> None:
    """All parts forward and then back, each through all layers, so that no weight is still in the caches."""
    called = [layer.plain for layer in layers]
    for number, layer in enumerate(layers):
        assert layer.plain.prepare is not None
        ready = layer.plain.prepare(layer.inputs[0], layer.weight) if prepares else None
        called[number] = ready or layer.plain
    parts = range(len(layers[0].inputs))
    for part in parts:
        for layer, call in zip(layers, called, strict=True):
            call.compute(layer.inputs[part], layer.weight, None)
    for part in parts:
        for layer, call in zip(reversed(layers), reversed(called), strict=True):
            call.input_gradient(layer.gradients[part], layer.inputs[part], layer.weight)


if __name__ == "__main__":
    main()
