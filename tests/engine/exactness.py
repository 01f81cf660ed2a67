"""Trains a network under a plan and serially, in float64 on real processes, and tells how far apart they are."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from odd_nets import ODD_NETS
from torch import Tensor, nn

import convoy
from convoy import models
from convoy.engine import prepare
from convoy.engine.coupling import microbatch_sizes
from convoy.engine.network import network_of
from convoy.training.division import divide
from small_nets import SMALL_NETS

STEPS = 5
SEED = 11
IMAGE = {"lenet": (1, 28), "squeezenet1_1": (3, 48), "alexnet": (3, 64), "alexnet-2012": (3, 67), "googlenet": (3, 64)}


@dataclass
class Distance:
    """The worst relative errors; `control` is how far a serial run drifts when its weights are perturbed.

    The loss, gradients and buffers are those of the first updates, as many as there are sizes of batches, the state is
    that after the last. A gradient that the perturbation changes by more than 1e-10 of itself is nothing but rounding,
    as that of a bias before batch norm, which is zero; `rounding` is the worst of these, in `rounding_of` it.
    """

    loss: float = 0.0
    gradient: float = 0.0
    rounding: float = 0.0
    input_gradient: float = 0.0
    buffer: float = 0.0
    state: float = 0.0
    control: float = 0.0
    captured: str = ""
    where: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, name: str, error: float) -> None:
        if error > getattr(self, kind) or error != error:
            setattr(self, kind, error)
            self.where[kind] = name

    @property
    def ok(self) -> bool:
        tight = max(self.loss, self.gradient, self.input_gradient, self.buffer) <= 1e-9
        return tight and self.rounding <= 10 and self.state <= max(1e-9, 10 * self.control)


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
    net = narrowed(models.create(name, num_classes=10, in_channels=channels, **options))
    return net.double(), (channels, size, size)


def narrowed(net: nn.Module) -> nn.Module:
    """The network with 512 units in place of each 4096: AlexNet and VGG in float64, with a reference beside them, would
    take 20 GB."""
    for name, layer in list(net.named_modules()):
        if isinstance(layer, nn.Linear) and 4096 in (layer.in_features, layer.out_features):
            sizes = (512 if size == 4096 else size for size in (layer.in_features, layer.out_features))
            net.set_submodule(name, nn.Linear(*sizes))
    return net


def relative(got: Tensor, want: Tensor, scale: float) -> float:
    return ((got - want).abs().max() / max(want.abs().max().item(), 1e-9 * scale, 1e-300)).item()


def rounding_of(changed: Tensor, value: Tensor, largest: float) -> float:
    """How much of a gradient is rounding, relative as its errors are; more than 1e-10 if it is nothing else.

    What the perturbation changes, and all of a gradient that is zero in exact arithmetic: a sum over thousands of
    elements is rounded according to its order, which a perturbation leaves as it is, and a plan does not.

    Args:
        changed: the gradient of the perturbed serial run.
        value: that of the serial run.
        largest: element of all gradients.
    """
    change, size = relative(changed, value, largest), value.abs().max().item()
    return max(change, size / (1e-9 * largest)) if change > 1e-10 and size < 1e-13 * largest else change


def distance(
    name: str,
    plan: Any,
    batches: tuple[int, ...] = (6, 7),
    steps: int = STEPS,
    sabotage: str | None = None,
    size: int | None = None,
    eval_size: int | None = None,
    device: str = "cpu",
    microbatches: int = 1,
    turns: bool = False,
    schedule: Any = None,
) -> Distance:
    """Run on every rank: each compares its own part and all that is whole with the serial run of the first one.

    Args:
        name: the network.
        plan: the plan.
        batches: sizes of the global batch, one after the other.
        steps: weight updates.
        sabotage: name of a function in `sabotages` that breaks the engine on purpose; what follows a colon is its
            second argument.
        device: where all of it runs.
        microbatches: over how many parts of the batch batch norm takes its statistics one by one.
        turns: made parallel in evaluation and in inference mode, and evaluated so before every update.
        schedule: of `microbatches` parts of the batch through stages; "loop" leaves them to a pass of the network.
    """
    model, shape = build(name, size)
    model.to(device).train()
    alone = _alone(lambda: build(name, size)[0].to(device).train())
    model.train(not turns)
    example = torch.zeros(2, *shape, dtype=torch.float64, device=device)
    mode = "sync" if microbatches == 1 else "microbatch"
    checks = sabotage is None  # which would notice some of them first
    with torch.inference_mode(turns):
        options: dict[str, Any] = {"microbatches": microbatches} if schedule else {}
        net = convoy.parallelize(model, plan, example, batch_norm=mode, seed=SEED, checks=checks, **options)
    if sabotage is not None:
        import sabotages

        kind, _, argument = sabotage.partition(":")
        getattr(sabotages, kind)(net, *filter(None, [argument]))
    optimizer = _optimizer(net)
    generator = torch.Generator().manual_seed(1)
    found = Distance()
    for step in range(steps):
        batch = batches[step % len(batches)]
        x = torch.randn(batch, *shape, dtype=torch.float64, generator=generator).to(device)
        y = torch.randint(0, 10, (batch,), generator=generator).to(device)
        sizes = microbatch_sizes(batch, microbatches)
        alike = microbatches == 1 or schedule
        mine = convoy.local_samples(net, batch) if alike else _announce(net, step, sizes, x.device)
        if turns:
            _evaluate(found, net, alone.get("serial"), x)
        for one in alone.values():
            one.backward(step, x, y, sizes)
        optimizer.zero_grad()
        own = x[mine].clone().requires_grad_()
        images = own if schedule else own * 1  # a network may change its input, and keeps it unless its code says so
        if schedule in (None, "loop"):
            loss = _loss(net.train()(images), y[mine])
            assert torch.equal(images, own), "the images are overwritten"
            loss.backward()
        else:
            loss = convoy.forward_backward(net.train(), images, y[mine], _loss, schedule=schedule)
        network_of(net).context.statistics.fold(network_of(net).groups)
        if step < len(batches):
            _compare(found, net, loss.detach().nan_to_num() * len(y[mine]) / batch, own, mine, alone)
        for one in alone.values():
            one.optimizer.step()
        optimizer.step()
    serial, perturbed = alone.get("serial"), alone.get("perturbed")
    got, final = convoy.state_dict(net), {}
    for key, value in _sent(serial and serial.net.state_dict(), got.keys(), device):
        final[key] = value.clone()
        assert got[key].shape == value.shape, (key, got[key].shape, value.shape)
        found.note("state", key, relative(got[key].double(), value.double(), 1.0))
        if perturbed is not None:
            found.note("control", key, relative(perturbed.net.state_dict()[key].double(), value.double(), 1.0))
    control = torch.tensor(found.control, dtype=torch.float64)
    dist.all_reduce(control, op=dist.ReduceOp.MAX)
    found.control = control.item()
    x = torch.randn(
        5, *shape[:1], eval_size or shape[1], eval_size or shape[2], dtype=torch.float64, generator=generator
    )
    network_of(net).samples = None
    convoy.load_state_dict(net, final)  # outputs of other weights, however near, say nothing about evaluation
    _evaluate(found, net, serial, x.to(device))
    found.captured = network_of(net).captured
    assert len(network_of(net)._programs) <= 2 * len(set(batches)) + 2, "programs of modes that are gone"
    return found


def run(net: str, plan: Any, options: dict[str, Any]) -> Distance:
    """`distance`, as a body for `run_ranks`."""
    return distance(net, plan, **options)


class _Alone:
    """A network that a rank trains by itself, one microbatch after the other, by torch's own layers, but for dropout,
    whose masks are functions of (seed, step, layer, sample)."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.context = prepare(net, SEED, "sync")
        self.optimizer = _optimizer(net)

    def backward(self, step: int, images: Tensor, labels: Tensor, sizes: tuple[int, ...]) -> None:
        """Add up the gradients of the microbatches' parts of the mean loss."""
        self.optimizer.zero_grad()
        self.images = images.clone().requires_grad_()
        self.loss, start = images.new_zeros(()), 0
        for size in sizes:
            end = start + size
            self.context.enter(step, start, (size,), images.device)
            loss = _loss(self.net.train()(self.images[start:end] * 1), labels[start:end]) * (size / len(images))
            loss.backward()
            self.loss, start = self.loss + loss.detach(), end


def _alone(build: Callable[[], nn.Module]) -> dict[str, _Alone]:
    """The serial run on the first rank, and that from perturbed weights on the last one."""
    found = {}
    if dist.get_rank() == 0:
        found["serial"] = _Alone(build())
    if dist.get_rank() == dist.get_world_size() - 1:
        perturbed = build()
        with torch.no_grad():
            for p in perturbed.parameters():
                signs = torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(5)).sign()
                p.mul_(1 + 1e-15 * signs.to(p.device))
        found["perturbed"] = _Alone(perturbed)
    return found


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def _sent(
    tensors: dict[str, Tensor] | None, names: Iterable[str], device: torch.device | str
) -> Iterator[tuple[str, Tensor]]:
    """The first rank's tensors on every rank, one after the other; `names` are those that there must be."""
    facts = [None if tensors is None else {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}]
    dist.broadcast_object_list(facts, src=0)
    assert facts[0] is not None
    assert facts[0].keys() == set(names), facts[0].keys() ^ set(names)
    for name, (shape, dtype) in facts[0].items():
        value = torch.empty(shape, dtype=dtype) if tensors is None else tensors[name].detach().cpu().contiguous()
        dist.broadcast(value, src=0)
        yield name, value.to(device)


def _announce(net: nn.Module, step: int, sizes: tuple[int, ...], device: torch.device) -> slice:
    """Tell the engine of a pass over all microbatches, as the trainer does; this rank's samples."""
    network = network_of(net)
    (piece,) = divide(sizes, network.num_sample_ranks).passes(len(sizes))
    network.samples = tuple(map(len, piece.parts))
    network.context.enter(step, piece.positions, piece.sizes, device)
    own = piece.parts[network.sample_rank]
    return slice(own.start, own.stop)


def _compare(
    found: Distance, net: nn.Module, loss: Tensor, images: Tensor, mine: slice, alone: dict[str, _Alone]
) -> None:
    """One update against the serial one, which the first rank has.

    Args:
        loss: this rank's samples' part of the loss, on every rank of a model group.
        images: this rank's samples, with their gradient.
        mine: which samples of the batch they are.
    """
    serial, perturbed = alone.get("serial"), alone.get("perturbed")
    got, network = convoy.gradients(net), network_of(net)
    buffers = {name: network.whole(name, buffer) for name, buffer in net.named_buffers()}
    loss = loss.cpu()  # gloo's ranks may share a GPU
    group = network.groups.of(network.sample_axes)
    if group is not None:
        dist.all_reduce(loss, group=group)
    want = scale = None
    if serial is not None:
        want = {name: p.grad for name, p in serial.net.named_parameters() if p.grad is not None}
        scale = {"": torch.stack([gradient.abs().max() for gradient in want.values()]).max()}
    (largest,) = (value.item() for _, value in _sent(scale, [""], images.device))
    errors, changes = [], []
    for name, value in _sent(want, got, images.device):
        errors.append((name, relative(got[name], value, largest)))
        changed = perturbed.net.get_parameter(name).grad if perturbed is not None else value
        changes.append(rounding_of(changed, value, largest))
    control = torch.tensor(changes, dtype=torch.float64)
    dist.broadcast(control, src=dist.get_world_size() - 1)
    for (name, error), change in zip(errors, control.tolist(), strict=True):
        is_rounding = change > 1e-10
        found.note("rounding" if is_rounding else "gradient", name, error / change if is_rounding else error)
    for name, value in _sent(serial and dict(serial.net.named_buffers()), buffers, images.device):
        found.note("buffer", name, relative(buffers[name].double(), value.double(), 1.0))
    for _, value in _sent(serial and {"loss": serial.loss}, ["loss"], "cpu"):
        found.note("loss", "loss", relative(loss, value, 1.0))
    for name, value in _sent(serial and {"input": serial.images.grad}, ["input"], images.device):
        if images.numel():
            found.note("input_gradient", name, relative(images.grad, value[mine], 1.0))


def _evaluate(found: Distance, net: nn.Module, serial: _Alone | None, x: Tensor) -> None:
    """Outputs in evaluation and inference mode, against the serial run's."""
    mine = convoy.local_samples(net, len(x))
    with torch.inference_mode():
        outputs = _heads(net.eval()(x[mine]))[0]
        whole = {"outputs": _heads(serial.net.eval()(x))[0]} if serial is not None else None
    for _, value in _sent(whole, ["outputs"], x.device):
        if outputs.numel():
            found.note("loss", "evaluation", relative(outputs, value[mine], 1.0))


def _loss(outputs: Any, labels: Tensor) -> Tensor:
    """Of all outputs, which users may change in place; those without a class for each sample count by their squares."""
    total = torch.zeros((), dtype=torch.float64, device=labels.device)
    for weight, head in zip((1.0, 0.3, 0.3), _heads(outputs), strict=False):
        if head.is_floating_point():
            head = head.mul_(0.5) if isinstance(outputs, dict) else head
            is_classes = head.dim() == 2 and len(head) == len(labels)
            total = total + weight * (F.cross_entropy(head, labels) if is_classes else head.square().mean())
    return total


def _heads(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    fields = vars(outputs) if hasattr(outputs, "__dict__") else outputs
    return [head for head in (fields.values() if isinstance(fields, dict) else fields) if head is not None]


def worst_gradient(net: nn.Module, plain: nn.Module) -> float:
    """The largest difference; infinite where one has a gradient that the other lacks."""
    found, known = convoy.gradients(net), dict(plain.named_parameters())
    if set(found) != {name for name, p in known.items() if p.grad is not None}:
        return float("inf")
    return max(relative(gradient, known[name].grad, 1.0) for name, gradient in found.items())
