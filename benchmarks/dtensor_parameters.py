"""Divided parameters as DTensors beside plain tensors of this rank's part: what they cost, what fails, what fits.

    python benchmarks/dtensor_parameters.py                        ResNet-50 and AlexNet under filter=2, 2 ranks
    python benchmarks/dtensor_parameters.py --networks lenet --rounds 3

Every rank is a process with one thread; gloo. Parameters that the plan divides along dim 0 or 1 become DTensors with
`Shard`, all others with `Replicate`; beside them stand the same numbers as plain tensors. Both sides take turns in each
round; a ratio above 1 says that DTensors are slower. The last table counts, over all networks that come with Convoy,
the divided parameters whose parts are those that `Shard` means: consecutive, of the sizes of `torch.chunk`.
"""

import argparse
import itertools
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

from convoy import models
from convoy.comm.groups import Groups
from convoy.engine.gradients.norms import clip_grad_norm
from convoy.engine.network import Network
from convoy.engine.shards import cut
from convoy.errors import ConvoyError
from convoy.ops.context import StepContext
from convoy.plans import Layout, Plan
from convoy.plans.layout import balanced
from convoy.plans.mesh import Axes, Mesh

PLANS = {"filter=2": 2, "filter=3": 3, "owt=2": 2, "channel=2": 2, "filter=2,channel=2": 4}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], bool | None], optim.Optimizer]] = {
    "SGD with momentum": lambda p, foreach: optim.SGD(p, 1e-3, momentum=0.9, foreach=foreach),
    "AdamW": lambda p, foreach: optim.AdamW(p, 1e-3, foreach=foreach),
}


def placed(name: str, plan: str, devices: int, rank: int = 0) -> tuple[nn.Module, Network]:
    """A network, and where a plan keeps its parameters; no other rank is asked."""
    info = models.describe(name)
    shape = info.input_shape or (3, 224, 224)
    model = models.create(name)
    parsed = Plan.parse(plan, num_devices=devices)
    network = Network(model, parsed, Groups(parsed.mesh, rank), StepContext())
    network.look((torch.empty(2, *shape),), training=True)
    network.place_parameters()
    return model, network


def is_shard(layout: Layout, shape: Sequence[int], mesh: Mesh) -> bool:
    """Whether DTensor's placements say the same: on every axis one dimension, consecutive, in the sizes of chunk."""
    for dim, split in layout.splits:
        wide = [axis for axis in split.axes if mesh.sizes[axis] > 1]
        parts = [range(shape[dim])]
        for axis in wide:  # a dimension on several axes is cut again, from the left
            parts = [piece for part in parts for piece in _chunks(part, mesh.sizes[axis])]
        if [range(0) if not len(part) else part for part in split.parts] != parts:
            return False
    return True


def _chunks(part: range, number: int) -> list[range]:
    size = -(-len(part) // number)
    cuts = [min(len(part), size * i) for i in range(number + 1)]
    found = [part[a:b] for a, b in itertools.pairwise(cuts)]
    return [range(0) if not len(each) else each for each in found]


def fitting(networks: Sequence[str]) -> list[str]:
    """The table of divided parameters whose layout is a `Shard`, over all networks."""
    lines = [
        "| plan | divided parameters | of which `Shard` says the same | networks with others |",
        "| --- | --- | --- | --- |",
    ]
    for plan, devices in PLANS.items():
        divided = same = refused = 0
        others: dict[str, int] = {}
        for name in networks:
            try:
                _, network = placed(name, plan, devices)
            except ConvoyError:  # a layer in two groups does not go on three ranks
                refused += 1
                continue
            mesh = network.groups.mesh
            for key, _ in network.model.named_parameters():
                layout = network.layouts[key]
                if not any(mesh.sizes[axis] > 1 for axis in layout.split_axes):
                    continue
                divided += 1
                if is_shard(layout, network.shapes[key][0], mesh):
                    same += 1
                else:
                    others[name] = others.get(name, 0) + 1
        most = sorted(others, key=lambda each: -others[each])
        told = ", ".join(f"{each} {others[each]}" for each in most[:4]) + (", …" if len(most) > 4 else "")
        number = len(networks) - refused
        percent = f"{same / divided:.1%}" if divided else "-"
        lines.append(f"| `{plan}` | {divided:,} | {same:,} ({percent}) | {len(others)} of {number}: {told} |")
    return lines


@dataclass
class Sides:
    """The same parameters twice.

    Attributes:
        plain: this rank's parts.
        dtensors: they as DTensors.
        axes: over which each is divided.
        groups: of this rank.
    """

    plain: list[nn.Parameter]
    dtensors: list[Any]
    axes: list[Axes]
    groups: Groups

    @staticmethod
    def of(name: str, plan: str, mesh: DeviceMesh) -> "Sides":
        """Of a network; its layouts must be shards."""
        model, network = placed(name, plan, mesh.size(), dist.get_rank())
        groups = network.groups
        sides = Sides([], [], [], groups)
        for key, parameter in model.named_parameters():
            layout = network.layouts[key]
            part = cut(parameter.detach(), layout, groups.mesh, groups.coordinates).clone()
            fits = is_shard(layout, parameter.shape, groups.mesh)
            placement = Shard(layout.splits[0][0]) if layout.splits and fits else Replicate()
            sides.plain.append(nn.Parameter(part))
            shape, stride = parameter.shape if layout.splits and fits else part.shape, parameter.stride()
            shape, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
            dtensor = DTensor.from_local(part.clone(), mesh, [placement], run_check=False, shape=shape, stride=stride)
            sides.dtensors.append(nn.Parameter(dtensor))
            sides.axes.append(tuple(sorted(layout.split_axes)))
        for each in (*sides.plain, *sides.dtensors):
            each.grad = torch.full_like(each, 1e-3)
        return sides


def turns(rounds: int, sides: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of every side, of which each begins half of the rounds; the first round does not count."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in sorted(sides, reverse=bool(number % 2)):
            dist.barrier()
            began = time.perf_counter()
            sides[side]()
            found[side].append(time.perf_counter() - began)
    return {side: seconds[1:] for side, seconds in found.items()}


def row(name: str, what: str, seconds: dict[str, list[float]]) -> str:
    """A line of the table: milliseconds of both, and their ratio by rounds."""
    plain, dtensor = (1e3 * statistics.median(seconds[side]) for side in ("plain", "dtensor"))
    ratios = sorted(b / a for a, b in zip(seconds["plain"], seconds["dtensor"], strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    ratio = statistics.median(ratios)
    return f"| {name} | {what} | {plain:.2f} | {dtensor:.2f} | {ratio:.2f} ({low:.2f} to {high:.2f}) |"


def times(name: str, plan: str, mesh: DeviceMesh, rounds: int) -> list[str]:
    """The rows of one network."""
    sides = Sides.of(name, plan, mesh)
    lines = []
    for kind, make in OPTIMIZERS.items():
        for foreach in (None, True):
            steps: dict[str, Callable[[], Any]] = {
                "plain": make(sides.plain, foreach).step,
                "dtensor": make(sides.dtensors, foreach).step,
            }
            lines.append(row(name, f"{kind}, {'foreach' if foreach else 'default'}", turns(rounds, steps)))
    both = list(zip(sides.plain, sides.axes, strict=True))
    clips: dict[str, Callable[[], Any]] = {
        "plain": lambda: clip_grad_norm(both, sides.groups, 1e9),
        "dtensor": lambda: nn.utils.clip_grad_norm_(sides.dtensors, 1e9),
    }
    lines.append(row(name, "clipping by the norm of all", turns(rounds, clips)))
    gradients = [torch.full_like(parameter, 1e-3) for parameter in sides.plain]

    def use(parameters: Sequence[Any], local: bool) -> None:
        for parameter in parameters:
            parameter.grad = None
        used = [parameter.to_local() if local else parameter.view_as(parameter) for parameter in parameters]
        torch.autograd.backward(used, gradients)

    uses: dict[str, Callable[[], Any]] = {
        "plain": lambda: use(sides.plain, False),
        "dtensor": lambda: use(sides.dtensors, True),
    }
    lines.append(row(name, "a pass to the parameters and back", turns(rounds, uses)))
    return lines


def failures(mesh: DeviceMesh) -> list[str]:
    """What does not work, with the first line of the error, on this rank."""

    def tried(call: Callable[[], Any]) -> str:
        try:
            return str(call())
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"

    divided = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    whole = nn.Parameter(torch.ones(3))
    divided.grad, whole.grad = torch.ones_like(divided), torch.ones_like(whole)
    mixed, images = [divided, whole], torch.ones(1, 1, 3, 3)
    lines = ["| what | result |", "| --- | --- |"]

    def add(what: str, call: Callable[[], Any]) -> None:
        lines.append(f"| {what} | {tried(call)} |")

    add("SGD(foreach=True) over a DTensor and a tensor", lambda: optim.SGD(mixed, 0.1, foreach=True).step() or "works")
    add("AdamW(foreach=True) over a DTensor and a tensor", lambda: optim.AdamW(mixed, foreach=True).step() or "works")
    add("AdamW() over a DTensor and a tensor", lambda: optim.AdamW(mixed, foreach=False).step() or "works")
    add("clip_grad_norm_ over a DTensor and a tensor", lambda: nn.utils.clip_grad_norm_(mixed, 1.0))
    add(
        "conv2d of a tensor with a DTensor",
        lambda: nn.functional.conv2d(images, divided[:, None, None]),
    )
    add("linear of a tensor with a DTensor", lambda: nn.functional.linear(torch.ones(1, 2), divided))
    rank, number = mesh.get_local_rank(), mesh.size()
    whole_numbers = torch.arange(10.0)
    part = whole_numbers[list(balanced(10, number)[rank])]

    def again(piece: Tensor, placement: Shard) -> str:
        made = DTensor.from_local(piece, mesh, [placement], run_check=False, shape=torch.Size([10]), stride=(1,))
        found = made.full_tensor()
        return "the same" if torch.equal(found, whole_numbers) else f"another tensor: {[int(x) for x in found]}"

    sizes = [len(each) for each in balanced(10, number)]
    add(f"10 numbers over {number} as {sizes}, put together as Shard(0)", lambda: again(part, Shard(0)))
    odd = whole_numbers[rank::number]
    if number == 2:
        add("every other index on each rank, put together as Shard(0)", lambda: again(odd, Shard(0)))
    return lines


def _rank(rank: int, number: int, port: int, arguments: argparse.Namespace, what: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=number)
    mesh = init_device_mesh("cpu", (number,))
    if what == "times":
        found = ["| network | what | plain ms | DTensor ms | ratio |", "| --- | --- | --- | --- | --- |"]
        for name in arguments.networks:
            found += times(name, f"filter={number}", mesh, arguments.rounds)
    else:
        found = failures(mesh)
    if rank == 0:
        print("\n".join(found), end="\n\n", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(number: int, arguments: argparse.Namespace, what: str) -> None:
    """On so many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(_rank, (number, port, arguments, what), nprocs=number)


def main() -> None:
    parser = argparse.ArgumentParser(description="Divided parameters as DTensors beside plain parts.")
    parser.add_argument("--networks", nargs="+", default=["resnet50", "alexnet"])
    parser.add_argument("--parts", nargs="+", default=["times", "failures", "layouts"])
    parser.add_argument("--others", nargs="*", default=[], help="more networks whose layouts are counted")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if "times" in arguments.parts:
        run(2, arguments, "times")
    for number in (2, 3) if "failures" in arguments.parts else ():
        run(number, arguments, "failures")
    if "layouts" in arguments.parts:
        print("\n".join(fitting([info.name for info in models.list_models()] + arguments.others)))


if __name__ == "__main__":
    main()
