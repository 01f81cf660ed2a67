"""What there is to choose among: meshes for a number of devices, and strategies on a mesh."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from convoy.plans.mesh import Axes, Mesh
from convoy.plans.place import COMPUTE

AXIS_STRATEGIES = ("sample", "replicate", "filter", "channel", "height", "width")
"""What a layer may have on one axis; of equal ones the first is kept."""

CHOOSING = (*COMPUTE, "random")
"""Kinds of calls whose rules look at the strategy of their layer."""

Strategy = tuple[str, ...]
"""One strategy for each axis of a mesh."""


def meshes(num_devices: int, max_axes: int = 2) -> list[Mesh]:
    """All meshes of so many devices: every ordered factorisation, the last axis between neighbours.

    The axes are called `gpu`, or `node` and `gpu`. One device is a mesh without axes.
    """
    names = {1: ("gpu",), 2: ("node", "gpu"), 3: ("group", "node", "gpu")}
    found = [Mesh((), ())] if num_devices == 1 else []
    for count in range(1, max_axes + 1):
        for sizes in _factorisations(num_devices, count):
            found.append(Mesh(names[count], sizes))
    return found


def _factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered products of `count` factors from 2."""
    if count == 1:
        if number > 1:
            yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            for rest in _factorisations(number // first, count - 1):
                yield (first, *rest)


def sample_axes_of(mesh: Mesh) -> list[Axes]:
    """All sets of axes that may divide the samples, the largest first."""
    axes = tuple(mesh.axes)
    return [chosen for count in range(len(axes), -1, -1) for chosen in itertools.combinations(axes, count)]


def strategies(mesh: Mesh, axes: Axes, among: Sequence[str] = AXIS_STRATEGIES) -> list[Strategy]:
    """All combinations of strategies on a mesh whose samples are divided over `axes` at most.

    Args:
        mesh: the devices.
        axes: those that may divide the samples.
        among: what a layer may have on an axis.
    """
    choices = [
        [strategy for strategy in AXIS_STRATEGIES if strategy in among and (strategy != "sample" or axis in axes)]
        for axis in mesh.axes
    ]
    return list(itertools.product(*choices))


def used_axes(layers: Mapping[str, Strategy], ops: Mapping[str, str]) -> Axes:
    """The axes on which some layer with weights is divided by samples.

    Args:
        layers: the strategy of every layer.
        ops: its kind of work.
    """
    given = [strategy for layer, strategy in layers.items() if ops[layer] != "random"]
    return tuple(axis for axis in range(len(given[0]) if given else 0) if any(s[axis] == "sample" for s in given))
