"""Training in stages beside training on one device, in float64 on real processes.

One device trains by torch's own layers, one part of the batch after the other, and writes down what the ranks are to
have; but for dropout, whose masks are functions of (seed, step, layer, sample). Beside it runs the same network with
its weights perturbed by 1e-15, as a scale for what rounding does.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy import models
from convoy.engine import prepare
from convoy.plans.layout import balanced
from convoy.plans.plan import Plan
from measuring.ranks import Limits, RankFailed, run_ranks
from measuring.stage_cases import UNET

PLANS = ("stage=2", "stage=3", "stage=2,sample=2", "stage=2,filter=2")
SCHEDULES = ("loop", "1f1b", "gpipe", "zero-bubble")
"""`loop` is a plain one: `loss(net(x), y).backward()`; the others are those of `convoy.forward_backward`."""
SEED = 11
KINDS = ("loss", "outputs", "gradients", "inputs", "buffers", "weights")


@dataclass(frozen=True)
class Subject:
    """A network of the table."""

    model: str
    shape: tuple[int, int, int] = (3, 32, 32)  # of an image
    dense: bool = False  # a label for every pixel
    options: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (12, 14)  # sizes of the global batch, one after the other; the second is cut unevenly
    parts: int = 3  # of every rank's samples
    steps: int = 5  # weight updates

    def build(self) -> nn.Module:
        """The network, the same everywhere."""
        torch.manual_seed(0)
        net = models.create(self.model, num_classes=10, in_channels=self.shape[0], **self.options)
        return net.double().train()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Images and labels of an update."""
        random, size = torch.Generator().manual_seed(step), self.batches[step % len(self.batches)]
        labels = torch.randint(0, 10, (size, *(self.shape[1:] if self.dense else ())), generator=random)
        return torch.randn(size, *self.shape, dtype=torch.float64, generator=random), labels


SUBJECTS = {
    "lenet": Subject("lenet", (1, 28, 28)),
    "alexnet": Subject("alexnet-cifar"),
    "vgg11_bn": Subject("vgg11_bn-cifar"),
    "resnet18": Subject("resnet18", (3, 64, 64)),
    "resnet50": Subject("resnet50", (3, 64, 64), steps=3),
    "densenet121": Subject("densenet121", (3, 64, 64), steps=3),
    "googlenet": Subject("googlenet", (3, 64, 64), steps=3),
    "unet": Subject(UNET, dense=True, options={"width": 8, "depth": 3}),
}


@dataclass
class Trained:
    """What a run leaves: the first updates' losses, gradients, input gradients and buffers, and the weights after the
    last with the outputs in evaluation mode at these. Distances are those of two of them."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    outputs: Tensor = field(default_factory=lambda: torch.zeros(()))


@dataclass
class Distance:
    """The largest distance of any tensor, as a part of its largest element."""

    # by kind, with the tensor's name. Weights are those after the last update, all else of the first two
    worst: dict[str, tuple[float, str]] = field(default_factory=lambda: dict.fromkeys(KINDS, (0.0, "")))
    perturbed: float = 0.0  # that of the weights of the perturbed run
    # of gradients and weights that are nothing but rounding, in units of what the perturbation makes
    rounding: float = 0.0

    def note(self, kind: str, name: str, error: float) -> None:
        if not error <= self.worst[kind][0]:
            self.worst[kind] = error, name

    def compare(self, kind: str, name: str, got: Tensor, want: Tensor, perturbed: Tensor, floor: float) -> float:
        """Note a tensor by what the perturbation makes of it, which is returned; 0 where it is nothing but rounding, as
        of a bias before batch norm, whose gradient is zero."""
        error, change = relative(got, want, floor), relative(perturbed, want, floor)
        if change > 1e-10:
            self.rounding = max(self.rounding, error / change)
            return 0.0
        self.note(kind, name, error)
        return change

    @property
    def ok(self) -> bool:
        """Within 1e-9; what is nothing but rounding within ten times what the perturbation makes of it."""
        return self.rounding <= 10 and all(error <= 1e-9 for error, _ in self.worst.values())


def table(
    names: Sequence[str], plans: Sequence[str], schedules: Sequence[str], folder: Path
) -> Iterator[tuple[str, str, str, "Distance | str"]]:
    """A row for each network, plan and schedule: the distance of the rank that is farthest off, or why it failed."""
    for name, plan in itertools.product(names, plans):
        subject, ranks = SUBJECTS[name], Plan.parse(plan).mesh.num_devices
        file = folder / f"{name}-{Plan.parse(plan).parts}.pt"
        if not file.exists():
            run_ranks(_write_serial, 1, subject, Plan.parse(plan).parts, file, limits=Limits(300))
        try:
            found = run_ranks(distances, ranks, subject, plan, schedules, file, limits=Limits(300))
        except (RankFailed, convoy.ConvoyError) as error:
            yield name, plan, ", ".join(schedules), str(error)
            continue
        for schedule, of_ranks in zip(schedules, zip(*found, strict=True), strict=True):
            yield name, plan, schedule, max(of_ranks, key=lambda each: (not each.ok, max(each.worst.values())))


def _write_serial(subject: Subject, sample_ranks: int, file: Path) -> None:
    torch.save([_serial(subject, sample_ranks, perturbed) for perturbed in (False, True)], file)


def _serial(subject: Subject, sample_ranks: int, perturbed: bool) -> Trained:
    net = subject.build()
    if perturbed:
        signs = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1 + 1e-15 * torch.randn(p.shape, dtype=p.dtype, generator=signs).sign())
    context, optimizer, found = prepare(net, SEED, "sync"), _optimizer(net), Trained()
    for step in range(subject.steps):
        images, labels = subject.batch(step)
        images.requires_grad_()
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in _parts(len(images), sample_ranks, subject.parts):
            context.enter(step, part.start, (len(part),), images.device)
            own = slice(part.start, part.stop)
            term = loss_of(net(images[own]), labels[own]) * (len(part) / len(images))
            term.backward()
            total += term.detach()
        gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        _keep(found, subject, step, total, gradients, images.grad, dict(net.named_buffers()))
        optimizer.step()
    found.state = net.state_dict()
    with torch.no_grad():
        found.outputs = _first(net.eval()(subject.batch(99)[0]))
    return found


def _parts(samples: int, sample_ranks: int, parts: int) -> Iterator[range]:
    """Those of every rank's samples, which have batch norm by themselves, in the order of the samples."""
    for own in balanced(samples, sample_ranks):
        for part in balanced(len(own), parts):
            yield own[part.start : part.stop]


def distances(subject: Subject, plan: str, schedules: Sequence[str], file: Path) -> list[Distance]:
    """A rank's training under a plan beside what one device has written down. All ranks call it."""
    serial, perturbed = torch.load(file, weights_only=False)
    return [_distance(subject, plan, schedule, serial, perturbed) for schedule in schedules]


def _distance(subject: Subject, plan: str, schedule: str, serial: Trained, perturbed: Trained) -> Distance:
    example = torch.zeros(2, *subject.shape, dtype=torch.float64)
    net = convoy.parallelize(
        subject.build(), plan, example=example, batch_norm="microbatch", seed=SEED, microbatches=subject.parts
    )
    optimizer, found = _optimizer(net), Distance()
    for step in range(subject.steps):
        images, labels = subject.batch(step)
        mine = convoy.local_samples(net, len(images))
        own = images[mine].clone().requires_grad_()
        optimizer.zero_grad()
        if schedule == "loop":
            loss = loss_of(net(own), labels[mine])
            loss.backward()
        else:
            loss = convoy.forward_backward(net, own, labels[mine], loss_of, schedule=schedule)  # type: ignore[arg-type]
        if step < len(subject.batches):
            _compare_update(found, step, net, loss, own, mine, serial, perturbed)
        optimizer.step()
    state = convoy.state_dict(net)
    assert state.keys() == serial.state.keys(), state.keys() ^ serial.state.keys()
    largest = max(want.abs().max().item() for want in serial.state.values() if want.numel())
    for name, want in serial.state.items():
        change = found.compare("weights", name, state[name], want, perturbed.state[name], 1e-9 * largest)
        found.perturbed = max(found.perturbed, change)
    convoy.load_state_dict(net, serial.state)  # outputs of other weights, however near, say nothing about evaluation
    images, _ = subject.batch(99)
    mine = convoy.local_samples(net, len(images))
    with torch.no_grad():
        found.note("outputs", "", relative(_first(net.eval()(images[mine])), serial.outputs[mine]))
    return found


def _compare_update(
    found: Distance,
    step: int,
    net: nn.Module,
    loss: Tensor,
    images: Tensor,
    mine: slice,
    serial: Trained,
    perturbed: Trained,
) -> None:
    means = convoy.global_mean(net, loss.detach().expand(len(images)))
    found.note("loss", "", relative(means, serial.losses[step]))
    gradients, want = convoy.gradients(net), serial.gradients[step]
    assert gradients.keys() == want.keys(), gradients.keys() ^ want.keys()
    largest = max(gradient.abs().max().item() for gradient in want.values())
    for name, gradient in want.items():
        found.compare("gradients", name, gradients[name], gradient, perturbed.gradients[step][name], 1e-9 * largest)
    assert images.grad is not None
    found.note("inputs", "", relative(images.grad, serial.inputs[step][mine]))
    state = convoy.state_dict(net)
    for name, buffer in serial.buffers[step].items():
        found.note("buffers", name, relative(state[name], buffer))


def _keep(
    found: Trained,
    subject: Subject,
    step: int,
    loss: Tensor,
    gradients: dict[str, Tensor],
    inputs: Tensor | None,
    buffers: dict[str, Tensor],
) -> None:
    if step < len(subject.batches):
        assert inputs is not None
        found.losses.append(loss)
        found.gradients.append(gradients)
        found.inputs.append(inputs.clone())
        found.buffers.append({name: buffer.clone() for name, buffer in buffers.items()})


def relative(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """Largest difference as a part of the largest element."""
    assert got.shape == want.shape, (got.shape, want.shape)
    if not want.numel():
        return 0.0
    return ((got - want).abs().max().double() / max(want.abs().max().item(), floor, 1e-300)).item()


def loss_of(outputs: Any, labels: Tensor) -> Tensor:
    """Cross-entropy, that of auxiliary heads with a weight of 0.3."""
    heads = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    terms = [(0.3 if number else 1.0) * F.cross_entropy(head, labels) for number, head in enumerate(heads)]
    return torch.stack(terms).sum()


def _first(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
