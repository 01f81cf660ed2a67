"""Cross-entropy of logits whose classes are divided over ranks: the logits are never gathered.

A head with a million classes is so trained with each rank holding its share of them, the way face recognition does
(Deng et al., ArcFace, 2019; An et al., Partial FC, 2021): per sample, the ranks exchange three numbers.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from convoy.comm.collectives import all_gather, all_reduce
from convoy.comm.groups import Groups
from convoy.comm.redistribution import redistribute
from convoy.engine.network import network_of
from convoy.errors import ConvoyError
from convoy.plans import Layout, transfer
from convoy.plans.layout import Indices, Split
from convoy.plans.mesh import Axes
from convoy.plans.place import Placement


def cross_entropy(net: nn.Module, images: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy over the global batch, computed where the logits are.

    Equal to `torch.nn.functional.cross_entropy` of the plain network; its gradient needs no weight of the ranks' own.
    Worth it where the last layer is divided by `filter` and has many classes; right under every plan.

    >>> loss = convoy.cross_entropy(net, images[mine], labels[mine], label_smoothing=0.1)
    >>> loss.backward()

    Args:
        net: what `convoy.parallelize` returned; its output must be one tensor of logits.
        images: this rank's samples, [samples, channels, height, width].
        labels: classes of this rank's samples, int64 [samples]; there is no `ignore_index`.
        label_smoothing: share of the target that is spread over all classes evenly (Szegedy et al., 2016).

    Returns:
        A scalar, the same on every rank.
    """
    network = network_of(net)
    outputs, placement = network.undivided_forward(images)
    if len(outputs) != 1 or next(iter(outputs.values())).dim() != 2:
        raise ConvoyError("cross_entropy needs a network whose only output is logits [samples, classes]")
    ((name, logits),) = outputs.items()
    num_classes = placement.graph.shape(name)[1]
    _check_labels(labels, num_classes)
    rows = placement.output_layouts[name].split(0)
    labels = _move_rows(labels, placement, rows, network.groups)
    losses = _losses(logits, labels, placement, name, network.groups, label_smoothing)
    loss: Tensor = _AddOver.apply(losses.sum() / placement.batch.num_samples, rows.axes if rows else (), network.groups)
    return loss


def _check_labels(labels: Tensor, num_classes: int) -> None:
    """Refuse labels that are no class. A GPU does so itself, as in torch's cross-entropy: nobody waits for it."""
    if labels.is_cuda:
        labels.new_empty(num_classes).gather(0, labels)
    elif len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < num_classes):
        raise ConvoyError(
            f"labels go from {int(labels.min())} to {int(labels.max())}, but the classes are 0 to {num_classes - 1}: "
            "leave samples without a class out"
        )


def _move_rows(x: Tensor, placement: Placement, rows: Split | None, groups: Groups) -> Tensor:
    """Numbers of every rank's own samples to where the rows of the logits are."""
    batch = placement.batch.split(placement.batch.axes)
    own, target = (Layout.of({0: split} if split else {}) for split in (batch, rows))
    shape = (placement.batch.num_samples,)
    steps = transfer(own, target, groups.mesh, shape)
    return redistribute(steps, groups.mesh, groups.coordinates, groups, shape)(x)


def _losses(
    logits: Tensor, labels: Tensor, placement: Placement, name: str, groups: Groups, label_smoothing: float
) -> Tensor:
    """Cross-entropy of every row, [rows]."""
    num_classes = placement.graph.shape(name)[1]
    layout = placement.output_layouts[name]
    split = layout.split(1)
    classes = layout.parts(1, groups.mesh, groups.coordinates, num_classes)
    where = _positions(labels, classes, num_classes)
    axes = split.axes if split else ()
    return _CrossEntropy.apply(logits, where, groups.of(axes), num_classes, label_smoothing)  # type: ignore[no-any-return]


def _positions(labels: Tensor, classes: Indices, num_classes: int) -> Tensor:
    """Where each label's logit is among this rank's classes, -1 where another rank has it."""
    if isinstance(classes, range):
        inside = (labels >= classes.start) & (labels < classes.stop)
        return torch.where(inside, labels - classes.start, -1)
    return _table(classes, num_classes, labels.device)[labels]


@functools.lru_cache(maxsize=64)
def _table(classes: tuple[int, ...], num_classes: int, device: torch.device) -> Tensor:
    """The places of all classes among some of them, on a device where lists are not to be copied in every pass."""
    table = torch.full((num_classes,), -1, dtype=torch.int64)
    table[torch.tensor(classes)] = torch.arange(len(classes))
    return table.to(device)


class _CrossEntropy(torch.autograd.Function):
    """Rows' losses from this rank's classes: log Σ exp(z) − (1 − ε)·z[label] − ε·mean(z)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, where: Tensor, group: Any, num_classes: int, smoothing: float) -> Tensor:
        z = logits if logits.dtype == torch.float64 else logits.float()
        top = z.amax(1) if z.shape[1] else z.new_full((len(z),), -torch.inf)
        top = all_gather(top, group).amax(0)
        p = torch.exp(z - top[:, None])
        mine = where >= 0
        target = torch.where(mine, z.gather(1, where.clamp(min=0)[:, None])[:, 0], 0.0) if z.shape[1] else top * 0
        total, target, mean = all_reduce(torch.stack([p.sum(1), target, z.sum(1) / num_classes]), group)
        ctx.save_for_backward(p.div_(total[:, None]), where)
        ctx.options = num_classes, smoothing, logits.dtype
        losses: Tensor = top + total.log() - (1.0 - smoothing) * target - smoothing * mean
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        p, where = ctx.saved_tensors
        num_classes, smoothing, dtype = ctx.options
        z = p - smoothing / num_classes
        if z.shape[1]:
            own, place = (where >= 0).to(z.dtype), where.clamp(min=0)[:, None]
            z.scatter_(1, place, z.gather(1, place) - ((1.0 - smoothing) * own)[:, None])
        return (z * gradient[:, None]).to(dtype), None, None, None, None


class _AddOver(torch.autograd.Function):
    """The sum over ranks; each rank's term has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, groups: Groups) -> Tensor:
        return all_reduce(x.clone(), groups.of(axes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None
