"""Local response normalization: each channel needs its neighbors (Krizhevsky et al., 2012, section 3.3)."""

import torch.nn.functional as F
from torch import Tensor

from convoy.graph.graph import Recognized, TorchCall
from convoy.ops.kernel import Kernel, Site
from convoy.ops.layouts import Follow, by_dim
from convoy.ops.operation import Operation, keeps_input
from convoy.plans.layout import Split
from convoy.plans.place import Placed, Situation
from convoy.plans.windows import Window, halo_split


def _lrn(call: TorchCall) -> Recognized:
    return Recognized("lrn", call.bound(input=None, size=1, alpha=1e-4, beta=0.75, k=1.0))


def place(situation: Situation) -> Placed:
    """Where ranks hold consecutive channels, each asks for a few more on both sides; otherwise for all channels."""
    size, total = situation.call.attributes["size"], situation.shape(situation.call.attributes["input"])[1]
    window = Window(total, size, before=size // 2, after=(size - 1) // 2)

    def follow(dim: int, split: Split) -> Follow:
        if dim != 1:
            return split, (dim, split)
        if not all(isinstance(part, range) for part in split.parts):
            return ""
        return halo_split(window, split), (dim, split)

    return by_dim(situation, follow)


def _build(site: Site) -> Kernel:
    """Normalizes the channels of the rank's input, neighbours included, and gives its own."""
    call = site.call
    source = call.attributes["input"]
    size, alpha, beta, k = (call.attributes[name] for name in ("size", "alpha", "beta", "k"))
    input_channels, output_channels = site.parts(source, 1), site.parts(call.outputs[0], 1)
    start = output_channels[0] - input_channels[0] if output_channels else 0
    is_cut = len(output_channels) < len(input_channels)

    def kernel(x: Tensor) -> list[Tensor]:
        y = F.local_response_norm(x, size, alpha, beta, k) if x.numel() else x.clone()
        return [y.narrow(1, start, len(output_channels)) if is_cut else y]

    return kernel


OPERATIONS = (
    Operation(
        "lrn",
        place,
        {"local_response_norm": _lrn},
        _build,
        keeps=keeps_input,
        keeps_inside=3,
        follows=True,
        passes=4.0,
        options=("size",),
        whole_precision=frozenset({"cpu", "cuda"}),
    ),
)
