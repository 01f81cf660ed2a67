"""Padding: constant padding of a divided dimension grows the parts at its ends."""

import torch.nn.functional as F

from convoy.graph.graph import Recognized, TorchCall
from convoy.ops.kernel import Kernel, Site, as_called, flat_padding, guarded
from convoy.ops.layouts import Follow, by_dim
from convoy.ops.operation import Operation
from convoy.plans.layout import Indices, Split, indices
from convoy.plans.place import Placed, Situation


def _pad(call: TorchCall) -> Recognized:
    arguments = call.bound(input=None, pad=(), mode="constant", value=None)
    rank, sizes = len(call.output), tuple(arguments["pad"])
    pairs = [(sizes[i], sizes[i + 1]) for i in range(0, len(sizes), 2)]
    pads = ((0, 0),) * (rank - len(pairs)) + tuple(reversed(pairs))
    value = 0.0 if arguments["value"] is None else arguments["value"]
    return Recognized("pad", {"input": call.input, "pads": pads, "mode": arguments["mode"], "value": value})


def place(situation: Situation) -> Placed:
    """Nothing is sent for constant padding; other modes, and negative padding, need the padded dimensions whole."""
    attributes = situation.call.attributes
    shape = situation.shape(attributes["input"])

    def follow(dim: int, split: Split) -> Follow:
        pads = attributes["pads"][dim]
        if pads == (0, 0):
            return split, (dim, split)
        if attributes["mode"] != "constant" or min(pads) < 0:
            kind = "negative" if min(pads) < 0 else attributes["mode"]
            return f"{kind} padding of a divided dimension: it is whole"
        return split, (dim, Split(split.axes, tuple(padded(part, shape[dim], *pads) for part in split.parts)))

    return by_dim(situation, follow)


def ends(part: Indices, size: int, before: int, after: int) -> tuple[int, int]:
    """Padding at the two ends of a part: added rows go to the parts that hold the first and the last index."""
    return before if 0 in part else 0, after if size - 1 in part else 0


def padded(part: Indices, size: int, before: int, after: int) -> Indices:
    """The indices in the padded tensor that go with a part of the tensor."""
    first, last = ends(part, size, before, after)
    return indices([*range(first), *(before + index for index in part), *range(before + size, before + size + last)])


def _build(site: Site) -> Kernel:
    """The ranks that hold the ends of a divided dimension pad it there."""
    call = site.call
    source, pads = call.attributes["input"], call.attributes["pads"]
    shape = site.graph.shape(source)
    if not any(any(pads[dim]) for dim, _ in site.layouts[source].splits):
        return guarded(site, as_called(site))
    flat = flat_padding(ends(site.parts(source, dim), size, *pads[dim]) for dim, size in enumerate(shape))
    return lambda x: [F.pad(x, flat, value=call.attributes["value"]) if any(flat) else x]


OPERATIONS = (Operation("pad", place, {"pad": _pad}, _build, options=("mode",)),)
