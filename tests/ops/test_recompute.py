"""Where the calls that are computed again are cut, and what is said of the memory."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from torch import nn

from convoy.errors import ConvoyError
from convoy.graph.graph import Ref
from convoy.graph.tree import leaves
from convoy.ops import capture, place
from convoy.ops import recompute as recomputation
from convoy.ops.recompute import KeptTensors, check_recompute, recomputing, stretches
from convoy.plans.place import Batch, Placement
from convoy.plans.plan import Plan


def placed(model: nn.Module, shape: tuple[int, ...], recompute=True) -> Placement:
    graph = recomputing(capture(model, [shape], training=True), recompute)
    plan = Plan.parse("serial")
    outputs = [ref.name for ref in leaves(graph.output, Ref)]
    return place(graph, plan, Batch(plan.mesh, (), (range(shape[0]),)), outputs)


def chain(length: int, width: int = 4) -> nn.Sequential:
    blocks = (layer for _ in range(length) for layer in (nn.Conv2d(width, width, 3, padding=1), nn.Sigmoid()))
    return nn.Sequential(*blocks)


def test_no_cuts_have_a_smaller_peak():
    """Against all cuts of a short network of layers of many sizes."""
    widths = [int(w) for w in np.random.default_rng(0).integers(1, 40, 6)]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Conv2d(a, b, 1), nn.Sigmoid())]
    placement = placed(nn.Sequential(*layers), (2, widths[0], 4, 4))
    tensors, count = KeptTensors(placement), len(placement.calls)

    def peak(cuts: tuple[int, ...]) -> int:
        held, most = set(), 0
        for start, stop in pairwise((0, *cuts, count)):
            part = range(start, stop)
            held |= recomputation.inputs_of(placement, tensors, part)
            both = held | recomputation.kept_in(tensors, part)
            most = max(most, sum(map(size_of, both)))
        return most

    def size_of(kept) -> int:
        return int(np.prod(placement.graph.shape(kept.value))) * kept.itemsize

    every = (cuts for number in range(count) for cuts in combinations(range(1, count), number))
    found = recomputation._Stretches(placement, tensors)
    assert peak(tuple(part.start for part in found.cuts if part.start)) == min(map(peak, every))


def test_only_some_layers():
    placement = placed(chain(8), (2, 4, 8, 8), ("2", "3", "4", "5"))
    assert [(stretch.start, stretch.stop) for stretch in stretches(placement)] == [(2, 6)]
    assert not stretches(placed(chain(8), (2, 4, 8, 8), ("15",))), "the last layer's are needed at once"
    with pytest.raises(ConvoyError, match=r"the pattern layr1.\* matches no layer .* did you mean layer1.\*\?"):
        check_recompute(("layr1.*",), ["layer1.0", "layer2.0"])
