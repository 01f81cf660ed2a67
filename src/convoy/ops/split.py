"""Chunks of a tensor: along a divided dimension each chunk is held by the ranks that hold its indices."""

from torch import Tensor

from convoy.graph.torch_call import Recognized, TorchCall
from convoy.ops.kernel import Kernel, Site, taking
from convoy.ops.operation import Operation
from convoy.ops.select import places, within
from convoy.plans.layout import Layout, Split, consecutive
from convoy.plans.place import Placed, Situation


def _split(call: TorchCall) -> Recognized:
    whole = call.shape(call.input)
    found = call.bound(input=None, pieces=None, dim=0)
    dim = found["dim"] % len(whole)
    return Recognized(
        "split", {"input": call.input, "dim": dim, "sizes": tuple(out.shape[dim] for out in call.outputs)}
    )


def place(situation: Situation) -> Placed:
    """Nothing is sent; a rank may be left with nothing of some chunk."""
    call = situation.call
    source = call.attributes["input"]
    given = situation.given.get(source, Layout())
    dim = call.attributes["dim"] % len(situation.shape(source))
    others = {other: split for other, split in given.splits if other != dim}
    divided = given.split(dim)
    outputs = {}
    for name, chunk in zip(call.outputs, consecutive(call.attributes["sizes"]), strict=True):
        splits = dict(others)
        if divided is not None:
            splits[dim] = Split(divided.axes, tuple(within(part, chunk) for part in divided.parts))
        outputs[name] = Layout.of(splits)
    return Placed({source: Layout.of(dict(given.splits))}, outputs)


def _build(site: Site) -> Kernel:
    """Of each chunk the rank's own indices."""
    attributes = site.call.attributes
    source = attributes["input"]
    dim = attributes["dim"] % len(site.graph.shape(source))
    part = site.parts(source, dim)
    chunks = [taking(dim, places(part, chunk), len(part)) for chunk in consecutive(attributes["sizes"])]

    def kernel(x: Tensor) -> list[Tensor]:
        return [chunk(x) for chunk in chunks]

    return kernel


OPERATIONS = (
    Operation(
        "split",
        place,
        dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split"), _split),
        _build,
        is_slice=True,
    ),
)
