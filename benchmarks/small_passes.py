"""Passes of few samples on one CPU thread: 1 × 1 convolutions by oneDNN, and as torch computes them.

    python benchmarks/small_passes.py
    python benchmarks/small_passes.py --networks resnet50:224 --passes 8 --channels-last

Forward and backward pass in float32 of a network as it is, and as `convoy train` prepares it, with batch norm over the
pass (`convoy.engine.layers.prepare`). Both take turns in one process, which keeps the memory that it frees.
"""

import argparse
import copy
import statistics
import time

import torch
import torch.nn.functional as F
from measuring import machine
from torch import Tensor, nn

from convoy import models
from convoy.engine.allocation import keep_freed_memory
from convoy.engine.layers import PointwiseConv2d, prepare

NETWORKS = "resnet50:64,resnet50:224,googlenet:64,densenet121:64,squeezenet1_1:64"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=NETWORKS, help="with the image's size, e.g. resnet50:64,googlenet:96")
    parser.add_argument("--passes", default="1,2,4,8,12", help="samples of a pass")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))
    about = machine.describe()
    print(f"{about['date']}: `{about['command']}`\n\n{machine.sentence(about)}\n")
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


if __name__ == "__main__":
    main()
