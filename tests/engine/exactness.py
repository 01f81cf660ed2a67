"""Trains a network under a plan and serially, in float64 on real processes, and says what differs; ways to break it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from odd_nets import ODD_NETS, UNCAPTURED
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

import convoy
from convoy import models
from convoy.engine.coupling import microbatch_sizes
from convoy.engine.network import Network, network_of
from convoy.engine.uncaptured import drawing
from convoy.ops.context import StepContext
from convoy.ops.memory import Readers
from convoy.ops.postponed import PostponedGradients
from convoy.ops.random_bits import drop, fold, layer_key
from convoy.training.division import divide
from small_nets import SMALL_NETS

SEED, TOLERANCE = 11, 1e-9
IMAGE = {"lenet": (1, 28), "squeezenet1_1": (3, 48), "alexnet": (3, 64), "alexnet-2012": (3, 67), "googlenet": (3, 64)}


def build(name: str, size: int | None = None) -> tuple[nn.Module, tuple[int, int, int]]:
    """A network of Convoy's, of `small_nets` or of `odd_nets`, for 10 classes, and the shape of its images."""
    torch.manual_seed(0)
    if name in ODD_NETS:
        return ODD_NETS[name]().double(), (3, 8, 8)
    channels, default = IMAGE.get(name, (3, 32))
    size = size or default
    if name in SMALL_NETS:
        return SMALL_NETS[name]().double(), (channels, size, size)
    options: dict[str, Any] = {"image_size": size} if models.accepts(name, "image_size") else {}
    net = models.create(name, num_classes=10, in_channels=channels, **options)
    for path, layer in list(net.named_modules()):  # 512 units for 4096: AlexNet and VGG would take 20 GB in float64
        if isinstance(layer, nn.Linear) and 4096 in (layer.in_features, layer.out_features):
            sizes = (512 if number == 4096 else number for number in (layer.in_features, layer.out_features))
            net.set_submodule(path, nn.Linear(*sizes))
    return net.double(), (channels, size, size)


def relative(got: Tensor, want: Tensor, floor: float = 1e-300) -> float:
    """The largest difference, as a part of the largest element or of `floor`, whichever is larger."""
    return ((got.double() - want.double()).abs().max() / max(want.abs().max().item(), floor)).item()


def worst_gradient(net: nn.Module, plain: nn.Module) -> float:
    """The largest error of a gradient; infinite where one has a gradient that the other lacks.

    Errors are parts of the gradient's largest element, and where that is next to zero of 1e-5 of the largest gradient:
    a bias before batch norm has nothing but rounding, in another order under a plan.
    """
    got, want = convoy.gradients(net), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    floor = 1e-5 * max(float(gradient.abs().max()) for gradient in want.values())
    return max(relative(got[n], want[n], floor) if n in got and n in want else float("inf") for n in got | want)


def follow_samples(net: nn.Module, context: StepContext) -> None:
    """Let the masks of a plain network's dropout layers be functions of (seed, step, layer, sample)."""
    context.need_keys()
    for name, layer in net.named_modules():
        if isinstance(layer, _DropoutNd):
            key, channels = layer_key(name), type(layer) is not nn.Dropout
            layer.forward = lambda x, of=layer, key=key, channels=channels: (
                drop(x, context.keys, key, of.p, channels) if of.training else x
            )


class Serial:
    """Trains one microbatch after the other by torch's own layers, but for dropout, whose masks follow the samples, or,
    in a network that cannot be captured, (seed, step, first sample)."""

    def __init__(self, net: nn.Module, is_captured: bool) -> None:
        self.net, self.context, self.optimizer = net, StepContext(SEED), sgd(net)
        if is_captured:
            follow_samples(net, self.context)

    def backward(self, step: int, images: Tensor, labels: Tensor, sizes: tuple[int, ...]) -> None:
        """Add up the gradients of the microbatches' parts of the mean loss."""
        self.optimizer.zero_grad()
        self.images, self.loss, start = images.clone().requires_grad_(), images.new_zeros(()), 0
        for size in sizes:
            self.context.enter(step, start, (size,), images.device)
            part = slice(start, start + size)
            with drawing(fold(SEED, step, start), images.device):
                loss = loss_of(self.net.train()(self.images[part] * 1), labels[part]) * (size / len(images))
            loss.backward()
            self.loss, start = self.loss + loss.detach(), part.stop


def distance(
    name: str,
    plan: Any,
    batches: tuple[int, ...] = (6, 7),
    steps: int = 3,
    sabotage: str = "",
    size: int | None = None,
    device: str = "cpu",
    microbatches: int = 1,
    turns: bool = False,
    schedule: Any = None,
    tolerance: float = TOLERANCE,
) -> dict[str, float]:
    """What differs from the serial run, which every rank makes for itself, and how much of itself; run on every rank.

    Global batches have the `batches`' sizes in turn; gradients and buffers are compared after each size, weights and
    outputs in evaluation after all `steps`, to `tolerance`. `sabotage` is a name in `SABOTAGES`, `size` that of images.
    Batch norm takes statistics over `microbatches` parts of the batch one by one, which go through stages by `schedule`
    ("loop" leaves them to a pass of the network). With `turns` the network is made parallel in evaluation and in
    inference mode, and evaluated so before every update.
    """
    (model, shape), serial = build(name, size), Serial(build(name, size)[0].to(device), not name.startswith(UNCAPTURED))
    model.to(device).train(not turns)
    example = torch.zeros(2, *shape, dtype=torch.float64, device=device)
    options: dict[str, Any] = {"microbatches": microbatches} if schedule else {}
    options["batch_norm"] = "sync" if microbatches == 1 else "microbatch"
    with torch.inference_mode(turns):
        net = convoy.parallelize(model, plan, example, seed=SEED, checks=not sabotage, **options)
    network = network_of(net)
    SABOTAGES[sabotage](net)
    optimizer, generator, differences = sgd(net), torch.Generator().manual_seed(1), dict[str, float]()

    def compare(what: str, got: Tensor, want: Tensor, floor: float = 1e-300, allowed: float = TOLERANCE) -> None:
        assert got.shape == want.shape, (what, got.shape, want.shape)
        if got.numel() and not (error := relative(got, want, floor)) <= allowed:
            differences[what] = max(error, differences.get(what, 0.0))

    def evaluate(x: Tensor) -> None:
        mine = convoy.local_samples(net, len(x))
        with torch.inference_mode():
            compare("evaluation", heads(net.eval()(x[mine]))[0], heads(serial.net.eval()(x))[0][mine])

    for step in range(steps):
        batch = batches[step % len(batches)]
        x = torch.randn(batch, *shape, dtype=torch.float64, generator=generator).to(device)
        y = torch.randint(0, 10, (batch,), generator=generator).to(device)
        sizes = microbatch_sizes(batch, microbatches)
        is_announced = microbatches > 1 and not schedule
        mine = announce(net, step, sizes, x.device) if is_announced else convoy.local_samples(net, batch)
        if turns:
            evaluate(x)
        serial.backward(step, x, y, sizes)
        optimizer.zero_grad()
        own = x[mine].clone().requires_grad_()
        images = own if schedule else own * 1  # a network may change its input, and keeps it unless its code says so
        if schedule in (None, "loop"):
            loss = loss_of(net.train()(images), y[mine])
            assert torch.equal(images, own), "the images are overwritten"
            loss.backward()
        else:
            loss = convoy.forward_backward(net.train(), images, y[mine], loss_of, schedule=schedule)
        network.context.statistics.fold(network.groups)
        if step < len(batches):
            total = loss.detach().nan_to_num().cpu() * len(y[mine]) / batch  # gloo's ranks may share a GPU
            if (group := network.groups.of(network.sample_axes)) is not None:
                dist.all_reduce(total, group=group)
            compare("loss", total, serial.loss.cpu())
            if not (error := worst_gradient(net, serial.net)) <= TOLERANCE:
                differences["gradients"] = error
            compare("input gradient", own.new_zeros(0) if own.grad is None else own.grad, serial.images.grad[mine])
            for buffer, value in net.named_buffers():
                compare(buffer, network.whole(buffer, value), serial.net.get_buffer(buffer))
        serial.optimizer.step()
        optimizer.step()
    got, want = convoy.state_dict(net), serial.net.state_dict()
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    floor = 1e-5 * max(float(p.detach().abs().max()) for p in serial.net.parameters())
    for key in want:
        compare(f"{key} at the end", got[key], want[key], floor, tolerance)
    network.samples = None
    convoy.load_state_dict(net, want)  # outputs of other weights, however near, say nothing about evaluation
    evaluate(torch.randn(5, *shape, dtype=torch.float64, generator=generator).to(device))
    assert plan == "serial" or network.captured.startswith("whole on every rank") == name.startswith(UNCAPTURED)
    assert len(network._programs) <= 2 * len(set(batches)) + 2, "programs of modes that are gone"
    return differences


def all_distances(cases: list[tuple[str, Any, dict[str, Any]]]) -> list[dict[str, float]]:
    """What differs in each case (network, plan, options), on this rank."""
    results = []
    for name, plan, options in cases:
        try:
            results.append(distance(name, plan, **options))
        except BaseException as error:
            error.add_note(f"{name} under {plan}, {options}")
            raise
    return results


def announce(net: nn.Module, step: int, sizes: tuple[int, ...], device: torch.device) -> slice:
    """Tell the engine of a pass over all microbatches, as the trainer does; this rank's samples."""
    network = network_of(net)
    (piece,) = divide(sizes, network.num_sample_ranks).passes(len(sizes))
    network.samples = tuple(map(len, piece.parts))
    network.context.enter(step, piece.positions, piece.sizes, device)
    part = piece.parts[network.sample_rank]
    return slice(part.start, part.stop)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def loss_of(outputs: Any, labels: Tensor) -> Tensor:
    """Of all outputs, which users may change in place; those without a class for each sample count by their squares."""
    total = torch.zeros((), dtype=torch.float64, device=labels.device)
    for weight, head in zip((1.0, 0.3, 0.3), heads(outputs), strict=False):
        if head.is_floating_point():
            head = head.mul_(0.5) if isinstance(outputs, dict) else head
            is_classes = head.dim() == 2 and len(head) == len(labels)
            total = total + weight * (F.cross_entropy(head, labels) if is_classes else head.square().mean())
    return total


def heads(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    fields = vars(outputs) if hasattr(outputs, "__dict__") else outputs
    return [head for head in (fields.values() if isinstance(fields, dict) else fields) if head is not None]


def _unweighted_mean(net: nn.Module) -> None:
    """Every rank's mean counts the same, however many samples it has."""
    network = network_of(net)
    network.weigh = lambda output, samples: Network.weigh(network, output, (1,) * len(samples))


def _other_seeds(net: nn.Module) -> None:
    network_of(net).context.seed += dist.get_rank()


def _three_parts(gradients: PostponedGradients, last: int, compute: Any = PostponedGradients.compute) -> Any:
    """The weight gradients of the first three parts alone."""
    return compute(gradients, min(last, 2))


SABOTAGES: dict[str, Callable[..., object]] = {
    "": lambda net: None,
    "local batch norm": lambda net: setattr(network_of(net).context, "batch_norm", "local"),
    "unweighted mean": _unweighted_mean,
    "missing gradient sum": lambda net: network_of(net).reducer.remove(),
    "wrong dropout key": _other_seeds,
    "careless overwriting": lambda net: setattr(Readers, "is_spare", lambda *_: True),
    "missing weight gradients": lambda net: setattr(PostponedGradients, "compute", _three_parts),
}
"""Ways to break the engine on purpose, every one of which must be noticed."""
