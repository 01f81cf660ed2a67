"""What there is to choose: meshes for a number of devices, and the strategies that a layer may have on a mesh."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph
from convoy.plans.mesh import Axes, Mesh
from convoy.plans.place import COMPUTE
from convoy.plans.rules import RULES, Batch, Placed, Situation

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


def allowed(
    graph: Graph, mesh: Mesh, batch: Batch, calls: Iterable[Call], given: Iterable[Strategy], narrow: bool = True
) -> list[Strategy]:
    """Those of the strategies that a layer can have and that differ from each other.

    Left out, with the proof that nothing is lost: what the rules refuse; what asks for the same layouts and gives the
    same as another strategy; and `height` and `width` of linear layers on vectors, whose rule then does what
    `sample` or `replicate` does, whichever the input is in already.

    Args:
        calls: of the layer, those whose rules look at its strategy.
        given: the candidates.
        narrow: leave out what is no more than another one; what is refused is left out in any case.

    Raises:
        ConvoyError: the layer can have none of them; the rule's own sentence.
    """
    found: dict[tuple[object, ...], Strategy] = {}
    refused: ConvoyError | None = None
    calls = list(calls)
    vectors = len(calls) == 1 and calls[0].op == "linear" and len(graph.shape(calls[0].attributes["input"])) <= 2
    drawing = all(call.op == "random" for call in calls)
    for strategy in given:
        if drawing:  # by samples or not at all
            strategy = tuple("sample" if each == "sample" else "replicate" for each in strategy)
        if narrow and vectors and {"height", "width"} & set(strategy):
            continue
        try:
            results = tuple(_frozen(place_call(graph, mesh, batch, call, strategy), call) for call in calls)
        except ConvoyError as error:
            refused = error
            continue
        found.setdefault(results if narrow else strategy, strategy)
    if not found and refused is not None:
        raise refused
    return list(found.values())


def place_call(graph: Graph, mesh: Mesh, batch: Batch, call: Call, strategy: Strategy) -> Placed:
    """What a rule says where nothing is known of the input."""
    return RULES[call.op](Situation(graph, mesh, batch, call, strategy, {}))


def _frozen(placed: Placed, call: Call) -> tuple[object, ...]:
    # a linear layer's rule follows its input in other dimensions under height and width: they stay apart
    return (tuple(sorted(placed.inputs.items(), key=lambda item: item[0])), tuple(placed.outputs.items()))
