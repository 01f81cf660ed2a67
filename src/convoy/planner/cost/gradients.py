"""What an update costs beside the network: the optimizer, and the messages in which gradients are added up."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from convoy.planner.cost.link import Message
from convoy.plans.buckets import Item, Sizes, plan_buckets
from convoy.plans.layout import WHOLE, Layout
from convoy.plans.mesh import Axes
from convoy.plans.place import Placement


@dataclass(frozen=True)
class Update:
    """Seconds of an optimizer on a device, and the memory of its state."""

    per_byte: float = 0.0  # of the parameters: one pass over weights, gradients and state
    per_tensor: float = 0.0
    fixed: float = 0.0  # with whatever else is done once in an update
    state: float = 1.0  # bytes of state for each byte of a parameter: 1 for a momentum, 2 for Adam's two averages
    host: float = 0.0  # for the host to issue it once, with whatever else it does once in an update
    host_per_tensor: float = 0.0

    def seconds(self, num_bytes: float, tensors: int) -> float:
        """Of the optimizer, without what is done once."""
        return self.per_byte * num_bytes + self.per_tensor * tensors

    def issuing(self, tensors: int) -> float:
        return self.host + self.host_per_tensor * tensors

    @staticmethod
    def fit(measured: Sequence[tuple[int, int, float]], *, state: float = 1.0) -> "Update":
        """From measured updates: bytes of the parameters, how many they are, and seconds. The rates for a byte and for
        a tensor are the least squares of relative errors."""
        rows = [(num_bytes / seconds, tensors / seconds) for num_bytes, tensors, seconds in measured if seconds > 0]
        per_byte, per_tensor = least_squares(rows, [1.0] * len(rows))
        return Update(per_byte, per_tensor, state=state)


def issuing(measured: Sequence[tuple[int, float]]) -> list[float]:
    """Seconds of a host once and for each parameter, from the number of parameters and its seconds for some updates."""
    return least_squares([(1.0, float(tensors)) for tensors, _ in measured], [seconds for _, seconds in measured])


def least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float], count: int = 2) -> list[float]:
    """The `count` rates by which the rows come nearest to the targets; of one that would be below zero the column
    goes."""
    rates, columns = [0.0] * count, list(range(count))
    while rows and columns:
        solution = np.linalg.lstsq(np.array(rows)[:, columns], np.array(targets), rcond=None)[0].tolist()
        if min(solution) >= 0:
            for column, rate in zip(columns, solution, strict=True):
                rates[column] = rate
            break
        columns.remove(columns[solution.index(min(solution))])
    return rates


@dataclass(frozen=True)
class GradientMessage(Message):
    """One message of the exchange, over the axes over which its gradients are added."""

    layer: str  # the first of those whose gradients are in it
    parameters: tuple[str, ...]  # none in a message that only counts users
    # bytes that each rank copies into it and out of it again; 0 where the gradient itself is sent
    copied: tuple[int, ...]

    @property
    def name(self) -> str:
        more = f" and {len(self.parameters) - 1} more" if len(self.parameters) > 1 else ""
        return f"{self.parameters[0]}{more}" if self.parameters else "users"


@dataclass(frozen=True)
class Exchange:
    """How the gradients of a step are added."""

    messages: tuple[GradientMessage, ...]  # in the order in which they are sent
    held: tuple[int, ...]  # bytes of parameters of each rank
    tensors: int  # number of parameters


def exchange(placement: Placement, order: Sequence[str], sizes: Sizes) -> Exchange:
    """The messages of `engine.gradients.reducer`. `order` names the parameters that ranks hold, as their gradients
    become ready."""
    graph, mesh = placement.graph, placement.mesh
    held = held_bytes(placement, order)
    axes_of = {name: axes for name in order if (axes := gradient_axes(placement, name))}
    names = list(axes_of)
    dtypes = [graph.values[name].dtype for name in names]
    items = [
        Item(axes_of[name], dtype, torch.device("meta"), max(held[name]) // dtype.itemsize)
        for name, dtype in zip(names, dtypes, strict=True)
    ]
    layers: dict[str, str] = {}
    for placed in placement.calls:
        for name in placed.call.inputs:
            layers.setdefault(name, placed.call.layer)
    messages = []
    for bucket in plan_buckets(items, range(len(items)), sizes):
        members = tuple(names[member] for member in bucket.members)
        itemsize = items[(bucket.members or bucket.tally)[0]].dtype.itemsize
        layer = layers.get(members[0], "") if members else ""
        by_rank = tuple(sum(held[name][rank] for name in members) for rank in range(mesh.num_devices))
        sent = tuple(size + len(bucket.tally) * itemsize for size in by_rank)
        copies = (0,) * len(by_rank) if bucket.alone else by_rank
        messages.append(GradientMessage(bucket.axes, "all_reduce", sent, layer, members, copies))
    whole = tuple(sum(row[rank] for row in held.values()) for rank in range(mesh.num_devices))
    return Exchange(tuple(messages), whole, len(held))


def gradient_axes(placement: Placement, name: str) -> Axes:
    """The axes of several ranks over which a parameter's gradient is added."""
    layout, sizes = placement.layouts.get(name, WHOLE), placement.mesh.sizes
    return tuple(sorted(axis for axis in layout.copied if sizes[axis] > 1))


def weights_of(placement: Placement) -> list[str]:
    """The parameters that ranks hold, in the order of the network: of a stage its own, else all, used or not."""
    names = (value.name for value in placement.graph.parameters())
    return [name for name in names if name in placement.layouts or not placement.is_part]


def held_bytes(placement: Placement, parameters: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The bytes of some parameters on each rank."""
    mesh = placement.mesh
    places = [mesh.coordinates(rank) for rank in range(mesh.num_devices)]
    numels: dict[tuple[Layout, tuple[int, ...]], tuple[int, ...]] = {}  # blocks repeat
    by_name = {}
    for value in map(placement.graph.values.__getitem__, parameters):
        layout = placement.layouts.get(value.name, WHOLE)
        if (layout, value.shape) not in numels:
            numels[layout, value.shape] = tuple(prod(layout.local_shape(value.shape, mesh, place)) for place in places)
        by_name[value.name] = tuple(numel * value.dtype.itemsize for numel in numels[layout, value.shape])
    return by_name
