"""Trains a network under a plan and serially, in float64 on real processes, and tells how far apart they are."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy import models
from convoy.engine import StepContext, prepare
from convoy.engine.microbatches import microbatch_sizes
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
    that after the last.
    """

    loss: float = 0.0
    gradient: float = 0.0
    input_gradient: float = 0.0
    buffer: float = 0.0
    state: float = 0.0
    control: float = 0.0
    where: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, name: str, error: float) -> None:
        if error > getattr(self, kind) or error != error:
            setattr(self, kind, error)
            self.where[kind] = name

    @property
    def ok(self) -> bool:
        tight = max(self.loss, self.gradient, self.input_gradient, self.buffer) <= 1e-9
        return tight and self.state <= max(1e-9, 10 * self.control)


def build(name: str, size: int | None = None) -> tuple[nn.Module, tuple[int, int, int]]:
    """A network of Convoy's or of `small_nets`, for 10 classes, and the shape of its images."""
    torch.manual_seed(0)
    channels, default = IMAGE.get(name, (3, 32))
    size = size or default
    if name in SMALL_NETS:
        return SMALL_NETS[name]().double(), (channels, size, size)
    options: dict[str, Any] = {"image_size": size} if models.accepts(name, "image_size") else {}
    return models.create(name, num_classes=10, in_channels=channels, **options).double(), (channels, size, size)


def relative(got: Tensor, want: Tensor, scale: float) -> float:
    return ((got - want).abs().max() / max(want.abs().max().item(), 1e-9 * scale, 1e-300)).item()


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
) -> Distance:
    """Run on every rank; the same on each of them.

    The serial run computes one microbatch after the other by torch's own layers, but for dropout, whose masks are
    functions of (seed, step, layer, sample).

    Args:
        name: the network.
        plan: the plan.
        batches: sizes of the global batch, one after the other.
        steps: weight updates.
        sabotage: name of a function in `sabotages` that breaks the engine on purpose; what follows a colon is its
            second argument.
        device: where all of it runs.
        microbatches: over how many parts of the batch batch norm takes its statistics one by one.
    """
    serial, shape = build(name, size)
    serial.to(device).train()
    perturbed = copy.deepcopy(serial)
    with torch.no_grad():
        for p in perturbed.parameters():
            signs = torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(5)).sign()
            p.mul_(1 + 1e-15 * signs.to(device))
    example = torch.zeros(2, *shape, dtype=torch.float64, device=device)
    mode = "sync" if microbatches == 1 else "microbatch"
    net = convoy.parallelize(copy.deepcopy(serial), plan, example=example, batch_norm=mode, seed=SEED)
    contexts = {"serial": prepare(serial, SEED, "sync"), "perturbed": prepare(perturbed, SEED, "sync")}
    if sabotage is not None:
        import sabotages

        kind, _, argument = sabotage.partition(":")
        getattr(sabotages, kind)(net, *filter(None, [argument]))
    nets = {"serial": serial, "perturbed": perturbed, "parallel": net}
    optimizers = {
        kind: torch.optim.SGD(n.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4) for kind, n in nets.items()
    }
    generator = torch.Generator().manual_seed(1)
    found = Distance()
    for step in range(steps):
        batch = batches[step % len(batches)]
        x = torch.randn(batch, *shape, dtype=torch.float64, generator=generator).to(device)
        y = torch.randint(0, 10, (batch,), generator=generator).to(device)
        sizes = microbatch_sizes(batch, microbatches)
        mine = convoy.local_samples(net, batch) if microbatches == 1 else _announce(net, step, sizes, x.device)
        losses, inputs = {}, {}
        for kind, n in nets.items():
            inputs[kind] = (x[mine] if kind == "parallel" else x).clone().requires_grad_()
            optimizers[kind].zero_grad()
            if kind == "parallel":
                losses[kind] = _loss(n(inputs[kind]), y[mine])
                losses[kind].backward()
                network_of(n).context.statistics.fold(network_of(n).groups)
            else:
                losses[kind] = _one_by_one(n, contexts[kind], step, inputs[kind], y, sizes)
        if step < len(batches):
            _compare_gradients(found, serial, net)
            _compare_buffers(found, serial, net)
            loss = losses["parallel"].detach().nan_to_num() * len(y[mine]) / batch
            _compare_loss(found, net, loss, losses["serial"])
            if inputs["parallel"].numel():
                want = inputs["serial"].grad[mine]
                found.note("input_gradient", "input", relative(inputs["parallel"].grad, want, 1.0))
        for optimizer in optimizers.values():
            optimizer.step()
    want, drifted, got = serial.state_dict(), perturbed.state_dict(), convoy.state_dict(net)
    assert want.keys() == got.keys(), set(want) ^ set(got)
    for key, value in want.items():
        assert got[key].shape == value.shape, (key, got[key].shape, value.shape)
        found.note("state", key, relative(got[key].double(), value.double(), 1.0))
        found.note("control", key, relative(drifted[key].double(), value.double(), 1.0))
    for n in nets.values():
        n.eval()
    x = torch.randn(5, *shape[:1], eval_size or shape[1], eval_size or shape[2], dtype=torch.float64).to(device)
    network_of(net).samples = None
    mine = convoy.local_samples(net, 5)
    with torch.no_grad():
        outputs, whole = _first(net(x[mine])), _first(serial(x))
    if outputs.numel():
        found.note("loss", "evaluation", relative(outputs, whole[mine], 1.0) if found.state < 1e-7 else 0.0)
    return found


def run(net: str, plan: Any, options: dict[str, Any]) -> Distance:
    """`distance`, as a body for `run_ranks`."""
    return distance(net, plan, **options)


def _one_by_one(
    net: nn.Module, context: StepContext, step: int, images: Tensor, labels: Tensor, sizes: tuple[int, ...]
) -> Tensor:
    """Add up the gradients of the microbatches' part of the mean loss; that loss."""
    total, start = images.new_zeros(()), 0
    for size in sizes:
        end = start + size
        context.enter(step, start, (size,), images.device)
        loss = _loss(net(images[start:end]), labels[start:end]) * (size / len(images))
        loss.backward()
        total, start = total + loss.detach(), end
    return total


def _announce(net: nn.Module, step: int, sizes: tuple[int, ...], device: torch.device) -> slice:
    """Tell the engine of a pass over all microbatches, as the trainer does; this rank's samples."""
    network = network_of(net)
    (piece,) = divide(sizes, network.num_sample_ranks).passes(len(sizes))
    network.samples = tuple(map(len, piece.parts))
    network.context.enter(step, piece.positions, piece.sizes, device)
    own = piece.parts[network.sample_rank]
    return slice(own.start, own.stop)


def _compare_gradients(found: Distance, serial: nn.Module, net: nn.Module) -> None:
    want = {name: p.grad for name, p in serial.named_parameters() if p.grad is not None}
    got = convoy.gradients(net)
    assert want.keys() == got.keys(), set(want) ^ set(got)
    scale = max(gradient.abs().max().item() for gradient in want.values())
    for name, gradient in want.items():
        found.note("gradient", name, relative(got[name], gradient, scale))


def _compare_buffers(found: Distance, serial: nn.Module, net: nn.Module) -> None:
    want = dict(serial.named_buffers())
    for name, buffer in net.named_buffers():
        found.note("buffer", name, relative(network_of(net).whole(name, buffer).double(), want[name].double(), 1.0))


def _compare_loss(found: Distance, net: nn.Module, share: Tensor, want: Tensor) -> None:
    """Shares of the ranks that have different samples add up to the loss."""
    share = share.cpu()  # gloo's ranks may share a GPU
    group = network_of(net).groups.of(network_of(net).sample_axes)
    if group is not None:
        torch.distributed.all_reduce(share, group=group)
    found.note("loss", "loss", abs(share.item() - want.item()) / abs(want.item()))


def _loss(outputs: Any, labels: Tensor) -> Tensor:
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs, labels)
    heads = [head for head in (vars(outputs).values() if hasattr(outputs, "__dict__") else outputs) if head is not None]
    weights = (1.0, 0.3, 0.3)
    return sum(w * F.cross_entropy(head, labels) for w, head in zip(weights, heads, strict=False))  # type: ignore[return-value]


def _first(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else next(iter(outputs))
